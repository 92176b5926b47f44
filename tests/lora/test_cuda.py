"""Adapters in the CUDA path, its kernels interpreted: rows of each, steps with more adapters than slots, and engines
against the CPU's."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from backends.cuda_engines import PROMPTS, SMALL, K, give_graphs, serve_by_cuda
from backends.test_cuda_runner import GREEDY, Pair, assert_same, make_pair
from checkpoints import make_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from models.cuda_models import LENGTH, Poisoned, on_device
from models.harness import Feeder
from specrs import LoRARequest, SpeculativeConfig
from specrs.backends.cuda import step_costs, stream
from specrs.backends.cuda.adapters import Adapters, AdapterSlots, slots_bytes
from specrs.backends.cuda.runner import CudaRunner
from specrs.backends.cuda.shapes import MergedShape
from specrs.backends.ring import Header
from specrs.config import EngineConfig
from specrs.core import HEADER_FIELDS, CostModel
from specrs.engine import warm_up
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.engine.request import Request
from specrs.models.loader import load_config
from specrs.models.lora import LoRAAdapter, LoRAPart
from specrs.models.lora_loader import load_lora
from specrs.models.torch_loader import load_model
from sweep import sweep
from torch import Tensor

from .adapters import Spec, leaves_of, merge, write_adapter

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "phi3": {},
    "gemma3_text": {},
    "granite": {},
    "qwen3_moe": {"mlp_only_layers": [1]},
    "qwen3_5_text": {},
    "qwen3_next": {"mlp_only_layers": [0]},
    "lfm2": {},
}
SIZES: dict[str, Any] = {"hidden": 32, "head_dim": 16, "intermediate": 40, "kv_heads": 1, "vocab": 83}


def with_slots(model: Any, adapters: list[LoRAAdapter], of_row: list[int]) -> Poisoned:
    """The model as on a GPU, with adapter i in slot `len(adapters) - 1 - i`; `of_row`: each request's adapter, or
    -1."""
    made = on_device(model)
    slots = AdapterSlots.allocate(
        made.config,
        max_loras=len(adapters),
        max_rank=9,
        max_rows=LENGTH,
        max_seqs=4,
        dtype=made.weights.dtype,
        device=made.weights.device,
    )
    for tensors in (slots for layer in slots.layers for slots in layer.values()):
        tensors.a.fill_(torch.nan)
        tensors.b.fill_(torch.nan)
    slots.shrunk.fill_(torch.nan)
    slots.added.fill_(torch.nan)
    for i, adapter in enumerate(adapters):
        slots.load(len(adapters) - 1 - i, adapter)
    slots.of_row.copy_(torch.tensor([-1 if i < 0 else len(adapters) - 1 - i for i in of_row] + [-1]))
    return dataclasses.replace(made, adapters=slots)


def span(request: int, start: int, end: int) -> list[tuple[int, int]]:
    return [((7 * request + 13 * p) % 83, p) for p in range(start, end)]


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_their_adapters(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check passes of few rows and of many against models with the adapter merged into the weights. One adapter changes
    all modules, one some. The 72 rows go through the MLP in two parts, one of many rows and one of few."""
    monkeypatch.setattr(stream, "MLP_ROWS", 65)
    checkpoint = make_checkpoint(tmp_path / "base", family, seed=1, with_tokenizer=False, **SIZES, **FAMILIES[family])
    leaves = tuple(leaves_of(checkpoint))
    base = load_model(checkpoint, dtype=torch.float32)
    given = [(leaves, 9), (leaves[::2], 2)]
    folders = [write_adapter(tmp_path / str(i), checkpoint, Spec(*spec), seed=i) for i, spec in enumerate(given)]
    adapters = [load_lora(path, base, name=str(i), lora_int_id=i, max_lora_rank=9) for i, path in enumerate(folders, 1)]
    merged = [
        load_model(merge(checkpoint, path, tmp_path / f"{path.name} merged"), dtype="float64") for path in folders
    ]
    models, which = [*merged, load_model(checkpoint, dtype="float64")], [0, -1, 1, 1]
    feeder = Feeder(with_slots(base, adapters, which), num_requests=4, max_len=LENGTH)
    fed = [[(0, 5), (0, 1), (0, 3), (0, 67)], [(5, 8), (1, 2), (3, 4), (67, 68)]]
    found: list[list[Tensor]] = [[], [], [], []]
    # First 4 rows of two requests, then 72 of the others, then rows of all as in verification.
    for requests, spans in (([1, 2], fed[0]), ([3, 0], fed[0]), ([2, 0, 3, 1], fed[1])):
        rows = {b: span(b, *spans[b]) for b in requests}
        logits = feeder.feed(rows, prompts=len(requests) == 2)
        for b, part in zip(requests, logits.split([len(own) for own in rows.values()]), strict=True):
            found[b].append(part)
    for b, i in enumerate(which):
        text = span(b, 0, fed[1][b][1])
        expected = [Feeder(model, max_len=LENGTH).feed({0: text}, prompts=True) for model in models]
        off = [float((torch.cat(found[b]).double() - logits).norm() / logits.norm()) for logits in expected]
        assert off[i] < 1e-5, (b, off)
        assert min(one for j, one in enumerate(off) if j != i % len(off)) > 1e-3, (b, off)


def test_a_row_does_not_depend_on_others(tmp_path: Path) -> None:
    """Check that a row of a verification has the bits of a pass over this row alone, whatever adapters other rows have.
    A row without an adapter has the bits of a model without adapter slots."""
    checkpoint = make_checkpoint(tmp_path / "base", "qwen3", seed=1, with_tokenizer=False, **SIZES)
    leaves = tuple(leaves_of(checkpoint))
    base = load_model(checkpoint, dtype=torch.float32)
    folders = [write_adapter(tmp_path / str(i), checkpoint, Spec(leaves, rank=4 + i), seed=i) for i in (1, 2)]
    adapters = [load_lora(path, base, name=str(i), lora_int_id=i, max_lora_rank=9) for i, path in enumerate(folders, 1)]
    made = []
    for of_row, lengths in (([0, 1, -1, 0], [1, 1, 1, 1]), ([0, -1, -1, 1], [3, 1, 3, 2])):
        feeder = Feeder(with_slots(base, adapters, of_row), num_requests=4, block_size=8, max_len=32)
        feeder.feed({b: span(b, 0, 6) for b in range(4)})
        logits: dict[int, list[Tensor]] = {0: [], 2: []}
        for start in range(6, 9, max(lengths)):
            rows = {b: span(b, start, start + length) for b, length in enumerate(lengths)}
            for b, part in zip(rows, feeder.feed(rows).split(lengths), strict=True):
                if b in logits:
                    logits[b].append(part)
        made.append({b: torch.cat(parts) for b, parts in logits.items()})
    plain = Feeder(on_device(base), num_requests=4, block_size=8, max_len=32)
    plain.feed({b: span(b, 0, 6) for b in range(4)})
    without = plain.feed({2: span(2, 6, 9)})
    assert made[0][0].equal(made[1][0])
    assert made[0][2].equal(made[1][2])
    assert made[0][2].equal(without)


ROWS = 4
HEADER = dict.fromkeys(HEADER_FIELDS, 0)


def constant(c: Any, number: int) -> LoRAAdapter:
    """An adapter of every projection, whose matrices hold its id."""
    slots = AdapterSlots.allocate(
        c, max_loras=1, max_rank=2, max_rows=1, max_seqs=1, dtype=torch.float32, device=torch.device("cpu")
    )
    layers = []
    for layer in slots.layers:
        parts = {}
        for name, own in layer.items():
            firsts = [sum(own.parts[:i]) for i in range(len(own.parts))]
            k = own.a.shape[2]
            parts[name] = tuple(
                LoRAPart(torch.full((2, k), float(number)), torch.full((n, 2), float(number)), first)
                for n, first in zip(own.parts, firsts, strict=True)
            )
        layers.append(parts)
    return LoRAAdapter(str(number), number, tuple(layers))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[int, LoRAAdapter]]:
    folder = make_checkpoint(tmp_path_factory.mktemp("small") / "base", "qwen3", with_tokenizer=False, **SIZES)
    c = load_config(folder)
    return c, {number: constant(c, number) for number in range(1, 6)}


@sweep(40)
@given(data=st.data())
def test_adapters_of_a_step_are_in_slots(data: st.DataObject, small: tuple[Any, dict[int, LoRAAdapter]]) -> None:
    """Check that the adapters of a step are in slots, whatever adapters rows are admitted with and whichever rows are
    in the step."""
    c, known = small
    count = data.draw(st.integers(1, 3), label="slots")
    slots = AdapterSlots.allocate(
        c, max_loras=count, max_rank=2, max_rows=8, max_seqs=ROWS, dtype=torch.float32, device=torch.device("cpu")
    )
    adapters, ids = Adapters(slots, known.__getitem__), [0] * ROWS
    for _ in range(data.draw(st.integers(1, 6), label="steps")):
        admitted = data.draw(st.lists(st.integers(0, ROWS - 1), unique=True), label="admitted")
        chosen = [data.draw(st.integers(0, 5), label="adapter") for _ in admitted]
        for row, number in zip(admitted, chosen, strict=True):
            ids[row] = number
        step = data.draw(st.lists(st.integers(0, ROWS - 1), unique=True), label="rows of the step")
        while len({ids[row] for row in step} - {0}) > count:
            step.pop()
        views = {
            "admit_row": torch.tensor(admitted + [0] * (ROWS - len(admitted))),
            "admit_lora": torch.tensor(chosen + [0] * (ROWS - len(admitted))),
            "seq_row": torch.tensor(step + [0] * (ROWS - len(step))),
        }
        fields = {"num_admitted": len(admitted), "num_decode": len(step) // 2}
        fields["num_prefill"] = len(step) - len(step) // 2
        adapters.begin_step(views, Header(**(HEADER | fields)))
        assert int(slots.of_row[-1]) == -1
        for row in step:
            slot = int(slots.of_row[row])
            assert (slot >= 0) == (ids[row] > 0)
            for layer in slots.layers if slot >= 0 else ():
                for own in layer.values():
                    assert (own.a[slot].view(len(own.parts), 16, -1)[:, :2] == ids[row]).all()
                    assert (own.b[slot, :, :2] == ids[row]).all()
                    assert not own.b[slot, :, 2:].any()


def test_the_bytes_of_slots(small: tuple[Any, dict[int, LoRAAdapter]]) -> None:
    c, _ = small
    slots = AdapterSlots.allocate(
        c, max_loras=3, max_rank=20, max_rows=8, max_seqs=2, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    held = sum(own.num_bytes for layer in slots.layers for own in layer.values())
    assert held == slots_bytes(c, 3, 20, 2) > 0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def requests(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest | None]:
    """Return the adapter of each request, one per prompt of PROMPTS and one more: three requests have an adapter, the
    second has none."""
    folder = tmp_path_factory.mktemp("adapters")
    leaves = tuple(leaves_of(pair.target))
    made = [
        LoRARequest(str(i), i, str(write_adapter(folder / str(i), pair.target, Spec(leaves, rank=2 * i), seed=i)))
        for i in (1, 2, 3)
    ]
    return [made[0], None, made[1], made[2]]


def texts(engine: Engine, loras: list[LoRARequest | None], k: int = K) -> list[Request]:
    prompts = [*PROMPTS, [4, 4, 9]]
    assert engine.loras is not None
    made = [
        Request(
            i,
            prompt,
            GREEDY.replace(max_tokens=8 if lora is None else 4, ignore_eos=True),
            num_speculative_tokens=k,
            seed=i,
            lora=None if lora is None else engine.loras.load(lora),
        )
        for i, (prompt, lora) in enumerate(zip(prompts, loras, strict=True))
    ]
    for request in made:
        engine.add_request(request)
    while engine.has_unfinished():
        engine.step()
    return made


def test_engines(pair: Pair, requests: list[LoRARequest | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that texts and acceptance equal those of the CPU engine, with three adapters for two slots and one request
    of the base model. Runs with and without drafts, by graphs and op by op, and with merged prompt chunks."""
    fields: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    mine, eager, cpu = (pair.engine(gpu=gpu, monkeypatch=monkeypatch, **fields) for gpu in (True, True, False))
    graphs = give_graphs(mine)
    theirs = texts(cpu, requests)
    assert len({str(request.output_token_ids) for request in theirs}) == 4
    assert_same(texts(mine, requests), theirs)
    runner = mine.runner
    assert isinstance(runner, CudaRunner)
    assert runner.loras is not None
    plain_steps = {isinstance(key, tuple) and key[0] == "plain" for key in graphs.replayed}
    shapes = [key for key in graphs.replayed if isinstance(key, MergedShape)]
    assert shapes, "no step had prompt chunks in its verification"
    assert plain_steps == {True, False}, "the last steps have the base model's request alone"
    plain = texts(eager, requests, k=0)
    assert [one.output_token_ids for one in plain] == [one.output_token_ids for one in theirs]


def test_costs_are_those_of_the_graphs_that_steps_replay(
    pair: Pair, requests: list[LoRARequest | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that costs with adapters are times of graphs with adapters, whose rows all have one, and that the other
    costs are times of the other graphs. Texts are the same afterwards."""
    monkeypatch.setattr(step_costs, "SECONDS", 0.0)
    fields: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    engine = pair.engine(gpu=True, monkeypatch=monkeypatch, **fields)
    graphs = give_graphs(engine)
    runner = engine.runner
    assert isinstance(runner, CudaRunner)
    assert runner.loras is not None
    slots = runner.loras.slots
    for has_lora in (False, True):
        graphs.replayed.clear()
        slots.rows.fill_(77)
        assert runner.step_costs(on_host=False, has_lora=has_lora) is not None
        names = [key[0] if isinstance(key, tuple) else None for key in graphs.replayed]
        assert names == ([None] if has_lora else ["plain"]) * len(names) != []
        assert set(slots.rows[: runner.buckets.batches[0]].tolist()) == {0 if has_lora else 77}
        assert (slots.of_row == -1).all()
    cpu = pair.engine(gpu=False, monkeypatch=monkeypatch, **fields)
    assert_same(texts(engine, requests), texts(cpu, requests))


def test_auto_plans_with_both_costs(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the planner of an engine with adapters has costs of both kinds of steps, and no others without."""

    def costs(_: CudaRunner, *, on_host: bool, has_lora: bool = False) -> CostModel:
        assert not on_host
        return CostModel([1], [0, 1, K], [[1.0, 2.0, 3.0 + has_lora]])

    monkeypatch.setattr(CudaRunner, "step_costs", costs)
    monkeypatch.setattr(warm_up, "_measure", lambda *_: 1.0)
    monkeypatch.setattr(warm_up, "_catch_up_ms", lambda *_: 0.0)
    serve_by_cuda(monkeypatch)
    speculative = SpeculativeConfig(
        model=str(pair.draft), num_speculative_tokens="auto", max_num_speculative_tokens=K, max_model_len=30
    )
    config = EngineConfig(
        model=str(pair.target), dtype="float32", speculative_config=speculative, enable_lora=True, max_loras=2, **SMALL
    )
    planner = build_engine(config, pair.gpu).planner
    assert planner is not None
    assert [planner.costs(has_lora=has_lora).ms(1, K) for has_lora in (False, True)] == [3.0, 4.0]
