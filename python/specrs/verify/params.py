"""Sampling parameters as tensors, one entry per flat row, and host flags that say which steps a batch needs.

Which columns and steps there are, and what a user's values make of them, the core says (`RequestSampling.columns`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from specrs.core import PARAM_COLUMNS, STEPS, RequestSampling
from specrs.transfer import to_device

_COLUMN = {name: i for i, name in enumerate(PARAM_COLUMNS)}


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters of N rows, in the form the steps use: each is a column `[N, 1]` of one tensor, so that it broadcasts
    over logits `[N, V]`, and a batch's rows are gathered by one op.

    "Off" is a value that leaves a row as it is to the bit, so that a batch may run a step that only one row needs.
    A greedy row has top_k, top_p and min_p off: no filter removes the argmax, and the processed logprobs of a greedy
    row are then those of its penalised logits, whatever its neighbours ask for.
    """

    values: Tensor  # [N, len(PARAM_COLUMNS)] in the logits' dtype: fp32, float64 in sweeps

    @classmethod
    def allocate(
        cls, num_rows: int, *, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> SamplingRows:
        """`num_rows` greedy rows with everything else off."""
        off, _ = RequestSampling(temperature=0.0).columns(_name(dtype))
        return cls(torch.tensor([off], dtype=dtype, device=device).repeat(num_rows, 1))

    def _column(self, name: str) -> Tensor:
        return self.values.narrow(1, _COLUMN[name], 1)

    @property
    def greedy(self) -> Tensor:
        """`[N, 1]` bool."""
        return self._column("greedy") != 0

    @property
    def temperature(self) -> Tensor:
        """Positive; 1 in greedy rows."""
        return self._column("temperature")

    @property
    def top_k(self) -> Tensor:
        """At least 1; inf is off. fp32 counts to 2^24."""
        return self._column("top_k")

    @property
    def top_p(self) -> Tensor:
        """In (0, 1); inf is off."""
        return self._column("top_p")

    @property
    def log_min_p(self) -> Tensor:
        """ln(min_p); -inf is off."""
        return self._column("log_min_p")

    @property
    def repetition_penalty(self) -> Tensor:
        """Positive; 1 is off."""
        return self._column("repetition_penalty")

    @property
    def presence_penalty(self) -> Tensor:
        """0 is off."""
        return self._column("presence_penalty")

    @property
    def frequency_penalty(self) -> Tensor:
        """0 is off."""
        return self._column("frequency_penalty")

    def write(self, row: int, sampling: RequestSampling) -> Steps:
        """Set one row from what a request asks for, as a record would; mutates the tensor.

        Returns:
            The steps that this row needs.
        """
        values, bits = sampling.columns(_name(self.values.dtype))
        self.values[row] = to_device(torch.tensor(values, dtype=self.values.dtype), self.values.device)
        return Steps.of(bits)

    def select(self, index: Tensor) -> SamplingRows:
        """The rows `index` `[M]` int64, copied; an index may occur several times."""
        return SamplingRows(self.values.index_select(0, index))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Steps:
    """Which steps some row of a batch needs, `specrs.core.STEPS` by name; known on the host, so that the others cost
    nothing."""

    greedy: bool = False
    random: bool = False
    temperature: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    repetition: bool = False
    counts: bool = False  # presence or frequency penalty
    constraints: bool = False  # allowed ids, biases or bad words
    min_tokens: bool = False  # stop ids are masked before it
    logprobs: bool = False
    extras: bool = False  # what no record can hold

    @staticmethod
    @functools.cache
    def of(bits: int) -> Steps:
        """The steps of `admit_steps`, or of several of them by `|`."""
        return Steps(**{name: bool(bits >> i & 1) for i, name in enumerate(STEPS)})

    def __or__(self, other: Steps) -> Steps:
        """What either needs."""
        return Steps(**{name: getattr(self, name) or getattr(other, name) for name in STEPS})

    @property
    def penalties(self) -> bool:
        """Whether token counts are needed."""
        return self.repetition or self.counts
