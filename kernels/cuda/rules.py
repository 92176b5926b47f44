"""The verification rules on the device, one function each; `specrs.verify` has the references. Runs no model.

Row q_start[b] + i of an entry's flat rows gives the distribution of position n_b + i. Each K is compiled up to the next
power of two, so warm them up before a capture.
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
    """Accept while the draft equals the target's argmax, `target_ids` `[N]` int64. One launch."""
    accept_prefix(target_ids, drafted, out)


def verify_synthetic(target_ids: Tensor, drafted: Drafted, at_rates: AtRates, out: Accepted) -> None:
    """For timing only: accept draft i of those left with probability rates[i] / rates[i - 1], whatever it is.

    `target_ids` `[N]` int64 is where the token after the drafts comes from. One launch.
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
    """Draw the target's token in every row, with the noise that the draft pass of that position used, and accept while
    the draft equals it; greedy rows draw their argmax.

    Args:
        logits, row_of, cut, positions: of the N flat rows, as in `draw`. The draws stay in `scratch.ids`.

    Three launches.
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
    """Accept while u * q < p, then draw from norm(max(0, p - q)) where a draft fell, from p where all stand or the
    residual is empty; greedy entries accept while the draft is the target's argmax.

    Uniforms are those of purpose accept at n + i; the draw takes the noise of purpose gumbel at n + m.

    Args:
        p: the target's, of the `sampling_cut` that came last: it left the argmax of each row in `scratch.ids`.
        q: the draft's `[K, B, V]`: what pass i drew entry b's draft from, by `sampling_cut` in each draft pass.
        row, n: `[B]` int64, state row and number of tokens of each entry.

    Two launches: tiles (dependent gathers for m, then a row of p and one of q), and their combination.
    """
    rejection(p, q, drafted, row, n, params, out, scratch)
