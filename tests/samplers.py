"""Draws and verifies rows by the Rust core, by `specrs.verify` and by the reference. Holds no tests.

All three take rows of logits before temperature, and a request's parameters by row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from specrs.core import (
    LOGPROBS_NONE,
    PARAM_COLUMNS,
    PURPOSE_ACCEPT,
    PURPOSE_DRAFT,
    PURPOSE_GUMBEL,
    RequestSampling,
    Sampler,
    philox_gumbel,
    philox_uniform,
)
from specrs.reference import sampling as reference
from specrs.verify.coupled import verify_coupled
from specrs.verify.params import SamplingRows, Steps
from specrs.verify.processing import filter_logits, greedy_as_point_mass
from specrs.verify.rejection import verify_rejection
from specrs.verify.sample import draw, draw_draft
from torch import Tensor

Params = Sequence[Mapping[str, Any]]


class RowSampler(Protocol):
    """B requests, each with parameters and a seed."""

    def filter(self, logits: Tensor) -> Tensor:
        """Return rows `[B, V]` after temperature, min_p, top_k and top_p."""

    def draft(self, logits: Tensor, positions: Tensor, rule: str) -> tuple[Tensor, Tensor]:
        """Draw from rows `[B, V]` the drafts at `positions` `[B]`: tokens `[B]`, and q `[B, V]`."""

    def verify(
        self, logits: Tensor, q_start: Tensor, n: Tensor, drafts: Tensor, num_drafts: Tensor, q: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Verify drafts `[B, K]`, by `rejection` with `q` `[B, K, V]` and by `coupled` without: `num_accepted` `[B]`
        and `tokens` `[B, K + 1]`, which mean nothing after column `num_accepted`. `logits` are flat rows `[N, V]`."""


class CoreSampler:
    """Samples by `specrs.core.Sampler`, in float32."""

    def __init__(self, params: Params, seeds: Tensor, vocab_size: int, dtype: torch.dtype = torch.float32) -> None:
        assert dtype == torch.float32
        self._core, self._seeds, self._rows = Sampler(vocab_size), seeds.numpy(), np.arange(len(params))
        values = [RequestSampling(**each).columns("float32")[0] for each in params]
        self._params = np.array(values, np.float32)

    def filter(self, logits: Tensor) -> Tensor:
        out = torch.empty_like(logits)
        self._core.filter(logits.contiguous().numpy(), self._params, self._rows, out.numpy())
        return out

    def draft(self, logits: Tensor, positions: Tensor, rule: str) -> tuple[Tensor, Tensor]:
        tokens, q = (
            torch.empty(len(logits), dtype=torch.int64),
            torch.full((len(logits), 1, logits.shape[1]), torch.nan),
        )
        given, top = logits.contiguous().numpy(), np.empty(len(logits), np.float32)
        purpose = PURPOSE_DRAFT if rule == "rejection" else PURPOSE_GUMBEL
        self._core.draw(
            given, self._params, self._seeds, self._rows, positions.numpy(), purpose, tokens.numpy(), top, q.numpy(), 0
        )
        assert np.array_equal(top, logits.amax(1).numpy(), equal_nan=True)
        return tokens, q[:, 0]

    def verify(
        self, logits: Tensor, q_start: Tensor, n: Tensor, drafts: Tensor, num_drafts: Tensor, q: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        accepted = torch.empty_like(n)
        tokens = torch.empty((len(n), drafts.shape[1] + 1), dtype=torch.int64)
        self._core.verify(
            logits.contiguous().numpy(),
            self._params,
            self._seeds,
            self._rows,
            q_start.numpy(),
            n.numpy(),
            num_drafts.numpy(),
            drafts.contiguous().numpy(),
            None if q is None else q.contiguous().numpy(),
            accepted.numpy(),
            tokens.numpy(),
            np.empty(len(logits), np.float32),
        )
        return accepted, tokens


class VerifySampler:
    """Samples by the functions of `specrs.verify`."""

    def __init__(self, params: Params, seeds: Tensor, vocab_size: int, dtype: torch.dtype = torch.float32) -> None:
        self._rows, self._steps = SamplingRows.allocate(len(params), dtype=dtype), Steps()
        for row, each in enumerate(params):
            self._steps |= self._rows.write(row, RequestSampling(**each))
        self._seeds, self._vocab_size = seeds, vocab_size

    def filter(self, logits: Tensor) -> Tensor:
        return filter_logits(logits, self._rows, self._steps)

    def draft(self, logits: Tensor, positions: Tensor, rule: str) -> tuple[Tensor, Tensor]:
        processed, rows = self._process(logits, torch.arange(len(logits))), torch.arange(len(logits))
        if rule == "coupled":
            return draw(processed, self.gumbel(rows, positions, PURPOSE_GUMBEL)), processed.softmax(-1)
        return draw_draft(processed, self.gumbel(rows, positions, PURPOSE_DRAFT))

    def verify(
        self, logits: Tensor, q_start: Tensor, n: Tensor, drafts: Tensor, num_drafts: Tensor, q: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        rows = torch.arange(len(n)).repeat_interleave(q_start.diff())
        processed = self._process(logits, rows)
        if q is None:
            noise = self.gumbel(rows, n[rows] + torch.arange(len(rows)) - q_start[rows], PURPOSE_GUMBEL)
            return verify_coupled(processed, noise, q_start, drafts, num_drafts)
        uniforms = self.uniform(n[:, None] + torch.arange(drafts.shape[1]))
        p, all_rows = processed.softmax(-1), torch.arange(len(n))
        none = torch.zeros((len(n), self._vocab_size), dtype=p.dtype)
        accepted, _ = verify_rejection(p, q_start, q, drafts, num_drafts, uniforms, none)
        noise = self.gumbel(all_rows, n + accepted, PURPOSE_GUMBEL)
        return verify_rejection(p, q_start, q, drafts, num_drafts, uniforms, noise)

    def gumbel(self, rows: Tensor, positions: Tensor, purpose: int) -> Tensor:
        out = np.empty((len(rows), self._vocab_size), np.float32)
        philox_gumbel(self._seeds[rows].numpy(), positions.contiguous().numpy(), purpose, out)
        return torch.from_numpy(out).to(self._rows.values.dtype)

    def uniform(self, positions: Tensor) -> Tensor:
        out = np.empty((positions.numel(), 1), np.float32)
        seeds = self._seeds.repeat_interleave(positions.shape[1])
        philox_uniform(seeds.numpy(), positions.flatten().numpy(), PURPOSE_ACCEPT, out)
        return torch.from_numpy(out).view(positions.shape).to(self._rows.values.dtype)

    def _process(self, logits: Tensor, rows: Tensor) -> Tensor:
        own = self._rows.select(rows)
        return greedy_as_point_mass(filter_logits(logits, own, self._steps), own.greedy)


class ReferenceSampler:
    """Samples by `specrs.reference.sampling`, one request after the other."""

    def __init__(self, params: Params, seeds: Tensor, vocab_size: int, dtype: torch.dtype = torch.float32) -> None:
        self.requests = [make_request(each, seed, dtype) for each, seed in zip(params, seeds.tolist(), strict=True)]

    def filter(self, logits: Tensor) -> Tensor:
        return torch.stack([request.filter(row) for request, row in zip(self.requests, logits, strict=True)])

    def draft(self, logits: Tensor, positions: Tensor, rule: str) -> tuple[Tensor, Tensor]:
        purpose = PURPOSE_DRAFT if rule == "rejection" else PURPOSE_GUMBEL
        rows = list(zip(self.requests, logits, positions.tolist(), strict=True))
        tokens = torch.tensor([request.draw(row, position, purpose) for request, row, position in rows])
        return tokens, self.filter(logits).softmax(-1)

    def verify(
        self, logits: Tensor, q_start: Tensor, n: Tensor, drafts: Tensor, num_drafts: Tensor, q: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        accepted, tokens = torch.zeros_like(n), torch.zeros((len(n), drafts.shape[1] + 1), dtype=torch.int64)
        for b, request in enumerate(self.requests):
            k = int(num_drafts[b])
            rows, own = list(logits[q_start[b] : q_start[b] + k + 1]), drafts[b, :k].tolist()
            m, last = reference.verify(request, rows, int(n[b]), own, [] if q is None else list(q[b, :k]))
            accepted[b], tokens[b, : m + 1] = m, torch.tensor([*own[:m], last])
        return accepted, tokens


SAMPLERS: tuple[Any, ...] = (CoreSampler, VerifySampler, ReferenceSampler)


def make_request(params: Mapping[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32) -> reference.Request:
    """Return the reference's request with these parameters."""
    values, _ = RequestSampling(**params).columns(str(dtype).removeprefix("torch."))
    columns = dict(zip(PARAM_COLUMNS, values, strict=True))
    return reference.Request(0, seed, 0, LOGPROBS_NONE, LOGPROBS_NONE, columns)
