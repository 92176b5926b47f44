"""Top-k, top-p and min-p as thresholds on logits, found in a fixed number of search steps. Sorts nothing and draws
nothing.

What is kept, for logits x (after temperature) and p = softmax(x):

    min_p   x - max x >= ln(min_p), which is p >= min_p * max p
    top_k   x >= the k-th largest logit
    top_p   x >= t for the largest logit t with sum(p where x >= t) >= top_p * sum(p)

Equal logits are kept or removed together, so a tie at the cut can keep more than k tokens. Everything else becomes
-inf.

The cut of top_k and top_p is exact (float64 logits that differ in their last bit count as equal). Logits are compared
through the integer image of their bits, whose order is that of the floats, and the search is a radix descent over it:
a histogram of the 11 leading bits (of token counts for top_k, of p for top_p), its cumulative sum from the largest
logit down, the first cell where the target is reached; then the same inside that cell with the next bits. 3 steps for
fp32, 6 for float64. Bisection with one pivot a step takes 32 for the same cut.

p is summed in float64. Where a sum comes within 1e-13 of the target, another order of summation may cut one logit
earlier or later; on a CPU each row is summed in index order, whatever the batch.

NaN and +inf logits give meaningless rows and no exception: the engine flags such rows by their raw logits.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_DIGIT = 11  # bits per search step
_SPREAD = 64
_COARSE_RESOLUTION = 32
_COARSE_CELLS = 1024


def apply_min_p(logits: Tensor, log_min_p: Tensor) -> Tensor:
    """Remove tokens that are less probable than min_p times the most probable one.

    Args:
        logits: `[N, V]` fp32 or float64.
        log_min_p: `[N, 1]`, ln(min_p) in the logits' dtype; -inf in a row without it.

    Returns:
        Logits `[N, V]`, -inf where removed. Mutates nothing.
    """
    gap = logits - logits.amax(dim=-1, keepdim=True)
    return logits.masked_fill(gap < log_min_p, -torch.inf)


def apply_top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Keep the `top_k` largest logits, then of those the largest that hold `top_p` of their probability.

    Args:
        logits: `[N, V]` fp32 or float64; -inf is a token that is already removed.
        top_k: `[N, 1]` in the logits' dtype, >= 1; inf in a row without it, None if no row has one.
        top_p: `[N, 1]` in the logits' dtype, in (0, 1); inf in a row without it, None if no row has one.

    Returns:
        Logits `[N, V]`, -inf where removed; the largest always stays. Mutates nothing.
    """
    keys = descending_keys(logits)
    bits = 32 if logits.dtype == torch.float32 else 63
    cut = None
    if top_k is not None:
        ones = torch.ones((), dtype=torch.float64, device=logits.device).expand_as(logits)
        cut = _search(keys, bits, ones, top_k.to(torch.float64).contiguous())
    if top_p is not None:
        weights = logits.softmax(dim=-1).to(torch.float64)
        if cut is not None:
            weights.masked_fill_(keys > cut, 0.0)
        nucleus = _search(keys, bits, weights, top_p, relative=True)
        cut = nucleus if cut is None else torch.minimum(cut, nucleus)
    return logits if cut is None else logits.masked_fill(keys > cut, -torch.inf)


def apply_coarse_top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """`apply_top_k_top_p` in one search step, for drafting: the threshold lies on a grid of 1/32 nat below the largest
    logit.

    Keeps the tokens that the exact filter keeps, and tokens up to e^(1/32) less probable than the last of them. Tokens
    more than 32 nats below the largest count as equal; none of them is ever drawn. Verification is lossless with any q
    that the drafts were really drawn from. This q costs a third of the exact filter's. It overlaps the target as much:
    sum(min(p, q)) of the bundled pair at temperature 0.8, top_p 0.9 is 0.662 with either filter, and 0.640 without
    filtering drafts. Arguments and result are those of `apply_top_k_top_p`.
    """
    gap = logits - logits.amax(dim=-1, keepdim=True)
    # A NaN must not become an index.
    cells = gap.mul_(-_COARSE_RESOLUTION).nan_to_num_(nan=0.0).clamp_(max=_COARSE_CELLS - 1).to(torch.int64)
    cut = None
    if top_k is not None:
        cut = torch.searchsorted(_cumulate(cells, torch.ones_like(logits), _COARSE_CELLS), top_k.contiguous())
    if top_p is not None:
        weights = logits.softmax(dim=-1)
        if cut is not None:
            weights.masked_fill_(cells > cut, 0.0)
        sums = _cumulate(cells, weights, _COARSE_CELLS)
        nucleus = torch.searchsorted(sums, sums[:, -1:] * top_p)
        cut = nucleus if cut is None else torch.minimum(cut, nucleus)
    return logits if cut is None else logits.masked_fill(cells > cut, -torch.inf)


def descending_keys(logits: Tensor) -> Tensor:
    """Int64 keys of logits of any shape: smaller for a larger logit, equal for equal ones (0.0 and -0.0 too).

    The bits of a float are a sign and a magnitude in the float's order; flipping the magnitude of negative ones makes
    them two's complement. 0 - x reverses the order and gives both zeros one sign. fp32 keys lie in [-2^31, 2^31).
    float64 keys drop the last bit and lie in [-2^62, 2^62), where no difference of two overflows.

    Raises TypeError for other dtypes.
    """
    flipped = torch.rsub(logits, 0.0)
    if logits.dtype == torch.float32:
        bits = flipped.view(torch.int32).to(torch.int64)
        return (bits >> 31).bitwise_and_((1 << 31) - 1).bitwise_xor_(bits)
    if logits.dtype == torch.float64:
        bits = flipped.view(torch.int64)
        return (bits >> 63).bitwise_and_((1 << 63) - 1).bitwise_xor_(bits) >> 1
    raise TypeError(f"logits: dtype {logits.dtype}; must be torch.float32 or torch.float64")


def _search(keys: Tensor, bits: int, weights: Tensor, target: Tensor, *, relative: bool = False) -> Tensor:
    """Return the smallest key c `[N, 1]` with sum(weights where key <= c) >= target; a key after all others if none
    reaches the target.

    With `relative`, targets are shares of the row's total. `cell` is the prefix of c found so far. In later steps the
    first cell also counts keys before the prefix, and extra cells after the last count keys after it. The target is
    reached inside, so neither moves the cell in which that happens.
    """
    shift, half = bits - _DIGIT, 1 << (_DIGIT - 1)
    sums = _cumulate((keys >> shift).add_(half), weights, 2 * half)
    if relative:
        target = sums[:, -1:] * target
    cell = torch.searchsorted(sums, target) - half
    while shift > 0:
        width = min(_DIGIT, shift)
        shift -= width
        size = 1 << width
        digits = (keys >> shift).sub_(cell, alpha=size) if shift else keys.sub(cell, alpha=size)
        digits = torch.minimum(digits, _behind(size, keys.shape[1], keys.device)).clamp_(min=0)
        sums = _cumulate(digits, weights, size + _SPREAD)
        cell = torch.searchsorted(sums, target).add_(cell, alpha=size)
    return cell


@lru_cache(maxsize=16)
def _behind(size: int, vocab_size: int, device: torch.device) -> Tensor:
    """Return cells for keys after the prefix, `[V]`. There are 64 of them, because most of a row goes there, and
    additions to one cell wait for each other. With one cell, a step over 6 rows of 2,048 takes 25 us longer."""
    return torch.arange(vocab_size, device=device) % _SPREAD + size


def _cumulate(cells: Tensor, weights: Tensor, num_cells: int) -> Tensor:
    """Return the sum of weights in cells 0..c, `[N, num_cells]`."""
    return weights.new_zeros((cells.shape[0], num_cells)).scatter_add_(1, cells, weights).cumsum_(dim=1)
