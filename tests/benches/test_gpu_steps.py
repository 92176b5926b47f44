"""The bench of a step on a GPU: it tells the graphs' time from the rest of a step, and leaves prompts out."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from backends.cuda_engines import GREEDY, K, engine_config, make_engine
from checkpoints import make_checkpoint, perturb_checkpoint
from module_files import load_file
from specrs.backends.cuda.runner import CudaRunner
from specrs.engine.engine import Engine
from specrs.engine.request import Request
from specrs.engine.weights import load_weights

GRAPH, ELSE, DRAFT_PROMPT = 10.0, 2.0, 500.0
"""Milliseconds of a graph, of what else a step does, and of a draft's prompt, on the test's clock."""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the bench, as on a machine without a GPU."""
    for name, content in {
        "gpu.rates": {"rates": None},
        "gpu.steady": {"OUTPUT": 0, "PROMPT": 0},
        "gpu.timing": {"ON_GPU": False, "synchronize": lambda: None},
    }.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))
    return load_file("gpu_serving", Path(__file__).parents[2] / "benches/gpu/serving.py")


def test_a_step_is_split_into_its_graphs_and_the_rest(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_checkpoint(tmp_path / "target", layers=1, hidden=32, kv_heads=1, head_dim=16, vocab=61)
    draft = perturb_checkpoint(target, tmp_path / "draft", noise=0.1, seed=2)
    config = engine_config(target, {"method": "draft_model", "model": str(draft)})
    engine = make_engine(config, load_weights(config))
    runner, now = engine.runner, 0.0
    assert isinstance(runner, CudaRunner)
    replay, decoding, feed = runner.graphs.replay, runner._decoding, runner._catch_up

    def after(milliseconds: float, function: Any) -> Any:
        def call(*args: Any) -> Any:
            nonlocal now
            now += 1e-3 * milliseconds
            return function(*args)

        return call

    def run(engine: Engine, *_: int) -> None:
        params = GREEDY.replace(max_tokens=9, ignore_eos=True)
        engine.add_request(Request(1, [5, 9, 2, 33, 7], params, num_speculative_tokens=K))
        while engine.has_unfinished():
            engine.step()

    monkeypatch.setattr(type(runner.graphs), "replay", lambda _, key: after(GRAPH, replay)(key))
    monkeypatch.setattr(CudaRunner, "_decoding", lambda _, *args: after(ELSE, decoding)(*args))
    monkeypatch.setattr(CudaRunner, "_catch_up", lambda _, *args: after(DRAFT_PROMPT, feed)(*args))
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(bench, "run", run)
    found = bench.step_times(engine, 1)
    assert found["graph_ms"] == pytest.approx((K + 1) * GRAPH), "one of each draft pass, and one of verification"
    assert found["around_us"] == pytest.approx(1e3 * ELSE)
    assert found["stream_ms"] == pytest.approx(found["graph_ms"] + ELSE)
    assert found["host_us"] == pytest.approx(1e3 * found["stream_ms"]), "without a GPU, the host computes"
    (prompt,) = found["draft_prompt_ms"]
    assert prompt > DRAFT_PROMPT
    assert "execute" not in vars(runner)
    assert "replay" not in vars(runner.graphs)
