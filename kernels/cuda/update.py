"""End of an iteration on the device: commits tokens, applies stops and limits, and reports. Decides no acceptance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl
from specrs.core import (
    FINISH_LENGTH,
    FINISH_STOP,
    FLAG_CAPACITY,
    FLAG_DRAFT_NON_FINITE,
    FLAG_NO_TOKEN_ALLOWED,
    FLAG_TARGET_NON_FINITE,
    MAX_STOP_IDS,
)
from specrs.kernels.cuda.hidden_states import Kept
from specrs.kernels.cuda.row_state import HiddenTensors, RowTensors, Sequences
from specrs.kernels.cuda.variants import Variant
from torch import Tensor

_TARGET_NON_FINITE = tl.constexpr(FLAG_TARGET_NON_FINITE)
_DRAFT_NON_FINITE = tl.constexpr(FLAG_DRAFT_NON_FINITE)
_NO_TOKEN_ALLOWED = tl.constexpr(FLAG_NO_TOKEN_ALLOWED)
_CAPACITY = tl.constexpr(FLAG_CAPACITY)
_STOP = tl.constexpr(FINISH_STOP)
_LENGTH = tl.constexpr(FINISH_LENGTH)


@triton.jit
def _is_finite(x):  # type: ignore[no-untyped-def]
    return (x == x) & (tl.abs(x) != float("inf"))


@triton.jit(
    do_not_specialize=[
        "padding_row",
        "tokens_stride",
        "results_stride",
        "K",
        "stride",
        "emitted_stride",
        "num_unfed",
        "keeps_drafts",
        "hidden_width",
        "is_prompt",
    ],
    # Views of the results from any sequence on, see `prepare_kernel`.
    do_not_specialize_on_alignment=[
        "out_emitted_ptr",
        "out_accepted_ptr",
        "out_drafted_ptr",
        "out_flags_ptr",
        "out_finish_ptr",
        "out_tokens_ptr",
    ],
)
def update_kernel(  # type: ignore[no-untyped-def]
    row_ptr,
    n_ptr,
    k_ptr,
    alive_ptr,
    capacity_ptr,
    q_start_ptr,
    accepted_ptr,
    emitted_ptr,
    target_top_ptr,
    allowed_top_ptr,
    draft_top_ptr,
    num_tokens_ptr,
    draft_len_ptr,
    limit_ptr,
    min_len_ptr,
    active_ptr,
    tokens_ptr,
    stop_ids_ptr,
    on_host_ptr,
    hidden_start_ptr,
    keep_first_ptr,
    keep_count_ptr,
    out_emitted_ptr,
    out_accepted_ptr,
    out_drafted_ptr,
    out_flags_ptr,
    out_finish_ptr,
    out_tokens_ptr,
    padding_row,
    tokens_stride,
    results_stride,
    K,
    stride,
    emitted_stride,
    num_unfed,
    keeps_drafts,
    hidden_width,
    is_prompt,
    S: tl.constexpr,
    HAS_HOST: tl.constexpr,
    READS_HIDDEN: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    b = tl.program_id(0)
    j = tl.arange(0, BLOCK_K)
    row, n, k = tl.load(row_ptr + b), tl.load(n_ptr + b), tl.load(k_ptr + b)
    alive = tl.load(alive_ptr + b) != 0
    accepted = tl.minimum(tl.maximum(tl.load(accepted_ptr + b), 0), k)
    tokens = tl.load(emitted_ptr + b * emitted_stride + j, mask=j <= K, other=0)

    # Rows after `accepted`, or after the first in which no token is allowed, are not reached by plain decoding.
    live = j < tl.where(alive, accepted + 1, 0)
    row_at = tl.load(q_start_ptr + b) + j
    is_sound = _is_finite(tl.load(target_top_ptr + row_at, mask=live, other=0.0))
    allowed_top = tl.load(allowed_top_ptr + row_at, mask=live, other=0.0)
    first_empty = tl.min(tl.where(live & is_sound & (allowed_top == -float("inf")), j, K + 1))
    finite = tl.sum(tl.where(is_sound | (j > first_empty), 0, 1)) == 0
    has_token = first_empty > 0
    # The draft that leads to the empty row is the last token: the next iteration begins with that row.
    accepted = tl.minimum(accepted, tl.maximum(first_empty - 1, 0))

    # Draft j, reported after what is emitted where it was rejected.
    draft = tl.load(tokens_ptr + row * tokens_stride + n + j - 1, mask=(j > accepted) & (j <= k), other=0)

    fits = n + k <= tl.load(capacity_ptr + b)
    flags = tl.where(finite, 0, _TARGET_NON_FINITE) | tl.where(fits, 0, _CAPACITY)
    flags |= tl.where(has_token, 0, _NO_TOKEN_ALLOWED)
    passes = k  # whose drafts and KV are those of passes
    if HAS_HOST:
        passes = tl.where(tl.load(on_host_ptr + b) != 0, 0, k)
    if K > 0:
        top = tl.load(draft_top_ptr + j * stride + b, mask=j < passes, other=0.0)
        flags |= tl.where(tl.sum(tl.where(_is_finite(top), 0, 1)) == 0, 0, _DRAFT_NON_FINITE)
    good = alive & finite & has_token & fits

    stops = tl.load(stop_ids_ptr + row * S + tl.arange(0, S))
    is_stop = tl.sum((tokens[:, None] == stops[None, :]).to(tl.int32), axis=1) > 0
    is_stop = is_stop & (j <= accepted) & (n + j >= tl.load(min_len_ptr + row))
    first_stop = tl.min(tl.where(is_stop, j, K + 1))
    emitted = tl.where(good, tl.minimum(accepted, first_stop) + 1, 0)
    grown = n + emitted

    tl.debug_barrier()  # the last token takes the place of the first rejected draft, which another thread reads
    tl.store(tokens_ptr + row * tokens_stride + n + j, tokens, mask=j < emitted)
    goes_on = good & (first_stop == K + 1) & (grown < tl.load(limit_ptr + row))
    if alive:
        tl.store(num_tokens_ptr + row, grown)
        tl.store(active_ptr + row, goes_on.to(tl.int1))
        if good & (passes > 0) & (num_unfed >= 0):
            tl.store(draft_len_ptr + row, tl.minimum(grown - 1, n + k * keeps_drafts - num_unfed))

    if READS_HIDDEN:
        # What drafts were made of is given up, and what no longer fits before the new; a prompt leaves its last alone.
        start = tl.load(hidden_start_ptr + row)
        start = tl.where((passes > 0) | (grown - 1 - start > hidden_width) | (is_prompt != 0), n - 1, start)
        tl.store(keep_first_ptr + b, n - 1 - start)
        tl.store(keep_count_ptr + b, emitted.to(tl.int64))
        if emitted > 0:
            tl.store(hidden_start_ptr + row, start)

    # Results after the step's sequences are those of its prompt chunks.
    if row != padding_row:
        tl.store(out_emitted_ptr + b, emitted)
        tl.store(out_accepted_ptr + b, tl.where(good, accepted, 0))
        tl.store(out_drafted_ptr + b, tl.where(good, k, 0))
        tl.store(out_flags_ptr + b, tl.where(alive, flags, 0).to(tl.int64))
        ended = tl.where(first_stop == K + 1, _LENGTH, _STOP)
        tl.store(out_finish_ptr + b, tl.where(good & ~goes_on, ended, 0).to(tl.int64))
        told = tl.where((j > accepted) & (j <= k), draft, tokens)
        tl.store(out_tokens_ptr + b * results_stride + j, told, mask=j <= K)


@dataclass(frozen=True, slots=True)
class Decided:
    """Results of verification for B sequences."""

    accepted: Tensor
    """[B] int64, number of accepted drafts; limited to [0, K_r], whatever a rule writes."""
    emitted: Tensor
    """[B, K + 1] int64, any row stride, meaningless past `accepted`. K is that of this step."""
    target_top: Tensor
    """[N] fp32, largest logit of each flat row before masks; not finite if the row is faulty."""
    draft_top: Tensor
    """[K, B] fp32, any row stride: largest logit of each draft pass; not finite if it is faulty."""
    num_unfed: int | None
    """Number of a sequence's drafts that the drafter was not fed (`num_unfed_drafts`). The end of valid draft KV
    follows from it. None: draft KV stays as it was."""
    keeps_drafts: bool = True
    """True if draft KV of accepted drafts counts as written (`keeps_draft_kv` of the drafter)."""
    on_host: Tensor | None = None
    """[B] int64, 1 for sequences whose drafts come from no pass. None: there are none."""
    allowed_top: Tensor | None = None
    """[N] fp32, largest logit of each flat row after masks, -inf if no token is allowed. None: nothing is masked."""


class Reported(Protocol):
    """Results of the sequences, int64 sections of the results buffer. `specrs.backends.cuda.slots.Results` has these
    members."""

    @property
    def num_emitted(self) -> Tensor:
        """[B], number of emitted tokens."""

    @property
    def num_accepted(self) -> Tensor:
        """[B], number of accepted drafts."""

    @property
    def num_drafted(self) -> Tensor:
        """[B], number of drafts."""

    @property
    def flags(self) -> Tensor:
        """[B], FLAG_* bits"""

    @property
    def finish_reason(self) -> Tensor:
        """[B], FINISH_NONE, FINISH_STOP or FINISH_LENGTH"""

    @property
    def tokens(self) -> Tensor:
        """[B, engine's K + 1]: the emitted tokens, then from column `num_accepted` + 1 on the rejected drafts."""


def update_rows(
    rows: RowTensors,
    sequences: Sequences,
    decided: Decided,
    out: Reported,
    hidden: tuple[HiddenTensors, Kept, bool] | None = None,
) -> None:
    """Commit the emitted tokens of B sequences, apply stops and limits, and report. The reference is
    `update_reference`.

    A sequence that is not alive reports zeros and leaves its row as it is; padding reports nothing. A sequence emits
    nothing and becomes inactive if a flat row up to `accepted` is not finite, if no token is allowed in its first flat
    row, or if it would exceed its capacity. If no token is allowed in a later flat row, the draft that leads to it is
    the last token emitted, and flat rows after it are not checked.

    `hidden` is for a drafter that reads hidden states: the states that are kept; where `keep_states` will put those of
    the committed tokens; and True if the sequences are ends of prompts, of which only the last state is kept.

    Mutates num_tokens, draft_len, active and tokens of `rows`, `out`, and `start` of the hidden states.
    """
    allowed_top = decided.target_top if decided.allowed_top is None else decided.allowed_top
    said = [decided.accepted, decided.emitted, decided.target_top, allowed_top, decided.draft_top]
    state = [rows.num_tokens, rows.draft_len, rows.limit, rows.min_len, rows.active, rows.tokens]
    results = [out.num_emitted, out.num_accepted, out.num_drafted, out.flags, out.finish_reason, out.tokens]
    num_unfed = -1 if decided.num_unfed is None else decided.num_unfed
    on_host = [] if decided.on_host is None else [decided.on_host]
    left = [num_unfed, int(decided.keeps_drafts)]
    keeps: list[Tensor] = []
    if hidden is not None:
        kept, into, is_prompt = hidden
        keeps = [kept.start, into.first, into.count]
        left += [kept.states.shape[1] - 1, int(is_prompt)]
    torch.ops.specrs.update_rows([*sequences.tensors(), *said], state, rows.stop_ids, on_host, results, left, keeps)


def update_reference(
    rows: RowTensors,
    sequences: Sequences,
    decided: Decided,
    out: Reported,
    hidden: tuple[HiddenTensors, Kept, bool] | None = None,
) -> None:
    """Reference for `update_rows`, one sequence after the other."""
    for b, row in enumerate(sequences.row.tolist()):
        if row == rows.num_tokens.shape[0] - 1:  # padding
            continue
        n, k, first, alive, capacity = (
            int(each[b]) for each in (sequences.n, sequences.k, sequences.q_start, sequences.alive, sequences.capacity)
        )
        passes = 0 if decided.on_host is not None and decided.on_host[b] else k
        accepted = min(max(int(decided.accepted[b]), 0), k)
        tops = decided.target_top[first : first + accepted + 1]
        allowed = tops if decided.allowed_top is None else decided.allowed_top[first : first + accepted + 1]
        empty = [i for i, top in enumerate(allowed.tolist()) if tops[i].isfinite() and top == -math.inf]
        reached = empty[0] if empty else accepted
        flags = 0 if tops[: reached + 1].isfinite().all() else FLAG_TARGET_NON_FINITE
        flags |= FLAG_CAPACITY if n + k > capacity else 0
        flags |= FLAG_NO_TOKEN_ALLOWED if empty and reached == 0 else 0
        good = alive and not flags
        flags |= 0 if decided.draft_top[:passes, b].isfinite().all() else FLAG_DRAFT_NON_FINITE
        accepted = max(reached - 1, 0) if empty else accepted
        tokens, drafts = decided.emitted[b].tolist(), rows.tokens[row, n : n + k].tolist()
        emitted, is_stop = 0, False
        while good and emitted <= accepted and not is_stop:
            is_stop = n + emitted >= int(rows.min_len[row]) and tokens[emitted] in rows.stop_ids[row].tolist()
            emitted += 1
        grown = n + emitted
        goes_on = bool(good and not is_stop and grown < rows.limit[row])
        rows.tokens[row, n:grown] = decided.emitted[b, :emitted]
        if alive:
            rows.num_tokens[row], rows.active[row] = grown, goes_on
        if good and passes and decided.num_unfed is not None:
            rows.draft_len[row] = min(grown - 1, n + k * decided.keeps_drafts - decided.num_unfed)
        if hidden is not None:
            kept, into, is_prompt = hidden
            start = int(kept.start[row])
            if passes or is_prompt or grown - 1 - start > kept.states.shape[1] - 1:
                start = n - 1
            into.first[b], into.count[b] = n - 1 - start, emitted
            kept.start[row] = start if emitted else kept.start[row]
        out.num_emitted[b] = emitted
        out.num_accepted[b], out.num_drafted[b] = (accepted, k) if good else (0, 0)
        out.flags[b] = flags if alive else 0
        out.finish_reason[b] = 0 if not good or goes_on else FINISH_STOP if is_stop else FINISH_LENGTH
        tokens[accepted + 1 : k + 1] = drafts[accepted:]
        out.tokens[b, : len(tokens)] = torch.tensor(tokens)


@torch.library.custom_op("specrs::update_rows", mutates_args=["state", "results", "keeps"])
def _update_rows(
    read: list[Tensor],
    state: list[Tensor],
    stop_ids: Tensor,
    on_host: list[Tensor],
    results: list[Tensor],
    left: list[int],
    keeps: list[Tensor],
) -> None:
    """Launch the kernel of `update_rows`. Tensors are in the order of the kernel's pointers. `left`: how much of the
    draft KV is valid after drafting."""
    emitted, draft_top = read[7], read[10]
    num_tokens, tokens, out_tokens = state[0], state[5], results[5]
    batch, width = emitted.shape
    update_kernel[(batch,)](
        *read,
        *state,
        stop_ids,
        on_host[0] if on_host else num_tokens,
        *(keeps or [num_tokens] * 3),
        *results,
        num_tokens.shape[0] - 1,
        tokens.stride(0),
        out_tokens.stride(0),
        width - 1,
        draft_top.stride(0),
        emitted.stride(0),
        *(left if keeps else [*left, 0, 0]),
        S=stop_ids.shape[1],
        HAS_HOST=bool(on_host),
        READS_HIDDEN=bool(keeps),
        BLOCK_K=triton.next_power_of_2(out_tokens.shape[1]),
        num_warps=1,
        enable_fp_fusion=True,
    )


@_update_rows.register_fake
def _(
    read: list[Tensor],
    state: list[Tensor],
    stop_ids: Tensor,
    on_host: list[Tensor],
    results: list[Tensor],
    left: list[int],
    keeps: list[Tensor],
) -> None:
    return None


def _variants() -> tuple[Variant, ...]:
    constants = ("S", "HAS_HOST", "READS_HIDDEN", "BLOCK_K")
    types = {
        "target_top_ptr": "*fp32",
        "allowed_top_ptr": "*fp32",
        "draft_top_ptr": "*fp32",
        "active_ptr": "*i1",
        "padding_row": "i32",
        "tokens_stride": "i32",
        "results_stride": "i32",
        "K": "i32",
        "stride": "i32",
        "emitted_stride": "i32",
        "num_unfed": "i32",
        "keeps_drafts": "i32",
        "hidden_width": "i32",
        "is_prompt": "i32",
    }
    signature = {name: types.get(name, "*i64") for name in update_kernel.arg_names if name not in constants}
    return tuple(
        Variant(
            f"update_{name}",
            update_kernel,
            signature,
            {"S": MAX_STOP_IDS, "HAS_HOST": has_host, "READS_HIDDEN": reads_hidden, "BLOCK_K": block},
            num_warps=1,
        )
        for name, has_host, reads_hidden, block in (
            ("k0", False, False, 1),
            ("k7", False, False, 8),
            ("list", True, False, 8),
            ("hidden", True, True, 8),
        )
    )


VARIANTS = _variants()
