"""Models of a server: loads each on its first use, and unloads the least recently used ones to stay within a memory
limit. Knows nothing of engines: functions load and end them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

from specrs.errors import SpecrsError
from specrs.server.errors import APIError, unavailable, unknown_model

logger = logging.getLogger("specrs")

LIMIT_FLAG = "--models-memory-bytes"

State = Literal["loaded", "loading", "unloaded"]


class Loaded(Protocol):
    """A loaded model."""

    @property
    def error(self) -> Exception | None:
        """Error that broke the model's engine; None while it runs."""


LoadedT = TypeVar("LoadedT", bound=Loaded)


@dataclass(kw_only=True, eq=False)
class Model(Generic[LoadedT]):
    """One model of a server, loaded or not. Only `Models` changes it."""

    names: Sequence[str]
    """Names that requests may use; the first is the model's own."""
    load: Callable[[], LoadedT]
    """Function that loads the model. It is called in a thread, while no other model is loaded or ended."""
    measure: Callable[[], int] = lambda: 0
    """Function that returns the bytes of memory that the model will take. It is called in the same thread, before
    `load`, if there is a limit."""
    root: str = ""
    """Path or hub id of the model."""
    loaded: LoadedT | None = None
    num_bytes: int = 0
    """Bytes of memory that `measure` returned."""
    loads: int = 0
    failures: int = 0
    """Number of loads that failed."""
    users: int = 0
    """Number of requests that use the model or wait for it."""
    last_used: int = 0
    loading: asyncio.Future[LoadedT] | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """Name of the model in lists and metrics."""
        return self.names[0]

    @property
    def state(self) -> State:
        """Whether requests are served immediately, wait for the model, or would load it."""
        if self.loading is not None:
            return "loading"
        return "unloaded" if self.loaded is None or self.loaded.error is not None else "loaded"


class Models(Generic[LoadedT]):
    """The models of one server. All methods but `close` belong to one event loop.

    A request holds a lease of its model. A model with leases is never unloaded. Models are loaded one after the other.
    """

    def __init__(
        self,
        models: Sequence[Model[LoadedT]],
        *,
        end: Callable[[LoadedT], bool],
        limit: int | None = None,
        reloads: bool = True,
    ) -> None:
        """`end` unloads a model and returns True if all its memory is free; it may block. `limit`: maximum bytes of the
        loaded models together; None: no limit. Without `reloads`, there is one model, which is loaded already, and the
        server ends if its engine breaks."""
        self.all = tuple(models)
        self.reloads = reloads
        self.limit = limit
        self._by_name = {name: model for model in models for name in model.names}
        self._end = end
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="specrs-models")
        self._one_at_a_time = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_thread: Future[None] | None = None
        self._clock = itertools.count(1)
        self._stopped = False

    @property
    def names(self) -> list[str]:
        """All model names that requests may use."""
        return list(self._by_name)

    @property
    def loaded(self) -> list[LoadedT]:
        """The models that are loaded now."""
        return [model.loaded for model in self.all if model.loaded is not None]

    @property
    def error(self) -> Exception | None:
        """Error after which the server has to end; None while it can serve."""
        return None if self.reloads else self.loaded[0].error

    def find(self, name: str | None) -> Model[LoadedT]:
        """Return the model called `name`; the first one for None. Raises a 404 `APIError` if there is none."""
        model = self._by_name.get(name) if name else self.all[0]
        if model is None:
            raise unknown_model(str(name), self.names)
        return model

    def find_loaded(self, name: str | None) -> LoadedT:
        """Return the model called `name`, the first one for None, without loading it. Raises an `APIError`: 404 if
        there is none, 503 if it is not loaded."""
        model = self.find(name)
        if model.loaded is None:
            raise unavailable(f"The model `{model.name}` is not loaded; the first request for a text loads it.")
        return model.loaded

    @asynccontextmanager
    async def lease(self, name: str | None) -> AsyncIterator[LoadedT]:
        """Context that holds the model called `name`: loads it if it is not loaded, and keeps it loaded until the
        context ends.

        Raises an `APIError`: 404 if there is no such model, 503 if there is no memory for it or the server ends, 500
        if it cannot be loaded.
        """
        model = self.find(name)
        model.users += 1
        try:
            loaded = model.loaded
            if loaded is None or (self.reloads and loaded.error is not None):
                loaded = await asyncio.shield(self._loading(model))
            yield loaded
        finally:
            model.users -= 1
            model.last_used = next(self._clock)

    def stop(self) -> None:
        """Load nothing more. Requests that wait for a model get a 503 error."""
        self._stopped = True
        for model in self.all:
            if model.loading is not None and not model.loading.done():
                model.loading.set_exception(_stopped())

    def close(self, timeout: float) -> bool:
        """End all models. A load that runs may take `timeout` seconds. Return True if nothing is left.

        Blocks. No request may use a model any more.
        """
        self._stopped = True
        self._thread.shutdown(wait=False)
        running = self._in_thread
        idle = running is None or bool(wait([running], timeout).done)
        ended = [self._end(loaded) for loaded in self.loaded]
        return idle and all(ended)

    def _loading(self, model: Model[LoadedT]) -> asyncio.Future[LoadedT]:
        """Return the future of a load of `model`, which begins now unless one is under way."""
        if self._stopped:
            raise _stopped()
        if model.loading is None:
            model.loading = asyncio.get_running_loop().create_future()
            # every client that waits may have left, and asyncio would log an error that no request has read
            model.loading.add_done_callback(lambda done: done.cancelled() or done.exception())
            task = asyncio.ensure_future(self._load(model, model.loading))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return model.loading

    async def _load(self, model: Model[LoadedT], outcome: asyncio.Future[LoadedT]) -> None:
        """Load a model, and unload others before if there is no room. The result or error goes to `outcome`."""
        error: APIError | None = None
        try:
            async with self._one_at_a_time:
                await self._unload(model)  # its engine may be broken
                if self.limit is not None:
                    await self._call(lambda: _measure(model))
                    await self._make_room(model, self.limit)
                begun = time.monotonic()
                await self._call(lambda: self._load_in_thread(model))
                logger.info("Loaded %s in %.1f s", model.name, time.monotonic() - begun)
        except APIError as fault:
            error = fault
        except Exception as fault:
            model.failures += 1
            logger.error("%s could not be loaded: %s", model.name, fault, exc_info=not isinstance(fault, SpecrsError))
            error = APIError(500, f"The model `{model.name}` could not be loaded; the server's log says why.")
        model.loading = None
        model.last_used = next(self._clock)
        if outcome.done():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            assert model.loaded is not None
            outcome.set_result(model.loaded)

    async def _make_room(self, model: Model[LoadedT], limit: int) -> None:
        """Unload the least recently used models until `model` fits. Raises a 503 `APIError` if it cannot be made to
        fit."""
        if model.num_bytes > limit:
            needs = f"needs {model.num_bytes} bytes of memory; this server has {LIMIT_FLAG}={limit}"
            raise APIError(503, f"The model `{model.name}` {needs}.")
        while True:
            others = [one for one in self.all if one.loaded is not None]
            idle = [one for one in others if not one.users]
            total = model.num_bytes + sum(one.num_bytes for one in others)
            if total <= limit:
                return
            if total - sum(one.num_bytes for one in idle) > limit:
                raise unavailable(
                    f"There is no memory for the model `{model.name}` while requests use other models; {LIMIT_FLAG} "
                    f"is {limit}."
                )
            await self._unload(min(idle, key=lambda one: one.last_used))

    async def _unload(self, model: Model[LoadedT]) -> None:
        loaded, model.loaded = model.loaded, None
        if loaded is None:
            return
        if not await self._call(lambda: self._end(loaded)):
            logger.error("%s did not end in time; its memory may still be in use", model.name)
        logger.info("Unloaded %s", model.name)

    def _load_in_thread(self, model: Model[LoadedT]) -> None:
        if self._stopped:
            raise _stopped()
        loaded = model.load()
        model.loads += 1
        model.loaded = loaded

    async def _call(self, function: Callable[[], object]) -> object:
        """Run `function` in the thread that loads models."""
        if self._stopped:
            raise _stopped()
        running = self._thread.submit(function)
        self._in_thread = running  # type: ignore[assignment]
        return await asyncio.wrap_future(running)


def _measure(model: Model[LoadedT]) -> None:
    model.num_bytes = model.measure()


def _stopped() -> APIError:
    return unavailable("The server is shutting down.")
