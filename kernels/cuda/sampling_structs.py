"""What sampling and verification pass to each other on the device: plain groups of tensors. Launches nothing."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowParams:
    """What every row of state asks of sampling."""

    values: Tensor
    """[R + 1, 8] fp32 of `verify.params.SamplingRows`"""
    seeds: Tensor
    """[R + 1] int64"""


@dataclass(frozen=True, slots=True)
class Cut:
    """The distributions of N flat rows as thresholds: x = logit / temperature is kept where x >= cut, with probability
    exp(x - lse). Of draft passes `[K, B]`, any strides."""

    cut: Tensor
    """[N] fp32. Greedy rows: -inf. Rows with NaN, +inf or nothing but -inf: +inf, so nothing is kept."""
    lse: Tensor
    """[N] float64, of what is kept; 0 in greedy and faulty rows"""
    top: Tensor
    """[N] fp32, the largest logit, NaN if the row has one"""


@dataclass(frozen=True, slots=True)
class Filters:
    """Filters that some row may have; one left out spares its launches and is ignored in a row that has it."""

    top_k: bool = True
    top_p: bool = True
    min_p: bool = True


ALL_FILTERS = Filters()


@dataclass(frozen=True, slots=True)
class Distribution:
    """What rows were or are drawn from."""

    logits: Tensor
    """[N, V] fp32, any row stride; of draft passes [K, B, V], any strides of passes and rows"""
    cut: Tensor
    """[N] or [K, B] fp32, of a `Cut`"""
    lse: Tensor
    """Of the shape and strides of `cut`, float64"""


@dataclass(frozen=True, slots=True)
class Drafted:
    """The drafts of B entries. Flat rows of entry b are q_start[b] .. q_start[b + 1]."""

    q_start: Tensor
    """[B + 1] int64; an entry has at least num_drafts + 1 rows; padding may have none"""
    drafts: Tensor
    """[B, K] int64, any row stride; columns from num_drafts on may be anything"""
    num_drafts: Tensor
    """[B] int64, K_r after the device's guards; more than K counts as K"""


@dataclass(frozen=True, slots=True)
class Accepted:
    """What a rule writes for B entries."""

    accepted: Tensor
    """[B] int64: m"""
    emitted: Tensor
    """[B, K + 1] int64, any row stride: d_1 .. d_m and the token after them; some ids past m"""
    only: Tensor | None = None
    """[B] int64, 1 for the entries that are written, others stay as they are; None: all"""
