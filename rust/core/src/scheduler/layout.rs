//! Layouts of the three flat int64 buffers that the caller owns: the record of a step, its results, and the settled
//! results. They consist of offsets, and of views of a buffer's sections by name. Nothing here writes a buffer.

use std::ops::Range;

use super::config::SchedulerConfig;
pub use super::header::*;
use crate::sampling::{MAX_STOP_IDS, NUM_PARAMS};

/// Result flag: the target's logits were NaN or infinite in a row that the iteration reached.
pub const FLAG_TARGET_NON_FINITE: i64 = 1;
/// Result flag: the draft's logits were not finite.
pub const FLAG_DRAFT_NON_FINITE: i64 = 2;
/// Result flag: a position lay beyond the row's capacity.
pub const FLAG_CAPACITY: i64 = 4;
/// Result flag: the drafter did its work and had nothing to propose.
pub const FLAG_NOTHING_DRAFTED: i64 = 8;
/// Result flag: the request's constraints exclude every token at its next position. The target's logits were finite.
pub const FLAG_NO_TOKEN_ALLOWED: i64 = 16;

/// Finish reason: none, because the request goes on.
pub const FINISH_NONE: i64 = 0;
/// Finish reason: a stop token, which is the last delivered token.
pub const FINISH_STOP: i64 = 1;
/// Finish reason: the request reached its limit.
pub const FINISH_LENGTH: i64 = 2;
/// Finish reason: a fault on the device. The number 3 stands for aborted requests, which are never settled.
pub const FINISH_ERROR: i64 = 4;

/// Section of a buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Section {
    /// Index of the section's first element in the buffer.
    pub offset: usize,
    /// Number of elements in the section.
    pub len: usize,
}

impl Section {
    /// Returns the section as a range of buffer indices.
    pub fn range(self) -> Range<usize> {
        self.offset..self.offset + self.len
    }

    /// Returns the section of `buffer`.
    ///
    /// # Panics
    /// If the buffer ends before the section does.
    pub fn of_mut(self, buffer: &mut [i64]) -> &mut [i64] {
        &mut buffer[self.range()]
    }
}

macro_rules! layout {
    (
        $(#[$doc:meta])*
        $name:ident => $view:ident($($size:ident),*) { $($(#[$field_doc:meta])* $field:ident: $len:expr,)* }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct $name {
            $($(#[$field_doc])* pub $field: Section,)*
            /// Number of elements in the whole buffer.
            pub size: usize,
        }

        impl $name {
            fn from_sizes([$($size),*]: [usize; [$(stringify!($size)),*].len()]) -> Self {
                let mut layout = Self::default();
                $(
                    layout.$field = Section { offset: layout.size, len: $len };
                    layout.size += layout.$field.len;
                )*
                layout
            }

            /// Returns all sections by name, in buffer order.
            pub fn sections(&self) -> Vec<(&'static str, Section)> {
                vec![$((stringify!($field), self.$field)),*]
            }

            /// Returns the sections of `buffer`, each a slice under its name.
            ///
            /// # Panics
            /// If the buffer is shorter than the layout.
            pub fn view<'a>(&self, buffer: &'a [i64]) -> $view<'a> {
                $view { $($field: &buffer[self.$field.range()]),* }
            }
        }

        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct $view<'a> {
            $($(#[$field_doc])* pub $field: &'a [i64],)*
        }
    };
}

layout! {
    /// Sections of the record that `plan` writes. Of each section, only as many elements are written as the header
    /// counts.
    ///
    /// R = `max_num_seqs`, C = `max_num_batched_tokens`, G = 1 + `window_groups`; U = `max_model_len` + C bounds
    /// uploads, X block updates per step, W = `max_constraint_len`, N = `num_snapshots`. Sections that only a step with
    /// admissions has come last.
    RecordLayout => RecordView(r, c, g, u, x, w, n, host_drafts) {
        /// Header: counts of the step, `[HEADER_LEN]`; unused elements are 0.
        header: HEADER_LEN,
        /// Row of each sequence, `[R]`: decoding sequences by K descending, then prefill chunks.
        seq_row: r,
        /// K of each sequence, `[R]`; 0 for prefill chunks.
        seq_k: r,
        /// Kind of the drafter of each sequence, `[R]`: a `DrafterKind`; 0 where K is 0.
        seq_drafter: r,
        /// Number of positions that the block table of each sequence's row covers in this step, `[R]`.
        seq_capacity: r,
        /// Upper bound of the tokens of each sequence's row at the start of this step, `[R]`.
        seq_n_upper: r,
        /// First position of prefill chunk j, which is sequence `num_decode + j`, `[R]`.
        chunk_start: r,
        /// Number of positions of prefill chunk j, at least 1, `[R]`.
        chunk_len: r,
        /// 1 if chunk j ends its prompt and emits a token, else 0, `[R]`.
        chunk_is_last: r,
        /// Start of chunk j among the prefill tokens, `[R + 1]`; element `num_prefill` is the number of tokens.
        prefill_q_start: r + 1,
        /// Row of each draft catch-up chunk, `[R]`.
        draft_chunk_row: r,
        /// First position of each draft catch-up chunk, `[R]`: the row's `draft_len`, or later if other requests have
        /// written the KV in between.
        draft_chunk_start: r,
        /// Number of positions of each draft catch-up chunk, `[R]`. The row's `draft_len` becomes start + len, also for
        /// length 0.
        draft_chunk_len: r,
        /// First position whose draft KV the row's queries read from this draft chunk on, `[R]`: a window may exclude
        /// earlier KV. It is 0 without windows, and unused by a drafter that reads hidden states.
        draft_chunk_k_start: r,
        /// Start of each draft chunk among the draft tokens, `[R + 1]`.
        draft_q_start: r + 1,
        /// Drafts of sequence i from element `i * K` on, `seq_k` of them, `[R, K]`; `[0]` without drafters on the host.
        /// Elements of sequences that draft on the device mean nothing.
        draft_token: host_drafts,
        /// Ids of the requests preempted by this plan, `[R]`.
        preempted_request_id: r,
        /// Row of each block table entry to set, `[X]`. Entries before a row's window are not changed and no longer
        /// read.
        block_row: x,
        /// KV group of each block table entry to set, `[X]`; `[0]` with one group.
        block_group: if g > 1 { x } else { 0 },
        /// Index in the row's block table of each entry to set, `[X]`.
        block_index: x,
        /// Block id of each block table entry to set, `[X]`.
        block_id: x,
        /// State row of each snapshot to write, `[N]`.
        snapshot_row: n,
        /// Number of first positions that each snapshot's state covers, `[N]`. The snapshot is written in the step in
        /// which the row's state, with committed tokens alone, reaches this number. Later steps do not write it.
        snapshot_len: n,
        /// Slot of each snapshot, `[N]`. The step reads the snapshots of admitted rows before it writes any.
        snapshot_slot: n,
        /// Token of each prefill row, `[C]`.
        prefill_token: c,
        /// Position of each prefill row, `[C]`.
        prefill_position: c,
        /// KV slot of each prefill row in each group, `[G, C]`.
        prefill_slot: g * c,
        /// Position of each draft chunk token, `[C]`; the token itself is in the row's state.
        draft_position: c,
        /// KV slot of each draft chunk token in the first group, `[C]`; -1 where the block's draft KV is valid already.
        draft_slot: c,
        /// Row of each admitted request, `[R]`.
        admit_row: r,
        /// Id of each admitted request, `[R]`.
        admit_request_id: r,
        /// Number of tokens of each admitted request, all of them uploaded, `[R]`.
        admit_num_tokens: r,
        /// Number of prompt tokens of each admitted request, `[R]`. A preempted request's output so far does not count,
        /// though `admit_num_tokens` includes it.
        admit_prompt_len: r,
        /// Number of positions with valid draft KV of each admitted request, `[R]`.
        admit_draft_len: r,
        /// Maximum number of tokens of each admitted request, prompt and output, `[R]`.
        admit_limit: r,
        /// Position from which stop tokens of each admitted request count, `[R]`: prompt and `min_tokens`.
        admit_min_len: r,
        /// Number of positions with valid target KV from the prefix cache of each admitted request, `[R]`.
        admit_num_cached: r,
        /// Slot of the snapshot that each admitted request's row begins with, `[R]`; -1 if it begins without state.
        /// `[0]` without snapshots.
        admit_snapshot: if n > 0 { r } else { 0 },
        /// Id of the `LoRA` adapter of each admitted request, `[R]`; 0 for none.
        admit_lora: r,
        /// Number that stands for the cache salt and adapter of each admitted request, `[R]`. Two requests have the
        /// same number if and only if both their salts and their adapters are equal.
        admit_salt: r,
        /// Seed of each admitted request, `[R]`.
        admit_seed: r,
        /// `STEP_*` bits that each admitted request needs, `[R]`.
        admit_steps: r,
        /// Number of most likely tokens to report with each output token, `LOGPROBS_NONE` or `LOGPROBS_ALL`, `[R]`.
        admit_logprobs: r,
        /// Number of most likely tokens to report with each prompt token, `LOGPROBS_NONE` or `LOGPROBS_ALL`, `[R]`.
        admit_prompt_logprobs: r,
        /// Parameter columns of each admitted request, `[R, NUM_PARAMS]`, as bits of float64.
        admit_params: r * NUM_PARAMS,
        /// Stop tokens of each admitted request, `[R, MAX_STOP_IDS]`, followed by -1.
        admit_stop_ids: r * MAX_STOP_IDS,
        /// Number of allowed ids in the constraints of each admitted request, `[R]`; -1 if all ids are allowed.
        admit_num_allowed: r,
        /// Number of biases in the constraints of each admitted request, `[R]`.
        admit_num_biases: r,
        /// Number of bad words in the constraints of each admitted request, `[R]`.
        admit_num_bad_words: r,
        /// Start of each admitted request's constraints, `[R + 1]`.
        admit_constraint_start: r + 1,
        /// Tokens of the admitted requests one after the other, `[U]`.
        upload_token: u,
        /// Constraints of the admitted requests one after the other, `[W]`. Each has its allowed ids, its ids with a
        /// bias, the biases as bits of float64, the lengths of its bad words, and their tokens.
        constraint: w,
    }
}

layout! {
    /// Sections of the results that the device reports, by sequence.
    ResultsLayout => ResultsView(r, k1) {
        /// Number of emitted tokens, `[R]`: accepted + 1, or fewer up to a stop token; 1 for a prompt's last chunk, 0
        /// for other chunks and ended rows.
        num_emitted: r,
        /// Number of accepted draft tokens, `[R]`.
        num_accepted: r,
        /// Number of verified draft tokens, `[R]`: K after the device's own limits.
        num_drafted: r,
        /// `FLAG_*` bits, `[R]`.
        flags: r,
        /// Reason why these tokens end the row, as the device judges it, `[R]`. It is `FINISH_STOP` if the last emitted
        /// token is a stop token at a position of at least `admit_min_len`. Otherwise it is `FINISH_LENGTH` if the row
        /// is at its limit, and else `FINISH_NONE`. With `STEP_EXTRAS` a stop token may come earlier, if the grammar
        /// allows nothing else.
        finish_reason: r,
        /// Emitted tokens, `[R, K + 1]`; element i above `num_accepted`, up to `num_drafted`, is the i-th draft (from
        /// 1), which was rejected. The scheduler reads what was emitted, and hosts may leave the rest as it is.
        tokens: r * k1,
    }
}

layout! {
    /// Sections of the settled results that `settle` writes, by sequence.
    SettledLayout => SettledView(r) {
        /// Request id of each sequence, `[R]`; -1 if its results were dropped.
        request_id: r,
        /// Number of tokens to deliver of each sequence, `[R]`: the first elements of its `tokens` in the results.
        num_new: r,
        /// Finish reason of each sequence, `[R]`: `FINISH_*`.
        finish_reason: r,
    }
}

impl RecordLayout {
    /// Computes the layout of the record for these settings.
    pub fn new(config: &SchedulerConfig) -> Self {
        let (r, c) = (config.max_num_seqs, config.max_num_batched_tokens);
        let u = config.max_model_len + c;
        // A decode row's reservation grows by at most K + 1 positions per step (by one token more than the last K, plus
        // this K); a chunk adds its own blocks and one; hits of admitted requests are full blocks of uploaded tokens.
        let per_row = config.blocks_for(config.num_speculative_tokens + 1) + 1;
        let groups = config.num_groups();
        let x = groups * (r * per_row + c / config.block_size + u / config.block_size);
        let host_drafts = if config.host_drafters.is_some() { r * config.num_speculative_tokens } else { 0 };
        Self::from_sizes([r, c, groups, u, x, config.max_constraint_len, config.num_snapshots, host_drafts])
    }

    /// Returns the number of elements up to the last one that a step with these counts reads. Most of a record is
    /// room for prompts and admitted requests, which few steps have.
    pub(super) fn used_len(&self, header: &StepHeader) -> usize {
        let other_groups = self.prefill_slot.len - self.prefill_token.len;
        let last_first = [
            (self.constraint, header.num_constraints),
            (self.upload_token, header.num_upload_tokens),
            (self.draft_slot, header.num_draft_tokens),
            (
                self.prefill_slot,
                if header.num_prefill_tokens > 0 { other_groups + header.num_prefill_tokens } else { 0 },
            ),
        ];
        let last = last_first.into_iter().find(|&(_, len)| len > 0);
        last.map_or(self.prefill_token.offset, |(section, len)| section.offset + len)
    }
}

impl ResultsLayout {
    /// Computes the layout of the results for these settings.
    pub fn new(config: &SchedulerConfig) -> Self {
        Self::from_sizes([config.max_num_seqs, config.num_speculative_tokens + 1])
    }
}

impl SettledLayout {
    /// Computes the layout of the settled results for these settings.
    pub fn new(config: &SchedulerConfig) -> Self {
        Self::from_sizes([config.max_num_seqs])
    }
}
