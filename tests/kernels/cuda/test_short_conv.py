"""Kernels of gated short convolutions, interpreted: against float64, and to the bit against rows that are fed one by
one.

Memory that no row has written yet holds NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specrs.backends.cuda.conv_states import ConvStates
from specrs.models.short_conv import ShortConv
from specrs.models.torch_short_conv import short_conv
from specrs.models.torch_states import LayerStates, Runs
from sweep import sweep
from torch import Tensor

from .net_passes import ROWS, Fed, feed, plan
from .tolerance import assert_near

SIZES = st.tuples(st.sampled_from([4, 130]), st.integers(2, 5))
"""Channels, fewer and more than a program has, and positions that the convolution reads."""


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def text(channels: int, row: int, length: int = 40) -> Tensor:
    """Return random outputs of the input projection for a request, `[length, 3 * channels]`."""
    return random(100 + row, length, 3 * channels)


@dataclass
class Driver:
    """Runs passes by the kernels, and the same by torch in float64 and float32."""

    channels: int
    kernel: int
    drafts: int
    dtype: torch.dtype = torch.float32
    slots: int = 0
    states: ConvStates = field(init=False)
    references: dict[torch.dtype, LayerStates] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weights = random(0, self.kernel, self.channels)
        self.states = ConvStates.allocate(
            ShortConv(self.channels, self.kernel, (True,)),
            max_seqs=ROWS,
            num_drafts=self.drafts,
            num_snapshots=self.slots,
            device=torch.device("cpu"),
        )
        for memory in self.states.memory:
            memory.fill_(torch.nan)

    def feed(self, decoding: list[Fed], chunks: list[Fed] | None = None, *, prompts: bool = False) -> Tensor:
        out = torch.empty(0, self.channels, dtype=self.dtype)
        return feed(self.states, self.weights, decoding, chunks or [], out, prompts=prompts)

    def reference(self, decoding: list[Fed], chunks: list[Fed], dtype: torch.dtype, *, prompts: bool) -> Tensor:
        """Return the outputs of `feed` as torch computes them in `dtype`, without masked rows."""
        states, outputs = self.references.setdefault(dtype, LayerStates()), []
        for fed, committed in ((chunks, True), (decoding, prompts)):
            x, at, runs = torch.cat([own.x for own in fed] or [torch.empty(0, 3 * self.channels)]), 0, []
            for own in fed:
                if len(own.x):
                    runs.append((own.row, tuple(range(at, at + len(own.x))), own.first))
                at += len(own.x)
            x = x.to(self.dtype).to(dtype)
            outputs.append(short_conv(x, self.weights.to(dtype), 0, Runs(tuple(runs), committed), states))
        return torch.cat(outputs[::-1])


@sweep(12)
@given(SIZES, st.integers(0, 4), st.sampled_from([torch.float32, torch.float16]), st.data())
def test_passes_are_near_float64(sizes: tuple[int, int], drafts: int, dtype: torch.dtype, data: st.DataObject) -> None:
    """Check passes against float64: prompts in chunks, alone and next to verification, partly accepted drafts, masked
    rows, and new requests in used rows."""
    driver, width = Driver(*sizes, drafts, dtype), 3 * sizes[0]
    at = dict.fromkeys(range(ROWS), 0)
    for turn in range(data.draw(st.integers(1, 4))):
        decoding, chunks, accepted = [], [], {}
        for row in data.draw(st.permutations(range(ROWS))):
            if data.draw(st.integers(0, 5)) == 0:
                at[row] = 0
            own = text(sizes[0], row)
            if at[row] == 0 or data.draw(st.booleans()):
                rows = data.draw(st.integers(1, 12 if at[row] == 0 else 5))
                chunks.append(Fed(row, own[at[row] : at[row] + rows], at[row], data.draw(st.integers(0, 2))))
                accepted[row] = rows
            else:
                k = data.draw(st.integers(0, drafts))
                kept = accepted[row] = 1 + data.draw(st.integers(0, k))
                x = torch.cat((own[at[row] : at[row] + kept], random(turn, k + 1 - kept, width)))
                decoding.append(Fed(row, x, at[row], data.draw(st.integers(0, drafts - k))))
        prompts = not decoding
        if prompts:
            decoding, chunks = chunks, []
        found = driver.feed(decoding, chunks, prompts=prompts)
        live = torch.cat([torch.arange(len(f.x) + f.masked) < len(f.x) for f in decoding + chunks])
        exact, own_sums = (
            driver.reference(decoding, chunks, kind, prompts=prompts) for kind in (torch.float64, torch.float32)
        )
        assert_near(found[live], exact, own_sums.to(dtype), ulps=4)
        for row, count in accepted.items():
            at[row] += count


@sweep(12)
@given(SIZES, st.integers(1, 4), st.integers(1, 12), st.data())
def test_bits_and_snapshots_are_those_of_rows_one_by_one(
    sizes: tuple[int, int], drafts: int, prompt: int, data: st.DataObject
) -> None:
    """Check that outputs, states and snapshots have the bits of rows fed one by one, for any acceptance and chunks.
    Rows fed one by one have no memory for drafts. Snapshots are written once the base passes their length."""
    own, width = text(sizes[0], 1), 3 * sizes[0]
    alone, driver = Driver(*sizes, 0), Driver(*sizes, drafts, slots=5)
    lengths = data.draw(st.lists(st.integers(1, 14), min_size=1, max_size=3, unique=True))
    plan(driver.states, [(0, 2, 1), *((1, length, 2 + i) for i, length in enumerate(lengths))])
    outputs, at = [], 0
    while at < prompt:
        rows = data.draw(st.integers(1, prompt - at))
        outputs.append(driver.feed([Fed(1, own[at : at + rows], at)], prompts=True))
        at += rows
    covered = at
    for _ in range(data.draw(st.integers(0, 3))):
        k = data.draw(st.integers(0, drafts))
        kept = 1 + data.draw(st.integers(0, k))
        x = torch.cat((own[at : at + kept], random(at, k + 1 - kept, width)))
        outputs.append(driver.feed([Fed(2, text(sizes[0], 2)[:1], 0), Fed(1, x, at)])[1:][:kept])
        covered, at = at + 1, at + kept
    outputs.append(driver.feed([Fed(1, own[at : at + 1], at)]))
    covered, expected, states = at + 1, [], []
    for p in range(max(at + 1, *lengths) + 3):
        expected.append(alone.feed([Fed(1, own[p : p + 1], p)]))
        states.append(alone.states.inputs[:, 1].clone())
    assert torch.cat(outputs).equal(torch.cat(expected[: at + 1]))
    assert driver.states.inputs[:, 1, : sizes[1] - 1].equal(states[at])
    assert (int(driver.states.lengths[1]), int(driver.states.drafts[1])) == (at + 1, 0)
    kept_inputs = driver.states.kept_inputs
    assert kept_inputs[:, :2].isnan().all()
    plan(driver.states, [])
    for slot, length in enumerate(lengths, 2):
        if length > covered:
            assert kept_inputs[:, slot].isnan().all()
            continue
        assert kept_inputs[:, slot].equal(states[length - 1])
        driver.states.restore(2, slot)
        found = driver.feed([Fed(2, own[length : length + 3], length)], prompts=True)
        assert found.equal(torch.cat(expected[length : length + 3]))


@pytest.mark.parametrize("position", [1, 3, 6, 30])
def test_a_position_that_no_state_reaches_spoils_its_request_alone(position: int) -> None:
    """Check that an invalid position makes the outputs of its request NaN, so that it ends, and leaves the bits of
    others."""
    own = text(4, 0)

    def run(last: int) -> Tensor:
        driver = Driver(4, 3, 2)
        driver.feed([Fed(0, own[:4], 0), Fed(1, own[:3], 0)], prompts=True)
        driver.feed([Fed(0, own[4:6], 4), Fed(1, own[3:5], 3)])
        return driver.feed([Fed(0, own[5:7], 5), Fed(1, own[6:7], last)])

    expected, found = run(5), run(position)
    assert expected.isfinite().all()
    assert found[2].isnan().all()
    assert found[:2].equal(expected[:2])


def test_drafts_get_no_snapshot_before_they_are_accepted() -> None:
    """Check that a snapshot is written by the pass that commits its last position, not by the one that verifies it."""
    own, driver = text(4, 1), Driver(4, 3, 3, slots=1)
    driver.feed([Fed(1, own[:3], 0)], prompts=True)
    plan(driver.states, [(1, 6, 0)])
    for first, rows in ((3, 4), (5, 1), (6, 1)):
        assert driver.states.kept_inputs.isnan().all() == (first < 6)
        driver.feed([Fed(1, own[first : first + rows], first)])
