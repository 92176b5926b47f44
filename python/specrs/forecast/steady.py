"""Predicts the throughput of an engine on a GPU under a constant number of requests: each that ends is replaced.

Steps are a Markov chain. Its state is the number of prompt tokens that are not computed yet, and the number of last
steps that left no room for a waiting prompt. In each step every decoding request ends with the same probability, so
requests start and end at random, as on a server. A step costs what `Roofline` says of its shape.
`backends.cuda.shapes.Buckets` decides which graph a step takes, how far it is padded, and whether prompts ride in the
verification pass. The scheduler cuts prompts to what fits. `StepCosts` repeats that rule of
`rust/core/src/scheduler/merging.rs`, and tests compare both.

Not modelled: memory for KV, `max_prefill_stall_ms`, prefix hits, sampling, and the smaller K of a request's last
tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from math import ceil, comb

import numpy as np

from specrs.backends.cuda.backend import CudaBackend, batched_tokens_of
from specrs.backends.cuda.shapes import (
    MERGED_CHUNKS,
    MERGED_ROWS,
    MERGED_STEPS,
    TILED_MERGED_ROWS,
    Buckets,
    LogitsMode,
    MergedShape,
    batch_buckets,
)
from specrs.forecast.gpus import GAP_US
from specrs.forecast.roofline import FIRST_PASS_ROWS, Chunks, Roofline
from specrs.model_values import DEFAULT_MAX_NUM_SEQS

_LEAST = 1e-6
"""Probability below which a state or a number of arrivals is left out. The chain has settled if its states change by
less."""
_FEW_ROOMS = 2
"""Number of rooms of one size that should hold a step's prompts, as in the scheduler."""
_MAX_DELAYS = 2
"""Number of merged steps in a row that may leave no room for a waiting prompt, as in the scheduler."""
_MAX_STEPS = 2000
"""Maximum number of steps for which the chain is followed."""


def shares_of(lengths: Sequence[float]) -> list[float]:
    """Return the share of drafts that are accepted up to each position, from acceptance lengths at K = 1, 2, .... A
    share is at most the previous one, even if the lengths say otherwise."""
    shares: list[float] = []
    for before, length in pairwise([1.0, *lengths]):
        shares.append(min(length - before, shares[-1] if shares else 1.0))
    return shares


def mean_steps(tokens: int, shares: Sequence[float]) -> float:
    """Return the mean number of steps in which a request gets `tokens` tokens. Each step drafts as many tokens as there
    are `shares`, which are accepted up to position i with probability `shares[i]`."""
    chances = [reached - beyond for reached, beyond in pairwise([1.0, *shares, 0.0])]
    steps = [0.0]
    for n in range(1, tokens + 1):
        steps.append(1.0 + sum(chance * steps[max(0, n - 1 - i)] for i, chance in enumerate(chances)))
    return steps[tokens]


@dataclass(frozen=True, slots=True)
class Step:
    """Milliseconds of a step, and the prompt tokens that it computes."""

    ms: float
    tokens: int = 0
    merged: bool = False
    """True if prompts ride in the verification pass."""


class StepCosts:
    """Steps of an engine whose requests all draft `k` tokens and have prompts of `input_len` tokens.

    `step(decoding, prompts, left, delays)` is a step of `decoding` sequences when `prompts` prompts have `left` tokens
    that are not computed yet, after `delays` steps that left no room for a waiting prompt. It leaves out the draft's
    pass over prompts. `catch_up_ms(prompts)` is the time of that pass, which comes in the step after `prompts` prompts
    have ended.
    """

    def __init__(
        self, roofline: Roofline, buckets: Buckets, k: int, input_len: int, max_num_batched_tokens: int
    ) -> None:
        self.roofline, self.buckets, self.k, self.input_len = roofline, buckets, k, input_len
        self._max_tokens = max_num_batched_tokens
        self._rooms = [(seqs, tokens) for drafts, seqs, tokens in buckets.merged_rooms() if drafts == k]
        self.step, self.catch_up_ms = cache(self._step), cache(self._catch_up_ms)
        self._decode_ms, self._merged_ms = cache(self._time_decode), cache(self._time_merged)

    @classmethod
    def of_engine(
        cls,
        roofline: Roofline,
        k: int,
        input_len: int,
        *,
        max_num_seqs: int = DEFAULT_MAX_NUM_SEQS,
        merges: bool = True,
    ) -> StepCosts:
        """Return the steps of an engine with default settings. Without `merges`, prompts have a pass of their own."""
        tokens, quantized = batched_tokens_of(1e9 * roofline.gpu.memory_gb), roofline.quantization is not None
        buckets = Buckets(
            batch_buckets(max_num_seqs),
            k,
            max_chunk_rows=tokens,
            max_chunks=max_num_seqs,
            merges=MERGED_CHUNKS if merges else 0,
            merged_rows=TILED_MERGED_ROWS if quantized and roofline.target.experts is None else MERGED_ROWS,
        )
        return cls(roofline, buckets, k, input_len, tokens)

    def _step(self, decoding: int, prompts: int, left: int, delays: int = 0) -> Step:
        gap = 1e-3 * GAP_US
        whole = self.buckets.whole([self.k] * decoding, LogitsMode.GREEDY, self.k) if decoding else None
        alone = self._decode_ms(whole.batch if whole else decoding) if decoding else 0.0
        if not left:
            return Step(gap + alone)
        tokens, chunks = self._cut(decoding, prompts, left, delays)
        merged = None if whole is None else self.buckets.merged(whole, decoding, tokens, chunks)
        if merged is not None:
            return Step(gap + self._merged_ms(merged), tokens, merged=True)
        ends = prompts - ceil((left - tokens) / self.input_len)
        return Step(gap + alone + self.roofline.prompts_ms(self._padded(tokens, chunks, ends)), tokens)

    def _time_decode(self, batch: int) -> float:
        return self.roofline.iteration_ms(batch, self.k)

    def _time_merged(self, shape: MergedShape) -> float:
        batch, ends = shape.decode.batch, shape.num_seqs - shape.decode.batch
        verification = self.roofline.target_pass(batch, self.k, self._chunks(shape.chunk_rows, ends))
        return self.roofline.iteration_ms(batch, self.k, verification)

    def _cut(self, decoding: int, prompts: int, left: int, delays: int) -> tuple[int, int]:
        """Return the number of prompt tokens of a step and the number of prompts that they are of, as the scheduler
        chooses them."""
        most = next((seqs for seqs, _ in self._rooms if seqs >= decoding > 0), None)
        rooms = [tokens for seqs, tokens in self._rooms if seqs == most]
        # Prompts of which the step has no chunk do not count.
        chunks = min(prompts, MERGED_CHUNKS)
        first = left - (prompts - chunks) * self.input_len
        if rooms and delays < _MAX_DELAYS and first <= MERGED_STEPS * rooms[-1]:
            room = next((tokens for tokens in rooms if first <= _FEW_ROOMS * tokens), rooms[-1])
            return min(first, room), chunks
        most = max(self._max_tokens - decoding * (self.k + 1), ceil(self._max_tokens / 4))
        # Whole prompts or equal parts of one, so that few numbers of tokens can be left.
        part = ceil(self.input_len / ceil(self.input_len / most))
        return min(left, most // part * part), prompts

    def _catch_up_ms(self, prompts: int) -> float:
        # The draft's first pass computes a prompt's last tokens itself.
        rows = prompts * (self.input_len + 1 - FIRST_PASS_ROWS)
        if not (self.k and rows):
            return 0.0
        return self.roofline.draft_pass(0, chunks=self._padded(rows, prompts, 0)).ms(self.roofline.gpu)

    def _padded(self, rows: int, chunks: int, ends: int) -> Chunks:
        shape = self.buckets.chunks(rows, chunks)
        return self._chunks(shape.rows if shape else rows, ends)

    def _chunks(self, rows: int, ends: int) -> Chunks:
        return Chunks(rows, max(1, self.input_len // 2), ends)


@dataclass(frozen=True, slots=True)
class SteadyState:
    """Prediction for one number of requests and one K."""

    concurrency: int
    k: int
    tokens_per_s: float
    """Output tokens per second of all requests."""
    step_ms: float
    """Mean milliseconds of a step."""
    arrivals: float
    """Mean number of prompts that start in a step."""
    merged: float
    """Share of the steps with prompts that have them in the verification pass. 0 if there are none."""


def steady_state(costs: StepCosts, concurrency: int, output_len: int, shares: Sequence[float]) -> SteadyState:
    """Return the steady state of `concurrency` requests with `output_len` tokens each, whose drafts are accepted at
    `shares`, one for each position."""
    # A step is planned before the one before it has ended. So a place stays empty for a step, unless nothing else runs.
    empty = 0 if concurrency == 1 and not costs.k else CudaBackend.max_steps_in_flight - 1
    chance = 1.0 / (1.0 + mean_steps(output_len - 1, shares[: costs.k]) + empty)
    states, settled = {(0, 0): 1.0}, False
    for _ in range(_MAX_STEPS):
        # A fifth of the weight stays where it is: a chain that merges its prompts in two of three steps has a period.
        following = defaultdict[tuple[int, int], float](float, {state: p / 4 for state, p in states.items()})
        ms, arrived, prompted, merged = 0.0, 0.0, 0.0, 0.0
        for (left, delays), weight in states.items():
            waiting = ceil(left / costs.input_len)
            for arrivals, probability in _arrivals(concurrency - waiting, chance):
                p, prompts = weight * probability, waiting + arrivals
                all_left = left + arrivals * costs.input_len
                step = costs.step(concurrency - prompts, prompts, all_left, delays)
                still = all_left - step.tokens
                following[still, delays + 1 if step.merged and prompts > MERGED_CHUNKS else 0] += p
                ms += p * (step.ms + costs.catch_up_ms(prompts - ceil(still / costs.input_len)))
                arrived += p * arrivals
                prompted += p * (prompts > 0)
                merged += p * step.merged
        if settled:
            break
        total = sum(p for p in following.values() if p >= _LEAST)
        kept = {state: p / total for state, p in following.items() if p >= _LEAST}
        settled = all(abs(p - states.get(state, 0.0)) < _LEAST for state, p in kept.items())
        states = kept
    rate = 1e3 * arrived * output_len / ms
    return SteadyState(concurrency, costs.k, rate, ms, arrived, merged / prompted if prompted else 0.0)


@cache
def _arrivals(decoding: int, chance: float) -> Sequence[tuple[int, float]]:
    """Return the numbers of requests that end in a step, with their probabilities."""
    every = [(n, comb(decoding, n) * chance**n * (1 - chance) ** (decoding - n)) for n in range(decoding + 1)]
    return [(n, p) for n, p in every if p >= _LEAST]


def auto_k(costs: Sequence[StepCosts], concurrency: int, shares: Sequence[float]) -> int:
    """Return the K that the planner of `num_speculative_tokens="auto"` prefers for `concurrency` requests: the one with
    the most tokens per millisecond in a step without prompts. `costs` are those of K = 0, 1, ...."""
    lengths = list(accumulate(shares, initial=1.0))
    return max(range(len(costs)), key=lambda k: lengths[k] / costs[k].step(concurrency, 0, 0).ms)


def one_wave(costs: StepCosts, concurrency: int, output_len: int, shares: Sequence[float], waves: int) -> float:
    """Return the tokens per second of `concurrency` requests that start together, until the last one ends. Simulates
    `waves` waves, with accepted drafts drawn at random."""
    random, k, total_ms = np.random.default_rng(concurrency), costs.k, 0.0
    for _ in range(waves):
        remaining, decodes = np.full(concurrency, output_len), np.zeros(concurrency, dtype=bool)
        left, started, ended, last = concurrency * costs.input_len, 0, 0, 0
        while left or decodes.any():
            # Requests that draft may have ended in the step before without the scheduler knowing it.
            rows = int(decodes.sum()) + (ended if k else 0)
            step = costs.step(rows, concurrency - started, left)
            total_ms += step.ms + costs.catch_up_ms(last)
            drawn = random.random(concurrency)
            tokens = 1 + sum((drawn < share).astype(np.int64) for share in shares[:k])
            remaining -= decodes * tokens
            ended = int((decodes & (remaining <= 0)).sum())
            decodes &= remaining > 0
            left -= step.tokens
            before, started = started, concurrency - ceil(left / costs.input_len)
            remaining[before:started] -= 1
            decodes[before:started] = True
            last = started - before
    return 1e3 * waves * concurrency * output_len / total_ms
