//! Row of device state and the lease on it: the request that runs there, its blocks, and its steps in flight.
//!
//! The row index names the lease. A row is live while its request runs. When the request ends or is preempted, the row
//! is closed. Its results in flight will be dropped, and it keeps its blocks and claims until the last such step has
//! settled.

use super::prefill_costs::StepWork;
use super::request::{Request, RequestIndex};
use crate::drafts::DrafterKind;

pub(super) type RowIndex = u32;

/// Value in a block table in place of a block that returned to the pool.
pub(super) const NO_BLOCK: i64 = -1;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum RowState {
    #[default]
    Free,
    Live,
    Closed,
}

/// State of a row. The field order keeps it within two cache lines, because in a large batch every line that a step
/// reads is a cache miss.
#[derive(Clone, Debug, Default)]
#[repr(C, align(64))]
pub(super) struct Row {
    /// Number of settled tokens of the running request. It is a copy, so that planning does not read requests; the next
    /// three fields are copies too.
    pub(super) n: usize,
    /// Maximum number of tokens of the running request.
    pub(super) limit: usize,
    /// K that the running request drafts now.
    pub(super) k: u32,
    /// Maximum K of the running request.
    pub(super) max_k: u32,
    /// Maximum number of tokens that the row can emit in the steps in flight.
    pub(super) emit_upper: u32,
    /// Number of positions with valid draft KV after all planned steps. It is exact while `drafting` is 0, and a
    /// settled value otherwise.
    pub(super) draft_len: usize,
    /// Number of block table entries that records have sent to the device; later ones are reserved.
    pub(super) num_sent: usize,
    /// Number of steps in flight that name the row.
    pub(super) in_flight: u32,
    /// Number of steps in flight in which the row emits tokens.
    pub(super) emitting: u32,
    /// Number of steps in flight in which the row drafts on the device.
    pub(super) drafting: u32,
    /// Running request; meaningful only while the row is live.
    pub(super) request: RequestIndex,

    /// Block table of the row, [`NO_BLOCK`] before `first_block`.
    pub(super) blocks: Vec<i64>,
    /// Number of tokens at admission, which the target prefills.
    pub(super) prefill_end: usize,
    /// Number of tokens whose target prefill is planned.
    pub(super) num_computed: usize,
    /// Number of first blocks that were registered in the prefix cache or come from it.
    pub(super) num_registered: usize,
    /// Number of first blocks that are settled with regard to `draft_valid` and are not checked again.
    pub(super) num_draft_marked: usize,
    /// Number of planned iterations of the row since the last one in which it drafts on the device. The lag after
    /// drafting may have grown by as many tokens.
    pub(super) idle_drafts: u32,
    pub(super) state: RowState,
    /// Whether no planner has been asked about the request yet.
    pub(super) fresh: bool,
    /// Drafter of the row in the next step.
    pub(super) drafter: DrafterKind,
    /// Whether [`super::Scheduler::speculate`] has chosen the drafter for the next step.
    pub(super) decided: bool,
    /// Whether the draft KV from block `num_draft_marked` on must be rebuilt, once no step in flight drafts for the
    /// row.
    pub(super) rebuild: bool,
    /// Whether `draft_len` changed without a draft chunk, so that the device does not know the new value. The row's
    /// next draft chunk tells it, even if the chunk has length 0.
    pub(super) draft_len_moved: bool,
    /// Number of first blocks that have returned to the pool, because they lie before all windows of later steps.
    pub(super) first_block: usize,
    /// Id of the last step with a draft catch-up chunk of this row.
    pub(super) last_catch_up: u64,
}

impl Row {
    pub(super) fn is_prefilling(&self) -> bool {
        self.num_computed < self.prefill_end
    }

    /// Returns the row's blocks that were registered or come from the prefix cache.
    pub(super) fn registered_blocks(&self) -> &[i64] {
        &self.blocks[self.first_block.min(self.num_registered)..self.num_registered]
    }

    /// Returns the smallest number of tokens that the row has once everything in flight has settled.
    pub(super) fn lower_bound(&self) -> usize {
        self.n + self.emitting as usize
    }

    /// Limits the valid draft KV to positions before `end`.
    pub(super) fn lower_draft_len(&mut self, end: usize) {
        if end < self.draft_len {
            self.draft_len = end;
            self.draft_len_moved = true;
        }
    }

    /// Makes a free row live and reserves memory for `max_blocks` blocks, so that it allocates nothing while it runs.
    pub(super) fn open(&mut self, index: RequestIndex, request: &Request, max_blocks: usize) {
        let mut blocks = std::mem::take(&mut self.blocks);
        blocks.clear();
        blocks.reserve(max_blocks);
        let n = request.tokens.len();
        let k = if request.draft_failed { 0 } else { request.k as u32 };
        *self = Self {
            state: RowState::Live,
            request: index,
            n,
            limit: request.limit,
            k,
            max_k: k,
            fresh: true,
            blocks,
            prefill_end: n,
            ..Self::default()
        };
    }
}

/// Value of `Row::idle_drafts` if the row was to draft in a step in flight, or before it, and did not.
pub(super) const UNKNOWN_LAG: u32 = 1 << 30;

/// Part of one row in a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sequence {
    pub(super) row: RowIndex,
    /// Maximum number of tokens that the sequence can emit: K + 1 for a decoding sequence, 1 for a prompt's last chunk,
    /// 0 for another chunk.
    pub(super) emit_upper: u32,
    /// End position of a prompt chunk; 0 for a decoding sequence.
    pub(super) chunk_end: u32,
    /// Drafter of the sequence's drafts.
    pub(super) drafter: DrafterKind,
}

impl Sequence {
    /// Returns the number of draft tokens; 0 for a chunk.
    pub(super) fn k(self) -> u32 {
        self.emit_upper.saturating_sub(1)
    }

    /// Returns whether the sequence drafts on the device, so that its draft KV is written.
    pub(super) fn drafts_on_device(self) -> bool {
        self.emit_upper > 1 && self.drafter == DrafterKind::Device
    }

    /// Returns whether the sequence emits tokens. A sequence that does not is a chunk that does not end its prompt.
    pub(super) fn emits(self) -> bool {
        self.emit_upper > 0
    }
}

/// Planned step that has not settled.
#[derive(Clone, Debug, Default)]
pub(super) struct Step {
    pub(super) id: u64,
    pub(super) sequences: Vec<Sequence>,
    pub(super) work: StepWork,
}
