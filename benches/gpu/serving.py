"""Engines end to end with synthetic acceptance: time per token, idle time between steps, throughput."""

from __future__ import annotations

import itertools
import random
import statistics
import time
import warnings
from typing import Any

import torch
from specrs.backends.cuda.runner import CudaRunner
from specrs.backends.weights import Weights
from specrs.config import EngineConfig
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.engine.request import Request
from specrs.sampling import SamplingParams
from specrs.speculative_config import SpeculativeConfig

from gpu.iterations import RATES
from gpu.timing import ON_GPU, synchronize

PROMPT, OUTPUT = (150, 200) if ON_GPU else (6, 4)


def make_engine(
    target: str, draft: str, weights: Weights, k: int | str, sizes: list[int], max_model_len: int
) -> Engine:
    """An engine at K = `k` (or `auto`) whose drafts are accepted at the references' rates."""
    speculative = None
    if k:
        most = 5 if k == "auto" else int(k)
        speculative = SpeculativeConfig(
            model=draft,
            num_speculative_tokens=k,  # type: ignore[arg-type]
            max_num_speculative_tokens=most if k == "auto" else None,
            rejection_sample_method="synthetic",
            synthetic_acceptance_rates=sorted(RATES[:most], reverse=True),  # type: ignore[arg-type]
        )
    config = EngineConfig(
        model=target,
        speculative_config=speculative,
        max_num_seqs=max(sizes),
        max_model_len=max_model_len,
        cudagraph_capture_sizes=tuple(sizes),
        enable_prefix_caching=False,
        gpu_memory_utilization=0.95,
        num_gpu_blocks_override=None if ON_GPU else 40,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of synthetic acceptance: that is what is wanted here
        return build_engine(config, weights if k else Weights(weights.target, None))


def run(engine: Engine, concurrency: int, prompt_len: int, output_len: int) -> tuple[float, list[Request]]:
    """Seconds for `concurrency` requests of these lengths at once."""
    vocab, rng = engine.weights.target.vocab_size, random.Random(concurrency)
    params = SamplingParams(max_tokens=output_len, ignore_eos=True, temperature=0.0, detokenize=False)
    requests = [
        Request(
            1_000_000 * concurrency + i,
            [rng.randrange(vocab) for _ in range(prompt_len)],
            params,
            num_speculative_tokens=engine.num_speculative_tokens,
        )
        for i in range(concurrency)
    ]
    for request in requests:
        engine.add_request(request)
    synchronize()
    began = time.perf_counter()
    while engine.has_unfinished():
        engine.step()
    return time.perf_counter() - began, requests


def tpot(engine: Engine, prompt_len: int, output_len: int) -> dict[str, float]:
    """Milliseconds per token of a lone request behind its first token, and the acceptance length that it had."""
    run(engine, 1, prompt_len, 20)
    engine.reset_stats()
    _, (request,) = run(engine, 1, prompt_len, output_len)
    assert request.finish_time is not None
    assert request.first_token_time is not None
    tokens = len(request.output_token_ids) - 1
    return {
        "tpot_ms": 1e3 * (request.finish_time - request.first_token_time) / tokens,
        "acceptance_length": engine.stats().acceptance_length,
    }


def throughput(engine: Engine, concurrency: list[int]) -> dict[int, dict[str, float]]:
    """Tokens per second of one wave of requests at each concurrency."""
    run(engine, min(concurrency), PROMPT, 8)
    found = {}
    for count in concurrency:
        seconds, requests = run(engine, count, PROMPT, OUTPUT)
        tokens = sum(len(request.output_token_ids) for request in requests)
        spans = [
            (r.finish_time - r.first_token_time) / (len(r.output_token_ids) - 1)
            for r in requests
            if r.finish_time is not None and r.first_token_time is not None
        ]
        found[count] = {"tokens_per_s": tokens / seconds, "mean_tpot_ms": 1e3 * statistics.mean(spans)}
    return found


def idle_between_steps(engine: Engine, batch: int) -> dict[str, float]:
    """Microseconds that the GPU waits between the end of one step and the start of the next, in the steady state."""
    runner = engine.runner
    assert isinstance(runner, CudaRunner)
    if not ON_GPU or runner._stream is None:
        return {"median_us": 0.0, "max_us": 0.0}
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    execute = runner.execute

    def marked(*args: Any) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(runner._stream)
        execute(*args)
        end.record(runner._stream)
        marks.append((start, end))

    runner.execute = marked  # type: ignore[method-assign]
    run(engine, batch, PROMPT, OUTPUT)
    runner.execute = execute  # type: ignore[method-assign]
    torch.cuda.synchronize()
    steady = marks[len(marks) // 4 : -len(marks) // 4]
    gaps = [1e3 * a[1].elapsed_time(b[0]) for a, b in itertools.pairwise(steady)]
    return {"median_us": statistics.median(gaps), "max_us": max(gaps)}
