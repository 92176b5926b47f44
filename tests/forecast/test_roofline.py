"""Predicted passes against measured ones, and what the command prints. Kernels are counted in `test_kernel_counts`."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from kernel_launches import reference_configs
from models.published_configs import PUBLISHED
from safetensors.torch import load_file
from specrs.backends.cuda.providers import OWN, OWN_BUCKETS, Choice, write_providers
from specrs.backends.cuda.workspace import linear_shapes
from specrs.bench.results import read
from specrs.cli import main
from specrs.errors import InvalidConfigError
from specrs.forecast.gpus import KERNEL_US
from specrs.forecast.roofline import Roofline, Rows, gpu_of, kv_bytes, model_pass, weight_bytes
from specrs.models.config import parse_config
from specrs.models.loader import load_config

from tests.data_sets import data_file

MEASURED = Path(__file__).parents[2] / "benches/results/NVIDIA_H200_9d1f9a6_bench_gpu.json"
LENGTHS = "1.80,2.40,2.87,3.28,3.53,3.70,3.90,4.04"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return reference_configs(tmp_path_factory.mktemp("references"))


def pair(folders: tuple[Path, Path], gpu: str = "H200", **fields: Any) -> Roofline:
    target, draft = map(load_config, folders)
    return Roofline(gpu_of(gpu), target, draft, **fields)


def test_measured_passes_within_three_percent(folders: tuple[Path, Path]) -> None:
    """Check forecasts of passes measured at a commit that launched more kernels: one for RoPE, and one for combining
    the splits of a single row."""
    roofline, measured = pair(folders), json.loads(MEASURED.read_text())
    passes, target, draft = measured["passes"], 452, 172

    def since(kernels: int, then: int) -> float:
        return 1e-3 * KERNEL_US * (then - kernels)

    for rows, ms in passes["target_pass_ms"].items():
        made = roofline.target_pass(1, int(rows) - 1)
        assert made.ms(roofline.gpu) + since(made.kernels, target) == pytest.approx(ms, rel=0.026)
    made = roofline.draft_pass(1)
    assert made.ms(roofline.gpu) + since(made.kernels, draft) == pytest.approx(passes["draft_pass_ms"], rel=0.01)
    for k, ms in passes["whole_ms"].items():
        then = target + 3 + (int(k) > 0) + draft * int(k)
        predicted = roofline.iteration_ms(1, int(k)) + since(roofline.kernels(1, int(k)), then)
        assert predicted == pytest.approx(ms, rel=0.02)
    for name in ("target", "draft"):
        config = getattr(roofline, name)
        assert model_pass(config, roofline.gpu, Rows(1, 1, 1)).bytes == pytest.approx(
            measured[name]["bytes"], rel=0.005
        )


def test_published_passes(folders: tuple[Path, Path]) -> None:
    """Check forecasts of vLLM's passes on an H100: both models alone, and a traced verification of four drafts. vLLM's
    draft waits for the host, which the forecast leaves out."""
    roofline = pair(folders, "H100")
    assert roofline.target_pass(1, 0).ms(roofline.gpu) / 23.65 - 1 == pytest.approx(-0.03, abs=0.01)
    assert roofline.draft_pass(1).ms(roofline.gpu) / 2.27 - 1 == pytest.approx(-0.22, abs=0.01)
    assert roofline.target_pass(1, 4).ms(roofline.gpu) / 25.4 - 1 == pytest.approx(-0.09, abs=0.01)


def test_published_sweep(folders: tuple[Path, Path]) -> None:
    """Check a forecast of the published sweep. The bandwidth is fitted to its rows without drafts; rows with drafts are
    forecast for up to 32 requests, among which none waits for another."""
    roofline = pair(folders, "H100", context=400)
    roofline = dataclasses.replace(roofline, gpu=dataclasses.replace(roofline.gpu, tb_per_s=2.2))
    errors: dict[bool, list[float]] = {True: [], False: []}
    for row in read(data_file("seed_bench_data.parquet")):
        known = row.draft_model == "Qwen/Qwen3-1.7B" or not row.num_spec_toks
        if known and row.tp == 1 and row.temp == 0.0 and row.concurrency <= 32:
            ms = roofline.iteration_ms(row.concurrency, row.num_spec_toks)
            errors[row.num_spec_toks > 0].append(abs(ms / row.mean_itl - 1))
    assert (len(errors[True]), len(errors[False])) == (36, 6)
    assert max(errors[False]) < 0.01
    assert sum(errors[True]) / 36 < 0.08


@pytest.mark.parametrize(("quantization", "share"), [("fp8", 0.5), ("int8", 0.5), ("int4", 4.25 / 16)])
def test_quantized_weights_are_read_in_place(folders: tuple[Path, Path], quantization: str, share: float) -> None:
    plain, quantized = pair(folders), pair(folders, quantization=quantization)
    head = 2.0 * plain.target.vocab_size * plain.target.hidden_size
    layers = plain.target.num_layers * 2.0 * (5120 * (8192 + 2048 + 8192) + 3 * 5120 * 25600)
    before, after = (item.target_pass(1, 0) for item in (plain, quantized))
    # Beside codes heads are rotated by a kernel of their own, which reads and writes them.
    rotation = plain.target.num_layers * 4 * (8192 + 2048)
    assert before.bytes - after.bytes == pytest.approx(layers * (1 - share) - rotation)
    assert after.kernels - before.kernels == plain.target.num_layers
    assert weight_bytes(plain.target) - weight_bytes(quantized.target, quantization) == layers * (1 - share), (
        "an LM head keeps its numbers"
    )
    assert after.bytes > head
    # Codes of 65 to 256 rows are read once for every 64; of more they become numbers first.
    wide = quantized.target_pass(16, 5)
    assert wide.bytes - after.bytes > layers * share
    assert wide.kernels > plain.target_pass(16, 5).kernels
    assert quantized.target_pass(64, 5).bytes > plain.target_pass(64, 5).bytes


def test_more_rows_read_more_experts(tmp_path: Path) -> None:
    shape = {"layers": 2, "hidden": 64, "kv_heads": 1, "head_dim": 64, "vocab": 97}
    fields = {"num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
    config = load_config(make_checkpoint(tmp_path, "qwen3_moe", **shape, **fields))  # type: ignore[arg-type]
    assert config.experts is not None
    one, six = (model_pass(config, gpu_of("H200"), Rows(1, rows, 1)) for rows in (1, 6))
    expert = 2 * 2.0 * 3 * 64 * 512
    more = expert * (config.experts.expected(6) - config.experts.expected(1))
    assert six.bytes - one.bytes == pytest.approx(more, rel=0.05)
    assert weight_bytes(config) == 2 * sum(
        tensor.numel() for tensor in load_file(tmp_path / "model.safetensors").values()
    )


def test_experts_as_codes_take_half_the_memory() -> None:
    """Qwen3-30B-A3B takes 61 GB in 16 bits and 31 GB in FP8. A row reads the experts that it chooses."""
    config = parse_config(PUBLISHED["Qwen3-30B-A3B"][0])
    assert weight_bytes(config) == pytest.approx(61.06e9, rel=1e-3)
    assert weight_bytes(config, "fp8") == pytest.approx(31.17e9, rel=2e-3)
    numbers, codes = (model_pass(config, gpu_of("H200"), Rows(1, 1, 1), name) for name in (None, "fp8"))
    experts = 48 * 8 * 3 * 2048 * 768
    attention = 48 * (2048 * (4096 + 1024) + 4096 * 2048)
    rotation = 48 * 4 * (4096 + 1024)
    assert numbers.bytes - codes.bytes == pytest.approx(experts + attention - rotation)


def test_memory_and_kv(folders: tuple[Path, Path]) -> None:
    roofline = pair(folders, context=1000)
    assert kv_bytes(roofline.target) == 2 * 2 * 64 * 8 * 128
    one, two = roofline.memory_gb(1), roofline.memory_gb(2)
    assert two - one == pytest.approx(1000 * (kv_bytes(roofline.target) + kv_bytes(roofline.draft)) / 1e9)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
def test_an_fp8_cache_takes_half(folders: tuple[Path, Path], name: str) -> None:
    """Check that an FP8 KV cache takes half the memory and half the reads of attention; nothing else changes."""
    plain, quantized = pair(folders, context=4096), pair(folders, context=4096, kv_cache_dtype=name)
    assert kv_bytes(quantized.target, name) == kv_bytes(plain.target) / 2
    assert plain.draft is not None
    saved = 7 * 4096 * (kv_bytes(plain.target) + kv_bytes(plain.draft)) / 2
    assert plain.memory_gb(7) - quantized.memory_gb(7) == pytest.approx(saved / 1e9)
    for one, other, model in (
        (plain.target_pass(7, 3), quantized.target_pass(7, 3), plain.target),
        (plain.draft_pass(7), quantized.draft_pass(7), plain.draft),
    ):
        assert one.bytes - other.bytes == pytest.approx(7 * 4096 * kv_bytes(model) / 2)
        assert (one.kernels, one.flops) == (other.kernels, other.flops)
    with pytest.raises(InvalidConfigError, match="kv_cache_dtype='int8': not implemented; allowed: 'auto', "):
        pair(folders, kv_cache_dtype="int8").target_pass(1, 1)


def test_what_is_not_known_is_named(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidConfigError, match=r"--roofline='H99': must be one of H100, H200, B200, RTX 4090, DGX"):
        gpu_of("H99")
    with pytest.raises(InvalidConfigError, match="quantization='fp4': must be one of fp8, int8, int4"):
        pair(folders, quantization="fp4").target_pass(1, 0)
    with pytest.raises(InvalidConfigError, match="--draft-model=None: must be given for draft passes"):
        dataclasses.replace(pair(folders), draft=None).iteration_ms(1, 2)
    given = ["forecast", "--roofline", "H200", "--acceptance-rates", "0.8"]
    for more, message in (
        (["--fit-k", "3"], "--fit-k=[3]: has no meaning with --roofline"),
        (["--model", str(folders[0])], "--draft-model=None: must be given with --model"),
        (["--context", "0"], "--context=0: must be an integer from 1"),
    ):
        assert main([*given, *more]) == 2
        assert message in capsys.readouterr().err


def test_models_without_kernels_are_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(make_checkpoint(tmp_path, "llama4_text", with_tokenizer=False))
    given = ["forecast", "--roofline", "H200", "--acceptance-rates", "0.8", "--model", path, "--draft-model", path]
    assert main(given) == 2
    assert "for specrs forecast --roofline, a model whose RoPE rotates halves" in capsys.readouterr().err


def test_the_command(folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = ["--model", str(folders[0]), "--draft-model", str(folders[1])]
    numbers = tmp_path / "out.json"
    options = ["--acceptance-lengths", LENGTHS, "--json", str(numbers), "--plot", str(tmp_path / "out.png")]
    assert main(["forecast", "--roofline", "h200", *models, *options]) == 0
    out = capsys.readouterr().out
    assert "an iteration at K = 8 has 1544 kernels and one launch" in out
    assert "do not fit in 141 GB" in out
    assert "fastest is K = 5" in out
    record = json.loads(numbers.read_text())
    assert (record["gpu"], len(record["passes"]), len(record["forecasts"])) == ("H200", 15, 5)
    assert record["forecasts"][0]["best_k"] == 5
    assert (tmp_path / "out.png").stat().st_size > 1000
    assert main(["forecast", "--roofline", "dgx_spark", "--acceptance-rates", "0.8,0.6", "--batch", "1"]) == 0
    assert "DGX Spark, batch 1" in capsys.readouterr().out


def test_the_command_reads_a_table_of_products(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that a table for this GPU changes the passes that it fuses, and that a table without this GPU is an
    error."""
    table, numbers = tmp_path / "configs.json", tmp_path / "out.json"
    shapes = linear_shapes(load_config(folders[0]), torch.bfloat16).values()
    write_providers(table, "NVIDIA H200", {shape: dict.fromkeys(OWN_BUCKETS, Choice(OWN)) for shape in shapes})
    models = ["--model", str(folders[0]), "--draft-model", str(folders[1]), "--acceptance-rates", "0.8"]
    given = ["forecast", *models, "--batch", "1,64", "--json", str(numbers), "--roofline"]
    kernels = []
    for more in ([], ["--products", str(table)]):
        assert main([*given, "H200", *more]) == 0
        passes = json.loads(numbers.read_text())["passes"]
        kernels.append({(one["batch"], one["pass"]): one["kernels"] for one in passes})
    plain, chosen = kernels
    assert {key for key in plain if chosen[key] != plain[key]} == {(64, "target verifying K = 1")}
    assert (plain[64, "target verifying K = 1"], chosen[64, "target verifying K = 1"]) == (581, 388)
    capsys.readouterr()
    assert main([*given, "H100", "--products", str(table)]) == 2
    assert "must have entries for NVIDIA H100 80GB HBM3" in capsys.readouterr().err
    assert main([*given, "H200", "--products", str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err
