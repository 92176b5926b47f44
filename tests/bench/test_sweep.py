"""`specrs bench sweep`: rows of a server for each K, interrupted and resumed; one test uses the bundled pair."""

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from specrs.bench.results import VANILLA, SweepRow, read
from specrs.cli import main
from specrs.pair import TARGET

PROGRAM = Path(__file__).with_name("fake_server.py")


def arguments(output: Path, *serve: str, k: str = "1,3", concurrency: str = "1,2") -> list[str]:
    command = shlex.join([sys.executable, str(PROGRAM), *serve])
    return [
        "bench", "sweep", "--output", str(output), "--serve-cmd", command, "--model", "fake",
        "--tokenizer", str(TARGET),
        "--drafter", '{"method": "eagle3", "model": "org/drafter"}', "--k", k, "--max-concurrency", concurrency,
        "--num-prompts", "6", "--random-input-len", "4", "--random-output-len", "9", "--request-rate", "inf",
        "--disable-tqdm", "--server-timeout-sec", "60",
    ]  # fmt: skip


def keys(rows: list[SweepRow]) -> list[tuple[str, int, int]]:
    return [(row.sd_method, row.num_spec_toks, row.concurrency) for row in rows]


FULL = [(VANILLA, 0, 1), (VANILLA, 0, 2), ("eagle3", 1, 1), ("eagle3", 1, 2), ("eagle3", 3, 1), ("eagle3", 3, 2)]


def test_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sweep.parquet"
    assert main([*arguments(path), "--analysis", "unit", "--temperature", "0.5", "--tp", "2"]) == 0
    rows = read(path)
    assert keys(rows) == FULL
    assert {(row.analysis, row.dataset, row.temp, row.tp, row.n_reqs) for row in rows} == {
        ("unit", "random", 0.5, 2, 6)
    }
    assert {row.draft_model for row in rows} == {VANILLA, "org/drafter"}
    # a server streams one token, then four chunks of 1, 2 or 3 tokens at K = 0, 1, 3
    lengths = {0: None, 1: 2.0, 3: 3.0}
    assert all(row.acceptance_length == lengths[row.num_spec_toks] for row in rows)
    assert all(row.acceptance_rate == {0: None, 1: 100.0, 3: pytest.approx(200 / 3)}[row.num_spec_toks] for row in rows)
    for row in rows:
        tokens = 1 + 4 * (lengths[row.num_spec_toks] or 1)
        assert row.output_len == pytest.approx(tokens)
        assert row.output_token_throughput == pytest.approx(row.req_throughput * tokens)
        assert row.mean_tpot == pytest.approx(4 * row.mean_itl / (tokens - 1), rel=0.05)
        assert row.median_itl <= row.p99_itl
    assert "[6/6] org/drafter K = 3, T = 0.5, concurrency 2: " in capsys.readouterr().out


def test_a_server_that_dies_and_the_rest_afterwards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, once = tmp_path / "sweep.parquet", tmp_path / "died"
    argv = arguments(path, "--die-once", str(once))
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert "eagle3-org/drafter-K1 at T = 0, concurrency 1 broke off with 3 of 6 requests answered" in err
    assert "the server ended while it was measured with exit code 1: K = 1" in err
    before = read(path)
    assert keys(before) == FULL[:2]
    (kept,) = map(json.loads, path.with_suffix(".partial.jsonl").read_text().splitlines())
    assert (kept["partial"], kept["setting"], kept["completed"], kept["failed"]) == (
        True,
        "eagle3-org/drafter-K1",
        3,
        3,
    )
    assert main(argv) == 0
    rows = read(path)
    assert keys(rows) == FULL
    assert rows[:2] == before  # not measured again
    assert "starting vanilla" not in capsys.readouterr().err
    assert main(argv) == 0
    assert read(path) == rows
    assert "starting" not in capsys.readouterr().err


def test_interrupted_by_the_user_and_resumed(tmp_path: Path) -> None:
    path = tmp_path / "sweep.parquet"
    argv = [
        sys.executable,
        "-c",
        "import sys; from specrs.cli import main; sys.exit(main())",
        *arguments(path, "--gap-ms", "10"),
    ]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as sweep:
        assert sweep.stdout is not None
        for line in sweep.stdout:
            if line.startswith("[3/6]"):
                sweep.send_signal(signal.SIGINT)
                break
        assert sweep.wait(60) in (2, 130)
    rows = read(path)
    assert keys(rows) in (FULL[:3], FULL[:4])
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert keys(read(path)) == FULL
    assert read(path)[:3] == rows[:3]
    assert "starting vanilla" not in done.stderr


def test_a_file_of_another_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sweep.parquet"
    argv = arguments(path, k="1", concurrency="1")
    assert main(argv) == 0
    first = read(path)
    assert main([*argv, "--ignore-eos"]) == 2
    assert "its rows were measured with ignore_eos=False, not True; use the same value" in capsys.readouterr().err
    assert read(path) == first
    # more of the same is no other sweep
    assert main([*arguments(path, k="1,2", concurrency="1"), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert out.count("to measure: nothing") == 2
    assert out.count("to measure: T = 0 x 1") == 1
    assert main([*argv, "--ignore-eos", "--restart"]) == 0
    assert keys(read(path)) == keys(first)
    assert read(path) != first


def test_runs_go_in_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sweep.parquet"
    assert main([*arguments(path, k="1", concurrency="1"), "--num-runs", "2"]) == 0
    once = [(VANILLA, 0, 1), ("eagle3", 1, 1)]
    assert keys(read(path)) == once * 2
    capsys.readouterr()
    assert main([*arguments(path, k="1", concurrency="1,2"), "--num-runs", "2", "--dry-run"]) == 0
    assert capsys.readouterr().out.count("to measure: T = 0 x 2 (2 runs)") == 2
    assert main([*arguments(path, k="1", concurrency="1"), "--num-runs", "3"]) == 0
    assert keys(read(path)) == once * 3


def test_a_server_that_does_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sweep.parquet"
    assert main(arguments(path, "--broken")) == 2
    assert "the server ended before it was ready with exit code 3: no weights here (log: " in capsys.readouterr().err
    argv = arguments(path)
    argv[argv.index("--serve-cmd") + 1] = str(tmp_path / "nothing")
    assert main(argv) == 2
    assert "cannot be started" in capsys.readouterr().err
    assert not path.exists()


def test_drafters_as_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each drafter is a row, and so are two settings of one method."""
    configs = [
        {"method": "ngram", "prompt_lookup_max": 2},
        {"method": "ngram", "prompt_lookup_max": 4},
        {"model": "org/draft", "use_heterogeneous_vocab": True, "rejection_sample_method": "coupled"},
    ]
    drafters = [part for config in configs for part in ("--drafter", json.dumps(config))]
    path = tmp_path / "sweep.parquet"
    argv = [*arguments(path, k="0,2", concurrency="1"), *drafters]
    assert main(argv) == 0
    assert [(row.sd_method, row.draft_model, row.num_spec_toks) for row in read(path)] == [
        (VANILLA, VANILLA, 0),
        ("eagle3", "org/drafter", 2),
        ("ngram", "ngram prompt_lookup_max=2", 2),
        ("ngram", "ngram prompt_lookup_max=4", 2),
        ("draft_model", "org/draft use_heterogeneous_vocab rejection_sample_method=coupled", 2),
    ]
    capsys.readouterr()
    assert main([*argv, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("to measure: nothing") == 5
    for config in configs:
        assert json.dumps(config | {"num_speculative_tokens": 2}) in printed


@pytest.mark.parametrize(
    ("serve", "without"),
    [([], 1), (["--serve-cmd", "bin/specrs serve m"], 1), (["--serve-cmd", "vllm serve m"], 0)],
    ids=["ours", "specrs", "vllm"],
)
def test_vanilla_rows_of_specrs_are_measured_without_its_default_drafts(
    serve: list[str], without: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["bench", "sweep", "--output", str(tmp_path / "x.parquet"), "--model", "m", "--k", "0,2", "--dry-run"]
    argv += ["--drafter", '{"method": "ngram"}', "--max-concurrency", "1", "--tokenizer", str(TARGET)]
    assert main([*argv, *serve]) == 0
    vanilla, _, drafting, _ = capsys.readouterr().out.splitlines()
    assert vanilla.count("--no-speculation") == without
    assert "--speculative-config" in drafting
    assert "--no-speculation" not in drafting


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--output", "x.csv"], "must end in .parquet"),
        (["--k", "0"], "must have a K above 0"),
        (["--max-concurrency", "0,1"], "must be at least 1"),
        (["--temperature", "-1"], "must not be negative"),
        (["--drafter", "{"], "must be JSON"),
        (["--drafter", '{"num_speculative_tokens": 3}'], "without num_speculative_tokens"),
        (["--drafter", '{"method": "eagle3", "model": "org/drafter"}'], "must be different"),
        (["--backend", "tgi"], "--backend='tgi'"),
        (["--num-runs", "0"], "--num-runs=0"),
    ],
)
def test_wrong_options(more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments(tmp_path / "sweep.parquet"), *more]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_bundled_pair(tmp_path: Path) -> None:
    """Check a sweep with specrs's own server: the counters in its rows, and a chart."""
    path = tmp_path / "sweep.parquet"
    argv = ["bench", "sweep", "--output", str(path), "--k", "2", "--max-concurrency", "2", "--num-prompts", "3"]
    assert main([*argv, "--input-len", "16", "--output-len", "12", "--ignore-eos", "--disable-tqdm"]) == 0
    rows = read(path)
    assert keys(rows) == [(VANILLA, 0, 2), ("draft_model", 2, 2)]
    assert (rows[1].dataset, rows[1].analysis, rows[1].draft_model) == ("bundled", "bundled pair", "bundled draft")
    assert all(row.output_len == pytest.approx(12.0) for row in rows)
    assert rows[0].acceptance_length is None
    assert rows[1].acceptance_length is not None
    assert 1.0 < rows[1].acceptance_length <= 3.0
    assert main(["bench", "plot", str(path), "--figures", "2"]) == 0
    assert (tmp_path / "sweep" / "figure-2-speedup-k.png").is_file()
