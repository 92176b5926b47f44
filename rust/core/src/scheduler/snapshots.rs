//! Snapshots of states, for targets with layers that have a state per request in the place of KV.
//!
//! The KV of a shorter prefix is a part of the KV of a longer one; the state of a shorter prefix cannot be derived from
//! that of a longer one. So a prefix hit of such a target needs the KV of its blocks and a snapshot of the states at
//! its end. Snapshots have slots in a pool of their own. A snapshot is found by the hash of the KV block that ends
//! there, and leaves the pool with that block. The least recently used snapshot is the first to give way.
//!
//! | place of a snapshot | reason |
//! | --- | --- |
//! | the last block's end before the prompt's end | the same prompt comes again, or goes on after its answer |
//! | every `snapshot_interval` positions of a prompt | prompts that differ late; preemption |
//! | where a lookup found KV further than a snapshot, here or with the host | a beginning that requests share |
//! | the end of what a waiting request shares with the row | a beginning that requests share which arrive together |
//! | every `decode_snapshot_interval` positions of an output | preemption, and a next turn; a row keeps the last one |
//!
//! The record names row, length and slot of a snapshot in each step in which the row's state may pass that length. The
//! pass writes it when it does, from committed tokens alone. The snapshot can be found once that step has settled.

use super::Scheduler;
use super::StepHeader;
use super::admission::is_worth_waiting;
use super::plan::Plan;
use super::request::RequestIndex;
use super::row::RowIndex;
use super::snapshot_pool::{Pending, Snapshots, StateCacheStats};
use crate::error::Result;

impl Scheduler {
    /// Returns the number of snapshots and how often they were used; all 0 if no layer has a state.
    pub fn state_cache_stats(&self) -> StateCacheStats {
        let of = |snapshots: &Snapshots| StateCacheStats { num_cached: snapshots.pool.num_cached(), ..snapshots.stats };
        self.snapshots.as_ref().map(of).unwrap_or_default()
    }

    /// Shortens the plan's prefix hit to the last block with a snapshot at its end.
    pub(super) fn end_at_snapshot(&mut self, index: RequestIndex, plan: &mut Plan) {
        let (Some(snapshots), request) = (&self.snapshots, &mut self.requests[index]) else { return };
        plan.num_cached = plan.hits.len();
        let found = |&end: &usize| {
            let hash = request.block_hash(end - 1, self.config.block_size, &self.hasher);
            snapshots.pool.lookup(hash).is_some()
        };
        let end = (1..=plan.hits.len()).rev().find(found).unwrap_or(0);
        plan.hits.truncate(end);
    }

    /// Returns whether a request should wait for a snapshot after its `hits`, which a running request with an equal
    /// prefix is going to write. A running request may get one more snapshot, at the end of the prefix that both share.
    pub(super) fn waits_for_snapshot(&mut self, index: RequestIndex, hits: usize) -> bool {
        let (block_size, num_tokens) = (self.config.block_size, self.requests[index].tokens.len());
        let most = (num_tokens - 1) / block_size;
        let Some(snapshots) = &mut self.snapshots else { return false };
        for &row_index in &self.running {
            let (row, own) = (&self.rows[row_index as usize], &mut snapshots.rows[row_index as usize]);
            let end = most.min(row.prefill_end / block_size);
            // Requests whose prompts are reported have hashes that no other request has.
            if own.pending.is_empty() && own.planned.is_empty() || hits >= end {
                continue;
            }
            let other = row.request;
            let mut equal = |block: usize| {
                let hash = self.requests[other].block_hash(block, block_size, &self.hasher);
                hash == self.requests[index].block_hash(block, block_size, &self.hasher)
            };
            // A block's hash includes all blocks before it.
            let lens = own.pending.iter().map(|pending| pending.len).chain(own.planned.iter().copied());
            let ends = lens.map(|len| len / block_size).filter(|ends| (hits + 1..=end).contains(ends));
            let written = ends.filter(|&ends| equal(ends - 1)).max().unwrap_or(hits);
            if is_worth_waiting(written, hits, num_tokens, block_size) {
                return true;
            }
            let shared = (hits..end).take_while(|&block| equal(block)).count() + hits;
            let len = shared * block_size;
            if len > row.num_computed && is_worth_waiting(shared, hits, num_tokens, block_size) {
                let place = own.planned.partition_point(|&planned| planned < len);
                own.planned.insert(place, len);
                return true;
            }
        }
        false
    }

    /// Chooses where a newly opened row writes snapshots, and holds the one that it begins with until it is recorded.
    /// The KV of its first `num_cached` blocks is cached.
    pub(super) fn open_snapshots(&mut self, row_index: RowIndex, num_cached: usize) -> Result<()> {
        let Some(snapshots) = &mut self.snapshots else { return Ok(()) };
        let (row, block_size) = (&self.rows[row_index as usize], self.config.block_size);
        let request = &mut self.requests[row.request];
        let (start, end, num_known) = (row.num_computed, row.prefill_end, num_cached.max(request.num_stored));
        let own = &mut snapshots.rows[row_index as usize];
        (own.passed, own.last, own.restored) = (start, None, None);
        if start > 0 {
            let hash = request.block_hash(start / block_size - 1, block_size, &self.hasher);
            own.restored = snapshots.pool.lookup(hash);
            if let Some(slot) = own.restored {
                // It is the most recently used one now.
                snapshots.pool.share(slot)?;
                snapshots.pool.free(slot)?;
            }
            snapshots.stats.hits += 1;
        }
        if request.tells_prompt() {
            own.next = usize::MAX; // no other request finds its blocks
            return Ok(());
        }
        own.next = (end + 1).next_multiple_of(snapshots.decode_interval);
        let last = (end - 1) / block_size * block_size;
        let every = (1..).map(|i| i * snapshots.interval).take_while(|&len| len < last);
        own.planned.extend(every.chain([num_known * block_size, last]).filter(|&len| len > start));
        own.planned.sort_unstable();
        own.planned.dedup();
        Ok(())
    }

    /// Gives slots to the snapshots that the planned step may write, and writes them into the record, with those that
    /// admitted rows begin with.
    pub(super) fn write_snapshots(&mut self, plan: &Plan, record: &mut [i64], header: &mut StepHeader) {
        let layout = self.record_layout;
        let Some(snapshots) = &mut self.snapshots else { return };
        for (i, &row) in plan.admitted.iter().enumerate() {
            let restored = snapshots.rows[row as usize].restored.take();
            record[layout.admit_snapshot.offset + i] = restored.unwrap_or(-1);
        }
        let mut write = |row: RowIndex, snapshot: &Pending| {
            let at = header.num_snapshots;
            record[layout.snapshot_row.offset + at] = i64::from(row);
            record[layout.snapshot_len.offset + at] = snapshot.len as i64;
            record[layout.snapshot_slot.offset + at] = snapshot.slot;
            header.num_snapshots += 1;
        };
        for decode in &plan.decodes {
            while snapshots.rows[decode.row as usize].next <= decode.n_upper {
                let len = snapshots.rows[decode.row as usize].next;
                snapshots.reserve(decode.row, len, self.kv_events.as_mut());
                snapshots.rows[decode.row as usize].next = len + snapshots.decode_interval;
            }
            let prompt = self.rows[decode.row as usize].prefill_end;
            let pending = &snapshots.rows[decode.row as usize].pending;
            pending.iter().filter(|pending| pending.len > prompt).for_each(|pending| write(decode.row, pending));
        }
        for chunk in &plan.chunks {
            let end = chunk.start + chunk.len;
            let passed = snapshots.rows[chunk.row as usize].planned.partition_point(|&len| len <= end);
            let first = snapshots.rows[chunk.row as usize].pending.len();
            for i in 0..passed {
                let len = snapshots.rows[chunk.row as usize].planned[i];
                snapshots.reserve(chunk.row, len, self.kv_events.as_mut());
            }
            let own = &mut snapshots.rows[chunk.row as usize];
            own.planned.drain(..passed);
            own.pending[first..].iter().for_each(|pending| write(chunk.row, pending));
        }
    }

    /// Makes the snapshots findable that a live row wrote up to the step that settles. The row's KV blocks must have been
    /// published.
    pub(super) fn settle_snapshots(&mut self, row_index: RowIndex) -> Result<()> {
        let Some(snapshots) = &mut self.snapshots else { return Ok(()) };
        let row = &self.rows[row_index as usize];
        let passed = snapshots.rows[row_index as usize].passed;
        while let Some(&Pending { len, slot }) = snapshots.rows[row_index as usize].pending.first()
            && len <= passed
        {
            snapshots.rows[row_index as usize].pending.remove(0);
            let block = len / self.config.block_size - 1;
            let request = &mut self.requests[row.request];
            let hash = request.block_hash(block, self.config.block_size, &self.hasher);
            // Without its KV it would be of no use.
            let stored = self.pool.lookup(hash).is_some() && snapshots.pool.register(slot, hash)?;
            snapshots.pool.free(slot)?;
            if !stored {
                continue;
            }
            snapshots.stats.stored += 1;
            if let Some(events) = &mut self.kv_events {
                events.stored_snapshot(slot, request, block, hash);
            }
            if let Some(saves) = self.saves.as_mut().filter(|_| len <= row.prefill_end) {
                saves.snapshots.add(slot, len, hash);
            }
            if len > row.prefill_end
                && let Some((_, before)) = snapshots.rows[row_index as usize].last.replace((len, hash))
                && before != hash
                && let Some(slot) = snapshots.pool.lookup(before)
            {
                let evicted = snapshots.pool.forget(slot)?;
                if let Some(events) = &mut self.kv_events {
                    events.removed_snapshot(&evicted);
                }
            }
        }
        Ok(())
    }
}
