//! Random values of one row: 2,048 tokens (target: Gumbel under 20 us) and the 151,936 of a large vocabulary.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use specrs_core::philox::{Purpose, fill_gumbel, fill_uniform};
use std::hint::black_box;

fn bench(c: &mut Criterion) {
    let mut group = c.benchmark_group("philox");
    for tokens in [2048, 151_936] {
        let mut out = vec![0.0_f32; tokens];
        group.throughput(Throughput::Elements(tokens as u64));
        group.bench_function(format!("fill_gumbel {tokens}"), |b| {
            b.iter(|| fill_gumbel(black_box(7), black_box(100), Purpose::Gumbel, &mut out));
        });
        group.bench_function(format!("fill_uniform {tokens}"), |b| {
            b.iter(|| fill_uniform(black_box(7), black_box(100), Purpose::Accept, &mut out));
        });
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
