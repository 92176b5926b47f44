//! A whole launch on a CPU as one call: uploads, prompt chunks, draft catch-up chunks, one decode iteration, in this order.
//!
//! The rules are those of docs/start.md, under the same names.
//!
//! It plans nothing and settles nothing. Models are behind [`Model`]; what only the host can do is behind [`Host`].

mod accept;
mod batch;
mod draft;
mod faults;
mod hidden;
mod host;
mod model;
mod passes;
mod prefill;
mod process;
mod state;
mod text;
mod translate;
mod verify;

use crate::error::{Error, Result, check_len};
use specrs_core::sampling::{LOGPROBS_NONE, LogitsProcessors, LogprobsMode, Sampler, SamplingParams};
use specrs_core::scheduler::layout::{RecordLayout, RecordView, ResultsLayout};
use specrs_core::scheduler::{LaunchHeader, SchedulerConfig};
use specrs_core::{Drafter, DrafterKind};
use std::time::Duration;

use batch::Batch;
pub use faults::DraftFault;
use hidden::HiddenStates;
pub use host::{Host, NoHost, Stage};
pub use model::{Cached, Facts, Model, Translated};
use process::Processed;
pub use process::{EntryLogprobs, PromptLogprobs};
pub use state::{HiddenRows, OwnedRowState, RowState};
use text::TextDrafts;
pub use text::TextLimits;
pub use translate::Translation;

/// What verifies the drafts of requests that sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Leviathan et al. 2023, algorithm 1.
    Rejection,
    /// Draft and target draw with the same noise.
    Coupled,
}

/// Passes that a launch ran.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Of the target.
    pub target_passes: usize,
    /// Of the draft model, or of the head.
    pub draft_passes: usize,
}

/// What a request asks besides its tokens.
#[derive(Clone, Copy, Debug, Default)]
struct Asked {
    /// Masks, biases or penalties, which may change its logits.
    processing: bool,
    /// Log probabilities of its tokens.
    logprobs: bool,
}

/// One entry of a decode iteration, or the end of a prompt, which is an iteration without drafts.
#[derive(Clone, Copy, Debug)]
struct Entry {
    /// Index in the launch's results.
    index: usize,
    row: usize,
    /// n at the start of the iteration.
    n: usize,
    /// `K_r` after the device's own guards.
    k: usize,
    /// Whose its drafts are, a `DrafterKind`.
    drafter: i64,
    /// False for rows that ended before this launch.
    alive: bool,
    /// Whether the block table covers all drafts. Where it does not, nothing is fed.
    fits: bool,
    seed: u64,
    params: SamplingParams,
    asked: Asked,
    /// FLAG_* bits of its drafts.
    flags: i64,
}

impl Entry {
    fn runs(&self) -> bool {
        self.alive && self.fits
    }

    /// Whether passes draw its drafts; else they are in the record.
    fn on_device(&self) -> bool {
        self.drafter == DrafterKind::Device as i64
    }

    /// Passes that draw its drafts.
    fn passes(&self) -> usize {
        if self.runs() && self.on_device() { self.k } else { 0 }
    }

    /// Whether the model's largest logit is all that is asked of its rows.
    fn takes_largest(&self) -> bool {
        self.params.greedy && !self.asked.processing
    }
}

/// Runs launches over two models; keeps work space, and what the requests in its rows ask of their logits.
pub struct Iteration {
    config: SchedulerConfig,
    rule: Rule,
    rates: Option<Vec<f32>>,
    record: RecordLayout,
    results: ResultsLayout,
    sampler: Sampler,
    logprobs_mode: LogprobsMode,
    /// `[R + 1]`, of the request that was last admitted into each row.
    processors: Vec<LogitsProcessors>,
    processed: Processed,
    /// Of the last launch.
    logprobs: Vec<EntryLogprobs>,
    /// Of the last launch.
    prompt_logprobs: Vec<PromptLogprobs>,
    batch: Batch,
    entries: Vec<Entry>,
    /// `entries` as they were before drafting.
    planned: Vec<Entry>,
    hidden: HiddenStates,
    /// Of a draft model that goes by text.
    texts: Option<TextDrafts>,
    /// Logits of wanted rows, `[N, V]`.
    logits: Vec<f32>,
    /// Argmax of wanted rows, and its logit: not finite where the row is not.
    best: Vec<i64>,
    tops: Vec<f32>,
    /// `[B, K, V]`, what each draft was drawn from.
    q: Vec<f32>,
    /// K of q; 0 where this iteration has none.
    q_width: usize,
    /// Some entry of the iteration was planned with drafts.
    drafting: bool,
    counts: Counts,
    fault: Option<DraftFault>,
    /// What passes took since it was last asked for; None: they are not timed.
    pass_time: Option<Duration>,
}

impl Iteration {
    /// For launches of a scheduler with these settings, over a target of `vocab_size` ids. With `rates` drafts stand at these
    /// unconditional rates by position, whatever the models say: for timing only.
    ///
    /// # Errors
    /// For a vocabulary that cannot be sampled, or rates that are not one for each draft.
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
            return Err(Error::invalid("rates", format!("{} of them", rates.len()), allowed));
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
            texts: None,
            batch: Batch::default(),
            entries: Vec::new(),
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

    /// For a scheduler with [`Drafter::Text`]: the draft model's texts are within these limits.
    #[must_use]
    pub fn with_text_drafts(mut self, limits: TextLimits) -> Self {
        self.texts = Some(TextDrafts::new(limits, self.config.max_num_seqs + 1));
        self
    }

    /// Another rule from the next launch on.
    pub fn set_rule(&mut self, rule: Rule) {
        self.rule = rule;
    }

    /// Log probabilities of the tokens that the last launch emitted, by entry; of entries whose requests ask for them.
    pub fn take_logprobs(&mut self) -> Vec<EntryLogprobs> {
        std::mem::take(&mut self.logprobs)
    }

    /// Log probabilities of the prompt tokens that the last launch's chunks predict, where requests ask for them.
    pub fn take_prompt_logprobs(&mut self) -> Vec<PromptLogprobs> {
        std::mem::take(&mut self.prompt_logprobs)
    }

    /// Takes over what the requests that a launch admits ask of their logits.
    fn admit(&mut self, record: &RecordView<'_>, header: LaunchHeader) {
        let vocab_size = self.sampler.vocab_size();
        for index in 0..header.num_admitted {
            self.processors[record.admit_row[index] as usize] = LogitsProcessors::read(record, index, vocab_size);
        }
        if let Some(texts) = &mut self.texts {
            texts.admit(record, header);
        }
    }

    /// What passes took since this was last called, and from its first call on: for benchmarks, as it is not measured
    /// before.
    pub fn take_pass_time(&mut self) -> Duration {
        self.pass_time.replace(Duration::ZERO).unwrap_or_default()
    }

    /// Executes the launch planned in `record`: mutates row state and both KV caches, reports into `results`.
    ///
    /// The KV of a head behind the launch's prompt chunks is left to the next call, so that no first token waits for it.
    ///
    /// Where the drafter fails the launch goes on without the drafts of its passes, reports that none were made, and
    /// [`take_draft_fault`](Self::take_draft_fault) says why.
    ///
    /// `host` is asked for the masks of entries whose requests have a grammar, and for what texts are in other tokens.
    ///
    /// # Errors
    /// For buffers of other sizes than the scheduler's, and what the target or the host says.
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
        check_len("results", results.len(), self.results.size)?;
        state.check(&self.config)?;
        self.hidden.check(&self.config, state, target, draft.as_deref())?;
        (self.counts, self.drafting) = (Counts::default(), false);
        if let Some(draft) = reborrow(&mut draft) {
            self.feed_behind(state, draft, host)?;
        }
        let header = LaunchHeader::read(record);
        let view = self.record.view(record);
        self.admit(&view, header);
        state.upload(&view, header);
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
                self.draft_or_not(state, draft, host)?;
            }
            self.verify(state, target)?;
            self.accept(results, state)?;
        }
        Ok(self.counts)
    }

    /// Reads lengths from row state and applies the device's guards to the planned `K_r`:
    /// `max(min(planned, min(limit - 1, draft context + 1) - n), 0)`, and 0 where the row has ended or the draft's KV lags by
    /// more than `max_draft_lag`; a head starts anew behind any lag.
    fn prepare(&mut self, record: &RecordView<'_>, header: LaunchHeader, state: &RowState<'_>) {
        self.entries.clear();
        self.drafting = header.max_k > 0;
        for index in 0..header.num_decode {
            let (row, planned) = (record.entry_row[index] as usize, record.entry_k[index]);
            let mut entry = self.entry_of(index, row, record.entry_capacity[index], state);
            let n = entry.n as i64;
            let mut end = state.limit[row] - 1;
            let mut ready = entry.alive;
            entry.drafter = record.entry_drafter[index];
            match self.config.drafter {
                Drafter::Cached { max_model_len, max_draft_lag, .. } if entry.on_device() => {
                    end = end.min(max_model_len as i64 + 1);
                    ready &= state.draft_len[row] >= n - max_draft_lag as i64;
                }
                Drafter::Hidden { max_model_len, .. } if entry.on_device() => end = end.min(max_model_len as i64 + 1),
                _ => {}
            }
            entry.k = if ready { planned.min(end - n).max(0) as usize } else { 0 };
            entry.fits &= n + entry.k as i64 <= record.entry_capacity[index];
            self.entries.push(entry);
        }
    }

    /// An entry without drafts.
    fn entry_of(&self, index: usize, row: usize, capacity: i64, state: &RowState<'_>) -> Entry {
        let (n, processors) = (state.num_tokens[row] as usize, &self.processors[row]);
        Entry {
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

/// The same model for one call more.
fn reborrow<'a>(model: &'a mut Option<&mut dyn Model>) -> Option<&'a mut dyn Model> {
    match model {
        Some(model) => Some(&mut **model),
        None => None,
    }
}
