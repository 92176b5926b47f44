"""Flags of `specrs serve` about the server itself, each declared once. The flags of HTTP limits are in
`specrs.server.limits`."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from typing import Any

from specrs.errors import InvalidConfigError, SpecrsError, invalid
from specrs.options import Choice, Integer, ListOf, Number, Object, Switch, Text, Values, check_options, option
from specrs.server.parsers.table import (
    AUTO,
    REASONING_PARSER_ALIASES,
    REASONING_PARSERS,
    TOOL_PARSER_ALIASES,
    TOOL_PARSERS,
)
from specrs.server.response_store import STORE_BYTES, STORE_SECONDS

API_KEY_VARIABLES = ("SPECRS_API_KEY", "VLLM_API_KEY")
LOG_INTERVAL_VARIABLE = "VLLM_LOG_STATS_INTERVAL"
LOG_LEVELS = {
    "critical": logging.CRITICAL,
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
    "trace": 5,
}
"""Python's logging levels by uvicorn's names."""
_option = partial(option, commands=("serve",))


@dataclass(frozen=True)
class _Texts(Values):
    """Option type for a list of texts, or a single text. Stored as a tuple."""

    def check(self, error: type[SpecrsError], field: str, value: Any, also: str = "") -> tuple[str, ...]:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list | tuple) or not all(isinstance(one, str) for one in texts):
            raise invalid(error, field, value, "must be a list of strings, such as '[\"*\"]'")
        return tuple(texts)


@dataclass(frozen=True)
class _Entry(Object):
    """Option type for a dictionary, which flags give as JSON."""

    def check(self, error: type[SpecrsError], field: str, value: Any, also: str = "") -> Mapping[str, Any]:
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = json.loads(value)
        return super().check(error, field, value, also)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Flags of the server itself. Immutable and checked at construction; error messages name flags.

    Raises `InvalidConfigError` for a wrong value.
    """

    host: str = _option("127.0.0.1", Text(), "address to listen on")
    port: int = _option(8000, Integer(0, 65535), "port to listen on", note="0: a free one")
    served_model_name: Sequence[str] | None = option(
        None, ListOf(Text(), "names"), "names that requests may use", default_is="MODEL", commands=("serve",)
    )
    models: Sequence[Mapping[str, Any]] | None = option(
        None,
        ListOf(_Entry('{"name": "small", "model": "Qwen/Qwen3-0.6B"}'), "models"),
        "models to serve, each a JSON object with name, model and options of the engine",
        default_is="MODEL",
        commands=("serve",),
        details="In a `--config` file it is a list of mappings. [Several models](guides/serve.md#several-models) has "
        "an example.",
    )
    models_memory_bytes: int | None = _option(
        None,
        Integer(1, units=True),
        "bytes of memory for weights and KV caches of several models",
        note="the least recently used model is unloaded first",
        default_is="no bound",
    )
    lora_modules: Sequence[str] | None = option(
        None,
        ListOf(Text(), "adapters"),
        'PEFT adapters that requests may name as their model: NAME=PATH, or JSON with "name", "path" and '
        '"base_model_name"',
        default_is="none",
        commands=("serve",),
    )
    api_key: Sequence[str] | None = option(
        None,
        ListOf(Text(empty=True), "keys"),
        "accepted keys; each request needs one",
        note=f"the keys in {' and '.join(API_KEY_VARIABLES)} count, too",
        default_is="none",
        commands=("serve",),
        details="Keys are asked for on every path but `/health` and `/ping`, and compared in constant time.",
    )
    chat_template: str | None = _option(
        None, Text(), "file with a Jinja template, or the template itself", default_is="the checkpoint's"
    )
    enable_auto_tool_choice: bool = _option(False, Switch(), "serve tool_choice auto")
    tool_call_parser: str = _option(
        AUTO,
        Choice((AUTO, *sorted([*TOOL_PARSERS, *TOOL_PARSER_ALIASES])), TOOL_PARSER_ALIASES),
        "form in which the model writes calls",
        note="auto takes what the chat template shows",
    )
    exclude_tools_when_tool_choice_none: bool = _option(
        False, Switch(), "hide the tools from the chat template with tool_choice none"
    )
    reasoning_parser: str | None = _option(
        None,
        Choice(tuple(sorted([*REASONING_PARSERS, *REASONING_PARSER_ALIASES])), REASONING_PARSER_ALIASES),
        "form in which the model writes reasoning",
        default_is="none",
    )
    default_chat_template_kwargs: Mapping[str, Any] | None = option(
        None,
        Object('{"enable_thinking": false}'),
        "variables of the chat template",
        default_is="none",
        commands=("serve",),
    )
    ssl_certfile: str | None = _option(
        None, Text(), "PEM file of a certificate chain, with which the server speaks HTTPS", default_is="HTTP"
    )
    ssl_keyfile: str | None = _option(
        None, Text(), "PEM file of the certificate's key", default_is="the certificate's file"
    )
    ssl_ca_certs: str | None = _option(
        None, Text(), "PEM file of the authorities that may sign client certificates", default_is="none"
    )
    ssl_cert_reqs: int = _option(
        0,
        Integer(0, 2),
        "whether clients must have a certificate",
        note="0 no, 1 if they send one, 2 yes",
    )
    ui: bool | None = _option(
        None,
        Switch(),
        "a chat page at /, which shows what speculation does",
        default_is="on if --host is a loopback address",
    )
    root_path: str = _option("", Text(empty=True), "path under which a proxy shows this server", default_is="/")
    allowed_origins: Sequence[str] = option(
        (), _Texts(), "origins of web pages that may send requests (CORS)", default_is="none", commands=("serve",)
    )
    allowed_methods: Sequence[str] = option(
        ("*",), _Texts(), "HTTP methods of requests from web pages", default_is="all", commands=("serve",)
    )
    allowed_headers: Sequence[str] = option(
        ("*",), _Texts(), "HTTP headers of requests from web pages", default_is="all", commands=("serve",)
    )
    allow_credentials: bool = _option(False, Switch(), "web pages may send the browser's cookies and keys")
    generation_config: str = _option(
        "auto",
        Choice(("auto", "vllm")),
        "sampling parameters of requests that set none",
        note="auto takes the checkpoint's, vllm ignores them",
    )
    max_num_queued_reqs: int | None = _option(
        None, Integer(1), "maximum requests that wait and run", note="more get 503", default_is="no bound"
    )
    shutdown_timeout: float = _option(0.0, Number(0.0), "seconds that requests may go on after SIGTERM")
    disable_uvicorn_access_log: bool = _option(False, Switch(), "no line per request")
    disable_log_stats: bool = _option(
        False,
        Switch(),
        "no statistics in the log",
        details=f"They are a line every 10 seconds under load. The variable {LOG_INTERVAL_VARIABLE} sets the seconds.",
    )
    uvicorn_log_level: str = _option("info", Choice(tuple(LOG_LEVELS)), "level of uvicorn's lines")
    per_request_spec_decode_metrics: str = _option(
        "none", Choice(("none", "summary")), "speculation that answers report in metrics.speculative_decoding"
    )
    profiler_config: Mapping[str, Any] | None = option(
        None,
        Object('{"profiler": "torch", "torch_profiler_dir": "traces"}'),
        'folder of profiler traces, as in \'{"profiler": "torch", "torch_profiler_dir": "traces"}\'',
        default_is="no profiler",
        commands=("serve",),
        details="POST /start_profile and /stop_profile write a trace.",
    )
    otlp_traces_endpoint: str | None = _option(
        None, Text(), "URL of a collector of OpenTelemetry traces", default_is="no traces"
    )
    responses_store_bytes: int = option(
        STORE_BYTES,
        Integer(0, units=True),
        "bytes of memory for stored responses",
        note="0: none is stored",
        commands=("serve",),
        details="The least recently used responses of `/v1/responses` are evicted first.",
    )
    responses_store_seconds: float = option(
        STORE_SECONDS,
        Number(0.0),
        "seconds that a stored response is kept after its last use",
        note="0: none is stored",
        commands=("serve",),
    )

    @property
    def serves_page(self) -> bool:
        """True if the server serves the chat page. `ui` decides; if it is not set, the page is served only if `host`
        can be reached from this machine alone."""
        return _is_loopback(self.host) if self.ui is None else self.ui

    def __post_init__(self) -> None:
        check_options(self, InvalidConfigError, by_flag=True)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
