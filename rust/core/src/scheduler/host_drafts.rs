//! Drafts that a drafter on the host proposes for the rows: looked for once for each length of a row, read by the planner's caps, the
//! plan and the record.

use super::row::RowIndex;
use super::{Scheduler, SchedulerConfig};
use crate::drafts::Drafter;

/// The proposals, by row; empty without a drafter on the host.
#[derive(Clone, Debug, Default)]
pub(super) struct HostDrafts {
    /// `[R, K]`.
    tokens: Vec<u32>,
    /// Of each row: the request's arrival and length that the proposal is for, and how many drafts it has.
    proposals: Vec<Option<(u64, usize, usize)>>,
}

impl HostDrafts {
    pub(super) fn new(config: &SchedulerConfig) -> Self {
        let Drafter::Host(_) = config.drafter else { return Self::default() };
        let rows = config.max_num_seqs;
        Self { tokens: vec![0; rows * config.num_speculative_tokens], proposals: vec![None; rows] }
    }
}

impl Scheduler {
    /// What there is of `most` drafts for a live row; `most` itself unless they come from the host.
    #[inline]
    pub(super) fn proposed(&mut self, row_index: RowIndex, most: usize) -> usize {
        if self.drafts.on_host && most > 0 { self.found(row_index).min(most) } else { most }
    }

    /// Drafts found for a live row, looked for where its length is new.
    fn found(&mut self, row_index: RowIndex) -> usize {
        let Drafter::Host(proposer) = self.config.drafter else { return 0 };
        let (row, width) = (&self.rows[row_index as usize], self.config.num_speculative_tokens);
        let request = &self.requests[row.request];
        let (arrival, index) = (request.order.1, row_index as usize);
        match self.host_drafts.proposals[index] {
            Some((whose, n, found)) if (whose, n) == (arrival, row.n) => found,
            _ => {
                // As many as it may ever ask for: a smaller K takes the first of them.
                let out = &mut self.host_drafts.tokens[index * width..][..row.max_k as usize];
                let found = proposer.propose(&request.tokens, out);
                self.host_drafts.proposals[index] = Some((arrival, row.n, found));
                found
            }
        }
    }

    /// The first `k` drafts proposed for a row.
    pub(super) fn host_drafts_of(&self, row_index: RowIndex, k: usize) -> &[u32] {
        &self.host_drafts.tokens[row_index as usize * self.config.num_speculative_tokens..][..k]
    }
}
