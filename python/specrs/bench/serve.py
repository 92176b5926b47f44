"""One run of requests against a server: arrivals, concurrency, and the server's counters before and after. Starts no
server and prints nothing."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specrs.bench.client import ServerGone, Target, send, session, wait_ready
from specrs.bench.counters import SpecDecodeCounters, parse
from specrs.bench.datasets import Sample
from specrs.bench.records import RequestRecord
from specrs.errors import EngineError, InvalidConfigError, check_int, check_number, invalid_config

if TYPE_CHECKING:
    import aiohttp

    from specrs.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """Pattern of arrivals. `request_rate` is per second; infinite: all at once. `burstiness` is the shape of the
    gamma-distributed gaps.

    At `burstiness` 1 arrivals are a Poisson process; below 1 they are more bursty, above 1 more even. At most
    `max_concurrency` requests are in flight; others wait unsent in the client.
    """

    max_concurrency: int | None = None
    request_rate: float = np.inf
    burstiness: float = 1.0
    num_warmups: int = 0
    ready_check_timeout_sec: float = 0.0
    seed: int = 0
    profile: bool = False

    def __post_init__(self) -> None:
        if self.max_concurrency is not None:
            check_int(InvalidConfigError, "--max-concurrency", self.max_concurrency, 1)
        if not self.request_rate > 0:
            raise invalid_config("--request-rate", self.request_rate, "must be above 0, or inf")
        check_number(InvalidConfigError, "--burstiness", self.burstiness, 0.0, open_low=True)
        check_int(InvalidConfigError, "--num-warmups", self.num_warmups, 0)
        check_number(InvalidConfigError, "--ready-check-timeout-sec", self.ready_check_timeout_sec, 0.0)


@dataclass
class Run:
    """Result of a run: a record per sample in order, the nanoseconds from the start until the last request has ended,
    and the server's counters for that time.

    `gone` is the reason why the run ended early: the server no longer answered, or `interrupted`; nothing was sent
    afterwards.
    """

    records: list[RequestRecord] = field(default_factory=list)
    started: int = 0
    duration: int = 0
    counters: SpecDecodeCounters | None = None
    gone: str | None = None


def arrivals(config: LoadConfig, count: int) -> NDArray[np.float64]:
    """Return the seconds after the start at which each of `count` requests arrives; the last one at `count /
    request_rate`."""
    if np.isinf(config.request_rate):
        return np.zeros(count)
    rng = np.random.default_rng(config.seed)
    gaps = rng.gamma(config.burstiness, 1.0 / (config.request_rate * config.burstiness), count)
    times: NDArray[np.float64] = np.cumsum(gaps)
    # Sums of random gaps miss the rate by a percent or two; throughput should not depend on the seed.
    return times * (count / config.request_rate / times[-1]) if times[-1] > 0 else times


async def run(
    target: Target,
    samples: Sequence[Sample],
    config: LoadConfig,
    result: Run,
    *,
    advance: Callable[[RequestRecord], None] = lambda record: None,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> None:
    """Send every sample and wait for all. `advance` is called when a request ends.

    `result` is filled during the run, so an interrupted caller has the requests until then. Raises `EngineError` if the
    server does not answer at the beginning. If it stops answering later, `result.gone` is set.
    """
    async with session(config.max_concurrency) as client:
        failure = await wait_ready(client, target, config.ready_check_timeout_sec)
        if failure is not None:
            raise EngineError(
                f"--base-url={target.base_url}: no request was answered: {failure}; must be an OpenAI-compatible "
                "server (a server that is still loading: --ready-check-timeout-sec)"
            )
        await _warm_up(client, target, samples[0], config)
        if config.profile:
            await _profile(client, target, "start")
        before = await _counters(client, target)
        await _main(client, target, samples, config, result, advance, clock)
        after = await _counters(client, target)
        if before is not None and after is not None:
            result.counters = after.since(before)
        if config.profile:
            await _profile(client, target, "stop")


def measure(
    target: Target, samples: Sequence[Sample], config: LoadConfig, tokenizer: Tokenizer | None, *, progress: bool = True
) -> Run:
    """Run all samples with a progress bar. If interrupted, return the requests until then. Counts tokens that the
    server did not count.

    Raises `EngineError` if the server does not answer at the beginning, and `KeyboardInterrupt` if interrupted before
    anything was measured.
    """
    from tqdm import tqdm

    result = Run()
    interval = 0.1 if sys.stderr.isatty() else 10.0  # a log gets a line now and then
    bar = tqdm(
        total=len(samples),
        unit=" requests",
        disable=not progress,
        leave=False,
        dynamic_ncols=True,
        mininterval=interval,
    )
    with bar:

        def advance(record: RequestRecord) -> None:
            bar.update()

        try:
            asyncio.run(run(target, samples, config, result, advance=advance))
        except KeyboardInterrupt:
            if not any(record.success for record in result.records):
                raise
            result.gone = "interrupted"
    for sample, record in zip(samples, result.records, strict=True):
        count_tokens(sample, record, tokenizer)
    return result


def count_tokens(sample: Sample, record: RequestRecord, tokenizer: Tokenizer | None) -> None:
    """Set the token counts that the server did not report: by the tokenizer, or without one as one output token per
    chunk."""
    if record.success and not record.output_tokens:
        ids = [] if tokenizer is None else tokenizer.encode(record.text, add_special_tokens=False)
        record.output_tokens = len(ids) or len(record.events)
    if not record.input_tokens:
        if not isinstance(sample.prompt, str):
            record.input_tokens = len(sample.prompt)
        elif tokenizer is not None:
            record.input_tokens = len(tokenizer.encode(sample.prompt))


async def _warm_up(client: aiohttp.ClientSession, target: Target, sample: Sample, config: LoadConfig) -> None:
    places = asyncio.Semaphore(config.max_concurrency or max(config.num_warmups, 1))

    async def one() -> None:
        async with places:
            await send(client, target, sample, RequestRecord())

    await asyncio.gather(*(one() for _ in range(config.num_warmups)), return_exceptions=True)


async def _main(
    client: aiohttp.ClientSession,
    target: Target,
    samples: Sequence[Sample],
    config: LoadConfig,
    result: Run,
    advance: Callable[[RequestRecord], None],
    clock: Callable[[], int],
) -> None:
    result.records = [RequestRecord() for _ in samples]
    places = asyncio.Semaphore(config.max_concurrency or len(samples))

    async def one(sample: Sample, record: RequestRecord) -> None:
        async with places:
            if result.gone is None:
                try:
                    await send(client, target, sample, record, clock)
                except ServerGone as error:
                    result.gone = str(error)
        advance(record)

    result.started = clock()
    began = time.perf_counter()
    tasks = []
    try:
        for sample, record, due in zip(samples, result.records, arrivals(config, len(samples)), strict=True):
            wait = began + due - time.perf_counter()
            if wait > 0 and result.gone is None:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(one(sample, record)))
        await asyncio.gather(*tasks)
    finally:
        result.duration = clock() - result.started
        for task in tasks:
            task.cancel()


async def _counters(client: aiohttp.ClientSession, target: Target) -> SpecDecodeCounters | None:
    """Return the server's acceptance counters; None if it has no such metrics."""
    import aiohttp

    try:
        async with client.get(target.base_url.rstrip("/") + "/metrics") as response:
            return parse(await response.text()) if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None


async def _profile(client: aiohttp.ClientSession, target: Target, what: str) -> None:
    """Ask the server to start or stop its profiler; `what` is `start` or `stop`. Raises `EngineError` if it has
    none."""
    import aiohttp

    path = f"/{what}_profile"
    try:
        async with client.post(target.base_url.rstrip("/") + path) as response:
            if response.status == 200:
                return
            reason = f"HTTP {response.status}"
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        reason = str(error)
    raise EngineError(f"--profile: the server did not {what} its profiler ({path}: {reason}); must answer HTTP 200")
