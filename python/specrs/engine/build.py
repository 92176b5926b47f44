"""From an EngineConfig to loaded weights, limits, a scheduler and a runner. Runs no model and schedules nothing."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from specrs.config import EngineConfig, resolve_draft_max_model_len, resolve_max_model_len, resolve_num_blocks
from specrs.core import CachedDrafter, Scheduler
from specrs.drafters.draft_model import DraftModel
from specrs.engine.device import resolve_device
from specrs.errors import InvalidConfigError, invalid
from specrs.models.decoder import Decoder
from specrs.models.kv_cache import KVCache
from specrs.models.loader import load_config, load_model, resolve_dtype
from specrs.runner.eager import EagerRunner
from specrs.runner.ring import Header, RingSlot
from specrs.runner.row_state import RowState
from specrs.runner.sampling_state import SamplingState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specrs.engine.request import Request


class Runner(Protocol):
    """What the loop asks of a runner: the eager one of a CPU, or the CUDA one."""

    num_target_passes: int

    @property
    def drafter(self) -> DraftModel | None:
        """The draft model, None without speculation."""

    @property
    def kv_cache(self) -> KVCache:
        """The target's."""

    def launch(self, slot: RingSlot, header: Header, admitted: Sequence[Request]) -> None:
        """Execute or enqueue the launch planned in `slot.record`."""

    def wait(self, slot: RingSlot) -> None:
        """Return when `slot.results` hold what the launch reported."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Loaded models; never written to, so engines may share them."""

    target: Decoder
    draft: Decoder | None


def load_weights(config: EngineConfig) -> Weights:
    """Load target and, where the engine may speculate, draft, onto the device of `config`.

    Raises:
        InvalidConfigError and its subclasses: what is missing, broken or not supported, by name.
    """
    device = resolve_device(config.device)
    if device.type == "cuda":
        check_weights_fit(config, device)
    target = load_model(
        config.target, dtype=config.dtype, device=device, revision=config.revision, load_format=config.load_format
    )
    draft = _draft_source(config)
    if draft is None:
        return Weights(target, None)
    source, revision = draft
    dtype = str(target.dtype).removeprefix("torch.")
    return Weights(
        target, load_model(source, dtype=dtype, device=device, revision=revision, load_format=config.load_format)
    )


def _draft_source(config: EngineConfig) -> tuple[str, str | None] | None:
    """Folder or hub id of the draft and its revision; None where the engine never speculates."""
    speculative, draft = config.speculative_config, config.draft
    if speculative is None or draft is None or speculative.most_speculative_tokens == 0:
        return None
    return draft, speculative.revision


def check_weights_fit(config: EngineConfig, device: torch.device) -> None:
    """Raises InvalidConfigError if the GPU's free memory does not hold the weights; reads configurations only."""
    sizes, draft = {}, _draft_source(config)
    sources = [("model", config.target, config.revision)]
    if draft is not None:
        sources.append(("speculative_config.model", *draft))
    dtype: torch.dtype | None = None
    for field, source, revision in sources:
        model = load_config(source, revision=revision)
        dtype = resolve_dtype(config.dtype, model, device) if dtype is None else dtype
        untied = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
        sizes[field] = (model.num_parameters + untied) * dtype.itemsize
    free, needed = torch.cuda.mem_get_info(device)[0], sum(sizes.values())
    if needed > free:
        parts = " and ".join(f"{size / 2**30:.2f} GiB for {field}" for field, size in sizes.items())
        raise invalid(
            InvalidConfigError,
            "model",
            config.target,
            f"weights need {parts}, {free / 2**30:.2f} GiB of the GPU are free, {(needed - free) / 2**30:.2f} GiB too "
            "little; allowed are smaller models, a dtype of fewer bytes, or device='cpu'",
        )


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What an engine is made of, in numbers; makes its scheduler and runner."""

    config: EngineConfig
    weights: Weights

    @property
    def device(self) -> torch.device:
        """Where the models are."""
        return self.weights.target.device

    @property
    def on_gpu(self) -> bool:
        """Whether the CUDA runner serves; it does so on a CPU only in tests, under Triton's interpreter."""
        return self.device.type == "cuda"

    @property
    def max_model_len(self) -> int:
        """The engine's context. Raises InvalidConfigError if the configuration asks for more than the model's."""
        return resolve_max_model_len(self.config, self.weights.target.config.max_position_embeddings)

    @property
    def draft_max_model_len(self) -> int | None:
        """Positions that the draft may hold; None without a draft."""
        draft = self.weights.draft
        if draft is None:
            return None
        return min(resolve_draft_max_model_len(self.config, draft.config.max_position_embeddings), self.max_model_len)

    @property
    def num_speculative_tokens(self) -> int:
        """The engine's K; 0 without a draft."""
        return 0 if self.weights.draft is None else self.config.num_speculative_tokens

    @property
    def depth(self) -> int:
        """Launches planned and not yet settled."""
        given = self.config.launch_depth
        return given if given is not None else 2 if self.on_gpu else 1

    @property
    def models(self) -> list[Decoder]:
        """Target and, where there is one, draft."""
        return [model for model in (self.weights.target, self.weights.draft) if model is not None]

    @property
    def bytes_per_block(self) -> int:
        """KV bytes of one block in all models."""
        return sum(KVCache.bytes_per_block(m.config, self.config.block_size, m.dtype) for m in self.models)

    def num_blocks(self) -> int:
        """Size of the block pool, which serves both models' caches."""
        if self.on_gpu:
            from specrs.runner.cuda.build import measure_num_blocks

            return measure_num_blocks(self)
        return resolve_num_blocks(self.config, self.bytes_per_block, self.max_model_len)

    def scheduler(self, blocks: int) -> Scheduler:
        """A scheduler over `blocks` blocks."""
        config, draft, context = self.config, self.weights.draft, self.draft_max_model_len
        drafter: CachedDrafter | None = None
        if draft is not None and context is not None:
            # A draft token's share of a target token, by parameters: what draft chunks take from the token budget.
            ratio = draft.num_parameters / self.weights.target.num_parameters
            drafter = CachedDrafter(max_model_len=context, max_draft_lag=DraftModel.max_draft_lag, cost_ratio=ratio)
        return Scheduler(
            max_num_seqs=config.max_num_seqs,
            max_model_len=self.max_model_len,
            num_blocks=blocks,
            block_size=config.block_size,
            max_num_batched_tokens=config.max_num_batched_tokens,
            num_speculative_tokens=self.num_speculative_tokens,
            drafter=drafter,
            max_in_flight=self.depth,
            enable_prefix_caching=config.enable_prefix_caching,
            hash_key=secrets.token_bytes(16),
        )

    def cache(self, model: Decoder, blocks: int) -> KVCache:
        """Zeroed KV cache of `model` over the shared pool."""
        return KVCache.allocate(model.config, blocks, self.config.block_size, model.dtype, self.device)

    def drafter(self, blocks: int) -> DraftModel | None:
        """The drafter over the shared pool; None where the engine does not speculate."""
        draft, context = self.weights.draft, self.draft_max_model_len
        if draft is None or context is None:
            return None
        return DraftModel(
            model=draft,
            kv_cache=self.cache(draft, blocks),
            max_model_len=context,
            vocab_size=self.weights.target.config.vocab_size,
        )

    def runner(self, scheduler: Scheduler, blocks: int) -> Runner:
        """The runner over `blocks` blocks, with row state and caches of its own."""
        if self.on_gpu:
            from specrs.runner.cuda.build import make_runner

            return make_runner(self, scheduler, blocks)
        config, target = self.config, self.weights.target
        dtype = torch.float64 if target.dtype == torch.float64 else torch.float32  # of the logits
        speculative = config.speculative_config
        return EagerRunner(
            target,
            self.cache(target, blocks),
            self.drafter(blocks),
            RowState.allocate(config.max_num_seqs, self.max_model_len, config.block_size, self.device),
            SamplingState(config.max_num_seqs, target.config.vocab_size, dtype, self.device),
            block_size=config.block_size,
            rule=config.rule,
            rates=None if speculative is None else speculative.synthetic_acceptance_rates,
            logprobs_mode=config.logprobs_mode,
        )
