"""Measures an engine in this process: throughput of many requests, latency of one batch, and acceptance. Loads
nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrs.errors import EngineError
from specrs.extras import require
from specrs.outputs import AcceptanceFigures

if TYPE_CHECKING:
    from specrs.llm import LLM
    from specrs.sampling import SamplingParams

Prompts = Sequence[list[int]]


@dataclass(frozen=True, slots=True)
class Throughput:
    """Result of completing `num_requests` requests. `seconds` is the time of the whole call, prompts included."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    acceptance: AcceptanceFigures

    @property
    def requests_per_second(self) -> float:
        """Requests per second."""
        return self.num_requests / self.seconds

    @property
    def total_tokens_per_second(self) -> float:
        """Tokens of prompts and outputs per second."""
        return (self.prompt_tokens + self.output_tokens) / self.seconds

    @property
    def output_tokens_per_second(self) -> float:
        """Generated tokens per second."""
        return self.output_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class AcceptancePoint:
    """Acceptance statistics at one K and temperature."""

    k: int
    temperature: float
    figures: AcceptanceFigures


def throughput(llm: LLM, prompts: Prompts, params: Sequence[SamplingParams], use_tqdm: bool = True) -> Throughput:
    """Complete all prompts at once and measure. Resets the statistics of `llm` first. Raises `EngineError` if a request
    was rejected, because the others would be no measurement."""
    llm.reset_stats()
    began = time.perf_counter()
    outputs = llm.generate(list(prompts), list(params), use_tqdm=use_tqdm)
    seconds = time.perf_counter() - began
    for number, output in enumerate(outputs):
        if output.error is not None:
            raise EngineError(f"prompt {number} was refused: {output.error}")
    return Throughput(
        num_requests=len(outputs),
        prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
        output_tokens=sum(len(completion.token_ids) for output in outputs for completion in output.outputs),
        seconds=seconds,
        acceptance=_figures(llm),
    )


def latencies(
    llm: LLM,
    prompts: Prompts,
    params: SamplingParams,
    *,
    num_iters: int,
    num_iters_warmup: int,
    advance: Callable[[], None] = lambda: None,
) -> list[float]:
    """Return the seconds of each of `num_iters` runs of one batch, after `num_iters_warmup` runs that do not count."""
    seconds = []
    for number in range(num_iters_warmup + num_iters):
        began = time.perf_counter()
        llm.generate(list(prompts), params, use_tqdm=False)
        if number >= num_iters_warmup:
            seconds.append(time.perf_counter() - began)
        advance()
    return seconds


def acceptance(
    llm: LLM,
    prompts: Prompts,
    params: Sequence[SamplingParams],
    ks: Sequence[int],
    temperatures: Sequence[float],
    use_tqdm: bool = True,
) -> list[AcceptancePoint]:
    """Measure acceptance at each K and temperature over the same prompts. `params` holds the other sampling parameters
    of each prompt.

    K is a setting of each request, at most the engine's. Raises `EngineError` if a request was rejected.
    """
    points = []
    for temperature in temperatures:
        for k in ks:
            own = [item.replace(num_speculative_tokens=k, temperature=temperature) for item in params]
            points.append(AcceptancePoint(k, temperature, throughput(llm, prompts, own, use_tqdm).acceptance))
    return points


def _figures(llm: LLM) -> AcceptanceFigures:
    stats = llm.stats()
    return AcceptanceFigures(draft_tokens=stats.draft_tokens, acceptance_histogram=list(stats.acceptance_histogram))


@contextlib.contextmanager
def profiled(folder: Path | None) -> Iterator[Path | None]:
    """Write a torch profiler trace of the context's code into `folder`, and yield its path. None: no trace.

    The trace has Chrome's format. Profiling costs time, so the times of such a run are no measurement.

    Raises `InvalidConfigError` if torch is not installed.
    """
    if folder is None:
        yield None
        return
    require("torch", "transformers", "--profile")
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    path = folder / f"specrs-trace-{time.strftime('%Y%m%d-%H%M%S')}.json"
    profiler: Any = profile(activities=activities)
    with profiler:
        yield path
    profiler.export_chrome_trace(str(path))
