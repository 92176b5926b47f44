"""The loop: plan -> launch -> settle. Owns requests, scheduler, ring and runner; computes nothing itself."""

from __future__ import annotations

import secrets
import time
import warnings
from collections.abc import Callable

import numpy as np

from specrs.config import EngineConfig
from specrs.core import (
    FINISH_ABORT,
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_STOP,
    FLAG_CAPACITY,
    FLAG_TARGET_NON_FINITE,
    PLAN_IDLE,
    PLAN_LAUNCH,
    Scheduler,
    SpeculationPlanner,
)
from specrs.drafters.draft_model import DraftModel
from specrs.engine.build import Blueprint, Weights, load_weights
from specrs.engine.request import FinishReason, Request
from specrs.engine.warm_up import measure_costs
from specrs.errors import EngineError, SpecrsError
from specrs.outputs import EngineStats
from specrs.runner.logprobs import token_entries
from specrs.runner.ring import Header, Ring, RingSlot
from specrs.sampling import RequestLimits, validate_request
from specrs.verify.logprobs import TokenLogprobs

Watch = Callable[[RingSlot, Header, float], None]
"""Told of every launch that settled: its slot, its header, and the milliseconds that it took."""

_REASONS = {
    FINISH_STOP: FinishReason.STOP,
    FINISH_LENGTH: FinishReason.LENGTH,
    FINISH_ABORT: FinishReason.ABORT,
    FINISH_ERROR: FinishReason.ERROR,
}


class Engine:
    """Runs requests to their end, `launch_depth` launches in flight.

    One `step` plans and enqueues until `launch_depth` launches are in flight, then settles the oldest: the host waits
    for a launch only when a newer one is already enqueued (or at depth 1).
    """

    def __init__(self, config: EngineConfig, weights: Weights | None = None) -> None:
        """Load the models of `config` (or share `weights`) and allocate caches and row state.

        Raises:
            InvalidConfigError and its subclasses: what is wrong with the configuration or a checkpoint.
        """
        self.config = config
        if config.synthetic:
            warnings.warn(
                "rejection_sample_method='synthetic': drafts are accepted at given rates, for timing only; the text is "
                "not the target's",
                stacklevel=2,
            )
        self.weights = load_weights(config) if weights is None else weights
        blueprint = Blueprint(config, self.weights)
        target = self.weights.target.config
        self.max_model_len = blueprint.max_model_len
        self.num_speculative_tokens = blueprint.num_speculative_tokens
        self.depth = blueprint.depth
        self.limits = RequestLimits(
            max_model_len=self.max_model_len,
            vocab_size=target.vocab_size,
            num_speculative_tokens=self.num_speculative_tokens,
            eos_token_ids=target.eos_token_ids,
            max_logprobs=config.max_logprobs,
        )
        blocks = blueprint.num_blocks()
        self._begin(blueprint.scheduler(blocks))
        self.runner = blueprint.runner(self.scheduler, blocks)
        self.planner: SpeculationPlanner | None = None
        self.watch: Watch | None = None
        if config.plans_speculation and self.num_speculative_tokens:
            costs, catch_up_ms = measure_costs(self)
            self._begin(blueprint.scheduler(blocks))
            self.reset_stats()
            self.planner = SpeculationPlanner(
                max_num_seqs=config.max_num_seqs,
                num_speculative_tokens=self.num_speculative_tokens,
                costs=costs,
                catch_up_ms=catch_up_ms,
            )
            self.watch = self._learn

    def _begin(self, scheduler: Scheduler) -> None:
        """Begin with a scheduler that has seen nothing: no requests, empty books."""
        pinned = self.weights.target.device.type == "cuda"
        self.scheduler = scheduler
        self.ring = Ring(scheduler, self.num_speculative_tokens, self.depth, pinned=pinned)
        self.requests: dict[int, Request] = {}
        self._books_before = scheduler.acceptance()
        self._preemptions_before = 0
        self._prompt_tokens = self._generation_tokens = self._cached_tokens = 0
        self._settled_at = 0.0

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError and other SpecrsError: what is wrong with it; the engine is unchanged.
        """
        params = request.params
        bounds = validate_request(request.prompt_token_ids, params, self.limits)
        matcher = None if request.grammar is None else request.grammar.matcher(bounds.stop_token_ids)
        self.scheduler.add_request(
            request.request_id,
            np.asarray(request.prompt_token_ids, dtype=np.int64),
            limit=bounds.limit,
            min_tokens=params.min_tokens,
            num_speculative_tokens=bounds.num_speculative_tokens,
            priority=request.priority,
            stop_token_ids=np.asarray(bounds.stop_token_ids, dtype=np.int64),
            cache_salt=_cache_salt(request),
        )
        request.matcher = matcher
        request.synthetic = self.config.synthetic
        request.stop_token_ids = bounds.stop_token_ids
        request.eos_token_ids = frozenset() if params.ignore_eos else frozenset(self.limits.eos_token_ids)
        self._prompt_tokens += len(request.prompt_token_ids)
        self.requests[request.request_id] = request

    @property
    def drafter(self) -> DraftModel | None:
        """The draft model, None without speculation."""
        return self.runner.drafter

    def abort(self, request_id: int) -> None:
        """End a request now; its blocks come back when the launches in flight that name it have settled.

        Raises:
            UnknownRequestError: no such request is running or waiting.
        """
        self.scheduler.abort(request_id)
        self.requests.pop(request_id).finish(FinishReason.ABORT)

    def has_unfinished(self) -> bool:
        """Whether a request waits or runs, or a launch is in flight."""
        return bool(self.requests) or bool(self.ring.in_flight)

    def step(self) -> list[Request]:
        """Advance until one launch has settled; the requests that got tokens or ended, `[]` when there is nothing to
        do.

        An exception in a launch (a fault of the runner, an interrupt) ends the requests of that launch with
        `finish_reason="error"` and is raised again; the engine stays usable.
        """
        while len(self.ring.in_flight) < self._depth():
            slot = self.ring.next
            slot.started = time.perf_counter()
            if self.planner is not None:
                self.scheduler.speculate(self.planner)
            status = self.scheduler.plan(slot.record)
            if status != PLAN_LAUNCH:
                if status == PLAN_IDLE and not self.ring.in_flight:
                    self.scheduler.check_integrity()
                break
            header = slot.header()
            self.ring.launch()
            self._launch(slot, header)
        return self._settle() if self.ring.in_flight else []

    def stats(self) -> EngineStats:
        """The acceptance books and counters since the start or the last `reset_stats`; a snapshot."""
        books, before = self.scheduler.acceptance(), self._books_before
        return EngineStats(
            draft_tokens=books.draft_tokens - before.draft_tokens,
            acceptance_histogram=[now - then for now, then in zip(books.histogram, before.histogram, strict=True)],
            synthetic_acceptance=self.config.synthetic,
            draft_passes=0 if self.drafter is None else self.drafter.num_passes,
            target_passes=self.runner.num_target_passes,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            num_cached_tokens=self._cached_tokens,
            num_preemptions=self.scheduler.num_preemptions - self._preemptions_before,
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_blocks=self.scheduler.num_blocks,
            num_free_blocks=self.scheduler.num_free_blocks,
        )

    def reset_stats(self) -> None:
        """Start counting anew; requests that run keep their own figures."""
        self._books_before = self.scheduler.acceptance()
        self._preemptions_before = self.scheduler.num_preemptions
        self._prompt_tokens = self._generation_tokens = self._cached_tokens = 0
        self.runner.num_target_passes = 0
        if self.drafter is not None:
            self.drafter.num_passes = 0

    def _depth(self) -> int:
        """Launches in flight: one while a grammar needs the settled tokens before it can mask the next."""
        return 1 if any(request.matcher for request in self.requests.values()) else self.depth

    def _launch(self, slot: RingSlot, header: Header) -> None:
        ids = slot.views["admit_request_id"][: header.num_admitted].tolist()
        cached = slot.views["admit_num_cached"][: header.num_admitted].tolist()
        admitted = [self.requests[i] for i in ids]
        for request, num_cached in zip(admitted, cached, strict=True):
            request.num_cached_tokens = num_cached
            self._cached_tokens += num_cached
        try:
            self.runner.launch(slot, header, admitted)
        except BaseException as fault:
            self._fail(slot, fault)
            raise

    def _fail(self, slot: RingSlot, fault: BaseException) -> None:
        """Settle every launch in flight; the faulty one, the newest, ends its requests."""
        slot.results[:] = 0
        slot.results_view.flags.fill_(FLAG_TARGET_NON_FINITE)
        while self.ring.in_flight:
            reason = EngineError(f"the launch failed: {fault!r}") if self.ring.oldest is slot else None
            self._settle(reason)

    def _settle(self, fault: SpecrsError | None = None) -> list[Request]:
        slot = self.ring.oldest
        header = slot.header()
        if fault is None:
            self.runner.wait(slot)
        self.scheduler.settle(header.launch_id, slot.results, slot.settled)
        self.ring.settle()
        # Beside another launch in flight this one began when the one before it ended.
        begun, self._settled_at = max(slot.started, self._settled_at), time.perf_counter()
        if self.watch is not None and fault is None:
            self.watch(slot, header, 1e3 * (self._settled_at - begun))
        touched = []
        for request, first, values in slot.prompt_logprobs:
            _record_prompt(request, first, values)
        count = header.num_decode + header.num_prefill
        settled, results = slot.settled_view, slot.results_view
        for entry, (request_id, num_new, reason, drafted, accepted) in enumerate(
            zip(
                settled["request_id"][:count].tolist(),
                settled["num_new"][:count].tolist(),
                settled["finish_reason"][:count].tolist(),
                results.num_drafted[:count].tolist(),
                results.num_accepted[:count].tolist(),
                strict=True,
            )
        ):
            if request_id < 0:
                continue
            request = self.requests[request_id]
            if drafted:
                request.acceptance.record(drafted, accepted)
            new = results.tokens[entry, :num_new].tolist()
            stopped, error = False, None
            try:
                stopped = self._deliver(request, new, slot.logprobs.get(entry), ended_by_token=reason == FINISH_STOP)
            except Exception as broken:  # whatever a tokenizer makes of these ids: the engine is not at fault
                error = EngineError(f"request {request_id}: its output could not be read: {broken!r}")
            if error is None and request.matcher is not None and request.matcher.error:
                error = EngineError(f"request {request_id}: its grammar gave up: {request.matcher.error}")
            if (stopped or error) and not reason:
                self.scheduler.abort(request_id)
            if error is not None:
                request.finish(FinishReason.ERROR, error)
                del self.requests[request_id]
            elif stopped or reason:
                flags = int(results.flags[entry])
                cause = fault or (_error(flags, request) if reason == FINISH_ERROR else None)
                request.finish(FinishReason.STOP if stopped else _REASONS[reason], cause)
                del self.requests[request_id]
            if num_new or request.finished:
                touched.append(request)
        return touched

    def _learn(self, slot: RingSlot, header: Header, ms: float) -> None:
        """Tell the planner what became of a launch."""
        count, record, results = header.num_decode, slot.record_arrays, slot.results_arrays
        if self.planner is None or not count:
            return
        self.planner.settle(
            record["entry_row"][:count],
            record["entry_k"][:count],
            results["num_drafted"][:count],
            results["num_accepted"][:count],
            None if header.num_prefill or header.num_draft_chunks else ms,
        )

    def _deliver(
        self, request: Request, tokens: list[int], logprobs: TokenLogprobs | None, *, ended_by_token: bool
    ) -> bool:
        """Hand settled tokens to their request; whether a stop string ended it."""
        before = len(request.output_token_ids)
        stopped = request.append(tokens, ended_by_token=ended_by_token)
        kept = request.output_token_ids[before:]
        self._generation_tokens += len(kept)
        if request.matcher is not None:
            for token in kept:
                request.matcher.accept(token)
        if request.logprobs is not None and logprobs is not None:
            request.logprobs += token_entries(logprobs, kept, request.params.logprobs)
        return stopped


def _cache_salt(request: Request) -> bytes:
    """What other requests must share to share blocks: prompt logprobs need every prompt row computed, so nobody's."""
    if request.params.prompt_logprobs is None:
        return request.cache_salt.encode()
    return f"prompt_logprobs of request {request.request_id}".encode() + secrets.token_bytes(8)


def _record_prompt(request: Request, first: int, values: TokenLogprobs) -> None:
    """Append what is new; a preempted request computes its prompt again."""
    known = request.prompt_logprobs
    if known is None or len(known) < first:
        return
    tokens = request.prompt_token_ids[first : first + len(values.value)]
    known += token_entries(values, tokens, request.params.prompt_logprobs)[len(known) - first :]


def _error(flags: int, request: Request) -> SpecrsError:
    if flags & FLAG_CAPACITY:
        return EngineError(
            f"request {request.request_id}: a position lay beyond its KV blocks; its launch wrote nothing there"
        )
    position = len(request.prompt_token_ids) + len(request.output_token_ids)
    return EngineError(
        f"request {request.request_id}: the target's logits at position {position} are not finite "
        "(NaN or infinity), or no token is allowed there"
    )
