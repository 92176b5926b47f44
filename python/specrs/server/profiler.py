"""Torch profiler for the engine, which requests start and stop. Exists only if the server was given a folder for
traces."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from specrs.async_llm import AsyncLLM
from specrs.server.errors import APIError

logger = logging.getLogger("specrs")


class Profiler:
    """Profiler that writes a trace of the engine thread's work between `start` and `stop` into `folder`, in Chrome's
    format."""

    def __init__(self, llm: AsyncLLM, folder: Path) -> None:
        self._llm = llm
        self._folder = folder
        self._profile: Any = None

    async def start(self) -> None:
        """Begin a trace. Raises a 400 `APIError` if one is already running."""
        if self._profile is not None:
            raise APIError(400, "The profiler is running already.")
        import torch
        from torch.profiler import ProfilerActivity, profile

        cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *cuda])
        # torch records the thread that starts it
        await self._llm.in_engine(self._profile.start)

    async def stop(self) -> None:
        """End the trace and write it. Raises a 400 `APIError` if none is running, a 500 if it could not be written to
        disk."""
        profile, self._profile = self._profile, None
        if profile is None:
            raise APIError(400, "The profiler is not running.")
        # traces of one second are traces of their own
        path = self._folder / f"specrs-trace-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09d}.json"

        def end() -> bool:
            profile.stop()
            profile.export_chrome_trace(str(path))
            return _is_whole(path)

        if not await self._llm.in_engine(end):
            for written in self._folder.glob(f"{path.name}*"):
                written.unlink()
            logger.error("trace of the profiler: %s cannot be written, is the disk full?", path)
            raise APIError(500, "The trace could not be written; the log says where.")
        logger.info("trace of the profiler: %s", path)


def _is_whole(path: Path) -> bool:
    """Return True if the file has a trace's last field. torch reports no error if it can write the file only in
    part."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 8192))
        end = file.read()
    return b'"traceName"' in end and end.rstrip().endswith(b"}")
