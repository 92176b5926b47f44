"""Kernels of gated delta nets, interpreted: against float64, and to the bit against rows that are fed one by one.

Memory that no row has written yet holds NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specrs.backends.cuda import delta_states
from specrs.backends.cuda.delta_states import DeltaStates
from specrs.kernels.cuda.delta_runs import delta_runs, delta_runs_reference
from specrs.models.decoder_weights import DeltaWeights
from specrs.models.delta_net import DeltaNet
from specrs.models.torch_delta_net import delta_net
from specrs.models.torch_states import LayerStates, Runs
from sweep import sweep
from torch import Tensor

from .net_passes import ROWS, Fed, feed, plan
from .tolerance import assert_near

EPS = 1e-6
Net = tuple[DeltaNet, DeltaWeights[Tensor]]


@st.composite
def nets(draw: st.DrawFn) -> DeltaNet:
    """Draw sizes of a delta net: numbers and sizes of heads, width of the convolution, orders of outputs."""
    key_heads = draw(st.integers(1, 2))
    return DeltaNet(
        key_heads=key_heads,
        value_heads=key_heads * draw(st.integers(1, 3)),
        key_dim=draw(st.sampled_from([4, 8, 20])),
        value_dim=draw(st.sampled_from([8, 16, 20])),
        kernel=draw(st.integers(2, 5)),
        layers=(True,),
        turned=draw(st.booleans()),
        by_key_head=draw(st.booleans()),
    )


PLAIN = DeltaNet(2, 4, 8, 20, 4, (True,))


def weights_of(net: DeltaNet, seed: int = 0) -> DeltaWeights[Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return DeltaWeights(
        conv=random(net.kernel, net.conv_dim),
        a_log=random(net.value_heads),
        dt_bias=random(net.value_heads),
        norm=random(net.value_dim),
    )


def text(net: DeltaNet, row: int, length: int = 40) -> Tensor:
    """Return random outputs of the input projection for a request, `[length, outputs]`."""
    return torch.randn((length, net.outputs), generator=torch.Generator().manual_seed(100 + row))


@dataclass
class Driver:
    """Runs passes by the kernels, and the same by torch in float64 and float32."""

    net: DeltaNet
    drafts: int
    dtype: torch.dtype = torch.float32
    slots: int = 0
    states: DeltaStates = field(init=False)
    exact: LayerStates = field(default_factory=LayerStates)
    own: LayerStates = field(default_factory=LayerStates)

    def __post_init__(self) -> None:
        self.states = DeltaStates.allocate(
            self.config,
            max_rows=64,
            max_seqs=ROWS,
            num_drafts=self.drafts,
            num_snapshots=self.slots,
            dtype=self.dtype,
            device=torch.device("cpu"),
        )
        for memory in self.states.memory:
            memory.fill_(torch.nan)

    @property
    def config(self) -> Any:
        return SimpleNamespace(delta=self.net, rms_norm_eps=EPS)

    def feed(self, decoding: list[Fed], chunks: list[Fed], w: DeltaWeights[Tensor], *, prompts: bool = False) -> Tensor:
        """Return the outputs `[N, value_heads * value_dim]` of a pass over `decoding` and prompt `chunks`. Rows of
        `decoding` after the first are drafts unless `prompts`."""
        return feed(self.states, w, decoding, chunks, torch.empty(0, self.net.inner, dtype=self.dtype), prompts=prompts)

    def reference(
        self, decoding: list[Fed], chunks: list[Fed], w: DeltaWeights[Tensor], dtype: torch.dtype, *, prompts: bool
    ) -> Tensor:
        """Return the outputs of `feed` as torch computes them in `dtype`, without masked rows."""
        made = DeltaWeights(*(getattr(w, name).to(dtype) for name in ("conv", "a_log", "dt_bias", "norm")))
        states, outputs = self.exact if dtype == torch.float64 else self.own, []
        for fed, committed in ((chunks, True), (decoding, prompts)):
            x, at, runs = torch.cat([own.x for own in fed] or [torch.empty(0, self.net.outputs)]), 0, []
            for own in fed:
                if len(own.x):
                    runs.append((own.row, tuple(range(at, at + len(own.x))), own.first))
                at += len(own.x)
            x = x.to(self.dtype).to(dtype)
            outputs.append(delta_net(x, made, self.config, 0, Runs(tuple(runs), committed), states))
        return torch.cat(outputs[::-1])


@sweep(12)
@given(nets(), st.integers(0, 4), st.sampled_from([torch.float32, torch.float16]), st.data())
def test_passes_are_near_float64(net: DeltaNet, drafts: int, dtype: torch.dtype, data: st.DataObject) -> None:
    """Check passes against float64: prompts in chunks, alone and next to verification, partly accepted drafts, masked
    rows, and new requests in used rows."""
    driver, w = Driver(net, drafts, dtype), weights_of(net)
    at = dict.fromkeys(range(ROWS), 0)
    for turn in range(data.draw(st.integers(1, 4))):
        decoding, chunks, accepted = [], [], {}
        for row in data.draw(st.permutations(range(ROWS))):
            if data.draw(st.integers(0, 5)) == 0:
                at[row] = 0
            own = text(net, row)
            if at[row] == 0 or data.draw(st.booleans()):
                rows = data.draw(st.integers(1, 5))
                chunks.append(Fed(row, own[at[row] : at[row] + rows], at[row], data.draw(st.integers(0, 2))))
                accepted[row] = rows
            else:
                k = data.draw(st.integers(0, drafts))
                kept = accepted[row] = 1 + data.draw(st.integers(0, k))
                wrong = torch.randn((k + 1 - kept, net.outputs), generator=torch.Generator().manual_seed(turn))
                x = torch.cat((own[at[row] : at[row] + kept], wrong))
                decoding.append(Fed(row, x, at[row], data.draw(st.integers(0, drafts - k))))
        prompts = not decoding
        if prompts:
            decoding, chunks = chunks, []
        found = driver.feed(decoding, chunks, w, prompts=prompts)
        live = torch.cat([torch.arange(len(f.x) + f.masked) < len(f.x) for f in decoding + chunks])
        exact, own_sums = (
            driver.reference(decoding, chunks, w, kind, prompts=prompts) for kind in (torch.float64, torch.float32)
        )
        assert_near(found[live], exact, own_sums.to(dtype), ulps=16)
        for row, count in accepted.items():
            at[row] += count


@sweep(12)
@given(nets(), st.integers(1, 4), st.integers(1, 9), st.data())
def test_bits_are_those_of_rows_one_by_one(net: DeltaNet, drafts: int, prompt: int, data: st.DataObject) -> None:
    """Check that outputs and states have the bits of rows fed one by one, for any acceptance, chunks and batch. Rows
    fed one by one have no memory for drafts."""
    w, own = weights_of(net), text(net, 1)
    alone = Driver(net, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_states, "PIECE_ROWS", data.draw(st.integers(1, 6)))
        driver = Driver(net, drafts)
    outputs, at = [], 0
    while at < prompt:
        rows = data.draw(st.integers(1, prompt - at))
        chunk, end = Fed(1, own[at : at + rows], at), at + rows
        kind = data.draw(st.sampled_from(["alone", "next to another request", "the last row is verified"]))
        if kind == "alone":
            outputs.append(driver.feed([chunk], [], w, prompts=True))
        elif kind == "next to another request":
            outputs.append(driver.feed([Fed(0, text(net, 0)[:1], 0)], [chunk], w)[1:])
        else:
            chunk = Fed(1, chunk.x[:-1], at, masked=1)
            made = driver.feed([Fed(1, own[end - 1 : end], end - 1)], [chunk], w)
            outputs += [made[1:-1], made[:1]]
        at += rows
    while at < prompt + 4:
        k = data.draw(st.integers(0, drafts))
        kept = 1 + data.draw(st.integers(0, k))
        x = torch.cat((own[at : at + kept], torch.randn(k + 1 - kept, net.outputs)))
        others = [Fed(2, text(net, 2)[: data.draw(st.integers(1, drafts + 1))], 0)] if data.draw(st.booleans()) else []
        outputs.append(driver.feed([*others, Fed(1, x, at)], [], w)[sum(len(f.x) for f in others) :][:kept])
        at += kept
    outputs.append(driver.feed([Fed(1, own[at : at + 1], at)], [], w))
    found = torch.cat(outputs)
    expected = torch.cat([alone.feed([Fed(1, own[p : p + 1], p)], [], w, prompts=p < prompt) for p in range(at + 1)])
    assert found.equal(expected)
    assert driver.states.bases[:, 1].equal(alone.states.bases[:, 1])
    assert driver.states.inputs[:, 1, : net.kernel - 1].equal(alone.states.inputs[:, 1])
    assert int(driver.states.lengths[1]) == at + 1
    assert int(driver.states.drafts[1]) == 0


@sweep(12)
@given(nets(), st.integers(1, 4), st.integers(1, 9), st.data())
def test_snapshots_are_states_of_committed_rows(net: DeltaNet, drafts: int, prompt: int, data: st.DataObject) -> None:
    """Check that snapshots are states of committed rows: written once the base state passes their length, and not
    before. A row that begins with one has the same bits."""
    w, own = weights_of(net), text(net, 1)
    alone, lengths = Driver(net, 0), data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3, unique=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_states, "PIECE_ROWS", data.draw(st.integers(1, 6)))
        driver = Driver(net, drafts, slots=5)
    plan(driver.states, [(0, 2, 1), *((1, length, 2 + i) for i, length in enumerate(lengths))])
    driver.feed([Fed(1, own[:prompt], 0)], [], w, prompts=True)
    at = covered = prompt
    for _ in range(data.draw(st.integers(0, 3))):
        k = data.draw(st.integers(0, drafts))
        kept = 1 + data.draw(st.integers(0, k))
        x = torch.cat((own[at : at + kept], torch.randn(k + 1 - kept, net.outputs)))
        driver.feed([Fed(1, x, at)], [], w)
        covered, at = at + 1, at + kept
    states = []
    for p in range(max(lengths) + 3):
        alone.feed([Fed(1, own[p : p + 1], p)], [], w)
        states.append((alone.states.bases[:, 1].clone(), alone.states.inputs[:, 1].clone()))
    kept_states, kept_inputs = driver.states.kept_bases, driver.states.kept_inputs
    for slot in (0, 1):
        assert kept_states[:, slot].isnan().all()
    for slot, length in enumerate(lengths, 2):
        if length > covered:
            assert kept_states[:, slot].isnan().all()
            assert kept_inputs[:, slot].isnan().all()
            continue
        assert kept_states[:, slot].equal(states[length - 1][0])
        assert kept_inputs[:, slot].equal(states[length - 1][1])
        plan(driver.states, [])
        driver.states.restore(2, slot)
        driver.feed([Fed(2, own[length : length + 3], length)], [], w, prompts=True)
        assert driver.states.bases[:, 2].equal(states[length + 2][0])


def test_a_position_that_no_state_reaches_spoils_its_request_alone() -> None:
    """Check that an invalid position makes the outputs of its request NaN, so that it ends, and leaves the bits of
    others."""
    w, own = weights_of(PLAIN), text(PLAIN, 0)

    def run(position: int) -> Tensor:
        driver = Driver(PLAIN, 2)
        driver.feed([Fed(0, own[:4], 0), Fed(1, own[:3], 0)], [], w, prompts=True)
        driver.feed([Fed(0, own[4:6], 4), Fed(1, own[3:5], 3)], [], w)
        return driver.feed([Fed(0, own[5:7], 5), Fed(1, own[6:7], position)], [], w)

    expected = run(5)
    assert expected.isfinite().all()
    for position in (1, 3, 6, 30):
        found = run(position)
        assert found[2].isnan().all()
        assert found[:2].equal(expected[:2])


def test_gates_of_extreme_numbers() -> None:
    """Check that beta and decay of extreme inputs are those of float64, rounded once."""
    net = replace(PLAIN, key_heads=1, value_heads=1)
    driver, w = Driver(net, 0), weights_of(net)
    numbers = torch.tensor([0.0, 1e-7, -3.0, 20.0, -20.0, 88.0, -88.0, 1e4, -1e4, 1e30, -1e30])
    x = torch.zeros(len(numbers), net.outputs)
    x[:, -2], x[:, -1] = numbers, numbers
    driver.feed([Fed(0, x, 0)], [], w, prompts=True)
    wide = numbers.double()
    softplus = torch.nn.functional.softplus(wide + w.dt_bias.double(), threshold=1000)
    for found, exact in (
        (driver.states.gates[: len(x), 0, 0], wide.sigmoid()),
        (driver.states.gates[: len(x), 1, 0], (-w.a_log.double().exp() * softplus).exp()),
    ):
        assert ((found.double() - exact).abs() <= 2.0**-23 * exact + 1e-37).all()
    x[1:, -1] = torch.nan
    out = driver.feed([Fed(0, x, 0)], [], w, prompts=True)
    assert out[0].isfinite().all()
    assert out[1:].isnan().all()


@sweep(40)
@given(st.data())
def test_runs(data: st.DataObject) -> None:
    """Check the list of runs of rows against the reference. States of requests without rows stay as they were."""
    count, first, prompts = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 3)), data.draw(st.booleans())
    rows = torch.tensor(data.draw(st.permutations(range(6)))[:count])
    lengths, drafts = torch.randint(0, 9, (6,)), torch.randint(0, 4, (6,))
    positions, starts = [-1] * first, [0]
    for row in rows.tolist():
        fed = data.draw(st.integers(0, 4))
        begin = data.draw(st.sampled_from([0, int(lengths[row]), int(lengths[row] + drafts[row]), 5, 12]))
        positions += [*range(begin, begin + fed), *[-1] * data.draw(st.integers(0, 2))]
        starts.append(len(positions) - first)
    positions += [-1]
    at, q_start = torch.tensor(positions), torch.tensor(starts)
    mine, theirs = torch.full((2, 5, 7), 77)
    own = lengths.clone(), drafts.clone()
    delta_runs(at, q_start, rows, [*own], mine, first, prompts, False)
    delta_runs_reference(at, q_start, rows, [lengths, drafts], theirs, first, prompts)
    assert own[0].equal(lengths)
    assert own[1].equal(drafts)
    some = theirs[0] > 0
    some[count:] = True
    for i in (0, 1, 3, 4):
        assert mine[i, some].equal(theirs[i, some])
    assert mine[2, theirs[0] > 0].equal(theirs[2, theirs[0] > 0])
    assert mine[0].equal(theirs[0])
