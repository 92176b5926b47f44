"""Sizes and limits of an engine, derived from its configuration and weights. Builds no runner."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Any

from specrs.backends.weights import Weights
from specrs.config import EngineConfig, resolve_draft_max_model_len, resolve_max_model_len
from specrs.core import HostDrafter, Scheduler
from specrs.drafters import HOST_METHODS
from specrs.drafters.base import Declared, DraftLimits, LoadedDrafter
from specrs.drafters.host import ALWAYS_DRAFTS, NEVER_DRAFTS
from specrs.errors import UnsupportedConfigError, invalid
from specrs.sampling import RequestLimits, max_constraint_len

ATTENTION_COST = 1.5
"""Time of one multiplication in attention, relative to one in a matrix product.

Measured with native passes on one core of an EPYC with AVX-512, for chunks of 64 and 128 tokens after 0 to 1,900
tokens: 1.4 with the bundled target, 1.7 with SmolLM2-135M.
"""

SNAPSHOT_INTERVAL = 2048
"""Number of prompt tokens between two snapshots of states in a long prompt."""
DECODE_SNAPSHOT_INTERVAL = 512
"""Number of tokens between two snapshots of states of a request that decodes."""


@dataclass(frozen=True, slots=True)
class MergedPrefill:
    """Room for prompt tokens in a backend's verification passes, for the scheduler. The default is none: each prompt
    chunk has a pass of its own, or the backend merges the chunks that happen to fit."""

    rooms: tuple[tuple[int, int, int], ...] = ()
    """Number of prompt tokens by number of drafts and of decoding sequences, as `Scheduler` takes them."""
    max_chunks: int = 0
    """Maximum number of prompt chunks in a pass."""
    max_steps: int = 0
    """Number of steps over which prompts may be spread so that they fit."""


@dataclass(frozen=True, slots=True)
class Blueprint:
    """Configuration and weights of an engine, and the numbers that follow from them."""

    config: EngineConfig
    weights: Weights
    max_steps_in_flight: int = 1
    """Default of the option `max_steps_in_flight` for the device: number of steps that are planned and not yet
    settled."""
    merged: MergedPrefill = MergedPrefill()
    """Room for prompt tokens in verification passes."""

    @property
    def device(self) -> str:
        """Device that holds the models: `cpu`, or `cuda:N`."""
        return self.weights.device

    @property
    def max_model_len(self) -> int:
        """Context length of the engine in tokens. Raises InvalidConfigError if the configuration asks for more than the
        model has."""
        return resolve_max_model_len(self.config, self.weights.target.max_position_embeddings)

    @property
    def drafter(self) -> LoadedDrafter | None:
        """The drafter that has a model. None without one, and if the engine takes all drafts from the text."""
        speculative = self.config.speculative_config
        return None if speculative is not None and speculative.on_host else self.weights.drafter

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names of the engine's drafting methods. Methods whose drafts come with requests (`grammar`, `prediction`)
        need not be configured. They are on if only one step at a time is in flight, because they need the tokens of all
        earlier steps."""
        speculative = self.config.speculative_config
        if speculative is None:
            return ()
        named = speculative.methods
        if not speculative.drafts_on_host and self._depth_on_device > 1:
            return named
        rows = HOST_METHODS.items()
        return (*named, *(name for name, row in rows if row.drafts_of_requests and name not in named))

    @property
    def host_drafters(self) -> tuple[str, ...]:
        """Names of the engine's drafting methods whose drafts the scheduler writes into the record."""
        return tuple(name for name in HOST_METHODS if name in self.drafters)

    @property
    def num_speculative_tokens(self) -> int:
        """Largest number of draft tokens per sequence and step (K). 0 without a drafter."""
        speculative = self.config.speculative_config
        on_host = speculative is not None and speculative.drafts_on_host
        return self.config.num_speculative_tokens if on_host or self.weights.drafter is not None else 0

    @property
    def draft_limits(self) -> DraftLimits:
        """Sizes of the engine that its drafter is made for.

        Raises `InvalidConfigError` if the configured draft context is longer than the draft model's.
        """
        assert self.drafter is not None
        config = self.config
        return DraftLimits(
            target=self.weights.target,
            num_speculative_tokens=self.num_speculative_tokens,
            max_model_len=self.max_model_len,
            draft_max_model_len=resolve_draft_max_model_len(config, self.drafter.model.max_position_embeddings),
            max_num_seqs=config.most_seqs,
            max_num_batched_tokens=config.batched_tokens,
            block_size=config.block_size,
        )

    @property
    def depth(self) -> int:
        """Number of steps that are planned and not yet settled. 1 with a drafter on the host, which needs the tokens of
        all earlier steps."""
        if self.config.speculative_config is not None and self.config.speculative_config.drafts_on_host:
            return 1
        return self._depth_on_device

    @property
    def _depth_on_device(self) -> int:
        """Number of steps that are planned and not yet settled if no drafter is on the host."""
        return self.max_steps_in_flight if self.config.max_steps_in_flight is None else self.config.max_steps_in_flight

    @property
    def bytes_per_block(self) -> int:
        """Number of bytes of K and V in one block, over all models that share the target's blocks."""
        return sum(model.bytes_per_block(self.config.block_size) for model in self._sharing)

    @property
    def num_snapshots(self) -> int:
        """Number of snapshots of states that prefix hits may begin with. 0 if no layer has a state, or without prefix
        caching."""
        row, _ = self.weights.target.state_bytes
        given = self.config.state_cache_memory_bytes
        return 0 if row == 0 or given is None else given // row

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all requests, of their drafts, and of all snapshots."""
        row, draft = self.weights.target.state_bytes
        return self.config.most_seqs * (row + self.num_speculative_tokens * draft) + self.num_snapshots * row

    @property
    def sliding_window(self) -> int | None:
        """Largest sliding window in tokens if all layers that use the target's blocks have one. None if some layer
        attends to all positions."""
        windows = [model.sliding_window for model in self._sharing]
        known = [size for size in windows if size is not None and size > 1]
        return max(known) if len(known) == len(windows) else None

    @property
    def _sharing(self) -> list[Any]:
        """Models that share the target's blocks: the target, and a drafter without blocks of its own."""
        drafter = self.weights.drafter
        return [self.weights.target, *([] if drafter is None or drafter.has_own_blocks else [drafter.model])]

    @property
    def window_groups(self) -> tuple[int, ...]:
        """Windows in tokens of the target's KV groups after the first."""
        groups = self.weights.target.kv_groups
        return () if groups is None else tuple(max(2, window) for window in groups.windows[1:] if window is not None)

    def with_kv_groups(self) -> Blueprint:
        """Return a blueprint with the target's layers in the KV groups that save the most memory.

        Returns `self` if no groups save memory for a request of full length, or if the target has groups already. A
        drafter in the target's blocks belongs to the first group. If the drafter attends to more positions than the
        target, the first group keeps the blocks of these positions. The other groups keep only the blocks of their own
        windows.

        Raises UnsupportedConfigError if groups would save memory but KV cache events are enabled.
        """
        target = self.weights.target
        if target.kv_groups is not None:
            return self
        models = [target.with_kv_groups(size) for size in target.kv_group_sizes]
        several = [replace(self, weights=replace(self.weights, target=model)) for model in models]
        grouped = min([self, *several], key=lambda made: made.least_blocks * made.bytes_per_block)
        if grouped is self:
            return self
        if self.config.enable_kv_cache_events:
            if target.sliding_window is not None:
                return self
            reason = "not implemented for a model with several KV groups, such as this one; allowed: False"
            raise invalid(UnsupportedConfigError, "kv_events_config.enable_kv_cache_events", True, reason)
        return grouped

    @property
    def least_blocks(self) -> int:
        """Smallest number of KV blocks with which a request of full length can finish."""
        return self.scheduler(1).least_blocks(self.max_model_len)

    def _declared(self, measuring: str | None) -> list[Declared | HostDrafter]:
        """Return the drafters in the form that the scheduler takes. `measuring` is described at `scheduler`."""
        speculative, drafter = self.config.speculative_config, self.drafter
        declared: list[Declared | HostDrafter] = []
        if speculative is not None and measuring is None:
            declared += [HOST_METHODS[name].declare(speculative) for name in self.host_drafters]
        elif self.host_drafters:
            # Either way the record has room for drafts from the host, as the runner expects.
            declared.append(ALWAYS_DRAFTS if measuring == "host" else NEVER_DRAFTS)
        if drafter is not None and measuring != "host":
            declared.append(drafter.declare(self.draft_limits))
        return declared

    def scheduler(self, blocks: int, *, measuring: str | None = None, disk_key: bytes | None = None) -> Scheduler:
        """Return a scheduler over `blocks` blocks.

        `measuring` is for measuring costs: with `host` it always drafts on the host, with `device` always on the
        device, whatever the text is. `disk_key` is the key of block hashes if blocks are kept on disk; None: a random
        key.
        """
        config = self.config
        return Scheduler(
            max_num_seqs=config.most_seqs,
            max_model_len=self.max_model_len,
            num_blocks=blocks,
            block_size=config.block_size,
            max_num_batched_tokens=config.batched_tokens,
            num_speculative_tokens=self.num_speculative_tokens,
            drafter=self._declared(measuring),
            sliding_window=self.sliding_window,
            window_groups=self.window_groups,
            max_in_flight=self.depth,
            max_constraint_len=max_constraint_len(self.weights.target.vocab_size),
            num_reserved_decode_tokens=config.num_reserved_decode_tokens,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            # No request waits while costs are measured.
            max_prefill_stall_ms=0.0 if measuring else config.max_prefill_stall_ms or 0.0,
            attention_cost_ratio=ATTENTION_COST * self.weights.target.attention_ratio,
            merged_rooms=self.merged.rooms,
            max_merged_chunks=self.merged.max_chunks,
            max_merged_steps=self.merged.max_steps,
            priority_aging_steps=config.priority_aging_steps,
            max_loras=config.max_loras if config.enable_lora else 0,
            enable_prefix_caching=config.enable_prefix_caching is not False,
            num_snapshots=self.num_snapshots,
            snapshot_interval=SNAPSHOT_INTERVAL,
            decode_snapshot_interval=DECODE_SNAPSHOT_INTERVAL,
            enable_kv_cache_events=config.enable_kv_cache_events and not self.window_groups,
            enable_block_saves=disk_key is not None,
            hash_key=secrets.token_bytes(16) if disk_key is None else disk_key,
        )

    @property
    def limits(self) -> RequestLimits:
        """Limits of the engine that requests are checked against."""
        return RequestLimits(
            max_model_len=self.max_model_len,
            vocab_size=self.weights.target.vocab_size,
            num_speculative_tokens=self.num_speculative_tokens,
            eos_token_ids=self.weights.target.eos_token_ids,
            max_logprobs=self.config.max_logprobs,
            has_lm_head=self.weights.target.has_lm_head,
        )

    @property
    def hidden_row_size(self) -> int:
        """Number of elements of the target's hidden states that are kept per row, over all kept positions and layers. 0
        if no drafter reads them."""
        return 0 if self.drafter is None else self.drafter.hidden_row_size(self.draft_limits)
