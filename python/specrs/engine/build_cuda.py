"""Builds the CUDA runner: buffers, KV memory by what is left of the GPU's, graphs. Plans and launches nothing."""

from __future__ import annotations

import gc
import logging
from bisect import bisect_right
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from specrs.core import Scheduler
from specrs.drafters.base import Drafter, HiddenInputs, Proposal, device_drafter, host_drafts, model_drafter
from specrs.drafters.draft_model import ModelPasses
from specrs.drafters.hidden import HeadDrafter
from specrs.drafters.translated import TranslatedDraftModel
from specrs.engine.blueprint import Blueprint
from specrs.engine.kv_memory import GIB, given_num_blocks
from specrs.errors import InvalidConfigError, invalid
from specrs.kernels.cuda.prepare import Sizes
from specrs.kernels.cuda.sampling_scratch import SamplingScratch
from specrs.kernels.cuda.sampling_structs import RowParams
from specrs.kernels.linear import DenseWeight
from specrs.models.base import TorchModel
from specrs.models.cuda.products import stored
from specrs.models.cuda.workspace import MERGED_CHUNKS
from specrs.models.dense import Dense
from specrs.models.dense_cuda import CudaDense
from specrs.models.eagle3_cuda import CudaEagle3Head
from specrs.models.inputs import PassInputs
from specrs.models.torch_arrays import TORCH_DTYPES
from specrs.parallel.ranks import Ranks
from specrs.runner.cuda.buffers import Buffers, DeviceRecord, DraftSizes
from specrs.runner.cuda.chunk_buffers import ChunkBuffers
from specrs.runner.cuda.context import Context, Head, LaunchEntries, Reduced, entries_of
from specrs.runner.cuda.graphs import Graphs, Uncaptured, capture_all, measure_bytes
from specrs.runner.cuda.hidden_rows import HiddenRows
from specrs.runner.cuda.row_state import RowState
from specrs.runner.cuda.runner import CudaRunner
from specrs.runner.cuda.sampling_state import SamplingState
from specrs.runner.cuda.shapes import MERGED_ROWS, Buckets, batch_buckets
from specrs.runner.cuda.warm_up import warm_up
from specrs.speculative_config import AUTO

logger = logging.getLogger(__name__)


def make_buckets(blueprint: Blueprint) -> Buckets:
    """The shapes that graphs are captured for, or that launches without graphs are padded to."""
    config = blueprint.config
    sizes = batch_buckets(config.max_num_seqs, None if config.enforce_eager else config.cudagraph_capture_sizes)
    speculative = config.speculative_config
    # Drafts on the host are as many as a text proposes, and their launches are verification alone.
    on_host = speculative is not None and speculative.on_host
    mixes = speculative is not None and speculative.drafts_on_host and not on_host
    every_k = on_host or (speculative is not None and speculative.num_speculative_tokens == AUTO)
    return Buckets(
        sizes,
        blueprint.num_speculative_tokens,
        every_k=every_k,
        has_passes=not on_host,
        mixes=mixes,
        in_parallel=speculative is not None and speculative.parallel_drafting,
        max_chunk_rows=config.max_num_batched_tokens,
        max_chunks=config.max_num_seqs,
        # Hidden states of a prompt's rows are read together by a head, whose chunks they are.
        merges=MERGED_CHUNKS if blueprint.weights.head is None else 0,
    )


def make_context(blueprint: Blueprint, scheduler: Scheduler, sampling: SamplingState, num_blocks: int) -> Context:
    """Allocate row state, buffers, workspaces and KV caches on the device."""
    config, device, k = blueprint.config, torch.device(blueprint.device), blueprint.num_speculative_tokens
    speculative = config.speculative_config
    groups = 1 + len(blueprint.window_groups)
    state = RowState.allocate(config.max_num_seqs, blueprint.max_model_len, config.block_size, device, groups)
    drafter = blueprint.drafter(num_blocks)
    max_draft_lag = 0 if drafter is None else drafter.max_draft_lag or 0
    sizes = Sizes(
        draft_context=blueprint.max_model_len if drafter is None else drafter.max_model_len or blueprint.max_model_len,
        width=max_draft_lag - (0 if drafter is None or drafter.on_host else device_drafter(drafter).token_offset),
        block_size=config.block_size,
        max_k=k,
        mask_token_id=None if drafter is None or drafter.on_host else device_drafter(drafter).mask_token_id,
    )
    head: Head | None = None
    reduced: Reduced | None = None
    fed_ids: Tensor | None = None
    target_rows = max(config.max_num_batched_tokens, config.max_num_seqs * (k + 1), MERGED_ROWS[-1])
    is_point_mass = drafter is not None and drafter.proposal is Proposal.POINT_MASS
    rows = max(config.max_num_batched_tokens, config.max_num_seqs * max(k + 1, sizes.first_pass_rows))
    vocab = blueprint.weights.target.vocab_size
    rates: Tensor | None = None
    if speculative is not None and speculative.synthetic_acceptance_rates is not None:
        rates = torch.tensor(speculative.synthetic_acceptance_rates, dtype=torch.float32, device=device)
    drafting = DraftSizes(TORCH_DTYPES[blueprint.weights.target.dtype], sizes.first_pass_rows)
    target = cast("TorchModel", blueprint.weights.target)
    if isinstance(drafter, HeadDrafter):
        layers, own = drafter.hidden_layers, drafter.head
        target = target.with_buffers(target_rows, config.max_num_seqs, len(layers))
        model = CudaEagle3Head(own.weights, max_rows=rows, max_seqs=config.max_num_seqs, ranks=own.ranks)
        drafter.head = model
        kept = HiddenRows.allocate(
            config.max_num_seqs,
            sizes.width,
            len(layers),
            drafter.hidden_size,
            TORCH_DTYPES[target.states_dtype],
            device,
        )
        head = Head(model, kept, layers, cast("CudaDense", target).workspace.entries)
        if own.vocab_size < vocab:
            reduced = _reduced(own.target_ids, vocab)
        states = len(layers) * drafter.hidden_size
        num_ids = 0 if reduced is None else own.vocab_size
        drafting = replace(drafting, hidden_size=own.hidden_size, states_size=states, num_ids=num_ids)
    else:
        target = target.with_buffers(target_rows, config.max_num_seqs)
    if head is None and drafter is not None and not drafter.on_host:
        drafts = model_drafter(drafter)
        if isinstance(drafter, TranslatedDraftModel):
            drafts.model, reduced = _translated(drafter)
            fed_ids = drafter.shared.fed_ids
            drafting = replace(drafting, num_ids=len(reduced.target_ids))
        drafts.model = drafts.model.with_buffers(rows, config.max_num_seqs)
        if sizes.mask_token_id is not None:
            width = cast("CudaDense", drafts.model).config.hidden_size
            drafting = replace(drafting, dtype=TORCH_DTYPES[drafts.model.dtype], in_parallel=True, hidden_size=width)
    record = DeviceRecord(scheduler, k, device)
    on_host = speculative is not None and speculative.drafts_on_host
    return Context(
        state=state,
        params=RowParams(sampling.params.values, sampling.seeds),
        record=record,
        buffers=Buffers.allocate(
            max_num_seqs=config.max_num_seqs,
            num_speculative_tokens=k,
            drafting=drafting,
            keeps_q=not is_point_mass,
            num_groups=groups,
            max_blocks=state.block_table.shape[1],
            vocab_size=vocab,
            device=device,
        ),
        chunks=ChunkBuffers.allocate(
            config.max_num_batched_tokens,
            config.max_num_seqs,
            state.block_table.shape[1],
            groups,
            blueprint.max_model_len,
            device,
        ),
        scratch=SamplingScratch.allocate(config.max_num_seqs * (k + 1), config.max_num_seqs, vocab, device),
        target=target,
        kv_cache=blueprint.weights.target.allocate_cache(num_blocks, config.block_size),
        drafter=drafter,
        head=head,
        reduced=reduced,
        fed_ids=fed_ids,
        proposed=host_drafts(record.views, config.max_num_seqs) if on_host and k else None,
        draft_start=_draft_start(drafter, state),
        sizes=sizes,
        max_model_len=blueprint.max_model_len,
        rule="coupled" if is_point_mass else config.rule,
        rates=rates,
    )


def _draft_start(drafter: Drafter | None, state: RowState) -> Tensor | None:
    if not isinstance(drafter, ModelPasses) or drafter.model.sliding_window is None:
        return None
    return torch.zeros_like(state.limit)


def _reduced(target_ids: Tensor, vocab_size: int) -> Reduced:
    """`target_ids` ascend."""
    source = torch.full((vocab_size,), -1, dtype=torch.int64, device=target_ids.device)
    source[target_ids] = torch.arange(len(target_ids), device=target_ids.device)
    return Reduced(target_ids, source)


def _translated(drafter: TranslatedDraftModel) -> tuple[Dense, Reduced]:
    """A draft of another tokenizer with the rows of its LM head that the target has tokens of, in the target's order:
    they are copied, and logits of others never computed."""
    target_ids, order = drafter.shared.target_ids.sort()
    weights = cast("Dense", drafter.model).weights
    rows = stored(weights.lm_head).index_select(0, drafter.shared.draft_ids[order])
    return Dense(replace(weights, lm_head=DenseWeight(rows))), _reduced(target_ids, drafter.vocab_size)


def make_cuda_runner(
    blueprint: Blueprint, scheduler: Scheduler, num_blocks: int, ranks: Ranks | None = None
) -> CudaRunner:
    """The runner over `num_blocks` blocks, its graphs captured or without them its kernels compiled; several `ranks` do
    so at once, in the same order."""
    config, device = blueprint.config, torch.device(blueprint.device)
    sampling = SamplingState(config.max_num_seqs, blueprint.weights.target.vocab_size, torch.float32, device)
    sampling.ranks = ranks
    ctx = make_context(blueprint, scheduler, sampling, num_blocks)
    buckets, decode = make_buckets(blueprint), entries_of(ctx.record.views, "num_decode")
    uncaptured = Uncaptured(ctx, buckets, decode)
    graphs: Graphs | Uncaptured = uncaptured
    if device.type == "cuda":
        with torch.inference_mode():
            warm_up(ctx, buckets)
            if config.enforce_eager:
                uncaptured.run_all()
            else:
                graphs = _captured(ctx, buckets, decode, device)
    return CudaRunner(ctx, sampling, buckets, graphs, scheduler.record_layout(), logprobs_mode=config.logprobs_mode)


def _captured(ctx: Context, buckets: Buckets, decode: LaunchEntries, device: torch.device) -> Graphs:
    before = torch.cuda.mem_get_info(device)[0]
    graphs = capture_all(ctx, buckets, decode, device)
    used = before - torch.cuda.mem_get_info(device)[0]
    logger.info("%d CUDA graphs, %.1f MiB, %.0f KiB each", len(graphs), used / 2**20, used / 2**10 / len(graphs))
    return graphs


@torch.inference_mode()
def measure_num_blocks(blueprint: Blueprint) -> int:
    """Blocks of the KV pool that fit: `gpu_memory_utilization` of the GPU less weights, buffers, a full prefill pass
    and graphs, all measured on a pool of one block. Of several ranks each measures its own GPU, at once.

    Raises:
        InvalidConfigError: not one request of full length fits; says how much is missing and what would make it fit.
    """
    config, device = blueprint.config, torch.device(blueprint.device)
    per_block = blueprint.bytes_per_block
    per_request = (1 + len(blueprint.window_groups)) * -(-blueprint.max_model_len // config.block_size)
    needed = blueprint.least_blocks * per_block
    given = given_num_blocks(config, per_block, blueprint.max_model_len, blueprint.least_blocks, str(device))
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
            f"{free / GIB:.2f} of {total / GIB:.2f} GiB are free behind the weights, and the buffers of an iteration "
            f"do not fit ({fault}); allowed are a smaller max_num_seqs={config.max_num_seqs}, "
            f"max_num_batched_tokens={config.max_num_batched_tokens} or num_speculative_tokens",
        ) from None
    left = int(total * config.gpu_memory_utilization) - used - graphs
    _check_fits(blueprint, left, "gpu_memory_utilization", config.gpu_memory_utilization, needed)
    blocks = min(left // per_block, per_request * config.max_num_seqs)
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
    """`(bytes used beside the KV pool, bytes that all graphs will take)`; leaves nothing allocated."""
    config, device = blueprint.config, torch.device(blueprint.device)
    sampling = SamplingState(config.max_num_seqs, blueprint.weights.target.vocab_size, torch.float32, device)
    ctx = make_context(blueprint, blueprint.scheduler(blueprint.max_model_len // config.block_size + 1), sampling, 1)
    inputs = _prefill_inputs(config.max_num_batched_tokens, blueprint, device)
    entries = ctx.target.forward(inputs, ctx.kv_cache, ctx.hidden_layers).entries
    if ctx.drafter is not None and not ctx.drafter.on_host:
        start = inputs.q_start[:1]
        hidden = None if entries is None else HiddenInputs(entries.clone(), start)
        device_drafter(ctx.drafter).feed(inputs, hidden)
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    # What torch has cached but freed is at hand for prefill's temporaries, so it stays counted.
    used = total - free
    graphs = 0
    if not config.enforce_eager:
        graphs = measure_bytes(ctx, make_buckets(blueprint), entries_of(ctx.record.views, "num_decode"), device)
    del ctx, sampling
    gc.collect()
    torch.cuda.empty_cache()
    return used, graphs


def _prefill_inputs(rows: int, blueprint: Blueprint, device: torch.device) -> PassInputs:
    """A full prompt chunk of one request that writes nowhere."""
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
    )


def _check_fits(blueprint: Blueprint, left: int, field: str, value: object, needed: int) -> None:
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
        f"{field}, fewer max_num_seqs={blueprint.config.max_num_seqs}, or a smaller model",
    )
