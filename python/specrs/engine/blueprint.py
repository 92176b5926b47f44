"""What an engine is made of, in numbers: sizes and limits from a configuration and weights. Builds no runner."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Any, cast

from specrs.config import EngineConfig, resolve_draft_max_model_len, resolve_max_model_len
from specrs.core import CachedDrafter, HiddenDrafter, NgramProposer, Scheduler, SuffixDrafter, TextDrafter
from specrs.drafters.base import DRAFT_MODEL_LAG, Drafter
from specrs.drafters.cpu import CpuDrafter
from specrs.drafters.host import HostDrafter
from specrs.drafters.text import Bridge
from specrs.engine.weights import Weights
from specrs.engine_options import DEFAULT_CPU_KV_CACHE_BYTES
from specrs.errors import InvalidConfigError, UnsupportedConfigError, invalid
from specrs.models.base import Model
from specrs.models.dense_weights import DenseFacts
from specrs.models.kv_groups import group_sizes
from specrs.sampling import RequestLimits, max_constraint_len

Declared = CachedDrafter | HiddenDrafter | TextDrafter | NgramProposer | SuffixDrafter
IDLE_LAUNCHES = 8
"""Launches in a row without drafts behind which a head still knows what it has missed; behind more it starts anew."""
ATTENTION_COST = 1.5
"""What a multiplication of attention takes, in what one of a product takes. Native passes on one core of an EPYC with
AVX-512, chunks of 128 and 64 tokens behind 0 to 1,900: 1.4 with the bundled target, 1.7 with SmolLM2-135M."""


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A configuration and the weights that it names: what an engine is made of, in numbers."""

    config: EngineConfig
    weights: Weights

    @property
    def device(self) -> str:
        """Where the models are: `cpu`, or `cuda:N`."""
        return self.weights.device

    @property
    def on_gpu(self) -> bool:
        """Whether the CUDA runner serves; it does so on a CPU only in tests, under Triton's interpreter."""
        return self.weights.target.device_type == "cuda"

    @property
    def max_model_len(self) -> int:
        """The engine's context. Raises InvalidConfigError if the configuration asks for more than the model's."""
        return resolve_max_model_len(self.config, self.weights.target.max_position_embeddings)

    @property
    def draft_max_model_len(self) -> int | None:
        """Positions that the draft may hold; None without a draft, or where none of the engine's drafts are its."""
        draft, speculative = self.weights.draft or self.weights.head, self.config.speculative_config
        if draft is None or (speculative is not None and speculative.on_host):
            return None
        return min(resolve_draft_max_model_len(self.config, draft.max_position_embeddings), self.max_model_len)

    @property
    def num_speculative_tokens(self) -> int:
        """The engine's K; 0 without a drafter."""
        speculative = self.config.speculative_config
        on_host = speculative is not None and speculative.drafts_on_host
        has_draft = on_host or self.weights.draft is not None or self.weights.head is not None
        return self.config.num_speculative_tokens if has_draft else 0

    @property
    def depth(self) -> int:
        """Launches planned and not yet settled; 1 with a drafter on the host, which needs every token settled."""
        if self.config.speculative_config is not None and self.config.speculative_config.drafts_on_host:
            return 1
        given = self.config.launch_depth
        return given if given is not None else 2 if self.on_gpu else 1

    @property
    def models(self) -> list[Model]:
        """Target and, where there is one, draft."""
        return [model for model in (self.weights.target, self.weights.draft) if model is not None]

    @property
    def bytes_per_block(self) -> int:
        """KV bytes of one block in all models."""
        head, size = self.weights.head, self.config.block_size
        # A draft of another tokenizer that goes by text has KV of its own.
        models = self.models if self.weights.bridge is None else [self.weights.target]
        return sum(model.bytes_per_block(size) for model in models) + (head.bytes_per_block(size) if head else 0)

    @property
    def sliding_window(self) -> int | None:
        """The last positions that are attended, where all layers with KV in the target's blocks have windows."""
        if self.weights.head is not None:
            return None
        sharing = self.models if self.weights.bridge is None else [self.weights.target]
        windows = [model.sliding_window for model in sharing]
        known = [size for size in windows if size is not None and size > 1]
        return max(known) if len(known) == len(windows) else None

    @property
    def window_groups(self) -> tuple[int, ...]:
        """Windows of the target's KV groups behind the first."""
        groups = self.weights.target.kv_groups
        return () if groups is None else tuple(max(2, window) for window in groups.windows[1:] if window is not None)

    def with_kv_groups(self) -> Blueprint:
        """The same with the target's layers in KV groups, where its passes know groups and a request of full length
        takes less memory so. What drafts in the target's blocks is in the first group: where it sees more than the
        target, that keeps it, and the target's other groups go by their own windows."""
        target = self.weights.target
        if not isinstance(target, DenseFacts) or target.kv_groups is not None:
            return self
        models = [target.with_kv_groups(size) for size in group_sizes(target.config.windows)]
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
        """KV blocks without which no request of full length gets to its end."""
        return self.scheduler(1).least_blocks(self.max_model_len)

    @property
    def head_lag(self) -> int:
        """`max_draft_lag` of a head: what a verification leaves, and launches without drafts of its own."""
        return self.num_speculative_tokens + 2 + IDLE_LAUNCHES

    def _declared(self, measuring: str | None) -> list[Declared]:
        """The drafters as the scheduler knows them; `measuring` as for `scheduler`."""
        speculative, draft, context = self.config.speculative_config, self.weights.draft, self.draft_max_model_len
        drafters: list[Declared] = []
        if speculative is not None and speculative.drafts_on_host and measuring is not None:
            # The record has room for drafts of the host either way, as the runner expects it.
            drafters.append(NgramProposer(0) if measuring == "host" else NgramProposer(1024, 1024))
        elif speculative is not None:
            if "ngram" in speculative.methods:
                drafters.append(NgramProposer(*speculative.prompt_lookup))
            if "suffix" in speculative.methods:
                drafters.append(SuffixDrafter(**speculative.suffix_decoding))
        if self.weights.head is not None and context is not None and measuring != "host":
            drafters.append(HiddenDrafter(max_model_len=context, max_draft_lag=self.head_lag))
        if self.weights.bridge is not None and measuring != "host":
            drafters.append(TextDrafter())
        elif draft is not None and context is not None and measuring != "host":
            # A draft token's share of a target token, by parameters: what draft chunks take from the token budget.
            ratio = draft.num_parameters / self.weights.target.num_parameters
            mask = self.weights.mask_token_id
            cached = CachedDrafter(
                max_model_len=context,
                max_draft_lag=DRAFT_MODEL_LAG if mask is None else self._parallel_draft_lag,
                mask_token_id=mask,
                cost_ratio=ratio,
            )
            drafters.append(cached)
        return drafters

    @property
    def _parallel_draft_lag(self) -> int:
        """Of a drafter that is fed no drafts: after a full acceptance none of them, nor the token behind them."""
        return self.num_speculative_tokens + 1

    def scheduler(self, blocks: int, *, measuring: str | None = None) -> Scheduler:
        """A scheduler over `blocks` blocks; `measuring`: one that drafts on the `host`, or on the `device`, whatever
        the text is."""
        config = self.config
        return Scheduler(
            max_num_seqs=config.max_num_seqs,
            max_model_len=self.max_model_len,
            num_blocks=blocks,
            block_size=config.block_size,
            max_num_batched_tokens=config.max_num_batched_tokens,
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
            priority_aging_launches=config.priority_aging_launches,
            max_loras=config.max_loras if config.enable_lora else 0,
            enable_prefix_caching=config.enable_prefix_caching,
            enable_kv_cache_events=config.enable_kv_cache_events and not self.window_groups,
            hash_key=secrets.token_bytes(16),
        )

    @property
    def limits(self) -> RequestLimits:
        """What a request may ask for."""
        return RequestLimits(
            max_model_len=self.max_model_len,
            vocab_size=self.weights.target.vocab_size,
            num_speculative_tokens=self.num_speculative_tokens,
            eos_token_ids=self.weights.target.eos_token_ids,
            max_logprobs=self.config.max_logprobs,
        )

    @property
    def hidden_row_size(self) -> int:
        """Numbers that are kept of the target's hidden states for each row; 0 without a head that reads them."""
        head = self.weights.head
        if head is None or self.draft_max_model_len is None:
            return 0
        return self.head_lag * len(head.aux_layer_ids) * head.weights.config.target_hidden_size

    def cpu_drafter(self, blocks: int) -> CpuDrafter | HostDrafter | None:
        """The drafter of a CPU over the shared pool; None where the engine does not speculate."""
        if self.config.speculative_config is not None and self.config.speculative_config.on_host:
            return HostDrafter()
        draft, size, context = self.weights.draft or self.weights.head, self.config.block_size, self.draft_max_model_len
        if draft is None or context is None:
            return None
        if self.weights.bridge is not None:
            return self._text_drafter(self.weights.bridge)
        return CpuDrafter(model=draft, kv_cache=draft.allocate_cache(blocks, size), shared=self.weights.shared)

    def _text_drafter(self, bridge: Bridge) -> CpuDrafter:
        """A draft of another tokenizer that goes by text. Its text may be longer in its own tokens than in the
        target's."""
        draft, size = self.weights.draft, self.config.block_size
        assert draft is not None
        longest = resolve_draft_max_model_len(self.config, draft.max_position_embeddings)
        longest = min(longest, 2 * self.max_model_len)
        # The padding row has blocks, too.
        blocks = (self.config.max_num_seqs + 1) * -(-longest // size)
        needed, most = blocks * draft.bytes_per_block(size), DEFAULT_CPU_KV_CACHE_BYTES
        if needed > most:
            reason = (
                f"its KV of {longest} positions for each request takes {needed / 2**30:.1f} GiB, allowed: "
                f"{most / 2**30:.0f}; fewer max_num_seqs, or a shorter speculative_config.max_model_len"
            )
            raise invalid(InvalidConfigError, "max_num_seqs", self.config.max_num_seqs, reason)
        return CpuDrafter(
            model=draft,
            kv_cache=draft.allocate_cache(blocks, size),
            bridge=bridge,
            text_limits=(longest, self.config.max_num_batched_tokens, size),
        )

    def drafter(self, blocks: int) -> Drafter | None:
        """The drafter of a GPU over the shared pool; None where the engine does not speculate."""
        from specrs.drafters.draft_model import DraftModel, ParallelDraftModel
        from specrs.drafters.hidden import HeadDrafter
        from specrs.drafters.translated import SharedIds, TranslatedDraftModel

        if self.config.speculative_config is not None and self.config.speculative_config.on_host:
            return HostDrafter()
        # Which drafters take which models is checked where these are loaded.
        draft, head = cast("Any", self.weights.draft), cast("Any", self.weights.head)
        context = self.draft_max_model_len
        if head is not None and context is not None:
            return HeadDrafter(
                head=head,
                kv_cache=head.allocate_cache(blocks, self.config.block_size),
                max_model_len=context,
                vocab_size=self.weights.target.vocab_size,
                max_draft_lag=self.head_lag,
            )
        if draft is None or context is None:
            return None
        cache, vocab_size = draft.allocate_cache(blocks, self.config.block_size), self.weights.target.vocab_size
        if self.weights.shared is not None:
            shared = SharedIds.of(self.weights.shared, draft.device)
            return TranslatedDraftModel(draft, cache, context, vocab_size, shared=shared)
        if self.weights.mask_token_id is None:
            return DraftModel(draft, cache, context, vocab_size)
        return ParallelDraftModel(
            draft,
            cache,
            context,
            vocab_size,
            max_draft_lag=self._parallel_draft_lag,
            mask_token_id=self.weights.mask_token_id,
        )
