//! What the scheduler knows of one request, by its id, for hosts that show or check it. Changes nothing.

use super::Scheduler;
use crate::error::Result;

/// Where a request is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RequestState {
    /// It has no row: new, or preempted.
    Waiting,
    /// It has a row, and target KV of tokens that it had on admission is still to be planned.
    Prefill,
    /// It has a row and decodes.
    Decode,
}

/// A request as [`Scheduler::request`] finds it. Lengths are the least that comes of the launches in flight if the request does not end
/// in them; without launches in flight they are exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RequestView<'a> {
    /// Where it is.
    pub state: RequestState,
    /// Its row of device state; none while it waits.
    pub row: Option<usize>,
    /// Settled tokens: the prompt and the output so far.
    pub num_tokens: usize,
    /// The most tokens that it may reach.
    pub limit: usize,
    /// Positions with valid target KV; 0 while it waits.
    pub num_computed_tokens: usize,
    /// Positions with valid draft KV; 0 while it waits.
    pub num_draft_computed_tokens: usize,
    /// Draft tokens that it asks for per launch now; 0 while it waits.
    pub num_speculative_tokens: usize,
    /// Launches in flight that name its row.
    pub num_in_flight: usize,
    /// Its blocks, position by position; those beyond what the device was told of are reserved, and -1 stands for those
    /// that came back behind its window. Empty while it waits.
    pub block_table: &'a [i64],
}

impl Scheduler {
    /// What is known of a waiting or running request. O(1), copies nothing.
    ///
    /// # Errors
    /// [`crate::Error::UnknownRequest`] if the id is not live.
    pub fn request(&self, request_id: i64) -> Result<RequestView<'_>> {
        let request = &self.requests[self.live(request_id)?];
        let waiting = RequestView {
            state: RequestState::Waiting,
            row: None,
            num_tokens: request.tokens.len(),
            limit: request.limit,
            num_computed_tokens: 0,
            num_draft_computed_tokens: 0,
            num_speculative_tokens: 0,
            num_in_flight: 0,
            block_table: &[],
        };
        let Some(index) = request.row else { return Ok(waiting) };
        let row = &self.rows[index as usize];
        let (state, num_computed_tokens) = if row.is_prefilling() {
            (RequestState::Prefill, row.num_computed)
        } else {
            (RequestState::Decode, row.lower_bound().min(row.limit) - 1)
        };
        Ok(RequestView {
            state,
            row: Some(index as usize),
            num_computed_tokens,
            num_draft_computed_tokens: row.draft_len,
            num_speculative_tokens: row.k as usize,
            num_in_flight: row.in_flight as usize,
            block_table: &row.blocks,
            ..waiting
        })
    }

    /// Ids of the waiting requests, then of the running ones, each most important first.
    pub fn request_ids(&self) -> impl Iterator<Item = i64> + '_ {
        let running = self.running.iter().map(|&row| self.rows[row as usize].request);
        self.waiting.values().copied().chain(running).map(|index| self.requests[index].id)
    }
}
