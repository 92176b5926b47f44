//! Admission of waiting requests to rows, in order of their turns. If a request does not fit, no later request is
//! admitted before it. Only requests for prompt log probabilities may be overtaken, because their tokens take more
//! time, of which the step may have too little. If a request waits for another request's prefix, for its `LoRA` adapter
//! or for blocks that the host copies in, its resources stay reserved and later requests may be admitted.

use super::Scheduler;
use super::hidden::HiddenRow;
use super::plan::{Plan, PrefillChunk};
use super::request::RequestIndex;
use super::row::{NO_BLOCK, Row, RowIndex};
use crate::drafts::DrafterKind;
use crate::error::Result;

impl Scheduler {
    /// Admits waiting requests while there are rows, prefill budget, blocks, and room for uploads and constraints.
    ///
    /// Next to running requests, a new request needs blocks for its whole prompt and its reserved output. In addition,
    /// the blocks that running requests will soon need must be free. Otherwise the new request would be preempted over
    /// and over. Without running requests it is admitted with any number of free blocks, because the pool can hold any
    /// single request.
    pub(super) fn admit(&mut self, plan: &mut Plan) -> Result<()> {
        if self.waiting.is_empty() || self.free_rows.is_empty() {
            self.num_delays = 0;
            return Ok(());
        }
        let block_size = self.config.block_size;
        let most_prefill = self.budget(plan).most_prefill();
        let num_delays = std::mem::take(&mut self.num_delays);
        let mut growth = self.growth_of_running(most_prefill);
        let (mut num_held_back, mut loras) = (0, self.running_loras());
        self.queue_by_turn(plan);
        for place in 0..plan.queue.len() {
            let index = plan.queue[place];
            let num_tokens = self.requests[index].tokens.len();
            let mut left = self.chunk_left(plan, index, 0, usize::MAX);
            let (uploads, constraints) =
                (plan.upload_tokens + num_tokens, plan.constraints + self.requests[index].sampling.constraints.len());
            let fits =
                uploads <= self.record_layout.upload_token.len && constraints <= self.record_layout.constraint.len;
            let has_budget = self.budget(plan).prefill_left > 0 && !self.has_all_merged(plan);
            let has_row = self.free_rows.len() > num_held_back;
            if !has_row || !has_budget || !fits {
                if has_row && !has_budget && plan.merges() {
                    self.num_delays = num_delays + 1;
                }
                break;
            }
            if left == 0 {
                if self.requests[index].tells_prompt() {
                    continue;
                }
                break;
            }
            self.find_prefix(index, plan);
            let hits = plan.hits.iter().chain(plan.group_hits.iter().flatten());
            let unheld = hits.filter(|&&block| self.pool.ref_count(block) == Some(0)).count();
            let all = self.blocks_after_prompt(num_tokens, self.requests[index].limit);
            let num_held = |hits: &Vec<i64>| hits.iter().filter(|&&block| block != NO_BLOCK).count();
            let held = std::iter::once(&plan.hits).chain(&plan.group_hits).map(num_held);
            let missing = self.blocks_to_come(all - plan.hits.len(), 0, held);
            let lora = self.lora_id(index);
            if !loras.admits(lora, self.config.max_loras) || self.waits_for_prefix(index, plan.hits.len()) {
                num_held_back += 1;
                growth += missing + unheld;
                continue;
            }
            let free = self.pool.num_free() - unheld;
            if !self.running.is_empty() && free < missing + growth {
                plan.refused = true;
                break;
            }
            let start = plan.hits.len() * block_size;
            if plan.merges() {
                self.admit_chunk(plan, index, num_tokens - start);
                left = self.chunk_left(plan, index, 0, usize::MAX);
            }
            let len = (num_tokens - start).min(self.chunk_share(left)).min(self.groups.columns(free) * block_size);
            // Deep in a context tokens may cost more, and a short chunk more by the token.
            let len = self.chunk_left(plan, index, start, len);
            if len == 0 {
                break;
            }
            if self.requests[index].awaits_load {
                self.loads.push(self.requests[index].id);
                num_held_back += 1;
                growth += missing + unheld;
                continue;
            }
            loras.add(lora);
            let row = self.open_row(index, &plan.hits, &plan.group_hits)?;
            if self.snapshots.is_some() {
                self.open_snapshots(row, plan.num_cached)?;
            }
            self.grow(row, start + len)?;
            let taken = self.rows[row as usize].blocks.len() - plan.hits.len();
            growth += missing.saturating_sub(taken * self.config.num_groups());
            self.push_chunk(plan, PrefillChunk { row, start, len });
            (plan.upload_tokens, plan.constraints) = (uploads, constraints);
            plan.admitted.push(row);
        }
        Ok(())
    }

    /// Gives a waiting request a row that starts with the cached blocks `hits` of the first group and `group_hits` of
    /// the others.
    fn open_row(&mut self, index: RequestIndex, hits: &[i64], group_hits: &[Vec<i64>]) -> Result<RowIndex> {
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
        lease.drafter = if self.drafts.mixes { DrafterKind::Device } else { self.config.host_drafters.first() };
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
        if !self.groups.is_empty() {
            self.groups.open(row, group_hits, self.config.blocks_for(lease.limit), &mut self.pool)?;
        }
        lease.num_registered = hits.len();
        lease.num_draft_marked = drafted;
        lease.draft_len = drafted * self.config.block_size;
        let place = self.running_place(order);
        self.running.insert(place, row);
        Ok(row)
    }

    /// Returns the number of blocks for a request's prompt, the token after it, and its reserved output.
    fn blocks_after_prompt(&self, num_tokens: usize, limit: usize) -> usize {
        self.config.blocks_for((num_tokens + 1 + self.config.num_reserved_decode_tokens).min(limit))
    }

    /// Returns the number of blocks that a row will take over all groups, given `missing` blocks in each. `num_held`
    /// has the number of blocks that it holds by group. A group with a window takes no more than its window needs,
    /// because it returns blocks. It takes `next` blocks, which this plan may add, before it returns any.
    fn blocks_to_come(&self, missing: usize, next: usize, num_held: impl Iterator<Item = usize>) -> usize {
        let of_group = |(group, held)| match self.config.most_blocks_held(group) {
            Some(most) => missing.min(most.saturating_sub(held).max(next)),
            None => missing,
        };
        num_held.enumerate().map(of_group).sum()
    }

    /// Returns the number of blocks that running rows will ask for: the rest of their prompts, one iteration of the
    /// decoding rows, and the reserved output. This plan gives prompts at most `prefill_left` tokens.
    fn growth_of_running(&self, prefill_left: usize) -> usize {
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
        if !config.has_windows() {
            return rows.map(growth).sum();
        }
        let chunk = config.blocks_for(prefill_left);
        let next = |row: &Row| if row.is_prefilling() { chunk } else { iteration };
        rows.zip(&self.running)
            .map(|(row, &index)| self.blocks_to_come(growth(row), next(row), self.num_held(index)))
            .sum()
    }

    /// Returns whether a request should wait for the blocks after its `hits`, because a running request with an equal
    /// prefix is computing them. It waits if these blocks have at least as many tokens as would then be left to
    /// compute. Running requests do not depend on waiting ones, so the wait ends.
    fn waits_for_prefix(&mut self, index: RequestIndex, hits: usize) -> bool {
        if self.snapshots.is_some() {
            return self.waits_for_snapshot(index, hits);
        }
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
        is_worth_waiting(shared, hits, num_tokens, block_size)
    }

    /// Fills the plan's hits with the cached blocks of the longest known prefix. The prefix excludes the last token,
    /// which must be fed to the target to get the next one. With a window, [`NO_BLOCK`] stands for blocks that no query
    /// after the prefix will read.
    fn find_prefix(&mut self, index: RequestIndex, plan: &mut Plan) {
        plan.hits.clear();
        plan.group_hits.resize(self.config.window_groups.len(), Vec::new());
        plan.group_hits.iter_mut().for_each(Vec::clear);
        if !self.config.enable_prefix_caching {
            return;
        }
        let (block_size, request) = (self.config.block_size, &mut self.requests[index]);
        let mut most = (request.tokens.len() - 1) / block_size;
        if self.config.sliding_window.is_none() {
            for block in 0..most {
                match self.pool.lookup(request.block_hash(block, block_size, &self.hasher)) {
                    Some(hit) => plan.hits.push(hit),
                    None => break,
                }
            }
            most = plan.hits.len();
        }
        if self.config.has_windows() {
            plan.hits.clear();
            self.find_windows(index, most, plan);
        }
        if self.drafts.trims_hits {
            self.trim_hits(index, &mut plan.hits);
        }
        if self.snapshots.is_some() {
            self.end_at_snapshot(index, plan);
        }
    }

    /// Finds the prefix hit of a model with windows, of at most `most` blocks. It is the longest prefix for which each
    /// group has the blocks that a query after the prefix reads. Earlier blocks may be gone.
    fn find_windows(&mut self, index: RequestIndex, most: usize, plan: &mut Plan) {
        let (config, request) = (&self.config, &mut self.requests[index]);
        let first_read = |group, end| config.first_block_read(group, end * config.block_size + 1);
        let first_of_all = |end| (0..config.num_groups()).map(|group| first_read(group, end)).min().unwrap_or(0);
        // Blocks [place, end) are cached in every group that reads them.
        let (mut place, mut end) = (most, most);
        while place > first_of_all(end) {
            place -= 1;
            let hash = request.block_hash(place, config.block_size, &self.hasher);
            let mut cached = true;
            for (group, hits) in plan.all_hits().enumerate() {
                if place >= first_read(group, end) {
                    let hit = self.pool.lookup(self.groups.hash_in(group, hash));
                    cached &= hit.is_some();
                    hits.extend(hit);
                }
            }
            if !cached {
                end = place;
                plan.all_hits().for_each(Vec::clear);
            }
        }
        for hits in plan.all_hits() {
            hits.resize(end, NO_BLOCK);
            hits.reverse();
        }
    }
}

/// Returns whether a request of `num_tokens` tokens should wait until another has computed `shared` of its first blocks,
/// of which `hits` are cached already.
pub(super) fn is_worth_waiting(shared: usize, hits: usize, num_tokens: usize, block_size: usize) -> bool {
    (shared - hits) * block_size >= (num_tokens - shared * block_size).max(block_size)
}
