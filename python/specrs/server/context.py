"""State that all endpoints of one server share."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specrs.async_llm import AsyncLLM
from specrs.errors import short
from specrs.lora_request import LoRARequest
from specrs.server.errors import APIError, unavailable
from specrs.server.limits import HTTPLimits
from specrs.server.metrics import Metrics
from specrs.server.profiler import Profiler
from specrs.server.response_store import ResponseStore
from specrs.server.templates import TemplateRenderer
from specrs.server.tools import ToolSettings
from specrs.server.tracing import Tracing


@dataclass(frozen=True, slots=True)
class CORSSettings:
    """Web pages that may use the server, as arguments of starlette's CORSMiddleware. Without `origins`, no page of
    another origin may."""

    origins: Sequence[str] = ()
    methods: Sequence[str] = ("*",)
    headers: Sequence[str] = ("*",)
    credentials: bool = False


@dataclass(kw_only=True)
class Context:
    """Engine, settings and helpers of one server.

    `model_names`: names of the base model in requests; answers use the first. `defaults`: sampling parameters for
    requests that do not set them. `api_keys`: keys that requests must have; empty: no key is needed.
    """

    llm: AsyncLLM
    model_names: Sequence[str]
    adapters: Mapping[str, LoRARequest] = field(default_factory=dict)
    """LoRA adapters that requests may name as their model."""
    metrics: Metrics
    templates: TemplateRenderer | None
    responses: ResponseStore = field(default_factory=ResponseStore)
    limits: HTTPLimits = field(default_factory=HTTPLimits)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    api_keys: Sequence[str] = ()
    report_speculation: bool = False
    tools: ToolSettings = field(default_factory=ToolSettings)
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    cors: CORSSettings = field(default_factory=CORSSettings)
    ui: bool = False
    profiler: Profiler | None = None
    tracing: Tracing | None = None
    version: str = ""
    draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, name: str | None) -> None:
        """Raise a 404 `APIError` if `name` is neither a model nor an adapter of this server. None stands for the base
        model."""
        if name and name not in self.model_names and name not in self.adapters:
            served = short([*self.model_names, *self.adapters])
            raise APIError(404, f"The model `{name[:200]}` does not exist; served: {served}.", param="model")

    def lora_request(self, name: str | None) -> LoRARequest | None:
        """Return the LoRA adapter called `name`. None: the request asks for the base model."""
        return self.adapters.get(name or "")

    def check_open(self) -> None:
        """Raise a 503 `APIError` if the server no longer accepts requests."""
        if self.llm.error is not None:
            raise self.llm.error
        if self.draining:
            raise unavailable("The server is shutting down.")
