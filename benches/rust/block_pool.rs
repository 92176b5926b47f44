//! Benchmark of one block through its life, in pools of up to a million blocks in random order, so that lists are
//! walked as after hours of serving; and of the hashes of a long prompt's blocks.

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use specrs_core::{BlockHasher, BlockPool};
use std::hint::black_box;

const NUM_BLOCKS: usize = 100_000;
const BATCH: usize = 1000;

/// Makes a pool whose free blocks are in random order. With `cached`, all blocks are in the prefix cache instead, and
/// none is free.
fn shuffled_pool(num_blocks: usize, cached: bool) -> BlockPool {
    let mut pool = BlockPool::new(num_blocks).expect("a valid size");
    let mut held: Vec<i64> = (0..num_blocks).map(|_| pool.allocate().expect("a free block")).collect();
    let mut state = 1_u64;
    for i in (1..held.len()).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        held.swap(i, (state >> 33) as usize % (i + 1));
    }
    for block in held {
        if cached {
            assert!(pool.register(block, hash(block)).expect("a held block"));
        }
        pool.free(block).expect("a held block");
    }
    pool
}

fn hash(block: i64) -> u128 {
    u128::from(block as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835)
}

fn bench(c: &mut Criterion) {
    let mut group = c.benchmark_group("block_pool");
    group.throughput(Throughput::Elements(BATCH as u64));

    for num_blocks in [10_000, 100_000, 1_000_000] {
        let mut pool = shuffled_pool(num_blocks, false);
        let mut held = Vec::with_capacity(BATCH);
        group.bench_function(format!("allocate+free, {num_blocks} blocks"), |b| {
            b.iter(|| {
                held.extend((0..BATCH).map(|_| pool.allocate().expect("a free block")));
                for block in held.drain(..).rev() {
                    pool.free(block).expect("a held block");
                }
            });
        });
    }

    let mut pool = shuffled_pool(NUM_BLOCKS, true);
    group.bench_function("lookup+share+free", |b| {
        b.iter(|| {
            for block in 0..BATCH as i64 {
                let hit = pool.lookup(hash(block * 97)).expect("a cached block");
                pool.share(hit).expect("a cached block");
                pool.free(hit).expect("a held block");
            }
        });
    });

    let cached = shuffled_pool(NUM_BLOCKS, true);
    group.bench_function("evict+register+mark+free", |b| {
        b.iter_batched_ref(
            || cached.clone(),
            |pool| {
                for i in 0..BATCH as i64 {
                    let block = pool.allocate().expect("a cached block");
                    pool.register(block, hash(NUM_BLOCKS as i64 + i)).expect("a held block");
                    pool.mark_draft(block).expect("a registered block");
                    pool.free(block).expect("a held block");
                }
            },
            BatchSize::LargeInput,
        );
    });

    let hasher = BlockHasher::new(&[7; 16]);
    let prompt: Vec<i64> = (0..50_000).map(|i| i * 31 % 150_000).collect();
    group.throughput(Throughput::Elements(prompt.len() as u64));
    group.bench_function("hash 50,000 tokens in blocks of 16", |b| {
        b.iter(|| {
            black_box(&prompt).chunks_exact(16).fold(hasher.root(b""), |parent, block| hasher.chain(parent, block))
        });
    });
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
