"""Measures single passes and iterations without an engine: the time of a pass, what an iteration adds to it, and three
ways to run an iteration."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from specrs.backends.blueprint import Blueprint
from specrs.backends.cuda import drafting, iteration
from specrs.backends.cuda.build import make_context
from specrs.backends.cuda.context import Context, sequences_of
from specrs.backends.cuda.sampling.sampling_state import SamplingState
from specrs.backends.cuda.shapes import LogitsMode, Shape
from specrs.backends.weights import Weights
from specrs.config import EngineConfig
from specrs.core import RequestSampling
from specrs.speculative_config import SpeculativeConfig

from gpu.piecewise import Piecewise
from gpu.rates import rates
from gpu.timing import ON_GPU, clocks, graphed, milliseconds

CONTEXT = 1024 if ON_GPU else 8
MAX_K = 8 if ON_GPU else 2
GROWTH = 600 if ON_GPU else 4
"""Number of tokens of the request whose time per token `bench_gpu.py` measures."""
SUSTAINED_SECONDS = 3.0 if ON_GPU else 0.0


class Alone:
    """`batch` requests of `CONTEXT` tokens each, whose state is reset before every measurement."""

    def __init__(self, target: str, draft: str, weights: Weights, batch: int = 1, **settings: Any) -> None:
        self.batch, self.context = batch, CONTEXT
        speculative = SpeculativeConfig(
            model=draft,
            num_speculative_tokens=MAX_K,
            rejection_sample_method="synthetic",
            synthetic_acceptance_rates=rates("mt-bench", MAX_K),  # type: ignore[arg-type]
        )
        config = EngineConfig(
            model=target,
            speculative_config=speculative,
            max_num_seqs=batch,
            max_model_len=2 * CONTEXT + 256,
            max_num_batched_tokens=max(256, batch * (MAX_K + 1)),
            **settings,
        )
        blueprint = Blueprint(config, weights)
        blocks = batch * -(-config.max_model_len // config.block_size) + 1  # type: ignore[operator]
        vocab = weights.target.vocab_size
        self.sampling = SamplingState(batch, vocab, torch.float32, blueprint.device)
        self.ctx: Context = make_context(blueprint, blueprint.scheduler(blocks), self.sampling, blocks)
        self.sequences = sequences_of(self.ctx.record.views, "num_decode")
        self.temperature(0.0)

    def temperature(self, temperature: float, top_p: float = 1.0) -> None:
        """Set the sampling of the first request."""
        self.sampling.params.write(0, RequestSampling(temperature=temperature, top_p=top_p))

    def reset(self, k: int) -> Callable[[], None]:
        """Return a function that sets state and record to the start of an iteration with `k` drafts."""

        def run() -> None:
            state, views, batch = self.ctx.state, self.ctx.record.views, self.batch
            width, device = state.block_table.shape[1], state.block_table.device
            state.num_tokens[:batch] = self.context
            state.draft_len[:batch] = self.context - 1
            state.limit[:batch] = 2 * CONTEXT + 200
            state.active[:batch] = True
            state.stop_ids[:batch] = -1
            state.block_table[:batch] = torch.arange(batch * width, device=device).view(batch, width)
            views["header"].zero_()
            self.sequences.count.fill_(batch)
            views["seq_row"][:batch] = torch.arange(batch, device=device)
            views["seq_k"][:batch] = k
            views["seq_capacity"][:batch] = 2 * CONTEXT + 256

        return run

    @torch.inference_mode()
    def target_pass(self, rows: int) -> float:
        """Return the milliseconds of a pass over `rows` rows with the LM head."""
        self._prepare(rows - 1)
        return self._time(lambda: iteration.verify_pass(self.ctx, 1, rows, rows, greedy=True), rows - 1)

    @torch.inference_mode()
    def batch_pass(self, k: int) -> float:
        """Return the milliseconds of a verification of `k` drafts for every request with the LM head."""
        shape = Shape(self.batch, k, self.batch * (k + 1), LogitsMode.GREEDY)
        self.reset(k)()
        iteration.prepare(self.ctx, shape, self.sequences)
        return self._time(lambda: iteration.verify_pass(self.ctx, shape.batch, shape.rows, k + 1, greedy=True), k)

    @torch.inference_mode()
    def draft_pass(self) -> float:
        """Return the milliseconds of a draft pass over one row with its LM head."""
        self._prepare(2)
        return self._time(lambda: drafting.draft_pass(self.ctx, 2, 1, LogitsMode.GREEDY), 2)

    @torch.inference_mode()
    def whole(self, k: int, logits_mode: LogitsMode = LogitsMode.GREEDY) -> float:
        """Return the milliseconds of a whole iteration with K drafts, captured as one CUDA graph."""
        shape = Shape(1, k, k + 1, logits_mode)
        return self._time(lambda: iteration.run(self.ctx, shape, self.sequences), k)

    @torch.inference_mode()
    def sustained(self, k: int, context: int) -> dict[str, Any]:
        """Return the milliseconds of a whole iteration that is replayed for `SUSTAINED_SECONDS` from `context` on, and
        the GPU's clocks at the end. A burst of `whole` may run at higher clocks than an engine does."""
        shape, self.context = Shape(1, k, k + 1, LogitsMode.GREEDY), context
        reset = self.reset(k)
        reset()
        replay = graphed(lambda: iteration.run(self.ctx, shape, self.sequences))
        times, end = list[float](), time.monotonic() + SUSTAINED_SECONDS
        while not times or time.monotonic() < end:
            times.append(milliseconds(replay, repeats=1, calls=4, before=reset))
        self.context = CONTEXT
        last = times[len(times) // 2 :]
        return {"context": context, "ms": statistics.median(last), "first_ms": times[0], "clocks": clocks()}

    @torch.inference_mode()
    def chained(self, k: int) -> float:
        """Return the milliseconds of an iteration with one CUDA graph per pass, and single ops between the graphs."""
        ctx, shape = self.ctx, Shape(1, k, k + 1, LogitsMode.GREEDY)
        self._prepare(k)
        drafts = [graphed(lambda i=i: drafting.draft_pass(ctx, i, 1, LogitsMode.GREEDY)) for i in range(1, k + 1)]
        verify = graphed(lambda: iteration.verify_pass(ctx, 1, k + 1, k + 1, greedy=True))
        return milliseconds(lambda: self._in_turn(shape, drafts, verify), before=self.reset(k))

    @torch.inference_mode()
    def piecewise(self, k: int) -> float:
        """Return the milliseconds of an iteration with attention outside graphs, and the rest of a pass in pieces
        between them."""
        ctx, shape = self.ctx, Shape(1, k, k + 1, LogitsMode.GREEDY)
        self._prepare(k)
        drafts = [Piecewise(lambda i=i: drafting.draft_pass(ctx, i, 1, LogitsMode.GREEDY)) for i in range(1, k + 1)]
        verify = Piecewise(lambda: iteration.verify_pass(ctx, 1, k + 1, k + 1, greedy=True))
        return milliseconds(lambda: self._in_turn(shape, drafts, verify), before=self.reset(k))

    def _in_turn(self, shape: Shape, drafts: list[Any], verify: Callable[[], None]) -> None:
        iteration.prepare(self.ctx, shape, self.sequences)
        for draft in drafts:
            draft()
        if shape.max_k:
            iteration.assemble(self.ctx, shape)
        verify()
        iteration.accept_and_update(self.ctx, shape)

    def _prepare(self, k: int) -> None:
        self.reset(k)()
        iteration.prepare(self.ctx, Shape(1, k, k + 1, LogitsMode.GREEDY), self.sequences)

    def _time(self, function: Callable[[], None], k: int) -> float:
        self.reset(k)()
        replay = graphed(function)
        return milliseconds(replay, before=self.reset(k))


def measure(alone: Alone) -> dict[str, Any]:
    """Measure every figure of the table that needs no engine."""
    ks = range(1, MAX_K + 1)
    target = {rows: alone.target_pass(rows) for rows in range(1, MAX_K + 1)}
    draft = alone.draft_pass()
    whole = {k: alone.whole(k) for k in (0, *ks)}
    found: dict[str, Any] = {
        "target_pass_ms": target,
        "draft_pass_ms": draft,
        "whole_ms": whole,
        "chained_ms": {k: alone.chained(k) for k in ks},
        "piecewise_ms": {k: alone.piecewise(k) for k in ks},
    }
    # TPOT is measured from CONTEXT to CONTEXT + GROWTH.
    found["sustained"] = {
        k: [alone.sustained(k, CONTEXT + more) for more in (0, GROWTH // 2, GROWTH)] for k in (0, min(5, MAX_K))
    }
    found["iteration_overhead_ms"] = {k: whole[k] - k * draft - target[k + 1] for k in ks if k + 1 in target}
    alone.temperature(0.7, 0.9)
    found["sampled_ms"] = {k: alone.whole(k, LogitsMode.SAMPLED) for k in (0, *ks)}
    alone.temperature(0.0)
    found["sampling_adds_ms"] = {k: found["sampled_ms"][k] - whole[k] for k in found["sampled_ms"]}
    return found
