"""OpenTelemetry tracing: a span for each prompt that was completed, under vLLM's name and attributes. Sends nothing
itself.

Spans go to a queue, and a thread of the SDK exports them. No stream waits for a collector, and none fails with it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from specrs.errors import invalid_config
from specrs.extras import missing
from specrs.outputs import RequestMetrics, RequestOutput

if TYPE_CHECKING:
    from opentelemetry.context import Context as SpanContext
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    from specrs.server.answers import Answer

logger = logging.getLogger("specrs")

PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOLS = ("grpc", "http/protobuf")
"""Allowed values of the variables `PROTOCOL_VARIABLES`. The first one is the default, as in vLLM."""
END_TIMEOUT = 2.0
"""Maximum seconds for exporting the last spans when the server ends. Spans left after that are dropped."""

Attributes = dict[str, Any]


class Tracing:
    """The tracer of one server, and the thread that exports its spans."""

    def __init__(self, endpoint: str) -> None:
        """Export to the URL `endpoint`, in the protocol that the environment variables of `PROTOCOL_VARIABLES` set.
        Does not connect yet.

        The SDK's other variables, such as OTEL_SERVICE_NAME, OTEL_EXPORTER_OTLP_HEADERS and OTEL_TRACES_SAMPLER, apply.

        Raises `InvalidConfigError` for an unknown protocol, and without the packages of `specrs[otel]`.
        """
        exporter = _exporter(endpoint)
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        self._exporter = exporter
        self._provider = TracerProvider(
            resource=Resource.create({} if named else {"service.name": "specrs"}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("specrs.server")

    def take_parent(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Use the span that the headers `traceparent` and `tracestate` name as the parent of the current task's
        spans."""
        from opentelemetry import context, propagate

        context.attach(propagate.extract({name.decode("latin-1"): value.decode("latin-1") for name, value in headers}))

    def request(self, answer: Answer, num_prompts: int) -> RequestTrace:
        """Return an observer that makes the spans of a request that is being answered. Their parent is the current
        task's."""
        from opentelemetry import context

        return RequestTrace(self._tracer, context.get_current(), answer, num_prompts)

    def close(self) -> None:
        """Export the remaining spans, for at most `END_TIMEOUT` seconds, and end the thread. Blocks."""
        impatient = threading.Timer(END_TIMEOUT, self._exporter.shutdown)  # ends a wait for a collector that is gone
        impatient.daemon = True
        impatient.start()
        self._provider.shutdown()
        impatient.cancel()


class RequestTrace:
    """Spans of one request. Each is made when its prompt has ended."""

    def __init__(self, tracer: Any, parent: SpanContext, answer: Answer, num_prompts: int) -> None:
        self._tracer = tracer
        self._parent = parent
        self._answer = answer
        self._started = time.monotonic()
        self._running: dict[int, RequestOutput | None] = dict.fromkeys(range(num_prompts))

    def observe(self, index: int, output: RequestOutput) -> None:
        """Record an output of prompt `index`. Must be called with every output; makes the prompt's span at its end."""
        self._running[index] = output
        if output.finished:
            del self._running[index]
            self._record(output)

    def close(self) -> None:
        """Make the spans of prompts that have not ended because their client disconnected."""
        for output in self._running.values():
            self._record(output)
        self._running.clear()

    def _record(self, output: RequestOutput | None) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode

        metrics = RequestMetrics() if output is None else output.metrics
        arrival = self._started if metrics.arrival_time is None else metrics.arrival_time
        end = time.monotonic() if metrics.finish_time is None else metrics.finish_time
        wall = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            "llm_request", context=self._parent, kind=SpanKind.SERVER, start_time=wall + int(arrival * 1e9)
        )
        if span.is_recording():
            span.set_attributes(self._request_attributes())
            span.set_attributes(_latencies(metrics, arrival, end))
            span.set_attributes(_speculation(metrics))
            if output is not None:
                span.set_attributes(_usage(output))
            reasons = ["abort"] if output is None else [one.finish_reason or "abort" for one in output.outputs]
            span.set_attribute("gen_ai.response.finish_reasons", reasons)
            if output is not None and output.error is not None:
                span.set_attribute("error.type", type(output.error).__name__)
                span.set_status(Status(StatusCode.ERROR, str(output.error)))
        span.end(wall + int(end * 1e9))

    def _request_attributes(self) -> Attributes:
        answer, params = self._answer, self._answer.asked.params
        given = {
            "gen_ai.operation.name": answer.operation_name,
            "gen_ai.provider.name": "specrs",
            "gen_ai.request.id": answer.head(chunk=False)["id"],
            "gen_ai.request.model": answer.model,
            "gen_ai.response.model": answer.model,
            "gen_ai.request.n": params.n,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": float(params.top_k) if params.top_k else None,
            "gen_ai.request.seed": params.seed,
            "specrs.request.num_speculative_tokens": params.num_speculative_tokens,
        }
        return _without_none(given)


def _usage(output: RequestOutput) -> Attributes:
    """Return the token counts as span attributes, under vLLM's names and under the current names of the conventions."""
    prompt, generated = len(output.prompt_token_ids), output.metrics.num_generated_tokens
    return {
        "gen_ai.usage.num_sequences": len(output.outputs),
        "gen_ai.usage.prompt_tokens": prompt,
        "gen_ai.usage.completion_tokens": generated,
        "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.output_tokens": generated,
        "gen_ai.usage.cache_read.input_tokens": output.metrics.num_cached_tokens,
    }


def _latencies(metrics: RequestMetrics, arrival: float, end: float) -> Attributes:
    """Return latencies of a request in seconds, as span attributes."""
    scheduled, first = metrics.scheduled_time, metrics.first_token_time
    given = {
        "gen_ai.latency.time_in_queue": None if scheduled is None else scheduled - arrival,
        "gen_ai.latency.time_to_first_token": None if first is None else first - arrival,
        "gen_ai.latency.e2e": end - arrival,
        "gen_ai.latency.time_in_model_prefill": None if scheduled is None or first is None else first - scheduled,
        "gen_ai.latency.time_in_model_decode": None if first is None else end - first,
        "gen_ai.latency.time_in_model_inference": None if scheduled is None else end - scheduled,
    }
    return _without_none(given)


def _speculation(metrics: RequestMetrics) -> Attributes:
    """Return the counts and acceptance lengths of a request's drafts as span attributes; empty if nothing was
    drafted."""
    if not metrics.drafts:
        return {}
    return {
        "specrs.spec_decode.num_drafts": metrics.drafts,
        "specrs.spec_decode.num_draft_tokens": metrics.draft_tokens,
        "specrs.spec_decode.num_accepted_tokens": metrics.accepted_tokens,
        "specrs.spec_decode.mean_acceptance_length": metrics.acceptance_length,
        "specrs.spec_decode.num_accepted_tokens_per_pos": metrics.accepted_per_position,
    }


def _without_none(given: Attributes) -> Attributes:
    return {name: value for name, value in given.items() if value is not None}


def _exporter(endpoint: str) -> _Exporter:
    """Return an exporter that sends spans to `endpoint` in the protocol set by an environment variable of
    `PROTOCOL_VARIABLES`, the first one that is not empty. The default is the first of `PROTOCOLS`.

    Raises `InvalidConfigError` if the variable names another protocol, or if the packages of `specrs[otel]` are
    missing.
    """
    name = next((name for name in PROTOCOL_VARIABLES if os.environ.get(name)), PROTOCOL_VARIABLES[0])
    protocol = os.environ.get(name) or PROTOCOLS[0]
    if protocol not in PROTOCOLS:
        raise invalid_config(name, protocol, f"must be {' or '.join(PROTOCOLS)}")
    try:
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Exporter
        else:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Exporter
    except ImportError as fault:
        raise missing(f"OpenTelemetry ({fault.name})", "otel", f"--otlp-traces-endpoint={endpoint}") from None
    return _Exporter(Exporter(endpoint=endpoint), endpoint)


class _Exporter:
    """Wrapper of an exporter that logs once when exports fail and once when they work again. The SDK would log every
    try.

    It has the methods of `SpanExporter` but does not inherit it, because the class is missing without the packages.
    """

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._inner = exporter
        self._endpoint = endpoint
        self._failing = False
        self._said = _LastLine()
        log = logging.getLogger("opentelemetry.exporter")
        log.handlers, log.propagate = [self._said], False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans and return the result. Waits for the collector, in the SDK's thread."""
        result = self._inner.export(spans)
        failing = result.name != "SUCCESS"
        if failing and not self._failing:
            logger.warning("Traces do not reach %s and are dropped: %s", self._endpoint, self._said.text)
        elif self._failing and not failing:
            logger.info("Traces reach %s again", self._endpoint)
        self._failing = failing
        return result

    def shutdown(self) -> None:
        """End a wait of `export`, and send nothing more. May be called twice."""
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Flush the wrapped exporter. Nothing waits in this wrapper."""
        return bool(self._inner.force_flush(timeout_millis))


class _LastLine(logging.Handler):
    """Logging handler that keeps the last line."""

    text = "no reason given"

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()
