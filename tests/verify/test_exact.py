"""The exact distribution of what an iteration emits: every draft and every threshold of the noise.

A decision is a step function of each single noise value. For a uniform, the step is at the probability that a draft is
accepted. For a draw in which only two tokens have finite noise, the step is at the logarithm of the ratio of their
probabilities; all such ratios determine the distribution. In float64 the reference's steps are within 1e-9 of the exact
ones. The other samplers make their own noise, and are compared with the same thresholds, draw by draw.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from samplers import SAMPLERS, ReferenceSampler, make_request
from specrs.core import PURPOSE_ACCEPT, PURPOSE_DRAFT, PURPOSE_GUMBEL, philox_gumbel, philox_uniform
from specrs.reference import sampling
from specrs.reference.drafting import over_target_ids
from torch import Tensor

VOCAB, K = 6, 2
OWN = [1, 3, 4]  # the target's ids that a head knows
KINDS = ("all ids", "a head's ids", "a point mass", "no drafts")
PAIRS = [(a, b) for a in range(VOCAB) for b in range(VOCAB)]
NEAR = 1e-9


@dataclass
class World:
    """Target distributions `[K + 1, VOCAB]`, and the distributions that each kind of drafts is drawn from, `[K,
    VOCAB]`; None: a point mass, or no drafts."""

    logits: Tensor
    draft_logits: dict[str, Tensor]
    params: dict[str, float]

    @classmethod
    def make(cls, seed: int, dtype: torch.dtype, params: dict[str, float]) -> World:
        g = torch.Generator().manual_seed(seed)
        raw, draft, other = (
            2 * torch.randn((rows, VOCAB), generator=g, dtype=torch.float64).to(dtype) for rows in (K + 1, K, K)
        )
        few = torch.stack([over_target_ids(row[OWN], torch.tensor(OWN), VOCAB) for row in other])
        return cls(raw, {"all ids": draft, "a head's ids": few}, params)

    def filtered(self, logits: Tensor) -> Tensor:
        request = make_request(self.params, dtype=logits.dtype)
        return torch.stack([request.filter(row) for row in logits])

    @property
    def p(self) -> Tensor:
        return self.filtered(self.logits).softmax(-1)

    def q(self, kind: str) -> Tensor | None:
        return self.filtered(self.draft_logits[kind]).softmax(-1) if kind in self.draft_logits else None


class Noise:
    """Replaces the reference's random numbers by values that a test sets, for positions from 10 on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.gumbels, self.uniforms = torch.empty(0), torch.empty(0)
        patch.setattr(sampling, "gumbel", self.gumbel)
        patch.setattr(sampling, "uniform", self.uniform)

    def gumbel(self, seed: int, position: int, purpose: int, like: Tensor) -> Tensor:
        assert purpose == PURPOSE_GUMBEL
        return self.gumbels[position - 10]

    def uniform(self, seed: int, position: int, purpose: int) -> float:
        assert purpose == PURPOSE_ACCEPT
        return float(self.uniforms[position - 10])


def check_position(world: World, noise: Noise, kind: str, drafts: list[int], position: int) -> None:
    """Check the thresholds at `position`, after the drafts before it were accepted."""
    p, q, request = world.p, world.q(kind), make_request(world.params, dtype=torch.float64)
    for i, draft in enumerate(drafts[:position]):
        if p[i, draft] == 0 or (q is not None and q[i, draft] == 0):
            return  # it is never drawn, or never accepted

    def verdict() -> tuple[int, int]:
        m, last = sampling.verify(request, list(world.logits), 10, drafts, [] if q is None else list(q))
        return m, ([*drafts[:m], last])[position] if m >= position else -1

    noise.uniforms = torch.full((K,), 1e-300, dtype=torch.float64)
    silent = torch.full((K + 1, VOCAB), -torch.inf, dtype=torch.float64)
    for before in range(position):  # a point mass is accepted where it is what is drawn
        silent[before, drafts[before]] = 0.0
    drawn_from = p[position]
    if q is not None and position < K:
        of_p, of_q = (float(x[position, drafts[position]]) for x in (p, q))
        accepted = min(1.0, of_p / of_q) if of_q > 0 else float(of_p > 0)
        noise.gumbels = silent.clone()
        noise.gumbels[position:] = 0.0
        for u, expected in ((accepted * (1 - NEAR), True), (accepted * (1 + NEAR), False)):
            if 0 < u < 1:
                noise.uniforms[position] = u
                assert (verdict()[0] > position) == expected
        if accepted == 1:
            return  # no token is drawn here
        noise.uniforms[position] = 1 - 2.0**-53
        drawn_from = (p[position] - q[position]).clamp(min=0)
    other = int(drawn_from.argmax())
    for token in set(range(VOCAB)) - {other}:
        ratio = float(drawn_from[token] / drawn_from[other])
        step = math.inf if ratio == 0 else -math.log(ratio)
        for x, expected in ((min(step - NEAR, 600.0), other), (step + NEAR, token)):
            if math.isfinite(x):
                noise.gumbels = silent.clone()
                noise.gumbels[position, other], noise.gumbels[position, token] = 0.0, x
                assert verdict()[1] == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("seed", "params"), [(0, {"temperature": 1.0}), (1, {"temperature": 0.7, "top_k": 5, "min_p": 0.02})]
)
def test_every_threshold_is_where_the_rule_says(
    seed: int, params: dict[str, float], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, noise = World.make(seed, torch.float64, params), Noise(monkeypatch)
    for pair in PAIRS if kind != "no drafts" else [()]:
        for position in range(len(pair) + 1):
            check_position(world, noise, kind, list(pair), position)


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize(
    ("seed", "params"), [(0, {"temperature": 1.0}), (1, {"temperature": 0.7, "top_k": 5, "min_p": 0.02})]
)
def test_these_thresholds_give_what_the_target_gives(seed: int, params: dict[str, float], kind: str) -> None:
    """Check that the thresholds add up to the target's distribution: the sum over all drafts of what is emitted is p,
    because a draft is as likely as q says."""
    world = World.make(seed, torch.float64, params)
    p, q = world.p, world.q(kind)
    assert q is not None
    for own, drawn in zip(p, q, strict=False):
        accepted = torch.where(drawn > 0, own / drawn, 0.0).clamp(max=1)
        residual = (own - drawn).clamp(min=0)
        emitted = drawn * accepted + (drawn * (1 - accepted)).sum() * residual / residual.sum()
        torch.testing.assert_close(emitted, own, rtol=0, atol=1e-12)


def test_a_head_proposes_only_its_own_ids() -> None:
    q = World.make(0, torch.float64, {"temperature": 1.0}).q("a head's ids")
    assert q is not None
    others = [token for token in range(VOCAB) if token not in OWN]
    assert not q[:, others].any()
    assert (q[:, OWN] > 0).all()


def philox(fill: object, seeds: Tensor, positions: Tensor, purpose: int, width: int) -> Tensor:
    out = np.empty((len(seeds), width), np.float32)
    fill(seeds.numpy(), positions.numpy(), purpose, out)  # type: ignore[operator]
    return torch.from_numpy(out).double()


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_draw_of_the_samplers_keeps_to_the_thresholds(sampler: type, kind: str) -> None:
    """Check every draw of the samplers in float32 against the thresholds. A draft is accepted if u q < p; otherwise the
    largest of ln(p - q) + g is emitted, or for a point mass the largest of ln p + g. Draws within rounding of a
    threshold, a few in a thousand, are left out."""
    params, pairs = {"temperature": 0.9, "top_k": 6}, PAIRS if kind != "no drafts" else [()]
    left_out = checked = 0
    for seed in range(40):
        count, k = len(pairs), len(pairs[0])
        seeds = torch.randint(-(2**62), 2**62, (count,), generator=torch.Generator().manual_seed(seed))
        world = World.make(seed, torch.float32, params)
        p, q, n = world.p, world.q(kind), torch.full((count,), 10)
        accepted, tokens = sampler([params] * count, seeds, VOCAB).verify(
            world.logits[: k + 1].repeat(count, 1),
            torch.arange(0, count * (k + 1) + 1, k + 1),
            n,
            torch.tensor(pairs, dtype=torch.int64).view(count, k),
            torch.full((count,), k),
            None if q is None else q.expand(count, K, VOCAB).contiguous(),
        )
        uniforms = torch.cat([philox(philox_uniform, seeds, n + i, PURPOSE_ACCEPT, 1) for i in range(K)], 1)
        gumbels = torch.stack([philox(philox_gumbel, seeds, n + i, PURPOSE_GUMBEL, VOCAB) for i in range(K + 1)], 1)
        for b, drafts in enumerate(pairs):
            own_q = None if q is None else q.double()
            expected, close = _expected(p.double(), own_q, list(drafts), uniforms[b], gumbels[b])
            left_out, checked = left_out + close, checked + (not close)
            assert close or tokens[b, : int(accepted[b]) + 1].tolist() == expected, (seed, drafts)
    assert left_out < checked / 100


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("kind", KINDS[:2])
def test_drafts_are_drawn_from_the_q_that_is_kept(kind: str, sampler: type) -> None:
    """Check that drafts are drawn from the stored q: a draft is the largest of ln q + g, and verification divides by
    that q. For a head, q is at the target's ids."""
    count, left_out = 400, 0
    g = torch.Generator().manual_seed(1)
    seeds = torch.randint(-(2**62), 2**62, (count,), generator=g)
    logits = 2 * torch.randn((count, VOCAB), generator=g)
    if kind == "a head's ids":
        logits = torch.stack([over_target_ids(row[OWN], torch.tensor(OWN), VOCAB) for row in logits])
    positions = torch.randint(2, 2000, (count,), generator=g)
    tokens, q = sampler([{"temperature": 0.8, "top_k": 5}] * count, seeds, VOCAB).draft(logits, positions, "rejection")
    scores = q.double().log() + philox(philox_gumbel, seeds, positions, PURPOSE_DRAFT, VOCAB)
    for token, row in zip(tokens.tolist(), scores, strict=True):
        top = row.topk(2)
        close = float(top.values[0] - top.values[1]) < 1e-4
        left_out += close
        assert close or token == int(top.indices[0])
    assert left_out < count / 100


def test_the_reference_draws_in_float64() -> None:
    """Check that the reference draws in float64, with two logits that are equal in float32."""
    logits = torch.tensor([[1.0, 1.0 + 1e-12]], dtype=torch.float64)
    sampler = ReferenceSampler([{"temperature": 0.0}], torch.zeros(1, dtype=torch.int64), 2, torch.float64)
    assert sampler.draft(logits, torch.zeros(1, dtype=torch.int64), "rejection")[0].tolist() == [1]


def _expected(
    p: Tensor, q: Tensor | None, drafts: list[int], uniforms: Tensor, gumbels: Tensor
) -> tuple[list[int], bool]:
    """Return the emitted tokens, and whether a draw was within rounding of another outcome."""

    def largest(scores: Tensor) -> tuple[int, bool]:
        top = scores.topk(2)
        return int(top.indices[0]), float(top.values[0] - top.values[1]) < 1e-4

    emitted: list[int] = []
    for i, draft in enumerate(drafts):
        if q is None:
            token, close = largest(p[i].log() + gumbels[i])
            if close or token != draft:
                return [*emitted, token], close
            emitted.append(token)
            continue
        side = float(uniforms[i] * q[i, draft] - p[i, draft])
        if abs(side) < 1e-6 and float(p[i, draft]) > 0:
            return [], True
        if side >= 0:
            residual = (p[i] - q[i]).clamp(min=0)
            if bool(((residual > 0) & (residual < 1e-5)).any()):
                return [], True
            token, close = largest(residual.log() + gumbels[i])
            return [*emitted, token], close
        emitted.append(draft)
    token, close = largest(p[len(drafts)].log() + gumbels[len(drafts)])
    return [*emitted, token], close
