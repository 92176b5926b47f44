"""Which drafts stand where the target's own tokens are known: the longest prefix that equals them, or, for timing
only, as many as given rates say. Draws nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from specrs.core import PURPOSE_ACCEPT
from specrs.kernels.cuda.philox import uniform
from specrs.kernels.cuda.sampling_scratch import expect
from specrs.kernels.cuda.variants import Variant
from specrs.verify.greedy import verify_greedy as verify_greedy_torch
from torch import Tensor

ACCEPT = tl.constexpr(PURPOSE_ACCEPT)


def expect_entries(
    q_start: Tensor, drafts: Tensor, num_drafts: Tensor, out_accepted: Tensor, out_tokens: Tensor
) -> None:
    """`expect` of what every rule gets of its B entries."""
    batch, k = drafts.shape
    expect("drafts", drafts, (batch, k), torch.int64)
    expect("q_start", q_start, (batch + 1,), torch.int64)
    expect("num_drafts", num_drafts, (batch,), torch.int64)
    expect("accepted", out_accepted, (batch,), torch.int64)
    expect("emitted", out_tokens, (batch, k + 1), torch.int64)


@triton.jit
def is_accepted_at_rate(rates, seed, position, i, live):  # type: ignore[no-untyped-def]
    """Synthetic acceptance of draft i given that those before it stand: u < rate_i / rate_(i-1), without division."""
    rate = tl.load(rates + i, mask=live, other=0.0)
    before = tl.load(rates + i - 1, mask=live & (i > 0), other=1.0)
    return uniform(seed, position + i, ACCEPT) * before < rate


@triton.jit
def first_rejected(accepted, i, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Number of leading columns that are accepted."""
    return tl.min(tl.where(accepted, BLOCK_K, i), axis=0)


@triton.jit(do_not_specialize=["num_rows", "K", "drafts_stride", "tokens_stride"])
def accept_kernel(  # type: ignore[no-untyped-def]
    target_ids,
    q_start,
    drafts,
    num_drafts,
    rates,
    seeds,
    row,
    n,
    out_accepted,
    out_tokens,
    num_rows,
    K,
    drafts_stride,
    tokens_stride,
    SYNTHETIC: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_K)
    k = tl.minimum(tl.load(num_drafts + b), K)
    live = i < k
    at = tl.load(q_start + b) + i
    own = tl.load(target_ids + at, mask=(i <= k) & (at < num_rows), other=0)
    draft = tl.load(drafts + b * drafts_stride + i, mask=live, other=0)
    if SYNTHETIC:
        accepted = is_accepted_at_rate(rates, tl.load(seeds + tl.load(row + b)), tl.load(n + b), i, live)
    else:
        accepted = draft == own
    m = first_rejected(accepted & live, i, BLOCK_K)
    tl.store(out_accepted + b, m.to(tl.int64))
    tl.store(out_tokens + b * tokens_stride + i, tl.where(i < m, draft, own), mask=i <= K)


@torch.library.custom_op("specrs::accept_prefix", mutates_args=["out_accepted", "out_tokens"])
def accept_prefix(
    target_ids: Tensor,
    q_start: Tensor,
    drafts: Tensor,
    num_drafts: Tensor,
    out_accepted: Tensor,
    out_tokens: Tensor,
    rates: Tensor | None,
    seeds: Tensor | None,
    row: Tensor | None,
    n: Tensor | None,
) -> None:
    """The op behind `rules.verify_greedy` and others, which say what the arguments are; rates, seeds, row and n go
    together."""
    batch, k = drafts.shape
    synthetic = rates is not None
    accept_kernel[(batch,)](
        target_ids,
        q_start,
        drafts if k else target_ids,
        num_drafts,
        rates if synthetic and k else target_ids,
        seeds if synthetic else target_ids,
        row if synthetic else target_ids,
        n if synthetic else target_ids,
        out_accepted,
        out_tokens,
        target_ids.shape[0],
        k,
        drafts.stride(0),
        out_tokens.stride(0),
        SYNTHETIC=synthetic and k > 0,
        BLOCK_K=triton.next_power_of_2(k + 1),
        num_warps=1,
        enable_fp_fusion=True,
    )


@accept_prefix.register_fake
def _(
    target_ids: Tensor,
    q_start: Tensor,
    drafts: Tensor,
    num_drafts: Tensor,
    out_accepted: Tensor,
    out_tokens: Tensor,
    *rest: object,
) -> None:
    expect_entries(q_start, drafts, num_drafts, out_accepted, out_tokens)
    expect("target_ids", target_ids, target_ids.shape, torch.int64)


def accept_prefix_reference(
    target_ids: Tensor, q_start: Tensor, drafts: Tensor, num_drafts: Tensor
) -> tuple[Tensor, Tensor]:
    """`(num_accepted, tokens)` of `accept_prefix` without rates, in torch."""
    index = torch.minimum(q_start[:-1, None] + torch.arange(drafts.shape[1] + 1), q_start[1:, None] - 1)
    return verify_greedy_torch(target_ids[index], drafts, num_drafts)


VARIANTS = tuple(
    Variant(
        f"accept_{name}",
        accept_kernel,
        {
            arg: "i32" if arg in ("num_rows", "K", "drafts_stride", "tokens_stride") else "*i64"
            for arg in accept_kernel.arg_names[:-2]
        }
        | {"rates": "*fp32" if synthetic else "*i64"},
        {"SYNTHETIC": synthetic, "BLOCK_K": 8},
        num_warps=1,
    )
    for name, synthetic in (("prefix", False), ("synthetic", True))
)
