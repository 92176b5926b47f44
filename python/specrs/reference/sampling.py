"""Processes logits for a request, one row at a time: masks, penalties, filters, draws, log probabilities.

A row is one position's logits `[V]`, float32 or float64. No function mutates its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from specrs.core import (
    LOGPROBS_ALL,
    PARAM_COLUMNS,
    PURPOSE_ACCEPT,
    PURPOSE_GUMBEL,
    SAMPLING_STEPS,
    philox_gumbel,
    philox_uniform,
)
from specrs.verify.token_logprobs import TokenLogprobs

Record = dict[str, list[int]]
"""Sections of a step's record by name."""


def floats(bits: Sequence[int]) -> list[float]:
    """Return `bits` int64 reinterpreted as float64."""
    return np.array(bits, np.int64).view(np.float64).tolist()  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Request:
    """Sampling settings of a request that a record admits. Parameters have the values of `PARAM_COLUMNS`."""

    request_id: int
    seed: int
    prompt_len: int
    logprobs: int
    prompt_logprobs: int
    params: dict[str, float]
    steps: frozenset[str] = frozenset()
    """Names in `SAMPLING_STEPS` of the sampling steps that the request needs."""
    allowed: list[int] | None = None
    """Allowed token ids; None allows all."""
    bias: dict[int, float] = field(default_factory=dict)
    bad_words: list[list[int]] = field(default_factory=list)

    @classmethod
    def read(cls, record: Record, i: int) -> Request:
        """Read admitted request `i` of a record."""
        width = len(PARAM_COLUMNS)
        params = floats(record["admit_params"][i * width : (i + 1) * width])
        steps = frozenset(name for bit, name in enumerate(SAMPLING_STEPS) if record["admit_steps"][i] >> bit & 1)
        allowed, bias, bad_words = None, dict[int, float](), list[list[int]]()
        if "constraints" in steps:
            rest = iter(record["constraint"][record["admit_constraint_start"][i] :])

            def take(count: int) -> list[int]:
                return list(islice(rest, count))

            if record["admit_num_allowed"][i] >= 0:
                allowed = take(record["admit_num_allowed"][i])
            ids = take(record["admit_num_biases"][i])
            bias = dict(zip(ids, floats(take(len(ids))), strict=True))
            bad_words = [take(length) for length in take(record["admit_num_bad_words"][i])]
        names = ("request_id", "seed", "prompt_len", "logprobs", "prompt_logprobs")
        return cls(
            **{name: record[f"admit_{name}"][i] for name in names},
            params=dict(zip(PARAM_COLUMNS, params, strict=True)),
            steps=steps,
            allowed=allowed,
            bias=bias,
            bad_words=bad_words,
        )

    @property
    def is_greedy(self) -> bool:
        """True if the request takes the largest logit."""
        return self.params["greedy"] != 0

    def adjust(
        self, logits: Tensor, context: Sequence[int], forbidden_stops: Sequence[int], grammar: Tensor | None
    ) -> Tensor:
        """Apply masks, biases and penalties to a row, in this order.

        Args:
            context: all tokens before the row's position, drafts included.
            forbidden_stops: stop ids that are forbidden, because the position is before `min_tokens`.
            grammar: `[V]` bool, true where the grammar allows the token; None without a grammar.
        """
        x = logits.clone()
        if self.allowed is not None:
            x[~torch.isin(torch.arange(len(x)), torch.tensor(self.allowed))] = -torch.inf
        if grammar is not None:
            x[~grammar] = -torch.inf
            if set(grammar.nonzero()[:, 0].tolist()) <= set(forbidden_stops):
                forbidden_stops = ()  # the grammar leaves only the end
        for *before, last in self.bad_words:
            if list(context[len(context) - len(before) :]) == before:
                x[last] = -torch.inf
        for token in forbidden_stops:
            x[token] = -torch.inf
        for token, bias in self.bias.items():
            x[token] += bias
        repetition, frequency, presence = (
            self.params[f"{name}_penalty"] for name in ("repetition", "frequency", "presence")
        )
        seen = torch.tensor(context).bincount(minlength=len(x)) > 0
        written = torch.tensor(context[self.prompt_len :]).long().bincount(minlength=len(x)).to(x.dtype)
        x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
        return x - frequency * written - presence * (written > 0)

    def filter(self, adjusted: Tensor) -> Tensor:
        """Apply temperature, min_p, top_k and top_p to a row, in this order. Tokens with the same logit as the last
        kept one are kept, too."""
        params = self.params
        x = adjusted / params["temperature"]
        x = x.masked_fill(x - x.max() < params["log_min_p"], -torch.inf)
        kept = x.sort(descending=True).values
        if params["top_k"] < len(x):
            x = x.masked_fill(x < kept[int(params["top_k"]) - 1], -torch.inf)
        if params["top_p"] < 1:
            kept = x.sort(descending=True).values
            sums = kept.double().softmax(0).cumsum(0)
            x = x.masked_fill(x < kept[int((sums < params["top_p"] * sums[-1]).sum())], -torch.inf)
        return x

    def draw(self, adjusted: Tensor, position: int, purpose: int) -> int:
        """Draw the token of a position from its adjusted row: the largest logit, or with Gumbel noise if the request
        samples."""
        if self.is_greedy:
            return largest(adjusted)
        return largest(self.filter(adjusted) + gumbel(self.seed, position, purpose, adjusted))


def verify(
    request: Request, adjusted: Sequence[Tensor], n: int, drafts: Sequence[int], q: Sequence[Tensor]
) -> tuple[int, int]:
    """Verify the drafts at positions n, n + 1, ... by `rejection` if `q` is given, else by `coupled`.

    A greedy request accepts the largest logit under both rules.

    Args:
        adjusted: the target's row for each draft and for the token after them.
        q: probabilities `[V]` that each draft was drawn from; empty for point masses and for `coupled`.

    Returns:
        The number of accepted drafts, and the token after them.
    """
    m = 0
    if request.is_greedy or not q:
        drawn = [request.draw(row, n + i, PURPOSE_GUMBEL) for i, row in enumerate(adjusted)]
        while m < len(drafts) and drafts[m] == drawn[m]:
            m += 1
        return m, drawn[m]
    p = [request.filter(row).softmax(0) for row in adjusted]
    while m < len(drafts) and stands(uniform(request.seed, n + m, PURPOSE_ACCEPT), q[m][drafts[m]], p[m][drafts[m]]):
        m += 1
    left = (p[m] - q[m]).clamp(min=0) if m < len(drafts) else p[m]
    if not left.sum() > 0:  # rounding has left nothing of two equal distributions
        left = p[m]
    return m, largest(left.log() + gumbel(request.seed, n + m, PURPOSE_GUMBEL, left))


def accept_at_rates(rates: Sequence[float], seed: int, n: int) -> int:
    """Return the number of accepted drafts if the i-th is to be accepted with the unconditional probability
    `rates[i]`."""
    before, m = 1.0, 0
    while m < len(rates) and uniform(seed, n + m, PURPOSE_ACCEPT) * before < rates[m]:
        before, m = rates[m], m + 1
    return m


def stands(u: float, q: Tensor, p: Tensor) -> bool:
    """Return True if `rejection` accepts a draft, which has probability min(1, p / q). `u` is uniform in (0, 1)."""
    return bool(u * q < p)


def largest(scores: Tensor) -> int:
    """Return the id of the largest of `[V]` scores; of equal ones the lowest id."""
    return int(scores.argmax())


def token_logprobs(values: Sequence[Tensor], tokens: Sequence[int], num_top: int) -> TokenLogprobs:
    """Look up `tokens` in rows of `values`, and the `num_top` largest of each row. Of equal values, the lowest id comes
    first."""
    rows = [row.float() for row in values]
    orders = [row.sort(descending=True, stable=True).indices for row in rows]
    tops = [order[: len(order) if num_top == LOGPROBS_ALL else num_top] for order in orders]
    return TokenLogprobs(
        value=torch.stack([row[token] for row, token in zip(rows, tokens, strict=True)]),
        rank=torch.tensor([1 + order.tolist().index(t) for order, t in zip(orders, tokens, strict=True)]),
        top_ids=torch.stack(tops),
        top_values=torch.stack([row[top] for row, top in zip(rows, tops, strict=True)]),
    )


def gumbel(seed: int, position: int, purpose: int, like: Tensor) -> Tensor:
    """Return standard Gumbel values `[V]` for a position, in the dtype of the row `like` `[V]`."""
    out = np.empty((1, len(like)), np.float32)
    philox_gumbel(np.array([seed]), np.array([position]), purpose, out)
    return torch.from_numpy(out[0]).to(like.dtype)


def uniform(seed: int, position: int, purpose: int) -> float:
    """Return a uniform number between 0 and 1 for a position."""
    out = np.empty((1, 1), np.float32)
    philox_uniform(np.array([seed]), np.array([position]), purpose, out)
    return float(out[0, 0])
