"""Search for a threshold inside kernels: one step over a tile, and the evaluation of its histogram. Launches nothing.

A row's tokens are ordered by `descending_key`. Step 0 puts them into 1,024 cells of 1/32 nat below the largest logit,
because there they spread; cells of leading bits would send most of a vocabulary to a dozen addresses. Each later step
cuts the cell with the threshold into 2,048 ranges of keys. A cell spans at most 2^32 keys, so after three such steps a
range is a single key. Amounts are integers (1, or a weight in units of 2^-40), so the order of the atomic additions
does not matter.
"""

from __future__ import annotations

import triton
import triton.language as tl
from specrs.kernels.cuda._distribution import LAST_KEY, TOP_K, TOP_P, descending_key, scaled, value_of_key

COUNT, WEIGHT, TOTAL = (tl.constexpr(i) for i in range(3))
"""Modes of a search step: count the tokens of each histogram cell, sum their weights for each cell, or sum all weights
of a tile."""
LO, SHIFT, BASE, TARGET, CELL, LIMIT = (tl.constexpr(i) for i in range(6))
"""Elements of a step's start. LO: first key of its range, or the threshold once it is found. SHIFT: log2 of the keys in
a 2,048th of the range; -1: the threshold is found. BASE: the amount before LO; at the end, up to it. TARGET: the amount
to reach. CELL: the cell of step 0. LIMIT: the last key that earlier filters keep."""
_FIRST_CELLS = tl.constexpr(1024)
_RESOLUTION = tl.constexpr(32)
_CELLS = tl.constexpr(2048)
_DIGIT = tl.constexpr(11)
_CLOSE = tl.constexpr(32)
UNIT = tl.constexpr(float(2**40))
"""Weight of the largest token in integer units."""


@triton.jit
def last_key(m, bound):  # type: ignore[no-untyped-def]
    """Return the last key of an x with m - x <= bound, for bound >= 0. This turns a condition on a rounded gap into a
    threshold."""
    key = descending_key(m)
    for digit in tl.static_range(3):
        candidate = key + (tl.arange(0, _CELLS).to(tl.int64) << (_DIGIT * (2 - digit)))
        within = m - value_of_key(tl.minimum(candidate, LAST_KEY)) <= bound
        key += (tl.sum((within & (candidate <= LAST_KEY)).to(tl.int64), axis=0) - 1) << (_DIGIT * (2 - digit))
    return key


@triton.jit
def cell_of(gap, chosen):  # type: ignore[no-untyped-def]
    """Return the cell of step 0 for a gap, 32 cells per nat; the last cell holds all larger gaps. 0 where not
    `chosen`."""
    distance = tl.minimum(tl.where(chosen, gap, 0.0), 32.0) * _RESOLUTION
    return tl.minimum(distance.to(tl.int32), _FIRST_CELLS - 1)


@triton.jit
def place_of(cell, GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the place in memory of one of 32 * GROUPS cells; neighbouring cells are GROUPS apart. Most of a vocabulary
    falls into some hundred neighbouring cells, and the L2 cache adds to adjacent addresses one after the other."""
    return cell % 32 * GROUPS + cell // 32


@triton.jit
def add_to_cells(cells, index, amount, chosen, GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add `amount` to the cells `index`, of 32 * GROUPS, where `chosen`.

    Additions to one address wait for each other; in a row of equal logits all would. So tokens of a block that fall
    into nearby cells are summed before they are added.
    """
    index = index.to(tl.int32)
    first = tl.min(tl.where(chosen, index, _CELLS), axis=0)
    last = tl.max(tl.where(chosen, index, -1), axis=0)
    if last - first < _CLOSE:
        for cell in range(first, last + 1):
            own = tl.sum(tl.where(chosen & (index == cell), amount, 0), axis=0)
            tl.atomic_add(cells + place_of(cell, GROUPS), own, sem="relaxed")
    else:
        tl.atomic_add(cells + place_of(index, GROUPS), amount, mask=chosen, sem="relaxed")


@triton.jit
def _keys_of_cell(m, cell):  # type: ignore[no-untyped-def]
    """Return the first key of a range that holds every token of the cell, and log2 of the keys in a 2,048th of it.

    The cell of a token comes from a rounded gap, so the range is wider by more than any rounding error.
    """
    near = cell.to(tl.float32) / _RESOLUTION
    far = near + 1.0 / _RESOLUTION
    slack = (tl.abs(m) + far) * (1.0 / 2097152.0)
    lo = descending_key(m - near + slack)
    last = tl.where(cell == _FIRST_CELLS - 1, LAST_KEY, descending_key(m - far - slack))
    digits = tl.arange(0, 32).to(tl.int64)
    span = tl.minimum(last, LAST_KEY) - lo + 1
    shift = tl.sum(((digits < 22) & (span > (tl.full([32], 2048, tl.int64) << digits))).to(tl.int64), axis=0)
    return lo, shift


@triton.jit
def _first_reaching(sums, index, before, target):  # type: ignore[no-untyped-def]
    """Return the first index at which before + the cumulative sum reaches the target, and the sum before that index.
    The index is the number of sums if none reaches it."""
    reached = before + tl.cumsum(sums, axis=0)
    at = tl.sum((reached < target).to(tl.int32), axis=0)
    return at, before + tl.sum(tl.where(index < at, sums, 0), axis=0)


@triton.jit
def narrow(slot, cells, params, m, FIRST: tl.constexpr, WEIGHTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Evaluate a finished search step, and return `(lo, shift, base, target, cell)` for the next one.

    `slot` has what the finished step started from, `cells` its histogram. FIRST says that it was a step 0.
    """
    outer, inner = tl.arange(0, 64), tl.arange(0, 32)
    # Cells lie as `place_of` has them; called with outer * 32 + inner it costs up to 16 more registers.
    groups = tl.sum(tl.load(cells + inner[None, :] * 64 + outer[:, None]), axis=1)
    if FIRST:
        base = tl.full([], 0, tl.int64)
        shift = base
        lo = base
        cell = base
        # Off is inf: more than there is.
        if WEIGHTS:
            wanted = tl.minimum(tl.load(params + TOP_P), 2.0).to(tl.float64) * tl.sum(groups, axis=0).to(tl.float64)
            target = wanted.to(tl.int64)
            target += (target.to(tl.float64) < wanted).to(tl.int64)
        else:
            target = tl.minimum(tl.load(params + TOP_K), 1073741824.0).to(tl.int64)
    else:
        lo, shift, base = tl.load(slot + LO), tl.load(slot + SHIFT), tl.load(slot + BASE)
        target, cell = tl.load(slot + TARGET), tl.load(slot + CELL)
    if shift >= 0:
        group, before = _first_reaching(groups, outer, base, target)
        found = group < 64
        group = tl.minimum(group, 63)
        own = tl.load(cells + inner * 64 + group)
        at, before = _first_reaching(own, inner, before, target)
        at = tl.minimum(at, 31)
        index = (group * 32 + at).to(tl.int64)
        through = before + tl.sum(tl.where(inner == at, own, 0), axis=0)
        if not FIRST:
            lo += index << shift
            base = tl.where(shift == 0, through, before)
            shift = tl.where(shift == 0, -1, tl.maximum(shift - _DIGIT, 0))
        elif found:
            cell = index
            lo, shift = _keys_of_cell(m, index)
            base = before
        else:
            lo = tl.full([], LAST_KEY, tl.int64)
            shift = tl.full([], -1, tl.int64)
            base = tl.sum(groups, axis=0)
    return lo, shift, base, target, cell


@triton.jit
def add_tile(  # type: ignore[no-untyped-def]
    row_ptr,
    cells,
    m,
    temperature,
    farthest,
    lo,
    shift,
    cell,
    limit,
    first,
    end,
    MODE: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the amounts of tokens first .. end to a step's histogram. With TOTAL, return their sum instead.

    `farthest` is the gap of the last token that min_p keeps; inf without min_p.
    """
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(first, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = scaled(row_ptr, token, token < end, temperature)
        gap = m - x
        chosen = (token < end) & (x <= m)
        key = descending_key(x)
        if MODE == COUNT:
            amount = tl.full([BLOCK], 1, tl.int64)
        else:
            # Weights under 2^-40 of the largest are nothing.
            weight = tl.where(chosen & (gap <= farthest) & (key <= limit), tl.exp(-tl.maximum(gap, 0.0)), 0.0)
            amount = (weight * UNIT).to(tl.int64)
            chosen = amount > 0
        if MODE == TOTAL:
            total += amount
        else:
            index = cell_of(gap, chosen).to(tl.int64)
            if not FIRST:
                chosen = chosen & (index == cell)
                index = (key - lo) >> shift
                chosen = chosen & (index >= 0) & (index < _CELLS)
            add_to_cells(cells, index, amount, chosen, 64)
    return tl.sum(total, axis=0)
