//! Settling of results: tokens, ends, acceptance statistics, and the blocks that others may use from now on.

use super::Scheduler;
use super::kv_events::KvEventLog;
use super::layout::{self, FINISH_ERROR, FINISH_LENGTH, FINISH_NONE, FINISH_STOP, ResultsLayout, Section};
use super::lifecycle::is_token;
use super::row::{RowIndex, RowState, Sequence, Step, UNKNOWN_LAG};
use super::saves::SaveLog;
use crate::block_pool::BlockPool;
use crate::drafts::DrafterKind;
use crate::error::{Error, Result, check_len};
use crate::hash::BlockHash;
use crate::sampling::STEP_EXTRAS;

/// Flags of results whose tokens mean nothing, so that the request ends with an error.
const FATAL: i64 = layout::FLAG_TARGET_NON_FINITE | layout::FLAG_CAPACITY | layout::FLAG_NO_TOKEN_ALLOWED;
/// All flags that a device may report.
const ALL_FLAGS: i64 = FATAL | layout::FLAG_DRAFT_NON_FINITE | layout::FLAG_NOTHING_DRAFTED;

/// Counts, flags and finish reason that the device reports for one sequence. Its tokens are passed separately.
#[derive(Clone, Copy, Debug)]
struct Report {
    emitted: i64,
    accepted: i64,
    drafted: i64,
    flags: i64,
    finish_reason: i64,
}

/// Sections of a results buffer.
#[derive(Clone, Copy)]
struct Reports<'a> {
    emitted: &'a [i64],
    accepted: &'a [i64],
    drafted: &'a [i64],
    flags: &'a [i64],
    finish_reason: &'a [i64],
    tokens: &'a [i64],
}

impl<'a> Reports<'a> {
    fn new(layout: &ResultsLayout, results: &'a [i64]) -> Self {
        Self {
            emitted: &results[layout.num_emitted.range()],
            accepted: &results[layout.num_accepted.range()],
            drafted: &results[layout.num_drafted.range()],
            flags: &results[layout.flags.range()],
            finish_reason: &results[layout.finish_reason.range()],
            tokens: &results[layout.tokens.range()],
        }
    }

    /// Iterates over the sequences: each sequence's report, and the `width` tokens that the buffer has room for.
    fn iter(self, width: usize) -> impl Iterator<Item = (Report, &'a [i64])> {
        let counts = self.emitted.iter().zip(self.accepted).zip(self.drafted).zip(self.flags).zip(self.finish_reason);
        counts.zip(self.tokens.chunks_exact(width)).map(
            |(((((&emitted, &accepted), &drafted), &flags), &finish_reason), tokens)| {
                (Report { emitted, accepted, drafted, flags, finish_reason }, tokens)
            },
        )
    }
}

/// Settled result of one sequence.
struct Settled {
    request_id: i64,
    num_new: usize,
    finish_reason: i64,
}

/// Row with blocks that may have become complete in the step being settled.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Publication {
    row: RowIndex,
    /// Number of positions with settled target KV.
    target_len: u32,
    /// Whether the draft KV up to `draft_len` is known to be finite. It is if the row drafted in this step, or if the
    /// draft KV is made of the target's finite hidden states.
    drafted: bool,
}

const FINISH_REASONS: [i64; 3] = [FINISH_NONE, FINISH_STOP, FINISH_LENGTH];

const DROPPED: Settled = Settled { request_id: -1, num_new: 0, finish_reason: FINISH_NONE };

impl Scheduler {
    /// Takes the results of the oldest step in flight and writes the settled result of each sequence into `settled`.
    /// Elements after the step's sequences are -1, 0 and 0.
    ///
    /// # Errors
    /// [`Error::SettleOrder`] if another step is the oldest in flight. [`Error::InvalidBuffer`] if a buffer does not
    /// have its layout's size. [`Error::InvalidResults`] if the step cannot have had these results. Nothing has
    /// changed then.
    pub fn settle(&mut self, step_id: u64, results: &[i64], settled: &mut [i64]) -> Result<()> {
        check_len("results", results.len(), self.results_layout.size)?;
        check_len("settled", settled.len(), self.settled_layout.size)?;
        let expected = self.steps.front().map(|step| step.id);
        if expected != Some(step_id) {
            return Err(Error::SettleOrder { step_id, expected });
        }
        self.validate_results(&self.steps[0], results)?;

        let Some(step) = self.steps.pop_front() else { return Ok(()) };
        self.settled = Some((step.id, step.work));
        if let Some(saves) = &mut self.saves {
            saves.settles(step.id);
        }
        let (used, layout) = (step.sequences.len(), self.settled_layout);
        let sections = [layout.request_id, layout.num_new, layout.finish_reason].map(Section::range);
        let Ok([ids, counts, reasons]) = settled.get_disjoint_mut(sections) else {
            unreachable!("sections are disjoint")
        };
        ids[used..].fill(DROPPED.request_id);
        counts[used..].fill(DROPPED.num_new as i64);
        reasons[used..].fill(DROPPED.finish_reason);
        let (reports, width) = (Reports::new(&self.results_layout, results), self.config.num_speculative_tokens + 1);
        let out = ids.iter_mut().zip(counts).zip(reasons);
        self.num_unpublished = 0;
        for ((&sequence, (report, tokens)), ((id, count), reason)) in
            step.sequences.iter().zip(reports.iter(width)).zip(out)
        {
            let sequence = self.settle_sequence(sequence, report, tokens)?;
            (*id, *count, *reason) = (sequence.request_id, sequence.num_new as i64, sequence.finish_reason);
        }
        self.host_drafts.learned();
        for index in 0..self.num_unpublished {
            self.publish(self.unpublished[index])?;
        }
        if self.snapshots.is_some() {
            for sequence in &step.sequences {
                if self.rows[sequence.row as usize].state == RowState::Live {
                    self.settle_snapshots(sequence.row)?;
                }
            }
        }
        if self.config.has_windows() {
            self.return_behind_windows(&step)?;
        }
        self.spare_steps.push(step);
        Ok(())
    }

    #[cold]
    fn invalid(&self, sequence: usize, field: &'static str, value: i64, allowed: String) -> Error {
        let step_id = self.steps.front().map_or(0, |step| step.id);
        Error::InvalidResults { step_id, sequence, field, value, allowed }
    }

    fn validate_results(&self, step: &Step, results: &[i64]) -> Result<()> {
        let (reports, width) = (Reports::new(&self.results_layout, results), self.config.num_speculative_tokens + 1);
        // All bits of all tokens together first: a loop over those that a row emits mispredicts its end.
        let all_tokens =
            is_token(reports.tokens[..step.sequences.len() * width].iter().fold(0, |bits, token| bits | token));
        for (index, (&sequence, (report, tokens))) in step.sequences.iter().zip(reports.iter(width)).enumerate() {
            let Report { emitted, accepted, drafted, flags, finish_reason } = report;
            let k = i64::from(sequence.k());
            if flags & !ALL_FLAGS != 0 {
                return Err(self.invalid(index, "flags", flags, format!("a sum of bits of {ALL_FLAGS}")));
            }
            if !(0..=k).contains(&drafted) {
                return Err(self.invalid(index, "num_drafted", drafted, format!("from 0 to the sequence's K = {k}")));
            }
            if !(0..=drafted).contains(&accepted) {
                return Err(self.invalid(index, "num_accepted", accepted, format!("from 0 to num_drafted={drafted}")));
            }
            let most = if sequence.emits() { accepted + 1 } else { 0 };
            if !(0..=most).contains(&emitted) {
                return Err(self.invalid(index, "num_emitted", emitted, format!("from 0 to {most}")));
            }
            let row = &self.rows[sequence.row as usize];
            if row.state != RowState::Live || flags & FATAL != 0 {
                self.validate_dropped(index, finish_reason)?;
                continue;
            }
            let tokens = &tokens[..emitted as usize];
            if !all_tokens && let Some(&token) = tokens.iter().find(|&&token| !is_token(token)) {
                return Err(self.invalid(index, "tokens", token, "a token id".into()));
            }
            let room = (row.limit - row.n) as i64;
            if emitted == most && emitted < room && finish_reason == FINISH_NONE {
                continue;
            }
            self.validate_end(index, sequence.row, most, &report, tokens)?;
        }
        Ok(())
    }

    /// Checks the finish reason of a sequence whose tokens will not be used.
    #[cold]
    fn validate_dropped(&self, index: usize, finish_reason: i64) -> Result<()> {
        if !FINISH_REASONS.contains(&finish_reason) {
            return Err(self.invalid(index, "finish_reason", finish_reason, format!("one of {FINISH_REASONS:?}")));
        }
        Ok(())
    }

    /// Checks the report of a row that ends or should have ended. The device judges stop tokens and the limit; this
    /// only checks whether its report is possible. A row ends at its limit, or earlier at a stop token that counts.
    /// Tokens accepted after that stop token are left out.
    #[cold]
    fn validate_end(&self, index: usize, row: RowIndex, most: i64, report: &Report, tokens: &[i64]) -> Result<()> {
        let &Report { emitted, finish_reason, .. } = report;
        let row = &self.rows[row as usize];
        let room = (row.limit - row.n) as i64;
        if emitted < most && finish_reason != FINISH_STOP {
            return Err(self.invalid(index, "num_emitted", emitted, format!("{most}, or fewer up to a stop token")));
        }
        if emitted > room {
            return Err(self.invalid(index, "num_emitted", emitted, format!("at most {room}, which reach the limit")));
        }
        let request = &self.requests[row.request];
        // `min_tokens` yields where a grammar, which only the device knows, leaves nothing but stop tokens.
        let counts = row.n + tokens.len() > request.min_len || request.sampling.steps & STEP_EXTRAS != 0;
        let stops = counts && tokens.last().is_some_and(|token| request.stop_token_ids.contains(token));
        let allowed = match finish_reason {
            FINISH_NONE if emitted < room => return Ok(()),
            FINISH_LENGTH if emitted == room => return Ok(()),
            FINISH_STOP if stops => return Ok(()),
            FINISH_STOP => format!("{FINISH_STOP} after a stop token at a position from {} on", request.min_len),
            _ if emitted == room => format!("{FINISH_LENGTH} at the limit, or {FINISH_STOP}"),
            _ => format!("{FINISH_NONE} before the limit, or {FINISH_STOP}"),
        };
        Err(self.invalid(index, "finish_reason", finish_reason, allowed))
    }

    fn settle_sequence(&mut self, sequence: Sequence, report: Report, tokens: &[i64]) -> Result<Settled> {
        let Report { emitted, accepted, drafted, flags, finish_reason } = report;
        let (accepted, drafted) = (accepted as usize, drafted as usize);
        let row = &mut self.rows[sequence.row as usize];
        row.in_flight -= 1;
        if row.state == RowState::Closed {
            if row.in_flight == 0 {
                self.release(sequence.row)?;
            }
            return Ok(DROPPED);
        }
        row.emitting -= u32::from(sequence.emits());
        row.drafting -= u32::from(sequence.drafts_on_device());
        row.emit_upper -= sequence.emit_upper;
        let request = &mut self.requests[row.request];
        let request_id = request.id;
        if flags & FATAL != 0 {
            self.end(sequence.row)?;
            return Ok(Settled { request_id, num_new: 0, finish_reason: FINISH_ERROR });
        }

        let n = row.n;
        if let Some(snapshots) = &mut self.snapshots {
            snapshots.passed(sequence.row, if sequence.chunk_end > 0 { sequence.chunk_end as usize } else { n });
        }
        let num_new = emitted as usize;
        if self.host_drafts.learns() && sequence.chunk_end == 0 {
            let whose = (request.order.1, n);
            // Asked in vain is a first draft that did not stand: it took as long, and promises as little.
            let in_vain = usize::from(flags & layout::FLAG_NOTHING_DRAFTED != 0 && sequence.drafts_on_device());
            self.host_drafts.learn(
                sequence.row,
                whose,
                (drafted.max(in_vain), accepted, sequence.drafter),
                &tokens[..num_new],
            );
        }
        request.append(tokens, num_new);
        row.n = n + num_new;
        let drafted_on_device = drafted > 0 && sequence.drafter == DrafterKind::Device;
        if sequence.drafts_on_device() && drafted == 0 {
            // It did not draft after all, so how far its draft KV lags is known only once nothing in flight drafts.
            row.idle_drafts = UNKNOWN_LAG;
        }
        if drafted > 0 {
            self.acceptance.record(drafted, accepted)?;
            if sequence.drafter != DrafterKind::Device {
                self.acceptance_on_host[sequence.drafter as usize - 1].record(drafted, accepted)?;
            }
        }
        let from_hidden = self.drafts.from_hidden;
        if from_hidden {
            self.settle_hidden(sequence, n, if drafted_on_device { drafted } else { 0 });
        } else if drafted_on_device {
            row.draft_len = self.config.drafter.draft_len_after(n, drafted, row.n);
        }
        if flags & layout::FLAG_DRAFT_NON_FINITE != 0 {
            self.give_up_drafts(sequence.row)?;
        }
        let row = &self.rows[sequence.row as usize];
        let target_len = if sequence.emits() { row.n - 1 } else { sequence.chunk_end as usize };
        let publication =
            Publication { row: sequence.row, target_len: target_len as u32, drafted: drafted_on_device || from_hidden };
        // Without a branch, which would be mispredicted: any row may complete a block.
        let block_size = self.config.block_size;
        let target_complete = u32::from((row.num_registered + 1) * block_size <= target_len);
        let draft_complete =
            u32::from((row.num_draft_marked + 1) * block_size <= row.draft_len) * u32::from(publication.drafted);
        let publishes = (target_complete + draft_complete) * u32::from(self.config.enable_prefix_caching) > 0;
        if finish_reason == FINISH_NONE {
            self.unpublished[self.num_unpublished] = publication;
            self.num_unpublished += usize::from(publishes);
            return Ok(Settled { request_id, num_new, finish_reason });
        }
        if publishes {
            self.publish(publication)?;
        }
        if self.snapshots.is_some() {
            self.settle_snapshots(sequence.row)?;
        }
        self.end(sequence.row)?;
        Ok(Settled { request_id, num_new, finish_reason })
    }

    /// Ends drafting for a request whose draft logits were not finite, so that no row continues from its draft KV.
    #[cold]
    fn give_up_drafts(&mut self, row_index: RowIndex) -> Result<()> {
        let row = &mut self.rows[row_index as usize];
        self.requests[row.request].draft_failed = true;
        (row.k, row.max_k) = (0, 0);
        for &block in row.registered_blocks() {
            self.pool.release_claim(block, row_index);
        }
        if self.drafts.from_hidden {
            self.unmark_broken(row_index)?;
        }
        Ok(())
    }

    /// Sets marks after an iteration or a chunk with finite results. `target_valid` is set on blocks whose target KV is
    /// complete. If the row drafted, `draft_valid` is set on blocks that the row claims and whose draft KV is complete.
    /// Each block is checked once.
    fn publish(&mut self, publication: Publication) -> Result<()> {
        let Publication { row: row_index, target_len, drafted } = publication;
        let block_size = self.config.block_size;
        let row = &mut self.rows[row_index as usize];
        let request = &mut self.requests[row.request];
        while (row.num_registered + 1) * block_size <= target_len as usize {
            let index = row.num_registered;
            let hash = request.block_hash(index, block_size, &self.hasher);
            // A step in flight may be writing draft KV into this block, so no other row may.
            let drafting =
                (row.drafting > 0 || index * block_size < row.draft_len || self.drafts.from_hidden) && !row.rebuild;
            let mut registered = self.pool.register(row.blocks[index], hash)?;
            if !registered && self.snapshots.is_some() {
                let (events, saves) = (self.kv_events.as_mut(), self.saves.as_mut());
                registered = replace_cached(&mut self.pool, events, saves, row.blocks[index], hash)?;
            }
            if registered {
                if drafting && !request.draft_failed {
                    self.pool.claim(row.blocks[index], row_index)?;
                }
                if let Some(events) = &mut self.kv_events {
                    events.stored(row.blocks[index], request, index, hash);
                }
                if let Some(saves) = &mut self.saves {
                    if request.tells_prompt() {
                        saves.private(row.blocks[index]);
                    } else if !self.drafts.has_kv {
                        saves.due(row.blocks[index]);
                    }
                }
            }
            if !self.groups.is_empty() {
                self.groups.register(row_index, index, hash, &mut self.pool)?;
            }
            row.num_registered += 1;
        }
        // KV after a start anew depends on this row's history alone.
        let shares = !self.drafts.from_hidden || self.hidden[row_index as usize].draft_start == 0;
        if drafted && shares && !request.draft_failed && !row.rebuild {
            while row.num_draft_marked < row.num_registered && (row.num_draft_marked + 1) * block_size <= row.draft_len
            {
                let block = row.blocks[row.num_draft_marked];
                // What it wrote itself: another row's blocks are marked by that row, and marks of private duplicates
                // are never read.
                if self.pool.claimant(block) == Some(row_index) {
                    if self.drafts.from_hidden {
                        let next = request.tokens[(row.num_draft_marked + 1) * block_size];
                        self.pool.mark_draft_before(block, next)?;
                    } else {
                        self.pool.mark_draft(block)?;
                    }
                    if let Some(saves) = &mut self.saves {
                        saves.drafted(block, self.drafts.from_hidden);
                    }
                }
                row.num_draft_marked += 1;
            }
        }
        Ok(())
    }
}

/// Registers `block` in the place of the cached block with the same content, if no request holds that one. Rows with
/// states compute KV again after their snapshot. Without this, the old block would leave the cache before the blocks
/// that follow it.
fn replace_cached(
    pool: &mut BlockPool,
    events: Option<&mut KvEventLog>,
    saves: Option<&mut SaveLog>,
    block: i64,
    hash: BlockHash,
) -> Result<bool> {
    let Some(old) = pool.lookup(hash).filter(|&old| pool.ref_count(old) == Some(0)) else { return Ok(false) };
    let evicted = pool.forget(old)?;
    if let Some(saves) = saves {
        saves.evicted(old);
    }
    if let Some(events) = events {
        events.removed(&evicted);
    }
    pool.register(block, hash)
}
