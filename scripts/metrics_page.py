"""Prints docs/metrics.md: every Prometheus metric of the server, as `GET /metrics` writes it. See `make generate`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from specrs.async_llm import AsyncLLM
from specrs.outputs import AcceptanceFigures, EngineStats
from specrs.server.context import Context
from specrs.server.metrics import Metrics
from specrs.server.models import Model
from specrs.server.response_store import ResponseStore

HEAD = """# Metrics

This page is generated from what `GET /metrics` writes: run `make generate` after a change.

For anybody who watches a server with Prometheus. A name that starts with `vllm:` has vLLM's meaning and labels, so
dashboards for vLLM work. A name that starts with `specrs:` has no counterpart there. [Deploy](guides/deploy.md) sets up
Prometheus and the Grafana dashboard.

Each metric of the engine has the labels `model_name`, the first served name, and `engine`, which is always 0. The
table lists further labels.
"""
SETTINGS = (
    ({}, "Always"),
    ({"num_speculative_tokens": 1}, "With drafts"),
    ({"enable_lora": True}, "With `--enable-lora`"),
    ({"kv_cache_path": "kv"}, "With `--kv-cache-path`"),
    ({"state_cache_memory_bytes": 1}, "With layers that have states"),
    ({"several": True}, "With several models"),
)
"""Settings of an engine, and the heading of the metrics that exist only with them."""
PROCESS = "Process"
COMMON = {"model_name", "engine"}
"""Labels that every metric of the engine has."""
BOUNDS = {"le"}
"""Labels that Prometheus adds to a histogram's buckets."""


def page() -> str:
    """Return the text of the page."""
    return "\n".join(lines()) + "\n"


def lines() -> Iterator[str]:
    """Yield the lines of the page."""
    yield HEAD
    seen: set[str] = set()
    for settings, title in SETTINGS:
        new = [family for family in families(**settings) if family.name not in seen]
        seen |= {family.name for family in new}
        yield from table(title, [family for family in new if ":" in family.name])
        if not settings:
            process = [family for family in new if ":" not in family.name]
    yield from table(PROCESS, process)
    yield (
        "Each counter and histogram has a gauge whose name ends in `_created`: the time in seconds since 1970 at which "
        "it was made."
    )


def families(
    *,
    num_speculative_tokens: int = 0,
    enable_lora: bool = False,
    kv_cache_path: str | None = None,
    state_cache_memory_bytes: int | None = None,
    several: bool = False,
) -> list[Metric]:
    """Return what a server with these settings of its engine writes, without the times of creation. With `several`, the
    server has several models."""

    async def stats() -> EngineStats:
        return EngineStats(drafters={"ngram": AcceptanceFigures()}, draft_errors={"ngram": 0})

    config = SimpleNamespace(
        block_size=16,
        enable_prefix_caching=True,
        kv_cache_dtype="auto",
        enable_lora=enable_lora,
        max_loras=1,
        kv_cache_path=kv_cache_path,
        state_cache_memory_bytes=state_cache_memory_bytes,
    )
    limits = SimpleNamespace(num_speculative_tokens=num_speculative_tokens)
    llm: Any = SimpleNamespace(config=config, limits=limits, stats=stats)
    metrics = Metrics(cast("AsyncLLM", llm), "model", ResponseStore())
    if several:
        metrics.count_loads(Model[Context](names=["model"], load=Mock()))
    text = asyncio.run(metrics.render()).decode()
    return [one for one in text_string_to_metric_families(text) if not one.name.endswith("_created")]


def table(title: str, families: list[Metric]) -> Iterator[str]:
    """Yield the heading of one group of metrics and its table."""
    yield f"## {title}\n\n| metric | type | labels | meaning |\n| --- | --- | --- | --- |"
    for family in families:
        labels = dict.fromkeys(label for sample in family.samples for label in sample.labels)
        names = ", ".join(f"`{label}`" for label in labels if label not in COMMON | BOUNDS)
        yield f"| `{name(family)}` | {family.type} | {names} | {family.documentation.rstrip('.')}. |"
    yield ""


def name(family: Metric) -> str:
    """Return the name that a query uses. A histogram has three, which the endings in braces make."""
    if family.type == "histogram":
        return family.name + "_{bucket,sum,count}"
    (written,) = {sample.name for sample in family.samples if not re.search("_created$", sample.name)}
    return str(written)


if __name__ == "__main__":
    print(page(), end="")
