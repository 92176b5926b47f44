"""From an EngineConfig to loaded weights, limits and caches. Runs no model and schedules nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specrs.config import EngineConfig, resolve_draft_max_model_len, resolve_num_blocks
from specrs.drafters.draft_model import DraftModel
from specrs.models.decoder import Decoder
from specrs.models.kv_cache import KVCache
from specrs.models.loader import load_model


@dataclass(frozen=True, slots=True)
class Weights:
    """Loaded models; never written to, so engines may share them."""

    target: Decoder
    draft: Decoder | None


def load_weights(config: EngineConfig) -> Weights:
    """Load target and, where the engine may speculate, draft.

    Raises:
        InvalidConfigError and its subclasses: what is missing, broken or not supported, by name.
    """
    device = torch.device("cpu")
    target = load_model(config.target, dtype=config.dtype, device=device, revision=config.revision)
    speculative, draft = config.speculative_config, config.draft
    if speculative is None or draft is None or speculative.num_speculative_tokens == 0:
        return Weights(target, None)
    dtype = str(target.dtype).removeprefix("torch.")
    return Weights(target, load_model(draft, dtype=dtype, device=device, revision=speculative.revision))


def num_blocks(config: EngineConfig, weights: Weights, max_model_len: int) -> int:
    """Size of the block pool, which serves both models' caches."""
    models = [model for model in (weights.target, weights.draft) if model is not None]
    per_block = sum(KVCache.bytes_per_block(model.config, config.block_size, model.dtype) for model in models)
    return resolve_num_blocks(config, per_block, max_model_len)


def allocate_cache(model: Decoder, blocks: int, block_size: int) -> KVCache:
    """Zeroed KV cache of `model` over the shared pool."""
    return KVCache.allocate(model.config, blocks, block_size, model.dtype, torch.device("cpu"))


def make_drafter(config: EngineConfig, weights: Weights, blocks: int, max_model_len: int) -> DraftModel | None:
    """The drafter over the shared pool; None where the engine does not speculate."""
    draft, target = weights.draft, weights.target
    if draft is None:
        return None
    return DraftModel(
        model=draft,
        kv_cache=allocate_cache(draft, blocks, config.block_size),
        max_model_len=min(resolve_draft_max_model_len(config, draft.config.max_position_embeddings), max_model_len),
        vocab_size=target.config.vocab_size,
    )


def draft_cost_ratio(weights: Weights) -> float:
    """Cost of a draft token in target tokens, by parameters: what draft chunks take from the token budget."""
    if weights.draft is None:
        return 1.0
    return weights.draft.num_parameters / weights.target.num_parameters


def logits_dtype(model: Decoder) -> torch.dtype:
    """What `compute_logits` returns: fp32, or float64 for a float64 model."""
    return torch.float64 if model.dtype == torch.float64 else torch.float32
