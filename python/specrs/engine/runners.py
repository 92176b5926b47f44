"""The runner of an engine or of one of its ranks, and the KV blocks that it has room for. Plans nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from specrs.config import EngineConfig
from specrs.core import CpuPool, InvalidBufferError, InvalidConfigError, Scheduler
from specrs.engine.blueprint import Blueprint
from specrs.engine.kv_memory import resolve_num_blocks
from specrs.engine.threads import choose_threads
from specrs.engine.weights import Weights
from specrs.errors import UnsupportedConfigError, invalid
from specrs.models.dense_native import NativeDense
from specrs.models.eagle3_native import NativeEagle3Head
from specrs.models.tensor_passes import over_tensors
from specrs.models.torch_arrays import TORCH_DTYPES
from specrs.parallel.ranks import Ranks
from specrs.runner.eager import EagerRunner
from specrs.runner.native import NativeRunner
from specrs.runner.row_state import RowState
from specrs.runner.sampling_state import SamplingState

if TYPE_CHECKING:
    from specrs.runner.cuda.runner import CudaRunner  # and Triton


def num_blocks(blueprint: Blueprint) -> int:
    """Size of the block pool, which serves both models' caches."""
    if blueprint.on_gpu:
        from specrs.engine.build_cuda import measure_num_blocks

        return measure_num_blocks(blueprint)
    return resolve_num_blocks(
        blueprint.config,
        blueprint.bytes_per_block,
        blueprint.max_model_len,
        blueprint.least_blocks,
        1 + len(blueprint.window_groups),
    )


def make_runner(
    blueprint: Blueprint, scheduler: Scheduler, blocks: int, ranks: Ranks | None = None
) -> EagerRunner | CudaRunner:
    """The runner over `blocks` blocks, with row state and caches of its own; of several `ranks`, this one's."""
    if blueprint.on_gpu:
        from specrs.engine.build_cuda import make_cuda_runner

        return make_cuda_runner(blueprint, scheduler, blocks, ranks)
    config = blueprint.config
    make: Callable[..., EagerRunner] = EagerRunner
    models = [model for model in blueprint.models if isinstance(model, NativeDense)]
    native = len(models) == len(blueprint.models)
    if config.cpu_bf16_rows and not native:
        reason = "not implemented for a model that is served op by op; allowed: False"
        raise invalid(UnsupportedConfigError, "cpu_bf16_rows", True, reason)
    if models and not config.enforce_eager:
        pool, weights = _on_own_pool(blueprint.weights, models, config)
        # Drafts of another tokenizer are not drawn in one call.
        if native and weights.bridge is None and weights.shared is None:
            make = partial(NativeRunner, scheduler, pool)
        else:
            passes = {"target": over_tensors(weights.target), "draft": over_tensors(weights.draft)}
            weights = replace(weights, **passes)
        blueprint = replace(blueprint, weights=weights)
    model, speculative, device = blueprint.weights.target, config.speculative_config, torch.device(blueprint.device)
    sampling = SamplingState(config.max_num_seqs, model.vocab_size, TORCH_DTYPES[blueprint.logits_dtype], device)
    sampling.ranks = ranks
    return make(
        model,
        model.allocate_cache(blocks, config.block_size),
        blueprint.drafter(blocks),
        RowState.allocate(
            config.max_num_seqs,
            blueprint.max_model_len,
            config.block_size,
            device,
            1 + len(blueprint.window_groups),
        ),
        sampling,
        block_size=config.block_size,
        rule=config.rule,
        rates=None if speculative is None else speculative.synthetic_acceptance_rates,
        logprobs_mode=config.logprobs_mode,
    )


def _on_own_pool(weights: Weights, models: Sequence[NativeDense], config: EngineConfig) -> tuple[CpuPool, Weights]:
    """Start an engine's threads, and put its models on them with the settings of `config`.

    `models` are the native ones among target and draft. The weights are shared; threads and work space are not.
    Raises UnsupportedConfigError for settings that the machine or the weights do not allow.
    """
    try:
        pool = CpuPool(choose_threads(config, models))
        return pool, _on_pool(weights, pool, config)
    except InvalidBufferError as fault:
        # Everything else was checked when the weights were loaded.
        reason = f"not implemented for these weights: {fault}; allowed: False"
        raise invalid(UnsupportedConfigError, "cpu_bf16_rows", config.cpu_bf16_rows, reason) from fault


def _on_pool(weights: Weights, pool: CpuPool, config: EngineConfig) -> Weights:
    target, draft, head = weights.target, weights.draft, weights.head
    bf16_rows, prompt_tiles = config.cpu_bf16_rows, config.cpu_prefill == "amx"
    try:
        if isinstance(target, NativeDense):
            target = target.on_pool(pool, bf16_rows=bf16_rows, prompt_tiles=prompt_tiles)
        if isinstance(draft, NativeDense):
            draft = draft.on_pool(pool, bf16_rows=bf16_rows, prompt_tiles=prompt_tiles)
        if isinstance(head, NativeEagle3Head):
            head = head.on_pool(pool, bf16_rows=bf16_rows)
    except InvalidConfigError as fault:
        reason = "not implemented on this machine, which has no AMX tiles of bf16 numbers; allowed: 'exact' or 'torch'"
        raise invalid(UnsupportedConfigError, "cpu_prefill", config.cpu_prefill, reason) from fault
    return replace(weights, target=target, draft=draft, head=head)
