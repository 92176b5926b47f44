"""`specrs serve`: vLLM's flags, to an engine and a server. Values are checked where they are used."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

from specrs.errors import check_int, check_number, invalid_config

SUMMARY = "serve a model over HTTP"
DESCRIPTION = (
    "Serve a model over HTTP: OpenAI's API, with vLLM's flags, fields and metrics. Without MODEL the bundled pair is "
    "served, in float32 and with 5 draft tokens."
)
BUNDLED_DRAFTS = 5
API_KEY_VARIABLES = ("SPECRS_API_KEY", "VLLM_API_KEY")
LOG_INTERVAL_VARIABLE = "VLLM_LOG_STATS_INTERVAL"

UVICORN_LOG_LEVELS = {
    "critical": logging.CRITICAL,
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
    "trace": 5,
}
_GENERATION_CONFIGS = ("auto", "vllm")
_SSL_CERT_REQS = (0, 1, 2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """vLLM's options, and those of specrs's own limits."""
    from specrs.cli.arguments import MergeJSON, MergeKey
    from specrs.cli.option_flags import MODEL, add_flag, add_flags
    from specrs.cli.vllm_flags import add_vllm_flags
    from specrs.engine_options import EngineOptions
    from specrs.options import one_of, options_of
    from specrs.server.limits import HTTPLimits
    from specrs.server.parsers.table import REASONING_PARSERS, TOOL_PARSERS
    from specrs.speculative_config import SpeculativeConfig

    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help=f"{MODEL}; default: the bundled pair")
    engine = parser.add_argument_group("engine")
    add = engine.add_argument
    add("--model", help="the same as MODEL")
    add_flags(engine, EngineOptions, "serve")
    for name, one in options_of(SpeculativeConfig).items():
        if "serve" in one.commands:
            shown = f"{one.help_text()}; the same as --speculative-config.{name}"
            add_flag(engine, one, dest="speculative_config", action=MergeKey, const=name, metavar="VALUE", help=shown)
    add("--async-scheduling", action=argparse.BooleanOptionalAction, help="vLLM's name for a launch depth of 2")
    server = parser.add_argument_group("server")
    add = server.add_argument
    add("--host", default="127.0.0.1", help="address to listen on; default: 127.0.0.1")
    add("--port", type=int, default=8000, help="port to listen on, 0 for a free one; default: 8000")
    add("--served-model-name", nargs="+", default=[], help="names that requests may use; default: MODEL")
    add(
        "--lora-modules",
        nargs="+",
        default=[],
        metavar="NAME=PATH",
        help='PEFT adapters that requests may name as their model; or JSON: {"name", "path", "base_model_name"}',
    )
    add("--api-key", nargs="+", default=[], help=f"keys that requests must carry; or {' or '.join(API_KEY_VARIABLES)}")
    add("--chat-template", help="a file with a Jinja template, or the template itself, for the checkpoint's")
    add("--enable-auto-tool-choice", action=argparse.BooleanOptionalAction, default=False, help="tool_choice auto")
    add("--tool-call-parser", choices=TOOL_PARSERS, help="how the model writes calls, for tool_choice auto")
    add(
        "--exclude-tools-when-tool-choice-none",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="with tool_choice none the chat template does not get the tools",
    )
    add("--reasoning-parser", choices=REASONING_PARSERS, help="reasoning goes to `reasoning`; default: none")
    add("--default-chat-template-kwargs", type=_object, metavar="JSON", help="variables of the chat template")
    add("--config", metavar="FILE", help="YAML of flags, without their dashes; those of the command line come after it")
    add("--ssl-certfile", help="certificate chain, as PEM: the server speaks HTTPS")
    add("--ssl-keyfile", help="its private key; default: in the certificate's file")
    add("--ssl-ca-certs", help="certificates that clients' are checked against")
    add(
        "--ssl-cert-reqs",
        type=int,
        default=0,
        help=f"whether clients must have a certificate: {one_of(_SSL_CERT_REQS)}; 0 no, 1 if they send one, 2 yes; "
        "default: 0",
    )
    add("--ui", action=argparse.BooleanOptionalAction, default=False, help="a chat at /, coloured by who wrote what")
    add("--root-path", default="", help="path under which a proxy shows this server")
    add("--allowed-origins", type=_texts, default=[], metavar="JSON", help="of web pages, CORS; default: none")
    add("--allowed-methods", type=_texts, default=["*"], metavar="JSON", help="of their requests; default: *, all")
    add("--allowed-headers", type=_texts, default=["*"], metavar="JSON", help="of their requests; default: *, all")
    add(
        "--allow-credentials",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="web pages may send cookies and keys of the browser's",
    )
    add(
        "--generation-config",
        default="auto",
        help=f"sampling parameters of requests that set none: {one_of(_GENERATION_CONFIGS)}; auto takes the "
        "checkpoint's, vllm none; default: auto",
    )
    add("--max-num-queued-reqs", type=int, help="requests that may wait and run; more get 503; default: no bound")
    add("--shutdown-timeout", type=float, default=0.0, help="seconds to drain after SIGTERM; default: 0")
    add(
        "--disable-uvicorn-access-log",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="no line per request",
    )
    add(
        "--disable-log-stats",
        action=argparse.BooleanOptionalAction,
        default=False,
        help=f"no line of figures under load; else one every 10 seconds, or {LOG_INTERVAL_VARIABLE}",
    )
    add("--uvicorn-log-level", choices=UVICORN_LOG_LEVELS, default="info", help="of uvicorn's lines; default: info")
    add(
        "--per-request-spec-decode-metrics",
        choices=("none", "summary"),
        default="none",
        help="summary: every answer carries metrics.speculative_decoding",
    )
    add(
        "--profiler-config",
        action=MergeJSON,
        metavar="JSON",
        help='as in \'{"profiler": "torch", "torch_profiler_dir": "traces"}\': POST /start_profile and /stop_profile '
        "write a trace",
    )
    add("--otlp-traces-endpoint", metavar="URL", help="of a collector of OpenTelemetry traces; default: no traces")
    add_flags(parser.add_argument_group("limits"), HTTPLimits, "serve")
    add_vllm_flags(parser)


def run(arguments: argparse.Namespace) -> None:
    """Serve until a signal. Raises `SpecrsError` for what is refused before; exits with 1 if the engine breaks."""
    from specrs.cli.vllm_flags import check_server_flags

    given = vars(arguments)
    check_server_flags(given)
    engine = _engine_arguments(given)
    if None not in (arguments.model, arguments.model_tag) and arguments.model != arguments.model_tag:
        raise invalid_config("--model", arguments.model, f"must equal MODEL={arguments.model_tag}, or be left out")
    model = arguments.model if arguments.model_tag is None else arguments.model_tag
    engine["model"] = model
    if model is None:
        engine.setdefault("dtype", "float32")
        engine["speculative_config"] = {
            "num_speculative_tokens": BUNDLED_DRAFTS,
            **engine.get("speculative_config", {}),
        }
    if arguments.generation_config not in _GENERATION_CONFIGS:
        allowed = f"must be {' or '.join(_GENERATION_CONFIGS)}"
        raise invalid_config("--generation-config", arguments.generation_config, allowed)
    settings = _settings(arguments)

    from specrs.cli.threads import set_torch_threads
    from specrs.server.logs import log_to_stderr
    from specrs.server.run import run_server

    log_to_stderr(UVICORN_LOG_LEVELS[arguments.uvicorn_log_level])
    if any("padded_drafter" in key.replace("-", "_") for key in engine.get("speculative_config", {})):
        logging.getLogger("specrs").info("disable_padded_drafter_batch has no effect: rows are never padded here")
    set_torch_threads(arguments.threads, bundled=model is None)
    code = run_server(engine, settings)
    if code:
        sys.exit(code)


def _settings(arguments: argparse.Namespace) -> Any:
    try:
        from specrs.cli.lora_modules import read_lora_modules
        from specrs.cli.option_flags import given_options
        from specrs.server.context import CORSSettings
        from specrs.server.limits import HTTPLimits
        from specrs.server.run import ServerSettings
    except ModuleNotFoundError as missing:
        raise invalid_config("serve", missing.name, "is not installed: pip install 'specrs[serve]'") from None
    from specrs.errors import InvalidConfigError as error

    def number(field: str, low: float = 0.0, *, open_low: bool = True) -> float:
        return check_number(error, f"--{field.replace('_', '-')}", getattr(arguments, field), low, open_low=open_low)

    def count(field: str, low: int, high: int | None = None) -> int:
        return check_int(error, f"--{field.replace('_', '-')}", getattr(arguments, field), low, high)

    keys = [key for key in [*arguments.api_key, *(os.environ.get(name, "") for name in API_KEY_VARIABLES)] if key]
    return ServerSettings(
        host=arguments.host,
        port=count("port", 0, 65535),
        served_model_names=arguments.served_model_name,
        lora_modules=tuple(read_lora_modules(arguments.lora_modules, enable_lora=bool(arguments.enable_lora))),
        api_keys=keys,
        chat_template=_chat_template(arguments.chat_template),
        use_generation_config=arguments.generation_config == "auto",
        max_num_queued_reqs=None if arguments.max_num_queued_reqs is None else count("max_num_queued_reqs", 1),
        shutdown_timeout=number("shutdown_timeout", open_low=False),
        access_log=not arguments.disable_uvicorn_access_log,
        log_stats_interval=None if arguments.disable_log_stats else _log_interval(),
        report_speculation=arguments.per_request_spec_decode_metrics == "summary",
        tools=_tools(arguments),
        chat_template_kwargs=arguments.default_chat_template_kwargs or {},
        ui=arguments.ui,
        root_path=arguments.root_path.rstrip("/"),
        tls=_tls(arguments),
        cors=CORSSettings(
            origins=tuple(arguments.allowed_origins),
            methods=tuple(arguments.allowed_methods),
            headers=tuple(arguments.allowed_headers),
            credentials=arguments.allow_credentials,
        ),
        profiler_folder=_profiler_folder(arguments.profiler_config),
        otlp_traces_endpoint=arguments.otlp_traces_endpoint,
        limits=HTTPLimits(**given_options(arguments, HTTPLimits, "serve")),
    )


def _tools(arguments: argparse.Namespace) -> Any:
    from specrs.server.parsers.table import TOOL_PARSERS
    from specrs.server.tools import ToolSettings

    if arguments.enable_auto_tool_choice and arguments.tool_call_parser is None:
        raise invalid_config(
            "--enable-auto-tool-choice", True, f"needs --tool-call-parser, one of {', '.join(TOOL_PARSERS)}"
        )
    return ToolSettings(
        auto_choice=arguments.enable_auto_tool_choice,
        tool_parser=arguments.tool_call_parser,
        reasoning_parser=arguments.reasoning_parser,
        exclude_when_none=arguments.exclude_tools_when_tool_choice_none,
    )


def _tls(arguments: argparse.Namespace) -> Any:
    """Files of TLS, read once so that a wrong one ends the start; None without a certificate."""
    import ssl

    from specrs.server.run import TLSSettings

    certificate, key = arguments.ssl_certfile, arguments.ssl_keyfile
    if arguments.ssl_cert_reqs not in _SSL_CERT_REQS:
        raise invalid_config("--ssl-cert-reqs", arguments.ssl_cert_reqs, "must be 0, 1 or 2")
    if certificate is None:
        for name, without in (("ssl_keyfile", None), ("ssl_ca_certs", None), ("ssl_cert_reqs", 0)):
            if getattr(arguments, name) != without:
                raise invalid_config("--" + name.replace("_", "-"), getattr(arguments, name), "needs --ssl-certfile")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as fault:
        raise invalid_config("--ssl-certfile", certificate, f"cannot be used with its key: {fault}") from None
    try:
        if arguments.ssl_ca_certs is not None:
            context.load_verify_locations(arguments.ssl_ca_certs)
    except (OSError, ssl.SSLError) as fault:
        raise invalid_config("--ssl-ca-certs", arguments.ssl_ca_certs, f"cannot be read: {fault}") from None
    return TLSSettings(certificate, key, arguments.ssl_ca_certs, arguments.ssl_cert_reqs)


def _log_interval() -> float:
    from specrs.errors import InvalidConfigError
    from specrs.server.logs import INTERVAL

    given = os.environ.get(LOG_INTERVAL_VARIABLE)
    if not given:
        return INTERVAL
    try:
        value: object = float(given)
    except ValueError:
        value = given
    return check_number(InvalidConfigError, LOG_INTERVAL_VARIABLE, value, 0.0, open_low=True)


def _profiler_folder(given: dict[str, Any] | None) -> Path | None:
    """Where traces go, made; None without a profiler."""
    if given is None:
        return None
    folder = given.get("torch_profiler_dir")
    if given.keys() - {"profiler", "torch_profiler_dir"} or given.get("profiler", "torch") != "torch" or not folder:
        raise invalid_config("--profiler-config", given, 'must have "torch_profiler_dir", and "profiler": "torch"')
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except (OSError, TypeError) as fault:
        raise invalid_config("--profiler-config", given, f"its folder cannot be made: {fault}") from None
    return Path(folder)


def _chat_template(given: str | None) -> str | None:
    """The text of a template that is given as such, or as a file."""
    if given is None:
        return given
    try:
        text = given if "{" in given else Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as fault:
        raise invalid_config("--chat-template", given, f"must be a file, or a Jinja template: {fault}") from None
    import jinja2

    try:  # as transformers renders it, whose own tag marks what an assistant wrote, and changes nothing
        plain = re.sub(r"{%-?\s*(?:end)?generation\s*-?%}", "", text)
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
    except jinja2.TemplateSyntaxError as fault:
        raise invalid_config("--chat-template", given, f"is no Jinja template: {fault.message}") from None
    return text


def _engine_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `LLM` that were given, vLLM's others included."""
    from specrs.engine_options import EngineOptions
    from specrs.options import options_of
    from specrs.vllm_arguments import ENGINE

    known = (options_of(EngineOptions).keys() | ENGINE.keys()) - {"served_model_name", "generation_config", "model"}
    return {name: value for name, value in given.items() if name in known and value is not None}


def _texts(text: str) -> list[str]:
    """A JSON list of strings, or one string."""
    from specrs.cli.option_flags import json_or_text

    found = json_or_text(text)
    texts = found if isinstance(found, list) else [text]
    if not all(isinstance(one, str) for one in texts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of strings, such as '[\"*\"]'")
    return texts


def _object(text: str) -> dict[str, Any]:
    from specrs.cli.option_flags import json_or_text

    found = json_or_text(text)
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object, such as '{{\"enable_thinking\": false}}'")
    return found
