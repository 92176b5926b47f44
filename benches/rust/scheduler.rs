//! Benchmark of one step on the host: `plan` + `settle` of `support/engine.rs`, by batch and steps in flight.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::time::Duration;

#[path = "support/engine.rs"]
mod engine;
use engine::{Engine, K};

fn bench(c: &mut Criterion) {
    for max_in_flight in [1, 2] {
        let mut group = c.benchmark_group(format!("scheduler K={K} in_flight={max_in_flight}"));
        group.sample_size(20);
        for batch in [8, 64, 256, 1024, 4096] {
            group.throughput(Throughput::Elements(batch as u64));
            let mut engine = Engine::new(batch, max_in_flight);
            for part in ["plan", "settle", "plan+settle"] {
                group.bench_function(format!("{part}/{batch}"), |b| {
                    b.iter_custom(|steps| {
                        (engine.plan_time, engine.settle_time) = (Duration::ZERO, Duration::ZERO);
                        for _ in 0..steps {
                            engine.step();
                        }
                        match part {
                            "plan" => engine.plan_time,
                            "settle" => engine.settle_time,
                            _ => engine.plan_time + engine.settle_time,
                        }
                    });
                });
            }
        }
        group.finish();
    }
    let mut group = c.benchmark_group(format!("scheduler K={K} in_flight=1 batch=256"));
    group.sample_size(20).throughput(Throughput::Elements(256));
    for (name, kv_events) in [("no KV events", false), ("KV events", true)] {
        let mut engine = Engine::with_kv_events(256, 1, kv_events);
        group.bench_function(name, |b| {
            b.iter_custom(|steps| {
                (engine.plan_time, engine.settle_time) = (Duration::ZERO, Duration::ZERO);
                for _ in 0..steps {
                    engine.step();
                }
                engine.plan_time + engine.settle_time
            });
        });
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
