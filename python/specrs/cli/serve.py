"""`specrs serve`: passes vLLM's flags to an engine and a server. Values are checked where they are used."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrs.cli.arguments import EndOfFile
from specrs.cli.config_file import END as END_OF_FILE
from specrs.cli.model_flags import ABOUT_DRAFTS, add_model, engine_settings
from specrs.errors import InvalidConfigError, check_number, invalid_config
from specrs.extras import require

if TYPE_CHECKING:
    from specrs.server.limits import HTTPLimits
    from specrs.server.options import ServerOptions

DESCRIPTION = (
    "Serve a model over HTTP: OpenAI's API, with vLLM's flags, fields and metrics. Without MODEL the bundled pair is "
    "served, in float32. "
) + ABOUT_DRAFTS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add vLLM's options, and those of specrs' own limits."""
    from specrs.cli.option_flags import add_flags, add_speculation_flags
    from specrs.cli.vllm_flags import add_vllm_flags
    from specrs.engine_options import EngineOptions
    from specrs.server.limits import HTTPLimits
    from specrs.server.options import ServerOptions

    engine = parser.add_argument_group("engine")
    add_model(parser, engine, several=True)
    add_flags(engine, EngineOptions, "serve")
    add_speculation_flags(engine, "serve")
    engine.add_argument(
        "--async-scheduling", action=argparse.BooleanOptionalAction, help="vLLM's name for two steps in flight"
    )
    server = parser.add_argument_group("server")
    add_flags(server, ServerOptions, "serve")
    server.add_argument(
        "--config", metavar="FILE", help="YAML of flags, without their dashes; those of the command line come after it"
    )
    server.add_argument(END_OF_FILE, action=EndOfFile, nargs=0, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    add_flags(parser.add_argument_group("limits"), HTTPLimits, "serve")
    add_vllm_flags(parser)


def run(arguments: argparse.Namespace) -> None:
    """Serve until a signal arrives. Raises `SpecrsError` if a setting is rejected before. Exits with code 1 if the
    engine breaks."""
    from specrs.cli.option_flags import given_options
    from specrs.cli.served_models import read_models
    from specrs.cli.vllm_flags import check_server_flags
    from specrs.server.limits import HTTPLimits
    from specrs.server.options import LOG_LEVELS, ServerOptions

    given = vars(arguments)
    check_server_flags(given)
    for_all = _engine_arguments(given)
    options = ServerOptions(**given_options(arguments, ServerOptions, "serve"))
    limits = HTTPLimits(**given_options(arguments, HTTPLimits, "serve"))
    models = read_models(arguments, for_all, options, lambda own, engine: _settings(own, limits, engine))
    if models:
        engines = [dict(model.engine) for model in models]
        settings = models[0].server
    else:
        arguments.model_tag = next(iter(arguments.model_tag or ()), None)
        engines = [engine_settings(arguments, for_all)]
        settings = _settings(options, limits, engines[0])

    from specrs.cli.threads import set_torch_threads
    from specrs.server.logs import log_to_stderr
    from specrs.server.run import run_models, run_server

    log_to_stderr(LOG_LEVELS[options.uvicorn_log_level])
    drafting = [engine.get("speculative_config") for engine in engines]
    if any("padded_drafter" in key.replace("-", "_") for one in drafting if isinstance(one, Mapping) for key in one):
        logging.getLogger("specrs").info("disable_padded_drafter_batch has no effect: rows are never padded here")
    set_torch_threads(arguments.threads, bundled=all(engine["model"] is None for engine in engines))
    code = run_models(models, settings, options.models_memory_bytes) if models else run_server(engines[0], settings)
    if code:
        sys.exit(code)


def _settings(options: ServerOptions, limits: HTTPLimits, engine: dict[str, Any]) -> Any:
    from specrs.cli.chat_template_file import read_chat_template
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
        chat_template=read_chat_template(options.chat_template),
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
        ui=options.serves_page,
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
        responses_store_bytes=options.responses_store_bytes,
        responses_store_seconds=options.responses_store_seconds,
        limits=limits,
    )


def _tls(options: ServerOptions) -> Any:
    """Return the TLS files. Loads them once, so that a wrong file ends the start. None without a certificate."""
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
    """Create the folder for traces and return it; None without a profiler."""
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


def _engine_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `LLM` that were given, vLLM's other arguments included."""
    from specrs.engine_options import EngineOptions
    from specrs.options import options_of
    from specrs.vllm_arguments import ENGINE

    known = (options_of(EngineOptions).keys() | ENGINE.keys()) - {"served_model_name", "generation_config", "model"}
    return {name: value for name, value in given.items() if name in known and value is not None}
