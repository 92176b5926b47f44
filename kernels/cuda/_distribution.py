"""Functions that the sampling kernels share: a row's scaled logits, their order as integers, probabilities, and the
best of a tile. Launches nothing.

A distribution is (logits, temperature, cut, lse): x = logit / T is kept where x >= cut, with probability exp(x - lse).
x is the correctly rounded quotient, so every kernel sees the same x as the torch reference.
"""

from __future__ import annotations

import triton
import triton.language as tl
from specrs.core import PARAM_COLUMNS
from specrs.kernels.cuda.philox import log64

PARAMS = tl.constexpr(len(PARAM_COLUMNS))
"""Number of parameters of a row, the columns of `specrs.verify.params.SamplingRows.values`."""
GREEDY, TEMPERATURE, TOP_K, TOP_P, LOG_MIN_P = (
    tl.constexpr(PARAM_COLUMNS.index(name)) for name in ("greedy", "temperature", "top_k", "top_p", "log_min_p")
)
LAST_KEY = tl.constexpr(0x7F800000)
"""Key of -inf. With this as the last key, everything is kept."""
NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def scaled(row_ptr, token, mask, temperature):  # type: ignore[no-untyped-def]
    """Return x of `token`, its logit divided by the temperature; -inf where masked."""
    return tl.div_rn(tl.load(row_ptr + token, mask=mask, other=-float("inf")), temperature)


@triton.jit
def gap_limit(params):  # type: ignore[no-untyped-def]
    """Return the largest gap between a token that min_p keeps and the largest x; inf in a row without min_p."""
    return -tl.load(params + LOG_MIN_P)


@triton.jit
def is_finite(x):  # type: ignore[no-untyped-def]
    return tl.abs(x) < float("inf")


@triton.jit
def descending_key(x):  # type: ignore[no-untyped-def]
    """Return an int64 key that is smaller for larger x, and equal for 0.0 and -0.0; see
    `verify.thresholds.descending_keys`."""
    bits = (0.0 - x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def value_of_key(key):  # type: ignore[no-untyped-def]
    """Return the float32 number of a key."""
    bits = key.to(tl.int32)
    return 0.0 - (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def is_kept(x, cut):  # type: ignore[no-untyped-def]
    """Return True where x is kept. NaN and +inf are not kept, so that no arithmetic meets them in a faulty row."""
    return (x >= cut) & (x < float("inf"))


@triton.jit
def probability(x, cut, lse):  # type: ignore[no-untyped-def]
    """Return exp(x - lse) where x is kept, else 0. lse is float64, because in float32 an lse of 20 is off by 1e-6."""
    relative = tl.where(is_kept(x, cut), x, 0.0).to(tl.float64) - lse
    return tl.where(is_kept(x, cut), tl.exp(relative.to(tl.float32)), 0.0)


@triton.jit
def first_best(values, token, mask):  # type: ignore[no-untyped-def]
    """Return the largest of all `values`, and the lowest token that has it among lanes with `mask`.

    `values` must be -inf where `mask` is False, and must have no NaN. Without any lane in `mask` the token is
    `NO_TOKEN`.
    """
    best = tl.max(values, axis=0)
    return best, tl.min(tl.where((values == best) & mask, token, NO_TOKEN), axis=0)


@triton.jit
def keep_better(best, best_token, values, token, mask):  # type: ignore[no-untyped-def]
    """Return, lane by lane, the larger of a running best and `values` (no NaN), with its token; the earlier token in a
    tie. Lanes without `mask` keep the running best. It starts from -inf and `NO_TOKEN`."""
    better = mask & ((values > best) | (best_token == NO_TOKEN))
    return tl.where(better, values, best), tl.where(better, token, best_token)


@triton.jit
def combine_tiles(value_ptr, id_ptr, num_tiles, TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the best value over a row's tiles, and its lowest token. The value is NaN if any tile's is."""
    tile = tl.arange(0, TILES)
    mask = tile < num_tiles
    values = tl.load(value_ptr + tile, mask=mask, other=-float("inf"))
    faulty = tl.max((values != values).to(tl.int32), axis=0) > 0
    best, token = first_best(
        tl.where(values == values, values, -float("inf")), tl.load(id_ptr + tile, mask=mask, other=0), mask
    )
    return tl.where(faulty, float("nan"), best), token


@triton.jit
def store_cut(out_cut, out_lse, key, kept, m):  # type: ignore[no-untyped-def]
    """Store a row's threshold, from the last key that is kept, and its lse, from the weight that is kept in units of
    2^-40 of the largest weight."""
    share = kept.to(tl.float64) / 1099511627776.0
    tl.store(out_cut, value_of_key(key))
    tl.store(out_lse, tl.sum(m.to(tl.float64) + log64(share + tl.zeros([1], tl.float64)), axis=0))


@triton.jit
def store_no_cut(out_cut, out_lse, greedy):  # type: ignore[no-untyped-def]
    """Store thresholds of rows without a search: a greedy row keeps everything, a faulty row nothing."""
    tl.store(out_cut, tl.where(greedy, -float("inf"), float("inf")))
    tl.store(out_lse, tl.full([], 0.0, tl.float64))
