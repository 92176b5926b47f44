"""Report of a run against a server: as text, line by line as `vllm bench serve` prints it, and as JSON with vLLM's
names."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from specrs.bench.counters import SpecDecodeCounters
from specrs.bench.metrics import LATENCIES, NS_PER_S, ServeMetrics
from specrs.bench.serve import Run
from specrs.errors import invalid_config

WIDTH = 50
_HEADINGS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Content of the report: latencies and their percentiles. `goodput`: limits in milliseconds by latency; without
    any, goodput is not shown."""

    percentile_metrics: Sequence[str] = ("ttft", "tpot", "itl")
    percentiles: Sequence[float] = (99.0,)
    goodput: Mapping[str, float] = dataclasses.field(default_factory=dict)
    max_concurrency: int | None = None


def block(metrics: ServeMetrics, counters: SpecDecodeCounters | None, options: ReportOptions) -> str:
    """Return the report as text. It has a section on speculative decoding if the server drafted."""
    lines = [
        f"{' Serving Benchmark Result ':=^{WIDTH}}",
        _count("Successful requests:", metrics.completed),
        _count("Failed requests:", metrics.failed),
    ]
    if options.max_concurrency is not None:
        lines.append(_count("Maximum request concurrency:", options.max_concurrency))
    lines += [
        _number("Benchmark duration (s):", metrics.duration),
        _count("Total input tokens:", metrics.total_input),
        _count("Total generated tokens:", metrics.total_output),
        _number("Request throughput (req/s):", metrics.request_throughput),
    ]
    if options.goodput:
        lines.append(_number("Request goodput (req/s):", metrics.request_goodput))
    lines += [
        _number("Output token throughput (tok/s):", metrics.output_throughput),
        _number("Peak output token throughput (tok/s):", metrics.peak_output_throughput),
        _number("Peak concurrent requests:", metrics.peak_concurrency),
        _number("Total token throughput (tok/s):", metrics.total_token_throughput),
    ]
    for name in LATENCIES:
        if name in options.percentile_metrics:
            lines += _latency(name, metrics, options.percentiles)
    if counters is not None and counters.drafts:
        lines += _speculation(counters)
    return "\n".join([*lines, "=" * WIDTH])


def _latency(name: str, metrics: ServeMetrics, percentiles: Sequence[float]) -> list[str]:
    values, short = metrics.latency(name), name.upper()
    return [
        f"{_HEADINGS[name]:-^{WIDTH}}",
        _number(f"Mean {short} (ms):", values.mean),
        _number(f"Median {short} (ms):", values.median),
        *(_number(f"P{percent:g} {short} (ms):", values.percentile(percent)) for percent in percentiles),
    ]


def _speculation(counters: SpecDecodeCounters) -> list[str]:
    return [
        f"{'Speculative Decoding':-^{WIDTH}}",
        _number("Acceptance rate (%):", 100 * counters.acceptance_rate),
        _number("Acceptance length:", counters.acceptance_length),
        _count("Drafts:", counters.drafts),
        _count("Draft tokens:", counters.draft_tokens),
        _count("Accepted tokens:", counters.accepted_tokens),
        "Per-position acceptance (%):",
        *(_number(f"  Position {i}:", 100 * share) for i, share in enumerate(counters.per_position)),
    ]


def _count(label: str, value: int) -> str:
    return f"{label:<40} {value:<10}".rstrip()


def _number(label: str, value: float) -> str:
    return f"{label:<40} {value:<10.2f}".rstrip()


def record(
    run: Run, metrics: ServeMetrics, options: ReportOptions, settings: Mapping[str, Any], detailed: bool
) -> dict[str, Any]:
    """Return the run as JSON values, in the form that `--save-result` writes. `partial` marks a run that the server or
    the user ended early.

    `detailed` adds lists with a value per request. `events_ns` has nanoseconds from the start of the run: the time of
    sending, then that of every chunk. The other lists follow from it and from `output_lens`, in vLLM's units (seconds).
    """
    result: dict[str, Any] = {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        **settings,
        "max_concurrency": options.max_concurrency,
        "duration": metrics.duration,
        "completed": metrics.completed,
        "failed": metrics.failed,
        "partial": run.gone is not None,
        "total_input_tokens": metrics.total_input,
        "total_output_tokens": metrics.total_output,
        "request_throughput": metrics.request_throughput,
        "request_goodput": metrics.request_goodput if options.goodput else None,
        "output_throughput": metrics.output_throughput,
        "total_token_throughput": metrics.total_token_throughput,
        "max_output_tokens_per_s": metrics.peak_output_throughput,
        "max_concurrent_requests": metrics.peak_concurrency,
    }
    for name in LATENCIES:
        if name in options.percentile_metrics:
            values = metrics.latency(name)
            result |= {
                f"mean_{name}_ms": values.mean,
                f"median_{name}_ms": values.median,
                f"std_{name}_ms": values.std,
                **{f"p{percent:g}_{name}_ms": values.percentile(percent) for percent in options.percentiles},
            }
    counters = run.counters
    if counters is not None and counters.drafts:
        result |= {
            "spec_decode_acceptance_rate": 100 * counters.acceptance_rate,
            "spec_decode_acceptance_length": counters.acceptance_length,
            "spec_decode_num_drafts": counters.drafts,
            "spec_decode_draft_tokens": counters.draft_tokens,
            "spec_decode_accepted_tokens": counters.accepted_tokens,
            "spec_decode_per_position_acceptance_rates": counters.per_position,
        }
    if detailed:
        records = run.records
        result |= {
            "input_lens": [item.input_tokens for item in records],
            "output_lens": [item.output_tokens for item in records],
            "events_ns": [[time - run.started for time in (item.start, *item.events)] for item in records],
            "start_times": [(item.start - run.started) / NS_PER_S for item in records],
            "ttfts": [item.ttft / NS_PER_S if item.events else 0.0 for item in records],
            "itls": [[gap / NS_PER_S for gap in item.itls] for item in records],
            "generated_texts": [item.text for item in records],
            "errors": [item.error or "" for item in records],
        }
    return result


def save(result: Mapping[str, Any], folder: Path, name: str) -> Path:
    """Write the result as JSON and return its path. Raises `InvalidConfigError` if the file cannot be written."""
    path = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise invalid_config("--result-dir", str(folder), f"cannot be written: {error.strerror}") from None
    return path
