"""Sampling parameters as tensors, one entry per flat row, and host flags that say which steps a batch needs.

The core defines the columns and steps, and converts a user's values to them (`RequestSampling.columns`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from specrs.core import SAMPLING_STEPS, RequestSampling
from specrs.record_fields import ParamColumns, StepFlags
from specrs.transfer import to_device


@dataclass(frozen=True)
class SamplingRows(ParamColumns[Tensor]):
    """Parameters of N rows. Each is a column `[N, 1]` of one tensor, so that it broadcasts over logits `[N, V]`, and a
    batch's rows are gathered by one op.

    "Off" is a value that leaves a row as it is to the bit, so that a batch may run a step that only one row needs.
    A greedy row has top_k, top_p and min_p off: no filter removes the argmax, and the processed logprobs of a greedy
    row are then those of its penalised logits, whatever its neighbours ask for.
    """

    values: Tensor  # [N, len(PARAM_COLUMNS)] in the logits' dtype: fp32, float64 in sweeps

    @classmethod
    def allocate(
        cls, num_rows: int, *, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> SamplingRows:
        """Return the parameters of `num_rows` greedy rows with all other steps off."""
        off, _ = RequestSampling(temperature=0.0).columns(_name(dtype))
        return cls(torch.tensor([off], dtype=dtype, device=device).repeat(num_rows, 1))

    def column(self, index: int) -> Tensor:
        """Return column `index` `[N, 1]`, a view in the logits' dtype."""
        return self.values.narrow(1, index, 1)

    @property
    def greedy(self) -> Tensor:
        """`[N, 1]` bool, True for greedy rows."""
        return super().greedy != 0

    def write(self, row: int, sampling: RequestSampling) -> Steps:
        """Set one row to the parameters of a request, as a record would. Mutates the tensor.

        Returns:
            The steps that this row needs.
        """
        values, bits = sampling.columns(_name(self.values.dtype))
        self.values[row] = to_device(torch.tensor(values, dtype=self.values.dtype), self.values.device)
        return Steps.of(bits)

    def select(self, index: Tensor) -> SamplingRows:
        """Return copies of the rows `index` `[M]` int64. An index may occur several times."""
        return SamplingRows(self.values.index_select(0, index))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Steps(StepFlags):
    """Sampling steps that at least one row of a batch needs. The host knows them, so the other steps cost nothing."""

    __slots__ = ()

    @staticmethod
    @functools.cache
    def of(bits: int) -> Steps:
        """Return the steps of `admit_steps` bits. Bits of several requests may be combined by `|`."""
        return Steps(**{name: bool(bits >> i & 1) for i, name in enumerate(SAMPLING_STEPS)})

    def __or__(self, other: Steps) -> Steps:
        """Combine two sets of steps."""
        return Steps(**{name: getattr(self, name) or getattr(other, name) for name in SAMPLING_STEPS})

    @property
    def penalties(self) -> bool:
        """True if token counts are needed."""
        return self.repetition or self.counts
