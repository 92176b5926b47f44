//! The main paths, each a function of its own, for counting instructions under callgrind; `scripts/instructions` runs
//! this.
//!
//! Every path runs the same number of times in every build, so that totals can be compared. Times nothing.

use specrs_core::philox::{Purpose, fill_gumbel};
use specrs_core::sampling::{Sampler, SamplingParams};
use specrs_core::{BlockHasher, BlockPool, SlotMapper};
use std::hint::black_box;

#[path = "support/engine.rs"]
mod engine;
use engine::Engine;

/// Defines a path: a function that is never inlined, so that callgrind can start and stop counting at its call.
macro_rules! path {
    ($name:ident($($arg:ident: $type:ty),*) $body:block) => {
        #[inline(never)]
        fn $name($($arg: $type),*) $body
    };
}

path!(count_allocate_free(pool: &mut BlockPool, held: &mut Vec<i64>) {
    held.extend((0..64).map(|_| pool.allocate().expect("a free block")));
    for block in held.drain(..).rev() {
        pool.free(block).expect("a held block");
    }
});

path!(count_hash_blocks(hasher: &BlockHasher, tokens: &[i64]) {
    black_box(tokens.chunks_exact(16).fold(hasher.root(b""), |parent, block| hasher.chain(parent, block)));
});

path!(count_map_range(mapper: SlotMapper, table: &[i64], out: &mut [i64]) {
    mapper.map_range(black_box(table), 3, out);
});

path!(count_map_batch(mapper: SlotMapper, tables: &[i64], q_start: &[i64], positions: &[i64], out: &mut [i64]) {
    mapper.map_batch(black_box(tables), q_start, positions, out).expect("matching lengths");
});

path!(count_draw_top_p(sampler: &mut Sampler, row: &[f32], params: &SamplingParams) {
    black_box(sampler.draw(row, params, 7, 100, Purpose::Draft).expect("a row of the vocabulary"));
});

path!(count_fill_gumbel(out: &mut [f32]) {
    fill_gumbel(7, black_box(100), Purpose::Gumbel, out);
});

/// Number of runs of each path.
const RUNS: u64 = 100;

fn main() {
    let mut engines = [false, true].map(|kv_events| Engine::with_kv_events(64, 2, kv_events));
    let mut evicting = [false, true].map(|kv_events| Engine::evicting(64, 2, kv_events));
    let mut pool = BlockPool::new(1024).expect("a valid size");
    let mut held = Vec::with_capacity(64);
    let hasher = BlockHasher::new(&[7; 16]);
    let tokens: Vec<i64> = (0..4096).map(|i| i * 31 % 150_000).collect();
    let mapper = SlotMapper::new(16).expect("a valid size");
    let table: Vec<i64> = (0..1024).map(|i| (i * 389) % 1024).collect();
    let mut slots = vec![0; 8192];
    let (requests, rows) = (256, 6);
    let q_start: Vec<i64> = (0..=requests).map(|b| b * rows).collect();
    let positions: Vec<i64> = (0..requests).flat_map(|b| (0..rows).map(move |i| 31 * b + i)).collect();
    let tables: Vec<i64> = (0..requests * 512).collect();
    let mut batch_slots = vec![0; positions.len()];
    let mut sampler = Sampler::new(2048).expect("a valid size");
    let mut row = vec![0.0_f32; 2048];
    fill_gumbel(3, 0, Purpose::Recover, &mut row);
    let params = SamplingParams {
        greedy: false,
        temperature: 0.4,
        top_k: f32::INFINITY,
        top_p: 0.9,
        log_min_p: f32::NEG_INFINITY,
    };
    let mut noise = vec![0.0_f32; 2048];
    for _ in 0..RUNS {
        engines.iter_mut().chain(&mut evicting).for_each(Engine::step);
        count_allocate_free(&mut pool, &mut held);
        count_hash_blocks(&hasher, &tokens);
        count_map_range(mapper, &table, &mut slots);
        count_map_batch(mapper, &tables, &q_start, &positions, &mut batch_slots);
        count_draw_top_p(&mut sampler, &row, &params);
        count_fill_gumbel(&mut noise);
    }
    black_box((&slots, &batch_slots, &noise));
}
