//! One block through its life, in a pool of 100,000 blocks in random order, so that the lists are walked as after hours of serving.

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use specrs_core::{BlockHasher, BlockPool};
use std::hint::black_box;

const NUM_BLOCKS: usize = 100_000;
const BATCH: usize = 1000;

/// A pool whose free list has no order left; `cached` registers every block first.
fn shuffled_pool(cached: bool) -> BlockPool {
    let mut pool = BlockPool::new(NUM_BLOCKS).expect("a valid size");
    let mut held: Vec<i64> = (0..NUM_BLOCKS).map(|_| pool.allocate().expect("a free block")).collect();
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

    let mut pool = shuffled_pool(false);
    let mut held = Vec::with_capacity(BATCH);
    group.bench_function("allocate+free", |b| {
        b.iter(|| {
            held.extend((0..BATCH).map(|_| pool.allocate().expect("a free block")));
            for block in held.drain(..).rev() {
                pool.free(block).expect("a held block");
            }
        });
    });

    let mut pool = shuffled_pool(true);
    group.bench_function("lookup+share+free", |b| {
        b.iter(|| {
            for block in 0..BATCH as i64 {
                let hit = pool.lookup(hash(block * 97)).expect("a cached block");
                pool.share(hit).expect("a cached block");
                pool.free(hit).expect("a held block");
            }
        });
    });

    let cached = shuffled_pool(true);
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
    let tokens: Vec<i64> = (0..16).collect();
    group.bench_function("hash 16 tokens", |b| {
        b.iter(|| (0..BATCH).fold(hasher.root(b""), |parent, _| hasher.chain(parent, black_box(&tokens))));
    });
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
