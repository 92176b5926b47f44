"""State that endpoints share: that of the server, and that of one loaded model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from specrs.async_llm import AsyncLLM
from specrs.errors import EngineDeadError
from specrs.lora_request import LoRARequest
from specrs.server.errors import unknown_model
from specrs.server.limits import HTTPLimits
from specrs.server.metrics import Metrics
from specrs.server.profiler import Profiler
from specrs.server.response_store import ResponseStore
from specrs.server.templates import TemplateRenderer
from specrs.server.tools import ToolSettings
from specrs.server.tracing import Tracing

READER_THREADS = 2
"""Number of threads that parse large bodies and encode large answers."""

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class CORSSettings:
    """Web pages that may use the server, as arguments of starlette's CORSMiddleware. Without `origins`, no page of
    another origin may."""

    origins: Sequence[str] = ()
    methods: Sequence[str] = ("*",)
    headers: Sequence[str] = ("*",)
    credentials: bool = False


@dataclass(kw_only=True)
class Shared:
    """State and settings that all models of a server share.

    `api_keys`: keys that requests must have; empty: no key is needed.
    """

    responses: ResponseStore = field(default_factory=ResponseStore)
    limits: HTTPLimits = field(default_factory=HTTPLimits)
    metrics: Sequence[Metrics] = ()
    """Metrics of each model."""
    api_keys: Sequence[str] = ()
    cors: CORSSettings = field(default_factory=CORSSettings)
    ui: bool = False
    tracing: Tracing | None = None
    version: str = ""
    draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    _readers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(READER_THREADS, thread_name_prefix="specrs-reader")
    )

    async def in_thread(self, function: Callable[[], ResultT]) -> ResultT:
        """Run `function`, which may take long and needs no model, in a thread pool."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, function)

    def close(self) -> None:
        """End the threads. Blocks until traces are sent."""
        self._readers.shutdown(wait=False, cancel_futures=True)
        if self.tracing is not None:
            self.tracing.close()


@dataclass(kw_only=True)
class Context:
    """Engine, settings and helpers of one loaded model.

    `model_names`: names of the base model in requests; answers use the first. `defaults`: sampling parameters for
    requests that do not set them.
    """

    llm: AsyncLLM
    model_names: Sequence[str]
    adapters: Mapping[str, LoRARequest] = field(default_factory=dict)
    """LoRA adapters that requests may name as their model."""
    metrics: Metrics
    templates: TemplateRenderer | None
    shared: Shared = field(default_factory=Shared)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    report_speculation: bool = False
    tools: ToolSettings = field(default_factory=ToolSettings)
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    profiler: Profiler | None = None

    @property
    def error(self) -> EngineDeadError | None:
        """Error that broke or ended the engine; None while it runs."""
        return self.llm.error

    def check_model(self, name: str | None) -> None:
        """Raise a 404 `APIError` if `name` is neither this model nor one of its adapters. None stands for the base
        model."""
        if name and name not in self.model_names and name not in self.adapters:
            raise unknown_model(name, [*self.model_names, *self.adapters])

    def lora_request(self, name: str | None) -> LoRARequest | None:
        """Return the LoRA adapter called `name`. None: the request asks for the base model."""
        return self.adapters.get(name or "")
