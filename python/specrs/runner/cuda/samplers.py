"""Draws and verification of a launch's rows, by torch ops or by the Rust core. Applies no masks and runs no model.

`TorchSampler` is the reference, for every dtype. `CoreSampler` does the same to fp32 rows on a CPU, in one pass over
each where two dozen small torch ops cost more than the arithmetic in them: the same cuts and noise, probabilities that
differ in the last bits. Its drafts are cut exactly, which costs it nothing. `SamplingState` chooses, once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specrs.core import PURPOSE_ACCEPT, PURPOSE_DRAFT, PURPOSE_GUMBEL, Sampler
from specrs.runner.cuda.noise import Noise
from specrs.verify.coupled import verify_coupled
from specrs.verify.params import SamplingRows, Steps
from specrs.verify.processing import filter_logits, greedy_as_point_mass
from specrs.verify.rejection import append_token, count_accepted, draw_after
from specrs.verify.sample import draw, draw_draft


@dataclass(frozen=True, slots=True)
class VerifyEntries:
    """The B entries that N flat rows of verification belong to; int64."""

    rows: Tensor  # [B], row of state
    entry: Tensor  # [N], entry of each flat row
    q_start: Tensor  # [B+1]
    num_tokens: Tensor  # [B], n
    num_drafts: Tensor  # [B], K_r


class RowSampler(Protocol):
    """What an iteration needs of sampling; `rows` are rows of state, `adjusted` logits `[N, V]` before temperature."""

    def draft(
        self, adjusted: Tensor, rows: Tensor, positions: Tensor, steps: Steps, q: Tensor | None, column: int
    ) -> tuple[Tensor, Tensor]:
        """Draw a draft of each row; `(largest adjusted logit [N], tokens [N] int64)`.

        Args:
            rows: `[N]` int64.
            positions: position of each draft, `[N]` int64.
            q: `[B, K, V]`; `q[:N, column]` gets the distributions drawn from, and the noise is that of drafts. Without
                it the noise is the target's, for `coupled`.
        """

    def verify(
        self, adjusted: Tensor, entries: VerifyEntries, drafts: Tensor, steps: Steps, q: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Verify drafts, by `rejection` with `q` and by `coupled` without.

        Args:
            drafts, q: as in `Sampler.verify`.

        Returns:
            `(num_accepted [B] int64, tokens [B, K+1] int64, largest adjusted logit of each row [N])`; columns of tokens
            past num_accepted are meaningless.
        """

    def filter(self, adjusted: Tensor, rows: Tensor, steps: Steps) -> Tensor:
        """Logits `[N, V]` after temperature, min_p, top_k and top_p, cut as `verify` cuts them; rows `[N]`. Greedy rows
        stay as they are."""


class TorchSampler:
    """By the functions of `specrs.verify`."""

    def __init__(self, params: SamplingRows, seeds: Tensor, vocab_size: int) -> None:
        """`params` and `seeds` `[R+1]` int64 of all rows of state, read at each call."""
        self._params = params
        self._noise = Noise(seeds, vocab_size, params.values.dtype)

    def draft(
        self, adjusted: Tensor, rows: Tensor, positions: Tensor, steps: Steps, q: Tensor | None, column: int
    ) -> tuple[Tensor, Tensor]:
        """See `RowSampler`."""
        # A coarse cut is cheaper and costs only acceptance: q is whatever was drawn from.
        logits = self._process(adjusted, rows, steps, coarse=True)
        if q is None:
            tokens = draw(logits, self._noise.gumbel(rows, positions, PURPOSE_GUMBEL))
        else:
            noise = self._noise.gumbel(rows, positions, PURPOSE_DRAFT)
            tokens, q[: len(rows), column] = draw_draft(logits, noise)
        return adjusted.amax(dim=-1), tokens

    def verify(
        self, adjusted: Tensor, entries: VerifyEntries, drafts: Tensor, steps: Steps, q: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `RowSampler`."""
        rows, entry, q_start = entries.rows, entries.entry, entries.q_start
        num_tokens, num_drafts = entries.num_tokens, entries.num_drafts
        logits = self._process(adjusted, rows[entry], steps)
        top = adjusted.amax(dim=-1)
        if q is None:
            positions = num_tokens[entry] + torch.arange(len(entry)) - q_start[entry]
            noise = self._noise.gumbel(rows[entry], positions, PURPOSE_GUMBEL)
            return *verify_coupled(logits, noise, q_start, drafts, num_drafts), top
        p = logits.softmax(dim=-1)
        uniforms = self._noise.uniform(rows, num_tokens[:, None] + torch.arange(drafts.shape[1]), PURPOSE_ACCEPT)
        accepted = count_accepted(p, q_start, q, drafts, num_drafts, uniforms)
        # Not the purpose of the drafts' noise, and the one of `coupled`: without drafts both rules write the same text.
        noise = self._noise.gumbel(rows, num_tokens + accepted, PURPOSE_GUMBEL)
        last = draw_after(p, q_start, q, num_drafts, accepted, noise)
        return accepted, append_token(drafts, accepted, last), top

    def filter(self, adjusted: Tensor, rows: Tensor, steps: Steps) -> Tensor:
        """See `RowSampler`."""
        return filter_logits(adjusted, self._params.select(rows), steps)

    def _process(self, adjusted: Tensor, rows: Tensor, steps: Steps, *, coarse: bool = False) -> Tensor:
        params = self._params.select(rows)
        filtered = filter_logits(adjusted, params, steps, coarse=coarse)
        return greedy_as_point_mass(filtered, params.greedy) if steps.greedy else filtered


class CoreSampler:
    """By the Rust core: fp32 on a CPU."""

    def __init__(self, params: SamplingRows, seeds: Tensor, vocab_size: int) -> None:
        """Arguments as for `TorchSampler`; `params` must be fp32 on the CPU."""
        self._core = Sampler(vocab_size)
        self._params, self._seeds = params.values.numpy(), seeds.numpy()  # the same memory

    def draft(
        self, adjusted: Tensor, rows: Tensor, positions: Tensor, steps: Steps, q: Tensor | None, column: int
    ) -> tuple[Tensor, Tensor]:
        """See `RowSampler`."""
        tokens, top = torch.empty(len(rows), dtype=torch.int64), torch.empty(len(rows))
        self._core.draw(
            adjusted.contiguous().numpy(),
            self._params,
            self._seeds,
            rows.numpy(),
            positions.numpy(),
            PURPOSE_GUMBEL if q is None else PURPOSE_DRAFT,
            tokens.numpy(),
            top.numpy(),
            None if q is None else q.numpy(),
            column,
        )
        return top, tokens

    def verify(
        self, adjusted: Tensor, entries: VerifyEntries, drafts: Tensor, steps: Steps, q: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `RowSampler`."""
        accepted = torch.empty_like(entries.num_tokens)
        tokens = torch.empty((len(entries.rows), drafts.shape[1] + 1), dtype=torch.int64)
        top = torch.empty(len(adjusted))
        self._core.verify(
            adjusted.contiguous().numpy(),
            self._params,
            self._seeds,
            entries.rows.numpy(),
            entries.q_start.numpy(),
            entries.num_tokens.numpy(),
            entries.num_drafts.numpy(),
            drafts.contiguous().numpy(),
            None if q is None else q.numpy(),
            accepted.numpy(),
            tokens.numpy(),
            top.numpy(),
        )
        return accepted, tokens, top

    def filter(self, adjusted: Tensor, rows: Tensor, steps: Steps) -> Tensor:
        """See `RowSampler`."""
        out = torch.empty_like(adjusted)
        self._core.filter(adjusted.contiguous().numpy(), self._params, rows.numpy(), out.numpy())
        return out
