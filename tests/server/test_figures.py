"""Usage, metrics and limits, counted by hand."""

import asyncio
import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from specrs.async_llm import AsyncLLM, OutputStream
from specrs.engine.request import Request
from specrs.outputs import CompletionOutput, EngineStats, Logprob, RequestMetrics, RequestOutput
from specrs.server import metrics as metrics_module
from specrs.server.body import parse
from specrs.server.errors import APIError
from specrs.server.limits import MAX_VALUES
from specrs.server.logprobs import completion_logprobs
from specrs.server.metrics import Metrics
from specrs.server.protocol import CompletionRequest
from specrs.server.usage import speculation, usage
from specrs.tokenizer import Tokenizer

from .scripted import Script, ask


def output(prompt: int, completions: Sequence[int], *, ended: str | None = "stop", **figures: Any) -> RequestOutput:
    """Return an output: a prompt of `prompt` tokens, and completions of so many tokens each."""
    outputs = [
        CompletionOutput(
            index=i,
            text="",
            delta="",
            token_ids=[1] * count,
            drafts=None,
            cumulative_logprob=None,
            logprobs=None,
            finish_reason=ended,
            stop_reason=None,
        )
        for i, count in enumerate(completions)
    ]
    return RequestOutput(
        request_id="0",
        prompt=None,
        prompt_token_ids=[1] * prompt,
        prompt_logprobs=None,
        outputs=outputs,
        finished=ended is not None,
        metrics=RequestMetrics(**figures),
        error=None,
    )


def test_usage_of_several_prompts_and_completions() -> None:
    """Check usage of several prompts and completions. Two completions found 8 and 10 tokens of one prompt of 10 in the
    cache: the prompt counts no more than 10."""
    outputs = [output(10, [3, 4], num_cached_tokens=18), output(6, [5], num_cached_tokens=2)]
    wanted = {
        "prompt_tokens": 16,
        "completion_tokens": 12,
        "total_tokens": 28,
        "prompt_tokens_details": {"cached_tokens": 12},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }
    assert usage(outputs, completion_tokens=12, reasoning_tokens=3) == wanted
    silent = usage(outputs, completion_tokens=0, reasoning_tokens=None)
    assert (silent["completion_tokens"], silent["total_tokens"]) == (0, 16)


def test_speculation_of_several_prompts() -> None:
    outputs = [
        output(1, [1], draft_tokens=9, acceptance_histogram=[1, 1, 0, 1]),
        output(1, [1], draft_tokens=5, acceptance_histogram=[0, 2, 0, 0]),
    ]
    found = speculation(outputs, 3)
    assert found == {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + 6 / 5,
            "draft_acceptance_rate": 6 / 14,
            "acceptance_histogram": [1, 3, 0, 1],
            "num_spec_steps": 5,
            "num_accepted_draft_tokens": 6,
            "num_draft_tokens": 14,
            "num_spec_tokens": 3,
        }
    }
    assert speculation(outputs, 0) is None


def served(stats: EngineStats | None = None, **config: Any) -> Metrics:
    """Return the metrics of an engine with these statistics."""

    async def told() -> EngineStats:
        return stats or EngineStats()

    settings = SimpleNamespace(
        **{
            "block_size": 16,
            "enable_prefix_caching": True,
            "kv_cache_dtype": "auto",
            "enable_lora": False,
            "kv_cache_path": None,
            "state_cache_memory_bytes": None,
            **config,
        }
    )
    llm: Any = SimpleNamespace(config=settings, limits=SimpleNamespace(num_speculative_tokens=2), stats=told)
    return Metrics(cast("AsyncLLM", llm), "m")


def values(metrics: Metrics) -> dict[str, float]:
    """Return the rendered metrics, without the labels that all have."""
    found = {}
    for line in asyncio.run(metrics.render()).decode().splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = re.sub(r'(engine|model_name)="[^"]*",?', "", name).replace(",}", "}").replace("{}", "")
            found[name.removeprefix("vllm:")] = float(value)
    return found


def test_latencies_are_between_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check latencies between tokens: the first token after 0.5 s, then 1 s, then 2 s. An output without tokens counts
    as none of them."""
    metrics = served()
    recorder = metrics.request(num_prompts=1, completions=2)
    for now, tokens, ended in ((10.5, 1, None), (11.5, 2, None), (12.0, 0, None), (13.5, 1, "length")):
        monkeypatch.setattr(metrics_module.time, "monotonic", partial(float, now))
        recorder.observe(0, output(4, [tokens, 0], ended=ended, arrival_time=10.0))
    found = values(metrics)
    assert (found["time_to_first_token_seconds_sum"], found["time_to_first_token_seconds_count"]) == (0.5, 1)
    assert (found["inter_token_latency_seconds_sum"], found["inter_token_latency_seconds_count"]) == (3.0, 2)
    assert (found["e2e_request_latency_seconds_sum"], found["e2e_request_latency_seconds_count"]) == (3.5, 1)


def test_ends_are_counted_by_their_reasons() -> None:
    metrics = served()
    recorder = metrics.request(num_prompts=7, completions=2)
    for index, reason in enumerate(("stop", "stop", "length", "abort", "error")):
        recorder.observe(index, output(1, [1, 1], ended=reason))
    recorder.observe(5, output(1, [1, 1], ended=None))
    for _ in range(2):
        recorder.close()
    found = values(metrics)
    counts = {reason: found[f'request_success_total{{finished_reason="{reason}"}}'] for reason in REASONS}
    assert counts == {"stop": 4, "length": 2, "abort": 2 + 4, "error": 2}


REASONS = ("stop", "length", "abort", "error")


def test_the_engines_figures_have_their_names() -> None:
    stats = EngineStats(
        prompt_tokens=101,
        generation_tokens=102,
        num_cached_tokens=13,
        num_preemptions=14,
        num_running=15,
        num_waiting=16,
        num_blocks=40,
        num_free_blocks=30,
        draft_tokens=27,
        acceptance_histogram=[5, 3, 2],
    )
    found = values(served(stats))
    wanted = {
        "prompt_tokens_total": 101,
        "generation_tokens_total": 102,
        "prefix_cache_queries_total": 101,
        "prefix_cache_hits_total": 13,
        "num_preemptions_total": 14,
        "num_requests_running": 15,
        "num_requests_waiting": 16,
        "kv_cache_usage_perc": 0.25,
        "spec_decode_num_drafts_total": 10,
        "spec_decode_num_draft_tokens_total": 27,
        "spec_decode_num_accepted_tokens_total": 7,
        'spec_decode_num_accepted_tokens_per_pos_total{position="0"}': 5,
        'spec_decode_num_accepted_tokens_per_pos_total{position="1"}': 2,
    }
    assert {name: found[name] for name in wanted} == wanted


class InTurn(Script):
    """Engine that finishes a request before it begins the next one, and takes a step each time that its stream is
    read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, *texts: str) -> None:
        super().__init__(tokenizer, *texts)
        asked, get = threading.Semaphore(0), OutputStream.get

        async def read(stream: OutputStream) -> list[tuple[int, RequestOutput]]:
            asked.release()
            return await get(stream)

        monkeypatch.setattr(OutputStream, "get", read)
        self.before_step = lambda engine: None if asked.acquire(timeout=60) else engine.close()

    def step(self) -> list[Request]:
        others = list(self.live.items())[1:]
        for request_id, _ in others:
            del self.live[request_id]
        touched = super().step()
        self.live |= dict(others)
        return touched


@pytest.mark.parametrize("usage_asked", [False, True])
def test_figures_come_once_and_last(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, usage_asked: bool) -> None:
    """Check that figures come once, in the last chunk. The first prompt ends before the second has any token, and its
    end is not the stream's."""
    body: dict[str, Any] = {"prompt": ["a", "a b c"], "max_tokens": 9, "stream": True}
    body |= {"per_request_spec_decode_metrics": "summary"}
    body |= {"stream_options": {"include_usage": True}} if usage_asked else {}
    events = ask(InTurn(monkeypatch, tokenizer, "b", "c d e f"), tokenizer, "completions", body).events
    assert [i for i, event in enumerate(events) if "metrics" in event] == [len(events) - 1]
    told = [i for i, event in enumerate(events) if event.get("usage")]
    assert told == ([len(events) - 1] if usage_asked else [])
    ends = [choice["index"] for event in events for choice in event["choices"] if choice["finish_reason"]]
    assert ends == [0, 1]


def test_usage_grows_to_the_whole(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": ["a", "a b c"], "max_tokens": 9, "stream": True, "stream_options": options}
    *events, last = ask(InTurn(monkeypatch, tokenizer, "b", "c d e f"), tokenizer, "completions", body).events
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] > counts[0]
    assert events[0]["usage"]["prompt_tokens"] == len(tokenizer.encode("a"))
    assert last["usage"]["prompt_tokens"] == len(tokenizer.encode("a")) + len(tokenizer.encode("a b c"))


async def at_once(function: Callable[[], Any]) -> Any:
    return function()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"prompt":[' + b"1," * MAX_VALUES + b"1,1]}", 413),
        (b'{"prompt":[' + b'"",' * (MAX_VALUES // 2) + b'""]}', 413),
        (b'{"prompt":["\\"",' + b"1," * MAX_VALUES + b"1,1]}", 413),
        (b'{"prompt":"' + b"," * (MAX_VALUES + 9) + b'"}', 200),
        (b'{"prompt":"' + b'\\",' * 9 + b"," * MAX_VALUES + b'"}', 200),
        (b'{"prompt":"' + b"\\n," * (MAX_VALUES + 9) + b'"}', 413),
        (b'{"prompt":[' + b"1," * 9 + b"1]}", 200),
    ],
    ids=["numbers", "strings", "numbers after an escape", "commas in a string", "escapes", "many escapes", "few"],
)
def test_values_of_a_body(body: bytes, status: int) -> None:
    """Check how many values a body is taken to have: commas in strings do not count, except in a string of a million
    escapes."""
    if status == 200:
        assert asyncio.run(parse(CompletionRequest, body, at_once)).prompt
        return
    with pytest.raises(APIError, match="values") as fault:
        asyncio.run(parse(CompletionRequest, body, at_once))
    assert fault.value.status == status


def test_of_tokens_with_one_text_the_likelier_is_reported() -> None:
    """Check that of two tokens with the same text, which are parts of characters, the likelier is reported."""
    entry = {7: Logprob(-0.1, 1), 8: Logprob(-0.2, 2), 9: Logprob(-0.3, 3)}
    told = completion_logprobs([7], [entry], lambda token: "?" if token > 7 else "a", [0], top=True)
    assert told["top_logprobs"] == [{"a": -0.1, "?": -0.2}]
