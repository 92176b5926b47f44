"""Sampling parameters as tensors, one entry per flat row, and host flags that say which steps a batch needs.

Checks nothing: `specrs.sampling` has checked what a user may ask for.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy (vLLM's bound): logits divided by less could overflow."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters of N rows, all `[N, 1]`, in the form the steps use; floats have the dtype of the logits (fp32,
    float64 in sweeps).

    "Off" is a value that leaves a row as it is to the bit, so that a batch may run a step that only one row needs.
    Columns and stored infinities instead of `[N]` and zeros: each reshape or `where` on a tensor of N numbers costs
    as much as a pass over 2,048 logits, and a draft pass of the bundled pair has no room for ten of them.

    A greedy row has top_k, top_p and min_p off (`write` sees to it): no filter removes the argmax, and the processed
    logprobs of a greedy row are then those of its penalised logits, whatever its neighbours ask for.
    """

    greedy: Tensor  # bool
    temperature: Tensor  # > 0; 1 in greedy rows
    top_k: Tensor  # inf: off
    top_p: Tensor  # in (0, 1); inf: off
    log_min_p: Tensor  # ln(min_p); -inf: off
    repetition_penalty: Tensor  # 1: off
    presence_penalty: Tensor  # 0: off
    frequency_penalty: Tensor  # 0: off

    @classmethod
    def allocate(
        cls, num_rows: int, *, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> SamplingRows:
        """`num_rows` greedy rows with everything else off."""

        def full(value: float) -> Tensor:
            return torch.full((num_rows, 1), value, dtype=dtype, device=device)

        return cls(
            greedy=torch.ones((num_rows, 1), dtype=torch.bool, device=device),
            temperature=full(1.0),
            top_k=full(torch.inf),
            top_p=full(torch.inf),
            log_min_p=full(-torch.inf),
            repetition_penalty=full(1.0),
            presence_penalty=full(0.0),
            frequency_penalty=full(0.0),
        )

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
        """Set one row from a user's values (vLLM's names and defaults), checked before; mutates the tensors.

        Returns:
            The steps that this row needs.
        """
        greedy = temperature < GREEDY_BELOW
        if greedy:
            temperature, top_k, top_p, min_p = 1.0, 0, 1.0, 0.0
        # In the tensor's dtype a share may round to 1, which is off, or to 0, which would keep nothing.
        share = max(torch.tensor(top_p, dtype=self.top_p.dtype).item(), torch.finfo(self.top_p.dtype).tiny)
        self.greedy[row] = greedy
        self.temperature[row] = temperature
        self.top_k[row] = top_k or torch.inf
        self.top_p[row] = share if share < 1.0 else torch.inf
        # In the tensor's dtype: ln of the float64 value would put a token at exactly min_p on either side of the cut.
        self.log_min_p[row] = torch.tensor(min_p, dtype=self.log_min_p.dtype).log()
        self.repetition_penalty[row] = repetition_penalty
        self.presence_penalty[row] = presence_penalty
        self.frequency_penalty[row] = frequency_penalty
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
        return SamplingRows(*(getattr(self, name).index_select(0, index) for name in _FIELDS))


_FIELDS = tuple(field.name for field in fields(SamplingRows))


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
