//! Where things are in the three flat int64 buffers that the caller owns: the record of a launch, its results, and what came
//! of them: offsets, and views of a buffer's sections by name. Nothing here writes a buffer.

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

/// Finish reason: the request goes on.
pub const FINISH_NONE: i64 = 0;
/// Finish reason: a stop token, the last one delivered.
pub const FINISH_STOP: i64 = 1;
/// Finish reason: the request's limit.
pub const FINISH_LENGTH: i64 = 2;
/// Finish reason: a fault on the device. 3 was that of aborted requests, which are never settled.
pub const FINISH_ERROR: i64 = 4;

/// A run of elements in a buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Section {
    /// First element.
    pub offset: usize,
    /// Elements.
    pub len: usize,
}

impl Section {
    /// The elements as a range of buffer indices.
    pub fn range(self) -> Range<usize> {
        self.offset..self.offset + self.len
    }

    /// The section of `buffer`.
    ///
    /// # Panics
    /// If the buffer ends before it.
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
            /// Elements of the whole buffer.
            pub size: usize,
        }

        impl $name {
            fn from_sizes($($size: usize),*) -> Self {
                let mut layout = Self::default();
                $(
                    layout.$field = Section { offset: layout.size, len: $len };
                    layout.size += layout.$field.len;
                )*
                layout
            }

            /// All sections by name, in buffer order.
            pub fn sections(&self) -> Vec<(&'static str, Section)> {
                vec![$((stringify!($field), self.$field)),*]
            }

            /// The sections of `buffer`, each a slice under its name.
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
    /// Sections of the record that `plan` writes. Of each section only the elements that the header counts are written.
    ///
    /// R = `max_num_seqs`, C = `max_num_batched_tokens`, G = 1 + `window_groups`; U = `max_model_len` + C bounds uploads, X block updates
    /// per launch, W = `max_constraint_len`. Sections that only a launch with admissions has come last.
    RecordLayout => RecordView(r, c, g, u, x, w, host_drafts) {
        /// Counts, `[HEADER_LEN]`; unused elements are 0.
        header: HEADER_LEN,
        /// Row of each entry, `[R]`: decode entries by K descending, then prefill chunks.
        entry_row: r,
        /// K of each entry, `[R]`; 0 for prefill chunks.
        entry_k: r,
        /// Whose drafts the entry has, `[R]`: a `DrafterKind`; 0 where K is 0.
        entry_drafter: r,
        /// Positions that the row's block table covers in this launch, `[R]`.
        entry_capacity: r,
        /// Upper bound of the row's tokens at the start of this launch, `[R]`.
        entry_n_upper: r,
        /// First position of prefill chunk j, which is entry `num_decode + j`, `[R]`.
        chunk_start: r,
        /// Positions of prefill chunk j, at least 1, `[R]`.
        chunk_len: r,
        /// 1 if chunk j ends its prompt and emits a token, else 0, `[R]`.
        chunk_is_last: r,
        /// Start of chunk j among the prefill tokens, `[R + 1]`; element `num_prefill` is the number of tokens.
        prefill_q_start: r + 1,
        /// Row of each draft catch-up chunk, `[R]`.
        draft_chunk_row: r,
        /// First position of the chunk: the row's `draft_len` before it, `[R]`.
        draft_chunk_start: r,
        /// Positions of the chunk, `[R]`; afterwards the row's `draft_len` is start + len, also for length 0.
        draft_chunk_len: r,
        /// First position whose draft KV the row's queries read from this chunk on, `[R]`: a window may have left what was before it. 0 without
        /// windows, and of no meaning to a drafter that reads hidden states.
        draft_chunk_k_start: r,
        /// Start of each draft chunk among the draft tokens, `[R + 1]`.
        draft_q_start: r + 1,
        /// Drafts of entry i from element `i * K` on, `entry_k` of them, `[R, K]`; `[0]` unless a drafter on the host proposes. Of entries that draft on the device
        /// they mean nothing.
        draft_token: host_drafts,
        /// Ids of the requests preempted by this plan, `[R]`.
        preempted_request_id: r,
        /// Row of each block table entry to set, `[X]`. Entries behind a row's window stay as they are, and are read no more.
        block_row: x,
        /// The KV group whose table it is in, `[X]`; `[0]` with one group.
        block_group: if g > 1 { x } else { 0 },
        /// Its index in the row's table, `[X]`.
        block_index: x,
        /// The block, `[X]`.
        block_id: x,
        /// Token of each prefill row, `[C]`.
        prefill_token: c,
        /// Its position, `[C]`.
        prefill_position: c,
        /// Its KV slot in each group, `[G, C]`.
        prefill_slot: g * c,
        /// Position of each draft chunk token, `[C]`; the token itself is in the row's state.
        draft_position: c,
        /// Its KV slot in the first group, `[C]`; -1 where the block's draft KV is valid already.
        draft_slot: c,
        /// Row of each admitted request, `[R]`.
        admit_row: r,
        /// Its id, `[R]`.
        admit_request_id: r,
        /// Tokens it has, all of them uploaded, `[R]`.
        admit_num_tokens: r,
        /// Those of them that are its prompt, `[R]`; more where it was preempted.
        admit_prompt_len: r,
        /// Positions with valid draft KV, `[R]`.
        admit_draft_len: r,
        /// Its limit, `[R]`.
        admit_limit: r,
        /// Position from which stop tokens count, `[R]`: prompt and `min_tokens`.
        admit_min_len: r,
        /// Positions with valid target KV from the prefix cache, `[R]`.
        admit_num_cached: r,
        /// Id of its `LoRA` adapter, `[R]`; 0: none.
        admit_lora: r,
        /// Equal for requests of the same cache salt and adapter, `[R]`.
        admit_salt: r,
        /// Its seed, `[R]`.
        admit_seed: r,
        /// `STEP_*` bits that it needs, `[R]`.
        admit_steps: r,
        /// Most likely tokens to report beside each output token, `LOGPROBS_NONE` or `LOGPROBS_ALL`, `[R]`.
        admit_logprobs: r,
        /// The same of its prompt's tokens, `[R]`.
        admit_prompt_logprobs: r,
        /// Its parameter columns, `[R, NUM_PARAMS]`, as bits of float64.
        admit_params: r * NUM_PARAMS,
        /// Its stop tokens, `[R, MAX_STOP_IDS]`, -1 behind them.
        admit_stop_ids: r * MAX_STOP_IDS,
        /// Ids among its constraints that alone are allowed, `[R]`; -1: all are.
        admit_num_allowed: r,
        /// Biases among its constraints, `[R]`.
        admit_num_biases: r,
        /// Bad words among its constraints, `[R]`.
        admit_num_bad_words: r,
        /// Start of each admitted request's constraints, `[R + 1]`.
        admit_constraint_start: r + 1,
        /// Tokens of the admitted requests one after the other, `[U]`.
        upload_token: u,
        /// Constraints of the admitted requests one after the other, `[W]`: allowed ids; ids with a bias; the biases as bits of
        /// float64; the lengths of bad words; their tokens.
        constraint: w,
    }
}

layout! {
    /// Sections of the results that the device reports, by entry.
    ResultsLayout => ResultsView(r, k1) {
        /// Tokens emitted, `[R]`: accepted + 1, 1 for a prompt's last chunk, 0 for other chunks and ended rows.
        num_emitted: r,
        /// Draft tokens accepted, `[R]`.
        num_accepted: r,
        /// Draft tokens verified, `[R]`: K after the device's own limits.
        num_drafted: r,
        /// `FLAG_*` bits, `[R]`.
        flags: r,
        /// Whether these tokens end the row, as the device judges it, `[R]`: `FINISH_STOP` where the last one emitted is a stop token
        /// at a position of at least `admit_min_len`, else `FINISH_LENGTH` where the row is at its limit, else `FINISH_NONE`. A stop
        /// token of a request with `STEP_EXTRAS` may come earlier: where its grammar leaves nothing else.
        finish_reason: r,
        /// Emitted tokens, `[R, K + 1]`; element i above `num_accepted`, up to `num_drafted`, is the i-th draft (from 1), which was rejected.
        /// The scheduler reads what was emitted, and hosts may leave the rest as it is.
        tokens: r * k1,
    }
}

layout! {
    /// Sections of what `settle` tells: by entry, what came of it.
    SettledLayout => SettledView(r) {
        /// The entry's request, `[R]`; -1 if its results were dropped.
        request_id: r,
        /// Tokens to deliver, the first so many of the entry's `tokens`, `[R]`.
        num_new: r,
        /// `FINISH_*`, `[R]`.
        finish_reason: r,
    }
}

impl RecordLayout {
    /// The layout for these settings.
    pub fn new(config: &SchedulerConfig) -> Self {
        let (r, c) = (config.max_num_seqs, config.max_num_batched_tokens);
        let u = config.max_model_len + c;
        // A decode row's reservation grows by at most K + 1 positions per launch (by one token more than the last K, plus this
        // K); a chunk adds its own blocks and one; hits of admitted requests are full blocks of uploaded tokens.
        let per_row = config.blocks_for(config.num_speculative_tokens + 1) + 1;
        let groups = config.num_groups();
        let x = groups * (r * per_row + c / config.block_size + u / config.block_size);
        let host_drafts = if config.host_drafters.is_some() { r * config.num_speculative_tokens } else { 0 };
        Self::from_sizes(r, c, groups, u, x, config.max_constraint_len, host_drafts)
    }
}

impl ResultsLayout {
    /// The layout for these settings.
    pub fn new(config: &SchedulerConfig) -> Self {
        Self::from_sizes(config.max_num_seqs, config.num_speculative_tokens + 1)
    }
}

impl SettledLayout {
    /// The layout for these settings.
    pub fn new(config: &SchedulerConfig) -> Self {
        Self::from_sizes(config.max_num_seqs)
    }
}
