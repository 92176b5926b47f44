"""Groups of tensors that sampling and verification pass to each other on the device. Launches nothing."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowParams:
    """Sampling parameters and seeds of every state row."""

    values: Tensor
    """[R + 1, 8] fp32 of `verify.params.SamplingRows`."""
    seeds: Tensor
    """[R + 1] int64 seeds."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Distributions of N flat rows as thresholds: x = logit / temperature is kept where x >= cut, with probability
    exp(x - lse). For draft passes, the tensors are `[K, B]`, with any strides."""

    cut: Tensor
    """[N] fp32. In greedy rows: -inf. In rows with NaN, +inf or only -inf: +inf, so nothing is kept."""
    lse: Tensor
    """[N] float64, log of the sum of exponentials of the x that are kept; 0 in greedy and faulty rows."""
    top: Tensor
    """[N] fp32, the largest logit; NaN if the row has one."""


@dataclass(frozen=True, slots=True)
class Filters:
    """Filters that some row may have. A filter that is False saves its launches, and is ignored in a row that has
    it."""

    top_k: bool = True
    top_p: bool = True
    min_p: bool = True


ALL_FILTERS = Filters()


@dataclass(frozen=True, slots=True)
class Distribution:
    """Logits of N rows, with thresholds and log sums that make distributions of them, from which tokens are drawn."""

    logits: Tensor
    """[N, V] fp32, any row stride; for draft passes [K, B, V], any strides of passes and rows."""
    cut: Tensor
    """[N] or [K, B] fp32, from a `Cut`."""
    lse: Tensor
    """Log of the sum of the exponentials of each row, float64, with the shape and strides of `cut`."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """Drafts of B sequences. The flat rows of sequence b are q_start[b] .. q_start[b + 1]."""

    q_start: Tensor
    """[B + 1] int64. A sequence has at least num_drafts + 1 rows; padding may have none."""
    drafts: Tensor
    """[B, K] int64, any row stride; columns from num_drafts on may be anything."""
    num_drafts: Tensor
    """[B] int64, K_r after the device's limits; more than K counts as K."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """Results of a verification rule for B sequences."""

    accepted: Tensor
    """[B] int64, number of accepted drafts m."""
    emitted: Tensor
    """[B, K + 1] int64, any row stride: d_1 .. d_m and the token after them; past that, arbitrary ids."""
    only: Tensor | None = None
    """[B] int64, 1 for sequences whose results are written; others are unchanged. None: all are written."""
