"""The runner of an engine or of one of its ranks, and the KV blocks that it has room for. Plans nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from specrs.config import EngineConfig
from specrs.core import CpuPool, InvalidBufferError, InvalidConfigError, Scheduler
from specrs.engine.blueprint import Blueprint
from specrs.engine.kv_memory import resolve_num_blocks
from specrs.engine.threads import choose_threads
from specrs.engine.weights import Weights
from specrs.errors import UnsupportedConfigError, invalid
from specrs.models.dense_native import NativeDense
from specrs.models.eagle3_native import NativeEagle3Head
from specrs.runner.cpu import CpuRunner
from specrs.runner.ring import RingSlot
from specrs.runner.row_state import RowState

if TYPE_CHECKING:
    from specrs.parallel.ranks import Ranks
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


def slot_type(blueprint: Blueprint) -> Callable[[Scheduler, int], RingSlot]:
    """Return what makes the ring slots of the runner."""
    if not blueprint.on_gpu:
        return RingSlot
    from specrs.runner.cuda.slots import TensorSlot

    return partial(TensorSlot, pinned=blueprint.weights.target.device_type == "cuda")


def make_runner(
    blueprint: Blueprint, scheduler: Scheduler, blocks: int, ranks: Ranks | None = None
) -> CpuRunner | CudaRunner:
    """The runner over `blocks` blocks, with row state and caches of its own; of several `ranks`, this one's."""
    if blueprint.on_gpu:
        from specrs.engine.build_cuda import make_cuda_runner

        return make_cuda_runner(blueprint, scheduler, blocks, ranks)
    config = blueprint.config
    models = [model for model in blueprint.models if isinstance(model, NativeDense)]
    if config.cpu_bf16_rows and len(models) < len(blueprint.models):
        reason = "not implemented for a model that torch computes; allowed: False"
        raise invalid(UnsupportedConfigError, "cpu_bf16_rows", True, reason)
    pool = None
    if models or isinstance(blueprint.weights.head, NativeEagle3Head):
        pool, weights = _on_own_pool(blueprint.weights, models, config)
        blueprint = replace(blueprint, weights=weights)
    target, speculative = blueprint.weights.target, config.speculative_config
    return CpuRunner(
        scheduler,
        target,
        target.allocate_cache(blocks, config.block_size),
        blueprint.cpu_drafter(blocks),
        RowState.allocate(
            config.max_num_seqs,
            blueprint.max_model_len,
            config.block_size,
            1 + len(blueprint.window_groups),
            blueprint.hidden_row_size,
        ),
        pool=pool,
        rule=config.rule,
        rates=None if speculative is None else speculative.synthetic_acceptance_rates,
        logprobs_mode=config.logprobs_mode,
        ranks=ranks,
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
    bf16_rows = config.cpu_bf16_rows
    prompt_tiles = config.cpu_prefill == "amx"
    try:
        if isinstance(target, NativeDense):
            target = target.on_pool(pool, bf16_rows=bf16_rows, prompt_tiles=prompt_tiles)
        if isinstance(draft, NativeDense):
            draft = draft.on_pool(pool, bf16_rows=bf16_rows, prompt_tiles=prompt_tiles)
        if isinstance(head, NativeEagle3Head):
            head = head.on_pool(pool, bf16_rows=bf16_rows)
    except InvalidConfigError as fault:
        reason = "not implemented on this machine, which has no AMX tiles of bf16 numbers; allowed: 'exact'"
        raise invalid(UnsupportedConfigError, "cpu_prefill", config.cpu_prefill, reason) from fault
    return replace(weights, target=target, draft=draft, head=head)
