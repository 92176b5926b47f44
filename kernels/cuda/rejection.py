"""Speculative sampling by rejection on the device: counts accepted drafts, and draws the token after them. Makes no q.

`specrs.verify.rejection` is the reference and names the papers and the numerics. p and q are (logits, cut, lse) of
target and draft, so nothing as wide as the vocabulary is written, and q is exactly what the draft was drawn from. Every
program of a sequence computes m again from 2 K gathered logits; the distribution of the draw depends only on m.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from specrs.core import PURPOSE_GUMBEL
from specrs.kernels.cuda._distribution import (
    GREEDY,
    NO_TOKEN,
    PARAMS,
    TEMPERATURE,
    combine_tiles,
    first_best,
    is_kept,
    keep_better,
    probability,
    scaled,
)
from specrs.kernels.cuda.accept import ACCEPT, expect_sequences, first_rejected
from specrs.kernels.cuda.philox import gumbel, uniform
from specrs.kernels.cuda.sampling_scratch import BLOCK, SamplingScratch, expect, tile_of
from specrs.kernels.cuda.sampling_structs import Accepted, Distribution, Drafted, RowParams
from specrs.kernels.cuda.variants import Variant
from specrs.verify.rejection import append_token, count_accepted, draw_after
from torch import Tensor

_GUMBEL = tl.constexpr(PURPOSE_GUMBEL)
_SCALARS = (
    "num_rows",
    "K",
    "tile",
    "tile_stride",
    "draft_stride_k",
    "draft_stride_b",
    "cut_stride",
    "drafts_stride",
    "tokens_stride",
    "num_tiles",
)


@triton.jit(do_not_specialize=["num_rows", "K", "tile", "cut_stride", "drafts_stride"])
def tile_rejection_kernel(  # type: ignore[no-untyped-def]
    logits,
    cut,
    lse,
    ids,
    draft_logits,
    draft_cut,
    draft_lse,
    q_start,
    drafts,
    num_drafts,
    row,
    n,
    values,
    seeds,
    tile_value,
    tile_id,
    out_accepted,
    num_rows,
    K,
    V,
    stride,
    draft_stride_k,
    draft_stride_b,
    cut_stride,
    drafts_stride,
    tile,
    tile_stride,
    HAS_DRAFTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the number of accepted drafts, and for each tile the best of the residual (slot 0, -inf if it is empty)
    and of p (slot 1)."""
    t, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    state_row = tl.load(row + b)
    params = values + state_row * PARAMS
    greedy = tl.load(params + GREEDY) != 0.0
    temperature, seed, start_position = tl.load(params + TEMPERATURE), tl.load(seeds + state_row), tl.load(n + b)
    start = tl.load(q_start + b)
    m = tl.full([], 0, tl.int32)
    k = m
    if HAS_DRAFTS:
        i = tl.arange(0, BLOCK_K)
        k = tl.minimum(tl.load(num_drafts + b), K).to(tl.int32)
        flat_row = tl.minimum(start + i, num_rows - 1)
        draft = tl.load(drafts + b * drafts_stride + i, mask=i < k, other=0)
        live = (i < k) & (draft >= 0) & (draft < V)
        if greedy:
            accepted = tl.load(ids + flat_row, mask=live, other=-1) == draft
        else:
            x = scaled(logits + flat_row * stride, draft, live, temperature)
            row_cut, row_lse = (
                tl.load(cut + flat_row, mask=live, other=0.0),
                tl.load(lse + flat_row, mask=live, other=0.0),
            )
            p = probability(x, row_cut, row_lse)
            pass_entry = i.to(tl.int64) * cut_stride + b
            x = scaled(draft_logits + i.to(tl.int64) * draft_stride_k + b * draft_stride_b, draft, live, temperature)
            q = probability(
                x,
                tl.load(draft_cut + pass_entry, mask=live, other=0.0),
                tl.load(draft_lse + pass_entry, mask=live, other=0.0),
            )
            accepted = uniform(seed, start_position + i, ACCEPT) * q < p
        m = first_rejected(accepted & live, i, BLOCK_K)
    if t == 0:
        tl.store(out_accepted + b, m.to(tl.int64))

    if greedy == 0:
        last = tl.minimum(start + m, num_rows - 1)
        threshold, norm = tl.load(cut + last), tl.load(lse + last)
        best = tl.full([BLOCK], -float("inf"), tl.float32)
        best_token = tl.full([BLOCK], NO_TOKEN, tl.int32)
        plain, plain_token = best, best_token
        for first in range(t * tile, tl.minimum(t * tile + tile, V), BLOCK):
            token = first + tl.arange(0, BLOCK)
            x = scaled(logits + last * stride, token, token < V, temperature)
            kept = is_kept(x, threshold) & (token < V)
            score = tl.full([BLOCK], -float("inf"), tl.float32)
            residual = score
            if tl.max(kept.to(tl.int32), axis=0) > 0:
                noise = gumbel(seed, start_position + m, _GUMBEL, first, BLOCK)
                score = tl.where(kept, x + noise, -float("inf"))
                if HAS_DRAFTS:  # noqa: SIM102 (a constant: without drafts nothing of it is compiled)
                    if m < k:
                        pass_entry = m.to(tl.int64) * cut_stride + b
                        draft_row = draft_logits + m.to(tl.int64) * draft_stride_k + b * draft_stride_b
                        drawn_from = scaled(draft_row, token, token < V, temperature)
                        q = probability(drawn_from, tl.load(draft_cut + pass_entry), tl.load(draft_lse + pass_entry))
                        excess = tl.where(kept, probability(x, threshold, norm) - q, 0.0)
                        left = excess > 0.0
                        residual = tl.where(left, tl.log(tl.where(left, excess, 1.0)) + noise, -float("inf"))
            plain, plain_token = keep_better(plain, plain_token, score, token, token < V)
            if HAS_DRAFTS:
                best, best_token = keep_better(best, best_token, residual, token, token < V)
        out = b * 2 * tile_stride + t
        value, token = first_best(plain, plain_token, plain_token < V)
        tl.store(tile_value + out + tile_stride, value)
        tl.store(tile_id + out + tile_stride, token)
        if HAS_DRAFTS:
            value, token = first_best(best, best_token, best_token < V)
            tl.store(tile_value + out, value)
            tl.store(tile_id + out, token)


@triton.jit(do_not_specialize=["num_rows", "K", "num_tiles", "drafts_stride", "tokens_stride"])
def finish_rejection_kernel(  # type: ignore[no-untyped-def]
    ids,
    q_start,
    drafts,
    num_drafts,
    row,
    values,
    tile_value,
    tile_id,
    out_accepted,
    out_tokens,
    num_rows,
    K,
    drafts_stride,
    tokens_stride,
    num_tiles,
    tile_stride,
    HAS_DRAFTS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write the token after the m accepted drafts: from the residual if a draft was rejected and the residual is not
    empty, else from p."""
    b = tl.program_id(0).to(tl.int64)
    m = tl.load(out_accepted + b)
    if tl.load(values + tl.load(row + b) * PARAMS + GREEDY) != 0.0:
        last = tl.load(ids + tl.minimum(tl.load(q_start + b) + m, num_rows - 1))
    else:
        at = b * 2 * tile_stride
        _, token = combine_tiles(tile_value + at + tile_stride, tile_id + at + tile_stride, num_tiles, TILES)
        if HAS_DRAFTS:  # noqa: SIM102
            if m < tl.minimum(tl.load(num_drafts + b), K):
                best, of_residual = combine_tiles(tile_value + at, tile_id + at, num_tiles, TILES)
                token = tl.where(best > -float("inf"), of_residual, token)
        last = token.to(tl.int64)
    i = tl.arange(0, BLOCK_K)
    draft = tl.load(drafts + b * drafts_stride + i, mask=i < m, other=0)
    tl.store(out_tokens + b * tokens_stride + i, tl.where(i < m, draft, last), mask=i <= K)


def rejection(
    p: Distribution,
    q: Distribution,
    drafted: Drafted,
    row: Tensor,
    n: Tensor,
    params: RowParams,
    out: Accepted,
    scratch: SamplingScratch,
) -> None:
    """Accept drafts by speculative sampling and draw the token after them, as `rules.verify_rejection` describes.
    Mutates `out` and `scratch`."""
    torch.ops.specrs.rejection(
        [p.logits, p.cut, p.lse],
        [q.logits, q.cut, q.lse],
        [drafted.q_start, drafted.drafts, drafted.num_drafts],
        row,
        n,
        [params.values, params.seeds],
        [out.accepted, out.emitted],
        [scratch.ids, scratch.tile_value, scratch.tile_id],
    )


@torch.library.custom_op("specrs::rejection", mutates_args=["out", "scratch"])
def _rejection(
    p: list[Tensor],
    q: list[Tensor],
    drafted: list[Tensor],
    row: Tensor,
    n: Tensor,
    params: list[Tensor],
    out: list[Tensor],
    scratch: list[Tensor],
) -> None:
    (logits, cut, lse), (draft_logits, draft_cut, draft_lse) = p, q
    (q_start, drafts, num_drafts), (values, seeds) = drafted, params
    (out_accepted, out_tokens), (ids, tile_value, tile_id) = out, scratch
    num_rows, vocab_size = logits.shape
    batch, k = drafts.shape
    tile = tile_of(batch, vocab_size)
    num_tiles, tile_stride = triton.cdiv(vocab_size, tile), tile_value.shape[2]
    some, block_k = k > 0, triton.next_power_of_2(k + 1)
    tile_rejection_kernel[(num_tiles, batch)](
        logits,
        cut,
        lse,
        ids,
        draft_logits if some else logits,
        draft_cut if some else cut,
        draft_lse if some else lse,
        q_start,
        drafts if some else ids,
        num_drafts,
        row,
        n,
        values,
        seeds,
        tile_value,
        tile_id,
        out_accepted,
        num_rows,
        k,
        vocab_size,
        logits.stride(0),
        draft_logits.stride(0),
        draft_logits.stride(1),
        draft_cut.stride(0),
        drafts.stride(0),
        tile,
        tile_stride,
        HAS_DRAFTS=some,
        BLOCK_K=block_k,
        BLOCK=BLOCK,
        num_warps=8,
        enable_fp_fusion=True,
    )
    finish_rejection_kernel[(batch,)](
        ids,
        q_start,
        drafts if some else ids,
        num_drafts,
        row,
        values,
        tile_value,
        tile_id,
        out_accepted,
        out_tokens,
        num_rows,
        k,
        drafts.stride(0),
        out_tokens.stride(0),
        num_tiles,
        tile_stride,
        HAS_DRAFTS=some,
        TILES=triton.next_power_of_2(tile_stride),
        BLOCK_K=block_k,
        enable_fp_fusion=True,
    )


@_rejection.register_fake
def _(
    p: list[Tensor],
    q: list[Tensor],
    drafted: list[Tensor],
    row: Tensor,
    n: Tensor,
    params: list[Tensor],
    out: list[Tensor],
    scratch: list[Tensor],
) -> None:
    expect_sequences(drafted, out)
    (logits, cut, lse), (draft_logits, draft_cut, draft_lse), drafts = p, q, drafted[1]
    (batch, k), (rows, vocab_size) = drafts.shape, logits.shape
    expect("logits", logits, (rows, vocab_size), torch.float32)
    expect("cut", cut, (rows,), torch.float32)
    expect("lse", lse, (rows,), torch.float64)
    expect("draft_logits", draft_logits, (k, batch, vocab_size), torch.float32)
    expect("draft_cut", draft_cut, (k, batch), torch.float32)
    expect("draft_lse", draft_lse, (k, batch), torch.float64)
    if k and draft_cut.stride() != draft_lse.stride():
        raise ValueError(f"draft_lse: strides {draft_lse.stride()}, must be those of draft_cut, {draft_cut.stride()}")
    expect("row", row, (batch,), torch.int64)
    expect("n", n, (batch,), torch.int64)


def rejection_reference(
    p: Tensor, q: Tensor, q_start: Tensor, drafts: Tensor, num_drafts: Tensor, uniforms: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """Return `(num_accepted, tokens)` in torch, from probabilities p `[N, V]` and q `[B, K, V]`, uniforms `[B, K]`, and
    the noise `[B, K + 1, V]` of each position."""
    accepted = count_accepted(p, q_start, q, drafts, num_drafts, uniforms)
    own = noise[torch.arange(len(noise)), accepted]
    return accepted, append_token(drafts, accepted, draw_after(p, q_start, q, num_drafts, accepted, own))


def _variants() -> tuple[Variant, ...]:
    floats = ("logits", "cut", "draft_logits", "draft_cut", "values", "tile_value")
    types = {
        **dict.fromkeys((*_SCALARS, "V", "stride"), "i32"),
        **dict.fromkeys(floats, "*fp32"),
        **dict.fromkeys(("lse", "draft_lse"), "*fp64"),
        "tile_id": "*i32",
    }

    def variant(name: str, fn: triton.JITFunction, num_warps: int, **constants: int) -> Variant:
        signature = {arg: types.get(arg, "*i64") for arg in fn.arg_names if arg not in constants}
        return Variant(name, fn, signature, constants, num_warps)

    return (
        *(
            variant(f"tile_rejection_k{k}", tile_rejection_kernel, 8, HAS_DRAFTS=k > 0, BLOCK_K=block, BLOCK=BLOCK)
            for k, block in ((5, 8), (0, 1))
        ),
        *(
            variant(f"finish_rejection_k{k}", finish_rejection_kernel, 4, HAS_DRAFTS=k > 0, TILES=256, BLOCK_K=block)
            for k, block in ((5, 8), (0, 1))
        ),
    )


VARIANTS = _variants()
