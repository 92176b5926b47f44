"""Configurations of kernels: which fit, which is chosen, and what the table holds. Times are made up."""

import dataclasses
import itertools
import json
import random
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from specrs.backends.cuda.experts import ExpertBuffers, expert_shapes
from specrs.kernels.coding import Coding
from specrs.kernels.cuda import configs
from specrs.kernels.cuda.configs import LinearConfig, LinearShape, default_config, fit, linear_config, load_table
from specrs.kernels.cuda.device import INTERPRETER, DeviceLimits
from specrs.kernels.cuda.grouped_linear import grouped_linear_reference
from specrs.kernels.cuda.linear_product import Product, skinny_linear_reference
from specrs.kernels.cuda.tuning import Operands, Trial, candidates, select, write_table
from specrs.models.loader import load_config

from .launch import directly

H200 = DeviceLimits("NVIDIA H200", 90, 132, 227 * 1024)
CONSUMER = DeviceLimits("some card", 120, 170, 99 * 1024)
SHAPE = LinearShape(4096, 2048, torch.bfloat16)

shapes = st.builds(
    LinearShape,
    n=st.sampled_from([64, 2048, 4608, 25600, 151936]),
    k=st.sampled_from([64, 1024, 5120, 25600]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    gated=st.booleans(),
    experts=st.sampled_from([None, (128, 8)]),
)


@given(shape=shapes, limits=st.sampled_from([H200, CONSUMER]), rows=st.sampled_from([16, 32, 64]))
def test_defaults_fit_every_device(shape: LinearShape, limits: DeviceLimits, rows: int) -> None:
    config = linear_config(shape, rows, limits)
    stage = shape.stage_bytes(config.block_n, config.block_k, rows)
    assert config.num_stages >= 2
    assert config.num_stages * stage <= limits.shared_memory
    assert 1 <= config.programs <= shape.bound(config.block_n, config.block_k)
    # What decides the order of a sum does not depend on the number of rows.
    few = linear_config(shape, 16, limits)
    assert (config.block_n, config.block_k, config.programs) == (few.block_n, few.block_k, few.programs)


@given(shape=shapes, limits=st.sampled_from([H200, CONSUMER]))
def test_candidates_are_different_and_start_with_the_default(shape: LinearShape, limits: DeviceLimits) -> None:
    found = candidates(shape, limits)
    assert found[0] == fit(default_config(shape, limits), shape, 16, limits)
    assert len(set(found)) == len(found)
    assert all(fit(config, shape, 16, limits) == config for config in found)


def test_the_fastest_is_chosen_though_the_clock_drifts_and_one_measurement_lies() -> None:
    found = candidates(SHAPE, H200)
    assert len(found) > 20
    best, lucky = found[7], found[11]
    rng, calls, lied = random.Random(0), 0, False

    def timer(shape: LinearShape, config: LinearConfig) -> float:
        nonlocal calls, lied
        calls += 1
        if config == lucky and not lied:
            lied = True
            return 1e-9
        return (8e-6 if config == best else 1e-5) * (1 + 1e-4 * calls) * rng.uniform(1, 1.01)

    chosen, seconds, before = select(SHAPE, found, timer)
    assert chosen == best
    assert seconds < 0.9 * before


def test_the_default_stays_unless_another_is_clearly_faster() -> None:
    found = candidates(SHAPE, H200)
    assert select(SHAPE, found, lambda shape, config: 1.0 if config == found[0] else 0.985)[0] == found[0]
    assert select(SHAPE, found, lambda shape, config: 1.0 if config == found[0] else 0.97)[0] != found[0]
    assert select(SHAPE, found, lambda shape, config: 1.0 if config == found[0] else float("inf"))[0] == found[0]


def test_table_keeps_other_gpus_and_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = tmp_path / "configs.json", LinearShape(64, 64, torch.bfloat16, gated=True)
    first, second = LinearConfig(32, 64, 99, 8, 3), LinearConfig(128, 64, 11, 4, 4)
    write_table(path, "other GPU", {SHAPE: second})
    write_table(path, H200.name, {SHAPE: second, other: second})
    write_table(path, H200.name, {SHAPE: first})
    assert load_table(path) == {
        "other GPU": {SHAPE.key: second},
        H200.name: {SHAPE.key: first, other.key: second},
    }
    monkeypatch.setattr(configs, "load_table", lambda: load_table(path))
    assert linear_config(SHAPE, 16, H200) == first
    assert linear_config(SHAPE, 16, dataclasses.replace(H200, name="new")) == fit(
        default_config(SHAPE, H200), SHAPE, 16, H200
    )


def test_experts_have_entries_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that experts have entries of their own in the table, which the engine reads and other products do not;
    without an entry there are at most four stages."""
    model = load_config(make_checkpoint(tmp_path / "model", "qwen3_moe", hidden=64, head_dim=32))
    of = expert_shapes(model, torch.bfloat16)
    assert model.experts is not None
    count, each, inner = model.experts.count, model.experts.per_token, model.experts.intermediate_size
    assert of["gate_up"].key == f"n{inner}-k64-bfloat16-gated-{each}of{count}"
    assert of["down"].key == f"n64-k{inner}-bfloat16-{each}of{count}"
    limits, path = DeviceLimits("some GPU", 90, 132, 227 * 1024), tmp_path / "configs.json"
    found = {shape: LinearConfig(128, 64, 5 + i, 8, 6) for i, shape in enumerate(of.values())}
    before = ExpertBuffers.allocate(model, 64, torch.bfloat16, torch.device("cpu"), limits)
    assert before is not None
    assert all(LinearConfig(*cut).num_stages <= 4 for cut in before.configs.values())
    write_table(path, "some GPU", found)
    monkeypatch.setattr(configs, "load_table", lambda: load_table(path))
    made = ExpertBuffers.allocate(model, 64, torch.bfloat16, torch.device("cpu"), limits)
    assert made is not None
    for name, shape in of.items():
        assert made.configs[name, None, 16] == found[shape].as_list()
        alone = dataclasses.replace(shape, experts=None)
        assert linear_config(alone, 16, limits) == fit(default_config(alone, limits), alone, 16, limits)


def launch(trial: Trial, operands: Operands) -> None:
    directly(lambda *moved: trial.launch(Operands(*moved)), *operands)


def test_trials_of_experts_launch_what_passes_do() -> None:
    """Check that tuning trials of experts launch what passes do: pairs sorted by expert, and no variation of programs,
    since each has a tile."""
    shape = LinearShape(64, 32, torch.float32, gated=True, experts=(8, 3))
    assert len({config.programs for config in candidates(dataclasses.replace(shape, dtype=torch.bfloat16), H200)}) == 1
    for own in (shape, LinearShape(32, 64, torch.float32, experts=(8, 3))):
        trial = Trial.of(own, LinearConfig(16, 32, 1, 4, 2), 5, INTERPRETER)
        x, weight, out, (order, starts), *_ = operands = trial.operands(torch.device("cpu"))
        x.normal_()
        weight.normal_()
        launch(trial, operands)
        assert sorted(order.tolist()) == list(range(15))
        assert starts.tolist() == sorted(starts.tolist())
        assert (starts[0], starts[-1]) == (0, 15)
        assert all(len(set((order[a:b] // 3).tolist())) == b - a for a, b in itertools.pairwise(starts.tolist()))
        expected, flags = torch.empty_like(out), [3 if own.gated else 1, int(own.gated), 0, 5]
        grouped_linear_reference(x, [weight], (order, starts), expected, flags)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "coding", [None, Coding("fp8", 32, outputs=32), Coding("int4", 64, zeros=True), Coding("int8", 32, minima="pairs")]
)
def test_trials_are_products_of_random_operands(coding: Coding | None) -> None:
    shape = LinearShape(48, 64, torch.float32, gated=True, coding=coding)
    trial = Trial.of(shape, LinearConfig(16, 64, 2, 4, 2), 3, INTERPRETER)
    (operands,) = trial.in_turn(torch.device("cpu"))
    launch(trial, operands)
    expected = torch.empty_like(operands.out)
    product = Product(operands.weight, gated=True, coding=coding, scales=operands.scales)
    skinny_linear_reference(operands.x, product, expected)
    assert expected.isfinite().all()
    assert expected.any()
    torch.testing.assert_close(operands.out, expected, rtol=1e-3, atol=1e-3)


def test_committed_table_can_be_read() -> None:
    for gpu, entries in load_table().items():
        assert gpu
        assert all(config.num_stages >= 2 for config in entries.values())
    assert "products" in json.loads(configs.TABLE.read_text())
