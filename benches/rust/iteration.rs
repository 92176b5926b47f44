//! Benchmark of an iteration on a CPU without its passes: row state, drafts, verification, acceptance, results.
//!
//! `cargo bench -p specrs-benches --bench iteration` prints a line for each models, rule, batch and K, in microseconds: models
//! of the bundled pair's shapes, whose passes push all else out of the caches, and ones of next to no weights.

// A table is what this is for.
#![allow(clippy::print_stdout)]

use specrs_core::sampling::LogprobsMode;
use specrs_core::scheduler::StepHeader;
use specrs_core::{Drafter, PlanOutcome, RequestParams, RequestSampling, Scheduler, SchedulerConfig};
use specrs_cpu::iteration::{Cached, Iteration, Model, NoHost, OwnedRowState, Rule};
use specrs_cpu::{Decoder, Isa, KvCache, KvShape, ModelShape, Pool};
use std::sync::Arc;
use std::time::Instant;

#[path = "support/decoder.rs"]
mod support;
use support::{DRAFT, TARGET};

const TINY: (ModelShape, usize) = (ModelShape { hidden_size: 32, intermediate_size: 32, head_dim: 32, ..DRAFT.0 }, 1);
const PROMPT: usize = 16;
const OUTPUT: usize = 160;
const BLOCK_SIZE: usize = 16;

struct OnCpu {
    decoder: Decoder,
    kv: KvCache,
}

impl OnCpu {
    fn new(shape: (ModelShape, usize), num_blocks: usize) -> Self {
        let ModelShape { num_kv_heads, head_dim, .. } = shape.0;
        let kv = KvShape { num_blocks, block_size: BLOCK_SIZE, num_kv_heads, head_dim };
        let decoder = Decoder::with_isa(support::weights(shape, true), Arc::new(Pool::new(1).unwrap()), Isa::detect());
        Self { decoder, kv: KvCache::allocate(kv, shape.1, false).unwrap() }
    }

    fn cached(&mut self) -> Cached<'_> {
        Cached::new(&mut self.decoder, &mut self.kv, &[])
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Returns the median microseconds of decode steps of `batch` requests with K drafts, and of the part of a step outside
/// its passes.
fn steps(batch: usize, k: usize, sampled: bool, target: &mut OnCpu, draft: &mut OnCpu) -> (f64, f64) {
    let max_len = PROMPT + OUTPUT;
    let mut config = SchedulerConfig::new(batch, max_len, batch * max_len.div_ceil(BLOCK_SIZE), BLOCK_SIZE, 2048);
    if k > 0 {
        config.num_speculative_tokens = k;
        config.drafter = Drafter::draft_model(max_len, 0.1);
    }
    let mut scheduler = Scheduler::new(config.clone()).unwrap();
    for id in 0..batch as i64 {
        let prompt: Vec<i64> = (0..PROMPT as i64).map(|i| (id * 31 + i) % 2048).collect();
        let params = RequestParams {
            limit: max_len,
            num_speculative_tokens: k,
            sampling: if sampled {
                RequestSampling { temperature: 0.8, top_p: 0.9, ..RequestSampling::default() }
            } else {
                RequestSampling { temperature: 0.0, ..RequestSampling::default() }
            },
            ..RequestParams::default()
        };
        scheduler.add_request(id, &prompt, &params).unwrap();
    }
    let mut state = OwnedRowState::new(&config);
    let mut iteration =
        Iteration::new(config, Rule::Rejection, None, LogprobsMode::default(), TARGET.0.vocab_size).unwrap();
    let mut record = vec![0; scheduler.record_layout().size];
    let mut results = vec![0; scheduler.results_layout().size];
    let mut settled = vec![0; scheduler.settled_layout().size];
    let (mut times, mut outside) = (Vec::new(), Vec::new());
    iteration.take_pass_time();
    while let PlanOutcome::Step(header) = scheduler.plan(&mut record).unwrap() {
        let (mut target, mut draft) = (target.cached(), draft.cached());
        let draft = (k > 0).then_some(&mut draft as &mut dyn Model);
        let start = Instant::now();
        iteration.run(&record, &mut results, &mut state.borrow(), &mut target, draft, &mut NoHost).unwrap();
        let taken = start.elapsed();
        let passes = iteration.take_pass_time();
        let StepHeader { num_decode, num_prefill, num_draft_chunks, .. } = header;
        if num_decode == batch && num_prefill == 0 && num_draft_chunks == 0 {
            times.push(taken.as_secs_f64() * 1e6);
            outside.push(taken.saturating_sub(passes).as_secs_f64() * 1e6);
        }
        scheduler.settle(header.step_id, &results, &mut settled).unwrap();
    }
    (median(times), median(outside))
}

fn main() {
    println!("models        batch  K    step us  outside us");
    for (name, target, draft) in [("tiny", TINY, TINY), ("pair", TARGET, DRAFT)] {
        for sampled in [false, true] {
            for (batch, k) in [(1, 0), (1, 3), (64, 0), (64, 3)] {
                let num_blocks = batch * (PROMPT + OUTPUT).div_ceil(BLOCK_SIZE);
                let (mut target, mut draft) = (OnCpu::new(target, num_blocks), OnCpu::new(draft, num_blocks));
                let (step, outside) = steps(batch, k, sampled, &mut target, &mut draft);
                let rule = if sampled { "sampled" } else { "greedy" };
                println!("{name} {rule:<8} {batch:>5} {k:>2} {step:>10.1} {outside:>11.1}");
            }
        }
    }
}
