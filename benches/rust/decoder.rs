//! Benchmark of one pass of the bundled pair's target and draft by rows, and of the product in it against what the core
//! can do.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use specrs_cpu::Isa;

#[path = "support/decoder.rs"]
mod support;
use support::{DRAFT, TARGET, Text};

fn bench(c: &mut Criterion) {
    let isa = Isa::detect();
    for (name, model) in [("target", TARGET), ("draft", DRAFT)] {
        for (kind, bf16, rows_too) in [("fp32", false, false), ("bf16", true, false), ("bf16 rows", true, true)] {
            for threads in [1, 2] {
                let mut group = c.benchmark_group(format!("{name} {kind} {} {threads} threads", isa.name()));
                let mut text = Text::new(model, bf16, rows_too, threads, isa);
                for rows in [1, 2, 4, 6, 8, 16, 48, 64] {
                    group.throughput(Throughput::Elements(rows as u64));
                    group.bench_function(format!("{rows} rows"), |b| b.iter(|| text.decode(rows)));
                }
                group.finish();
            }
        }
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
