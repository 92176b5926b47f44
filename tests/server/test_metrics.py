"""Metrics of the drafters of a server."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from specrs.async_llm import AsyncLLM
from specrs.outputs import AcceptanceFigures, EngineStats
from specrs.server.metrics import Metrics


def test_each_drafter_has_its_counters() -> None:
    """Check each drafter's counters: drafts, drafted tokens, accepted tokens, failures."""
    figures = {
        "ngram": AcceptanceFigures(draft_tokens=9, acceptance_histogram=[1, 2, 0]),
        "draft_model": AcceptanceFigures(draft_tokens=4, acceptance_histogram=[0, 0, 2]),
    }

    async def stats() -> EngineStats:
        return EngineStats(drafters=figures, draft_errors={"ngram": 0, "draft_model": 3})

    config = SimpleNamespace(block_size=16, enable_prefix_caching=True, kv_cache_dtype="auto", enable_lora=False)
    config.kv_cache_path = config.state_cache_memory_bytes = None
    llm: Any = SimpleNamespace(config=config, limits=SimpleNamespace(num_speculative_tokens=2), stats=stats)
    lines = asyncio.run(Metrics(cast("AsyncLLM", llm), "m").render()).decode().splitlines()
    labels = 'drafter="{}",engine="0",model_name="m"'
    for name, counts in (
        ("drafts", {"ngram": 3, "draft_model": 2}),
        ("draft_tokens", {"ngram": 9, "draft_model": 4}),
        ("accepted_tokens", {"ngram": 2, "draft_model": 4}),
        ("draft_errors", {"ngram": 0, "draft_model": 3}),
    ):
        for drafter, count in counts.items():
            assert f"specrs:spec_decode_num_{name}_total{{{labels.format(drafter)}}} {count}.0" in lines
