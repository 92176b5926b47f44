"""`specrs bench throughput`, `latency` and `acceptance` on the bundled pair: what is printed is what is written."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from specrs import LLM, SamplingParams
from specrs.bench.datasets import DatasetConfig, load
from specrs.cli import main
from specrs.cli.bench.options import prompts
from specrs.pair import TARGET
from specrs.tokenizer import Tokenizer

DRAFTS = "--speculative-config.num_speculative_tokens=3"


def saved(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_throughput(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    argv = [
        "bench",
        "throughput",
        "--num-prompts",
        "3",
        "--input-len",
        "20",
        "--output-len",
        "8",
        "--disable-tqdm",
        "--enforce-eager",  # torch's profiler sees passes that torch computes
        DRAFTS,
    ]
    assert (
        main(
            [
                *argv,
                "--enforce-eager",
                "--output-json",
                str(path),
                "--profile",
                "--profile-dir",
                str(tmp_path / "traces"),
            ]
        )
        == 0
    )
    out, found = capsys.readouterr().out, saved(path)
    assert "Total num prompt tokens:  60\nTotal num output tokens:  24\n" in out
    assert (found["num_requests"], found["total_num_tokens"]) == (3, 84)
    assert found["output_tokens_per_second"] == pytest.approx(24 / found["elapsed_time"])
    assert found["tokens_per_second"] == pytest.approx(84 / found["elapsed_time"])
    rates = [found[f"{name}_per_second"] for name in ("requests", "tokens", "output_tokens")]
    requests, total, output = (f"{rate:.2f}" for rate in rates)
    assert f"Throughput: {requests} requests/s, {total} total tokens/s, {output} output tokens/s\n" in out
    assert f"Acceptance length: {found['acceptance_length']:.2f}" in out
    (trace,) = (tmp_path / "traces").iterdir()
    events = saved(trace)["traceEvents"]
    assert any("aten::" in event.get("name", "") for event in events)


def test_the_published_command_of_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check the published command of a vLLM profile: its flags, with a file for the hub's data set and the bundled pair
    for its models."""
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"instruction": "Add types.", "input": "def f(a):\n    return a\n"}) + "\n")
    config = {"method": "draft_model", "num_speculative_tokens": 3, "max_model_len": 2048}
    argv = [
        f"--speculative-config={json.dumps(config)}", "--dataset-name=hf", f"--dataset-path={data}",
        "--max-num-seqs=100", "--num-prompts=10", "--input-len=1000", "--output-len=10", "--max-model-len=1024",
        "--gpu-memory-utilization=0.95", "--profile", f"--profile-dir={tmp_path / 'traces'}", "--disable-tqdm",
    ]  # fmt: skip
    assert main(["bench", "throughput", *argv]) == 0
    assert "Total num output tokens:  100\n" in capsys.readouterr().out
    assert len(list((tmp_path / "traces").iterdir())) == 1


def test_latency(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    argv = ["bench", "latency", "--batch-size", "2", "--input-len", "8", "--output-len", "4", "--num-iters", "3"]
    assert main([*argv, "--num-iters-warmup", "1", "--disable-tqdm", "--output-json", str(path)]) == 0
    out, found = capsys.readouterr().out, saved(path)
    assert len(found["latencies"]) == 3
    assert found["avg_latency"] == pytest.approx(sum(found["latencies"]) / 3)
    assert found["percentiles"]["50"] == pytest.approx(sorted(found["latencies"])[1])
    lines = out.splitlines()
    assert lines[0] == f"Avg latency: {found['avg_latency']} seconds"
    assert [line.split("%")[0] for line in lines[1:]] == ["10", "25", "50", "75", "90", "99"]
    assert all(re.fullmatch(r"\d+% percentile latency: [\d.e-]+ seconds", line) for line in lines[1:])


def test_acceptance_is_that_of_an_engine_at_that_k(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that greedy acceptance measured by one engine at the largest K equals that of an engine at each K. Sampled
    rows are only checked for being consistent."""
    path = tmp_path / "out.json"
    argv = ["bench", "acceptance", "--num-prompts", "3", "--input-len", "24", "--output-len", "16", "--k", "1,3"]
    more = ["--temperature", "0,1", "--ignore-eos", "--dtype", "float64", "--disable-tqdm"]
    assert main([*argv, *more, "--output-json", str(path)]) == 0
    rows = saved(path)["rows"]
    assert [(row["k"], row["temperature"]) for row in rows] == [(1, 0.0), (3, 0.0), (1, 1.0), (3, 1.0)]
    samples = load(DatasetConfig(name="bundled", num_prompts=3, input_len=24), Tokenizer(str(TARGET)))
    for row in rows:
        assert row["acceptance_length"] == pytest.approx(1 + sum(row["per_position"]))
        assert len(row["per_position"]) == row["k"]
        if row["temperature"]:
            continue
        llm = LLM(speculative_config={"num_speculative_tokens": row["k"]}, dtype="float64", max_model_len=64)
        llm.generate(
            [list(sample.prompt) for sample in samples if not isinstance(sample.prompt, str)],
            SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True),
            use_tqdm=False,
        )
        stats = llm.stats()
        assert (stats.drafts, stats.acceptance_length) == (row["drafts"], pytest.approx(row["acceptance_length"]))
    table = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    expected = [[str(r["k"]), f"{r['temperature']:.1f}", f"{r['acceptance_length']:.2f}"] for r in rows]
    assert [line[:4] for line in table] == [["bundled", "target", "bundled", "draft"]] * 4
    assert [line[4:7] for line in table] == expected


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_acceptance_does_not_depend_on_what_ran_before(method: str, tmp_path: Path) -> None:
    """Check that acceptance does not depend on earlier runs: every K and temperature gets the same prompts, and suffix
    decoding must not draft from outputs of earlier runs."""
    argv = ["bench", "acceptance", "--num-prompts", "3", "--input-len", "32", "--output-len", "24", "--ignore-eos"]
    argv += ["--dtype", "float64", "--disable-tqdm", "--speculative-config", json.dumps({"method": method})]
    found = []
    for k, temperature in (("1,3", "0,1"), ("3", "1")):
        path = tmp_path / f"{k}.json"
        assert main([*argv, "--k", k, "--temperature", temperature, "--output-json", str(path)]) == 0
        found.append(saved(path)["rows"])
    assert found[0][-1] == found[1][0]
    assert found[0][1]["drafts"] > 0


def test_a_list_is_named_as_the_engine_reads_it(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "acceptance", "--num-prompts", "1", "--input-len", "8", "--output-len", "4", "--disable-tqdm"]
    assert main([*argv, "--k", "2", "--temperature", "0", "--speculative-config", '{"method": " ngram, eagle3"}']) == 0
    assert capsys.readouterr().out.splitlines()[2].split()[:3] == ["bundled", "target", "ngram,eagle3"]
    assert main([*argv, "--k", "2", "--temperature", "0", "--speculative-config", '{"method": "eagle3"}']) == 0
    assert capsys.readouterr().out.splitlines()[2].split()[:4] == ["bundled", "target", "bundled", "eagle3"]


def test_instructions_go_through_the_template(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"turns": ["import os"]}\n')
    tokenizer = Tokenizer(str(TARGET))
    samples = load(DatasetConfig(name="hf", path=str(path), num_prompts=1), tokenizer)
    tokenizer.chat_template = "# {{ messages[0].content }}"
    assert prompts(samples, tokenizer) == [tokenizer.encode("# import os")]
    assert prompts(samples, tokenizer, template=False) == [tokenizer.encode("import os")]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["throughput", "--input-len", "9999", "--num-prompts", "1", "--max-model-len", "64"], "prompt 0 was refused"),
        (["latency", "--num-iters", "0"], "--num-iters=0"),
        (["latency", "--batch-size", "0"], "--batch-size=0"),
        (["acceptance", "--num-prompts", "0"], "--num-prompts=0"),
        (["throughput", "--model", "nowhere/at/all"], "nowhere/at/all"),
        (["throughput", "-tp", "3"], "tensor_parallel_size=3"),
    ],
)
def test_wrong_options(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *argv]) == 2
    assert message in capsys.readouterr().err
