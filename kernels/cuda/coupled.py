"""Verification by shared noise on the device: the target draws in every row, drafts stand while they equal its draws.

`specrs.verify.coupled` is the reference. No kernel of its own: `draw`, then `accept_prefix`.
"""

from __future__ import annotations

from specrs.core import PURPOSE_GUMBEL
from specrs.kernels.cuda.accept import accept_prefix
from specrs.kernels.cuda.draw import draw
from specrs.kernels.cuda.sampling_scratch import SamplingScratch
from torch import Tensor


def coupled(
    logits: Tensor,
    row_of: Tensor,
    cut: Tensor,
    positions: Tensor,
    q_start: Tensor,
    drafts: Tensor,
    num_drafts: Tensor,
    row: Tensor,
    n: Tensor,
    values: Tensor,
    seeds: Tensor,
    out_accepted: Tensor,
    out_tokens: Tensor,
    scratch: SamplingScratch,
    *,
    rates: Tensor | None = None,
) -> None:
    """Accept drafts while they equal the target's draws; greedy entries accept the argmax.

    Args:
        logits, row_of, cut, positions: of the N flat rows, as in `draw`; the draws stay in `scratch.ids`.
        q_start .. seeds, out_accepted, out_tokens, rates: of the B entries, as in `rejection`.

    Three launches, about 9 us for six rows of 151,936 on an H200 as predicted.
    """
    ids = scratch.ids[: len(logits)]
    draw(logits, row_of, values, cut, seeds, positions, PURPOSE_GUMBEL, ids, scratch)
    accept_prefix(ids, q_start, drafts, num_drafts, out_accepted, out_tokens, rates=rates, seeds=seeds, row=row, n=n)
