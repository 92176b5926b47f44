//! Benchmark of a draft's draw and of a verification of 6 rows at T = 0.8, top-p 0.9, over 2,048 tokens and over
//! 151,936.

use criterion::{Criterion, criterion_group, criterion_main};
use specrs_core::philox::{Purpose, fill_gumbel};
use specrs_core::sampling::{Sampler, SamplingParams};
use std::hint::black_box;

const OFF: f32 = f32::INFINITY;

fn bench(c: &mut Criterion) {
    let mut group = c.benchmark_group("sampling");
    let top_p = SamplingParams { greedy: false, temperature: 0.8, top_k: OFF, top_p: 0.9, log_min_p: -OFF };
    for vocab_size in [2048, 151_936] {
        let mut sampler = Sampler::new(vocab_size).unwrap();
        // Logits with the spread of a language model's: 2.5 nats.
        let mut rows = vec![0.0_f32; 6 * vocab_size];
        for (position, row) in (0..).zip(rows.chunks_mut(vocab_size)) {
            fill_gumbel(3, position, Purpose::Recover, row);
            for x in row.iter_mut() {
                *x *= 2.0;
            }
        }
        let mut q = vec![0.0_f32; 5 * vocab_size];
        for (name, params) in [
            ("top-p", top_p),
            ("top-k", SamplingParams { top_k: 50.0, top_p: OFF, ..top_p }),
            ("unfiltered", SamplingParams { top_p: OFF, ..top_p }),
        ] {
            group.bench_function(format!("draw {name} {vocab_size}"), |b| {
                b.iter(|| {
                    sampler.draw(black_box(&rows[..vocab_size]), &params, 7, 100, Purpose::Draft).unwrap();
                    sampler.probabilities(&mut q[..vocab_size]).unwrap();
                });
            });
        }
        // Drafts that the target accepts: p = q at its own draws.
        let drafts: Vec<i64> = (0..5)
            .zip(rows.chunks(vocab_size).zip(q.chunks_mut(vocab_size)))
            .map(|(i, (row, q))| {
                let token = sampler.draw(row, &top_p, 7, 100 + i, Purpose::Gumbel).unwrap();
                sampler.probabilities(q).unwrap();
                i64::from(token)
            })
            .collect();
        group.bench_function(format!("verify_rejection, all accepted {vocab_size}"), |b| {
            b.iter(|| sampler.verify_rejection(black_box(&rows), &top_p, 7, 100, &drafts, &q).unwrap());
        });
        group.bench_function(format!("verify_coupled, all accepted {vocab_size}"), |b| {
            b.iter(|| sampler.verify_coupled(black_box(&rows), &top_p, 7, 100, &drafts).unwrap());
        });
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
