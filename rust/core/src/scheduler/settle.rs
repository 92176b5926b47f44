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

/// What the device reports of one entry.
#[derive(Clone, Copy, Debug)]
struct Report<'a> {
    emitted: usize,
    accepted: usize,
    drafted: usize,
    flags: i64,
    tokens: &'a [i64],
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
            let report = self.report(results, at)?;
            let Settled { request_id, num_new, finish_reason } = self.settle_entry(entry, report)?;
            settled[layout.request_id.offset + at] = request_id;
            settled[layout.num_new.offset + at] = num_new as i64;
            settled[layout.finish_reason.offset + at] = finish_reason;
        }
        self.spare_launches.push(launch);
        Ok(())
    }

    fn report<'a>(&self, results: &'a [i64], at: usize) -> Result<Report<'a>> {
        let (layout, width) = (&self.results_layout, self.config.num_speculative_tokens + 1);
        let count = |field: &'static str, offset: usize| {
            let value = results[offset + at];
            let invalid = || self.invalid(at, field, value, format!("0 to {width}"));
            usize::try_from(value).ok().filter(|&count| count <= width).ok_or_else(invalid)
        };
        Ok(Report {
            emitted: count("num_emitted", layout.num_emitted.offset)?,
            accepted: count("num_accepted", layout.num_accepted.offset)?,
            drafted: count("num_drafted", layout.num_drafted.offset)?,
            flags: results[layout.flags.offset + at],
            tokens: &results[layout.tokens.offset + at * width..][..width],
        })
    }

    #[cold]
    fn invalid(&self, entry: usize, field: &'static str, value: i64, allowed: String) -> Error {
        let launch_id = self.launches.front().map_or(0, |launch| launch.id);
        Error::InvalidResults { launch_id, entry, field, value, allowed }
    }

    fn validate_results(&self, launch: &Launch, results: &[i64]) -> Result<()> {
        for (at, &entry) in launch.entries.iter().enumerate() {
            let report = self.report(results, at)?;
            let Report { emitted, accepted, drafted, flags, tokens } = report;
            if flags & !ALL_FLAGS != 0 {
                return Err(self.invalid(at, "flags", flags, format!("bits of {ALL_FLAGS}")));
            }
            if drafted > entry.k as usize {
                return Err(self.invalid(
                    at,
                    "num_drafted",
                    drafted as i64,
                    format!("at most the entry's K = {}", entry.k),
                ));
            }
            if accepted > drafted {
                return Err(self.invalid(
                    at,
                    "num_accepted",
                    accepted as i64,
                    format!("at most num_drafted = {drafted}"),
                ));
            }
            let most = if entry.kind == EntryKind::Chunk { 0 } else { accepted + 1 };
            if emitted > most {
                return Err(self.invalid(at, "num_emitted", emitted as i64, format!("at most {most}")));
            }
            let row = &self.rows[entry.row as usize];
            if row.state != RowState::Live || flags & FATAL != 0 {
                continue;
            }
            let request = &self.requests[row.request];
            let tokens = &tokens[..emitted];
            if let Some(&token) = tokens.iter().find(|&&token| !is_token(token)) {
                return Err(self.invalid(at, "tokens", token, "a token id".into()));
            }
            // A device that stops at a stop token may leave out what it accepted behind it.
            let stopped = tokens.last().is_some_and(|token| request.stop_token_ids.contains(token));
            if emitted < most && !stopped {
                return Err(self.invalid(
                    at,
                    "num_emitted",
                    emitted as i64,
                    format!("{most}, or less up to a stop token"),
                ));
            }
            let room = request.limit - request.tokens.len();
            if emitted > room {
                return Err(self.invalid(at, "num_emitted", emitted as i64, format!("at most {room} up to the limit")));
            }
        }
        Ok(())
    }

    fn settle_entry(&mut self, entry: Entry, report: Report<'_>) -> Result<Settled> {
        let Report { emitted, accepted, drafted, flags, tokens } = report;
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
        for &token in &tokens[..emitted] {
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
            // The row may be writing draft KV into this block, so nobody else should.
            let drafting = drafted || row.drafting > 0 || index * block_size < row.draft_len;
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
