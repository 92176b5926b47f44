//! Steps over models that are no decoders: their KV cache holds tokens, and the next token is a function of all that a
//! row attends to. So a wrong slot, block table, position or order shows in the text, with any drafter, and also after
//! a drafter's failure.

use proptest::prelude::*;
use specrs_core::Drafter;
use specrs_core::sampling::{LogprobsMode, RequestSampling};
use specrs_core::scheduler::{PlanOutcome, RequestParams, Scheduler, SchedulerConfig};
use specrs_cpu::iteration::{Facts, Host, Iteration, Model, OwnedRowState, Rule, TextLimits, Translated, Translation};
use specrs_cpu::{Entries, Error, HeadStates, Output, Pass, Result};
use std::collections::HashMap;

const VOCAB: usize = 23;
const BLOCK_SIZE: usize = 4;
const MAX_LEN: usize = 64;
const K: usize = 3;
/// Difference between the draft's and the target's id of a token, if the draft works by text or has another vocabulary.
const SHIFT: i64 = 9;

fn next_of(context: &[i64]) -> usize {
    let hash = context.iter().fold(17_u64, |hash, &token| hash.wrapping_mul(31).wrapping_add(token as u64 + 1));
    (hash >> 7) as usize % VOCAB
}

/// Model whose KV cache holds tokens, one per slot, which it reads back.
struct Reader {
    kv: Vec<i64>,
    /// Difference between its ids and the target's.
    shift: i64,
    /// Period of contexts that it continues differently from the target; 0 for none.
    errs: usize,
    passes: usize,
    /// Indices of the passes that fail.
    failing: Vec<usize>,
}

impl Reader {
    fn new(num_blocks: usize, shift: i64, errs: usize) -> Self {
        Self { kv: vec![-1; num_blocks * BLOCK_SIZE], shift, errs, passes: 0, failing: Vec::new() }
    }

    fn next(&self, pass: &Pass<'_>, row: usize) -> usize {
        let table = &pass.block_table[pass.sequences[row] * pass.max_blocks..];
        let context: Vec<i64> = (0..=pass.positions[row] as usize)
            .map(|position| self.kv[table[position / BLOCK_SIZE] as usize * BLOCK_SIZE + position % BLOCK_SIZE])
            .collect();
        assert!(!context.contains(&-1), "KV is attended that was never written");
        let context: Vec<i64> = context.iter().map(|token| token - self.shift).collect();
        let next = next_of(&context);
        let errs = self.errs > 0 && (context.iter().sum::<i64>() as usize).is_multiple_of(self.errs);
        (next + usize::from(errs)) % VOCAB + self.shift as usize
    }
}

impl Model for Reader {
    fn facts(&self) -> Facts<'_> {
        let vocab_size = VOCAB + self.shift as usize;
        Facts {
            vocab_size,
            hidden_size: 1,
            num_layers: 1,
            num_ids: vocab_size,
            target_ids: None,
            hidden_layers: (&[], 0),
            shares_kv: false,
        }
    }

    fn forward(
        &mut self,
        pass: &Pass<'_>,
        _head_states: Option<HeadStates<'_>>,
        output: Output<'_>,
        _entries: Entries<'_>,
    ) -> Result<()> {
        self.passes += 1;
        if self.failing.contains(&self.passes) {
            return Err(Error::Host { message: "broken".to_string() });
        }
        let mut next = Vec::new();
        for (row, (&token, &slot)) in pass.tokens.iter().zip(pass.slots).enumerate() {
            assert!(slot >= 0 && pass.positions[row] >= 0, "nothing here has another's KV");
            self.kv[slot as usize] = token;
            next.push(self.next(pass, row));
        }
        match output {
            Output::Logits { rows, num_ids, logits } => {
                logits.fill(0.0);
                rows.iter().enumerate().for_each(|(i, &row)| logits[i * num_ids + next[row]] = 5.0);
            }
            Output::Argmax { rows, ids, top, .. } => {
                for ((&row, id), top) in rows.iter().zip(ids).zip(top) {
                    (*id, *top) = (next[row] as i64, 5.0);
                }
            }
            Output::Nothing | Output::Hidden { .. } => {}
        }
        Ok(())
    }

    fn forward_keeping(&mut self, _pass: &Pass<'_>, _rows: &[usize], _entries: Entries<'_>) -> Result<()> {
        unreachable!("no request asks for its prompt's log probabilities")
    }

    fn logits(&mut self, _rows: &[usize], _logits: &mut [f32]) -> Result<()> {
        unreachable!("no hidden states were kept")
    }

    fn hidden(&mut self, _rows: &[usize], _hidden: &mut [f32]) -> Result<()> {
        unreachable!("no hidden states were kept")
    }

    fn finite(&self) -> &[bool] {
        &[]
    }

    fn restore_states(&mut self, _row: usize, _slot: usize) -> Result<()> {
        unreachable!("it has no states")
    }

    fn fuse(&mut self, _states: &[f32], _fused: &mut [f32]) -> Result<()> {
        unreachable!("it is no head")
    }
}

/// Host that translates ids of one tokenizer to those of the other.
struct Shifted;

impl Host for Shifted {
    fn start_grammar(&mut self, _index: usize, _row: usize, _mask: &mut [u32]) -> Result<()> {
        unreachable!("no request has a grammar")
    }

    fn advance_grammar(&mut self, _index: usize, _token: i64, _mask: &mut [u32]) -> Result<()> {
        unreachable!("no request has a grammar")
    }

    fn draft_ids(&mut self, tokens: &[i64]) -> Result<Vec<i64>> {
        Ok(tokens.iter().map(|token| token + SHIFT).collect())
    }

    fn target_ids(&mut self, tokens: &[i64], own: &[i64], drafted: &[i64]) -> Result<Vec<i64>> {
        assert_eq!(own, self.draft_ids(tokens)?);
        Ok(drafted.iter().map(|token| token - SHIFT).collect())
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    None,
    Model,
    Translated,
    Text,
}

struct Served {
    texts: HashMap<i64, Vec<i64>>,
    accepted: i64,
    faults: usize,
}

/// Serves the prompts to their ends, some of them sampled. `failing` are passes of the drafter that fail.
fn serve(kind: Kind, prompts: &[Vec<i64>], budget: usize, errs: usize, failing: &[usize]) -> Served {
    let max_num_seqs = 2;
    let num_blocks = max_num_seqs * MAX_LEN.div_ceil(BLOCK_SIZE) + 4;
    let mut config = SchedulerConfig::new(max_num_seqs, MAX_LEN, num_blocks, BLOCK_SIZE, budget);
    config.drafter = match kind {
        Kind::None => Drafter::None,
        Kind::Model | Kind::Translated => Drafter::draft_model(MAX_LEN, 0.5),
        Kind::Text => Drafter::Text,
    };
    config.num_speculative_tokens = if kind == Kind::None { 0 } else { K };
    let mut scheduler = Scheduler::new(config.clone()).unwrap();
    for (id, prompt) in prompts.iter().enumerate() {
        let params = RequestParams {
            limit: MAX_LEN.min(prompt.len() + 20),
            num_speculative_tokens: config.num_speculative_tokens,
            sampling: RequestSampling {
                temperature: if id % 3 == 2 { 0.6 } else { 0.0 },
                seed: id as i64,
                ..RequestSampling::default()
            },
            ..RequestParams::default()
        };
        scheduler.add_request(id as i64, prompt, &params).unwrap();
    }
    let limits = TextLimits { context: MAX_LEN + 8, max_fed: 12, block_size: BLOCK_SIZE };
    let own_blocks = (max_num_seqs + 1) * limits.context.div_ceil(BLOCK_SIZE);
    let mut target = Reader::new(num_blocks, 0, 0);
    let shift = if kind == Kind::Model { 0 } else { SHIFT };
    let mut draft = Reader::new(if kind == Kind::Text { own_blocks } else { num_blocks }, shift, errs);
    draft.failing = failing.to_vec();
    let pairs: Vec<(i64, i64)> = (0..VOCAB as i64).map(|token| (token, token + SHIFT)).collect();
    let mut translation = Translation::new(&pairs, 0, VOCAB).unwrap();
    let mut state = OwnedRowState::new(&config);
    let mut iteration = Iteration::new(config, Rule::Coupled, None, LogprobsMode::default(), VOCAB).unwrap();
    if kind == Kind::Text {
        iteration = iteration.with_text_drafts(limits);
    }
    let mut record = vec![0; scheduler.record_layout().size];
    let mut results = vec![0; scheduler.results_layout().size];
    let mut settled = vec![0; scheduler.settled_layout().size];
    let mut served = Served { texts: HashMap::new(), accepted: 0, faults: 0 };
    while let PlanOutcome::Step(header) = scheduler.plan(&mut record).unwrap() {
        let mut rows = state.borrow();
        let mut run = |draft: Option<&mut dyn Model>| {
            iteration.run(&record, &mut results, &mut rows, &mut target, draft, &mut Shifted).unwrap();
        };
        match kind {
            Kind::None => run(None),
            Kind::Model | Kind::Text => run(Some(&mut draft)),
            Kind::Translated => run(Some(&mut Translated::new(&mut draft, &mut translation).unwrap())),
        }
        if let Some(fault) = iteration.take_draft_fault() {
            served.faults += 1;
            scheduler.draft_kv_not_written(&fault.blocks).unwrap();
        }
        let ids: Vec<i64> = scheduler.record_layout().view(&record).seq_row.to_vec();
        let live: Vec<(i64, i64)> = (0..prompts.len() as i64)
            .filter_map(|id| scheduler.request(id).ok()?.row.map(|row| (row as i64, id)))
            .collect();
        scheduler.settle(header.step_id, &results, &mut settled).unwrap();
        let (layout, done) = (scheduler.results_layout(), scheduler.settled_layout().view(&settled));
        let reported = layout.view(&results);
        let width = layout.tokens.len / layout.flags.len;
        for (seq, row) in ids.iter().enumerate().take(header.num_decode + header.num_prefill) {
            let Some((_, id)) = live.iter().find(|(held, _)| held == row) else { continue };
            let new = &reported.tokens[seq * width..][..done.num_new[seq] as usize];
            served.texts.entry(*id).or_default().extend_from_slice(new);
            served.accepted += reported.num_accepted[seq];
        }
    }
    served
}

fn prompts() -> impl Strategy<Value = Vec<Vec<i64>>> {
    prop::collection::vec(prop::collection::vec(0..VOCAB as i64, 1..30), 1..6)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn drafts_change_no_text(
        prompts in prompts(),
        budget in 8_usize..64,
        errs in 0_usize..5,
        failing in prop::collection::vec(1_usize..60, 0..6),
    ) {
        let plain = serve(Kind::None, &prompts, 64, 0, &[]);
        // Greedy texts are known without any model.
        for (id, prompt) in prompts.iter().enumerate().filter(|(id, _)| id % 3 != 2) {
            let mut text = prompt.clone();
            let limit = MAX_LEN.min(prompt.len() + 20);
            while text.len() < limit {
                text.push(next_of(&text) as i64);
            }
            prop_assert_eq!(&plain.texts[&(id as i64)], &text[prompt.len()..]);
        }
        for kind in [Kind::Model, Kind::Translated, Kind::Text] {
            let drafted = serve(kind, &prompts, budget, errs, &failing);
            prop_assert_eq!(&drafted.texts, &plain.texts, "{:?}", kind);
            prop_assert!(drafted.faults <= failing.len());
        }
    }
}

#[test]
fn drafts_of_every_kind_are_accepted_and_faults_are_counted() {
    let prompts: Vec<Vec<i64>> = (0..4).map(|i| (i..i + 11).collect()).collect();
    for kind in [Kind::Model, Kind::Translated, Kind::Text] {
        assert!(serve(kind, &prompts, 32, 0, &[]).accepted > 30, "{kind:?}");
        let failed = serve(kind, &prompts, 32, 0, &[1, 2, 3]);
        assert!((1..=3).contains(&failed.faults), "{kind:?}: {}", failed.faults);
        assert!(failed.accepted > 20, "{kind:?}");
    }
}
