//! A host in plain Rust: `specrs-core` plans, a pretended device drafts and verifies, the results go back.
//!
//! The "models" are functions of the last tokens, so the example needs no weights; everything else is what a real host does: row
//! state on the device, uploads from the record, one decode iteration per launch, results by entry.
//!
//! ```text
//! cargo run -p specrs-core --example host
//! ```
#![allow(clippy::print_stdout)] // an example shows what it does

use specrs_core::scheduler::layout::{FINISH_NONE, RecordLayout};
use specrs_core::{Drafter, Error, PlanOutcome, RequestParams, Scheduler, SchedulerConfig};

const K: usize = 4;
const ROWS: usize = 4;

/// The target: what it writes next.
fn target(tokens: &[i64]) -> i64 {
    let at = |back: usize| tokens.len().checked_sub(back).map_or(1, |i| tokens[i]);
    (31 * at(1) + 17 * at(2) + tokens.len() as i64) % 50_000
}

/// The draft agrees with it two times in three.
fn draft(tokens: &[i64]) -> i64 {
    target(tokens) + i64::from(tokens.len().is_multiple_of(3))
}

/// Device state: the tokens of every row, and its limit.
#[derive(Default)]
struct Row {
    tokens: Vec<i64>,
    limit: usize,
}

struct Host {
    scheduler: Scheduler,
    rows: Vec<Row>,
    record: Vec<i64>,
    results: Vec<i64>,
    settled: Vec<i64>,
}

impl Host {
    fn new(config: SchedulerConfig) -> Result<Self, Error> {
        let scheduler = Scheduler::new(config)?;
        Ok(Self {
            rows: (0..ROWS).map(|_| Row::default()).collect(),
            // The host owns the buffers; on a GPU they would be pinned.
            record: vec![0; scheduler.record_layout().size],
            results: vec![0; scheduler.results_layout().size],
            settled: vec![0; scheduler.settled_layout().size],
            scheduler,
        })
    }

    /// Runs all requests to their end; new tokens go to `deliver` with the request's id.
    fn run(&mut self, mut deliver: impl FnMut(i64, &[i64])) -> Result<(), Error> {
        while let PlanOutcome::Launch(header) = self.scheduler.plan(&mut self.record)? {
            let layout = *self.scheduler.record_layout();
            self.upload(&layout, header.num_admitted);
            // A real host would run the prefill chunks and draft chunks here: they write KV, and say nothing.
            let entries = header.num_decode + header.num_prefill;
            for entry in 0..entries {
                let emits = entry < header.num_decode
                    || self.record[layout.chunk_is_last.offset + entry - header.num_decode] == 1;
                self.iterate(&layout, entry, emits);
            }
            self.scheduler.settle(header.launch_id, &self.results, &mut self.settled)?;
            let (settled, results) = (self.scheduler.settled_layout(), self.scheduler.results_layout());
            for entry in 0..entries {
                let id = self.settled[settled.request_id.offset + entry];
                let new = self.settled[settled.num_new.offset + entry] as usize;
                let tokens = &self.results[results.tokens.offset + entry * (K + 1)..][..new];
                deliver(id, tokens);
                if self.settled[settled.finish_reason.offset + entry] != FINISH_NONE {
                    println!("request {id} ends");
                }
            }
        }
        Ok(())
    }

    /// Gives admitted requests their row.
    fn upload(&mut self, layout: &RecordLayout, num_admitted: usize) {
        let mut tokens = &self.record[layout.upload_token.range()];
        for i in 0..num_admitted {
            let row = &mut self.rows[self.record[layout.admit_row.offset + i] as usize];
            let (own, rest) = tokens.split_at(self.record[layout.admit_num_tokens.offset + i] as usize);
            *row = Row { tokens: own.to_vec(), limit: self.record[layout.admit_limit.offset + i] as usize };
            tokens = rest;
        }
    }

    /// Drafts up to K tokens, accepts those that the target would have written, adds one of the target's own, reports.
    fn iterate(&mut self, layout: &RecordLayout, entry: usize, emits: bool) {
        let row = &mut self.rows[self.record[layout.entry_row.offset + entry] as usize];
        let n = row.tokens.len();
        let room = (row.limit - n).saturating_sub(1);
        let drafted = room.min(self.record[layout.entry_k.offset + entry] as usize);
        for _ in 0..drafted {
            row.tokens.push(draft(&row.tokens));
        }
        let accepted = (n..n + drafted).take_while(|&i| row.tokens[i] == target(&row.tokens[..i])).count();
        row.tokens.truncate(n + accepted);
        if emits {
            row.tokens.push(target(&row.tokens));
        }
        let results = self.scheduler.results_layout();
        let emitted = row.tokens.len() - n;
        self.results[results.num_emitted.offset + entry] = emitted as i64;
        self.results[results.num_accepted.offset + entry] = accepted as i64;
        self.results[results.num_drafted.offset + entry] = drafted as i64;
        self.results[results.flags.offset + entry] = 0;
        self.results[results.tokens.offset + entry * (K + 1)..][..emitted].copy_from_slice(&row.tokens[n..]);
    }
}

fn generate(num_requests: i64, max_tokens: usize) -> Result<Vec<Vec<i64>>, Error> {
    let mut config = SchedulerConfig::new(ROWS, 256, 64, 16, 128);
    config.num_speculative_tokens = K;
    config.drafter = Drafter::draft_model(256, 1.0);
    let mut host = Host::new(config)?;
    let mut texts: Vec<Vec<i64>> = (0..num_requests).map(|id| (0..20 + id).collect()).collect();
    for (id, prompt) in (0..).zip(&texts) {
        let limit = prompt.len() + max_tokens;
        let params = RequestParams { limit, num_speculative_tokens: K, ..RequestParams::default() };
        host.scheduler.add_request(id, prompt, &params)?;
    }
    host.run(|id, tokens| {
        if let Some(text) = texts.get_mut(id as usize) {
            text.extend(tokens);
        }
    })?;
    let books = host.scheduler.acceptance();
    println!("{} drafts, acceptance length {:.2}", books.drafts(), books.acceptance_length());
    Ok(texts)
}

fn main() -> Result<(), Error> {
    for (id, text) in generate(8, 40)?.iter().enumerate() {
        println!("request {id}: .. {:?}", &text[text.len() - 8..]);
    }
    Ok(())
}

#[test]
fn the_text_is_the_targets_own() {
    for (id, text) in generate(8, 40).expect("a run without errors").iter().enumerate() {
        let prompt = 20 + id;
        assert_eq!(text.len(), prompt + 40);
        assert!((prompt..text.len()).all(|i| text[i] == target(&text[..i])), "request {id}");
    }
}
