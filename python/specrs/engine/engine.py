"""The engine's loop: plan, execute, settle. Owns requests, scheduler, ring and runner; computes nothing itself."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from specrs.backends.extras import RequestExtras
from specrs.backends.ring import Header, RingSlot, section_arrays
from specrs.core import (
    DRAFTER_DEVICE,
    DRAFTERS,
    FLAG_TARGET_NON_FINITE,
    PLAN_IDLE,
    PLAN_STEP,
    AcceptanceTracker,
    Outputs,
)
from specrs.drafters.base import DrafterCounts
from specrs.engine.constraints import reject_exclusive
from specrs.engine.faults import HOST_KINDS, DraftFaults
from specrs.engine.parts import EngineParts, Watch
from specrs.engine.request import FinishReason, Request
from specrs.engine.token_logprobs import token_entries
from specrs.errors import (
    EngineDeadError,
    EngineError,
    SpecrsError,
    UnknownRequestError,
    UnsupportedRequestError,
    invalid,
)
from specrs.outputs import AcceptanceFigures, EngineStats, StateCacheStats
from specrs.sampling import validate_request
from specrs.tokenizer import Tokenizer, end_ids
from specrs.verify.token_logprobs import TokenLogprobs

if TYPE_CHECKING:
    from specrs.structured.matcher import GrammarMatcher

logger = logging.getLogger("specrs")

IDLE_INTERVAL = 0.02
"""Seconds between two calls of `settle_idle` while blocks wait to be saved. In this time a disk writes about as much as
its queue holds."""


class Engine:
    """Runs requests to their end, with up to `max_steps_in_flight` steps in flight.

    A call of `step` plans and enqueues until `max_steps_in_flight` steps are in flight, then settles the oldest. The
    host therefore waits for a step only if a newer one is already enqueued, or if `max_steps_in_flight` is 1.

    An interrupt may end any call between any two instructions. The scheduler's own calls are atomic, so its state is
    the reference for which steps are in flight and which requests are live. `_mend` compares the engine with it and
    repairs the engine.
    """

    def __init__(self, parts: EngineParts) -> None:
        """Create an engine from parts that no other engine uses. Weights may be shared."""
        self.config = parts.config
        self.weights = parts.weights
        self.limits = parts.limits
        self.scheduler = parts.scheduler
        self.ring = parts.ring
        self.runner = parts.runner
        self.planner = parts.planner
        self._drafter_names = parts.drafters
        self._follows_grammars = "grammar" in parts.drafters
        self._faults = DraftFaults(self.scheduler, self._drafter_names)
        self.watch: Watch | None = None
        self.publish = parts.publish
        self.draft_check = parts.draft_check
        self.team = parts.team
        self.loras = parts.loras
        self.disk = parts.disk
        self.outputs = Outputs()
        self.requests: dict[int, Request] = {}
        self._reporting: dict[int, Request] = {}  # those with a grammar, a prediction, or log probabilities to report
        self._settled_at = 0.0
        self._checked_at = 0  # steps when the state was last checked
        self._check_after = 0.0  # by time.perf_counter
        self.runner.use_extras(partial(_extras, self.requests))  # holds no engine, so that one ends with its last use
        self.reset_stats()

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a request, prompt and output together."""
        return self.limits.max_model_len

    @property
    def num_speculative_tokens(self) -> int:
        """Maximum number of tokens that a request drafts in a step (K)."""
        return self.limits.num_speculative_tokens

    @property
    def dtype(self) -> str:
        """Name of the dtype in which the target computes, which `dtype="auto"` stands for."""
        return str(self.weights.target.dtype)

    @property
    def hidden_size(self) -> int:
        """Number of features of the target's final hidden states, which are the dimensions of an embedding."""
        return self.weights.target.hidden_size

    @property
    def depth(self) -> int:
        """Maximum number of steps that are planned and not yet settled."""
        return self.ring.depth

    def use_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        """Make requests that are added later also end at the tokenizer's eos token. Mutates `limits`."""
        ends = end_ids(self.limits.eos_token_ids, tokenizer, self.limits.vocab_size)
        self.limits = replace(self.limits, eos_token_ids=ends)

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: the request is wrong; may be another SpecrsError. The engine is unchanged.
        """
        self._mend()
        params = request.params
        if request.pooling and not self.runner.supports_pooling:
            device = self.weights.device
            reason = "embeddings and scores are not implemented on a GPU; start the engine with device='cpu'"
            raise invalid(UnsupportedRequestError, "device", device, reason)
        bounds = request.bounds
        if bounds is None:
            bounds = request.bounds = validate_request(request.prompt_token_ids, params, self.limits)
        matcher = None if request.grammar is None else request.grammar.matcher(bounds.stop_token_ids)
        reject_exclusive(params, bounds.stop_token_ids, request.bad_words_token_ids, matcher, self.limits.vocab_size)
        self.scheduler.add_request(
            request.request_id,
            np.asarray(request.prompt_token_ids, dtype=np.int64),
            limit=bounds.limit,
            min_tokens=params.min_tokens,
            num_speculative_tokens=bounds.num_speculative_tokens,
            priority=request.priority,
            caller=request.caller,
            stop_token_ids=np.asarray(bounds.stop_token_ids, dtype=np.int64),
            sampling=request.sampling(),
            cache_salt=request.cache_salt.encode(),
            lora=None if request.lora is None else (request.lora.id, request.lora.name),
            prediction=np.asarray(request.prediction_token_ids, dtype=np.int64),
            extra_keys=self._extra_keys(request),
        )
        if self.disk is not None:
            self.disk.await_load(request.request_id)
        request.matcher = matcher
        request.synthetic = self.config.synthetic
        request.stop_token_ids = bounds.stop_token_ids
        request.eos_token_ids = frozenset() if params.ignore_eos else frozenset(self.limits.eos_token_ids)
        self.outputs.add(request.output)
        reports = request.logprobs is not None or request.prompt_logprobs is not None or request.pooling
        if matcher is not None or reports or request.prediction_token_ids:
            self._reporting[request.request_id] = request
        self.requests[request.request_id] = request
        self._prompt_tokens += len(request.prompt_token_ids)

    def _extra_keys(self, request: Request) -> list[tuple[int, bytes]]:
        """Return what the request's KV depends on besides its tokens, as extra keys of its block hashes.

        With a cache on disk, the content of the request's adapter is such a key. A request that wants prompt log
        probabilities gets a random key, so that no cached block is reused and every position is computed.
        """
        keys = []
        if self.disk is not None and request.lora is not None:
            keys.append((0, self.disk.digest(request.lora)))
        if request.params.prompt_logprobs is not None:
            keys.append((0, b"prompt_logprobs" + secrets.token_bytes(16)))
        return keys

    @property
    def drafter(self) -> DrafterCounts | None:
        """The drafter, with its number of passes; None without speculation."""
        return self.runner.drafter

    def abort(self, request_id: int, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request now. Its blocks are freed when the steps in flight that use them have settled.

        `reason` is the finish reason, if the caller has another than `abort`.

        Raises:
            UnknownRequestError: no request with this id runs or waits.
        """
        self._mend()
        self.scheduler.abort(request_id)
        self._end(request_id, reason)

    def has_unfinished(self) -> bool:
        """Return True if a request waits or runs, or if a step is in flight."""
        return self.scheduler.has_unfinished()

    def step(self) -> list[Request]:
        """Advance until one step has settled. Return the requests that got tokens or ended; `[]` if there is nothing to
        do.

        An exception in a step (a fault of the runner, an interrupt) ends the requests of that step with
        `finish_reason="error"` and is raised again. The engine stays usable.
        """
        self._mend()
        try:
            return self._advance()
        except BaseException as fault:
            self._mend(fault)
            raise

    def settle_idle(self) -> None:
        """Settle the steps in flight if no request lives any more, copy due blocks to the prefix cache on disk, and
        check that the scheduler's state is consistent. Callers use it when they have nothing else to do.

        The check runs once until the next step starts, and takes at most a hundredth of the time; it needs about
        0.1 us per block.

        Raises:
            IntegrityError: the state is inconsistent, which is a bug in specrs.
        """
        self._mend()
        planned = self.scheduler.num_steps
        if self.requests:
            return
        while self.scheduler.num_in_flight:
            self._settle()
        self._publish()
        if self.disk is not None:
            self.disk.save()
        begun = time.perf_counter()
        if planned != self._checked_at and begun >= self._check_after:
            self.scheduler.check_integrity()
            self._checked_at, ended = planned, time.perf_counter()
            self._check_after = ended + 99.0 * (ended - begun)

    @property
    def idle_interval(self) -> float | None:
        """Seconds after which an idle engine wants `settle_idle` to be called again; None if it has nothing left to
        do."""
        return IDLE_INTERVAL if self.disk is not None and self.disk.has_due else None

    def close(self) -> None:
        """End the runner's threads, and write what waits for the disk. No step can run afterwards."""
        self.runner.close()
        if self.disk is not None:
            self.disk.close()

    def stats(self) -> EngineStats:
        """Return a snapshot of the statistics and counters since the start or the last `reset_stats`."""
        total, *drafters = (
            AcceptanceFigures(
                draft_tokens=now.draft_tokens - before.draft_tokens,
                acceptance_histogram=[a - b for a, b in zip(now.histogram, before.histogram, strict=True)],
                synthetic_acceptance=self.config.synthetic,
            )
            for now, before in zip(self._acceptance(), self._acceptance_before, strict=True)
        )
        errors = [now - before for now, before in zip(self._faults.counts(), self._faults_before, strict=True)]
        speculative = self.config.speculative_config
        named = () if speculative is None else speculative.methods
        by_name = [
            (name, figures, failures)
            for name, figures, failures in zip(self._drafter_names, drafters, errors, strict=True)
            # Drafts that come with requests are told of once there are some.
            if name in named or figures.drafts or failures
        ]
        return EngineStats(
            draft_tokens=total.draft_tokens,
            acceptance_histogram=total.acceptance_histogram,
            synthetic_acceptance=total.synthetic_acceptance,
            drafters={name: figures for name, figures, _ in by_name},
            draft_errors={name: failures for name, _, failures in by_name},
            draft_passes=0 if self.drafter is None else self.drafter.num_passes,
            target_passes=self.runner.num_target_passes,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self.outputs.num_tokens - self._generation_tokens_before - self._num_pooled,
            num_cached_tokens=self.scheduler.num_cached_tokens - self._cached_tokens_before,
            num_preemptions=self.scheduler.num_preemptions - self._preemptions_before,
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_blocks=self.scheduler.num_blocks,
            num_free_blocks=self.scheduler.num_free_blocks,
            disk_cache=None if self.disk is None else self.disk.stats(),
            state_cache=self._state_cache_stats(),
            running_loras=self._lora_names(waiting=False),
            waiting_loras=self._lora_names(waiting=True),
        )

    def _state_cache_stats(self) -> StateCacheStats | None:
        given = self.config.state_cache_memory_bytes
        if given is None:
            return None
        counts = self.scheduler.state_cache_stats()
        return StateCacheStats(num_bytes=given // counts["num_slots"] * counts["num_cached"], **counts)

    def _lora_names(self, *, waiting: bool) -> tuple[str, ...]:
        live = [] if self.loras is None else self.scheduler.request_ids()
        requests = [request for request in map(self.requests.get, live) if request is not None]
        loras = [(request.request_id, request.lora.name) for request in requests if request.lora is not None]
        return tuple(sorted({name for number, name in loras if self._waits(number) == waiting}))

    def _waits(self, request_id: int) -> bool:
        return self.scheduler.request(request_id).state == "waiting"

    def _acceptance(self) -> list[AcceptanceTracker]:
        """Return the acceptance statistics of the engine, followed by those of each of its drafters."""
        kinds = [HOST_KINDS.get(name, DRAFTER_DEVICE) for name in self._drafter_names]
        return [self.scheduler.acceptance(), *map(self.scheduler.acceptance_of, kinds)]

    def reset_stats(self) -> None:
        """Set the engine's statistics to zero. Requests that run keep their own statistics."""
        self._acceptance_before = self._acceptance()
        self._faults_before = self._faults.counts()
        if self.disk is not None:
            self.disk.reset_stats()
        self._preemptions_before = self.scheduler.num_preemptions
        self._prompt_tokens = 0
        self._cached_tokens_before = self.scheduler.num_cached_tokens
        self._generation_tokens_before = self.outputs.num_tokens
        self._num_pooled = 0  # requests with pooling, each of which the core counts as one token
        self.runner.num_target_passes = 0
        if self.drafter is not None:
            self.drafter.num_passes = 0

    def _depth(self) -> int:
        """Return the maximum number of steps in flight now. It is 1 while a grammar needs the settled tokens before it
        can mask the next."""
        return 1 if any(request.matcher for request in self._reporting.values()) else self.depth

    def _advance(self) -> list[Request]:
        scheduler = self.scheduler
        while scheduler.num_in_flight < self._depth():
            slot = self.ring.slot(scheduler.num_steps)
            slot.started = time.perf_counter()
            if self.planner is not None:
                scheduler.speculate(self.planner)
            outcome = scheduler.plan(slot.record)
            loads = [] if self.disk is None else scheduler.take_loads()
            if outcome == PLAN_STEP:
                self._faults.planned()
                self._execute(slot, slot.header())
            if loads and self.disk is not None:
                # After the step, whose requests may begin with a snapshot that gives way to what is loaded.
                self.disk.load(loads, alone=outcome == PLAN_IDLE)
                if outcome == PLAN_IDLE:
                    continue
            if outcome != PLAN_STEP:
                break
        touched = self._settle() if scheduler.num_in_flight else []
        self._publish()
        if self.disk is not None:
            self.disk.stepped()
        return touched

    def _publish(self) -> None:
        if self.publish is not None and (batch := self.scheduler.take_kv_event_batch()) is not None:
            self.publish(batch)

    def _execute(self, slot: RingSlot, header: Header) -> None:
        if header.num_admitted:
            ids, cached = (
                slot.record_arrays[name][: header.num_admitted].tolist()
                for name in ("admit_request_id", "admit_num_cached")
            )
            for request_id, num_cached in zip(ids, cached, strict=True):
                request = self.requests[request_id]
                # A preempted request is admitted again, and finds what it computed itself.
                if request.num_cached_tokens is None:
                    request.num_cached_tokens = num_cached
                    request.scheduled_time = time.monotonic()
        self.runner.execute(slot, header)
        self._faults.executed(slot, header)
        slot.executed = header.step_id

    def _in_flight(self) -> range:
        """Ids of the steps in flight, oldest first."""
        planned = self.scheduler.num_steps
        return range(planned - self.scheduler.num_in_flight, planned)

    def _mend(self, fault: BaseException | None = None) -> None:
        """Repair the engine after a call was cut short: end the requests that it left half done, and settle all steps
        in flight.

        Changes nothing if the engine is consistent. May itself be interrupted, and called again.
        """
        scheduler, in_flight = self.scheduler, self._in_flight()
        last = self.ring.slot(in_flight.start - 1)  # that settled
        delivered = last.delivered == in_flight.start - 1
        executed = all(self.ring.slot(step_id).executed == step_id for step_id in in_flight)
        if delivered and executed and scheduler.num_running + scheduler.num_waiting == len(self.requests):
            return
        error: SpecrsError = EngineError("the step was interrupted" if fault is None else f"the step failed: {fault!r}")
        if isinstance(fault, EngineDeadError):
            error = fault
        live = set(scheduler.request_ids())
        if not delivered:
            # Tokens and text have been delivered. Log probabilities are reported again, a grammar cannot be.
            for request in self._report(last, whole=last.executed == in_flight.start - 1, accept=False):
                if request.matcher is not None:
                    self._end(request.request_id, FinishReason.ERROR, error)
            last.delivered = in_flight.start - 1
        for request_id in (self.requests.keys() ^ live) | (self._reporting.keys() - live):
            self._end(request_id, FinishReason.ABORT)
        while scheduler.num_in_flight:
            self._settle(error)

    def _end(self, request_id: int, reason: FinishReason, error: SpecrsError | None = None) -> None:
        """End a request that may exist only in the engine, only in the scheduler, or in neither."""
        self.outputs.remove(request_id)
        self._reporting.pop(request_id, None)
        request = self.requests.get(request_id)
        if request is not None:
            request.finish(reason, error)
        # These two the last: `_mend` compares them.
        with contextlib.suppress(UnknownRequestError):
            self.scheduler.abort(request_id)
        self.requests.pop(request_id, None)

    def _settle(self, fault: SpecrsError | None = None) -> list[Request]:
        """Settle the oldest step in flight. Return the requests that got tokens or ended.

        If the step was not executed completely, its requests end with the error `fault`.
        """
        step_id = self._in_flight().start
        slot = self.ring.slot(step_id)
        whole = slot.executed == step_id
        if whole:
            try:
                self.runner.wait(slot)
            except Exception:
                slot.executed = -1  # nothing of it can be used
                raise
            results, told = slot.results, None
        else:
            # In a buffer of its own: a device may still be writing to the slot's.
            results, told = np.zeros_like(slot.results), str(fault)
            section_arrays(results, self.scheduler.results_layout())["flags"].fill(FLAG_TARGET_NON_FINITE)
        # One call, so that an interrupt finds the step delivered or not settled.
        touched_ids, ended_ids = self.outputs.settle(
            self.scheduler, step_id, results, slot.settled, now=time.monotonic(), fault=told
        )
        # Next to another step in flight this one began when the one before it ended.
        begun, self._settled_at = max(slot.started, self._settled_at), time.perf_counter()
        header = slot.header()
        touched = [self.requests[request_id] for request_id in touched_ids]
        for request_id in ended_ids:
            del self.requests[request_id]
        if self._reporting:
            self._report(slot, whole=whole)
            for request in touched:
                if request.finished:
                    self._reporting.pop(request.request_id, None)
        slot.delivered = step_id
        if whole:
            ms = 1e3 * (self._settled_at - begun)
            self._learn(slot, ms)
            if self.config.max_prefill_stall_ms and not slot.merged:
                # Streams wait for what is reported, too. Chunks within verification cost next to nothing, and others
                # would be taken for as cheap.
                self.scheduler.time_step(step_id, 1e3 * (time.perf_counter() - begun))
            if self.draft_check is not None and self.draft_check.settled(slot.results_arrays, header.num_decode):
                self.draft_check = None
            if self.watch is not None:
                self.watch(slot, header, ms)
        return touched

    def _report(self, slot: RingSlot, *, whole: bool, accept: bool = True) -> list[Request]:
        """Give log probabilities and results of pooling to the requests of a settled step that want them, new tokens to
        their grammars, and counts of drafts to those with a prediction. Return these requests.

        If a grammar fails, its request ends. May be called again for the same step, but only once with `accept`.
        `whole`: the step was executed completely.
        """
        reported = []
        if whole:
            for request_id, first, values in slot.prompt_logprobs:
                if request_id in self._reporting:
                    _record_prompt(self._reporting[request_id], first, values)
            for request_id, pooled in slot.pooled:
                if request_id in self._reporting and self._reporting[request_id].pooled is None:
                    self._reporting[request_id].pooled = pooled
                    self._num_pooled += 1
        settled = slot.settled_arrays
        for sequence, request_id in enumerate(settled["request_id"].tolist()):
            if request_id not in self._reporting:
                continue
            request = self._reporting[request_id]
            reported.append(request)
            tokens = request.output_token_ids
            before = len(tokens) - int(settled["num_new"][sequence])
            if whole and request.logprobs is not None and sequence in slot.logprobs:
                found = token_entries(slot.logprobs[sequence], tokens[before:], request.params.logprobs)
                request.logprobs[before:] = found
            of_prediction = request.prediction_token_ids and slot.record_arrays["seq_drafter"][sequence] == _PREDICTION
            if of_prediction and whole and accept:
                # A stop may have cut the accepted tokens.
                accepted = min(int(slot.results_arrays["num_accepted"][sequence]), len(tokens) - before)
                request.num_predicted_tokens += int(slot.results_arrays["num_drafted"][sequence])
                request.num_accepted_predicted_tokens += accepted
            matcher = request.matcher
            if matcher is not None and accept:
                for token in tokens[before:]:
                    matcher.accept(token)
                if matcher.error:
                    asked = request.params.structured_outputs
                    assert asked is not None
                    error = asked.refusal(f"after {len(tokens)} tokens: {matcher.error}; use a simpler one")
                    request.finish(FinishReason.ERROR, error)
                    self._end(request_id, FinishReason.ERROR, error)
                elif not request.finished:
                    self._draft_by_grammar(request, matcher)
        return reported

    def _draft_by_grammar(self, request: Request, matcher: GrammarMatcher) -> None:
        """Pass the tokens that a running request's grammar forces or expects next to the scheduler, which drafts
        them."""
        most = 0 if request.bounds is None else request.bounds.num_speculative_tokens
        if most and self._follows_grammars:
            drafts = matcher.drafts(most)
            self.scheduler.set_grammar_drafts(request.request_id, np.array(drafts, dtype=np.int64))

    def _learn(self, slot: RingSlot, ms: float | None) -> None:
        """Report the outcome of a step, and its milliseconds, to the planner of K."""
        if self.planner is not None:
            self.scheduler.tell(self.planner, slot.record, slot.results, ms)


_PREDICTION = DRAFTERS.index("prediction")


def _extras(requests: Mapping[int, Request], request_id: int) -> RequestExtras | None:
    request = requests.get(request_id)
    return None if request is None or request.matcher is None else RequestExtras(request.matcher)


def _record_prompt(request: Request, first: int, values: TokenLogprobs) -> None:
    """Append the log probabilities of prompt tokens from `first` on that the request does not have yet. A preempted
    request computes its prompt again."""
    known = request.prompt_logprobs
    if known is None or len(known) < first:
        return
    tokens = request.prompt_token_ids[first : first + len(values.value)]
    known += token_entries(values, tokens, request.params.prompt_logprobs)[len(known) - first :]
