"""Log lines: their form, the request that they name, and the figures every ten seconds."""

import asyncio
import logging
import re

import pytest
from specrs.errors import EngineDeadError, InvalidConfigError
from specrs.outputs import EngineStats
from specrs.server.logs import FORMAT, REQUEST_ID, RequestIdFilter, figures, log_figures

from .harness import serving

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}"


def stats(**given: object) -> EngineStats:
    return EngineStats(**({"acceptance_histogram": [0, 0, 0], "num_blocks": 40, "num_free_blocks": 40} | given))  # type: ignore[arg-type]


def test_figures_of_an_interval() -> None:
    before = stats(
        prompt_tokens=100, generation_tokens=1000, num_cached_tokens=7, draft_tokens=10, acceptance_histogram=[1, 2, 3]
    )
    now = stats(
        prompt_tokens=300,
        generation_tokens=1500,
        num_cached_tokens=57,
        draft_tokens=30,
        acceptance_histogram=[3, 6, 7],
        num_running=3,
        num_waiting=2,
        num_free_blocks=30,
    )
    # 200 prompt tokens, 50 of them cached; of 20 drafted in 10 iterations 4 * 1 + 4 * 2 stood.
    assert figures(before, now, 4.0) == (
        "Running: 3, waiting: 2, KV cache: 25.0%, prompts: 50.0 tokens/s (25.0% from the prefix cache), "
        "output: 125.0 tokens/s, acceptance length: 2.20 (mean K 2.00, 60.0% accepted)"
    )


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, False),
        ({"num_free_blocks": 3}, False),
        ({"num_running": 1}, True),
        ({"num_waiting": 1}, True),
        ({"prompt_tokens": 8}, True),
        ({"generation_tokens": 8}, True),
    ],
)
def test_an_idle_engine_has_no_line_and_no_speculation_no_acceptance(given: dict[str, int], told: bool) -> None:
    line = figures(stats(), stats(**given), 1.0)
    assert (line is not None) == told
    assert "acceptance" not in (line or "")


class Snapshots:
    """An engine that reports each of `stats` once, in order, and then raises `EngineDeadError`."""

    def __init__(self, *stats: EngineStats) -> None:
        self._stats = iter(stats)

    async def stats(self) -> EngineStats:
        for found in self._stats:
            return found
        raise EngineDeadError("gone")


def test_each_line_is_of_what_came_since_the_one_before(caplog: pytest.LogCaptureFixture) -> None:
    running, idle = stats(generation_tokens=8, num_running=1), stats(generation_tokens=9)
    llm = Snapshots(stats(), running, idle, idle, stats(generation_tokens=10))
    with caplog.at_level(logging.INFO, "specrs"), pytest.raises(EngineDeadError):
        asyncio.run(log_figures(llm, 1e-9))  # type: ignore[arg-type]
    assert [re.findall(r"Running: (\d)", line) for line in caplog.messages] == [["1"], ["0"], ["0"]]


def test_a_line_names_its_request() -> None:
    record = logging.makeLogRecord({"msg": "said %d", "args": (7,), "levelname": "INFO"})
    formatter = logging.Formatter(FORMAT, "%Y-%m-%d %H:%M:%S")
    lines = []
    for name in (None, "abc"):
        token = REQUEST_ID.set(name) if name else None
        assert RequestIdFilter().filter(record)
        lines.append(formatter.format(record))
        if token is not None:
            REQUEST_ID.reset(token)
    assert re.fullmatch(STAMP + r" INFO \[-\] said 7", lines[0])
    assert re.fullmatch(STAMP + r" INFO \[abc\] said 7", lines[1])


def test_a_server_tells_what_it_runs_and_how_it_fares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "0.05")
    with serving("--max-model-len", "256", "--max-num-seqs", "2") as server:
        answer = server.post(
            "/v1/completions", {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "request_id": "me"}
        )
        assert answer.status == 200
        server.wait_for_line(r"Running: .* acceptance length: \d\.\d\d \(mean K \d")
    text = "".join(server.lines)
    assert all(re.match(STAMP + r" [A-Z]+ \[\S+\] ", line) for line in server.lines), text
    assert re.search(
        r"\[-\] Model \S+: float32 on cpu, 256 tokens of context, up to 2 requests at once; KV cache of 512", text
    )
    assert re.search(r"\[-\] Speculation: draft_model with \S+, K = auto", text)
    assert re.search(r"\[me\] .*POST /v1/completions", text)


def test_it_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "0.001")
    with serving("--disable-log-stats") as server:
        server.complete(prompt="x", max_tokens=200, ignore_eos=True)
    assert "Running:" not in "".join(server.lines)


@pytest.mark.parametrize("given", ["0", "-1", "nan", "soon"])
def test_an_interval_that_is_none(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", given)
    from specrs.cli.serve import _log_interval

    with pytest.raises(InvalidConfigError, match="VLLM_LOG_STATS_INTERVAL"):
        _log_interval()
