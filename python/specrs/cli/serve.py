"""`specrs serve`: vLLM's flags, to an engine and a server. Values are checked where they are used."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrs.errors import InvalidConfigError, check_number, invalid_config
from specrs.extras import require

if TYPE_CHECKING:
    from specrs.server.limits import HTTPLimits
    from specrs.server.options import ServerOptions

SUMMARY = "serve a model over HTTP"
DESCRIPTION = (
    "Serve a model over HTTP: OpenAI's API, with vLLM's flags, fields and metrics. Without MODEL the bundled pair is "
    "served, in float32 and with 5 draft tokens."
)
BUNDLED_DRAFTS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """vLLM's options, and those of specrs's own limits."""
    from specrs.cli.arguments import MergeKey
    from specrs.cli.option_flags import MODEL, add_flag, add_flags
    from specrs.cli.vllm_flags import add_vllm_flags
    from specrs.engine_options import EngineOptions
    from specrs.options import options_of
    from specrs.server.limits import HTTPLimits
    from specrs.server.options import ServerOptions
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
    add_flags(server, ServerOptions, "serve")
    server.add_argument(
        "--config", metavar="FILE", help="YAML of flags, without their dashes; those of the command line come after it"
    )
    add_flags(parser.add_argument_group("limits"), HTTPLimits, "serve")
    add_vllm_flags(parser)


def run(arguments: argparse.Namespace) -> None:
    """Serve until a signal. Raises `SpecrsError` for what is refused before; exits with 1 if the engine breaks."""
    from specrs.cli.option_flags import given_options
    from specrs.cli.vllm_flags import check_server_flags
    from specrs.server.limits import HTTPLimits
    from specrs.server.options import LOG_LEVELS, ServerOptions

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
    options = ServerOptions(**given_options(arguments, ServerOptions, "serve"))
    settings = _settings(options, HTTPLimits(**given_options(arguments, HTTPLimits, "serve")), engine)

    from specrs.cli.threads import set_torch_threads
    from specrs.server.logs import log_to_stderr
    from specrs.server.run import run_server

    log_to_stderr(LOG_LEVELS[options.uvicorn_log_level])
    if any("padded_drafter" in key.replace("-", "_") for key in engine.get("speculative_config", {})):
        logging.getLogger("specrs").info("disable_padded_drafter_batch has no effect: rows are never padded here")
    set_torch_threads(arguments.threads, bundled=model is None)
    code = run_server(engine, settings)
    if code:
        sys.exit(code)


def _settings(options: ServerOptions, limits: HTTPLimits, engine: dict[str, Any]) -> Any:
    from specrs.cli.lora_modules import read_lora_modules
    from specrs.server.context import CORSSettings
    from specrs.server.options import API_KEY_VARIABLES
    from specrs.server.run import ServerSettings
    from specrs.server.tools import ToolSettings

    keys = [*(options.api_key or ()), *(os.environ.get(name, "") for name in API_KEY_VARIABLES)]
    return ServerSettings(
        host=options.host,
        port=options.port,
        served_model_names=options.served_model_name or (),
        lora_modules=tuple(read_lora_modules(options.lora_modules or (), enable_lora=bool(engine.get("enable_lora")))),
        api_keys=[key for key in keys if key],
        chat_template=_chat_template(options.chat_template),
        use_generation_config=options.generation_config == "auto",
        max_num_queued_reqs=options.max_num_queued_reqs,
        shutdown_timeout=options.shutdown_timeout,
        access_log=not options.disable_uvicorn_access_log,
        log_stats_interval=None if options.disable_log_stats else _log_interval(),
        report_speculation=options.per_request_spec_decode_metrics == "summary",
        tools=ToolSettings(
            auto_choice=options.enable_auto_tool_choice,
            tool_parser=options.tool_call_parser,
            reasoning_parser=options.reasoning_parser,
            exclude_when_none=options.exclude_tools_when_tool_choice_none,
        ),
        chat_template_kwargs=options.default_chat_template_kwargs or {},
        ui=options.ui,
        root_path=options.root_path.rstrip("/"),
        tls=_tls(options),
        cors=CORSSettings(
            origins=options.allowed_origins,
            methods=options.allowed_methods,
            headers=options.allowed_headers,
            credentials=options.allow_credentials,
        ),
        profiler_folder=_profiler_folder(options.profiler_config),
        otlp_traces_endpoint=options.otlp_traces_endpoint,
        limits=limits,
    )


def _tls(options: ServerOptions) -> Any:
    """Files of TLS, read once so that a wrong one ends the start; None without a certificate."""
    import ssl

    from specrs.server.run import TLSSettings

    certificate, key = options.ssl_certfile, options.ssl_keyfile
    if certificate is None:
        for name, without in (("ssl_keyfile", None), ("ssl_ca_certs", None), ("ssl_cert_reqs", 0)):
            if getattr(options, name) != without:
                raise invalid_config("--" + name.replace("_", "-"), getattr(options, name), "needs --ssl-certfile")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as fault:
        raise invalid_config("--ssl-certfile", certificate, f"cannot be used with its key: {fault}") from None
    try:
        if options.ssl_ca_certs is not None:
            context.load_verify_locations(options.ssl_ca_certs)
    except (OSError, ssl.SSLError) as fault:
        raise invalid_config("--ssl-ca-certs", options.ssl_ca_certs, f"cannot be read: {fault}") from None
    return TLSSettings(certificate, key, options.ssl_ca_certs, options.ssl_cert_reqs)


def _log_interval() -> float:
    from specrs.server.logs import INTERVAL
    from specrs.server.options import LOG_INTERVAL_VARIABLE

    given = os.environ.get(LOG_INTERVAL_VARIABLE)
    if not given:
        return INTERVAL
    try:
        value: object = float(given)
    except ValueError:
        value = given
    return check_number(InvalidConfigError, LOG_INTERVAL_VARIABLE, value, 0.0, open_low=True)


def _profiler_folder(given: Mapping[str, Any] | None) -> Path | None:
    """Where traces go, made; None without a profiler."""
    if given is None:
        return None
    folder = given.get("torch_profiler_dir")
    if given.keys() - {"profiler", "torch_profiler_dir"} or given.get("profiler", "torch") != "torch" or not folder:
        raise invalid_config("--profiler-config", given, 'must have "torch_profiler_dir", and "profiler": "torch"')
    require("torch", "transformers", "--profiler-config")
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
