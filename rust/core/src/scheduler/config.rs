//! Settings of a scheduler and parameters of a request, with their allowed ranges.

use std::sync::Arc;

use crate::drafts::{Drafter, HostDrafters};
use crate::error::{Error, Result};
use crate::hash::ExtraKey;
use crate::sampling::{LogitsDtype, RequestSampling};

/// Largest number of tokens, positions or blocks in a [`SchedulerConfig`], so that products of two fit an `i64`.
const MAX_SIZE: usize = 1 << 31;
/// Maximum number of KV groups after the first.
const MAX_FURTHER_GROUPS: usize = 1 << 10;
/// Largest K, [`SchedulerConfig::num_speculative_tokens`].
pub const MAX_SPECULATIVE_TOKENS: usize = 1 << 10;

/// Room for prompt tokens in the pass that verifies the tokens of decoding sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MergedRoom {
    /// Number of drafts of the sequence that drafts the most.
    pub num_speculative_tokens: usize,
    /// Maximum number of decoding sequences, at least 1.
    pub num_seqs: usize,
    /// Maximum number of prompt tokens, at least 1.
    pub num_tokens: usize,
}

/// Settings of a [`super::Scheduler`]. Begin with [`Self::new`] and set the fields that differ, because minor versions
/// add fields. Numbers of tokens, positions and blocks are at most 2^31.
#[derive(Clone, Debug, PartialEq)]
pub struct SchedulerConfig {
    /// R: number of rows of device state, and so the maximum number of running requests. 1 to 65536.
    pub max_num_seqs: usize,
    /// M: maximum number of tokens of a request, prompt and output. At least 2.
    pub max_model_len: usize,
    /// Number of KV blocks in the pool. At least 1.
    pub num_blocks: usize,
    /// Number of positions per KV block. At least 1.
    pub block_size: usize,
    /// C: number of tokens per step that decode, prefill and draft chunks share. At least 1. Decoding never waits for
    /// it, and prefill and draft chunks always have a quarter of it.
    pub max_num_batched_tokens: usize,
    /// K: maximum number of draft tokens of a request per step, at most 1024; 0 for no speculation.
    pub num_speculative_tokens: usize,
    /// Drafter on the device. Without it and without [`Self::host_drafters`] no request drafts, whatever K is.
    pub drafter: Drafter,
    /// Drafters on the host.
    pub host_drafters: HostDrafters,
    /// Largest window of the layers, if all layers of the target and of the drafter in its blocks have one. A window is
    /// the number of last positions that a query attends to, its own included; at least 2. Blocks outside the window
    /// return to the pool while their request runs. `None` if some layer attends to all positions. With
    /// [`Self::window_groups`] only the layers of the first group count.
    pub sliding_window: Option<usize>,
    /// Windows of further KV groups: layers of the target with their own block tables, whose blocks return to the pool
    /// outside the group's own window. There are at most 1024, each at least 2 and no longer than the first group's
    /// window; empty if all layers are in one group. A block of the pool belongs to any group. The draft's layers are
    /// in the first group, whose window is [`Self::sliding_window`].
    pub window_groups: Vec<usize>,
    /// Maximum number of steps that are planned and not yet settled. 1 to 1024; 1 with [`Self::host_drafters`].
    pub max_in_flight: usize,
    /// W: maximum number of elements that constraints (allowed ids, biases, bad words) take in a record. It limits each
    /// request, and the sum over all requests that are admitted in one step. 0 allows no constraints.
    pub max_constraint_len: usize,
    /// Precision in which logits are computed.
    pub logits_dtype: LogitsDtype,
    /// Number of output positions for which each running request must have or get blocks when a new request is
    /// admitted. With 0, a full pool admits requests that it soon preempts. A larger number admits fewer requests at
    /// once while the pool is full.
    pub num_reserved_decode_tokens: usize,
    /// Maximum number of prompt tokens of a request in a step. With 0, a request may use three quarters of the tokens
    /// left at its turn, plus whatever other prompts leave unused.
    pub long_prefill_token_threshold: usize,
    /// Maximum time in milliseconds of prompt and draft chunks in a step with decoding requests, which wait for them.
    /// Times are learnt from [`super::Scheduler::time_step`]. 16 prompt tokens and 512 catch-up tokens are allowed in
    /// any case. 0 is no bound. Finite.
    pub max_prefill_stall_ms: f64,
    /// Cost of attending to one position, relative to the cost of a token at the start of a context. With it,
    /// [`Self::max_prefill_stall_ms`] counts a chunk deep in its context as longer. Layers with a window attend to no
    /// more positions and add nothing. Finite and at least 0.
    pub attention_cost_ratio: f64,
    /// Rooms for prompt tokens in the passes that verify the tokens of decoding sequences. Empty: every chunk has a pass
    /// of its own. A step of B sequences whose largest number of drafts is K may use the rooms with this K and the
    /// smallest number of sequences that is at least B. It takes the first one of which two hold its prompts, or else
    /// the last. It uses none if it verifies less than half of B * (K + 1) tokens. Sorted by
    /// [`MergedRoom::num_speculative_tokens`], then by [`MergedRoom::num_seqs`], then by [`MergedRoom::num_tokens`].
    pub merged_rooms: Vec<MergedRoom>,
    /// Maximum number of prompt chunks in a verification pass with room for them. At least 1 with
    /// [`Self::merged_rooms`].
    pub max_merged_chunks: usize,
    /// Number of steps with the largest room into which all running prompts must fit. Otherwise their chunks have a pass
    /// of their own and are not cut to a room. At least 1 with [`Self::merged_rooms`].
    pub max_merged_steps: usize,
    /// Number of steps by which a request must have arrived earlier, to go before a request whose priority is better by
    /// 1. With 0, priority always counts more.
    pub priority_aging_steps: usize,
    /// Maximum number of different `LoRA` adapters among the running requests, at most 1024; 0 if no request has one.
    pub max_loras: usize,
    /// Whether requests share the KV of equal prefixes.
    pub enable_prefix_caching: bool,
    /// Number of slots for snapshots of states, if layers of the target have states in the place of KV; 0 if none have.
    /// A prefix hit then needs a snapshot at its end. At least 1 with such layers and prefix caching; 0 with windows,
    /// and without prefix caching.
    pub num_snapshots: usize,
    /// Number of prompt tokens between two snapshots of a long prompt. A snapshot lies at a block's end, so it counts as
    /// the next multiple of [`Self::block_size`]. At least 1.
    pub snapshot_interval: usize,
    /// Number of tokens between two snapshots of a request that decodes, as [`Self::snapshot_interval`]. A request keeps
    /// the last of them.
    pub decode_snapshot_interval: usize,
    /// Whether [`super::Scheduler::take_kv_events`] reports the blocks that entered and left the prefix cache. False
    /// with [`Self::window_groups`].
    pub enable_kv_cache_events: bool,
    /// Whether the host copies cached blocks and snapshots elsewhere, with [`super::Scheduler::take_due_block`] and
    /// [`super::Scheduler::take_due_snapshot`]. False with windows, whose blocks leave the prefix cache one by one.
    pub enable_block_saves: bool,
    /// Key of the block hashes.
    pub hash_key: [u8; 16],
}

impl SchedulerConfig {
    /// Makes settings with the given sizes, no speculation, prefix caching on, one step in flight, and 64 reserved
    /// tokens.
    pub fn new(
        max_num_seqs: usize,
        max_model_len: usize,
        num_blocks: usize,
        block_size: usize,
        max_num_batched_tokens: usize,
    ) -> Self {
        Self {
            max_num_seqs,
            max_model_len,
            num_blocks,
            block_size,
            max_num_batched_tokens,
            num_speculative_tokens: 0,
            drafter: Drafter::None,
            host_drafters: HostDrafters::default(),
            sliding_window: None,
            window_groups: Vec::new(),
            max_in_flight: 1,
            max_constraint_len: 0,
            logits_dtype: LogitsDtype::Float32,
            num_reserved_decode_tokens: 64,
            long_prefill_token_threshold: 0,
            max_prefill_stall_ms: 0.0,
            attention_cost_ratio: 1.0 / 4096.0,
            merged_rooms: Vec::new(),
            max_merged_chunks: 0,
            max_merged_steps: 0,
            priority_aging_steps: 0,
            max_loras: 0,
            enable_prefix_caching: true,
            num_snapshots: 0,
            snapshot_interval: 2048,
            decode_snapshot_interval: 512,
            enable_kv_cache_events: false,
            enable_block_saves: false,
            hash_key: [0; 16],
        }
    }

    /// Returns the number of blocks that hold `positions` positions.
    pub(super) fn blocks_for(&self, positions: usize) -> usize {
        positions.div_ceil(self.block_size)
    }

    /// Checks that each setting is within its range.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] naming the first setting outside its range.
    pub(super) fn validate(&self) -> Result<()> {
        let least_merged = usize::from(!self.merged_rooms.is_empty());
        let sizes = [
            ("max_num_seqs", self.max_num_seqs, 1, 1 << 16),
            ("max_model_len", self.max_model_len, 2, MAX_SIZE),
            ("num_blocks", self.num_blocks, 1, MAX_SIZE),
            ("block_size", self.block_size, 1, MAX_SIZE),
            ("max_num_batched_tokens", self.max_num_batched_tokens, 1, MAX_SIZE),
            ("num_speculative_tokens", self.num_speculative_tokens, 0, MAX_SPECULATIVE_TOKENS),
            ("sliding_window", self.sliding_window.unwrap_or(MAX_SIZE), 2, MAX_SIZE),
            ("max_in_flight", self.max_in_flight, 1, 1 << 10),
            ("max_constraint_len", self.max_constraint_len, 0, MAX_SIZE),
            ("num_reserved_decode_tokens", self.num_reserved_decode_tokens, 0, MAX_SIZE),
            ("long_prefill_token_threshold", self.long_prefill_token_threshold, 0, MAX_SIZE),
            ("max_merged_chunks", self.max_merged_chunks, least_merged, MAX_SIZE),
            ("max_merged_steps", self.max_merged_steps, least_merged, MAX_SIZE),
            ("priority_aging_steps", self.priority_aging_steps, 0, MAX_SIZE),
            ("max_loras", self.max_loras, 0, 1 << 10),
            ("num_snapshots", self.num_snapshots, 0, MAX_SIZE),
            ("snapshot_interval", self.snapshot_interval, 1, MAX_SIZE),
            ("decode_snapshot_interval", self.decode_snapshot_interval, 1, MAX_SIZE),
        ];
        for (field, value, least, most) in sizes {
            if value < least || value > most {
                return Err(Error::invalid_config(field, value, format!("from {least} to {most}")));
            }
        }
        let numbers =
            [("max_prefill_stall_ms", self.max_prefill_stall_ms), ("attention_cost_ratio", self.attention_cost_ratio)];
        for (field, value) in numbers {
            if !(value.is_finite() && value >= 0.0) {
                return Err(Error::invalid_config(field, value, "finite and at least 0"));
            }
        }
        self.validate_groups()?;
        self.validate_rooms()?;
        if self.host_drafters.is_some() && self.max_in_flight > 1 {
            let allowed = "1 with a drafter on the host, which needs every token settled";
            return Err(Error::invalid_config("max_in_flight", self.max_in_flight, allowed));
        }
        self.drafter.validate(self.num_speculative_tokens, MAX_SIZE)
    }

    fn validate_rooms(&self) -> Result<()> {
        let rejected = |room: &MergedRoom, allowed: &str| {
            let MergedRoom { num_speculative_tokens, num_seqs, num_tokens } = room;
            let value =
                format!("{num_tokens} tokens next to {num_seqs} sequences with {num_speculative_tokens} drafts");
            Err(Error::invalid_config("merged_rooms", value, allowed))
        };
        for room in &self.merged_rooms {
            if [room.num_seqs, room.num_tokens].iter().any(|size| !(1..=MAX_SIZE).contains(size)) {
                return rejected(room, "at least 1 token and 1 sequence");
            }
        }
        for pair in self.merged_rooms.windows(2) {
            let [a, b] = [pair[0], pair[1]];
            let order = |room: MergedRoom| (room.num_speculative_tokens, room.num_seqs, room.num_tokens);
            if order(a) >= order(b) {
                return rejected(&b, "in order of drafts, then of sequences, then of tokens");
            }
        }
        Ok(())
    }

    fn validate_groups(&self) -> Result<()> {
        let further = self.window_groups.len();
        if further > MAX_FURTHER_GROUPS {
            let allowed = format!("at most {MAX_FURTHER_GROUPS} windows");
            return Err(Error::invalid_config("window_groups", format!("{further} windows"), allowed));
        }
        let most = self.sliding_window.unwrap_or(MAX_SIZE);
        if let Some(&window) = self.window_groups.iter().find(|&window| !(2..=most).contains(window)) {
            let allowed = format!("windows from 2 to {most}, none longer than the first group's");
            return Err(Error::invalid_config("window_groups", window, allowed));
        }
        if self.enable_kv_cache_events && further > 0 {
            let allowed = "false with window_groups, whose blocks have no events";
            return Err(Error::invalid_config("enable_kv_cache_events", true, allowed));
        }
        if self.num_snapshots > 0 && (self.has_windows() || !self.enable_prefix_caching) {
            let allowed = "0 with windows, or without prefix caching";
            return Err(Error::invalid_config("num_snapshots", self.num_snapshots, allowed));
        }
        if self.enable_block_saves && self.has_windows() {
            return Err(Error::invalid_config("enable_block_saves", true, "false with windows".to_owned()));
        }
        Ok(())
    }
}

/// `LoRA` adapter (Hu et al. 2021) of a request.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Lora {
    /// Id of the adapter on the device, at least 1. Two adapters of a scheduler never have the same id.
    pub id: u32,
    /// Name of the adapter for users and routers.
    pub name: Arc<str>,
}

/// Parameters of a request besides its prompt. End with `..RequestParams::default()`, because minor versions add
/// fields.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestParams<'a> {
    /// Maximum number of tokens of the request, prompt and output: `min(prompt + max_tokens, max_model_len)`.
    pub limit: usize,
    /// Number of output tokens before which stop ids do not count.
    pub min_tokens: usize,
    /// Number of draft tokens per step, at most the engine's K; 0 never drafts.
    pub num_speculative_tokens: usize,
    /// Priority of the request: smaller values go first. In a tie, callers take turns ([`Self::caller`]), then
    /// arrival decides.
    pub priority: i64,
    /// Id of the caller that sent the request. Requests of different callers share rows and blocks evenly if their
    /// priorities are equal and do not age, however many each caller sends. `None`: the request counts as a caller of
    /// its own.
    pub caller: Option<i64>,
    /// Tokens that end the output, at most [`crate::sampling::MAX_STOP_IDS`].
    pub stop_token_ids: &'a [i64],
    /// Sampling parameters, which the scheduler passes on to the device in the record.
    pub sampling: RequestSampling<'a>,
    /// Salt of the request's prefixes: requests share prefixes only with requests of the same salt.
    pub cache_salt: &'a [u8],
    /// `LoRA` adapter of the request, which shares prefixes only with requests of the same adapter. `None` for the base
    /// model.
    pub lora: Option<&'a Lora>,
    /// Extra dependencies of the prompt's KV besides its tokens, by position, which must not decrease. Requests share
    /// blocks from that position on only if these are equal too.
    pub extra_keys: &'a [ExtraKey<'a>],
    /// Tokens that the caller expects in the output, which [`crate::DrafterKind::Prediction`] drafts. They never change
    /// the output.
    pub prediction: &'a [i64],
}
