//! Drafts of an iteration: by passes of the draft model, or from the record.

use crate::error::Result;
use specrs_core::philox::Purpose;
use specrs_core::scheduler::layout::RecordView;

use super::passes::Want;
use super::{Cached, Iteration, RowState, Rule};

impl Iteration {
    /// Draws up to `K_r` drafts per entry; pass i feeds the entries with `K_r >= i`.
    ///
    /// Pass 1 feeds n - 1, and those of the `max_draft_lag` positions up to it whose KV is missing, so that the token that the draft has not seen after a
    /// full acceptance is caught up without a pass of its own. Greedy entries draft by argmax, others from the draft's own
    /// processed distribution, which `rejection` keeps as q.
    pub(super) fn draft(
        &mut self,
        state: &mut RowState<'_>,
        draft: &mut Cached<'_>,
        max_draft_lag: usize,
    ) -> Result<()> {
        let most = self.entries.iter().filter(|entry| entry.runs()).map(|entry| entry.k).max().unwrap_or(0);
        let vocab_size = self.sampler.vocab_size();
        let samples = self.entries.iter().any(|entry| entry.runs() && entry.k > 0 && !entry.params.greedy);
        let purpose = if self.rule == Rule::Rejection { Purpose::Draft } else { Purpose::Gumbel };
        self.q_width = if samples && self.rule == Rule::Rejection { most } else { 0 };
        self.q.resize(self.q.len().max(self.entries.len() * self.q_width * vocab_size), 0.0);
        for i in 1..=most {
            self.batch.clear();
            let (mut greedy, mut sampled) = (false, false);
            for entry in self.entries.iter().filter(|entry| entry.runs() && entry.k >= i) {
                let last = entry.n + i - 2;
                if i == 1 {
                    let first = (state.draft_len[entry.row] as usize).max(entry.n.saturating_sub(max_draft_lag));
                    for position in first..last {
                        self.batch.feed(state, entry.row, position, self.config.block_size);
                    }
                }
                self.batch.feed(state, entry.row, last, self.config.block_size);
                self.batch.want_last();
                greedy |= entry.params.greedy;
                sampled |= !entry.params.greedy;
            }
            self.pass(state, draft, Want::of(greedy, sampled, false))?;
            self.counts.draft_passes += 1;
            let mut at = 0;
            for (b, entry) in self.entries.iter_mut().enumerate() {
                if !entry.runs() || entry.k < i {
                    continue;
                }
                let mut token = self.best[at];
                if !entry.params.greedy {
                    let row = &self.logits[at * vocab_size..][..vocab_size];
                    let position = (entry.n + i - 1) as u64;
                    token = i64::from(self.sampler.draw(row, &entry.params, entry.seed, position, purpose)?);
                    if self.q_width > 0 {
                        let q = &mut self.q[(b * most + i - 1) * vocab_size..][..vocab_size];
                        self.sampler.probabilities(q)?;
                    }
                }
                entry.draft_fault |= !self.tops[at].is_finite();
                state.write_tokens(entry.row, entry.n + i - 1, &[token]);
                at += 1;
            }
        }
        Ok(())
    }

    /// Takes the drafts that the record brings; q is a point mass.
    pub(super) fn place(&mut self, record: &RecordView<'_>, state: &mut RowState<'_>) {
        for entry in self.entries.iter().filter(|entry| entry.runs()) {
            let start = entry.index * self.config.num_speculative_tokens;
            state.write_tokens(entry.row, entry.n, &record.draft_token[start..start + entry.k]);
        }
    }
}
