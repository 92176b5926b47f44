//! Benchmark of the slots of a prefill chunk of 8192 positions, and of a flat decode batch of 256 requests by 6 rows.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use specrs_core::SlotMapper;
use std::hint::black_box;

fn bench(c: &mut Criterion) {
    let mut group = c.benchmark_group("slot_mapper");
    let mapper = SlotMapper::new(16).expect("a valid size");

    let table: Vec<i64> = (0..1024).map(|i| (i * 389) % 1024).collect();
    let positions: Vec<i64> = (3..8195).collect();
    let mut out = vec![0; positions.len()];
    group.throughput(Throughput::Elements(positions.len() as u64));
    group.bench_function("map_range 8192", |b| {
        b.iter(|| mapper.map_range(black_box(&table), 3, &mut out));
    });
    group.bench_function("map 8192", |b| {
        b.iter(|| mapper.map(black_box(&table), &positions, &mut out).expect("matching lengths"));
    });

    let (requests, rows, width) = (256, 6, 512);
    let tables: Vec<i64> = (0..requests * width).collect();
    let q_start: Vec<i64> = (0..=requests).map(|b| b * rows).collect();
    let positions: Vec<i64> = (0..requests).flat_map(|b| (0..rows).map(move |i| 31 * b + i)).collect();
    let mut out = vec![0; positions.len()];
    group.throughput(Throughput::Elements(positions.len() as u64));
    group.bench_function("map_batch 256x6", |b| {
        b.iter(|| mapper.map_batch(black_box(&tables), &q_start, &positions, &mut out).expect("matching lengths"));
    });
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
