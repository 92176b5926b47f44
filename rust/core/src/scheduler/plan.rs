//! Planning of the next step. Decides for the running requests in order of importance; `admission` and `catch_up` add
//! the rest.
//!
//! Until it is certain that there will be a step, planning may only reserve blocks, preempt requests, and move rows
//! between callers. If a plan ends in `SettleFirst`, only its reservations stay, and the next plan uses them.

use super::prefill_costs::StepWork;
use super::request::RequestIndex;
use super::row::{Row, RowIndex};
use super::{PlanOutcome, Scheduler, saves};
use crate::drafts::DrafterKind;
use crate::error::{Result, check_len};

#[derive(Clone, Copy, Debug)]
pub(super) struct Decode {
    pub(super) row: RowIndex,
    pub(super) k: usize,
    pub(super) drafter: DrafterKind,
    /// Upper bound of the row's tokens.
    pub(super) n_upper: usize,
    /// Number of positions that the row's blocks must cover.
    pub(super) covered: usize,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct PrefillChunk {
    pub(super) row: RowIndex,
    pub(super) start: usize,
    pub(super) len: usize,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct DraftChunk {
    pub(super) row: RowIndex,
    pub(super) start: usize,
    pub(super) len: usize,
}

/// Decoding sequence that could draft if its draft KV lagged less.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lagging {
    /// Index of the sequence in `Plan::decodes`.
    pub(super) decode: usize,
    /// Number of drafts that the sequence wants.
    pub(super) k: usize,
    /// Number of tokens that the drafter could catch up in this step; 0 while it waits for the claim of another row.
    pub(super) demand: usize,
}

/// Prompts of a step that merges its chunks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Merging {
    /// Number of running prompts, with those that the plan admits.
    pub(super) num_prompts: usize,
    /// Number of tokens of these prompts that no earlier step computes.
    pub(super) num_tokens: usize,
    /// Maximum of `num_tokens`.
    pub(super) max_tokens: usize,
    /// Number of tokens by which the budget grows if the chunks get a pass of their own after all.
    pub(super) withheld: usize,
    /// Milliseconds that chunks may take in a pass of their own.
    pub(super) alone_ms: f64,
}

/// Decoding sequences of a step, as far as its plan knows them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Decoding {
    pub(super) num_seqs: usize,
    /// Largest number of drafts of a sequence.
    pub(super) max_k: usize,
    /// Number of tokens to verify.
    pub(super) num_tokens: usize,
}

/// Budget of chunks, computed once there is prefill work.
#[derive(Clone, Copy, Debug)]
pub(super) struct Budget {
    /// Number of tokens for prefill and draft chunks together.
    pub(super) chunks: usize,
    pub(super) prefill_left: usize,
    /// Milliseconds that prompts may take; infinity if no decoding request waits for them.
    pub(super) prefill_ms: f64,
    /// Prompts of a step that merges its chunks with verification; `None` if chunks have a pass of their own.
    pub(super) merging: Option<Merging>,
}

/// Content of the step being planned, kept between plans to reuse its allocations.
#[derive(Clone, Debug, Default)]
pub(super) struct Plan {
    pub(super) decodes: Vec<Decode>,
    /// Decoding sequences whose draft KV lags, by importance until `catch_up` sorts them.
    pub(super) lagging: Vec<Lagging>,
    pub(super) chunks: Vec<PrefillChunk>,
    pub(super) draft_chunks: Vec<DraftChunk>,
    pub(super) admitted: Vec<RowIndex>,
    pub(super) preempted: Vec<i64>,
    /// Number of verification rows of the decoding sequences, counting lagging ones at the K they want.
    pub(super) decode_tokens: usize,
    pub(super) prefill_tokens: usize,
    pub(super) work: StepWork,
    pub(super) upload_tokens: usize,
    /// Number of constraint elements of the admitted requests.
    pub(super) constraints: usize,
    pub(super) budget: Option<Budget>,
    /// Waiting requests that may be admitted, in turn.
    pub(super) queue: Vec<RequestIndex>,
    /// Whether a waiting request found too few blocks; kept until the next plan.
    pub(super) refused: bool,
    /// Number of running rows that are in the plan, which are the most important ones.
    pub(super) num_placed: usize,
    /// Blocks of the current prefix hit in the first group.
    pub(super) hits: Vec<i64>,
    /// Blocks of the current prefix hit in the other groups, `[G - 1]`.
    pub(super) group_hits: Vec<Vec<i64>>,
    /// Number of first blocks of the current request whose KV is cached, which may be more than its prefix hit if
    /// layers have states.
    pub(super) num_cached: usize,
    /// Scratch of the counting sort of the decoding sequences by K, by K: first the number of sequences with this K,
    /// then the number of sequences that come before them.
    pub(super) counts: Vec<usize>,
    pub(super) unsorted: Vec<Decode>,
    /// Decoding sequences with blocks that no step has sent to the device.
    pub(super) unsent: Vec<u32>,
}

impl Plan {
    fn clear(&mut self) {
        self.decodes.clear();
        self.lagging.clear();
        self.chunks.clear();
        self.draft_chunks.clear();
        self.admitted.clear();
        self.preempted.clear();
        (self.decode_tokens, self.prefill_tokens) = (0, 0);
        (self.upload_tokens, self.constraints) = (0, 0);
        self.work = StepWork::default();
        self.budget = None;
        self.num_placed = 0;
    }

    /// Iterates over the blocks of the current prefix hit, by group.
    pub(super) fn all_hits(&mut self) -> impl Iterator<Item = &mut Vec<i64>> {
        std::iter::once(&mut self.hits).chain(&mut self.group_hits)
    }
}

/// Whether a row drafts in the next step, and how many tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Drafting {
    /// The row does not draft: it does not want to, or steps in flight hide how far its draft KV lags.
    Off,
    /// The row drafts this many tokens.
    Ready(usize),
    /// The row drafts this many tokens if `catch_up` closes the lag of its draft KV.
    CatchUp(usize),
}

impl Scheduler {
    /// Plans the next step into `record`; the step is then in flight until `settle`. `record` is unchanged unless
    /// the outcome is [`PlanOutcome::Step`].
    ///
    /// # Errors
    /// [`crate::Error::InvalidBuffer`] if `record` does not have its layout's size.
    pub fn plan(&mut self, record: &mut [i64]) -> Result<PlanOutcome> {
        check_len("record", record.len(), self.record_layout.size)?;
        if self.steps.len() == self.config.max_in_flight {
            return Ok(PlanOutcome::SettleFirst);
        }
        let mut plan = std::mem::take(&mut self.plan);
        plan.clear();
        self.loads.clear();
        let outcome = self.decide(&mut plan).map(|certain| {
            if certain && !(plan.decodes.is_empty() && plan.chunks.is_empty()) {
                PlanOutcome::Step(self.commit(&mut plan, record))
            } else if self.steps.is_empty() {
                PlanOutcome::Idle
            } else {
                PlanOutcome::SettleFirst
            }
        });
        self.plan = plan;
        outcome
    }

    /// Decides what the step does. Returns false if steps in flight must settle first.
    fn decide(&mut self, plan: &mut Plan) -> Result<bool> {
        self.share(plan)?;
        if !self.place_running(plan)? {
            return Ok(false);
        }
        // Blocks that a preemption has just freed are not for newcomers.
        if plan.preempted.is_empty() {
            self.admit(plan)?;
        }
        self.top_up_chunks(plan)?;
        if self.drafts.from_hidden {
            self.feed_chunks(plan);
        } else {
            self.catch_up(plan)?;
        }
        Ok(true)
    }

    /// Plans a sequence for each running row, most important first. Returns false if a row that lacks blocks should
    /// wait for steps in flight, because these may free blocks when they settle. Without steps in flight, the row takes
    /// the blocks of the row with the last turn. If it is the least important row itself, the plan leaves it out.
    fn place_running(&mut self, plan: &mut Plan) -> Result<bool> {
        let mut place = 0;
        while let Some(&row) = self.running.get(place) {
            plan.num_placed = place;
            let prefilling = self.rows[row as usize].is_prefilling();
            let placed = if prefilling { self.place_chunk(plan, row)? } else { self.place_decode(plan, row)? };
            if placed {
                place += 1;
            } else if !self.steps.is_empty() {
                return Ok(false);
            } else if place + 1 < self.running.len() {
                let victim = self.last_by_turn(place + 1);
                plan.preempted.push(self.requests[self.rows[victim as usize].request].id);
                self.preempt_row(victim)?;
            } else {
                place += 1;
            }
        }
        plan.num_placed = place;
        Ok(true)
    }

    /// Plans a decoding sequence for a row. Returns false if the row lacks blocks even at K = 0.
    fn place_decode(&mut self, plan: &mut Plan, row_index: RowIndex) -> Result<bool> {
        if self.rows[row_index as usize].rebuild {
            self.begin_rebuild(row_index);
        }
        let row = &self.rows[row_index as usize];
        let limit = row.limit;
        if row.lower_bound() >= limit {
            return Ok(true);
        }
        let n_upper = (row.n + row.emit_upper as usize).min(limit);
        if self.drafts.on_host {
            self.choose_drafter(row_index);
        }
        let row = &self.rows[row_index as usize];
        let drafter = row.drafter;
        let drafting = self.drafting(row);
        let k = if let Drafting::Ready(k) = drafting { self.proposed(row_index, k) } else { 0 };
        let Some(k) = self.reserve(row_index, n_upper, limit, k)? else { return Ok(false) };
        plan.decode_tokens += 1 + k;
        if let Drafting::CatchUp(k) = drafting {
            plan.decode_tokens += k;
            let demand = self.catch_up_demand(row_index, self.rows[row_index as usize].lower_bound());
            plan.lagging.push(Lagging { decode: plan.decodes.len(), k, demand });
        }
        plan.decodes.push(Decode { row: row_index, k, drafter, n_upper, covered: (n_upper + k).min(limit) });
        Ok(true)
    }

    /// Plans a prefill chunk for a row. Returns false if the row lacks blocks for a single token.
    fn place_chunk(&mut self, plan: &mut Plan, row_index: RowIndex) -> Result<bool> {
        let row = &self.rows[row_index as usize];
        let start = row.num_computed;
        let left = self.chunk_left(plan, row.request, start, usize::MAX);
        if left == 0 || self.has_all_merged(plan) {
            return Ok(true);
        }
        let covered = self.coverable(row.blocks.len());
        let len = (row.prefill_end - start).min(self.chunk_share(left)).min(covered - start);
        if len == 0 {
            return Ok(false);
        }
        // A shorter chunk may cost more by the token.
        let len = self.chunk_left(plan, self.rows[row_index as usize].request, start, len);
        if len > 0 {
            self.grow(row_index, start + len)?;
            self.push_chunk(plan, PrefillChunk { row: row_index, start, len });
        }
        Ok(true)
    }

    /// Returns how many of `most` tokens the budget leaves for a chunk of this request from `start` on.
    pub(super) fn chunk_left(&self, plan: &mut Plan, index: RequestIndex, start: usize, most: usize) -> usize {
        let Budget { prefill_left, prefill_ms, .. } = *self.budget(plan);
        let most = most.min(prefill_left);
        if prefill_ms == f64::INFINITY {
            return most;
        }
        self.prefill_costs.fitting(&plan.work, self.requests[index].tells_prompt(), start, most, prefill_ms)
    }

    pub(super) fn push_chunk(&mut self, plan: &mut Plan, chunk: PrefillChunk) {
        self.take(plan, chunk.row, chunk.start, chunk.len);
        plan.chunks.push(chunk);
    }

    /// Adds a chunk of a row's prompt to the plan, and subtracts it from the budget.
    fn take(&self, plan: &mut Plan, row: RowIndex, start: usize, len: usize) {
        let told = self.requests[self.rows[row as usize].request].tells_prompt();
        self.budget(plan).prefill_left -= len;
        plan.prefill_tokens += len;
        plan.work.add_chunk(told, start, len);
    }

    /// Returns how many of the `left` tokens one prompt may take at first, so that a long prompt leaves some to later
    /// prompts.
    pub(super) fn chunk_share(&self, left: usize) -> usize {
        match self.config.long_prefill_token_threshold {
            0 => left - left / 4,
            most => most.min(left),
        }
    }

    /// Extends prompt chunks that were limited to their share by the tokens that other prompts left unused.
    fn top_up_chunks(&mut self, plan: &mut Plan) -> Result<()> {
        if self.config.long_prefill_token_threshold > 0 {
            return Ok(());
        }
        for place in 0..plan.chunks.len() {
            let PrefillChunk { row: row_index, start, len } = plan.chunks[place];
            let row = &self.rows[row_index as usize];
            let end = start + len;
            let wanted = (row.prefill_end - end).min(self.coverable(row.blocks.len()) - end);
            let more = if wanted > 0 { self.chunk_left(plan, row.request, end, wanted) } else { 0 };
            self.grow(row_index, end + more)?;
            self.take(plan, row_index, end, more);
            plan.chunks[place].len += more;
        }
        Ok(())
    }

    /// Decides whether a decoding row drafts, and how much. K is limited to the drafts that the device would make at
    /// the row's smallest possible length.
    fn drafting(&self, row: &Row) -> Drafting {
        let n = row.lower_bound();
        let k = self.most_drafts(row, row.k);
        if row.drafter != DrafterKind::Device {
            Drafting::Ready(k)
        } else if k == 0 || row.rebuild && row.drafting > 0 {
            // What is to be built again is, from this step on, unless one in flight drafts.
            Drafting::Off
        } else if row.drafting > 0 {
            // What was just drafted hides both n and draft_len, but their distance is bounded.
            let lag = self.drafts.lag_after_drafting + row.idle_drafts as usize;
            if lag <= self.drafts.max_draft_lag { Drafting::Ready(k) } else { Drafting::Off }
        } else if self.drafts.from_hidden
            || !row.draft_len_moved
                && n - row.draft_len <= self.drafts.max_draft_lag
                && !self.drafts_into_registered(row)
        {
            Drafting::Ready(k)
        } else {
            Drafting::CatchUp(k)
        }
    }

    /// Returns how many of `k` tokens the device would draft at the row's smallest possible length, by the rules of
    /// `docs/start.md`; 0 without a drafter.
    pub(super) fn most_drafts(&self, row: &Row, k: u32) -> usize {
        let on_device = row.drafter == DrafterKind::Device;
        if on_device && self.drafting_is_paused() {
            return 0;
        }
        let end = if on_device { (row.limit - 1).min(self.drafts.end_of_drafts) } else { row.limit - 1 };
        (k as usize).min(end.saturating_sub(row.lower_bound()))
    }

    /// Returns whether drafting would write into blocks that others can find, which requires a claim.
    fn drafts_into_registered(&self, row: &Row) -> bool {
        self.drafts.has_kv && row.draft_len < row.num_registered * self.config.block_size
    }

    /// Allocates blocks for `min(n_upper + k, limit)` positions and returns K. It returns a smaller K if there are too
    /// few blocks, or `None` if there are too few even for K = 0.
    pub(super) fn reserve(&mut self, row: RowIndex, n_upper: usize, limit: usize, k: usize) -> Result<Option<usize>> {
        let block_size = self.config.block_size;
        let held = self.rows[row as usize].blocks.len();
        let need = (n_upper + k).min(limit);
        if need <= held * block_size {
            return Ok(Some(k));
        }
        let most = self.coverable(held);
        if most < n_upper {
            return Ok(None);
        }
        self.grow(row, need.min(most))?;
        Ok(Some(if need <= most { k } else { most - n_upper }))
    }

    /// Allocates blocks until the row covers `positions`.
    #[inline]
    pub(super) fn grow(&mut self, row: RowIndex, positions: usize) -> Result<()> {
        let blocks = &mut self.rows[row as usize].blocks;
        while blocks.len() * self.config.block_size < positions {
            let block = if let Some(block) = self.pool.allocate_free() {
                block
            } else {
                let (events, saves) = (self.kv_events.as_mut(), self.saves.as_mut());
                saves::allocate(&mut self.pool, events, saves, self.snapshots.as_mut())?
            };
            blocks.push(block);
        }
        if !self.groups.is_empty() {
            self.groups.grow(row, blocks.len(), &mut self.pool)?;
        }
        Ok(())
    }

    /// Computes the chunk budget on first use: the tokens of C that decoding leaves, at least a quarter, and the time
    /// that chunks may take. While draft models have to catch up, they get up to a quarter of both.
    pub(super) fn budget<'a>(&self, plan: &'a mut Plan) -> &'a mut Budget {
        if plan.budget.is_none() {
            plan.budget = Some(self.new_budget(plan));
        }
        plan.budget.as_mut().expect("a budget")
    }

    fn new_budget(&self, plan: &Plan) -> Budget {
        let (mut decode_tokens, mut draft_cost) = (plan.decode_tokens, 0);
        let (mut num_seqs, mut max_k) = (plan.decodes.len(), 0);
        for row in &plan.lagging {
            draft_cost += self.draft_cost(row.demand);
        }
        for &row_index in &self.running[plan.num_placed..] {
            let row = &self.rows[row_index as usize];
            let n = row.lower_bound();
            if row.is_prefilling() || n >= row.limit {
                continue;
            }
            let k = match self.drafting(row) {
                Drafting::Off => 0,
                Drafting::Ready(k) => k,
                Drafting::CatchUp(k) => {
                    draft_cost += self.draft_cost(self.catch_up_demand(row_index, n));
                    k
                }
            };
            // Whose drafts it has is chosen when it is its turn; the host's have no bounds but the request's.
            let on_host = if self.may_draft_on_host(row_index) { row.limit - 1 - n } else { 0 };
            let k = k.max(on_host.min(row.max_k as usize));
            (decode_tokens, num_seqs, max_k) = (decode_tokens + 1 + k, num_seqs + 1, max_k.max(k));
        }
        let chunks = self.chunk_budget(decode_tokens);
        let prefill_left = (chunks - draft_cost.min(chunks.div_ceil(4))).max(1);
        let most_ms = self.most_ms(decode_tokens);
        let draft_ms = if most_ms < f64::INFINITY { self.prefill_costs.draft_ms(draft_cost) } else { 0.0 };
        let prefill_ms = most_ms - draft_ms.min(most_ms / 4.0);
        let mut budget = Budget { chunks, prefill_left, prefill_ms, merging: None };
        if !self.config.merged_rooms.is_empty() {
            let placed = plan.decodes.iter().map(|decode| decode.k).chain(plan.lagging.iter().map(|row| row.k));
            let max_k = placed.fold(max_k, usize::max);
            self.merge(plan, Decoding { num_seqs, max_k, num_tokens: decode_tokens }, &mut budget);
        }
        budget
    }

    /// Returns the milliseconds that chunks may take in a step that verifies `decode_tokens` tokens; infinity without
    /// a bound.
    pub(super) fn most_ms(&self, decode_tokens: usize) -> f64 {
        let bound = self.config.max_prefill_stall_ms;
        if decode_tokens == 0 || bound == 0.0 { f64::INFINITY } else { bound }
    }

    pub(super) fn chunk_budget(&self, decode_tokens: usize) -> usize {
        let total = self.config.max_num_batched_tokens;
        total.saturating_sub(decode_tokens).max(total.div_ceil(4))
    }
}
