//! Settings of a scheduler and the parameters of a request, and what is allowed for each.

use crate::drafts::{Drafter, HostDrafters};
use crate::error::{Error, Result};
use crate::hash::ExtraKey;
use crate::sampling::{LogitsDtype, RequestSampling};

use super::loras::Lora;

/// Largest number of tokens, positions or blocks in a [`SchedulerConfig`], so that products of two fit an `i64`.
const MAX_SIZE: usize = 1 << 31;
const MAX_FURTHER_GROUPS: usize = 1 << 10;

/// Settings of a [`super::Scheduler`]: begin with [`Self::new`] and set what differs, because fields come in minor versions. Numbers of tokens, positions and blocks are at most 2^31.
#[derive(Clone, Debug, PartialEq)]
pub struct SchedulerConfig {
    /// R: rows of device state, so the most requests that run at once. 1 to 65536.
    pub max_num_seqs: usize,
    /// M: the most tokens (prompt and output) of a request. At least 2.
    pub max_model_len: usize,
    /// KV blocks in the pool. At least 1.
    pub num_blocks: usize,
    /// Positions per KV block. At least 1.
    pub block_size: usize,
    /// C: tokens per launch that decode, prefill and draft chunks share. At least 1. Decode never waits for it, and prefill
    /// and draft chunks always have a quarter of it.
    pub max_num_batched_tokens: usize,
    /// K: the most draft tokens of a request per launch, at most 1024; 0 for no speculation.
    pub num_speculative_tokens: usize,
    /// What proposes drafts on the device; without it and [`Self::host_drafters`] nothing drafts, whatever K is.
    pub drafter: Drafter,
    /// What proposes drafts on the host.
    pub host_drafters: HostDrafters,
    /// The last positions that a query attends to, its own among them, where all layers of the target and of what drafts in its blocks
    /// have a window: the largest of these. At least 2; blocks behind it come back while their request goes on. `None`: some layer
    /// attends to all positions. With [`Self::window_groups`] only the layers of the first group count.
    pub sliding_window: Option<usize>,
    /// Windows of further KV groups: layers of the target with block tables of their own, whose blocks come back behind the group's own window.
    /// Each at least 2 and no longer than the first group's, at most 1024 of them; empty: all layers are in one group. A block of the pool is one of any group. The draft's layers are in
    /// the first group, whose window is [`Self::sliding_window`].
    pub window_groups: Vec<usize>,
    /// Launches that may be planned and not yet settled. 1 to 1024.
    pub max_in_flight: usize,
    /// W: elements that the constraints of a request (allowed ids, biases, bad words) may take in a record, and those of all that
    /// a launch admits. 0 for none.
    pub max_constraint_len: usize,
    /// What logits are computed in.
    pub logits_dtype: LogitsDtype,
    /// Positions of output that each running request has blocks for, or could get, when a newcomer is admitted. With 0 a full pool
    /// admits requests that it preempts soon after; each reserved block a row costs that much concurrency while the pool is full.
    pub num_reserved_decode_tokens: usize,
    /// The most prompt tokens of a request in a launch; 0: three quarters of what is left when its turn comes, and what other prompts
    /// leave of the rest.
    pub long_prefill_token_threshold: usize,
    /// The most milliseconds that prompt and draft chunks take of a launch in which requests decode, which wait for it, by the times that
    /// [`super::Scheduler::time_launch`] is told; 16 tokens of prompts and 512 of drafts' catch-up go through in any case. 0 is no
    /// bound. Finite.
    pub max_prefill_stall_ms: f64,
    /// What attending to one position costs, in what a token at the start of a context does: how much longer a chunk is taken to be
    /// that is deep in its context, by [`Self::max_prefill_stall_ms`]. Layers with a window attend no more positions, and count
    /// nothing. Finite and at least 0.
    pub attention_cost_ratio: f64,
    /// Launches by which a request must have arrived earlier to go before one of a priority better by 1; 0: priority always counts
    /// more.
    pub priority_aging_launches: usize,
    /// The most `LoRA` adapters of the requests that run at once, at most 1024; 0: no request has one.
    pub max_loras: usize,
    /// Whether requests share the KV of equal prefixes.
    pub enable_prefix_caching: bool,
    /// Whether [`super::Scheduler::take_kv_events`] tells which blocks came into the prefix cache and left it.
    pub enable_kv_cache_events: bool,
    /// Key of the block hashes.
    pub hash_key: [u8; 16],
}

impl SchedulerConfig {
    /// Settings with the given sizes, no speculation, prefix caching on, one launch in flight, 64 tokens reserved.
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
            priority_aging_launches: 0,
            max_loras: 0,
            enable_prefix_caching: true,
            enable_kv_cache_events: false,
            hash_key: [0; 16],
        }
    }

    /// Blocks that hold `positions` positions.
    pub(super) fn blocks_for(&self, positions: usize) -> usize {
        positions.div_ceil(self.block_size)
    }

    /// # Errors
    /// [`Error::InvalidConfig`] naming the first setting outside its range.
    pub(super) fn validate(&self) -> Result<()> {
        let sizes = [
            ("max_num_seqs", self.max_num_seqs, 1, 1 << 16),
            ("max_model_len", self.max_model_len, 2, MAX_SIZE),
            ("num_blocks", self.num_blocks, 1, MAX_SIZE),
            ("block_size", self.block_size, 1, MAX_SIZE),
            ("max_num_batched_tokens", self.max_num_batched_tokens, 1, MAX_SIZE),
            ("num_speculative_tokens", self.num_speculative_tokens, 0, 1 << 10),
            ("sliding_window", self.sliding_window.unwrap_or(MAX_SIZE), 2, MAX_SIZE),
            ("max_in_flight", self.max_in_flight, 1, 1 << 10),
            ("max_constraint_len", self.max_constraint_len, 0, MAX_SIZE),
            ("num_reserved_decode_tokens", self.num_reserved_decode_tokens, 0, MAX_SIZE),
            ("long_prefill_token_threshold", self.long_prefill_token_threshold, 0, MAX_SIZE),
            ("priority_aging_launches", self.priority_aging_launches, 0, MAX_SIZE),
            ("max_loras", self.max_loras, 0, 1 << 10),
        ];
        for (field, value, least, most) in sizes {
            if value < least || value > most {
                return Err(Error::invalid_config(field, value, format!("{least} to {most}")));
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
        if let Some(suffix) = &self.host_drafters.suffix {
            suffix.validate()?;
        }
        if self.host_drafters.is_some() && self.max_in_flight > 1 {
            let allowed = "1 with a drafter on the host, which needs every token settled";
            return Err(Error::invalid_config("max_in_flight", self.max_in_flight, allowed));
        }
        self.drafter.validate(self.num_speculative_tokens, MAX_SIZE)
    }

    fn validate_groups(&self) -> Result<()> {
        let further = self.window_groups.len();
        if further > MAX_FURTHER_GROUPS {
            let allowed = format!("at most {MAX_FURTHER_GROUPS} windows");
            return Err(Error::invalid_config("window_groups", format!("{further} windows"), allowed));
        }
        let most = self.sliding_window.unwrap_or(MAX_SIZE);
        if let Some(&window) = self.window_groups.iter().find(|&window| !(2..=most).contains(window)) {
            let allowed = format!("windows of 2 to {most}, none longer than the first group's");
            return Err(Error::invalid_config("window_groups", window, allowed));
        }
        if self.enable_kv_cache_events && further > 0 {
            let allowed = "false with window_groups, whose blocks have no events";
            return Err(Error::invalid_config("enable_kv_cache_events", true, allowed));
        }
        Ok(())
    }
}

/// What a request asks for besides its prompt. End with `..RequestParams::default()`, because fields come in minor versions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestParams<'a> {
    /// The most tokens it may reach, prompt and output: `min(prompt + max_tokens, max_model_len)`.
    pub limit: usize,
    /// Output tokens before which stop ids do not count.
    pub min_tokens: usize,
    /// Draft tokens per launch, at most the engine's K; 0 never drafts.
    pub num_speculative_tokens: usize,
    /// Smaller values go first, ties by arrival.
    pub priority: i64,
    /// Who asks for it together with others: requests of different callers share rows and blocks evenly, whatever each asks for, where
    /// priorities are equal and do not age. `None`: it is asked for alone.
    pub caller: Option<i64>,
    /// Tokens that end the output, at most [`crate::sampling::MAX_STOP_IDS`].
    pub stop_token_ids: &'a [i64],
    /// How tokens are drawn. The scheduler passes it on to the device, in the record.
    pub sampling: RequestSampling<'a>,
    /// Requests share prefixes only with requests of the same salt.
    pub cache_salt: &'a [u8],
    /// What it is computed with besides the target's weights; it shares prefixes only with requests of the same one. `None`: the base model.
    pub lora: Option<&'a Lora>,
    /// What the prompt's KV depends on besides its tokens, by position, which does not decrease; requests share the blocks from
    /// there on only where these are equal too.
    pub extra_keys: &'a [ExtraKey<'a>],
}
