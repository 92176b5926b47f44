//! Fair turns between callers: callers with requests of one priority share rows and blocks, however many requests each
//! sends.
//!
//! A request's turn is the number of its caller's requests that get a row before it. Smaller turns go first, and a
//! waiting request takes the row of a running one with a greater turn. So callers converge to the same number of rows,
//! as far as they ask for them. A request that gave up its row has the same turn while it waits, so rows do not pass
//! back and forth. A request without a caller has turn 0, so nothing changes among such requests.

use std::collections::HashMap;

use rustc_hash::FxBuildHasher;

use super::Scheduler;
use super::plan::Plan;
use super::request::{Order, RequestIndex};
use super::row::RowIndex;
use crate::error::Result;

/// Order in which requests get a row, smaller first: priority as in [`Order`], turn, arrival.
pub(super) type Turn = (i128, usize, u64);

/// Number of requests of each caller that were counted so far, in order of importance.
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
    /// Fills the plan's queue with the waiting requests that it may admit, in turn: at most one more than there are
    /// free rows. It sorts all waiting requests while a caller has several live ones, which takes about 100 us for 4096
    /// of them.
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

    /// Returns one running request to the waiting queue if a waiting one has a smaller turn and found no row, or no
    /// blocks in the last plan. It returns at most one at a time, and none while a row is becoming free.
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

    /// Returns the row with the last turn among the running rows from `place` on, of which there must be one. That row
    /// is the first to lose its blocks.
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
