"""The number of ranks in `GET /server_info`, and chat messages without marks of the prefix cache."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from specrs.config import EngineConfig
from specrs.server.context import Context
from specrs.server.info import server_info
from specrs.server.message_fields import CACHE_MARKS, read_messages


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_number_of_ranks(ranks: int) -> None:
    async def stats() -> Any:
        return SimpleNamespace(num_blocks=7)

    config = EngineConfig(model="m", tensor_parallel_size=ranks)
    limits = SimpleNamespace(max_model_len=64, num_speculative_tokens=0)
    llm = SimpleNamespace(config=config, limits=limits, stats=stats, dtype="float32")
    context = SimpleNamespace(llm=llm, model_names=["m"], shared=SimpleNamespace(version="1"))
    information = asyncio.run(server_info(cast(Context, context)))
    assert (information["tp_size"], information["dp_size"]) == (ranks, 1)


@pytest.mark.parametrize("mark", sorted(CACHE_MARKS))
def test_messages_and_their_parts_lose_marks_of_the_cache(mark: str) -> None:
    part = {"type": "text", "text": "x"}
    messages = [{"role": "user", "content": [{**part, mark: {"type": "ephemeral"}}, part], mark: {"type": "ephemeral"}}]
    given = [{**message, "content": [*message["content"]]} for message in messages]
    assert read_messages(given) == [{"role": "user", "content": [part, part]}]
    assert given == messages, "nothing is mutated"
