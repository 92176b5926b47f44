//! Test that the steady state does not allocate: while requests decode, `plan` and `settle` make no heap allocation.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use specrs_core::scheduler::layout::{
    FINISH_LENGTH, FINISH_NONE, HEADER_NUM_ADMITTED, HEADER_NUM_DECODE, HEADER_NUM_PREFILL, HEADER_STEP_ID,
};
use specrs_core::{CostModel, Drafter, PlanOutcome, RequestParams, Scheduler, SchedulerConfig, SpeculationPlanner};

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

/// Allocator that counts the allocations of each thread.
struct Counting;

// SAFETY: every call is passed on to the system's allocator as it came; counting touches a plain thread-local number.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promises are those of `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above; the pointer came from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: as above; the pointer came from `System`.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const BATCH: usize = 32;
const K: usize = 5;
const LIMIT: usize = 4000;

struct Host {
    scheduler: Scheduler,
    record: Vec<i64>,
    results: Vec<i64>,
    settled: Vec<i64>,
    steps: u64,
    /// Token limits of the requests, by row.
    limits: [i64; BATCH],
}

impl Host {
    fn new() -> Self {
        // Blocks for all and some more, which hold cached content when the batch comes: it evicts.
        let mut config = SchedulerConfig::new(BATCH, LIMIT, BATCH * LIMIT.div_ceil(16) + 200, 16, 4096);
        config.num_speculative_tokens = K;
        config.drafter = Drafter::draft_model(LIMIT, 1.0);
        let scheduler = Scheduler::new(config).unwrap();
        Self {
            record: vec![0; scheduler.record_layout().size],
            results: vec![0; scheduler.results_layout().size],
            settled: vec![0; scheduler.settled_layout().size],
            scheduler,
            steps: 0,
            limits: [0; BATCH],
        }
    }

    fn add(&mut self, id: i64, len: i64, limit: usize) {
        let prompt: Vec<i64> = (0..len).map(|i| id * 1000 + i).collect();
        let params = RequestParams { limit, num_speculative_tokens: K, ..RequestParams::default() };
        self.scheduler.add_request(id, &prompt, &params).unwrap();
    }

    /// Runs one step in which every sequence accepts `accepted` drafts. Returns the number of allocations in the two
    /// calls.
    fn step(&mut self, accepted: usize) -> usize {
        let before = ALLOCATIONS.get();
        let outcome = self.scheduler.plan(&mut self.record).unwrap();
        let planned = ALLOCATIONS.get() - before;
        assert!(matches!(outcome, PlanOutcome::Step(_)));
        let (record, results) = (*self.scheduler.record_layout(), *self.scheduler.results_layout());
        for i in 0..self.record[HEADER_NUM_ADMITTED] as usize {
            let row = self.record[record.admit_row.offset + i] as usize;
            self.limits[row] = self.record[record.admit_limit.offset + i];
        }
        let decode = self.record[HEADER_NUM_DECODE] as usize;
        for i in 0..decode + self.record[HEADER_NUM_PREFILL] as usize {
            let k = self.record[record.seq_k.offset + i] as usize;
            let emits = i < decode || self.record[record.chunk_is_last.offset + i - decode] == 1;
            let m = accepted.min(k);
            self.results[results.num_emitted.offset + i] = if emits { m as i64 + 1 } else { 0 };
            self.results[results.num_accepted.offset + i] = m as i64;
            self.results[results.num_drafted.offset + i] = k as i64;
            let n = self.record[record.seq_n_upper.offset + i] + if emits { m as i64 + 1 } else { 0 };
            let limit = self.limits[self.record[record.seq_row.offset + i] as usize];
            self.results[results.finish_reason.offset + i] = if n == limit { FINISH_LENGTH } else { FINISH_NONE };
            let tokens = results.tokens.offset + i * (K + 1);
            self.results[tokens..=tokens + m].fill((i * 7 + m) as i64);
        }
        self.steps += 1;
        assert_eq!(self.record[HEADER_STEP_ID] as u64, self.steps - 1);
        let before = ALLOCATIONS.get();
        self.scheduler.settle(self.steps - 1, &self.results, &mut self.settled).unwrap();
        planned + ALLOCATIONS.get() - before
    }
}

#[test]
fn a_decoding_batch_allocates_nothing() {
    let mut host = Host::new();
    // Leaves its blocks to the cache: 150 blocks of prompt.
    host.add(1000, 2400, 2401);
    while host.scheduler.has_unfinished() {
        host.step(0);
    }
    let cached = host.scheduler.num_free_blocks();
    for id in 0..BATCH as i64 {
        host.add(id, 32, LIMIT);
    }
    for i in 0..8 {
        host.step(i % (K + 1));
    }
    assert_eq!(host.scheduler.num_running(), BATCH);
    let allocations: usize = (0..900).map(|i| host.step(i % (K + 1))).sum();
    assert_eq!(allocations, 0);
    assert_eq!(host.scheduler.num_running(), BATCH);
    let used = cached - host.scheduler.num_free_blocks();
    assert!(used > BATCH * 150, "{used} blocks were allocated and registered meanwhile");
    host.scheduler.check_integrity().unwrap();
}

#[test]
fn a_planner_allocates_nothing() {
    let costs = CostModel::new(&[1, 16, 64], &[0, 1, K], &[1.0, 1.2, 2.0, 1.5, 2.0, 3.0, 3.0, 4.0, 9.0]).unwrap();
    let mut planner = SpeculationPlanner::new(BATCH, K, costs.clone(), 0.1).unwrap().with_lora_costs(costs);
    let rows: Vec<i64> = (0..BATCH as i64).collect();
    let (caps, lags) = ([K as i64; BATCH], [0; BATCH]);
    let (mut ks, mut accepted) = ([0; BATCH], [0; BATCH]);
    let before = ALLOCATIONS.get();
    for step in 0..3000 {
        planner.decide(&rows, &caps, &lags, &mut ks).unwrap();
        for (row, accepted) in accepted.iter_mut().enumerate() {
            *accepted = if step % 500 < 300 { ((step + 3 * row) % (K + 1)) as i64 } else { 0 }.min(ks[row]);
        }
        planner.settle(&rows, &ks, &ks, &accepted, Some(1.0 + step as f64 % 3.0)).unwrap();
        planner.reset(step % BATCH, step % 700 < 30).unwrap();
        planner.take_collapsed().for_each(drop);
    }
    assert_eq!(ALLOCATIONS.get(), before);
}

#[test]
fn the_counter_counts() {
    let before = ALLOCATIONS.get();
    drop(std::hint::black_box(vec![1_u8; 100]));
    assert_eq!(ALLOCATIONS.get(), before + 1);
}
