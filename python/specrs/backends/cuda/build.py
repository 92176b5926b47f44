"""Builder of the CUDA runner: buffers, caches, graphs. Plans and runs no step."""

from __future__ import annotations

import logging
import time
from typing import cast

import torch
from torch import Tensor

from specrs.backends.base import FindAdapter
from specrs.backends.blueprint import Blueprint, MergedPrefill
from specrs.backends.cuda.adapters import Adapters
from specrs.backends.cuda.buffers import Buffers, DeviceRecord, DraftSizes
from specrs.backends.cuda.chunk_buffers import ChunkBuffers
from specrs.backends.cuda.context import Context, StepSequences, sequences_of
from specrs.backends.cuda.decoder import CudaDecoder, with_buffers
from specrs.backends.cuda.device import KIND
from specrs.backends.cuda.draft_passes import DraftPasses, Room
from specrs.backends.cuda.draft_rules import ON_HOST, DraftRules
from specrs.backends.cuda.drafters import make_passes
from specrs.backends.cuda.graphs import Graphs, Uncaptured, capture_all
from specrs.backends.cuda.products import is_dequantized
from specrs.backends.cuda.row_state import RowState
from specrs.backends.cuda.runner import CudaRunner, Work
from specrs.backends.cuda.sampling.sampling_state import SamplingState
from specrs.backends.cuda.shapes import (
    MERGED_CHUNKS,
    MERGED_ROWS,
    MERGED_STEPS,
    TILED_MERGED_ROWS,
    Buckets,
    MergedRows,
    batch_buckets,
)
from specrs.backends.cuda.slots import host_drafts
from specrs.backends.cuda.warm_up import warm_up
from specrs.core import Scheduler
from specrs.kernels.cuda.device import limits_of
from specrs.kernels.cuda.prepare import Sizes
from specrs.kernels.cuda.sampling_scratch import SamplingScratch
from specrs.kernels.cuda.sampling_structs import RowParams
from specrs.models.base import Model, TorchModel
from specrs.models.torch_weights import TorchFacts
from specrs.parallel.ranks import Ranks
from specrs.speculative_config import AUTO

logger = logging.getLogger(__name__)


def make_buckets(blueprint: Blueprint) -> Buckets:
    """Return the shapes for which graphs are captured, or to which steps are padded without graphs."""
    config, drafter = blueprint.config, blueprint.weights.drafter
    sizes = batch_buckets(config.most_seqs, None if config.enforce_eager else config.cudagraph_capture_sizes)
    speculative = config.speculative_config
    # On the host, the text decides the number of drafts, and steps only verify.
    on_host = speculative is not None and speculative.on_host
    mixes = bool(blueprint.host_drafters) and not on_host
    every_k = on_host or (speculative is not None and speculative.num_speculative_tokens == AUTO)
    return Buckets(
        sizes,
        blueprint.num_speculative_tokens,
        every_k=every_k,
        has_passes=not on_host,
        mixes=mixes,
        in_parallel=speculative is not None and speculative.parallel_drafting,
        max_chunk_rows=config.batched_tokens,
        max_chunks=config.most_seqs,
        # A head reads the hidden states of all rows of a prompt chunk, so it needs the chunk's own pass.
        merges=0 if drafter is not None and drafter.hidden_layers else MERGED_CHUNKS,
        merged_rows=_merged_rows(blueprint.weights.target),
    )


def _merged_rows(target: Model) -> MergedRows:
    """Return the numbers of rows of passes with prompt chunks. The MLPs, most of a dense model's weights, decide."""
    if not isinstance(target, TorchFacts):
        return MERGED_ROWS
    limits = limits_of(target.device)
    tiled = any(is_dequantized(layer.gate_up, limits) for layer in target.weights.layers)
    return TILED_MERGED_ROWS if tiled else MERGED_ROWS


def make_merged_prefill(blueprint: Blueprint) -> MergedPrefill:
    """Return the room for prompt tokens in the captured iterations of `make_buckets`."""
    buckets = make_buckets(blueprint)
    return MergedPrefill(tuple(buckets.merged_rooms()), buckets.merged_seqs, MERGED_STEPS)


def make_context(blueprint: Blueprint, scheduler: Scheduler, sampling: SamplingState, num_blocks: int) -> Context:
    """Allocate row state, buffers, workspaces and KV caches on the device. Returns them in one value."""
    config, device, k = blueprint.config, torch.device(blueprint.device), blueprint.num_speculative_tokens
    speculative = config.speculative_config
    groups = 1 + len(blueprint.window_groups)
    state = RowState.allocate(config.most_seqs, blueprint.max_model_len, config.block_size, device, groups)
    loaded, rules = blueprint.drafter, _rules(blueprint)
    sizes = Sizes(
        draft_context=rules.max_model_len or blueprint.max_model_len,
        width=rules.max_draft_lag - rules.token_offset,
        block_size=config.block_size,
        max_k=k,
        mask_token_id=rules.mask_token_id,
    )
    # Final states need no buffer of their own.
    num_layers = blueprint.weights.target.num_layers
    layers = [] if loaded is None else [layer for layer in loaded.hidden_layers if layer <= num_layers]
    target_rows = max(config.batched_tokens, config.most_seqs * (k + 1), MERGED_ROWS.totals[-1])
    target = with_buffers(
        cast("TorchModel", blueprint.weights.target),
        target_rows,
        config.most_seqs,
        len(layers),
        k,
        blueprint.num_snapshots,
        (config.max_loras, config.max_lora_rank) if config.enable_lora else None,
    )
    vocab = blueprint.weights.target.vocab_size
    rates: Tensor | None = None
    if speculative is not None and speculative.synthetic_acceptance_rates is not None:
        rates = torch.tensor(speculative.synthetic_acceptance_rates, dtype=torch.float32, device=device)
    kv_cache = blueprint.weights.target.allocate_cache(num_blocks, config.block_size)
    passes: DraftPasses | None = None
    if loaded is not None:
        rows = max(config.batched_tokens, config.most_seqs * max(k + 1, sizes.first_pass_rows))
        room = Room(
            limits=blueprint.draft_limits,
            num_blocks=num_blocks,
            target=target,
            kv_cache=kv_cache,
            max_rows=rows,
            first_pass_rows=sizes.first_pass_rows,
            width=sizes.width,
        )
        passes = make_passes(loaded, room)
    windowed = passes is not None and passes.sliding_window is not None
    record = DeviceRecord(scheduler, k, device)
    return Context(
        state=state,
        params=RowParams(sampling.params.values, sampling.seeds),
        record=record,
        buffers=Buffers.allocate(
            max_num_seqs=config.most_seqs,
            num_speculative_tokens=k,
            drafting=DraftSizes(torch.float32, sizes.first_pass_rows) if passes is None else passes.sizes,
            keeps_q=not rules.is_point_mass,
            num_groups=groups,
            max_blocks=state.block_table.shape[1],
            vocab_size=vocab,
            device=device,
        ),
        chunks=ChunkBuffers.allocate(
            config.batched_tokens,
            config.most_seqs,
            state.block_table.shape[1],
            groups,
            blueprint.max_model_len,
            device,
        ),
        scratch=SamplingScratch.allocate(config.most_seqs * (k + 1), config.most_seqs, vocab, device),
        target=target,
        states=target.states if isinstance(target, CudaDecoder) else None,
        kv_cache=kv_cache,
        drafter=passes,
        rules=rules,
        proposed=host_drafts(record.views, config.most_seqs) if blueprint.host_drafters and k else None,
        draft_start=torch.zeros_like(state.limit) if windowed else None,
        sizes=sizes,
        max_model_len=blueprint.max_model_len,
        rule="coupled" if rules.is_point_mass else config.rule,
        rates=rates,
    )


def _rules(blueprint: Blueprint) -> DraftRules:
    """Return the rules for the drafts and KV of the drafter. An engine without drafts gets the defaults, which no step
    reads."""
    speculative, drafter = blueprint.config.speculative_config, blueprint.drafter
    if drafter is not None:
        return DraftRules.of(drafter.declare(blueprint.draft_limits))
    return ON_HOST if speculative is not None and speculative.on_host else DraftRules()


def make_cuda_runner(
    blueprint: Blueprint,
    scheduler: Scheduler,
    num_blocks: int,
    ranks: Ranks | None = None,
    find_adapter: FindAdapter | None = None,
) -> CudaRunner:
    """Return the runner over `num_blocks` blocks. Captures its graphs, or without graphs compiles its kernels.
    `find_adapter` finds the LoRA adapters of requests; None: no request has one.

    All `ranks` must call this at the same time, because captures exchange data in the same order.
    """
    config, device = blueprint.config, torch.device(blueprint.device)
    sampling = SamplingState(config.most_seqs, blueprint.weights.target.vocab_size, torch.float32, device)
    sampling.ranks = ranks
    ctx = make_context(blueprint, scheduler, sampling, num_blocks)
    buckets, decode = make_buckets(blueprint), sequences_of(ctx.record.views, "num_decode")
    if device.type == KIND:
        with torch.inference_mode():
            warm_up(ctx, buckets)

    def work(own: Context) -> Work:
        uncaptured = Uncaptured(own, buckets, decode)
        if device.type != KIND:
            return Work(own, uncaptured)
        with torch.inference_mode():
            if not config.enforce_eager:
                return Work(own, _captured(own, buckets, decode, device))
            uncaptured.run_all()
        return Work(own, uncaptured)

    made, without = work(ctx), ctx.without_adapters()
    loras = None
    if find_adapter is not None and isinstance(ctx.target, CudaDecoder) and ctx.target.adapters is not None:
        loras = Adapters(ctx.target.adapters, find_adapter)
    return CudaRunner(
        ctx,
        sampling,
        buckets,
        made.graphs,
        logprobs_mode=config.logprobs_mode,
        loras=loras,
        plain=None if without is None else work(without),
    )


def _captured(ctx: Context, buckets: Buckets, decode: StepSequences, device: torch.device) -> Graphs:
    """Capture all graphs, and log the memory and the time that they take."""
    before, began = torch.cuda.mem_get_info(device)[0], time.monotonic()
    graphs = capture_all(ctx, buckets, decode, device)
    used = before - torch.cuda.mem_get_info(device)[0]
    each, seconds = used / 2**10 / len(graphs), time.monotonic() - began
    logger.info("%d CUDA graphs, %.1f MiB, %.0f KiB each, captured in %.1f s", len(graphs), used / 2**20, each, seconds)
    return graphs
