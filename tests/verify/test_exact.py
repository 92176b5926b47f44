"""What a launch of mixed entries emits, exactly: every draft and every threshold of the noise, in float64.

The verdict on an entry is a step function of each number of noise alone, so bisection finds where it steps. A
uniform's step is the probability that a draft stands. Where only two tokens of a row have noise that is finite, the
step is at the logarithm of the ratio of what they are drawn from; all such ratios are the distribution. What an entry
emits is summed over all drafts, each as likely as q says, through the functions that runners call. The core's sampler
makes its own noise; it is held to the same thresholds, draw by draw.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import specrs.runner.cuda.samplers as samplers
import torch
from specrs.core import PURPOSE_ACCEPT, PURPOSE_DRAFT, PURPOSE_GUMBEL, RequestSampling, philox_gumbel, philox_uniform
from specrs.drafters.hidden import HeadDrafter
from specrs.reference.accept import accept
from specrs.reference.iteration import Drafted, Scored
from specrs.runner.cuda.entries import Iteration, flat_rows
from specrs.runner.cuda.row_state import RowState
from specrs.runner.cuda.sampling_state import EntrySampling, SamplingState
from specrs.verify.params import Steps
from torch import Tensor

VOCAB, K = 6, 2
OWN = [1, 3, 4]  # the target's ids that a head knows
KINDS = ("all ids", "a head's ids", "a point mass", "no drafts")
CPU = torch.device("cpu")


@dataclass
class Given:
    """In place of `Noise`: what the test says, by flat row or entry."""

    gumbel_values: Tensor
    """[B, K + 1, VOCAB], of the entry whose row of state is asked for."""
    uniforms: Tensor
    """[B, K]"""

    def gumbel(self, rows: Tensor, positions: Tensor, purpose: int) -> Tensor:
        """Entry b has row b of state, and n = 10."""
        assert purpose == PURPOSE_GUMBEL
        return self.gumbel_values[rows, positions - 10]

    def uniform(self, rows: Tensor, positions: Tensor, purpose: int) -> Tensor:
        assert purpose == PURPOSE_ACCEPT
        assert (positions == 10 + torch.arange(positions.shape[1])).all()
        return self.uniforms[rows, : positions.shape[1]]


@dataclass
class Launch:
    """B entries, one for each kind and pair of drafts, all over the same p and, by kind, the same q."""

    kind: list[int]
    p: Tensor  # [K + 1, VOCAB], whatever the drafts were
    q: Tensor  # [B, K, VOCAB]; NaN where a kind has none
    drafts: Tensor  # [B, K]
    it: Iteration
    sampling: EntrySampling
    logits: Tensor  # [N, VOCAB]

    def verdict(self) -> tuple[Tensor, Tensor]:
        """`num_accepted` `[B]` and `tokens` `[B, K + 1]`."""
        on_host = torch.tensor([KINDS[kind] == "a point mass" for kind in self.kind])
        drafted = Drafted(torch.zeros_like(self.it.num_tokens), self.q, 1, on_host)
        positions = 9 + self.it.flat.offset
        found = accept(self.it, Scored(self.logits, positions, self.drafts), drafted, self.sampling)
        return found.num_accepted, found.tokens


def proposed(kind: str, raw: Tensor, state: SamplingState, steps: Steps) -> Tensor:
    """q of a kind's drafts as its runner makes it: `[K, VOCAB]`."""
    logits = raw
    if kind == "a head's ids":
        logits = HeadDrafter._logits(_Head(), raw[:, OWN])  # type: ignore[arg-type]
    q = torch.empty((1, K, VOCAB), dtype=raw.dtype)
    for column in range(K):
        rows, at = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        state.sampler.draft(logits[column : column + 1], rows, at, steps, q, column)
    return q[0]


class _Head:
    """All that the head's drafter needs to write logits out over the target's ids."""

    vocab_size = VOCAB

    @property
    def head(self) -> _Head:
        return self

    target_ids = torch.tensor(OWN)

    def compute_logits(self, final: Tensor) -> Tensor:
        return final


def launch(seed: int, dtype: torch.dtype, params: dict[str, float], seeds: Tensor | None = None) -> Launch:
    """Every pair of drafts of every kind; entries without drafts come last, as plans have them."""
    g = torch.Generator().manual_seed(seed)
    raw = 2 * torch.randn((K + 1, VOCAB), generator=g, dtype=torch.float64).to(dtype)
    draft = 2 * torch.randn((2, K, VOCAB), generator=g, dtype=torch.float64).to(dtype)
    pairs = [(a, b) for a in range(VOCAB) for b in range(VOCAB)]
    kind = [k for k in range(3) for _ in pairs] + [3]
    batch = len(kind)
    state = SamplingState(batch, VOCAB, dtype, CPU)
    steps = Steps()
    for row in range(batch):
        steps = steps | state.params.write(row, RequestSampling(**params))
    if seeds is not None:
        state.seeds[:batch] = seeds
    planned = tuple([K] * (batch - 1) + [0])
    it = Iteration(
        rows=torch.arange(batch),
        planned=planned,
        flat=flat_rows(planned),
        num_tokens=torch.full((batch,), 10),
        num_drafts=torch.tensor(planned),
        alive=torch.ones(batch, dtype=torch.bool),
        capacity=torch.full((batch,), 32),
        block_table=torch.zeros((batch, 8), dtype=torch.int64),
        block_size=4,
        max_context=16,
    )
    of_kind = [proposed(KINDS[k], draft[k], state, steps) for k in range(2)]
    of_kind += [torch.full((K, VOCAB), torch.nan, dtype=dtype)] * 2
    sampling = EntrySampling(
        state=RowState.allocate(batch, 32, 4, CPU),
        it=it,
        steps=steps,
        params=state.params,
        sampler=state.sampler,
        prompt_len=state.prompt_len,
        masks=None,
        grammar=None,
        num_logprobs=None,
        vocab_size=VOCAB,
    )
    logits = raw[it.flat.offset]
    p = sampling.filter(raw, torch.zeros(K + 1, dtype=torch.int64)).softmax(-1)
    drafts = torch.tensor([*pairs * 3, (0, 0)])
    return Launch(kind, p, torch.stack([of_kind[k] for k in kind]), drafts, it, sampling, logits)


def measured(made: Launch, noise: Given, position: int) -> tuple[Tensor, Tensor]:
    """Of each entry whose drafts before `position` stand: the probability that the one there does, `[B]`, and what its
    token is drawn from where it does not (of a point mass: in any case), `[B, VOCAB]`."""
    batch = len(made.kind)

    def bisect(low: float, high: float, above: object) -> Tensor:
        """To 1e-10."""
        lo, hi = (torch.full((batch,), x, dtype=torch.float64) for x in (low, high))
        for _ in range(math.ceil(math.log2((high - low) * 1e10))):
            middle = (lo + hi) / 2
            yes = above(middle)  # type: ignore[operator]
            lo, hi = torch.where(yes, lo, middle), torch.where(yes, middle, hi)
        return hi

    drafts = torch.cat((made.drafts, made.drafts[:, :1]), dim=1)
    silent = torch.full((batch, K + 1, VOCAB), -torch.inf, dtype=torch.float64)

    def draws(token: int, other: Tensor, x: Tensor) -> Tensor:
        """The token at `position` where only these two of its row have noise: x and 0."""
        noise.gumbel_values = silent.clone()
        for before in range(position):  # drafts of the record stand where they are what is drawn
            noise.gumbel_values[torch.arange(batch), before, drafts[:, before]] = 0.0
        noise.gumbel_values[torch.arange(batch), position, other] = 0.0
        noise.gumbel_values[:, position, token] = torch.where(other == token, 0.0, x)
        return made.verdict()[1][:, position]

    stands = torch.zeros(batch, dtype=torch.float64)
    noise.uniforms = torch.full((batch, K), 1e-300, dtype=torch.float64)
    if position < K:

        def rejects(u: Tensor) -> Tensor:
            noise.uniforms[:, position] = u
            return made.verdict()[0] <= position

        noise.gumbel_values = torch.zeros_like(silent)
        for before in range(position):
            noise.gumbel_values[:, before] = silent[:, before]
            noise.gumbel_values[torch.arange(batch), before, drafts[:, before]] = 0.0
        stands = bisect(0.0, 1.0, rejects)
        noise.uniforms[:, position] = 1 - 2.0**-53

    # One token that can be drawn, against which all others are: found by giving all of them noise.
    noise.gumbel_values = silent.clone()
    for before in range(position):
        noise.gumbel_values[torch.arange(batch), before, drafts[:, before]] = 0.0
    noise.gumbel_values[:, position] = 0.0
    other = made.verdict()[1][:, position]
    ratios = torch.ones((batch, VOCAB), dtype=torch.float64)
    for token in range(VOCAB):
        step = bisect(-600.0, 600.0, lambda x, token=token: draws(token, other, x) == token)
        ratio = torch.where(step > 599.0, 0.0, (-step).exp())
        ratios[:, token] = torch.where(other == token, 1.0, ratio)
    return stands, ratios / ratios.sum(dim=1, keepdim=True)


@pytest.mark.parametrize(
    ("seed", "params"), [(0, {"temperature": 1.0}), (1, {"temperature": 0.7, "top_k": 5, "min_p": 0.02})]
)
def test_what_is_emitted_is_what_the_target_gives(
    seed: int, params: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every position behind any drafts that stood, for p and q at random: to 1e-9."""
    made = launch(seed, torch.float64, params)
    batch, noise = len(made.kind), Given(torch.empty(0), torch.empty(0))
    monkeypatch.setattr(made.sampling.sampler, "_noise", noise)
    kinds = torch.tensor(made.kind)
    for position in range(K + 1):
        stands, drawn = measured(made, noise, position)
        p = made.p[position]
        for kind, name in enumerate(KINDS):
            of_kind = torch.arange(batch)[kinds == kind]
            if name == "no drafts":
                if position == 0:
                    torch.testing.assert_close(drawn[of_kind], p.expand(len(of_kind), -1), rtol=0, atol=1e-9)
                continue
            # Behind each of the first drafts (one, where there are none before) what comes of all at this position.
            for entries in of_kind.view(VOCAB, VOCAB).unbind(1 if position == 0 else 0):
                drafts = made.drafts[entries, min(position, K - 1)]
                before = made.drafts[entries, :position]
                reached = torch.ones(len(entries), dtype=torch.bool)
                for i in range(position):
                    q = None if name == "a point mass" else made.q[entries[0], i]
                    can = made.p[i][before[:, i]] > 0
                    reached &= can if q is None else can & (q[before[:, i]] > 0)
                if position == K or name == "a point mass":
                    # The token behind all drafts; and of a point mass any token, whatever was drafted.
                    rows = drawn[entries][reached]
                    torch.testing.assert_close(rows, p.expand_as(rows), rtol=0, atol=1e-9)
                    continue
                if not reached.all():
                    continue
                q = made.q[entries[0], position][drafts]
                assert abs(float(q.sum()) - 1) < 1e-12
                emitted = torch.zeros(VOCAB, dtype=torch.float64)
                emitted.index_add_(0, drafts, q * stands[entries])
                emitted += (q * (1 - stands[entries])) @ drawn[entries]
                torch.testing.assert_close(emitted, p, rtol=0, atol=1e-9)
                standing = (made.p[position][drafts] / q).clamp(max=1)
                torch.testing.assert_close(stands[entries][q > 0], standing[q > 0], rtol=0, atol=1e-9)


def test_a_head_proposes_only_its_own_ids() -> None:
    made = launch(0, torch.float64, {"temperature": 1.0})
    q = made.q[made.kind.index(1)]
    others = [token for token in range(VOCAB) if token not in OWN]
    assert not q[:, others].any()
    assert (q[:, OWN] > 0).all()


def philox(fill: object, seeds: Tensor, positions: Tensor, purpose: int, width: int) -> Tensor:
    out = np.empty((len(seeds), width), np.float32)
    fill(seeds.numpy(), positions.numpy(), purpose, out)  # type: ignore[operator]
    return torch.from_numpy(out).double()


@pytest.mark.parametrize("sampler", [samplers.CoreSampler, samplers.TorchSampler])
def test_every_draw_of_the_samplers_keeps_to_the_thresholds(sampler: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32, as runners have it: a draft stands where u q < p, and else comes the largest of ln(p - q) + g; of a point
    mass that of ln p + g. Draws within rounding of a threshold, a few in a thousand, are left out."""
    params = {"temperature": 0.9, "top_k": 6}
    monkeypatch.setattr("specrs.runner.cuda.sampling_state.CoreSampler", sampler)
    left_out = checked = 0
    for seed in range(40):
        count = 3 * VOCAB**2 + 1
        seeds = torch.randint(-(2**62), 2**62, (count,), generator=torch.Generator().manual_seed(seed))
        made = launch(seed, torch.float32, params, seeds)
        assert isinstance(made.sampling.sampler, sampler)
        accepted, tokens = made.verdict()
        p, at = made.p.double(), [torch.full((count,), 10 + i) for i in range(K + 1)]
        uniforms = torch.stack([philox(philox_uniform, seeds, n, PURPOSE_ACCEPT, 1) for n in at[:K]], 1).squeeze(2)
        gumbels = torch.stack([philox(philox_gumbel, seeds, n, PURPOSE_GUMBEL, VOCAB) for n in at], 1)
        for b, kind in enumerate(made.kind):
            drafts = made.drafts[b].tolist()
            expected, close = _expected(KINDS[kind], p, made.q[b].double(), drafts, uniforms[b], gumbels[b])
            if close:
                left_out += 1
                continue
            checked += 1
            got = tokens[b, : int(accepted[b]) + 1].tolist()
            assert got == expected, (seed, b, KINDS[kind])
    assert left_out < checked / 100


@pytest.mark.parametrize("sampler", [samplers.CoreSampler, samplers.TorchSampler])
@pytest.mark.parametrize("kind", KINDS[:2])
def test_drafts_are_drawn_from_the_q_that_is_kept(kind: str, sampler: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft is the largest of ln q + g, whose q is what verification divides by; of a head at the target's ids."""
    monkeypatch.setattr("specrs.runner.cuda.sampling_state.CoreSampler", sampler)
    count, left_out = 400, 0
    g = torch.Generator().manual_seed(1)
    seeds = torch.randint(-(2**62), 2**62, (count,), generator=g)
    state = SamplingState(count, VOCAB, torch.float32, CPU)
    assert isinstance(state.sampler, sampler)
    steps = Steps()
    for row in range(count):
        steps = steps | state.params.write(row, RequestSampling(temperature=0.8, top_k=5))
    state.seeds[:count] = seeds
    logits = 2 * torch.randn((count, VOCAB), generator=g)
    if kind == "a head's ids":
        logits = HeadDrafter._logits(_Head(), logits[:, OWN])  # type: ignore[arg-type]
    q = torch.full((count, K, VOCAB), torch.nan)
    rows, positions = torch.arange(count), torch.randint(2, 2000, (count,), generator=g)
    _, tokens = state.sampler.draft(logits, rows, positions, steps, q, 1)
    noise = philox(philox_gumbel, seeds, positions, PURPOSE_DRAFT, VOCAB)
    assert q[:, 0].isnan().all()
    for b in range(count):
        top = (q[b, 1].double().log() + noise[b]).topk(2)
        if float(top.values[0] - top.values[1]) < 1e-4:
            left_out += 1
            continue
        assert int(tokens[b]) == int(top.indices[0]), b
    assert left_out < count / 100


def _expected(
    kind: str, p: Tensor, q: Tensor, drafts: list[int], uniforms: Tensor, gumbels: Tensor
) -> tuple[list[int], bool]:
    """The tokens that an entry emits, and whether a draw was within rounding of another outcome."""

    def largest(scores: Tensor) -> tuple[int, bool]:
        top = scores.topk(2)
        return int(top.indices[0]), float(top.values[0] - top.values[1]) < 1e-4

    emitted: list[int] = []
    for i in range(K + 1):
        scores = p[i].log() + gumbels[i]
        if kind == "no drafts" or i == K:
            token, close = largest(scores)
            return [*emitted, token], close
        if kind == "a point mass":
            token, close = largest(scores)
            if close or token != drafts[i]:
                return [*emitted, token], close
            emitted.append(token)
            continue
        side = float(uniforms[i] * q[i, drafts[i]] - p[i, drafts[i]])
        if abs(side) < 1e-6 and float(p[i, drafts[i]]) > 0:
            return [], True
        if side >= 0:
            residual = (p[i] - q[i]).clamp(min=0)
            if bool(((residual > 0) & (residual < 1e-5)).any()):
                return [], True
            token, close = largest(residual.log() + gumbels[i])
            return [*emitted, token], close
        emitted.append(drafts[i])
    raise AssertionError("an entry ends with a token that was drawn")
