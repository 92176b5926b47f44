//! Masks, biases and penalties of an iteration's rows, and the log probabilities of its tokens. Runs no model.

use crate::error::Result;
use specrs_core::sampling::{LOGPROBS_NONE, RowContext, TokenCounts, TokenLogprobs, largest, log_softmax, lowest_id};
use specrs_core::scheduler::StepHeader;
use specrs_core::scheduler::layout::RecordView;
use std::ops::Range;

use super::{Host, Iteration, Model, RowState, Sequence};

/// Log probabilities of the tokens that a step emitted for one sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct SequenceLogprobs {
    /// Index of the sequence in the step's results.
    pub index: usize,
    /// Log probabilities of the sequence's tokens.
    pub tokens: TokenLogprobs,
}

/// Log probabilities of tokens of a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptLogprobs {
    /// Id of the request.
    pub request_id: i64,
    /// Position of the first of the tokens.
    pub position: usize,
    /// Log probabilities of the tokens from `position` on.
    pub tokens: TokenLogprobs,
}

/// Maximum number of prompt rows whose logits exist at once: with 150,000 ids they take 38 MB.
const PROMPT_ROWS: usize = 64;

/// Rows of one sequence's logits after masks, biases and penalties.
#[derive(Debug, Default)]
pub(super) struct Processed {
    /// Processed logits, `[M, V]`.
    pub(super) logits: Vec<f32>,
    /// Id of the largest logit of each row, `[M]`.
    pub(super) best: Vec<i64>,
    /// Largest logit of each row, `[M]`: minus infinity if no token is allowed.
    pub(super) tops: Vec<f32>,
    counts: TokenCounts,
    /// Masks of the step's grammars, by sequence and number of drafts before, `[sequences, K + 1, ceil(V / 32)]`.
    masks: Vec<u32>,
    /// Values that are reported, `[V]`.
    values: Vec<f32>,
}

impl Iteration {
    /// Returns whether the token after the sequence's first `num_drafts` drafts needs no logits: its grammar allows
    /// only the next draft there, and no log probabilities are reported.
    ///
    /// Such a draft is always accepted, so the token after the accepted drafts comes from a later row. That row has
    /// logits and attends to the rows before it, so NaN or infinity in their KV is still noticed in this step.
    pub(super) fn is_forced(&self, sequence: &Sequence, num_drafts: usize, state: &RowState<'_>) -> bool {
        if !self.processors[sequence.row].has_grammar || sequence.asked.logprobs || num_drafts == sequence.k {
            return false;
        }
        let draft = state.token(sequence.row, sequence.n + num_drafts) as usize;
        let allows_only = |mask: &[u32]| {
            mask.get(draft / 32).is_some_and(|word| word >> (draft % 32) & 1 == 1)
                && mask.iter().map(|word| word.count_ones()).sum::<u32>() == 1
        };
        self.processed.masks.get(self.mask_place(sequence, num_drafts)).is_some_and(allows_only)
    }

    /// Begins the grammars of sequences that have not ended.
    pub(super) fn start_grammars(&mut self, host: &mut dyn Host) -> Result<()> {
        for sequence in
            self.sequences.iter().filter(|sequence| sequence.alive && self.processors[sequence.row].has_grammar)
        {
            let place = self.mask_place(sequence, 0);
            let masks = &mut self.processed.masks;
            if masks.len() < place.end {
                masks.resize(self.config.max_num_seqs * (self.config.num_speculative_tokens + 1) * place.len(), 0);
            }
            host.start_grammar(sequence.index, sequence.row, &mut masks[place])?;
        }
        Ok(())
    }

    /// Advances the sequence's grammar, if it has one, by draft number `i` (from 1).
    pub(super) fn advance_grammar(
        &mut self,
        sequence: &Sequence,
        i: usize,
        draft: i64,
        host: &mut dyn Host,
    ) -> Result<()> {
        if !self.processors[sequence.row].has_grammar {
            return Ok(());
        }
        let place = self.mask_place(sequence, i);
        host.advance_grammar(sequence.index, draft, &mut self.processed.masks[place])
    }

    /// Returns the range in `masks` of the mask after a sequence's first `num_drafts` drafts.
    fn mask_place(&self, sequence: &Sequence, num_drafts: usize) -> Range<usize> {
        let words = self.sampler.vocab_size().div_ceil(32);
        let start = (sequence.index * (self.config.num_speculative_tokens + 1) + num_drafts) * words;
        start..start + words
    }

    /// Fills `processed` from `rows` of the last pass. The first row follows the sequence's first `num_drafts` drafts,
    /// and each further row one more draft.
    pub(super) fn process(&mut self, sequence: &Sequence, num_drafts: usize, rows: Range<usize>, state: &RowState<'_>) {
        let (vocab_size, processors) = (self.sampler.vocab_size(), &self.processors[sequence.row]);
        let place = self.mask_place(sequence, num_drafts);
        let Processed { logits, best, tops, counts, masks, .. } = &mut self.processed;
        let mut masks = masks.get(place.start..).unwrap_or_default().chunks_exact(place.len());
        logits.clear();
        logits.extend_from_slice(&self.logits[rows.start * vocab_size..rows.end * vocab_size]);
        best.clear();
        tops.clear();
        for (drafts, row) in (num_drafts..).zip(logits.chunks_exact_mut(vocab_size)) {
            let mask = masks.next();
            let position = sequence.n + drafts;
            let context = RowContext {
                tokens: state.tokens_before(sequence.row, position),
                prompt_len: state.prompt_len[sequence.row] as usize,
                stop_ids: state.stop_ids(sequence.row),
                is_before_min_len: (position as i64) < state.min_len[sequence.row],
                grammar: mask.filter(|_| processors.has_grammar),
            };
            processors.apply(row, &context, counts);
            let top = largest(row);
            best.push(lowest_id(row, top) as i64);
            tops.push(top);
        }
    }

    /// Keeps the log probabilities of the tokens that a sequence has emitted, if its request wants them. Its rows begin
    /// at `first` of the last pass; processed rows are in `processed`.
    pub(super) fn report_logprobs(&mut self, sequence: &Sequence, first: usize, state: &RowState<'_>) -> Result<()> {
        let emitted = state.num_tokens[sequence.row] as usize - sequence.n;
        if !sequence.asked.logprobs || emitted == 0 {
            return Ok(());
        }
        let (vocab_size, mode) = (self.sampler.vocab_size(), self.logprobs_mode);
        let mut found = TokenLogprobs::with_top(self.processors[sequence.row].logprobs, vocab_size, emitted);
        for i in 0..emitted {
            let raw = &self.logits[(first + i) * vocab_size..][..vocab_size];
            let values = &mut self.processed.values;
            values.resize(vocab_size, 0.0);
            if mode.is_processed() {
                let row = if sequence.asked.processing {
                    &self.processed.logits[i * vocab_size..][..vocab_size]
                } else {
                    raw
                };
                self.sampler.filter(row, &sequence.params, values)?;
            } else {
                values.copy_from_slice(raw);
            }
            if mode.is_normalized() {
                log_softmax(values);
            }
            found.push(values, state.token(sequence.row, sequence.n + i) as usize);
        }
        self.logprobs.push(SequenceLogprobs { index: sequence.index, tokens: found });
        Ok(())
    }

    /// Computes logits from the final hidden states of prompt chunks. It reports the log probabilities of prompts whose
    /// requests want them. The logits of each chunk's last row are left as after a pass, unless no chunk needs them.
    ///
    /// Returns the index of each chunk's last row among the kept hidden states, `[num_prefill]`.
    pub(super) fn prompt_logprobs(
        &mut self,
        record: &RecordView<'_>,
        header: StepHeader,
        state: &RowState<'_>,
        target: &mut dyn Model,
    ) -> Result<Vec<usize>> {
        let (vocab_size, mut at, mut needs_logits) = (self.sampler.vocab_size(), 0, false);
        let mut last = Vec::with_capacity(header.num_prefill);
        for chunk in 0..header.num_prefill {
            let row = record.seq_row[header.num_decode + chunk] as usize;
            let (start, len) = (record.chunk_start[chunk] as usize, record.chunk_len[chunk] as usize);
            let processors = &self.processors[row];
            needs_logits |= !processors.pooling || processors.limits_ids();
            if processors.prompt_logprobs != LOGPROBS_NONE {
                // The row fed at position p gives the prompt's token p + 1.
                let count = len.min((state.prompt_len[row] as usize).saturating_sub(1 + start));
                let mut found = TokenLogprobs::with_top(processors.prompt_logprobs, vocab_size, count);
                let rows: Vec<usize> = (at..at + count).collect();
                let mut position = start;
                for rows in rows.chunks(PROMPT_ROWS) {
                    self.logits.resize(self.logits.len().max(rows.len() * vocab_size), 0.0);
                    let logits = &mut self.logits[..rows.len() * vocab_size];
                    target.logits(rows, logits)?;
                    for values in logits.chunks_exact_mut(vocab_size) {
                        log_softmax(values);
                        position += 1;
                        found.push(values, state.token(row, position) as usize);
                    }
                }
                if count > 0 {
                    let report =
                        PromptLogprobs { request_id: processors.request_id, position: start + 1, tokens: found };
                    self.prompt_logprobs.push(report);
                }
                at += len - 1;
            }
            last.push(at);
            at += 1;
        }
        if needs_logits {
            self.logits.resize(self.logits.len().max(last.len() * vocab_size), 0.0);
            target.logits(&last, &mut self.logits[..last.len() * vocab_size])?;
            self.find_largest(last.len(), true);
        } else {
            self.best.resize(last.len(), 0);
            self.tops.resize(last.len(), 0.0);
        }
        Ok(last)
    }
}
