"""`specrs tune` on a machine without a GPU to time: its message, and what it compiles ahead."""

import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from backends.test_trace import fake_decoder
from checkpoints import make_checkpoint
from specrs.backends.cuda.decoder import _shapes_of
from specrs.backends.cuda.experts import expert_shapes
from specrs.backends.cuda.providers import DEFAULT, OWN, Choice, load_providers
from specrs.cli import main
from specrs.cli.tune import rank_shapes, tune_many
from specrs.errors import UnsupportedModelError
from specrs.kernels.cuda.compile_ahead import compile_ahead
from specrs.kernels.cuda.configs import LinearConfig, LinearShape, load_table
from specrs.kernels.cuda.device import DeviceLimits
from specrs.kernels.cuda.tuning import Trial, trials, tune, write_table
from specrs.models.loader import load_config
from specrs.parallel.ranks import Ranks
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget

H200 = DeviceLimits("NVIDIA H200", 90, 132, 227 * 1024)
SMALL, LARGE = LinearShape(4096, 2048, torch.bfloat16), LinearShape(10240, 5120, torch.bfloat16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device to tune for")
def test_refuses_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--model", "anything"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("specrs tune: error: device='cuda': specrs tune times kernels on a CUDA device")
    assert error.count("\n") == 1


def test_checks_rows_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--model", "anything", "--rows", "65"]) == 2
    assert "rows=65: must be an integer from 1 to 64" in capsys.readouterr().err


def test_checks_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--model", "anything", "--jobs", "0"]) == 2
    assert "jobs=0: must be an integer from 1 to 1024" in capsys.readouterr().err


def test_needs_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["tune"])
    assert end.value.code == 2
    assert "--model" in capsys.readouterr().err


def test_launches_find_what_was_compiled_ahead_in_another_process(tmp_path: Path) -> None:
    """Check that launches find what another process compiled ahead, by the key of Triton's cache, although tensors are
    on `meta` there. A trial that does not compile ends no other."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = Path(__file__).with_name("compile_ahead_script.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    first, second, *others = said["errors"]
    assert (first, *others) == (None, None, None, None)
    assert second.startswith("CompilationError: ")
    assert said["hits"] == [True] * 4
    assert len(list(tmp_path.glob("*/*.cubin"))) == 4


def test_a_job_that_ends_its_process_ends_no_other() -> None:
    before = threading.active_count()
    jobs = ["0", "int('odd\\n')", "__import__('os')._exit(1)", "1"]
    errors = [error for _, error in compile_ahead(eval, jobs, GPUTarget("cuda", 90, 32), 1)]
    said = "ValueError: invalid literal for int() with base 10: 'odd\\n'"
    assert errors == [None, said, "its process ended", None]
    assert threading.active_count() == before


def test_a_shape_is_timed_when_its_trials_are_compiled_and_without_those_that_are_not() -> None:
    work = trials([SMALL, LARGE], 48, H200)
    assert len(set(work)) == len(work)
    assert [trial.shape for trial in work] == sorted((trial.shape for trial in work), key=[SMALL, LARGE].index)
    of = {shape: [trial.config for trial in work if trial.shape == shape] for shape in (SMALL, LARGE)}
    fastest, broken = of[SMALL][5], of[SMALL][3]
    done = [(trial, "no" if trial.config == broken or trial.shape == LARGE else None) for trial in work]
    consumed = []

    def timer(shape: LinearShape, config: LinearConfig) -> float:
        assert config != broken
        assert len(consumed) == len(of[SMALL])
        return 1.0 if config == fastest else 2.0

    small, large = tune((consumed.append(one) or one for one in done), work, timer)
    assert (small.shape, small.config, small.seconds, small.default_seconds) == (SMALL, fastest, 1.0, 2.0)
    assert small.failed == [(broken, "no")]
    assert large.shape == LARGE
    assert math.isinf(large.seconds)
    assert len(large.failed) == len(of[LARGE])


def test_a_trial_is_what_the_product_of_its_rows_takes() -> None:
    config = LinearConfig(64, 256, 132, 4, 8)
    few, many = (Trial.of(SMALL, config, rows, H200).config for rows in (6, 64))
    assert many.num_stages < few.num_stages
    assert many.num_warps == 8


def test_products_of_many_rows_are_written_with_who_is_fastest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check the table and the report of products of many rows, with made-up times. The table keeps what it had."""

    class Timer:
        def __init__(self, *_: object) -> None: ...

        def __call__(self, shape: LinearShape, rows: int) -> dict[Choice, float]:
            return {DEFAULT: 2e-6} | ({Choice(OWN): 1e-6} if rows == 96 else {})

    monkeypatch.setattr("specrs.backends.cuda.many_rows.ManyRowsTimer", Timer)
    monkeypatch.setattr("specrs.backends.cuda.many_rows.BUCKETS", (96, 384))
    monkeypatch.setattr("specrs.extras.find_spec", lambda _: None)
    path = tmp_path / "configs.json"
    write_table(path, "other", {SMALL: LinearConfig(64, 128, 132, 4, 4)})
    tune_many({SMALL.key: SMALL, LARGE.key: LARGE}, path)
    (gpu,) = load_providers(path)
    choices = {96: Choice(OWN), 384: DEFAULT}
    assert load_providers(path)[gpu] == {"n4096-k2048-bfloat16": choices, "n10240-k5120-bfloat16": choices}
    assert list(load_table(path)) == ["other"]
    said = capsys.readouterr().out
    assert said.startswith("cuBLASLt is not timed; pip install 'specrs[cublaslt]'")
    assert "n4096-k2048-bfloat16                96 rows: cublas 2.0 us, own 1.0 us: own" in said


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_shapes_of_ranks_are_those_that_an_engine_looks_up(family: str, ranks: int, tmp_path: Path) -> None:
    """Check that with several ranks the products of a rank's part are tuned, with the LM head's rows. An engine looks
    up no other. 4 ranks share 2 KV heads, and their vocabulary is padded."""
    shape = {"layers": 2, "hidden": 64, "intermediate": 128, "kv_heads": 2, "group": 2, "head_dim": 64, "vocab": 97}
    config = load_config(make_checkpoint(tmp_path, family, **shape))  # type: ignore[arg-type]
    tuned = rank_shapes(config, torch.bfloat16, torch.device("cuda"), ranks)
    rank = cast("Ranks", SimpleNamespace(rank=ranks - 1, size=ranks))
    with FakeTensorMode():
        weights = fake_decoder(tmp_path, torch.bfloat16, ranks=None if ranks == 1 else rank).weights
        looked_up = {shape.key for every in _shapes_of(weights).values() for shape in every}
    looked_up |= {shape.key for shape in expert_shapes(weights.config, torch.bfloat16).values()}
    assert {shape.key for shape in tuned} == looked_up
    assert f"n{-(-97 // ranks)}-k64-bfloat16" in looked_up


def test_models_that_ranks_cannot_share_are_not_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["tune", "--model", str(make_checkpoint(tmp_path / "qwen3")), "--output", str(tmp_path / "configs.json")]
    assert main([*given, "--tensor-parallel-size", "0"]) == 2
    assert "tensor_parallel_size=0: must be an integer from 1 to 1024" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("specrs.kernels.cuda.device.limits_of", lambda device: H200)
    assert main([*given, "-tp", "3"]) == 2
    assert "tensor_parallel_size=3: " in capsys.readouterr().err
    olmo = load_config(make_checkpoint(tmp_path / "olmo2", "olmo2"))
    with pytest.raises(UnsupportedModelError, match=r"tensor_parallel_size=2: .*norms over the query"):
        rank_shapes(olmo, torch.bfloat16, torch.device("cuda"), 2)


def test_the_command_tunes_the_shapes_of_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[str]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("specrs.kernels.cuda.device.limits_of", lambda device: H200)
    monkeypatch.setattr("specrs.backends.cuda.workspace.limits_of", lambda device: H200)
    monkeypatch.setattr("specrs.cli.tune.tune_many", lambda shapes, output: seen.append(set(shapes)))
    shape = {"layers": 1, "hidden": 64, "kv_heads": 2, "group": 2, "head_dim": 64, "intermediate": 128}
    model = make_checkpoint(tmp_path, **shape)  # type: ignore[arg-type]
    for more in ([], ["--tensor-parallel-size", "2"]):
        assert main(["tune", "--model", str(model), "--only", "many", "--dtype", "bfloat16", *more]) == 0
    whole, half = seen
    assert "n128-k64-bfloat16-gated" in whole - half
    assert "n64-k64-bfloat16-gated" in half - whole
