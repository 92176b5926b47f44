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
from specrs.backends.ring import Header
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


def step_times(
    engine: Engine, batch: int, prompt_len: int = PROMPT, output_len: int = OUTPUT
) -> dict[str, float | list[float]]:
    """Median milliseconds of a step in the steady state, which has no prompt and no draft's prompt.

    | field | what |
    | --- | --- |
    | `settled_ms` | from the end of the step before to its own, as the engine settles them |
    | `stream_ms` | the step's work on its stream: the record's copy, uploads, graphs, the copy of results |
    | `graph_ms` | of that, the graphs |
    | `around_us` | microseconds of the rest of the stream's work |
    | `gap_us`, `max_gap_us` | microseconds between steps on the stream |
    | `host_us` | the host's microseconds to enqueue a step |
    | `draft_prompt_ms` | the stream's work of every step with a draft's prompt, which TPOT contains |
    """
    runner, settled = engine.runner, list[float]()
    assert isinstance(runner, CudaRunner)
    execute, graphs, replay = runner.execute, runner.graphs, runner.graphs.replay
    steps: list[tuple[Header, list[Any], list[Any], float]] = []
    marks: list[Any] = []

    def mark() -> Any:
        if not ON_GPU:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(runner._stream)
        return event

    def replayed(key: Any) -> None:
        marks.append(mark())
        replay(key)
        marks.append(mark())

    def executed(slot: Any, header: Header) -> None:
        marks.clear()
        start, began = mark(), time.perf_counter()
        execute(slot, header)
        taken = time.perf_counter() - began
        steps.append((header, [start, mark()], list(marks), 1e6 * taken))

    def ms(first: Any, second: Any) -> float:
        return first.elapsed_time(second) if ON_GPU else 1e3 * (second - first)

    runner.execute, graphs.replay = executed, replayed  # type: ignore[method-assign]
    engine.watch = lambda _slot, header, taken: settled.append(taken) if not header.num_prefill else None
    try:
        run(engine, batch, prompt_len, output_len)
    finally:
        engine.watch = None
        del runner.execute, graphs.replay
    synchronize()

    def middle(values: list[Any]) -> list[Any]:
        return values[len(values) // 4 : -(len(values) // 4) or None]

    decoding = [step for step in steps if step[0].num_decode and not step[0].num_prefill]
    steady = middle([step for step in decoding if not step[0].num_draft_chunks])
    inside = [sum(ms(*pair) for pair in zip(own[::2], own[1::2], strict=True)) for _, _, own, _ in steady]
    stream = [ms(*both) for _, both, _, _ in steady]
    gaps = [1e3 * ms(a[1][1], b[1][0]) for a, b in itertools.pairwise(steady)]
    found: dict[str, float | list[float]] = {
        "settled_ms": statistics.median(middle(settled)),
        "stream_ms": statistics.median(stream),
        "graph_ms": statistics.median(inside),
        "around_us": 1e3 * statistics.median(all_ms - own for all_ms, own in zip(stream, inside, strict=True)),
        "host_us": statistics.median(taken for _, _, _, taken in steady),
        "draft_prompt_ms": [ms(*both) for header, both, _, _ in decoding if header.num_draft_chunks],
    }
    return found | ({"gap_us": statistics.median(gaps), "max_gap_us": max(gaps)} if gaps else {})
