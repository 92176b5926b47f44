//! Whose turn it is where somebody asks for many requests at once: callers of one priority share rows and blocks,
//! whatever each asks for.
//!
//! A request's turn is the number of its caller's requests that have, or get, a row before it. Smaller turns go first,
//! and one that waits takes the row of a running one of a greater turn, so that callers come to hold the same number of
//! rows as far as they ask for them. What gave up its row has the same turn when it waits, so none is taken back and
//! forth. A request without a caller has turn 0: among such requests all of this changes nothing.

use std::collections::HashMap;

use rustc_hash::FxBuildHasher;

use super::Scheduler;
use super::plan::Plan;
use super::request::{Order, RequestIndex};
use super::row::RowIndex;
use crate::error::Result;

/// Who gets a row first, the smaller one: priority as in [`Order`], turn, arrival.
pub(super) type Turn = (i128, usize, u64);

/// Counts each caller's requests, from the most important on.
#[derive(Default)]
struct Turns(HashMap<i64, usize, FxBuildHasher>);

impl Turns {
    fn next(&mut self, caller: Option<i64>, (rank, arrival): Order) -> Turn {
        let turn = caller.map_or(0, |caller| {
            let turn = self.0.entry(caller).or_default();
            *turn += 1;
            *turn - 1
        });
        (rank, turn, arrival)
    }
}

impl Scheduler {
    /// Puts the waiting requests that this plan may admit into its queue, in turn: no more than there are free rows,
    /// and one. Sorts all that wait while a caller has several live requests: some 100 us for 4096 of them.
    pub(super) fn queue_by_turn(&self, plan: &mut Plan) {
        let most = self.free_rows.len() + 1;
        plan.queue.clear();
        if self.num_with_caller == 0 {
            plan.queue.extend(self.waiting.values().take(most));
            return;
        }
        let mut queue = self.turns_of_waiting();
        queue.sort_unstable_by_key(|&(turn, _)| turn);
        plan.queue.extend(queue.iter().take(most).map(|&(_, index)| index));
    }

    /// Sends one running request back to waiting if another that waits has a smaller turn and found no row, or no
    /// blocks in the last plan. One at a time: while a row is coming free, none.
    pub(super) fn share(&mut self, plan: &mut Plan) -> Result<()> {
        let refused = std::mem::take(&mut plan.refused) || self.free_rows.is_empty();
        let coming_free = self.free_rows.len() + self.running.len() < self.rows.len();
        if self.num_with_caller == 0 || !refused || coming_free {
            return Ok(());
        }
        let Some((rank, turn, _)) = self.turns_of_waiting().into_iter().map(|(turn, _)| turn).min() else {
            return Ok(());
        };
        let turns = self.turns_of_running().into_iter().zip(&self.running);
        let greater = turns.filter(|&((other_rank, other, _), _)| other > turn && other_rank >= rank);
        match greater.max() {
            Some((_, &row)) => self.preempt_row(row),
            None => Ok(()),
        }
    }

    /// Of the running rows from `place` on the one with the last turn, which is the first to lose its blocks; one at
    /// least must be there.
    pub(super) fn last_by_turn(&self, place: usize) -> RowIndex {
        if self.num_with_caller == 0 {
            return self.running[self.running.len() - 1];
        }
        let turns = self.turns_of_running().into_iter().zip(&self.running).skip(place);
        turns.max().map(|(_, &row)| row).expect("a running row")
    }

    fn turns_of_running(&self) -> Vec<Turn> {
        let mut turns = Turns::default();
        let requests = self.running.iter().map(|&row| &self.requests[self.rows[row as usize].request]);
        requests.map(|request| turns.next(request.caller, request.order)).collect()
    }

    fn turns_of_waiting(&self) -> Vec<(Turn, RequestIndex)> {
        let mut turns = Turns::default();
        for &row in &self.running {
            let request = &self.requests[self.rows[row as usize].request];
            turns.next(request.caller, request.order);
        }
        self.waiting.iter().map(|(&order, &index)| (turns.next(self.requests[index].caller, order), index)).collect()
    }
}
