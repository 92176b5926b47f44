"""Runs the engine in its own thread: accepts requests, runs steps, and delivers outputs. Knows no event loop.

Only this thread uses the engine; all others send it commands through a queue. It ends with `stop`, or if the engine
breaks.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from specrs.engine.output_builder import OutputBuilder
from specrs.engine.request import FinishReason, Request
from specrs.errors import EngineDeadError, EngineError, UnknownRequestError
from specrs.outputs import RequestOutput

if TYPE_CHECKING:
    from specrs.engine.engine import Engine
    from specrs.engine.output_builder import TokenTexts

logger = logging.getLogger("specrs")

MAX_FAULTS = 3
"""Number of consecutive failed steps after which the engine counts as broken. One failed step ends only its own
requests; on a broken device all steps fail."""

ResultT = TypeVar("ResultT")


class Group:
    """Prompts of one caller, whose outputs are delivered together.

    Only the engine's thread reads and changes it.
    """

    def __init__(self, prompts: Sequence[Sequence[Request]], texts: TokenTexts | None, owner: Any = None) -> None:
        """Prepare a group. `prompts[i]` are the completions of prompt i. `owner` tells `deliver` whom the outputs are
        for; nothing else uses it."""
        self.owner = owner
        self.builders = [OutputBuilder(requests, texts) for requests in prompts]
        self.prompts = prompts
        if len(self.requests) > 1:
            for request in self.requests:
                request.caller = self.requests[0].request_id

    @property
    def requests(self) -> list[Request]:
        """Every request of every prompt."""
        return [request for requests in self.prompts for request in requests]


Updates: TypeAlias = list[tuple[Group, int, RequestOutput]]
"""New outputs: each with its group and the index of its prompt in that group."""


@dataclass(frozen=True, slots=True)
class _Command:
    run: Callable[[], Any]
    outcome: Future[Any] | None


class EngineLoop(threading.Thread):
    """The thread that runs an engine. `add`, `abort` and `call` may be called from any thread, and wait for nothing."""

    def __init__(self, engine: Engine, deliver: Callable[[Updates], None], on_end: Callable[[], None]) -> None:
        """Prepare the thread. `deliver` is called in it once per step, with all new outputs; `on_end` is called if the
        engine breaks.

        The engine waits for both functions, so they must not block.
        """
        super().__init__(name="specrs-engine", daemon=True)
        self.error: EngineDeadError | None = None
        self.turns: AbstractContextManager[object] = contextlib.nullcontext()
        """Lock that is held during each step, so that engines on the same processors take turns."""
        self._engine = engine
        self._deliver = deliver
        self._on_end = on_end
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._owners: dict[int, tuple[Group, int]] = {}  # by request id, of requests that have not ended
        # by request id, of those that want log probabilities of their prompt
        self._prompt_builders: dict[int, OutputBuilder] = {}
        self._num_faults = 0
        self._stopping = False
        # so that no command is queued after the last one, where it would never be answered
        self._ending = threading.Lock()
        self._ended = False
        if engine.team is not None:
            engine.team.on_error = self._fail
            if engine.team.error is not None:
                self._fail(engine.team.error)

    def add(self, group: Group) -> Future[None]:
        """Queue the requests of a group. The future raises an error if the engine rejects a request; the caller then
        aborts the group."""
        return self.call(lambda: self._add(group))

    def abort(self, group: Group) -> None:
        """End all requests of a group that still run. Nothing more is delivered for it."""
        with contextlib.suppress(EngineDeadError):
            self._put(_Command(lambda: self._abort(group), None))

    def finish(self, group: Group, index: int, completion: int) -> None:
        """End one completion of prompt `index` as stopped, and deliver its output. Does nothing if it has ended."""
        request = group.prompts[index][completion]
        with contextlib.suppress(EngineDeadError):
            self._put(_Command(lambda: self._finish(request), None))

    def call(self, function: Callable[[], ResultT]) -> Future[ResultT]:
        """Run `function` in the engine's thread, between two steps."""
        outcome: Future[ResultT] = Future()
        try:
            self._put(_Command(function, outcome))
        except EngineDeadError as error:
            outcome.set_exception(error)
        return outcome

    def stop(self) -> None:
        """Abort all requests and end the thread. Returns immediately; join the thread to wait."""

        def stop() -> None:
            self._stopping = True

        with contextlib.suppress(EngineDeadError):
            self._put(_Command(stop, None))

    def run(self) -> None:
        """Run the loop until it is stopped or the engine breaks. This is the thread's function; `start` calls it."""
        try:
            while not self._stopping:
                self._obey()
                if self._engine.has_unfinished() and not self._stopping:
                    self._step()
        except EngineDeadError as fault:
            logger.error("the engine failed: %s", fault)
            self.error = fault
        except BaseException as fault:
            logger.exception("the engine failed")
            self.error = EngineDeadError(f"the engine failed: {fault!r}")
        self._end()

    def _fail(self, error: EngineDeadError) -> None:
        """End all requests and the thread because of `error`. May be called from any thread."""

        def fail() -> None:
            raise error

        with contextlib.suppress(EngineDeadError):
            self._put(_Command(fail, None))

    def _put(self, command: _Command) -> None:
        with self._ending:
            if self._ended:
                raise self.error or EngineDeadError("the engine was shut down")
            self._commands.put(command)

    def _obey(self) -> None:
        """Run all queued commands. If the engine has no work, wait for a command."""
        with contextlib.suppress(queue.Empty):
            while True:
                idle, timeout = not (self._engine.has_unfinished() or self._stopping), None
                if idle and self._commands.empty():
                    self._engine.settle_idle()
                    timeout = self._engine.idle_interval
                command = self._commands.get(block=idle, timeout=timeout)
                self._run_command(command)

    def _run_command(self, command: _Command) -> None:
        if command.outcome is None:
            command.run()
        elif command.outcome.set_running_or_notify_cancel():
            try:
                result = command.run()
            except Exception as fault:
                command.outcome.set_exception(fault)
            else:
                command.outcome.set_result(result)

    def _add(self, group: Group) -> None:
        for i, requests in enumerate(group.prompts):
            for request in requests:
                self._engine.add_request(request)
                self._owners[request.request_id] = (group, i)
            if requests[0].params.prompt_logprobs is not None:
                self._prompt_builders[requests[0].request_id] = group.builders[i]

    def _abort(self, group: Group) -> None:
        for request in group.requests:
            self._owners.pop(request.request_id, None)
            self._prompt_builders.pop(request.request_id, None)
            if not request.finished:
                with contextlib.suppress(UnknownRequestError):  # the fault may have come before it was added
                    self._engine.abort(request.request_id)

    def _finish(self, request: Request) -> None:
        if request.request_id in self._owners and not request.finished:
            self._engine.abort(request.request_id, FinishReason.STOP)
            self._publish([request])

    def _step(self) -> None:
        try:
            with self.turns:
                touched = self._engine.step()
        except EngineDeadError:
            raise
        except Exception:
            touched = [request for group, i in self._owners.values() for request in group.prompts[i]]
            self._num_faults += 1
            # a step that fails ends its requests; a fault that ends none is the engine's own
            if self._num_faults >= MAX_FAULTS or not any(request.finished for request in touched):
                raise
            logger.exception("a step failed; its requests end with an error")
        else:
            self._num_faults = 0
            if not touched and self._owners and not self._engine.has_unfinished():
                raise EngineError("the engine is idle, but requests have not ended")
        self._publish(touched)

    def _publish(self, touched: Sequence[Request]) -> None:
        prompts: dict[tuple[int, int], tuple[Group, int]] = {}
        for request in touched:
            owner = self._owners.get(request.request_id)
            if owner is not None:
                prompts[id(owner[0]), owner[1]] = owner
                if request.finished:
                    del self._owners[request.request_id]
                    self._prompt_builders.pop(request.request_id, None)
        updates = [(group, i, group.builders[i].build()) for group, i in prompts.values() if group.builders[i].is_due]
        if updates:
            self._deliver(updates)
        for builder in self._prompt_builders.values():
            builder.take_prompt()

    def _end(self) -> None:
        """Tell all waiting callers that the engine has ended. No command is accepted afterwards."""
        error = self.error
        owners, self._owners = self._owners, {}
        prompts = {(id(group), i): (group, i) for group, i in owners.values()}
        updates = []
        for group, i in prompts.values():
            requests = group.prompts[i]
            if error is not None:
                output = group.builders[i].fail(error)
            else:
                for request in requests:
                    if not request.finished:
                        self._engine.abort(request.request_id)
                output = group.builders[i].build()
            updates.append((group, i, output))
        if updates:
            self._deliver(updates)
        with self._ending:
            self._ended = True
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._commands.get_nowait()
                if command.outcome is not None and command.outcome.set_running_or_notify_cancel():
                    command.outcome.set_exception(error or EngineDeadError("the engine was shut down"))
        self._engine.close()
        if error is not None:
            self._on_end()
