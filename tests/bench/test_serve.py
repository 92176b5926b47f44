"""`specrs bench serve` against a server that streams known chunks: counts exact, times recomputed."""

import json
import re
import signal
import statistics
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
from specrs.bench.serve import LoadConfig, arrivals
from specrs.bench.server_process import free_port, serving
from specrs.cli import main
from specrs.pair import TARGET

from tests.bench.fake_server import FakeServer, Script, running

COMMON = ["bench", "serve", "--tokenizer", str(TARGET), "--disable-tqdm", "--request-rate", "inf"]
RANDOM = ["--random-input-len", "5", "--random-output-len", "9"]


def bench(server: FakeServer, *more: str) -> int:
    return main([*COMMON, "--base-url", server.base_url, *more])


def values(block: str) -> dict[str, str]:
    """Return the `label: value` lines of a block as a dict."""
    pairs = (line.rpartition(":") for line in block.splitlines() if ":" in line)
    return {label.strip(): value.strip() for label, _, value in pairs}


BLOCK = """\
============ Serving Benchmark Result ============
Successful requests: N
Failed requests: N
Maximum request concurrency: N
Benchmark duration (s): F
Total input tokens: N
Total generated tokens: N
Request throughput (req/s): F
Output token throughput (tok/s): F
Peak output token throughput (tok/s): F
Peak concurrent requests: F
Total token throughput (tok/s): F
---------------Time to First Token----------------
Mean TTFT (ms): F
Median TTFT (ms): F
P99 TTFT (ms): F
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms): F
Median TPOT (ms): F
P99 TPOT (ms): F
---------------Inter-token Latency----------------
Mean ITL (ms): F
Median ITL (ms): F
P99 ITL (ms): F
---------------Speculative Decoding---------------
Acceptance rate (%): F
Acceptance length: F
Drafts: N
Draft tokens: N
Accepted tokens: N
Per-position acceptance (%):
Position 0: F
Position 1: F
Position 2: F
Position 3: F
=================================================="""


def test_the_block_line_for_line(capsys: pytest.CaptureFixture[str]) -> None:
    scripts = [[1, 3, 1, 5], [1], [1, 2], [1, 4, 4]]
    with running(FakeServer(lambda i: Script(scripts[i % 4]), k=4)) as server:
        server.drafts, server.accepted, server.per_position[0] = 9, 9, 9  # of somebody before
        assert bench(server, *RANDOM, "--max-concurrency", "2", "--num-prompts", "8") == 0
    lines = capsys.readouterr().out.rstrip("\n").splitlines()
    shape = [re.sub(r"\d+\.\d\d$", "F", re.sub(r"(?<= )\d+$", "N", re.sub(" +", " ", line.strip()))) for line in lines]
    assert shape == BLOCK.splitlines()
    assert all(len(line) == 50 for line in lines if line.endswith(("==", "--")))
    assert all(line[40] == " " and line[41].isdigit() for line in lines[1:12])
    found = values("\n".join(lines))
    sent = [tokens for script in server.sent for tokens in script]
    assert found["Successful requests"] == "8"
    assert found["Total generated tokens"] == str(sum(sent)) == "46"
    assert found["Total input tokens"] == str(8 * 7)  # as the server counts
    drafted = [tokens - 1 for script in server.sent for tokens in script[1:]]
    assert found["Drafts"] == str(len(drafted))
    assert found["Draft tokens"] == str(4 * len(drafted))
    assert found["Accepted tokens"] == str(sum(drafted))
    assert found["Acceptance length"] == f"{1 + statistics.fmean(drafted):.2f}"
    assert found["Acceptance rate (%)"] == f"{100 * sum(drafted) / (4 * len(drafted)):.2f}"
    for i in range(4):
        assert found[f"Position {i}"] == f"{100 * sum(m > i for m in drafted) / len(drafted):.2f}"


@pytest.mark.parametrize("bundled", [False, True])
def test_figures_recomputed_from_the_recorded_events(bundled: bool, tmp_path: Path) -> None:
    """Recompute the figures from `events_ns` and `output_lens`, by the definitions of vLLM, without code of specrs."""
    scripts = [[1, 3, 2], [1, 1, 1, 4], [1], [1, 7]]
    with running(FakeServer(lambda i: Script(scripts[i % 4], gap=0.002, bundled=bundled))) as server:
        more = ["--save-detailed", "--result-dir", str(tmp_path), "--percentile-metrics", "ttft,tpot,itl,e2el"]
        assert bench(server, *RANDOM, *more, "--metric-percentiles", "50,99", "--num-prompts", "12") == 0
    (path,) = tmp_path.iterdir()
    saved: dict[str, Any] = json.loads(path.read_text())
    # one connection may overtake another: which request had which script is told by its length
    assert sorted(saved["output_lens"]) == sorted(sum(script) for script in server.sent)
    events, lengths = saved["events_ns"], saved["output_lens"]
    chunks = {sum(script): len(script) for script in scripts}
    assert [len(times) - 1 for times in events] == [chunks[length] for length in lengths]
    ttft = [(times[1] - times[0]) / 1e6 for times in events]
    e2el = [(times[-1] - times[0]) / 1e6 for times in events]
    itl = [(times[i + 1] - times[i]) / 1e6 for times in events for i in range(1, len(times) - 1)]
    tpot = [
        (times[-1] - times[1]) / (length - 1) / 1e6 for times, length in zip(events, lengths, strict=True) if length > 1
    ]
    for name, series in (("ttft", ttft), ("tpot", tpot), ("itl", itl), ("e2el", e2el)):
        assert saved[f"mean_{name}_ms"] == pytest.approx(statistics.fmean(series), rel=1e-12)
        assert saved[f"median_{name}_ms"] == pytest.approx(statistics.median(series), rel=1e-12)
        assert saved[f"std_{name}_ms"] == pytest.approx(statistics.pstdev(series), rel=1e-9)
        assert saved[f"p99_{name}_ms"] == pytest.approx(float(np.percentile(series, 99)), rel=1e-12)
    duration = saved["duration"]
    assert duration >= max(times[-1] for times in events) / 1e9
    assert saved["request_throughput"] == pytest.approx(12 / duration, rel=1e-12)
    assert saved["output_throughput"] == pytest.approx(sum(lengths) / duration, rel=1e-12)
    assert saved["total_token_throughput"] == pytest.approx((sum(lengths) + 84) / duration, rel=1e-12)
    assert saved["ttfts"] == pytest.approx([value / 1e3 for value in ttft], rel=1e-12)
    assert saved["generated_texts"] == ["x " * length for length in lengths]
    assert (saved["partial"], saved["completed"], saved["failed"]) == (False, 12, 0)
    assert "spec_decode_acceptance_length" not in saved


def test_requests_say_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    sampling = ["--temperature", "0.5", "--top-p", "0.9", "--top-k", "4", "--min-p", "0.1", "--ignore-eos"]
    with running(FakeServer()) as server:
        assert bench(server, *RANDOM, *sampling, "--num-prompts", "3", "--model", "other") == 0
        assert bench(server, *RANDOM, "--num-prompts", "1", "--endpoint-type", "openai-chat") == 0
    for body in server.bodies[:3]:
        prompt = body.pop("prompt")
        assert len(prompt) == 5
        assert all(isinstance(token, int) for token in prompt)
        assert body == {
            "model": "other", "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True},
            "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "ignore_eos": True,
        }  # fmt: skip
    chat = server.bodies[3]
    assert (chat["model"], chat["max_completion_tokens"]) == ("fake", 9)
    assert chat["messages"][0]["role"] == "user"
    assert "temperature" not in chat
    assert capsys.readouterr().out.count("Successful requests:") == 2


def test_the_bundled_model_brings_its_tokenizer() -> None:
    with running(FakeServer(model="bundled")) as server:
        argv = ["bench", "serve", "--base-url", server.base_url, "--dataset-name", "bundled", "--num-prompts", "1"]
        assert main([*argv, "--input-len", "6", "--disable-tqdm"]) == 0
    (body,) = server.bodies
    assert body["model"] == "bundled"
    assert len(body["prompt"]) == 6


def test_concurrency_prompts_rate_and_warmups(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer(lambda i: Script(gap=0.001))) as server:
        assert bench(server, *RANDOM, "--max-concurrency", "3", "--num-warmups", "2", "--request-rate", "1000") == 0
    assert len(server.bodies) == 50 + 2
    assert 1 < server.most_running <= 3
    assert "Successful requests:                     50" in capsys.readouterr().out


def test_arrivals() -> None:
    assert arrivals(LoadConfig(), 5).tolist() == [0.0] * 5
    poisson, even = (arrivals(LoadConfig(request_rate=4.0, burstiness=b), 4000) for b in (1.0, 400.0))
    for times in (poisson, even):
        assert times[-1] == pytest.approx(1000.0)
        assert (np.diff(times) >= 0).all()
    # the coefficient of variation of gamma gaps is 1 / sqrt(burstiness)
    assert np.diff(poisson).std() * 4 == pytest.approx(1.0, abs=0.1)
    assert np.diff(even).std() * 4 == pytest.approx(0.05, abs=0.01)
    assert arrivals(LoadConfig(request_rate=4.0, seed=1), 9).tolist() != poisson[:9].tolist()


def test_a_server_without_usage_or_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer(lambda i: Script([1, 2], usage=False), k=2, metrics=False)) as server:
        assert bench(server, *RANDOM, "--num-prompts", "4") == 0
    out = capsys.readouterr().out
    from specrs.tokenizer import Tokenizer

    ids = Tokenizer(str(TARGET)).encode("x x x ", add_special_tokens=False)
    assert values(out)["Total generated tokens"] == str(4 * len(ids))
    assert values(out)["Total input tokens"] == str(4 * 5)
    assert "Speculative Decoding" not in out


def test_profile(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer()) as server:
        assert bench(server, *RANDOM, "--num-prompts", "2", "--profile") == 0
    assert server.profiled == ["/start_profile", "/stop_profile"]


def test_profile_of_a_server_without_a_profiler(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer(profiler=False)) as server:
        assert bench(server, *RANDOM, "--num-prompts", "2", "--profile") == 2
    assert "--profile: the server did not start its profiler (/start_profile: HTTP 404)" in capsys.readouterr().err


def test_the_trace_of_specrs_own_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, port = tmp_path / "traces", free_port()
    code = "import sys; from specrs.cli import main; sys.exit(main())"
    config = json.dumps({"profiler": "torch", "torch_profiler_dir": str(folder)})
    command = [sys.executable, "-c", code, "serve", "--enforce-eager", "--port", str(port), "--profiler-config", config]
    with serving(command, port, tmp_path / "log", {"OMP_NUM_THREADS": "1"}, 120.0) as server:
        argv = [*COMMON, "--base-url", server.base_url, *RANDOM, "--num-prompts", "2", "--profile"]
        assert main(argv) == 0
        assert "Successful requests:                     2" in capsys.readouterr().out
        assert main(argv) == 0, "it can be done again, and not stopped twice"
        with pytest.raises(HTTPError, match="400"):
            urlopen(Request(f"{server.base_url}/stop_profile", method="POST"))
    traces = list(folder.iterdir())
    assert len(traces) == 2
    names = {event.get("name") for event in json.loads(traces[0].read_text())["traceEvents"]}
    assert "aten::mm" in names or "aten::addmm" in names or "aten::linear" in names


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (400, "HTTP 400: refused with 400"),
        ("cut", "connection lost after 3 chunks"),
        ("silent", "the stream ended before [DONE]"),
        ("error", "the server reported: out of luck"),
        ("garbage", "a chunk is not JSON: '{not json'"),
    ],
)
def test_a_request_that_fails_is_counted_and_named(
    end: str | int, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(FakeServer(lambda i: Script(end=end if i == 1 else "done"))) as server:
        more = ["--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "out.json"]
        assert bench(server, *RANDOM, *more, "--num-prompts", "4", "--max-concurrency", "1") == 0
    captured = capsys.readouterr()
    assert values(captured.out)["Failed requests"] == "1"
    assert values(captured.out)["Total generated tokens"] == "15"
    assert f"1 of 4 requests failed; the first: {reason}" in captured.err
    saved = json.loads((tmp_path / "out.json").read_text())
    assert [bool(error) for error in saved["errors"]] == [False, True, False, False]


def test_a_server_that_dies_midway(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check a server that dies during a run: earlier answers are reported and the result is marked; requests not sent
    are not waited for."""
    with running(FakeServer(lambda i: Script(end="die" if i == 4 else "done"))) as server:
        more = ["--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "out.json"]
        assert bench(server, *RANDOM, *more, "--num-prompts", "30", "--max-concurrency", "1") == 2
        base_url = server.base_url
    captured = capsys.readouterr()
    assert values(captured.out)["Successful requests"] == "4"
    assert f"--base-url={base_url}: 4 of 30 requests were answered; then: no connection" in captured.err
    saved = json.loads((tmp_path / "out.json").read_text())
    assert (saved["partial"], saved["completed"], saved["failed"]) == (True, 4, 26)
    assert saved["errors"][4].startswith("connection lost after 3 chunks")
    assert saved["errors"][-1] == "not sent"
    assert saved["errors"][0] == ""


def test_interrupted_by_the_user(tmp_path: Path) -> None:
    """Check an interrupted run: what was answered until then is reported and marked."""
    tenth = threading.Event()

    def script(number: int) -> Script:
        if number == 10:
            tenth.set()
        return Script(gap=0.01)

    with running(FakeServer(script)) as server:
        code = "import sys; from specrs.cli import main; sys.exit(main())"
        more = ["--num-prompts", "3000", "--max-concurrency", "2", "--save-detailed", "--result-dir", str(tmp_path)]
        argv = [sys.executable, "-c", code, *COMMON, "--base-url", server.base_url, *RANDOM, *more]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as client:
            assert tenth.wait(120)
            client.send_signal(signal.SIGINT)
            out, _ = client.communicate(timeout=60)
    assert client.returncode == 130
    done = int(values(out)["Successful requests"])
    assert 8 <= done < 1000
    (path,) = tmp_path.iterdir()
    saved = json.loads(path.read_text())
    assert (saved["partial"], saved["completed"]) == (True, done)
    assert sum(error == "" for error in saved["errors"]) == done
    assert saved["errors"][-1] == "not sent"


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    for more in ([], ["--model", "m"]):
        assert main([*COMMON, "--base-url", url, *RANDOM, *more]) == 2
        assert f"--base-url={url}: " in (err := capsys.readouterr().err)
        assert "must be an OpenAI-compatible server" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-concurrency", "0"], "--max-concurrency=0"),
        (["--request-rate", "0"], "--request-rate=0"),
        (["--request-rate", "nan"], "--request-rate=nan"),
        (["--burstiness", "0"], "--burstiness=0"),
        (["--num-prompts", "0"], "--num-prompts=0"),
        (["--percentile-metrics", "ttft,nope"], "--percentile-metrics='nope'"),
        (["--goodput", "itl:3"], "--goodput='itl:3'"),
        (["--backend", "tgi"], "--backend='tgi'"),
        (["--base-url", "localhost:8000"], "must begin with http:// or https://"),
        (["--temperature", "-1"], "--temperature=-1"),
        (["--output-len", "0"], "--output-len=0"),
        (["--dataset-name", "random", "--dataset-path", "x"], "--dataset-path='x'"),
        (["--dataset-name", "mt-bench"], "--dataset-path=None"),
        (["--dataset-name", "bundled", "--random-input-len", "3"], "--random-input-len=3"),
        (["--dataset-name", "bundled", "--random-range-ratio", "0.5"], "--random-range-ratio=0.5"),
        (["--hf-split", "test"], "--hf-split='test'"),
        (["--backend", "openai-chat", "--skip-chat-template"], "--skip-chat-template=True"),
    ],
)
def test_wrong_options(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMON, "--model", "m", *argv]) == 2
    assert message in capsys.readouterr().err
