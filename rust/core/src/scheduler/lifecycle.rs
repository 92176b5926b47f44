//! Lifecycle of requests: adding, ending and preempting them.

use super::loras;
use super::request::{Request, RequestIndex};
use super::row::{RowIndex, RowState};
use super::{RequestParams, Scheduler};
use crate::error::{Error, Result};
use crate::hash::check_extra_keys;
use crate::sampling::MAX_STOP_IDS;

/// Maximum token id. Token ids are vocabulary indices, so a value beyond 32 bits is a bug of the caller.
const MAX_TOKEN: i64 = crate::hash::ESCAPE as i64 - 1;

pub(super) fn is_token(token: i64) -> bool {
    (0..=MAX_TOKEN).contains(&token)
}

impl Scheduler {
    /// Adds a request to the queue, after all waiting requests of its priority.
    ///
    /// # Errors
    /// [`Error::DuplicateRequest`] if the id is live. [`Error::InvalidRequest`] if a parameter is not allowed, for
    /// example a limit that needs more blocks than the pool has.
    pub fn add_request(&mut self, request_id: i64, token_ids: &[i64], params: &RequestParams<'_>) -> Result<()> {
        self.validate(request_id, token_ids, params)?;
        // All requests age alike, so their order never changes: it is as if those that come later had less priority.
        let rank = match self.config.priority_aging_steps {
            0 => i128::from(params.priority),
            steps => i128::from(params.priority) * steps as i128 + i128::from(self.next_step_id),
        };
        let order = (rank, self.next_arrival);
        let salt = self.hasher.root(params.cache_salt);
        let root = loras::root(&self.hasher, salt, params.lora);
        let request = Request::new(request_id, order, token_ids, params, (salt, root), self.config.logits_dtype);
        let index = self.requests.insert(request);
        self.next_arrival += 1;
        self.by_id.insert(request_id, index);
        self.waiting.insert(order, index);
        self.num_with_caller += usize::from(params.caller.is_some());
        Ok(())
    }

    fn validate(&self, request_id: i64, token_ids: &[i64], params: &RequestParams<'_>) -> Result<()> {
        let invalid =
            |field, value: String, allowed: String| Err(Error::invalid_request(request_id, field, value, allowed));
        if request_id < 0 {
            return invalid("request_id", request_id.to_string(), "at least 0".into());
        }
        if self.by_id.contains_key(&request_id) {
            return Err(Error::DuplicateRequest { request_id });
        }
        if token_ids.is_empty() {
            return invalid("token_ids", "no tokens".into(), "at least 1 token".into());
        }
        for (field, tokens) in
            [("token_ids", token_ids), ("stop_token_ids", params.stop_token_ids), ("prediction", params.prediction)]
        {
            if let Some(index) = tokens.iter().position(|&token| !is_token(token)) {
                return invalid(field, format!("{} at index {index}", tokens[index]), format!("from 0 to {MAX_TOKEN}"));
            }
        }
        if let Err((value, allowed)) = check_extra_keys(params.extra_keys, token_ids.len()) {
            return invalid("extra_keys", value, allowed);
        }
        if let Some(lora) = params.lora {
            if self.config.max_loras == 0 {
                return invalid(
                    "lora",
                    format!("{:?}", lora.name),
                    "none while max_loras=0; raise max_loras to serve adapters".into(),
                );
            }
            if lora.id == 0 || lora.name.is_empty() {
                let allowed = "an id of at least 1 and a name that is not empty";
                return invalid("lora", format!("{} of id {}", lora.name, lora.id), allowed.into());
            }
        }
        let (limit, least, most) = (params.limit, token_ids.len() + 1, self.config.max_model_len);
        if limit < least {
            return invalid("limit", limit.to_string(), format!("at least {least}, one more than the prompt"));
        }
        if limit > most {
            return invalid("limit", limit.to_string(), format!("at most max_model_len={most}"));
        }
        let (blocks, pool) = (self.config.least_blocks(limit), self.config.num_blocks);
        if blocks > pool {
            let value = format!("{limit}, which needs {blocks} blocks");
            return invalid(
                "limit",
                value,
                format!("at most what the pool's {pool} blocks of {} tokens hold", self.config.block_size),
            );
        }
        let (k, most) = (params.num_speculative_tokens, self.config.num_speculative_tokens);
        if k > most {
            return invalid(
                "num_speculative_tokens",
                k.to_string(),
                format!("at most {most}, the engine's number of drafts"),
            );
        }
        let stops = params.stop_token_ids.len();
        if stops > MAX_STOP_IDS {
            return invalid("stop_token_ids", format!("{stops} ids"), format!("at most {MAX_STOP_IDS}"));
        }
        params.sampling.validate(request_id, is_token)?;
        let (constraints, most) = (params.sampling.num_constraints(), self.config.max_constraint_len);
        if constraints > most {
            let value = format!("{constraints} elements of allowed_token_ids, logit_bias and bad_words");
            return invalid("constraints", value, format!("at most max_constraint_len={most}"));
        }
        Ok(())
    }

    /// Ends a waiting or running request now. Results in flight for it will be dropped.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`] if the id is not live.
    pub fn abort(&mut self, request_id: i64) -> Result<()> {
        let index = self.live(request_id)?;
        if let Some(row) = self.requests[index].row {
            return self.end(row);
        }
        self.waiting.remove(&self.requests[index].order);
        self.forget(index);
        Ok(())
    }

    /// Returns a running request to its original place in the waiting queue. Results in flight for it will be dropped.
    /// Its settled tokens stay, and their KV is computed again unless the prefix cache still has it.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`] if the id is not live, [`Error::NotRunning`] if it waits.
    pub fn preempt(&mut self, request_id: i64) -> Result<()> {
        let row = self.running_row(request_id)?;
        self.preempt_row(row)
    }

    /// Sets the tokens that a request's grammar forces, or makes likely, after its settled ones, as drafts of
    /// [`DrafterKind::Grammar`](crate::DrafterKind::Grammar). They count until the request has more tokens.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`] if the id is not live. [`Error::InvalidRequest`] for a token id outside its range.
    pub fn set_grammar_drafts(&mut self, request_id: i64, token_ids: &[i64]) -> Result<()> {
        let index = self.live(request_id)?;
        if let Some(at) = token_ids.iter().position(|&token| !is_token(token)) {
            let value = format!("{} at index {at}", token_ids[at]);
            return Err(Error::invalid_request(request_id, "token_ids", value, format!("from 0 to {MAX_TOKEN}")));
        }
        self.requests[index].set_grammar_drafts(token_ids);
        Ok(())
    }

    pub(super) fn running_row(&self, request_id: i64) -> Result<RowIndex> {
        let index = self.live(request_id)?;
        self.requests[index].row.ok_or(Error::NotRunning { request_id })
    }

    pub(super) fn live(&self, request_id: i64) -> Result<RequestIndex> {
        self.by_id.get(&request_id).copied().ok_or(Error::UnknownRequest { request_id })
    }

    fn forget(&mut self, index: RequestIndex) {
        let request = self.requests.remove(index);
        self.by_id.remove(&request.id);
        self.num_with_caller -= usize::from(request.caller.is_some());
        if let Some(saves) = &mut self.saves
            && self.host_drafts.proposers.suffix.as_ref().is_some_and(|suffix| suffix.keeps(request.order.1 as i64))
        {
            saves.output(&request);
        }
        self.host_drafts.forget(&request);
    }

    pub(super) fn preempt_row(&mut self, row: RowIndex) -> Result<()> {
        let index = self.rows[row as usize].request;
        self.close(row)?;
        let request = &mut self.requests[index];
        request.row = None;
        self.waiting.insert(request.order, index);
        self.num_preemptions += 1;
        Ok(())
    }

    /// Ends the request that runs on a live row.
    pub(super) fn end(&mut self, row: RowIndex) -> Result<()> {
        let index = self.rows[row as usize].request;
        self.close(row)?;
        self.forget(index);
        Ok(())
    }

    fn close(&mut self, row: RowIndex) -> Result<()> {
        let place = self.running_place(self.requests[self.rows[row as usize].request].order);
        debug_assert_eq!(self.running.get(place), Some(&row));
        self.running.remove(place);
        self.rows[row as usize].state = RowState::Closed;
        if self.rows[row as usize].in_flight == 0 { self.release(row) } else { Ok(()) }
    }

    /// Returns the index in `running` at which a request of this order is or belongs.
    pub(super) fn running_place(&self, order: super::Order) -> usize {
        self.running.partition_point(|&row| self.requests[self.rows[row as usize].request].order < order)
    }

    /// Frees a closed row that no step in flight names, and returns its blocks and claims to the pool.
    pub(super) fn release(&mut self, row: RowIndex) -> Result<()> {
        let lease = &mut self.rows[row as usize];
        // Last to first, so that the tail is evicted before the head.
        for block in lease.blocks.drain(..).skip(lease.first_block).rev() {
            self.pool.release_claim(block, row);
            self.pool.free(block)?;
            if let Some(saves) = &mut self.saves
                && self.pool.is_registered(block)
                && self.pool.ref_count(block) == Some(0)
            {
                saves.due(block);
            }
        }
        lease.state = RowState::Free;
        if let Some(snapshots) = &mut self.snapshots {
            let last = snapshots.rows[row as usize].last.take();
            if let (Some(saves), Some((len, hash))) = (&mut self.saves, last)
                && let Some(slot) = snapshots.pool.lookup(hash)
            {
                saves.snapshots.add(slot, len, hash);
            }
            snapshots.release(row)?;
        }
        if !self.groups.is_empty() {
            self.groups.release(row, &mut self.pool)?;
        }
        self.free_rows.push(row);
        Ok(())
    }
}
