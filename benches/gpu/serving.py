"""Engines end to end with synthetic acceptance: time per token, and where the time of a step goes."""

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

from gpu.rates import rates
from gpu.steady import OUTPUT, PROMPT
from gpu.timing import ON_GPU, synchronize


def make_engine(
    target: str, draft: str, weights: Weights, k: int | str, *, data: str = "mt-bench", **fields: Any
) -> Engine:
    """Return an engine at K = `k` (or `auto`, up to 5) whose drafts are accepted at the rates of `data`. All other
    settings than `fields` are the defaults."""
    speculative = None
    if k:
        most = 5 if k == "auto" else int(k)
        speculative = SpeculativeConfig(
            model=draft,
            num_speculative_tokens=k,  # type: ignore[arg-type]
            max_num_speculative_tokens=most if k == "auto" else None,
            rejection_sample_method="synthetic",
            synthetic_acceptance_rates=rates(data, most),  # type: ignore[arg-type]
        )
    small = {} if ON_GPU else {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 64}
    config = EngineConfig(model=target, speculative_config=speculative, enable_prefix_caching=False, **(small | fields))
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
    """Return the milliseconds per token of a lone request after its first token, and its acceptance length."""
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


def step_times(engine: Engine, batch: int) -> dict[str, float]:
    """Median milliseconds of a step in the steady state, from the end of the one before it to its own end: as the
    engine settles them, as its stream executes them (uploads, graph, results), and between steps on the stream.

    A graph alone is in the part `passes`. What is missing between the two is in the record's copy and the uploads
    (`stream_ms` minus the graph), or in the gaps.
    """
    runner, ms, marks = engine.runner, list[float](), list[tuple[torch.cuda.Event, torch.cuda.Event]]()
    assert isinstance(runner, CudaRunner)
    execute = runner.execute

    def marked(*args: Any) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(runner._stream)
        execute(*args)
        end.record(runner._stream)
        marks.append((start, end))

    if ON_GPU:
        runner.execute = marked  # type: ignore[method-assign]
    engine.watch = lambda _slot, header, taken: ms.append(taken) if not header.num_prefill else None
    run(engine, batch, PROMPT, OUTPUT)
    engine.watch, runner.execute = None, execute  # type: ignore[method-assign]
    synchronize()

    def middle(values: list[Any]) -> list[Any]:
        return values[len(values) // 4 : -(len(values) // 4) or None]

    found = {"settled_ms": statistics.median(middle(ms))}
    if marks:
        steady = middle(marks)
        gaps = [1e3 * a[1].elapsed_time(b[0]) for a, b in itertools.pairwise(steady)]
        found["stream_ms"] = statistics.median(a.elapsed_time(b) for a, b in steady)
        found |= {"gap_us": statistics.median(gaps), "max_gap_us": max(gaps)}
    return found
