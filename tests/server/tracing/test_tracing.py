"""Traces of a real server, as a collector gets them. `make test-clients` runs this in an environment with
OpenTelemetry."""

import signal
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from specrs import InvalidConfigError, SamplingParams
from specrs.errors import EngineError
from specrs.outputs import RequestOutput
from specrs.server.answers import CompletionAnswer
from specrs.server.params import Asked
from specrs.server.protocol import CompletionRequest
from specrs.server.tracing import RequestTrace, Tracing

from server.harness import Server, serving
from server.tracing.conftest import FLAGS, Collector

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY: dict[str, Any] = {
    "prompt": "class Stack:",
    "max_tokens": 24,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 40,
    "seed": 3,
}


def parent(flags: str = "01") -> dict[str, str]:
    return {"traceparent": f"00-{TRACE}-{PARENT}-{flags}"}


def test_a_request_is_a_span_with_its_figures(traced: Server, collector: Collector) -> None:
    asked = {**BODY, "per_request_spec_decode_metrics": "summary", "num_speculative_tokens": 3}
    answer = traced.post("/v1/completions", asked, **parent(), **{"X-Request-Id": "mine"}).json
    (span,) = collector.take()
    assert (span.name, span.kind, span.trace, span.parent) == (
        "llm_request",
        SpanMessage.SPAN_KIND_SERVER,
        TRACE,
        PARENT,
    )
    assert span.resource["service.name"] == "checked"
    assert span.status == 0
    told, used, figures = span.attributes, answer["usage"], answer["metrics"]["speculative_decoding"]
    prefixes = ("gen_ai.latency.", "specrs.spec_decode.")
    assert {name: value for name, value in told.items() if not name.startswith(prefixes)} == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "specrs",
        "gen_ai.request.id": "cmpl-mine",
        "gen_ai.request.model": "bundled",
        "gen_ai.response.model": "bundled",
        "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 24,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 40.0,
        "gen_ai.request.seed": 3,
        "specrs.request.num_speculative_tokens": 3,
        "gen_ai.usage.num_sequences": 1,
        "gen_ai.usage.prompt_tokens": used["prompt_tokens"],
        "gen_ai.usage.completion_tokens": used["completion_tokens"],
        "gen_ai.usage.input_tokens": used["prompt_tokens"],
        "gen_ai.usage.output_tokens": used["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": used["prompt_tokens_details"]["cached_tokens"],
        "gen_ai.response.finish_reasons": [answer["choices"][0]["finish_reason"]],
    }
    histogram = figures["acceptance_histogram"]
    assert {name: value for name, value in told.items() if name.startswith("specrs.spec_decode.")} == {
        "specrs.spec_decode.num_drafts": figures["num_spec_steps"],
        "specrs.spec_decode.num_draft_tokens": figures["num_draft_tokens"],
        "specrs.spec_decode.num_accepted_tokens": figures["num_accepted_draft_tokens"],
        "specrs.spec_decode.mean_acceptance_length": figures["mean_acceptance_length"],
        "specrs.spec_decode.num_accepted_tokens_per_pos": [
            sum(histogram[position:]) for position in range(1, len(histogram))
        ],
    }
    times = {name.removeprefix(prefixes[0]): value for name, value in told.items() if name.startswith(prefixes[0])}
    queued, first, prefill = (times[name] for name in ("time_in_queue", "time_to_first_token", "time_in_model_prefill"))
    decode, inference, whole = times["time_in_model_decode"], times["time_in_model_inference"], times["e2e"]
    assert len(times) == 6
    assert min(times.values()) >= 0
    assert first == pytest.approx(queued + prefill)
    assert whole == pytest.approx(first + decode) == pytest.approx(queued + inference)
    assert (span.end - span.start) / 1e9 == pytest.approx(whole, abs=1e-6)


def test_every_endpoint_and_every_prompt_has_its_span(traced: Server, collector: Collector) -> None:
    message = [{"role": "user", "content": "class Stack:"}]
    traced.stream("/v1/chat/completions", messages=message, max_tokens=4)
    (chat,) = collector.take()
    assert (chat.attributes["gen_ai.operation.name"], chat.parent) == ("chat", "")
    assert traced.post("/v1/responses", {"input": "class Stack:", "max_output_tokens": 4}, **parent()).status == 200
    (response,) = collector.take()
    assert (response.attributes["gen_ai.operation.name"], response.parent) == ("chat", PARENT)
    traced.complete(prompt=["a", "b"], n=2, max_tokens=4, ignore_eos=True)
    spans = collector.take(2)
    assert [span.attributes["gen_ai.usage.completion_tokens"] for span in spans] == [8, 8]
    assert [span.attributes["gen_ai.response.finish_reasons"] for span in spans] == [["length"] * 2] * 2
    assert len({chat.trace, response.trace, *(span.trace for span in spans)} - {TRACE}) == 3


def test_cached_tokens_are_reported(traced: Server, collector: Collector) -> None:
    ids = [*range(100, 148)]
    for cached in (0, 32):  # full blocks of 16, but for the last token
        traced.complete(prompt=ids, max_tokens=1)
        (span,) = collector.take()
        assert span.attributes["gen_ai.usage.cache_read.input_tokens"] == cached


def test_a_parent_that_is_not_sampled_has_no_spans(traced: Server, collector: Collector) -> None:
    assert traced.post("/v1/completions", BODY, **parent("00")).status == 200
    assert traced.post("/v1/completions", BODY, **parent("01"), **{"X-Request-Id": "seen"}).status == 200
    (span,) = collector.take()
    assert span.attributes["gen_ai.request.id"] == "cmpl-seen"


def test_a_client_that_leaves_ends_its_span(traced: Server, collector: Collector) -> None:
    with traced.streaming(prompt="class Stack:", max_tokens=480, ignore_eos=True) as events:
        next(events)
    (span,) = collector.take()
    assert span.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    assert 0 < span.attributes["gen_ai.usage.completion_tokens"] < 480


def test_a_rejected_request_has_none(traced: Server, collector: Collector) -> None:
    assert traced.post("/v1/completions", {**BODY, "prompt": [-1]}, **parent()).status == 400
    traced.complete(**BODY, request_id="after")
    (span,) = collector.take()
    assert span.attributes["gen_ai.request.id"] == "cmpl-after"


def test_a_fault_is_the_spans_status() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    body = CompletionRequest.model_validate({"prompt": "a"})
    answer = CompletionAnswer(model="m", body=body, asked=Asked(SamplingParams()), token_text=str)
    trace = RequestTrace(provider.get_tracer("test"), None, answer, 2)
    trace.observe(0, RequestOutput.from_error(0, "a", [1], EngineError("the step failed")))
    trace.close()
    failed, left = exporter.get_finished_spans()
    assert (failed.status.status_code, failed.status.description) == (StatusCode.ERROR, "the step failed")
    assert failed.attributes is not None
    assert left.attributes is not None
    assert failed.attributes["error.type"] == "EngineError"
    assert left.attributes["gen_ai.response.finish_reasons"] == ("abort",)


def test_a_collector_that_fails_costs_one_line(traced: Server, collector: Collector) -> None:
    """Check that a failing collector costs one log line, and its recovery another one."""

    def lines(text: str) -> int:
        return sum(text in line for line in traced.lines)

    collector.status = 400
    try:
        for _ in range(3):
            while not collector.posts.empty():
                collector.posts.get()
            assert traced.complete(**BODY)["choices"][0]["text"]
            assert collector.posts.get(timeout=60) == 400
    finally:
        collector.status = 200
    traced.complete(**BODY)
    traced.wait_for_line("Traces reach")
    collector.take()
    assert (lines(f"Traces do not reach {collector.url}"), lines("Traces reach")) == (1, 1)
    assert (lines("opentelemetry"), lines("Failed to export")) == (0, 1), "the reason in that line, and no more"


def test_without_a_collector_it_serves_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a server without a reachable collector serves and ends, over gRPC, the default. No request waits for
    the last spans."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    with serving(*FLAGS, "--otlp-traces-endpoint", "http://127.0.0.1:1") as server:
        assert server.complete(**BODY)["choices"][0]["text"]
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert sum("127.0.0.1:1" in line for line in server.lines) <= 1


def test_an_unknown_protocol_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    with pytest.raises(InvalidConfigError, match=r"PROTOCOL='http/json': must be grpc or http/protobuf"):
        Tracing("http://127.0.0.1:1")
