//! Execution of a whole step on a CPU as one call: uploads, prompt chunks, draft catch-up chunks, and one decode
//! iteration, in this order.
//!
//! The rules are those of docs/start.md, with the same names. This module plans and settles nothing. [`Model`] runs the
//! passes, and [`Host`] provides services that need the host.

mod accept;
mod batch;
mod draft;
mod faults;
mod hidden;
mod host;
mod model;
mod passes;
mod pooling;
mod prefill;
mod process;
mod state;
mod text;
mod translate;
mod verify;

use crate::error::{Error, Result, check_len};
use crate::states::StateSnapshot;
use specrs_core::sampling::{LOGPROBS_NONE, LogitsProcessors, LogprobsMode, Sampler, SamplingParams};
use specrs_core::scheduler::layout::{RecordLayout, RecordView, ResultsLayout};
use specrs_core::scheduler::{SchedulerConfig, StepHeader};
use specrs_core::{Drafter, DrafterKind};
use std::time::Duration;

use batch::Batch;
pub use faults::DraftFault;
use hidden::HiddenStates;
pub use host::{Host, NoHost, Stage};
pub use model::{Cached, Facts, Model, Translated};
pub use pooling::Pooled;
use process::Processed;
pub use process::{PromptLogprobs, SequenceLogprobs};
pub use state::{HiddenRows, OwnedRowState, RowState};
use text::TextDrafts;
pub use text::TextLimits;
pub use translate::Translation;

/// Rule that verifies the drafts of requests that sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Rejection sampling: Leviathan et al. 2023, algorithm 1.
    Rejection,
    /// Coupled draws: draft and target draw with the same noise.
    Coupled,
}

/// Number of passes that a step ran.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Number of passes of the target.
    pub target_passes: usize,
    /// Number of passes of the draft model or the head.
    pub draft_passes: usize,
}

/// Needs of a request besides its tokens: changed logits, or log probabilities.
#[derive(Clone, Copy, Debug, Default)]
struct Asked {
    /// Whether masks, biases or penalties may change the request's logits.
    processing: bool,
    /// Whether log probabilities of the request's tokens are reported.
    logprobs: bool,
}

/// Sequence of a decode iteration, or the end of a prompt, which is an iteration without drafts.
#[derive(Clone, Copy, Debug)]
struct Sequence {
    /// Index of the sequence in the step's results.
    index: usize,
    row: usize,
    /// Number of tokens, n, at the start of the iteration.
    n: usize,
    /// Number of drafts, `K_r`, after the device's own guards.
    k: usize,
    /// Drafter of the sequence's drafts, a `DrafterKind`.
    drafter: i64,
    /// Whether the row is live; false for rows that ended before this step.
    alive: bool,
    /// Whether the block table covers all drafts; if not, the sequence is not fed.
    fits: bool,
    seed: u64,
    params: SamplingParams,
    asked: Asked,
    /// `FLAG_*` bits of the sequence's drafts.
    flags: i64,
}

impl Sequence {
    fn runs(&self) -> bool {
        self.alive && self.fits
    }

    /// Returns whether passes draw the sequence's drafts; otherwise they are in the record.
    fn on_device(&self) -> bool {
        self.drafter == DrafterKind::Device as i64
    }

    /// Returns the number of draft passes that the sequence needs, one for each draft. It is 0 if the host proposed its
    /// drafts, or if it does not run.
    fn passes(&self) -> usize {
        if self.runs() && self.on_device() { self.k } else { 0 }
    }

    /// Returns whether the sequence needs only the largest logit of each row from the model.
    fn takes_largest(&self) -> bool {
        self.params.greedy && !self.asked.processing
    }
}

/// Executor of steps over two models. It keeps work space, and the logits processors of the requests in its rows.
pub struct Iteration {
    config: SchedulerConfig,
    rule: Rule,
    rates: Option<Vec<f32>>,
    record: RecordLayout,
    results: ResultsLayout,
    sampler: Sampler,
    logprobs_mode: LogprobsMode,
    /// Logits processors of the request last admitted into each row, `[R + 1]`.
    processors: Vec<LogitsProcessors>,
    processed: Processed,
    /// Log probabilities of the last step's tokens.
    logprobs: Vec<SequenceLogprobs>,
    /// Log probabilities of prompt tokens in the last step.
    prompt_logprobs: Vec<PromptLogprobs>,
    /// Hidden states and logits of the last step for requests with pooling.
    pooled: Vec<Pooled>,
    batch: Batch,
    /// Snapshots of states that the step may write.
    snapshots: Vec<StateSnapshot>,
    sequences: Vec<Sequence>,
    /// Copy of `sequences` from before drafting.
    planned: Vec<Sequence>,
    hidden: HiddenStates,
    /// State of a draft model that works by text; `None` for other drafters.
    texts: Option<TextDrafts>,
    /// Logits of the requested rows, `[N, V]`.
    logits: Vec<f32>,
    /// Id of the largest logit of each requested row.
    best: Vec<i64>,
    /// Largest logit of each requested row; not finite if the row is not.
    tops: Vec<f32>,
    /// Distribution that each draft was drawn from, `[B, K, V]`.
    q: Vec<f32>,
    /// K of `q`; 0 if this iteration has no `q`.
    q_width: usize,
    /// Whether some sequence of the iteration was planned with drafts.
    drafting: bool,
    counts: Counts,
    fault: Option<DraftFault>,
    /// Time of passes since it was last taken; `None` if passes are not timed.
    pass_time: Option<Duration>,
}

impl Iteration {
    /// Makes an executor for steps of a scheduler with these settings, over a target of `vocab_size` ids. With
    /// `rates`, drafts are accepted at these unconditional rates by position, whatever the models say. That is for
    /// timing only.
    ///
    /// # Errors
    /// If the vocabulary cannot be sampled, or `rates` does not have one rate for each draft.
    pub fn new(
        config: SchedulerConfig,
        rule: Rule,
        rates: Option<Vec<f32>>,
        logprobs_mode: LogprobsMode,
        vocab_size: usize,
    ) -> Result<Self> {
        if let Some(rates) = &rates
            && rates.len() != config.num_speculative_tokens
        {
            let allowed = format!("one for each of {} drafts", config.num_speculative_tokens);
            return Err(Error::invalid("rates", format!("{} numbers", rates.len()), allowed));
        }
        Ok(Self {
            record: RecordLayout::new(&config),
            results: ResultsLayout::new(&config),
            rule,
            rates,
            sampler: Sampler::new(vocab_size)?,
            logprobs_mode,
            processors: vec![LogitsProcessors::default(); config.max_num_seqs + 1],
            processed: Processed::default(),
            logprobs: Vec::new(),
            prompt_logprobs: Vec::new(),
            pooled: Vec::new(),
            texts: None,
            batch: Batch::default(),
            snapshots: Vec::new(),
            sequences: Vec::new(),
            planned: Vec::new(),
            hidden: HiddenStates::default(),
            logits: Vec::new(),
            best: Vec::new(),
            tops: Vec::new(),
            q: Vec::new(),
            q_width: 0,
            drafting: false,
            counts: Counts::default(),
            fault: None,
            pass_time: None,
            config,
        })
    }

    /// Sets up a draft model with a tokenizer of its own, for a scheduler with [`Drafter::Text`]. `limits` bounds the
    /// draft model's texts.
    #[must_use]
    pub fn with_text_drafts(mut self, limits: TextLimits) -> Self {
        self.texts = Some(TextDrafts::new(limits, self.config.max_num_seqs + 1));
        self
    }

    /// Sets the rule from the next step on.
    pub fn set_rule(&mut self, rule: Rule) {
        self.rule = rule;
    }

    /// Takes the log probabilities of the tokens that the last step emitted, by sequence, for requests that want them.
    pub fn take_logprobs(&mut self) -> Vec<SequenceLogprobs> {
        std::mem::take(&mut self.logprobs)
    }

    /// Takes the log probabilities of the prompt tokens that the last step's chunks predict, for requests that want
    /// them.
    pub fn take_prompt_logprobs(&mut self) -> Vec<PromptLogprobs> {
        std::mem::take(&mut self.prompt_logprobs)
    }

    /// Takes the hidden states and logits of prompts that ended in the last step, for requests with pooling.
    pub fn take_pooled(&mut self) -> Vec<Pooled> {
        std::mem::take(&mut self.pooled)
    }

    /// Reads the logits processors of the requests that a step admits.
    fn admit(&mut self, record: &RecordView<'_>, header: StepHeader) {
        let vocab_size = self.sampler.vocab_size();
        for index in 0..header.num_admitted {
            self.processors[record.admit_row[index] as usize] = LogitsProcessors::read(record, index, vocab_size);
        }
        if let Some(texts) = &mut self.texts {
            texts.admit(record, header);
        }
    }

    /// Gives admitted rows the states that they begin with, and reads which snapshots the step may write.
    fn read_snapshots(&mut self, record: &RecordView<'_>, header: StepHeader, target: &mut dyn Model) -> Result<()> {
        let admitted = record.admit_row.iter().zip(record.admit_snapshot).take(header.num_admitted);
        for (&row, &slot) in admitted.filter(|&(_, &slot)| slot >= 0) {
            target.restore_states(row as usize, slot as usize)?;
        }
        self.snapshots.clear();
        let rows = record.snapshot_row.iter().zip(record.snapshot_len).zip(record.snapshot_slot);
        self.snapshots.extend(rows.take(header.num_snapshots).map(|((&row, &len), &slot)| StateSnapshot {
            row: row as usize,
            len: len as usize,
            slot: slot as usize,
        }));
        Ok(())
    }

    /// Returns the total time of passes since the last call, and sets it to zero. Passes are timed only after the first
    /// call. For benchmarks.
    pub fn take_pass_time(&mut self) -> Duration {
        self.pass_time.replace(Duration::ZERO).unwrap_or_default()
    }

    /// Executes the step planned in `record`: changes row state and both KV caches, and writes the results into
    /// `results`.
    ///
    /// The head's KV after the step's prompt chunks is left to the next call, so that no first token waits for it.
    ///
    /// If the drafter fails, the step goes on without the drafts of its passes and reports that there were none.
    /// [`take_draft_fault`](Self::take_draft_fault) then returns the failure.
    ///
    /// `host` provides the masks of sequences whose requests have a grammar, and translates texts between tokenizers.
    ///
    /// # Errors
    /// If a buffer has another size than the scheduler's, or the target or the host fails.
    pub fn run(
        &mut self,
        record: &[i64],
        results: &mut [i64],
        state: &mut RowState<'_>,
        target: &mut dyn Model,
        mut draft: Option<&mut dyn Model>,
        host: &mut dyn Host,
    ) -> Result<Counts> {
        check_len("record", record.len(), self.record.size)?;
        self.logprobs.clear();
        self.prompt_logprobs.clear();
        self.pooled.clear();
        check_len("results", results.len(), self.results.size)?;
        state.check(&self.config)?;
        self.hidden.check(&self.config, state, target, draft.as_deref())?;
        (self.counts, self.drafting) = (Counts::default(), false);
        if let Some(draft) = reborrow(&mut draft) {
            self.feed_behind(state, draft, host)?;
        }
        let header = StepHeader::read(record);
        let view = self.record.view(record);
        self.admit(&view, header);
        state.upload(&view, header);
        self.read_snapshots(&view, header, target)?;
        if header.num_prefill > 0 {
            self.prefill(&view, header, results, state, target, host)?;
        }
        if header.num_draft_chunks > 0 {
            if matches!(self.config.drafter, Drafter::Hidden { .. }) {
                self.leave_behind(&view, header, state);
            } else {
                self.catch_up(&view, header, state, reborrow(&mut draft), host)?;
            }
        }
        if header.num_decode > 0 {
            self.prepare(&view, header, state);
            self.start_grammars(host)?;
            if self.config.host_drafters.is_some() {
                self.place(&view, state, host)?;
            }
            if let Some(draft) = draft.filter(|_| self.config.drafter != Drafter::None) {
                self.draft_or_not(state, target, draft, host)?;
            }
            self.verify(state, target)?;
            self.accept(results, state)?;
        }
        Ok(self.counts)
    }

    /// Reads lengths from row state and applies the device's guards to the planned `K_r`: `max(min(planned, min(limit -
    /// 1, draft context + 1) - n), 0)`. It is 0 if the row has ended or the draft's KV lags by more than
    /// `max_draft_lag`. A head starts anew after any lag. For drafts that the host proposed, neither the draft's
    /// context nor its lag counts.
    fn prepare(&mut self, record: &RecordView<'_>, header: StepHeader, state: &RowState<'_>) {
        self.sequences.clear();
        self.drafting = header.max_k > 0;
        for index in 0..header.num_decode {
            let (row, planned) = (record.seq_row[index] as usize, record.seq_k[index]);
            let mut sequence = self.sequence_of(index, row, record.seq_capacity[index], state);
            let n = sequence.n as i64;
            let mut end = state.limit[row] - 1;
            let mut ready = sequence.alive;
            sequence.drafter = record.seq_drafter[index];
            match self.config.drafter {
                Drafter::Cached { max_model_len, max_draft_lag, .. } if sequence.on_device() => {
                    end = end.min(max_model_len as i64 + 1);
                    ready &= state.draft_len[row] >= n - max_draft_lag as i64;
                }
                Drafter::Hidden { max_model_len, .. } | Drafter::SharedKv { max_model_len } if sequence.on_device() => {
                    end = end.min(max_model_len as i64 + 1);
                }
                _ => {}
            }
            sequence.k = if ready { planned.min(end - n).max(0) as usize } else { 0 };
            sequence.fits &= n + sequence.k as i64 <= record.seq_capacity[index];
            self.sequences.push(sequence);
        }
    }

    /// Makes a sequence without drafts.
    fn sequence_of(&self, index: usize, row: usize, capacity: i64, state: &RowState<'_>) -> Sequence {
        let (n, processors) = (state.num_tokens[row] as usize, &self.processors[row]);
        Sequence {
            index,
            row,
            n,
            k: 0,
            drafter: DrafterKind::Device as i64,
            alive: state.active[row],
            fits: n as i64 <= capacity,
            seed: state.seeds[row] as u64,
            params: state.sampling(row),
            asked: Asked { processing: processors.change_logits(), logprobs: processors.logprobs != LOGPROBS_NONE },
            flags: 0,
        }
    }
}

/// Borrows the model for one more call.
fn reborrow<'a>(model: &'a mut Option<&mut dyn Model>) -> Option<&'a mut dyn Model> {
    match model {
        Some(model) => Some(&mut **model),
        None => None,
    }
}
