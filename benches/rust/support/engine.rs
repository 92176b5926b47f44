//! A steady stream of requests through the scheduler, with something in place of a device: every row decodes, K = 5, random
//! acceptance, blocks of 16.
//!
//! A request that reaches its limit is followed by a new one, so the admissions, prefill chunks, catch-ups and releases of steady
//! serving are in the numbers. What stands in for the device is not: only the two calls are timed.

use specrs_core::scheduler::layout::{
    FINISH_LENGTH, FINISH_NONE, HEADER_NUM_ADMITTED, HEADER_NUM_DECODE, HEADER_NUM_PREFILL, HEADER_STEP_ID,
};
use specrs_core::{Drafter, PlanOutcome, RequestParams, Scheduler, SchedulerConfig};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

pub(crate) const K: usize = 5;
const BLOCK_SIZE: usize = 16;
const PROMPT: usize = 64;
const OUTPUT: usize = 960;

/// Row, K, and whether it emits.
type Sequence = (usize, usize, bool);

/// The two calls, `plan` and `settle`, as functions of their own.
#[derive(Clone, Copy)]
struct Calls {
    plan: fn(&mut Scheduler, &mut [i64]) -> PlanOutcome,
    settle: fn(&mut Scheduler, u64, &[i64], &mut [i64]),
}

/// Scheduler whose rows are all busy.
pub(crate) struct Engine {
    scheduler: Scheduler,
    calls: Calls,
    record: Vec<i64>,
    results: Vec<i64>,
    settled: Vec<i64>,
    /// Ids and sequences of the steps planned and not settled, oldest first.
    in_flight: VecDeque<(u64, Vec<Sequence>)>,
    /// Tokens that each row may still emit.
    left: Vec<usize>,
    random: u64,
    next_id: i64,
    pub(crate) plan_time: Duration,
    pub(crate) settle_time: Duration,
}

impl Engine {
    #[allow(dead_code)] // not in every benchmark
    pub(crate) fn new(batch: usize, max_in_flight: usize) -> Self {
        Self::with_kv_events(batch, max_in_flight, false)
    }

    /// Makes an engine. With `kv_events`, the events are taken after each step is settled.
    pub(crate) fn with_kv_events(batch: usize, max_in_flight: usize, kv_events: bool) -> Self {
        let calls = if kv_events {
            Calls { plan: count_plan_kv_events, settle: count_settle_kv_events }
        } else {
            Calls { plan: count_plan, settle: count_settle }
        };
        Self::warmed_up(batch, max_in_flight, kv_events, calls, 200)
    }

    /// Makes an engine that has run for so long that every block which a row gets is evicted from the prefix cache.
    #[allow(dead_code)] // not in every benchmark
    pub(crate) fn evicting(batch: usize, max_in_flight: usize, kv_events: bool) -> Self {
        let calls = if kv_events {
            Calls { plan: count_evicting_plan_kv_events, settle: count_evicting_settle_kv_events }
        } else {
            Calls { plan: count_evicting_plan, settle: count_evicting_settle }
        };
        Self::warmed_up(batch, max_in_flight, kv_events, calls, 600)
    }

    fn warmed_up(batch: usize, max_in_flight: usize, kv_events: bool, calls: Calls, steps: usize) -> Self {
        let limit = PROMPT + OUTPUT;
        let mut config = SchedulerConfig::new(
            batch,
            limit,
            batch * (limit / BLOCK_SIZE + 2),
            BLOCK_SIZE,
            (batch * (K + 1)).max(2048),
        );
        config.num_speculative_tokens = K;
        config.drafter = Drafter::draft_model(limit, 0.05);
        config.max_in_flight = max_in_flight;
        config.enable_kv_cache_events = kv_events;
        let scheduler = Scheduler::new(config).expect("valid settings");
        let mut engine = Self {
            record: vec![0; scheduler.record_layout().size],
            results: vec![0; scheduler.results_layout().size],
            settled: vec![0; scheduler.settled_layout().size],
            in_flight: VecDeque::new(),
            left: vec![0; batch],
            random: 1,
            next_id: 0,
            plan_time: Duration::ZERO,
            settle_time: Duration::ZERO,
            calls: Calls { plan, settle },
            scheduler,
        };
        for _ in 0..batch {
            engine.add();
        }
        // Past the prompts, and far enough that rows are at different lengths.
        for _ in 0..steps {
            engine.step();
        }
        engine.calls = calls;
        engine
    }

    fn add(&mut self) {
        // Prompts differ from the first token on, so that the prefix cache is looked up and misses.
        let prompt: Vec<i64> = (0..PROMPT as i64).map(|i| (self.next_id * 7919 + i) % 150_000).collect();
        // Limits differ, or all rows would end in the same step.
        let limit = PROMPT + OUTPUT / 2 + (self.next_id as usize * 389) % (OUTPUT / 2);
        let params = RequestParams { limit, num_speculative_tokens: K, ..RequestParams::default() };
        self.scheduler.add_request(self.next_id, &prompt, &params).expect("a valid request");
        self.next_id += 1;
    }

    fn draw(&mut self, n: usize) -> usize {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) as usize % n
    }

    /// Plans one step and notes what settling it needs to know, because no device runs it. Returns false if a step has
    /// to be settled first.
    fn plan(&mut self) -> bool {
        let start = Instant::now();
        let outcome = (self.calls.plan)(&mut self.scheduler, &mut self.record);
        self.plan_time += start.elapsed();
        match outcome {
            PlanOutcome::Step(_) => {}
            PlanOutcome::SettleFirst => return false,
            PlanOutcome::Idle => panic!("rows are always busy"),
        }
        let layout = self.scheduler.record_layout();
        let decode = self.record[HEADER_NUM_DECODE] as usize;
        let mut sequences: Vec<_> = (0..decode)
            .map(|i| {
                (self.record[layout.seq_row.offset + i] as usize, self.record[layout.seq_k.offset + i] as usize, true)
            })
            .collect();
        for j in 0..self.record[HEADER_NUM_PREFILL] as usize {
            let row = self.record[layout.seq_row.offset + decode + j] as usize;
            sequences.push((row, 0, self.record[layout.chunk_is_last.offset + j] == 1));
        }
        for (i, &row) in
            self.record[layout.admit_row.range()].iter().enumerate().take(self.record[HEADER_NUM_ADMITTED] as usize)
        {
            let limit = self.record[layout.admit_limit.offset + i] as usize;
            self.left[row as usize] = limit - PROMPT;
        }
        self.in_flight.push_back((self.record[HEADER_STEP_ID] as u64, sequences));
        true
    }

    fn settle(&mut self) {
        let (step_id, sequences) = self.in_flight.pop_front().expect("a step in flight");
        let layout = *self.scheduler.results_layout();
        for (i, &(row, k, emits)) in sequences.iter().enumerate() {
            let left = self.left[row];
            let drafted = k.min(left.saturating_sub(1));
            let accepted = self.draw(drafted + 1);
            let emitted = if emits && left > 0 { accepted + 1 } else { 0 };
            self.left[row] -= emitted;
            self.results[layout.num_emitted.offset + i] = emitted as i64;
            self.results[layout.num_accepted.offset + i] = accepted as i64;
            self.results[layout.num_drafted.offset + i] = drafted as i64;
            self.results[layout.flags.offset + i] = 0;
            let ends = emitted > 0 && self.left[row] == 0;
            self.results[layout.finish_reason.offset + i] = if ends { FINISH_LENGTH } else { FINISH_NONE };
            for t in 0..emitted {
                self.results[layout.tokens.offset + i * (K + 1) + t] = (row * 31 + t) as i64;
            }
        }
        let start = Instant::now();
        (self.calls.settle)(&mut self.scheduler, step_id, &self.results, &mut self.settled);
        self.settle_time += start.elapsed();
        let finish = self.scheduler.settled_layout().finish_reason;
        let ended = self.settled[finish.range()].iter().take(sequences.len()).filter(|&&reason| reason != 0).count();
        for _ in 0..ended {
            self.add();
        }
    }

    /// Plans steps until `max_in_flight` of them are in flight, then settles the oldest.
    pub(crate) fn step(&mut self) {
        while self.in_flight.len() < self.scheduler.config().max_in_flight && self.plan() {}
        self.settle();
    }
}

fn plan(scheduler: &mut Scheduler, record: &mut [i64]) -> PlanOutcome {
    scheduler.plan(record).expect("a matching buffer")
}

fn settle(scheduler: &mut Scheduler, step_id: u64, results: &[i64], settled: &mut [i64]) {
    scheduler.settle(step_id, results, settled).expect("valid results");
}

fn take_kv_events(scheduler: &mut Scheduler) {
    drop(std::hint::black_box(scheduler.take_kv_event_batch()));
}

/// The two calls as functions that are never inlined, so that callgrind can count what is in them alone, after the steps that an
/// engine is warmed up with: without KV events and with, in a pool that has free blocks and in one that evicts. Their names keep
/// the compiler from making one function of those that do the same.
macro_rules! plan_path {
    ($name:ident()) => {
        #[inline(never)]
        fn $name(scheduler: &mut Scheduler, record: &mut [i64]) -> PlanOutcome {
            std::hint::black_box(stringify!($name));
            plan(scheduler, record)
        }
    };
}

macro_rules! settle_path {
    ($name:ident() $(, $then:expr)?) => {
        #[inline(never)]
        fn $name(scheduler: &mut Scheduler, step_id: u64, results: &[i64], settled: &mut [i64]) {
            std::hint::black_box(stringify!($name));
            settle(scheduler, step_id, results, settled);
            $($then(scheduler);)?
        }
    };
}

plan_path!(count_plan());
plan_path!(count_plan_kv_events());
plan_path!(count_evicting_plan());
plan_path!(count_evicting_plan_kv_events());
settle_path!(count_settle());
settle_path!(count_settle_kv_events(), take_kv_events);
settle_path!(count_evicting_settle());
settle_path!(count_evicting_settle_kv_events(), take_kv_events);
