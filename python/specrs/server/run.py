"""Lifecycle of a server process: bind, load, serve, drain, end. The application itself is in `app`."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import uvicorn

from specrs.async_llm import AsyncLLM
from specrs.config import EngineConfig
from specrs.errors import EngineDeadError, InvalidConfigError, InvalidRequestError, invalid_config
from specrs.lora_request import LoRARequest
from specrs.parallel.start import torchrun_rank
from specrs.processes.limits import allow_open_files
from specrs.server.app import build_app
from specrs.server.context import Context, CORSSettings, Shared
from specrs.server.defaults import checkpoint_defaults
from specrs.server.http import DeadlineProtocol
from specrs.server.limits import SEND_BUFFER, HTTPLimits
from specrs.server.logs import INTERVAL, log_figures, log_what_runs
from specrs.server.memory import memory_of
from specrs.server.metrics import Metrics
from specrs.server.models import Model, Models
from specrs.server.profiler import Profiler
from specrs.server.response_store import STORE_BYTES, STORE_SECONDS, ResponseStore
from specrs.server.templates import TemplateRenderer
from specrs.server.tools import ToolSettings
from specrs.server.tracing import Tracing
from specrs.server.turns import Turns
from specrs.tokenizer.template_files import choose_template

logger = logging.getLogger("specrs")

FAILURE_GRACE = 3.0
"""Seconds that a server whose engine is broken still answers 503, so that a health check sees the reason."""
ABORT_TIMEOUT = 10.0
"""Maximum seconds for a step in flight to settle at the end. Then the process ends without waiting for it."""
OTHER_FILES = 128
"""Number of open files that are not connections: weights, pipes of child processes, the event loop's own."""
SWITCH_INTERVAL = 0.001
"""Interpreter switch interval in seconds: how long a thread may run Python code while others wait. With Python's 5 ms,
some tokens of a stream wait a tenth of a second while another thread writes 250,000 log probabilities."""
LINGER = 2.0
"""Seconds that clients have to read the end of their answers after the engine has ended."""


@dataclass(frozen=True, slots=True)
class TLSSettings:
    """Paths of PEM files for TLS. `key` None: the key is in the certificate's file. `cert_reqs`: client certificates
    are not requested (0), optional (1) or required (2)."""

    certificate: str
    key: str | None = None
    ca_certificates: str | None = None
    cert_reqs: int = 0


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of a server beyond those of its engine. `port` 0 takes a free port."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: Sequence[str] = ()
    lora_modules: Sequence[LoRARequest] = ()
    """LoRA adapters that are loaded at the start, and that requests may name as their model."""
    api_keys: Sequence[str] = ()
    chat_template: str | None = None
    use_generation_config: bool = True
    max_num_queued_reqs: int | None = None
    shutdown_timeout: float = 0.0
    access_log: bool = True
    log_stats_interval: float | None = INTERVAL
    """Seconds between two log lines with statistics under load; None: no such lines."""
    report_speculation: bool = False
    tools: ToolSettings = field(default_factory=ToolSettings)
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    root_path: str = ""
    tls: TLSSettings | None = None
    cors: CORSSettings = field(default_factory=CORSSettings)
    ui: bool = False
    profiler_folder: Path | None = None
    otlp_traces_endpoint: str | None = None
    responses_store_bytes: int = STORE_BYTES
    responses_store_seconds: float = STORE_SECONDS
    limits: HTTPLimits = field(default_factory=HTTPLimits)


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """One of several models of a server: its engine's settings, and those of the server that it does not share."""

    name: str
    engine: Mapping[str, Any]
    server: ServerSettings


def run_server(engine_settings: Mapping[str, Any], settings: ServerSettings) -> int:
    """Serve until a signal arrives or the engine breaks. Return the exit code: 0 after a signal, 1 if the engine broke.

    On SIGTERM or SIGINT, no new requests are accepted. Running requests may go on for `shutdown_timeout` seconds and
    are then aborted. A second signal aborts them immediately.

    Raises `InvalidConfigError` or a subclass before anything is served, if a setting is wrong or a checkpoint cannot be
    loaded.
    """
    config = EngineConfig.from_kwargs(**engine_settings)
    if torchrun_rank() not in (None, 0):
        from specrs.engine.build import build_engine  # and torch

        build_engine(config)  # serves rank 0's steps, and ends the process with it

    def make() -> tuple[Models[Context], Shared]:
        context = make_context(engine_settings, settings)
        return one_model(context), context.shared

    return _run(make, settings)


def run_models(models: Sequence[ModelSettings], settings: ServerSettings, memory_bytes: int | None) -> int:
    """Serve several models until a signal arrives, and return the exit code 0. A model is loaded when a request asks
    for it.

    `memory_bytes`: maximum bytes of all loaded models; None: no limit. Signals work as in `run_server`.

    Raises `InvalidConfigError` or a subclass before anything is served, if a setting is wrong. Checkpoints are read
    later.
    """
    if torchrun_rank() is not None:
        raise InvalidConfigError("several models are not implemented under torchrun; serve one model per server")
    for model in models:
        size = EngineConfig.from_kwargs(**model.engine).tensor_parallel_size
        if size > 1:
            raise invalid_config("tensor_parallel_size", size, "must be 1 with several models; serve this one alone")

    def make() -> tuple[Models[Context], Shared]:
        shared = _shared(settings)
        turns = Turns()
        known = [_lazy_model(model, shared, turns, first=model is models[0]) for model in models]
        shared.metrics = [metrics for _, metrics in known]
        return Models([model for model, _ in known], end=_end, limit=memory_bytes), shared

    return _run(make, settings)


def _run(make: Callable[[], tuple[Models[Context], Shared]], settings: ServerSettings) -> int:
    settings = replace(settings, limits=_fit_connections(settings.limits))
    listener = _bind(settings.host, settings.port)  # first, because weights may take minutes
    with contextlib.closing(listener):
        models, shared = make()
        interval = sys.getswitchinterval()
        try:
            sys.setswitchinterval(SWITCH_INTERVAL)
            process = _Process(models, shared, settings, listener)
            # What stands now stays. Full collections would walk its 250,000 objects and hold every stream for 0.1 s.
            gc.collect()
            gc.freeze()
            failed = asyncio.run(process.serve())
        finally:
            gc.unfreeze()
            sys.setswitchinterval(interval)
            ended = models.close(ABORT_TIMEOUT)
            shared.close()
    if not ended:
        logger.error("the engine did not end within %g s; the process ends without it", ABORT_TIMEOUT)
        sys.stderr.flush()
        os._exit(1)
    return 1 if failed else 0


def one_model(context: Context) -> Models[Context]:
    """Return the models of a server that has only the loaded model `context`."""
    context.shared.metrics = [context.metrics]
    names = [*context.model_names, *context.adapters]

    def load() -> Context:
        raise AssertionError("the only model is loaded once")

    model = Model(names=names, load=load, root=names[0], loaded=context)
    return Models([model], end=close_context, reloads=False)


def _lazy_model(model: ModelSettings, shared: Shared, turns: Turns, *, first: bool) -> tuple[Model[Context], Metrics]:
    """Return one of several models, not loaded, and its metrics. Those of the `first` include stored responses."""
    metrics = Metrics(None, model.name, shared.responses if first else None)
    config = EngineConfig.from_kwargs(**model.engine)

    def load() -> Context:
        gc.unfreeze()
        gc.collect()  # what is left of models that were unloaded
        try:
            context = _make_context(model.engine, model.server, shared, metrics)
        finally:
            gc.freeze()
        if context.llm.device == "cpu":
            context.llm.take_turns(turns)
        return context

    found = Model(names=[model.name], load=load, measure=lambda: memory_of(config), root=config.model or "bundled")
    metrics.count_loads(found)
    return found, metrics


def _end(context: Context) -> bool:
    """End one of several models. Its counters keep their last values."""
    stats = None
    with contextlib.suppress(EngineDeadError):
        stats = asyncio.run(context.llm.stats())
    context.metrics.detach(stats)
    return close_context(context)


def make_context(engine_settings: Mapping[str, Any], settings: ServerSettings) -> Context:
    """Load an engine, and create everything else that the server's application needs. `close_context` ends the engine.

    Raises `InvalidConfigError` or a subclass if a setting is wrong or a checkpoint cannot be loaded.
    """
    return _make_context(engine_settings, settings, _shared(settings), None)


def _shared(settings: ServerSettings) -> Shared:
    return Shared(
        responses=ResponseStore(settings.responses_store_bytes, settings.responses_store_seconds),
        limits=settings.limits,
        api_keys=settings.api_keys,
        cors=settings.cors,
        ui=settings.ui,
        version=version("specrs"),
        tracing=None if settings.otlp_traces_endpoint is None else Tracing(settings.otlp_traces_endpoint),
    )


def _make_context(
    engine_settings: Mapping[str, Any], settings: ServerSettings, shared: Shared, metrics: Metrics | None
) -> Context:
    """Load an engine. It is reported in `metrics`, or in new ones."""
    config = EngineConfig.from_kwargs(**engine_settings)
    defaults = checkpoint_defaults(config) if settings.use_generation_config else {}
    names = tuple(settings.served_model_names) or (config.model or "bundled",)
    adapters = _adapters(settings.lora_modules, names)
    llm = AsyncLLM(**engine_settings)
    try:
        for adapter in adapters.values():
            llm.add_lora(adapter)
        tools = settings.tools.chosen_for(_tool_template(llm, settings.chat_template))
    except BaseException:
        llm.shutdown(ABORT_TIMEOUT)
        raise
    llm.max_num_queued_reqs = settings.max_num_queued_reqs
    templates = None
    if llm.tokenizer is not None:
        templates = TemplateRenderer(llm.tokenizer, settings.chat_template)
    if defaults:
        logger.info("Sampling parameters of the checkpoint, where a request has none: %s", defaults)
    if metrics is None:
        metrics = Metrics(llm, names[0], shared.responses)
    else:
        metrics.attach(llm)
    return Context(
        llm=llm,
        model_names=names,
        adapters=adapters,
        metrics=metrics,
        templates=templates,
        shared=shared,
        defaults=defaults,
        report_speculation=settings.report_speculation,
        tools=tools,
        chat_template_kwargs=settings.chat_template_kwargs,
        profiler=None if settings.profiler_folder is None else Profiler(llm, settings.profiler_folder),
    )


def _adapters(modules: Sequence[LoRARequest], names: Sequence[str]) -> dict[str, LoRARequest]:
    found: dict[str, LoRARequest] = {}
    for module in modules:
        if module.lora_name in (*names, *found):
            raise invalid_config("--lora-modules", module.lora_name, "must be a name that no other model here has")
        found[module.lora_name] = module
    return found


def _tool_template(llm: AsyncLLM, chosen: str | None) -> str | None:
    """Return the chat template of conversations with tools. None if there is none, or none of several is the
    default."""
    try:
        return None if llm.tokenizer is None else choose_template(llm.tokenizer.chat_template, chosen, has_tools=True)
    except InvalidRequestError:
        return None


def close_context(context: Context) -> bool:
    """End the context's engine and child processes. Return True if the engine ended within `ABORT_TIMEOUT` seconds."""
    if context.templates is not None:
        context.templates.close()
    return context.llm.shutdown(ABORT_TIMEOUT)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing, so that uvicorn leaves signals alone: `_Process` handles them."""
        yield


class _Process:
    """The server inside one event loop, from start to end."""

    def __init__(
        self, models: Models[Context], shared: Shared, settings: ServerSettings, listener: socket.socket
    ) -> None:
        self._models = models
        self._shared = shared
        self._settings = settings
        self._listener = listener
        limits = settings.limits
        protocol = type("Protocol", (DeadlineProtocol,), {"limits": limits})
        self._server = _Server(
            uvicorn.Config(
                build_app(models, shared),
                http=protocol,
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=settings.access_log,
                server_header=False,
                proxy_headers=False,
                h11_max_incomplete_event_size=limits.max_header_size,
                timeout_keep_alive=limits.keep_alive_timeout,  # type: ignore[arg-type]
                timeout_graceful_shutdown=LINGER,  # type: ignore[arg-type]
                backlog=min(limits.max_connections, 2048),
                root_path=settings.root_path,
                **_tls_options(settings.tls),
            )
        )

    async def serve(self) -> bool:
        """Serve until the end. Return True if it ended because the engine broke."""
        loop = asyncio.get_running_loop()
        stop, abort, dead = asyncio.Event(), asyncio.Event(), asyncio.Event()

        def on_signal() -> None:
            (abort if stop.is_set() else stop).set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        only = None if self._models.reloads else self._models.loaded[0].llm
        if only is not None:
            only.on_dead = lambda: _tell(loop, dead)
            if only.error is not None:
                dead.set()
        self._listener.listen(min(self._settings.limits.max_connections, 2048))
        serving = asyncio.ensure_future(self._server.serve(sockets=[self._listener]))
        await self._announce(only)
        figures = asyncio.ensure_future(self._log_figures(only))
        await _first(stop.wait(), dead.wait(), asyncio.shield(serving))
        figures.cancel()
        self._shared.draining = True
        failed = self._models.error is not None
        if failed:
            await _first(abort.wait(), asyncio.sleep(FAILURE_GRACE))
        else:
            logger.info("Shutting down: up to %g s for what runs", self._settings.shutdown_timeout)
            await _first(abort.wait(), dead.wait(), self._drained(), asyncio.sleep(self._settings.shutdown_timeout))
        self._models.stop()
        for context in self._models.loaded:
            await loop.run_in_executor(None, context.llm.shutdown, ABORT_TIMEOUT)
        self._server.should_exit = True
        await _first(abort.wait(), asyncio.shield(serving))
        self._server.force_exit = True
        await serving
        return failed or self._models.error is not None

    async def _log_figures(self, llm: AsyncLLM | None) -> None:
        if self._settings.log_stats_interval is not None and llm is not None:
            with contextlib.suppress(EngineDeadError):
                await log_figures(llm, self._settings.log_stats_interval)

    async def _announce(self, llm: AsyncLLM | None) -> None:
        if llm is not None:
            with contextlib.suppress(EngineDeadError):
                await log_what_runs(llm)
        host, port = self._listener.getsockname()[:2]
        address = f"[{host}]" if ":" in host else host
        scheme = "http" if self._settings.tls is None else "https"
        names = ", ".join(model.name for model in self._models.all)
        logger.info("Serving %s on %s://%s:%d", names, scheme, address, port)
        if self._settings.ui:
            logger.info("Chat on %s://%s:%d%s/", scheme, address, port, self._settings.root_path)
        logger.info("Application startup complete.")

    async def _drained(self) -> None:
        """Wait until the answers to all requests are sent."""
        while self._server.server_state.tasks:
            await asyncio.sleep(0.02)


def _tls_options(tls: TLSSettings | None) -> dict[str, Any]:
    if tls is None:
        return {}
    return {
        "ssl_certfile": tls.certificate,
        "ssl_keyfile": tls.key,
        "ssl_ca_certs": tls.ca_certificates,
        "ssl_cert_reqs": tls.cert_reqs,
    }


async def _first(*waits: Any) -> None:
    """Wait until one of `waits` is done, and cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _tell(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop may have ended first
        loop.call_soon_threadsafe(event.set)


def _fit_connections(limits: HTTPLimits) -> HTTPLimits:
    """Return `limits` with no more connections than this process may have open files. A connection beyond that could
    not even get an error, and the accept loop would spin."""
    wanted = limits.max_connections
    files = allow_open_files(wanted + OTHER_FILES)
    if files is None or files - OTHER_FILES >= wanted:
        return limits
    fitting = max(1, files - OTHER_FILES)
    logger.warning(
        "max_connections=%d: this process may open %d files; %d connections are taken", wanted, files, fitting
    )
    return replace(limits, max_connections=fitting)


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, OverflowError) as fault:
        raise _cannot_listen(host, port, fault) from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # connections inherit it; left alone it grows to megabytes for a client that reads nothing
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        listener.bind(address)
    except OSError as fault:
        listener.close()
        raise _cannot_listen(host, port, fault) from None
    listener.set_inheritable(False)
    return listener


def _cannot_listen(host: str, port: int, fault: OSError | OverflowError) -> InvalidConfigError:
    """Return the error for an address that cannot be bound. It names `host` if that is no address of this machine, else
    `port`."""
    reason = getattr(fault, "strerror", None) or fault
    if isinstance(fault, socket.gaierror) or getattr(fault, "errno", None) == errno.EADDRNOTAVAIL:
        return invalid_config("host", host, f"is no address to listen on: {reason}; use an address of this machine")
    denied = isinstance(fault, PermissionError)
    remedy = "use a --port above 1023" if denied else "use another --port, or stop what uses this one"
    return invalid_config("port", port, f"cannot listen on {host}: {reason}; {remedy}")
