"""Masks, biases and penalties on the device: the bits of the torch reference in the rows that ask, and no others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specrs.backends.cuda.sampling.asked import AskedPlan, RowMasks, RowSampling, pack_ids
from specrs.core import MAX_STOP_IDS, SAMPLING_STEPS, RequestSampling
from specrs.kernels.cuda.adjust_logits import AskedRows, History, adjust, adjust_reference
from specrs.kernels.cuda.sampling_scratch import SamplingScratch
from specrs.verify.params import SamplingRows
from sweep import sweep
from torch import Tensor

from kernels.cuda.sampling_cases import wide

CPU = torch.device("cpu")
LENGTH, MAX_K = 30, 3


@dataclasses.dataclass
class Case:
    """Sequences of an iteration, their constraints, and their logits."""

    vocab: int
    planned: list[int]
    requests: list[RowSampling]
    history: History
    masks: Tensor  # of grammars, for each row that has one
    logits: Tensor
    positions: Tensor

    @property
    def plan(self) -> AskedPlan | None:
        return AskedPlan.of(self.planned, self.requests, self.vocab, CPU)


def bits(**steps: bool) -> int:
    return sum(1 << i for i, name in enumerate(SAMPLING_STEPS) if steps.get(name))


@st.composite
def cases(draw: st.DrawFn, vocab: int | None = None, least: int = 1) -> Case:
    """Draw sequences of every kind, most of which have constraints. Few tokens occur, so that lists and history
    overlap."""
    v = draw(st.sampled_from([5, 64, 70, 1030])) if vocab is None else vocab
    count = draw(st.integers(least, 4))
    planned = sorted(draw(st.lists(st.integers(0, MAX_K), min_size=count, max_size=count)), reverse=True)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def random(most: int, *shape: int) -> Tensor:
        return torch.randint(most, shape, generator=generator)

    rows = torch.randperm(count + 1, generator=generator)[:count]
    few, ids = min(v, 8), st.integers(0, min(v, 8) - 1)
    params, requests, min_len = SamplingRows.allocate(count + 2), [], torch.zeros(count + 2, dtype=torch.int64)
    n = 1 + random(LENGTH - MAX_K - 1, count)
    stop_ids = torch.full((count + 2, MAX_STOP_IDS), -1)
    total_masks = 0
    for i in range(count):
        asks = {name: draw(st.booleans()) for name in ("penalties", "constraints", "min_tokens", "extras")}
        penalties = {
            "repetition_penalty": draw(st.sampled_from([1.0, 1.3, 0.7])),
            "frequency_penalty": draw(st.sampled_from([0.0, 0.3, -1.1])),
            "presence_penalty": draw(st.sampled_from([0.0, 0.7])),
        }
        if asks["penalties"]:
            params.write(int(rows[i]), RequestSampling(temperature=0.7, **penalties))  # type: ignore[arg-type]
        masks = None
        if asks["constraints"]:
            allowed = draw(st.none() | st.lists(ids, max_size=6, unique=True))
            biased = draw(st.lists(ids, max_size=6, unique=True))
            masks = RowMasks(
                None if allowed is None else pack_ids(torch.tensor(allowed, dtype=torch.int64), v),
                biased,
                [draw(st.sampled_from([-3.5, 0.1, 100.0])) for _ in biased],
                draw(st.lists(st.lists(ids, min_size=1, max_size=3), max_size=5)),
            )
        if asks["min_tokens"]:
            stops = draw(st.lists(ids, max_size=4))
            stop_ids[rows[i], : len(stops)] = torch.tensor(stops, dtype=torch.int64)
            min_len[rows[i]] = int(n[i]) + draw(st.integers(-1, 3))
        some = bits(
            repetition=asks["penalties"],
            counts=asks["penalties"],
            constraints=asks["constraints"],
            min_tokens=asks["min_tokens"],
            extras=asks["extras"],
        )
        requests.append(RowSampling(i, 0, some, -2, -2, masks))
        total_masks += asks["extras"] * (planned[i] + 1)
    num_rows = sum(planned) + count
    masks_ = torch.stack(
        [pack_ids(random(few, draw(st.integers(0, 6))), v) for _ in range(total_masks)]
        or [torch.zeros(-(-v // 32), dtype=torch.int32)]
    )
    if draw(st.booleans()):
        masks_[0] = -1  # a row after a draft that is not allowed, bits after the vocabulary included
    logits = torch.randn(num_rows + 2, v, generator=generator) * 3
    if draw(st.booleans()):
        logits[random(num_rows, 1)[0], random(v, 1)[0]] = draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
    prompt_len = random(LENGTH, count + 2)
    prompt_len[rows] = torch.minimum(prompt_len[rows], n)
    positions = torch.cat([n[i] + torch.arange(planned[i] + 1) for i in range(count)] + [torch.zeros(2).long()])
    history = History(
        row=rows,
        n=n,
        tokens=random(few, count + 2, LENGTH),
        prompt_len=prompt_len,
        stop_ids=stop_ids,
        min_len=min_len,
        values=params.values,
        max_context=0,
    )
    return Case(v, planned, requests, history, masks_, logits, positions)


def poisoned(case: Case, counted: int = 32) -> SamplingScratch:
    """Return scratch with random content, and counts for `counted` sequences."""
    scratch = SamplingScratch.allocate(len(case.logits), len(case.planned), case.vocab, CPU)
    scratch.tile_value.fill_(torch.nan)
    scratch.counts.fill_(-77)
    return dataclasses.replace(scratch, counts=scratch.counts[:counted])


def run(case: Case, rows: AskedRows, positions: Tensor, counted: int = 32) -> tuple[Tensor, Tensor]:
    """Return adjusted logits, and the largest logits before, by the kernels."""
    plan = case.plan
    assert plan is not None
    logits, top = wide(case.logits), torch.full((len(rows.row),), -5.0)
    most = int(case.history.n.max()) if plan.penalised else 0
    history = dataclasses.replace(case.history, max_context=most)
    adjust(logits, positions, plan.asked, rows, case.masks, history, top, poisoned(case, counted))
    return logits, top


def expected(case: Case, rows: AskedRows, positions: Tensor) -> tuple[Tensor, Tensor]:
    plan = case.plan
    assert plan is not None
    logits, top = case.logits.clone(), torch.full((len(rows.row),), -5.0)
    adjust_reference(logits, positions, plan.asked, rows, case.masks, case.history, top)
    return logits, top


def same(mine: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> bool:
    """Return whether rows have equal bits, and equal largest logits. In a row that was faulty before, only its largest
    logit matters."""
    faulty = theirs[0].isnan().any(dim=1) | (theirs[0] == torch.inf).any(dim=1)
    return mine[0][~faulty].equal(theirs[0][~faulty]) and mine[1].nan_to_num(9e9).equal(theirs[1].nan_to_num(9e9))


@sweep(60)
@given(case=cases(), counted=st.integers(1, 3))
def test_rows_that_ask_have_the_bits_of_the_reference(case: Case, counted: int) -> None:
    plan = case.plan
    if plan is None:
        return
    got = run(case, plan.verify, case.positions, counted)
    assert same(got, expected(case, plan.verify, case.positions))
    others = torch.ones(len(case.logits), dtype=torch.bool).index_fill_(0, plan.verify.row, False)
    assert got[0][others].nan_to_num(7).equal(case.logits[others].nan_to_num(7)), "a row that asks for nothing changed"


@sweep(18)
@given(case=cases(least=2), data=st.data())
def test_a_draft_pass_has_one_row_of_each_of_the_first_sequences(case: Case, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(case.planned)))
    case.logits, case.masks = case.logits[:count], case.masks[:1].repeat(count, 1)
    positions = case.history.n + data.draw(st.integers(0, MAX_K - 1))
    plan = case.plan
    rows = None if plan is None else plan.drafting(count)
    if rows is None:
        assert not any(request.adjusts for request in case.requests[:count])
        return
    assert rows.row.tolist() == [i for i in range(count) if case.requests[i].adjusts]
    assert same(run(case, rows, positions), expected(case, rows, positions))


def grammar_case(seed: int = 0) -> Case:
    """Return three sequences, of which the last two have a grammar that allows one token per row."""
    generator = torch.Generator().manual_seed(seed)
    planned, vocab = [2, 1, 1], 70
    requests = [RowSampling(i, 0, bits(extras=i > 0), -2, -2) for i in range(3)]
    history = History(
        row=torch.arange(3),
        n=torch.tensor([4, 5, 6]),
        tokens=torch.zeros(4, LENGTH, dtype=torch.int64),
        prompt_len=torch.ones(4, dtype=torch.int64),
        stop_ids=torch.full((4, MAX_STOP_IDS), -1),
        min_len=torch.zeros(4, dtype=torch.int64),
        values=SamplingRows.allocate(4).values,
        max_context=0,
    )
    masks = torch.stack([pack_ids(torch.tensor([10 * i + 1]), vocab) for i in range(4)])
    logits = torch.randn(7, vocab, generator=generator)
    positions = torch.tensor([4, 5, 6, 5, 6, 6, 7])
    return Case(vocab, planned, requests, history, masks, logits, positions)


def test_a_mask_of_the_wrong_row_is_seen() -> None:
    case = grammar_case()
    plan = case.plan
    assert plan is not None
    theirs = expected(case, plan.verify, case.positions)
    finite = theirs[0].isfinite().sum(dim=1).tolist()
    assert finite == [case.vocab] * 3 + [1] * 4
    assert same(run(case, plan.verify, case.positions), theirs)
    rows = plan.verify
    faults: list[Callable[[], Any]] = [
        lambda: run(case, dataclasses.replace(rows, mask=rows.mask.roll(1)), case.positions),
        lambda: run(case, dataclasses.replace(rows, row=rows.row - 1), case.positions),
        lambda: run(dataclasses.replace(case, masks=case.masks.roll(1, 0)), rows, case.positions),
    ]
    for fault in faults:
        assert not same(fault(), theirs)


def test_ids_that_a_draft_lacks_stay_out() -> None:
    """Check that ids which a draft lacks keep logits of -inf: no mask, bias or penalty changes them."""
    case = grammar_case()
    case.logits[:, 50:] = -torch.inf
    asks = RequestSampling(repetition_penalty=1.7, frequency_penalty=-2.0, presence_penalty=-2.0)
    SamplingRows(case.history.values).write(0, asks)
    case.history.tokens[:] = torch.arange(45, 45 + LENGTH)
    masks = RowMasks(None, list(range(case.vocab)), [100.0] * case.vocab, ())
    case.requests[0] = RowSampling(0, 0, bits(repetition=True, counts=True, constraints=True), -2, -2, masks)
    plan = case.plan
    assert plan is not None
    got, _ = run(case, plan.verify, case.positions)
    assert got[:3, 50:].eq(-torch.inf).all()
    assert got[:3, :50].isfinite().all()
    assert not got[:3, :50].equal(case.logits[:3, :50] + 100)


@pytest.mark.parametrize("field", ["tokens", "prompt_len", "min_len", "stop_ids", "values"])
def test_what_history_says_matters(field: str) -> None:
    """Check that each input of the kernels matters: changed in the one row that uses it, it changes the result."""
    generator = torch.Generator().manual_seed(2)
    request = RequestSampling(repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=0.25)
    params = SamplingRows.allocate(3)
    params.write(1, request)
    stops = torch.full((3, MAX_STOP_IDS), -1)
    stops[1, 0] = 2
    history = History(
        row=torch.tensor([1]),
        n=torch.tensor([6]),
        tokens=torch.tensor([[3, 3, 5, 1, 1, 7, 4, 0]]).repeat(3, 1),
        prompt_len=torch.tensor([0, 2, 0]),
        stop_ids=stops,
        min_len=torch.tensor([0, 7, 0]),
        values=params.values,
        max_context=0,
    )
    asked = RowSampling(0, 2, bits(repetition=True, counts=True, min_tokens=True), -2, -2)
    case = Case(9, [1], [asked], history, torch.zeros(1, 1, dtype=torch.int32), torch.randn(2, 9, generator=generator),
                torch.tensor([6, 7]))  # fmt: skip
    plan = case.plan
    assert plan is not None
    before = run(case, plan.verify, case.positions)
    assert same(before, expected(case, plan.verify, case.positions))
    changed = getattr(history, field).clone()
    changed[1] += 1
    other = dataclasses.replace(case, history=dataclasses.replace(history, **{field: changed}))
    assert not same(run(other, plan.verify, case.positions), before)
