//! What results mean: tokens, ends, acceptance books, and which blocks others may use from now on.

use super::layout::{self, FINISH_ERROR, FINISH_LENGTH, FINISH_NONE, FINISH_STOP};
use super::lifecycle::is_token;
use super::request::Ending;
use super::row::{Entry, EntryKind, Launch, RowIndex, RowState};
use super::{Scheduler, check_len};
use crate::error::{Error, Result};

/// Flags after which a row's tokens mean nothing.
const FATAL: i64 = layout::FLAG_TARGET_NON_FINITE | layout::FLAG_CAPACITY;
const ALL_FLAGS: i64 = FATAL | layout::FLAG_DRAFT_NON_FINITE;

/// What the device reports of one entry, besides its tokens.
#[derive(Clone, Copy, Debug)]
struct Report {
    emitted: i64,
    accepted: i64,
    drafted: i64,
    flags: i64,
}

/// What came of one entry.
struct Settled {
    request_id: i64,
    num_new: usize,
    finish_reason: i64,
}

const DROPPED: Settled = Settled { request_id: -1, num_new: 0, finish_reason: FINISH_NONE };

impl Scheduler {
    /// Takes the results of the oldest launch in flight and writes what came of each entry into `settled`; elements beyond the
    /// launch's entries are -1, 0 and 0.
    ///
    /// # Errors
    /// [`Error::SettleOrder`] if it is not this launch's turn, [`Error::InvalidBuffer`] if a buffer does not have its layout's size,
    /// [`Error::InvalidResults`] if the launch cannot have had these results. Nothing has changed then.
    pub fn settle(&mut self, launch_id: u64, results: &[i64], settled: &mut [i64]) -> Result<()> {
        check_len("results", results.len(), self.results_layout.size)?;
        check_len("settled", settled.len(), self.settled_layout.size)?;
        let expected = self.launches.front().map(|launch| launch.id);
        if expected != Some(launch_id) {
            return Err(Error::SettleOrder { launch_id, expected });
        }
        self.validate_results(&self.launches[0], results)?;

        let layout = self.settled_layout;
        settled[layout.request_id.range()].fill(-1);
        settled[layout.num_new.range()].fill(0);
        settled[layout.finish_reason.range()].fill(FINISH_NONE);
        let Some(launch) = self.launches.pop_front() else { return Ok(()) };
        for (at, &entry) in launch.entries.iter().enumerate() {
            let (report, tokens) = self.report(results, at);
            let Settled { request_id, num_new, finish_reason } = self.settle_entry(entry, report, tokens)?;
            settled[layout.request_id.offset + at] = request_id;
            settled[layout.num_new.offset + at] = num_new as i64;
            settled[layout.finish_reason.offset + at] = finish_reason;
        }
        self.spare_launches.push(launch);
        Ok(())
    }

    /// An entry's counts, and the tokens that the buffer has room for.
    #[inline]
    fn report<'a>(&self, results: &'a [i64], at: usize) -> (Report, &'a [i64]) {
        let (layout, width) = (&self.results_layout, self.config.num_speculative_tokens + 1);
        let report = Report {
            emitted: results[layout.num_emitted.offset + at],
            accepted: results[layout.num_accepted.offset + at],
            drafted: results[layout.num_drafted.offset + at],
            flags: results[layout.flags.offset + at],
        };
        (report, &results[layout.tokens.offset + at * width..][..width])
    }

    #[cold]
    fn invalid(&self, entry: usize, field: &'static str, value: i64, allowed: String) -> Error {
        let launch_id = self.launches.front().map_or(0, |launch| launch.id);
        Error::InvalidResults { launch_id, entry, field, value, allowed }
    }

    fn validate_results(&self, launch: &Launch, results: &[i64]) -> Result<()> {
        for (at, &entry) in launch.entries.iter().enumerate() {
            let (Report { emitted, accepted, drafted, flags }, tokens) = self.report(results, at);
            let k = i64::from(entry.k);
            if flags & !ALL_FLAGS != 0 {
                return Err(self.invalid(at, "flags", flags, format!("bits of {ALL_FLAGS}")));
            }
            if !(0..=k).contains(&drafted) {
                return Err(self.invalid(at, "num_drafted", drafted, format!("0 to the entry's K = {k}")));
            }
            if !(0..=drafted).contains(&accepted) {
                return Err(self.invalid(at, "num_accepted", accepted, format!("0 to num_drafted = {drafted}")));
            }
            let most = if entry.kind == EntryKind::Chunk { 0 } else { accepted + 1 };
            if !(0..=most).contains(&emitted) {
                return Err(self.invalid(at, "num_emitted", emitted, format!("0 to {most}")));
            }
            let row = &self.rows[entry.row as usize];
            if row.state != RowState::Live || flags & FATAL != 0 {
                continue;
            }
            let request = &self.requests[row.request];
            let tokens = &tokens[..emitted as usize];
            if let Some(&token) = tokens.iter().find(|&&token| !is_token(token)) {
                return Err(self.invalid(at, "tokens", token, "a token id".into()));
            }
            // A device that stops at a stop token may leave out what it accepted behind it.
            let stopped = tokens.last().is_some_and(|token| request.stop_token_ids.contains(token));
            if emitted < most && !stopped {
                return Err(self.invalid(at, "num_emitted", emitted, format!("{most}, or less up to a stop token")));
            }
            let room = request.limit - request.tokens.len();
            if tokens.len() > room {
                return Err(self.invalid(at, "num_emitted", emitted, format!("at most {room} up to the limit")));
            }
        }
        Ok(())
    }

    fn settle_entry(&mut self, entry: Entry, report: Report, tokens: &[i64]) -> Result<Settled> {
        let Report { emitted, accepted, drafted, flags } = report;
        let (accepted, drafted) = (accepted as usize, drafted as usize);
        let row = &mut self.rows[entry.row as usize];
        row.in_flight -= 1;
        if row.state == RowState::Closed {
            if row.in_flight == 0 {
                self.release(entry.row)?;
            }
            return Ok(DROPPED);
        }
        row.emitting -= u32::from(entry.kind != EntryKind::Chunk);
        row.drafting -= u32::from(entry.k > 0);
        row.emit_upper -= entry.emit_upper();
        let request = &mut self.requests[row.request];
        let request_id = request.id;
        if flags & FATAL != 0 {
            self.end(entry.row)?;
            return Ok(Settled { request_id, num_new: 0, finish_reason: FINISH_ERROR });
        }

        let n = request.tokens.len();
        let mut ending = Ending::None;
        for &token in &tokens[..emitted as usize] {
            ending = request.append(token);
            if ending != Ending::None {
                break;
            }
        }
        let num_new = request.tokens.len() - n;
        if drafted > 0 {
            self.acceptance.record(drafted, accepted)?;
            row.draft_len = (request.tokens.len() - 1).min(n + drafted - 1);
        }
        if flags & layout::FLAG_DRAFT_NON_FINITE != 0 {
            request.draft_failed = true;
            for &block in &row.blocks[..row.num_registered] {
                self.pool.release_claim(block, entry.row);
            }
        }
        if self.config.enable_prefix_caching && num_new > 0 {
            self.publish(entry.row, drafted > 0)?;
        }
        let finish_reason = match ending {
            Ending::None => FINISH_NONE,
            Ending::Stop => FINISH_STOP,
            Ending::Length => FINISH_LENGTH,
        };
        if ending != Ending::None {
            self.end(entry.row)?;
        }
        Ok(Settled { request_id, num_new, finish_reason })
    }

    /// Sets marks after an iteration with finite logits: T on blocks whose target KV is complete, D, if it `drafted`, on those
    /// whose draft KV is. Looks at each block once.
    fn publish(&mut self, row_index: RowIndex, drafted: bool) -> Result<()> {
        let block_size = self.config.block_size;
        let row = &mut self.rows[row_index as usize];
        let request = &mut self.requests[row.request];
        let target_len = request.tokens.len() - 1;
        while (row.num_registered + 1) * block_size <= target_len {
            let index = row.num_registered;
            let hash = request.block_hash(index, block_size, &self.hasher);
            // A launch in flight may be writing draft KV into this block, so nobody else should.
            let drafting = row.drafting > 0 || index * block_size < row.draft_len;
            if self.pool.register(row.blocks[index], hash)? && drafting && !request.draft_failed {
                self.pool.claim(row.blocks[index], row_index)?;
            }
            row.num_registered += 1;
        }
        if drafted && !request.draft_failed {
            while row.num_draft_marked < row.num_registered && (row.num_draft_marked + 1) * block_size <= row.draft_len
            {
                let block = row.blocks[row.num_draft_marked];
                // Duplicates of cached content stay private: nobody looks for their marks.
                if self.pool.is_registered(block) && !self.pool.has_draft(block) {
                    self.pool.mark_draft(block)?;
                }
                row.num_draft_marked += 1;
            }
        }
        Ok(())
    }
}
