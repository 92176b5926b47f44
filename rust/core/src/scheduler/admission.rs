//! Which waiting requests get a row. Admits from the head only: a request that does not fit is not overtaken.

use super::Scheduler;
use super::plan::{Plan, PrefillChunk};
use super::request::RequestIndex;
use crate::error::Result;

impl Scheduler {
    /// Admits waiting requests while there are rows, prefill budget, upload and constraint room and blocks for them.
    ///
    /// Beside running requests a newcomer needs blocks for its whole prompt on top of what they will ask for next, or it would be
    /// preempted over and over. Alone it is admitted with whatever there is: the pool holds any request.
    pub(super) fn admit(&mut self, plan: &mut Plan) -> Result<()> {
        if self.waiting.is_empty() || self.free_rows.is_empty() {
            return Ok(());
        }
        let block_size = self.config.block_size;
        let mut growth = self.growth_of_running();
        while let Some((&importance, &index)) = self.waiting.first_key_value() {
            let Some(&row) = self.free_rows.last() else { break };
            let num_tokens = self.requests[index].tokens.len();
            let left = self.budget(plan).prefill_left;
            let constraints = self.requests[index].sampling.constraints.len();
            let fits = plan.upload_tokens + num_tokens <= self.record_layout.upload_token.len
                && plan.constraints + constraints <= self.record_layout.constraint.len;
            if left == 0 || !fits {
                break;
            }
            self.find_prefix(index, &mut plan.hits);
            let unheld = plan.hits.iter().filter(|&&block| self.pool.ref_count(block) == Some(0)).count();
            let free = self.pool.num_free() - unheld;
            let missing = self.config.blocks_for(num_tokens + 1) - plan.hits.len();
            if !self.running.is_empty() && free < missing + growth {
                break;
            }
            let start = plan.hits.len() * block_size;
            let len = (num_tokens - start).min(left).min(free * block_size);
            if len == 0 {
                break;
            }

            self.free_rows.pop();
            self.waiting.pop_first();
            self.requests[index].row = Some(row);
            let lease = &mut self.rows[row as usize];
            self.requests[index].reserve(block_size, self.config.num_speculative_tokens + 1);
            lease.open(index, &self.requests[index], self.config.blocks_for(self.requests[index].limit));
            for &block in &plan.hits {
                self.pool.share(block)?;
                lease.blocks.push(block);
            }
            let drafted = plan.hits.iter().take_while(|&&block| self.pool.has_draft(block)).count();
            lease.num_computed = start;
            lease.num_registered = plan.hits.len();
            lease.num_draft_marked = drafted;
            lease.draft_len = drafted * block_size;
            // Once a request: preempted, it finds blocks of its own, which nobody asked for.
            if !std::mem::replace(&mut self.requests[index].admitted, true) {
                self.num_cached_tokens += start as u64;
            }
            self.grow(row, start + len)?;
            growth += missing + plan.hits.len() - self.rows[row as usize].blocks.len();
            let place = self.running_place(importance);
            self.running.insert(place, row);
            self.push_chunk(plan, PrefillChunk { row, start, len });
            plan.upload_tokens += num_tokens;
            plan.constraints += constraints;
            plan.admitted.push(row);
        }
        Ok(())
    }

    /// Blocks that the running rows will ask for: the rest of their prompts, and one iteration of those that decode.
    fn growth_of_running(&self) -> usize {
        let iteration = self.config.blocks_for(self.config.num_speculative_tokens + 1);
        let growth = |&row: &u32| {
            let row = &self.rows[row as usize];
            if row.is_prefilling() {
                return self.config.blocks_for(row.prefill_end + 1).saturating_sub(row.blocks.len());
            }
            // Without a division for the many that are not about to end.
            if row.limit >= (row.blocks.len() + iteration) * self.config.block_size {
                return iteration;
            }
            iteration.min(self.config.blocks_for(row.limit) - row.blocks.len())
        };
        self.running.iter().map(growth).sum()
    }

    /// Fills `hits` with the cached blocks of the longest known prefix, at most all tokens but the last, which must be fed to the
    /// target to get the next one.
    fn find_prefix(&mut self, index: RequestIndex, hits: &mut Vec<i64>) {
        hits.clear();
        if !self.config.enable_prefix_caching {
            return;
        }
        let (block_size, request) = (self.config.block_size, &mut self.requests[index]);
        for block in 0..(request.tokens.len() - 1) / block_size {
            match self.pool.lookup(request.block_hash(block, block_size, &self.hasher)) {
                Some(hit) => hits.push(hit),
                None => break,
            }
        }
    }
}
