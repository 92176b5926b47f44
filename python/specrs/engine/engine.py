"""The loop: plan -> launch -> settle. Owns requests, scheduler, ring and runner; computes nothing itself."""

from __future__ import annotations

import secrets

import numpy as np

from specrs.config import EngineConfig
from specrs.core import PLAN_IDLE, PLAN_LAUNCH, Scheduler
from specrs.engine.build import Models, build_models
from specrs.engine.request import FinishReason, Request
from specrs.errors import NonFiniteLogitsError, SpecrsError
from specrs.outputs import EngineStats
from specrs.runner.eager import EagerRunner
from specrs.runner.iteration import FLAG_CAPACITY, FLAG_TARGET_NON_FINITE
from specrs.runner.ring import Header, Ring, RingSlot
from specrs.runner.row_state import RowState
from specrs.sampling import validate_request

_FINISH = (None, FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR)


class Engine:
    """Runs requests to their end, `launch_depth` launches in flight.

    One `step` plans and enqueues until `launch_depth` launches are in flight, then settles the oldest: the host waits for a launch
    only when a newer one is already enqueued (or at depth 1).
    """

    def __init__(self, config: EngineConfig, models: Models | None = None) -> None:
        """Load the models of `config` (or take `models`) and allocate caches and row state.

        Raises:
            InvalidConfigError, UnsupportedModelError, CheckpointError: what is wrong with the configuration or a checkpoint.
        """
        self.config = config
        self.models = models if models is not None else build_models(config)
        m = self.models
        self.max_model_len = m.max_model_len
        self.num_speculative_tokens = m.num_speculative_tokens
        self.eos_token_ids = m.target.config.eos_token_ids
        depth = config.launch_depth or 1
        self.scheduler = Scheduler(
            max_num_seqs=config.max_num_seqs,
            max_model_len=m.max_model_len,
            num_blocks=m.num_blocks,
            block_size=config.block_size,
            max_num_batched_tokens=config.max_num_batched_tokens,
            num_speculative_tokens=m.num_speculative_tokens,
            draft_max_model_len=None if m.drafter is None else m.drafter.max_model_len,
            draft_cost_ratio=m.draft_cost_ratio,
            max_in_flight=depth,
            enable_prefix_caching=config.enable_prefix_caching,
            hash_key=secrets.token_bytes(16),
        )
        self.depth = depth
        state = RowState.allocate(config.max_num_seqs, m.max_model_len, config.block_size, m.device)
        self.runner = EagerRunner(m.target, m.kv_cache, m.drafter, state, config.block_size)
        self.ring = Ring(self.scheduler, config.max_num_seqs, m.num_speculative_tokens, depth)
        self.requests: dict[int, Request] = {}
        self._rows: dict[int, Request] = {}  # row -> the request that was last admitted into it
        self._stats = EngineStats(num_speculative_tokens=m.num_speculative_tokens)

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError and other SpecrsError: what is wrong with it; the engine is unchanged.
        """
        limits = self.models.limits
        validate_request(request.prompt_token_ids, request.params, limits)
        params = request.params
        prompt_len = len(request.prompt_token_ids)
        room = self.max_model_len - prompt_len
        request.eos_token_ids = frozenset() if params.ignore_eos else frozenset(self.eos_token_ids)
        request.stop_token_ids = tuple(dict.fromkeys((*request.eos_token_ids, *params.stop_token_ids)))
        wanted = params.num_speculative_tokens
        self.scheduler.add_request(
            request.request_id,
            np.asarray(request.prompt_token_ids, dtype=np.int64),
            limit=prompt_len + (room if params.max_tokens is None else min(params.max_tokens, room)),
            min_tokens=params.min_tokens,
            num_speculative_tokens=self.num_speculative_tokens if wanted is None else wanted,
            priority=request.priority,
            stop_token_ids=np.asarray(request.stop_token_ids, dtype=np.int64),
            cache_salt=(params.cache_salt or "").encode(),
        )
        self.requests[request.request_id] = request

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
        """Advance until one launch has settled; the requests that got tokens or ended, `[]` when there is nothing to do.

        An exception in a launch (a fault of the runner, an interrupt) ends the requests of that launch with
        `finish_reason="error"` and is raised again; the engine stays usable.
        """
        while len(self.ring.in_flight) < self.depth:
            slot = self.ring.next
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
        drafter = self.models.drafter
        return replace(
            self._stats,
            acceptance=self.scheduler.acceptance(),
            draft_passes=0 if drafter is None else drafter.num_passes,
            target_passes=self.runner.num_target_passes,
            num_preemptions=self.scheduler.num_preemptions,
        )

    def _launch(self, slot: RingSlot, header: Header) -> None:
        rows = slot.views["admit_row"][: header.num_admitted].tolist()
        ids = slot.views["admit_request_id"][: header.num_admitted].tolist()
        cached = slot.views["admit_num_cached"][: header.num_admitted].tolist()
        admitted = [self.requests[i] for i in ids]
        for row, request, num_cached in zip(rows, admitted, cached, strict=True):
            self._rows[row] = request
            request.num_cached_tokens = num_cached
        entries = slot.views["entry_row"][: header.num_decode + header.num_prefill].tolist()
        try:
            self.runner.launch(
                slot,
                header,
                min_lens=[request.min_len for request in admitted],
                stop_ids=[request.stop_token_ids for request in admitted],
                mask_stops=any(self._rows[row].params.min_tokens for row in entries),
            )
        except BaseException as fault:
            self._fail(slot, fault)
            raise

    def _fail(self, slot: RingSlot, fault: BaseException) -> None:
        """Settle every launch in flight; the faulty one, the newest, ends its requests."""
        slot.results[:] = 0
        slot.results_view.flags.fill_(FLAG_TARGET_NON_FINITE)
        while self.ring.in_flight:
            reason = SpecrsError(f"the launch failed: {fault!r}") if self.ring.oldest is slot else None
            self._settle(reason)

    def _settle(self, fault: SpecrsError | None = None) -> list[Request]:
        slot = self.ring.oldest
        header = slot.header()
        self.scheduler.settle(header.launch_id, slot.results, slot.settled)
        self.ring.settle()
        touched = []
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
            before = len(request.output_token_ids)
            new = results.tokens[entry, :num_new].tolist()
            stopped = request.append(new, ended_by_token=reason == 1)
            self._stats.generation_tokens += len(request.output_token_ids) - before
            if stopped and not reason:
                self.scheduler.abort(request_id)
            if stopped or reason:
                flags = int(results.flags[entry])
                error = fault or (_error(flags, request) if reason == 4 else None)
                request.finish(FinishReason.STOP if stopped else _FINISH[reason], error)
                del self.requests[request_id]
            if num_new or request.finished:
                touched.append(request)
        return touched


def _error(flags: int, request: Request) -> SpecrsError:
    if flags & FLAG_CAPACITY:
        return SpecrsError(f"request {request.request_id}: a position lay beyond its KV blocks; its launch wrote nothing there")
    return NonFiniteLogitsError(
        f"request {request.request_id}: the target's logits at position {len(request.prompt_token_ids) + len(request.output_token_ids)} "
        "are not finite (NaN or infinity)"
    )
