"""The verification rules on the device, one function each; `specrs.verify` has the references. Runs no model.

What each does to B entries whose flat rows are q_start[b] .. q_start[b + 1]; row q_start[b] + i gives the distribution
of position n_b + i. Everywhere:

    q_start     [B + 1] int64; an entry has at least num_drafts + 1 rows; padding may have none
    drafts      [B, K] int64, any row stride; columns from num_drafts on may be anything
    num_drafts  [B] int64, K_r after the device's guards; more than K counts as K
    row, n      [B] int64, state row and number of tokens of each entry
    values      [R + 1, 8] fp32 of `SamplingRows`; seeds [R + 1] int64
    accepted    [B] int64, written: m
    emitted     [B, K + 1] int64, any row stride, written: d_1 .. d_m and the token after them; some ids past m

Each K is compiled up to the next power of two, so warm them up before a capture.
"""

from __future__ import annotations

from specrs.core import PURPOSE_GUMBEL
from specrs.kernels.cuda.accept import accept_prefix
from specrs.kernels.cuda.draw import draw
from specrs.kernels.cuda.rejection import rejection
from specrs.kernels.cuda.sampling_scratch import SamplingScratch
from torch import Tensor


def verify_greedy(
    target_ids: Tensor, q_start: Tensor, drafts: Tensor, num_drafts: Tensor, accepted: Tensor, emitted: Tensor
) -> None:
    """Accept while the draft equals the target's argmax, `target_ids` `[N]` int64. One launch."""
    accept_prefix(target_ids, q_start, drafts, num_drafts, accepted, emitted, None, None, None, None)


def verify_synthetic(
    target_ids: Tensor,
    q_start: Tensor,
    drafts: Tensor,
    num_drafts: Tensor,
    rates: Tensor,
    seeds: Tensor,
    row: Tensor,
    n: Tensor,
    accepted: Tensor,
    emitted: Tensor,
) -> None:
    """For timing only: accept draft i of those left with probability rates[i] / rates[i - 1], whatever it is.

    Args:
        target_ids: `[N]` int64, where the token after the drafts comes from.
        rates: `[>= K]` fp32 in [0, 1], not increasing: the unconditional rate at which draft i is to stand.

    One launch.
    """
    accept_prefix(target_ids, q_start, drafts, num_drafts, accepted, emitted, rates, seeds, row, n)


def verify_coupled(
    logits: Tensor,
    row_of: Tensor,
    values: Tensor,
    cut: Tensor,
    seeds: Tensor,
    positions: Tensor,
    q_start: Tensor,
    drafts: Tensor,
    num_drafts: Tensor,
    accepted: Tensor,
    emitted: Tensor,
    scratch: SamplingScratch,
) -> None:
    """Draw the target's token in every row, with the noise that the draft pass of that position used, and accept while
    the draft equals it; greedy rows draw their argmax.

    Args:
        logits, row_of, cut, positions: of the N flat rows, as in `draw`. The draws stay in `scratch.ids`.

    Three launches.
    """
    ids = scratch.ids[: len(logits)]
    draw(logits, row_of, values, cut, seeds, positions, PURPOSE_GUMBEL, ids, scratch)
    accept_prefix(ids, q_start, drafts, num_drafts, accepted, emitted, None, None, None, None)


def verify_rejection(
    logits: Tensor,
    cut: Tensor,
    lse: Tensor,
    draft_logits: Tensor,
    draft_cut: Tensor,
    draft_lse: Tensor,
    q_start: Tensor,
    drafts: Tensor,
    num_drafts: Tensor,
    row: Tensor,
    n: Tensor,
    values: Tensor,
    seeds: Tensor,
    accepted: Tensor,
    emitted: Tensor,
    scratch: SamplingScratch,
) -> None:
    """Accept while u * q < p, then draw from norm(max(0, p - q)) where a draft fell, from p where all stand or the
    residual is empty; greedy entries accept while the draft is the target's argmax.

    Uniforms are those of purpose accept at n + i; the draw takes the noise of purpose gumbel at n + m.

    Args:
        logits: the target's, `[N, V]` fp32, any row stride.
        cut, lse: `[N]` fp32 and float64, of the `sampling_cut` on them that came last: it left the argmax of each row
            in `scratch.ids`.
        draft_logits: `[K, B, V]` fp32, any strides of passes and rows: what pass i drew entry b's draft from.
        draft_cut, draft_lse: `[K, B]` fp32 and float64, of the same strides, by `sampling_cut` in each draft pass.

    Two launches: tiles (dependent gathers for m, then a row of p and one of q), and their combination.
    """
    rejection(
        logits,
        cut,
        lse,
        scratch.ids,
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
        accepted,
        emitted,
        scratch.tile_value,
        scratch.tile_id,
    )
