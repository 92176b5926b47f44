"""Sampling parameters as tensors, one entry per flat row, and host flags that say which steps a batch needs.

Checks nothing: `specrs.sampling` has checked what a user may ask for.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from specrs.transfer import to_device

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy (vLLM's bound): logits divided by less could overflow."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters of N rows, in the form the steps use: each is a column `[N, 1]` of one tensor, so that it broadcasts
    over logits `[N, V]`, and a batch's rows are gathered by one op.

    "Off" is a value that leaves a row as it is to the bit, so that a batch may run a step that only one row needs.
    A greedy row has top_k, top_p and min_p off (`write` sees to it): no filter removes the argmax, and the processed
    logprobs of a greedy row are then those of its penalised logits, whatever its neighbours ask for.
    """

    values: Tensor  # [N, 8] in the logits' dtype: fp32, float64 in sweeps

    @classmethod
    def allocate(
        cls, num_rows: int, *, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> SamplingRows:
        """`num_rows` greedy rows with everything else off."""
        off = [1.0, 1.0, torch.inf, torch.inf, -torch.inf, 1.0, 0.0, 0.0]
        return cls(torch.tensor([off], dtype=dtype, device=device).repeat(num_rows, 1))

    @property
    def greedy(self) -> Tensor:
        """`[N, 1]` bool."""
        return self.values[:, 0:1] != 0

    @property
    def temperature(self) -> Tensor:
        """Positive; 1 in greedy rows."""
        return self.values[:, 1:2]

    @property
    def top_k(self) -> Tensor:
        """At least 1; inf is off. fp32 counts to 2^24."""
        return self.values[:, 2:3]

    @property
    def top_p(self) -> Tensor:
        """In (0, 1); inf is off."""
        return self.values[:, 3:4]

    @property
    def log_min_p(self) -> Tensor:
        """ln(min_p); -inf is off."""
        return self.values[:, 4:5]

    @property
    def repetition_penalty(self) -> Tensor:
        """Positive; 1 is off."""
        return self.values[:, 5:6]

    @property
    def presence_penalty(self) -> Tensor:
        """0 is off."""
        return self.values[:, 6:7]

    @property
    def frequency_penalty(self) -> Tensor:
        """0 is off."""
        return self.values[:, 7:8]

    def write(
        self,
        row: int,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
    ) -> Steps:
        """Set one row from a user's values (vLLM's names and defaults), checked before; mutates the tensor.

        Returns:
            The steps that this row needs.
        """
        greedy = temperature < GREEDY_BELOW
        if greedy:
            temperature, top_k, top_p, min_p = 1.0, 0, 1.0, 0.0
        dtype = self.values.dtype
        # In the tensor's dtype a share may round to 1, which is off, or to 0, which would keep nothing. The logarithm
        # is taken there too: that of the float64 value may lie on the other side of a token at exactly min_p.
        share = max(torch.tensor(top_p, dtype=dtype).item(), torch.finfo(dtype).tiny)
        log_min_p = torch.tensor(min_p, dtype=dtype).log().item()
        values = [
            float(greedy),
            temperature,
            top_k or torch.inf,
            share if share < 1.0 else torch.inf,
            log_min_p,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
        ]
        self.values[row] = to_device(torch.tensor(values, dtype=dtype), self.values.device)
        return Steps(
            greedy=greedy,
            random=not greedy,
            temperature=temperature != 1.0,
            top_k=top_k != 0,
            top_p=share < 1.0,
            min_p=min_p > 0.0,
            repetition=repetition_penalty != 1.0,
            counts=presence_penalty != 0.0 or frequency_penalty != 0.0,
        )

    def select(self, index: Tensor) -> SamplingRows:
        """The rows `index` `[M]` int64, copied; an index may occur several times."""
        return SamplingRows(self.values.index_select(0, index))


@dataclass(frozen=True, slots=True)
class Steps:
    """Which steps some row of a batch needs; known on the host, so that the others cost nothing. `a | b` is the
    union."""

    greedy: bool = False
    random: bool = False
    temperature: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    repetition: bool = False
    counts: bool = False  # presence or frequency penalty

    def __or__(self, other: Steps) -> Steps:
        return Steps(*(getattr(self, name) or getattr(other, name) for name in _STEPS))

    @property
    def penalties(self) -> bool:
        """Whether token counts are needed."""
        return self.repetition or self.counts


_STEPS = tuple(field.name for field in fields(Steps))
