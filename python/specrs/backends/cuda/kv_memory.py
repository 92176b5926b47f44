"""Number of KV blocks of an engine on a GPU, from the memory that is left. Leaves nothing allocated."""

from __future__ import annotations

import gc
import logging
from bisect import bisect_right
from collections.abc import Callable

import torch

from specrs.backends.blueprint import Blueprint
from specrs.backends.cuda.build import make_buckets, make_context
from specrs.backends.cuda.context import sequences_of
from specrs.backends.cuda.graphs import measure_bytes
from specrs.backends.cuda.hidden_rows import HiddenInputs
from specrs.backends.cuda.sampling.logprobs import reporting_bytes
from specrs.backends.cuda.sampling.sampling_state import SamplingState
from specrs.backends.kv_memory import GIB, given_num_blocks
from specrs.errors import InvalidConfigError, invalid
from specrs.models.inputs import PassInputs

logger = logging.getLogger(__name__)


@torch.inference_mode()
def measure_num_blocks(blueprint: Blueprint, free_memory: Callable[[str], int]) -> int:
    """Return the number of KV blocks that the user set, or that fit on the GPU.

    The memory for blocks is `gpu_memory_utilization` of the GPU, less weights, buffers, a full prefill pass and graphs.
    All are measured with a pool of one block. Several ranks measure at the same time, each its own GPU. `free_memory`
    returns the bytes that a device has free.

    Raises:
        InvalidConfigError: not one request of full length fits; says how much is missing and what would make it fit.
    """
    config, device = blueprint.config, torch.device(blueprint.device)
    per_block = blueprint.bytes_per_block
    per_request = (1 + len(blueprint.window_groups)) * -(-blueprint.max_model_len // config.block_size)
    needed = blueprint.least_blocks * per_block
    given = given_num_blocks(
        config, per_block, blueprint.max_model_len, blueprint.least_blocks, lambda: free_memory(str(device))
    )
    if given is not None:
        return given
    free, total = torch.cuda.mem_get_info(device)
    try:
        used, graphs = _measure(blueprint)
    except torch.OutOfMemoryError as fault:
        raise invalid(
            InvalidConfigError,
            "gpu_memory_utilization",
            config.gpu_memory_utilization,
            f"{free / GIB:.2f} of {total / GIB:.2f} GiB are free after the weights, and the buffers of an iteration "
            f"do not fit ({fault}); lower max_num_seqs={config.most_seqs}, "
            f"max_num_batched_tokens={config.batched_tokens} or num_speculative_tokens",
        ) from None
    left = int(total * config.gpu_memory_utilization) - used - graphs
    _check_fits(blueprint, left, "gpu_memory_utilization", config.gpu_memory_utilization, needed)
    blocks = min(left // per_block, per_request * config.most_seqs)
    logger.info(
        "GPU memory: %.2f of %.2f GiB used by weights, buffers and a full prefill, %.2f GiB reserved for graphs, "
        "%.2f GiB for %d KV blocks of %d positions",
        used / GIB,
        total / GIB,
        graphs / GIB,
        blocks * per_block / GIB,
        blocks,
        config.block_size,
    )
    return blocks


def _measure(blueprint: Blueprint) -> tuple[int, int]:
    """Return `(bytes used without the KV pool, bytes that all graphs will take)`. Leaves nothing allocated."""
    config, device = blueprint.config, torch.device(blueprint.device)
    sampling = SamplingState(config.most_seqs, blueprint.weights.target.vocab_size, torch.float32, device)
    ctx = make_context(blueprint, blueprint.scheduler(blueprint.max_model_len // config.block_size + 1), sampling, 1)
    inputs = _prefill_inputs(config.batched_tokens, blueprint, device)
    entries = ctx.target.forward(inputs, ctx.kv_cache, ctx.hidden_layers).entries
    if ctx.drafter is not None:
        start = inputs.q_start[:1]
        hidden = None if entries is None else HiddenInputs(entries.clone(), start)
        ctx.drafter.catch_up(inputs, hidden)
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    # Memory that torch has freed but cached counts as used, because prefill's temporaries need it again.
    used = total - free
    # Log probabilities take memory that prefill may have left. Masks and penalties change logits where they are.
    reporting = reporting_bytes(ctx.buffers.logits.shape[0], blueprint.weights.target.vocab_size)
    used += max(0, reporting - (torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)))
    graphs = 0
    if not config.enforce_eager:
        sequences, buckets = sequences_of(ctx.record.views, "num_decode"), make_buckets(blueprint)
        for own in (ctx, ctx.without_adapters()):
            graphs += 0 if own is None else measure_bytes(own, buckets, sequences, device)
        del own
    del ctx, sampling
    gc.collect()
    torch.cuda.empty_cache()
    return used, graphs


def _prefill_inputs(rows: int, blueprint: Blueprint, device: torch.device) -> PassInputs:
    """Return the inputs of a full prompt chunk of one request that writes no KV."""
    rows = min(rows, blueprint.max_model_len)
    blocks = -(-blueprint.max_model_len // blueprint.config.block_size)
    further = len(blueprint.window_groups)
    return PassInputs(
        input_ids=torch.zeros(rows, dtype=torch.int64, device=device),
        positions=torch.arange(rows, device=device),
        slots=torch.full((rows,), -1, dtype=torch.int64, device=device),
        q_start=torch.tensor([0, rows], device=device),
        block_table=torch.zeros((1, blocks), dtype=torch.int64, device=device),
        max_q_len=rows,
        max_context=rows,
        group_slots=torch.full((further, rows), -1, dtype=torch.int64, device=device),
        group_tables=torch.zeros((further, 1, blocks), dtype=torch.int64, device=device),
        device_rows=torch.zeros(1, dtype=torch.int64, device=device),
        prompts=True,
    )


def _check_fits(blueprint: Blueprint, left: int, field: str, value: object, needed: int) -> None:
    """Raise InvalidConfigError if fewer bytes are `left` than are `needed`, with a `max_model_len` that would fit."""
    if left >= needed:
        return
    of_length = blueprint.scheduler(1).least_blocks
    shorter = bisect_right(range(blueprint.max_model_len), max(0, left) // blueprint.bytes_per_block, key=of_length) - 1
    instead = f"max_model_len={shorter} would fit, or " if shorter > 1 else ""
    raise invalid(
        InvalidConfigError,
        field,
        value,
        f"one request of max_model_len={blueprint.max_model_len} needs {needed / GIB:.2f} GiB of KV cache and "
        f"{max(0, left) / GIB:.2f} GiB are left, {(needed - left) / GIB:.2f} GiB too little; {instead}a larger "
        f"{field}, fewer max_num_seqs={blueprint.config.most_seqs}, or a smaller model",
    )
