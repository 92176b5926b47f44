//! Drafts of an iteration: by passes of the draft model, or from the record.

use crate::error::Result;
use specrs_core::Drafter;
use specrs_core::philox::Purpose;
use specrs_core::scheduler::layout::{FLAG_DRAFT_NON_FINITE, RecordView};

use super::passes::{Want, Whose};
use super::{Entry, Host, Iteration, Model, RowState, Rule};

impl Iteration {
    /// Draws up to `K_r` drafts per entry. Pass i feeds the inputs of draft i for the entries with `K_r >= i`; with a
    /// mask token there is one pass for all drafts.
    pub(super) fn draft(&mut self, state: &mut RowState<'_>, draft: &mut dyn Model, host: &mut dyn Host) -> Result<()> {
        let most = self.entries.iter().map(Entry::passes).max().unwrap_or(0);
        let samples = self.entries.iter().any(|entry| entry.passes() > 0 && !entry.params.greedy);
        self.q_width = if samples && self.rule == Rule::Rejection { most } else { 0 };
        self.q.resize(self.q.len().max(self.entries.len() * self.q_width * self.sampler.vocab_size()), 0.0);
        let drafter = self.config.drafter;
        self.begin(state);
        let masked = matches!(drafter, Drafter::Cached { mask_token_id: Some(_), .. });
        for i in 1..=if masked { most.min(1) } else { most } {
            let want = Want::of_drafter(self.entries.iter().filter(|entry| entry.passes() >= i));
            if let Drafter::Cached { max_draft_lag, mask_token_id, .. } = drafter {
                self.gather(i, state, max_draft_lag, mask_token_id);
                self.pass(state, draft, want, Whose::Draft)?;
            } else {
                self.head_pass(i, state, draft, want)?;
            }
            self.counts.draft_passes += 1;
            let mut entries = std::mem::take(&mut self.entries);
            let mut at = 0;
            for (b, entry) in entries.iter_mut().enumerate().filter(|(_, entry)| entry.passes() >= i) {
                let end = if masked { entry.k } else { i };
                for draft in i..=end {
                    self.draw(b, entry, draft, at, state, host)?;
                    at += 1;
                }
            }
            self.entries = entries;
        }
        Ok(())
    }

    /// Gathers the rows of pass `i` of a draft model. Pass 1 feeds n - 1, and those of the `max_draft_lag` positions up
    /// to it whose KV is missing. So missing tokens are caught up without a pass of their own.
    ///
    /// Without a mask token, pass i feeds draft i - 1. With a mask token, pass 1 also feeds it in place of drafts 1 to
    /// `K_r - 1`. Its KV there is overwritten when the true tokens are fed.
    fn gather(&mut self, i: usize, state: &RowState<'_>, max_draft_lag: usize, mask_token_id: Option<i64>) {
        self.batch.clear();
        let block_size = self.config.block_size;
        let entries = std::mem::take(&mut self.entries);
        for entry in entries.iter().filter(|entry| entry.passes() >= i) {
            // Later drafts of a single pass have no masks yet.
            let is_forced = mask_token_id.is_none() && self.is_forced(entry, i - 1);
            let last = entry.n + i - 2;
            if i == 1 {
                let first = (state.draft_len[entry.row] as usize).max(entry.n.saturating_sub(max_draft_lag));
                for position in first..last {
                    self.batch.feed(state, entry.row, position, block_size);
                }
            }
            self.batch.feed(state, entry.row, last, block_size);
            self.batch.want_last_unless(is_forced);
            if let Some(mask) = mask_token_id {
                for position in entry.n..entry.n + entry.k - 1 {
                    self.batch.push(entry.row, mask, position, state.slot(entry.row, position, block_size));
                    self.batch.want_last();
                }
            }
        }
        self.entries = entries;
    }

    /// Draws draft `i` of entry `b` from row `at` of the pass. Greedy entries take the argmax, others draw from the
    /// draft's own processed distribution, which `rejection` keeps as q.
    fn draw(
        &mut self,
        b: usize,
        entry: &mut Entry,
        i: usize,
        at: usize,
        state: &mut RowState<'_>,
        host: &mut dyn Host,
    ) -> Result<()> {
        let vocab_size = self.sampler.vocab_size();
        let (logits, best) = if entry.asked.processing {
            self.process(entry, i - 1, at..at + 1, state);
            (&self.processed.logits, self.processed.best[0])
        } else {
            (&self.logits, self.best[at])
        };
        let mut token = best;
        if !entry.params.greedy {
            let purpose = if self.rule == Rule::Rejection { Purpose::Draft } else { Purpose::Gumbel };
            let row = &logits[if entry.asked.processing { 0 } else { at * vocab_size }..][..vocab_size];
            let position = (entry.n + i - 1) as u64;
            token = i64::from(self.sampler.draw(row, &entry.params, entry.seed, position, purpose)?);
            if self.q_width > 0 {
                let q = &mut self.q[(b * self.q_width + i - 1) * vocab_size..][..vocab_size];
                self.sampler.probabilities(q)?;
            }
        }
        if !self.tops[at].is_finite() {
            entry.flags |= FLAG_DRAFT_NON_FINITE;
        }
        state.write_tokens(entry.row, entry.n + i - 1, &[token]);
        self.advance_grammar(entry, i, token, host)
    }

    /// Copies the drafts that the record contains into row state; their q is a point mass.
    pub(super) fn place(
        &mut self,
        record: &RecordView<'_>,
        state: &mut RowState<'_>,
        host: &mut dyn Host,
    ) -> Result<()> {
        let entries = std::mem::take(&mut self.entries);
        for entry in entries.iter().filter(|entry| entry.runs() && !entry.on_device()) {
            let start = entry.index * self.config.num_speculative_tokens;
            let drafts = &record.draft_token[start..start + entry.k];
            state.write_tokens(entry.row, entry.n, drafts);
            for (i, &draft) in (1..).zip(drafts) {
                self.advance_grammar(entry, i, draft, host)?;
            }
        }
        self.entries = entries;
        Ok(())
    }
}
