"""Log lines of a server: their format, with the id of the request; what was loaded; and a line of statistics every ten
seconds under load. Measures nothing: statistics are the engine's."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING

from specrs.outputs import AcceptanceFigures, EngineStats

if TYPE_CHECKING:
    from specrs.async_llm import AsyncLLM

logger = logging.getLogger("specrs")

INTERVAL = 10.0
"""Default number of seconds between two log lines with statistics."""
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="-")
"""Id of the request that the current task serves, for log lines. `-` outside of requests."""
FORMAT = "%(asctime)s.%(msecs)03d %(levelname)s [%(request_id)s] %(message)s"


class RequestIdFilter(logging.Filter):
    """Logging filter that adds the current task's `request_id` to each record."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Set `record.request_id`. Return True, so that no record is dropped."""
        record.request_id = REQUEST_ID.get()
        return True


def log_to_stderr(uvicorn_level: int) -> None:
    """Log to standard error: specrs' records from INFO on, uvicorn's from `uvicorn_level` on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(RequestIdFilter())
    handler.setFormatter(logging.Formatter(FORMAT, "%Y-%m-%d %H:%M:%S"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logger.setLevel(logging.INFO)
    logging.getLogger("uvicorn").setLevel(uvicorn_level)


async def log_what_runs(llm: AsyncLLM) -> None:
    """Log one line about the model and its memory, and one about how it drafts."""
    config, limits, stats = llm.config, llm.limits, await llm.stats()
    logger.info(
        "Model %s: %s%s on %s%s, %d tokens of context, up to %d requests at once; KV cache of %d tokens in blocks of "
        "%d%s",
        config.target,
        config.dtype,
        "" if config.quantization is None else f", {config.quantization}",
        llm.device,
        "" if config.tensor_parallel_size == 1 else f" by {config.tensor_parallel_size} ranks",
        limits.max_model_len,
        config.most_seqs,
        stats.num_blocks * config.block_size,
        config.block_size,
        "" if config.kv_cache_dtype == "auto" else f", {config.kv_cache_dtype}",
    )
    speculative = config.speculative_config
    if speculative is None:
        logger.info("No speculation")
    else:
        draft = "" if config.draft is None else f" with {config.draft}"
        logger.info("Speculation: %s%s, K = %s", speculative.method, draft, speculative.num_speculative_tokens)


async def log_figures(llm: AsyncLLM, interval: float) -> None:
    """Log a line of statistics every `interval` seconds if requests ran. Runs until it is cancelled.

    Raises `EngineDeadError` if the engine has ended.
    """
    before, then = await llm.stats(), time.monotonic()
    while True:
        await asyncio.sleep(interval)
        stats, now = await llm.stats(), time.monotonic()
        line = figures(before, stats, now - then)
        if line is not None:
            logger.info("%s", line)
        before, then = stats, now


def figures(before: EngineStats, now: EngineStats, seconds: float) -> str | None:
    """Return a line about what ran in the `seconds` between two snapshots of the engine's statistics, and what runs
    now. None if nothing ran or runs."""
    prompt = now.prompt_tokens - before.prompt_tokens
    output = now.generation_tokens - before.generation_tokens
    if not (prompt or output or now.num_running or now.num_waiting):
        return None
    cached = now.num_cached_tokens - before.num_cached_tokens
    text = (
        f"Running: {now.num_running}, waiting: {now.num_waiting}, KV cache: {now.kv_cache_usage:.1%}, "
        f"prompts: {prompt / seconds:.1f} tokens/s ({cached / max(1, prompt):.1%} from the prefix cache), "
        f"output: {output / seconds:.1f} tokens/s"
    )
    drafted = AcceptanceFigures(
        draft_tokens=now.draft_tokens - before.draft_tokens,
        acceptance_histogram=[
            a - b for a, b in zip(now.acceptance_histogram, before.acceptance_histogram, strict=True)
        ],
    )
    if drafted.drafts:
        text += (
            f", acceptance length: {drafted.acceptance_length:.2f} "
            f"(mean K {drafted.draft_tokens / drafted.drafts:.2f}, {drafted.acceptance_rate:.1%} accepted)"
        )
    return text
