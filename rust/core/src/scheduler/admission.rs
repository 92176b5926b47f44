//! Which waiting requests get a row. Admits in order: a request that does not fit is not overtaken, and what one needs that waits for
//! another's prefix is kept for it.

use std::ops::Bound;

use super::Scheduler;
use super::hidden::HiddenRow;
use super::plan::{Plan, PrefillChunk};
use super::request::RequestIndex;
use super::row::{NO_BLOCK, Row, RowIndex};
use crate::drafts::DrafterKind;
use crate::error::Result;

impl Scheduler {
    /// Admits waiting requests while there are rows, prefill budget, upload and constraint room and blocks for them.
    ///
    /// Beside running requests a newcomer needs blocks for its whole prompt and the output reserved for it, on top of what they will
    /// ask for next, or it would be preempted over and over. Alone it is admitted with whatever there is: the pool holds any request.
    pub(super) fn admit(&mut self, plan: &mut Plan) -> Result<()> {
        if self.waiting.is_empty() || self.free_rows.is_empty() {
            return Ok(());
        }
        let block_size = self.config.block_size;
        let mut growth = self.growth_of_running();
        let mut num_held_back = 0;
        let mut after = Bound::Unbounded;
        while let Some((&order, &index)) = self.waiting.range((after, Bound::Unbounded)).next() {
            after = Bound::Excluded(order);
            let num_tokens = self.requests[index].tokens.len();
            let left = self.budget(plan).prefill_left;
            let (uploads, constraints) =
                (plan.upload_tokens + num_tokens, plan.constraints + self.requests[index].sampling.constraints.len());
            let fits =
                uploads <= self.record_layout.upload_token.len && constraints <= self.record_layout.constraint.len;
            if self.free_rows.len() == num_held_back || left == 0 || !fits {
                break;
            }
            self.find_prefix(index, &mut plan.hits);
            let unheld = plan.hits.iter().filter(|&&block| self.pool.ref_count(block) == Some(0)).count();
            let num_held = plan.hits.iter().filter(|&&block| block != NO_BLOCK).count();
            let all = self.blocks_after_prompt(num_tokens, self.requests[index].limit);
            let missing = self.blocks_to_come(all - plan.hits.len(), num_held);
            if self.waits_for_prefix(index, plan.hits.len()) {
                num_held_back += 1;
                growth += missing + unheld;
                continue;
            }
            let free = self.pool.num_free() - unheld;
            if !self.running.is_empty() && free < missing + growth {
                break;
            }
            let start = plan.hits.len() * block_size;
            let len = (num_tokens - start).min(self.chunk_share(left)).min(free * block_size);
            if len == 0 {
                break;
            }
            let row = self.open_row(index, &plan.hits)?;
            self.grow(row, start + len)?;
            growth += (missing + plan.hits.len()).saturating_sub(self.rows[row as usize].blocks.len());
            self.push_chunk(plan, PrefillChunk { row, start, len });
            (plan.upload_tokens, plan.constraints) = (uploads, constraints);
            plan.admitted.push(row);
        }
        Ok(())
    }

    /// Gives a waiting request a row that holds the cached blocks `hits`.
    fn open_row(&mut self, index: RequestIndex, hits: &[i64]) -> Result<RowIndex> {
        let row = self.free_rows.pop().expect("a free row");
        let request = &mut self.requests[index];
        request.row = Some(row);
        request.reserve(self.config.block_size, self.config.num_speculative_tokens + 1);
        let start = hits.len() * self.config.block_size;
        // Once a request: preempted, it finds blocks that it computed itself.
        if !std::mem::replace(&mut request.admitted, true) {
            self.num_cached_tokens += start as u64;
        }
        let order = request.order;
        let drafted = if self.drafts.from_hidden {
            self.hidden[row as usize] = HiddenRow::default();
            self.drafted_hits(index, hits)
        } else {
            hits.iter().take_while(|&&block| self.pool.has_draft(block)).count()
        };
        let request = &self.requests[index];
        self.waiting.remove(&order);
        let lease = &mut self.rows[row as usize];
        lease.open(index, request, self.config.blocks_for(request.limit));
        lease.drafter = if self.drafts.has_kv { DrafterKind::Device } else { self.config.host_drafters.first() };
        for &block in hits {
            if block == NO_BLOCK {
                lease.first_block += 1;
            } else {
                self.pool.share(block)?;
            }
            lease.blocks.push(block);
        }
        let lease = &mut self.rows[row as usize];
        lease.num_computed = start;
        lease.num_sent = lease.first_block;
        lease.num_registered = hits.len();
        lease.num_draft_marked = drafted;
        lease.draft_len = drafted * self.config.block_size;
        let place = self.running_place(order);
        self.running.insert(place, row);
        Ok(row)
    }

    /// Blocks of a request with its prompt, the token after it, and the output reserved for it.
    fn blocks_after_prompt(&self, num_tokens: usize, limit: usize) -> usize {
        self.config.blocks_for((num_tokens + 1 + self.config.num_reserved_decode_tokens).min(limit))
    }

    /// Of `missing` blocks those that a row takes which holds `num_held`: with a window it gives some back for others.
    fn blocks_to_come(&self, missing: usize, num_held: usize) -> usize {
        self.config.most_blocks_held().map_or(missing, |most| missing.min(most.saturating_sub(num_held)))
    }

    /// Blocks that the running rows will ask for: the rest of their prompts, one iteration of those that decode, and what is reserved.
    fn growth_of_running(&self) -> usize {
        let (config, block_size) = (&self.config, self.config.block_size);
        let iteration = config.blocks_for(config.num_speculative_tokens + 1);
        let decode = iteration + config.blocks_for(config.num_reserved_decode_tokens);
        let growth = |row: &Row| {
            if row.is_prefilling() {
                return self.blocks_after_prompt(row.prefill_end, row.limit).saturating_sub(row.blocks.len());
            }
            // Without a division for the many that are not about to end.
            if row.limit >= (row.blocks.len() + decode) * block_size {
                return decode;
            }
            decode.min(config.blocks_for(row.limit) - row.blocks.len())
        };
        let rows = self.running.iter().map(|&row| &self.rows[row as usize]);
        if config.sliding_window.is_none() {
            return rows.map(growth).sum();
        }
        rows.map(|row| self.blocks_to_come(growth(row), row.blocks.len() - row.first_block)).sum()
    }

    /// Whether the request had better wait for the blocks behind its `hits`: a running one that begins alike computes them, and they
    /// are at least what is left to compute then. Running requests go on without those that wait, so the wait ends.
    fn waits_for_prefix(&mut self, index: RequestIndex, hits: usize) -> bool {
        let block_size = self.config.block_size;
        let num_tokens = self.requests[index].tokens.len();
        let most = (num_tokens - 1) / block_size;
        let mut shared = hits;
        for &row_index in &self.running {
            let row = &self.rows[row_index as usize];
            let end = most.min(row.prefill_end / block_size);
            if !self.config.enable_prefix_caching || row.num_registered > hits || hits >= end {
                continue;
            }
            let other = row.request;
            let mut equal = |&block: &usize| {
                let hash = self.requests[other].block_hash(block, block_size, &self.hasher);
                hash == self.requests[index].block_hash(block, block_size, &self.hasher)
            };
            shared = shared.max(hits + (hits..end).take_while(|block| equal(block)).count());
        }
        (shared - hits) * block_size >= (num_tokens - shared * block_size).max(block_size)
    }

    /// Fills `hits` with the cached blocks of the longest known prefix, at most all tokens but the last, which must be fed to the
    /// target to get the next one. With a window [`NO_BLOCK`] stands for those that no query behind the prefix will read.
    fn find_prefix(&mut self, index: RequestIndex, hits: &mut Vec<i64>) {
        hits.clear();
        if !self.config.enable_prefix_caching {
            return;
        }
        let (block_size, request) = (self.config.block_size, &mut self.requests[index]);
        let most = (request.tokens.len() - 1) / block_size;
        if self.config.sliding_window.is_some() {
            self.find_window(index, most, hits);
        } else {
            for block in 0..most {
                match self.pool.lookup(request.block_hash(block, block_size, &self.hasher)) {
                    Some(hit) => hits.push(hit),
                    None => break,
                }
            }
        }
        if self.drafts.from_hidden {
            self.trim_hits(index, hits);
        }
    }

    /// The same of `most` blocks with a window: the longest prefix whose last window is cached, whatever became of the blocks before that.
    fn find_window(&mut self, index: RequestIndex, most: usize, hits: &mut Vec<i64>) {
        let (config, request) = (&self.config, &mut self.requests[index]);
        // Blocks [place, end) are cached.
        let (mut place, mut end) = (most, most);
        while place > config.first_block_read(end * config.block_size + 1) {
            place -= 1;
            if let Some(hit) = self.pool.lookup(request.block_hash(place, config.block_size, &self.hasher)) {
                hits.push(hit);
            } else {
                hits.clear();
                end = place;
            }
        }
        hits.resize(end, NO_BLOCK);
        hits.reverse();
    }
}
