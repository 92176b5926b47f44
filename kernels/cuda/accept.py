"""Accepts drafts if the target's own tokens are known: the longest prefix that equals them or, for timing only, as many
as given rates say. Draws nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from specrs.core import PURPOSE_ACCEPT
from specrs.kernels.cuda.philox import uniform
from specrs.kernels.cuda.sampling_scratch import expect
from specrs.kernels.cuda.sampling_structs import Accepted, Drafted
from specrs.kernels.cuda.variants import Variant
from specrs.verify.greedy import verify_greedy as verify_greedy_torch
from torch import Tensor

ACCEPT = tl.constexpr(PURPOSE_ACCEPT)


def expect_sequences(drafted: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """Check the tensors that every rule gets for its B sequences: the fields of a `Drafted` and of an `Accepted`.
    Raises ValueError for a wrong shape or dtype."""
    (q_start, drafts, num_drafts), (accepted, emitted) = drafted, out
    batch, k = drafts.shape
    expect("drafts", drafts, (batch, k), torch.int64)
    expect("q_start", q_start, (batch + 1,), torch.int64)
    expect("num_drafts", num_drafts, (batch,), torch.int64)
    expect("accepted", accepted, (batch,), torch.int64)
    expect("emitted", emitted, (batch, k + 1), torch.int64)


@triton.jit
def is_accepted_at_rate(rates, seed, position, i, live):  # type: ignore[no-untyped-def]
    """Decide the synthetic acceptance of draft i, given that the drafts before it are accepted: u < rate_i /
    rate_(i-1), without division."""
    rate = tl.load(rates + i, mask=live, other=0.0)
    before = tl.load(rates + i - 1, mask=live & (i > 0), other=1.0)
    return uniform(seed, position + i, ACCEPT) * before < rate


@triton.jit
def first_rejected(accepted, i, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the number of leading columns that are accepted."""
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
    only,
    out_accepted,
    out_tokens,
    num_rows,
    K,
    drafts_stride,
    tokens_stride,
    SYNTHETIC: tl.constexpr,
    SOME: tl.constexpr,
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
    last = K
    if SOME:
        last = tl.where(tl.load(only + b) != 0, K, -1)
    tl.store(out_accepted + b, m.to(tl.int64), mask=last >= 0)
    tl.store(out_tokens + b * tokens_stride + i, tl.where(i < m, draft, own), mask=i <= last)


def accept_prefix(target_ids: Tensor, drafted: Drafted, out: Accepted, at_rates: AtRates | None = None) -> None:
    """Accept the longest prefix of the drafts that equals `target_ids` `[N]` int64, or with `at_rates` as many as the
    rates say. See `rules`."""
    synthetic = [] if at_rates is None else [at_rates.rates, at_rates.seeds, at_rates.row, at_rates.n]
    torch.ops.specrs.accept_prefix(
        target_ids,
        [drafted.q_start, drafted.drafts, drafted.num_drafts],
        [out.accepted, out.emitted],
        synthetic,
        [] if out.only is None else [out.only],
    )


@dataclass(frozen=True, slots=True)
class AtRates:
    """Acceptance at given rates, for timing only."""

    rates: Tensor
    """[>= K] fp32 in [0, 1], not increasing: the unconditional rate at which each draft is accepted."""
    seeds: Tensor
    """[R + 1] int64, seed of each state row."""
    row: Tensor
    """State row of each sequence, [B] int64."""
    n: Tensor
    """[B] int64, number of tokens of each sequence."""


@torch.library.custom_op("specrs::accept_prefix", mutates_args=["out"])
def _accept_prefix(
    target_ids: Tensor, drafted: list[Tensor], out: list[Tensor], at_rates: list[Tensor], only: list[Tensor]
) -> None:
    (q_start, drafts, num_drafts), (out_accepted, out_tokens) = drafted, out
    batch, k = drafts.shape
    rates, seeds, row, n = at_rates or [target_ids] * 4
    accept_kernel[(batch,)](
        target_ids,
        q_start,
        drafts if k else target_ids,
        num_drafts,
        rates if k else target_ids,
        seeds,
        row,
        n,
        only[0] if only else num_drafts,
        out_accepted,
        out_tokens,
        target_ids.shape[0],
        k,
        drafts.stride(0),
        out_tokens.stride(0),
        SYNTHETIC=bool(at_rates) and k > 0,
        SOME=bool(only),
        BLOCK_K=triton.next_power_of_2(k + 1),
        num_warps=1,
        enable_fp_fusion=True,
    )


@_accept_prefix.register_fake
def _(target_ids: Tensor, drafted: list[Tensor], out: list[Tensor], at_rates: list[Tensor], only: list[Tensor]) -> None:
    expect_sequences(drafted, out)
    expect("target_ids", target_ids, target_ids.shape, torch.int64)


def accept_prefix_reference(
    target_ids: Tensor, q_start: Tensor, drafts: Tensor, num_drafts: Tensor
) -> tuple[Tensor, Tensor]:
    """Return `(num_accepted, tokens)`: reference in torch for `accept_prefix` without `at_rates`."""
    index = torch.minimum(q_start[:-1, None] + torch.arange(drafts.shape[1] + 1), q_start[1:, None] - 1)
    return verify_greedy_torch(target_ids[index], drafts, num_drafts)


VARIANTS = tuple(
    Variant(
        f"accept_{name}",
        accept_kernel,
        {
            arg: "i32" if arg in ("num_rows", "K", "drafts_stride", "tokens_stride") else "*i64"
            for arg in accept_kernel.arg_names[:-3]
        }
        | {"rates": "*fp32" if synthetic else "*i64"},
        {"SYNTHETIC": synthetic, "SOME": some, "BLOCK_K": 8},
        num_warps=1,
    )
    for name, synthetic, some in (("prefix", False, False), ("synthetic", True, False), ("some", False, True))
)
