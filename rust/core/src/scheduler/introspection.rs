//! View of one request by its id, for hosts that show or check it. Changes nothing.

use super::Scheduler;
use crate::error::Result;

/// State of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RequestState {
    /// The request has no row: it is new or was preempted.
    Waiting,
    /// The request has a row, and target KV of tokens that it had on admission is still to be planned.
    Prefill,
    /// The request has a row and decodes.
    Decode,
}

/// View of a request, returned by [`Scheduler::request`]. Lengths are the smallest that the steps in flight can lead
/// to if the request does not end in them. Without steps in flight they are exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RequestView<'a> {
    /// State of the request.
    pub state: RequestState,
    /// Row of device state; `None` while the request waits.
    pub row: Option<usize>,
    /// Number of settled tokens: the prompt and the output so far.
    pub num_tokens: usize,
    /// Maximum number of tokens of the request.
    pub limit: usize,
    /// Number of positions with valid target KV; 0 while the request waits.
    pub num_computed_tokens: usize,
    /// Number of positions with valid draft KV; 0 while the request waits.
    pub num_draft_computed_tokens: usize,
    /// Number of draft tokens that the request currently asks for per step; 0 while it waits.
    pub num_speculative_tokens: usize,
    /// Number of steps in flight that name the request's row.
    pub num_in_flight: usize,
    /// Blocks of the request in order of position. Blocks that no step has sent to the device are reserved. -1 stands
    /// for blocks outside the window, which returned to the pool. Empty while the request waits.
    pub block_table: &'a [i64],
}

impl Scheduler {
    /// Returns a view of a waiting or running request, in constant time and without copies.
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

    /// Iterates over the ids of the waiting requests, then of the running ones, each most important first.
    pub fn request_ids(&self) -> impl Iterator<Item = i64> + '_ {
        let running = self.running.iter().map(|&row| self.rows[row as usize].request);
        self.waiting.values().copied().chain(running).map(|index| self.requests[index].id)
    }
}
