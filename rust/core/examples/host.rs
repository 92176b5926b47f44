//! Example of a host in plain Rust. `specrs-core` plans. A pretended device computes prompt chunks, catch-up chunks and
//! decode iterations with paged KV, with two steps in flight.
//!
//! The "models" are functions of the contents of their caches, so the example needs no weights, and a wrong slot
//! changes the text. Everything else is as in a real host.
//!
//! ```text
//! cargo run -p specrs-core --example host
//! ```
#![allow(clippy::print_stdout)] // an example shows what it does

use std::collections::VecDeque;

use specrs_core::scheduler::layout::{FINISH_LENGTH, FINISH_NONE, RecordLayout, ResultsLayout};
use specrs_core::{Drafter, Error, NO_SLOT, PlanOutcome, RequestParams, Scheduler, SchedulerConfig, SlotMapper};

const K: usize = 4;
const ROWS: usize = 4;
const BLOCK_SIZE: usize = 16;
const NUM_BLOCKS: usize = 64;
const MAX_LEN: usize = 256;
/// Number of steps planned and not yet settled: while one runs, the next is planned.
const DEPTH: usize = 2;

/// Model: its paged KV, which contains the token of each position, and its next token for such KV.
struct Model {
    cache: Vec<i64>,
    /// Whether the model is a draft, which is right about only two tokens of three.
    is_draft: bool,
}

impl Model {
    fn new(is_draft: bool) -> Self {
        Self { cache: vec![i64::MIN; NUM_BLOCKS * BLOCK_SIZE], is_draft }
    }

    /// Feeds `tokens`, which are the last of the positions whose KV is at `slots`, and returns the next token after
    /// each. Their KV is written to the slots `written`, where `NO_SLOT` skips KV that is there already.
    fn feed(&mut self, tokens: &[i64], slots: &[i64], written: &[i64]) -> Vec<i64> {
        for (&token, &slot) in tokens.iter().zip(written) {
            if slot != NO_SLOT {
                self.cache[slot as usize] = token;
            }
        }
        let ends = slots.len() - tokens.len() + 1..=slots.len();
        ends.map(|end| self.next(slots[..end].iter().map(|&slot| self.cache[slot as usize]))).collect()
    }

    /// Returns the token after positions with this KV.
    fn next(&self, kv: impl Iterator<Item = i64>) -> i64 {
        let token = kv.fold(1, |sum, value| (31 * sum + value) % 49_999);
        token + i64::from(self.is_draft && token % 3 == 0)
    }
}

/// Device state of a running request.
#[derive(Clone, Default)]
struct Row {
    tokens: Vec<i64>,
    limit: usize,
    draft_len: usize,
    /// Block table of the request.
    blocks: Vec<i64>,
}

struct Device {
    target: Model,
    draft: Model,
    rows: Vec<Row>,
    mapper: SlotMapper,
}

impl Device {
    fn new() -> Result<Self, Error> {
        let (target, draft) = (Model::new(false), Model::new(true));
        Ok(Self { target, draft, rows: vec![Row::default(); ROWS], mapper: SlotMapper::new(BLOCK_SIZE)? })
    }

    /// Returns the slots of the row's first `count` positions.
    fn slots(&self, row: usize, count: usize) -> Vec<i64> {
        let mut slots = vec![NO_SLOT; count];
        self.mapper.map_range(&self.rows[row].blocks, 0, &mut slots);
        slots
    }

    /// Executes a planned step and writes its report into `results`, by sequence.
    fn execute(&mut self, layout: &RecordLayout, record: &[i64], report: &ResultsLayout, results: &mut [i64]) {
        let at = layout.view(record);
        let header = specrs_core::scheduler::StepHeader::read(record);
        results.fill(0);

        let mut uploads = at.upload_token;
        for i in 0..header.num_admitted {
            let (tokens, rest) = uploads.split_at(at.admit_num_tokens[i] as usize);
            uploads = rest;
            self.rows[at.admit_row[i] as usize] = Row {
                tokens: tokens.to_vec(),
                limit: at.admit_limit[i] as usize,
                draft_len: at.admit_draft_len[i] as usize,
                blocks: Vec::new(),
            };
        }
        for i in 0..header.num_block_updates {
            self.rows[at.block_row[i] as usize].blocks.push(at.block_id[i]); // index by index
        }

        // Prompt chunks run the target alone; the last one of a prompt gives a token.
        for j in 0..header.num_prefill {
            let sequence = header.num_decode + j;
            let (row, end) = (at.seq_row[sequence] as usize, (at.chunk_start[j] + at.chunk_len[j]) as usize);
            let fed = at.prefill_q_start[j] as usize..at.prefill_q_start[j + 1] as usize;
            let slots = self.slots(row, end);
            let next = self.target.feed(&at.prefill_token[fed.clone()], &slots, &at.prefill_slot[fed]);
            if at.chunk_is_last[j] == 1 {
                self.emit(row, &next[next.len() - 1..], sequence, report, results);
            }
        }

        // Catch-up chunks write the draft KV of tokens that are settled, and say nothing.
        for j in 0..header.num_draft_chunks {
            let (row, start) = (at.draft_chunk_row[j] as usize, at.draft_chunk_start[j] as usize);
            let end = start + at.draft_chunk_len[j] as usize;
            if self.rows[row].tokens.len() < self.rows[row].limit {
                let fed = at.draft_q_start[j] as usize..at.draft_q_start[j + 1] as usize;
                let slots = self.slots(row, end);
                self.draft.feed(&self.rows[row].tokens[start..end], &slots, &at.draft_slot[fed]);
                self.rows[row].draft_len = end;
            }
        }

        // Decoding sequences draft, verify, accept. The host planned them with bounds; the device knows the lengths.
        for sequence in 0..header.num_decode {
            let row = at.seq_row[sequence] as usize;
            let (n, limit) = (self.rows[row].tokens.len(), self.rows[row].limit);
            if n == limit {
                continue; // it ended in the step before, which the host had not settled when it planned this one
            }
            let k = (at.seq_k[sequence] as usize).min(limit - n - 1);
            let slots = self.slots(row, n + k);
            let mut tokens = self.rows[row].tokens.clone();
            for _ in 0..k {
                let (from, end) = (self.rows[row].draft_len, tokens.len());
                let next = self.draft.feed(&tokens[from..], &slots[..end], &slots[from..end]);
                tokens.extend(next.last());
                self.rows[row].draft_len = end;
            }
            let next = self.target.feed(&tokens[n - 1..], &slots, &slots[n - 1..]);
            let accepted = (0..k).take_while(|&i| tokens[n + i] == next[i]).count();
            self.emit(row, &next[..=accepted], sequence, report, results);
            report.num_accepted.of_mut(results)[sequence] = accepted as i64;
            report.num_drafted.of_mut(results)[sequence] = k as i64;
            let row = &mut self.rows[row];
            row.draft_len = row.draft_len.min(row.tokens.len() - 1);
        }
    }

    /// Appends new tokens of a row and reports them. The device judges ends; these requests have no stop tokens.
    fn emit(&mut self, row: usize, new: &[i64], sequence: usize, report: &ResultsLayout, results: &mut [i64]) {
        let row = &mut self.rows[row];
        row.tokens.extend(new);
        let ends = row.tokens.len() == row.limit;
        report.num_emitted.of_mut(results)[sequence] = new.len() as i64;
        report.finish_reason.of_mut(results)[sequence] = if ends { FINISH_LENGTH } else { FINISH_NONE };
        report.tokens.of_mut(results)[sequence * (K + 1)..][..new.len()].copy_from_slice(new);
    }
}

/// Runs all requests to their end and passes new tokens to `deliver` with the request's id.
fn run(scheduler: &mut Scheduler, mut deliver: impl FnMut(i64, &[i64])) -> Result<(), Error> {
    let mut device = Device::new()?;
    let (record_layout, results_layout) = (*scheduler.record_layout(), *scheduler.results_layout());
    // The host owns the buffers; on a GPU machine they would be pinned, and the record a ring as the results are.
    let mut record = vec![0; record_layout.size];
    let mut settled = vec![0; scheduler.settled_layout().size];
    let mut spare = vec![vec![0; results_layout.size]; DEPTH];
    let mut in_flight = VecDeque::new();
    loop {
        // A GPU would still run the step before while this one is planned; here each is over when `execute` returns.
        while let PlanOutcome::Step(header) = scheduler.plan(&mut record)? {
            let mut results = spare.pop().expect("a buffer for each step that may be in flight");
            device.execute(&record_layout, &record, &results_layout, &mut results);
            in_flight.push_back((header, results));
        }
        let Some((header, results)) = in_flight.pop_front() else { return Ok(()) };
        scheduler.settle(header.step_id, &results, &mut settled)?;
        let came = scheduler.settled_layout().view(&settled);
        let tokens = results_layout.view(&results).tokens;
        for sequence in 0..header.num_decode + header.num_prefill {
            let id = came.request_id[sequence];
            deliver(id, &tokens[sequence * (K + 1)..][..came.num_new[sequence] as usize]);
            if came.finish_reason[sequence] != FINISH_NONE {
                println!("request {id} ends");
            }
        }
        spare.push(results);
    }
}

fn scheduler() -> Result<Scheduler, Error> {
    let mut config = SchedulerConfig::new(ROWS, MAX_LEN, NUM_BLOCKS, BLOCK_SIZE, 32);
    config.num_speculative_tokens = K;
    config.drafter =
        Drafter::Cached { max_model_len: MAX_LEN, max_draft_lag: 2, mask_token_id: None, cost_ratio: 0.25 };
    config.max_in_flight = DEPTH;
    Scheduler::new(config)
}

fn generate(scheduler: &mut Scheduler, num_requests: i64, max_tokens: usize) -> Result<Vec<Vec<i64>>, Error> {
    let mut texts: Vec<Vec<i64>> = (0..num_requests).map(|id| (0..40 + id).collect()).collect();
    for (id, prompt) in (0..).zip(&texts) {
        let limit = prompt.len() + max_tokens;
        let params = RequestParams { limit, num_speculative_tokens: K, ..RequestParams::default() };
        scheduler.add_request(id, prompt, &params)?;
    }
    run(scheduler, |id, tokens| {
        if let Some(text) = texts.get_mut(id as usize) {
            text.extend(tokens);
        }
    })?;
    Ok(texts)
}

fn main() -> Result<(), Error> {
    let mut scheduler = scheduler()?;
    for (id, text) in generate(&mut scheduler, 8, 40)?.iter().enumerate() {
        println!("request {id}: .. {:?}", &text[text.len() - 8..]);
    }
    let statistics = scheduler.acceptance();
    println!("{} drafts, acceptance length {:.2}", statistics.drafts(), statistics.acceptance_length());
    Ok(())
}

#[test]
fn the_text_is_the_targets_own() {
    let mut scheduler = scheduler().expect("allowed settings");
    let target = Model::new(false);
    for (id, text) in generate(&mut scheduler, 8, 40).expect("a run without errors").iter().enumerate() {
        let prompt = 40 + id;
        assert_eq!(text.len(), prompt + 40);
        let own = |i: usize| target.next(text[..i].iter().copied());
        assert!((prompt..text.len()).all(|i| text[i] == own(i)), "request {id}");
    }
    let statistics = scheduler.acceptance();
    assert!(statistics.acceptance_length() > 2.0 && statistics.accepted_tokens() < statistics.draft_tokens());
    assert!(scheduler.num_cached_tokens() > 0, "equal prompts share blocks");
    assert_eq!(scheduler.num_free_blocks(), scheduler.num_blocks());
}
