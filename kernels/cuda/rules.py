"""Verification rules on the device, one function each. `specrs.verify` has the references. Runs no model.

Row q_start[b] + i of a sequence's flat rows gives the distribution of position n_b + i. Kernels are compiled for K
rounded up to the next power of two, so warm them up before a capture.
"""

from __future__ import annotations

from specrs.core import PURPOSE_GUMBEL
from specrs.kernels.cuda.accept import AtRates, accept_prefix
from specrs.kernels.cuda.draw import draw
from specrs.kernels.cuda.rejection import rejection
from specrs.kernels.cuda.sampling_scratch import SamplingScratch
from specrs.kernels.cuda.sampling_structs import Accepted, Distribution, Drafted, RowParams
from torch import Tensor


def verify_greedy(target_ids: Tensor, drafted: Drafted, out: Accepted) -> None:
    """Accept drafts as long as they equal the target's argmax, `target_ids` `[N]` int64. One launch."""
    accept_prefix(target_ids, drafted, out)


def verify_synthetic(target_ids: Tensor, drafted: Drafted, at_rates: AtRates, out: Accepted) -> None:
    """Accept draft i with probability rates[i] / rates[i - 1] as long as all drafts before it are accepted, whatever
    tokens they are. For timing only.

    The token after the drafts comes from `target_ids` `[N]` int64. One launch.
    """
    accept_prefix(target_ids, drafted, out, at_rates)


def verify_coupled(
    logits: Tensor,
    row_of: Tensor,
    params: RowParams,
    cut: Tensor,
    positions: Tensor,
    drafted: Drafted,
    out: Accepted,
    scratch: SamplingScratch,
) -> None:
    """Draw the target's token in every row, with the noise that the draft pass for that position used. Accept drafts as
    long as they equal these tokens. Greedy rows draw their argmax.

    Args:
        logits, row_of, cut, positions: of the N flat rows, as in `draw`. The drawn tokens are left in `scratch.ids`.

    Takes three launches.
    """
    ids = scratch.ids[: len(logits)]
    draw(logits, row_of, params, cut, positions, PURPOSE_GUMBEL, ids, scratch)
    accept_prefix(ids, drafted, out)


def verify_rejection(
    p: Distribution,
    q: Distribution,
    drafted: Drafted,
    row: Tensor,
    n: Tensor,
    params: RowParams,
    out: Accepted,
    scratch: SamplingScratch,
) -> None:
    """Accept drafts while u * q < p. Then draw from norm(max(0, p - q)) if a draft was rejected, or from p if all were
    accepted or the residual is empty. Greedy sequences accept drafts as long as they equal the target's argmax.

    Uniforms are those of purpose accept at n + i; the draw takes the noise of purpose gumbel at n + m.

    Args:
        p: the target's distributions, from the last `sampling_cut`, which left the argmax of each row in `scratch.ids`.
        q: the draft's `[K, B, V]`: the distribution that pass i drew sequence b's draft from, from `sampling_cut` in
            each draft pass.
        row, n: `[B]` int64, state row and number of tokens of each sequence.

    Takes two launches: tiles (dependent gathers for m, then a row of p and one of q), and their combination.
    """
    rejection(p, q, drafted, row, n, params, out, scratch)
