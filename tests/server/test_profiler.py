"""Traces of the profiler: complete, or absent."""

import asyncio
import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from specrs.server.errors import APIError
from specrs.server.profiler import Profiler

T = TypeVar("T")


class Engine:
    """Stand-in for an engine, which runs functions for the engine's thread immediately."""

    async def in_engine(self, work: Callable[[], T]) -> T:
        return work()


async def trace(folder: Path, bytes_of_disk: int | None = None) -> None:
    profiler = Profiler(Engine(), folder)  # type: ignore[arg-type]
    await profiler.start()
    torch.ones(3) @ torch.ones(3)
    limits: tuple[int, int] = resource.getrlimit(resource.RLIMIT_FSIZE)
    if bytes_of_disk is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_of_disk, limits[1]))
    try:
        await profiler.stop()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_trace_is_whole(tmp_path: Path) -> None:
    asyncio.run(trace(tmp_path))
    (path,) = tmp_path.iterdir()
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    assert "aten::dot" in {event.get("name") for event in events}


@pytest.mark.parametrize("bytes_of_disk", [0, 700])
def test_a_trace_that_does_not_fit_is_an_error_and_leaves_nothing(tmp_path: Path, bytes_of_disk: int) -> None:
    with pytest.raises(APIError, match="could not be written") as raised:
        asyncio.run(trace(tmp_path, bytes_of_disk))
    assert raised.value.status == 500
    assert list(tmp_path.iterdir()) == []
