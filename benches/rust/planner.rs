//! Benchmark of a planner's decision and its learning, for a step of requests with different acceptance, at K = 7.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use specrs_core::{CostLine, CostModel, SpeculationPlanner};
use std::hint::black_box;

const K: usize = 7;

/// Batch sizes with costs as they are where the target is bound by memory up to some 30 requests.
fn costs() -> CostModel {
    let batches = [1, 2, 4, 8, 16, 32, 64, 128, 256];
    let line = |&batch: &usize| {
        let target_ms = 16.0 + (batch as f64 - 30.0).max(0.0) * 0.1;
        CostLine { draft_ms: 1.2, target_ms, vanilla_ms: target_ms }
    };
    CostModel::lines(&batches, &batches.each_ref().map(line)).expect("allowed costs")
}

fn bench(c: &mut Criterion) {
    let mut group = c.benchmark_group(format!("planner K={K}"));
    group.sample_size(20);
    for batch in [1_usize, 8, 64, 256] {
        let mut planner = SpeculationPlanner::new(batch, K, costs(), 0.01).expect("allowed sizes");
        let rows: Vec<i64> = (0..batch as i64).collect();
        let (caps, lags) = (vec![K as i64; batch], vec![0; batch]);
        let mut ks = vec![0; batch];
        let mut turn = 0_i64;
        let mut step = |planner: &mut SpeculationPlanner, decide: bool, settle: bool| {
            if decide {
                planner.decide(black_box(&rows), &caps, &lags, &mut ks).expect("allowed arguments");
            }
            if settle {
                turn += 1;
                let accepted: Vec<i64> =
                    ks.iter().zip(&rows).map(|(&k, row)| ((turn * 7 + row * 5) % 8).min(k)).collect();
                planner.settle(&rows, &ks, &ks, &accepted, Some(20.0)).expect("allowed results");
            }
        };
        for _ in 0..100 {
            step(&mut planner, true, true);
        }
        group.throughput(Throughput::Elements(batch as u64));
        group.bench_function(format!("decide/{batch}"), |b| b.iter(|| step(&mut planner, true, false)));
        group.bench_function(format!("decide+settle/{batch}"), |b| b.iter(|| step(&mut planner, true, true)));
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
