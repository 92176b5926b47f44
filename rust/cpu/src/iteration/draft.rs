//! Drafts of an iteration: by passes of the draft model, or from the record.

use crate::error::Result;
use specrs_core::Drafter;
use specrs_core::philox::Purpose;
use specrs_core::scheduler::layout::{FLAG_DRAFT_NON_FINITE, RecordView};

use super::model::Attending;
use super::passes::{Want, Whose};
use super::{Host, Iteration, Model, RowState, Rule, Sequence};

impl Iteration {
    /// Draws up to `K_r` drafts per sequence. Pass i feeds the inputs of draft i for the sequences with `K_r >= i`;
    /// with a mask token there is one pass for all drafts.
    ///
    /// The passes of a head without KV of its own read the KV of `target`.
    pub(super) fn draft(
        &mut self,
        state: &mut RowState<'_>,
        target: &mut dyn Model,
        draft: &mut dyn Model,
        host: &mut dyn Host,
    ) -> Result<()> {
        let most = self.sequences.iter().map(Sequence::passes).max().unwrap_or(0);
        let samples = self.sequences.iter().any(|sequence| sequence.passes() > 0 && !sequence.params.greedy);
        self.q_width = if samples && self.rule == Rule::Rejection { most } else { 0 };
        self.q.resize(self.q.len().max(self.sequences.len() * self.q_width * self.sampler.vocab_size()), 0.0);
        let drafter = self.config.drafter;
        self.begin(state);
        let masked = matches!(drafter, Drafter::Cached { mask_token_id: Some(_), .. });
        for i in 1..=if masked { most.min(1) } else { most } {
            let want = Want::of_drafter(self.sequences.iter().filter(|sequence| sequence.passes() >= i));
            match drafter {
                Drafter::Cached { max_draft_lag, mask_token_id, .. } => {
                    self.gather(i, state, max_draft_lag, mask_token_id);
                    self.pass(state, draft, want, Whose::Draft)?;
                }
                Drafter::SharedKv { .. } => {
                    let mut head = Attending { head: &mut *draft, target: &mut *target };
                    self.attending_pass(i, state, &mut head, want)?;
                }
                _ => self.head_pass(i, state, draft, want)?,
            }
            self.counts.draft_passes += 1;
            let mut sequences = std::mem::take(&mut self.sequences);
            let mut at = 0;
            for (b, sequence) in sequences.iter_mut().enumerate().filter(|(_, sequence)| sequence.passes() >= i) {
                let end = if masked { sequence.k } else { i };
                for draft in i..=end {
                    self.draw(b, sequence, draft, at, state, host)?;
                    at += 1;
                }
            }
            self.sequences = sequences;
        }
        Ok(())
    }

    /// Gathers the rows of pass `i` of a draft model. Pass 1 feeds position n - 1, and earlier positions whose draft KV
    /// is missing, `max_draft_lag` in all at most. So missing tokens are caught up without a pass of their own.
    ///
    /// Without a mask token, pass i feeds draft i - 1. With a mask token, pass 1 also feeds the mask at the positions
    /// of drafts 1 to `K_r - 1`. The mask's KV is overwritten when the true tokens are fed.
    fn gather(&mut self, i: usize, state: &RowState<'_>, max_draft_lag: usize, mask_token_id: Option<i64>) {
        self.batch.clear();
        let block_size = self.config.block_size;
        for sequence in self.sequences.iter().filter(|sequence| sequence.passes() >= i) {
            let last = sequence.n + i - 2;
            if i == 1 {
                let first = (state.draft_len[sequence.row] as usize).max(sequence.n.saturating_sub(max_draft_lag));
                for position in first..last {
                    self.batch.feed(state, sequence.row, position, block_size);
                }
            }
            self.batch.feed(state, sequence.row, last, block_size);
            self.batch.want_last();
            if let Some(mask) = mask_token_id {
                for position in sequence.n..sequence.n + sequence.k - 1 {
                    self.batch.push(sequence.row, mask, position, state.slot(sequence.row, position, block_size));
                    self.batch.want_last();
                }
            }
        }
    }

    /// Draws draft `i` of sequence `b` from row `at` of the pass. Greedy sequences take the argmax, others draw from
    /// the draft's own processed distribution, which `rejection` keeps as q.
    fn draw(
        &mut self,
        b: usize,
        sequence: &mut Sequence,
        i: usize,
        at: usize,
        state: &mut RowState<'_>,
        host: &mut dyn Host,
    ) -> Result<()> {
        let vocab_size = self.sampler.vocab_size();
        let (logits, best) = if sequence.asked.processing {
            self.process(sequence, i - 1, at..at + 1, state);
            (&self.processed.logits, self.processed.best[0])
        } else {
            (&self.logits, self.best[at])
        };
        let mut token = best;
        if !sequence.params.greedy {
            let purpose = if self.rule == Rule::Rejection { Purpose::Draft } else { Purpose::Gumbel };
            let row = &logits[if sequence.asked.processing { 0 } else { at * vocab_size }..][..vocab_size];
            let position = (sequence.n + i - 1) as u64;
            token = i64::from(self.sampler.draw(row, &sequence.params, sequence.seed, position, purpose)?);
            if self.q_width > 0 {
                let q = &mut self.q[(b * self.q_width + i - 1) * vocab_size..][..vocab_size];
                self.sampler.probabilities(q)?;
            }
        }
        if !self.tops[at].is_finite() {
            sequence.flags |= FLAG_DRAFT_NON_FINITE;
        }
        state.write_tokens(sequence.row, sequence.n + i - 1, &[token]);
        self.advance_grammar(sequence, i, token, host)
    }

    /// Copies the drafts that the record contains into row state; their q is a point mass.
    pub(super) fn place(
        &mut self,
        record: &RecordView<'_>,
        state: &mut RowState<'_>,
        host: &mut dyn Host,
    ) -> Result<()> {
        let sequences = std::mem::take(&mut self.sequences);
        for sequence in sequences.iter().filter(|sequence| sequence.runs() && !sequence.on_device()) {
            let start = sequence.index * self.config.num_speculative_tokens;
            let drafts = &record.draft_token[start..start + sequence.k];
            state.write_tokens(sequence.row, sequence.n, drafts);
            for (i, &draft) in (1..).zip(drafts) {
                self.advance_grammar(sequence, i, draft, host)?;
            }
        }
        self.sequences = sequences;
        Ok(())
    }
}
