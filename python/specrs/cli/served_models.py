"""Reads which models `specrs serve` has: several MODELs, or the list of `--models`. Loads nothing."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specrs.cli.arguments import human_int
from specrs.cli.model_flags import engine_settings
from specrs.errors import InvalidConfigError, check_bool, did_you_mean, invalid_config
from specrs.options import Integer, options_of

if TYPE_CHECKING:
    from specrs.server.options import ServerOptions
    from specrs.server.run import ModelSettings, ServerSettings

SERVER_KEYS = (
    *("chat_template", "default_chat_template_kwargs", "enable_auto_tool_choice", "generation_config"),
    *("reasoning_parser", "tool_call_parser"),
)
"""Options of the server that each of several models may have for itself, besides all options of the engine."""
_ONE_MODEL = ("served_model_name", "lora_modules", "profiler_config")
"""Options of the server that belong to a single model."""


def read_models(
    arguments: argparse.Namespace,
    engine: Mapping[str, Any],
    options: ServerOptions,
    settings: Callable[[ServerOptions, dict[str, Any]], ServerSettings],
) -> list[ModelSettings]:
    """Return the models of a server with several; `[]` if it has one.

    `engine`: options of the engine for all models; the keys of a model take precedence. `settings` makes the settings
    of a server from its options, and from the arguments of the engine.

    Raises `InvalidConfigError` for a wrong entry of `--models`, two models of the same name, and flags that belong to
    a single model.
    """
    tags: Sequence[str] = arguments.model_tag or ()
    entries: Sequence[Mapping[str, Any]] = options.models or ()
    if entries and (tags or arguments.model is not None):
        model = tags[0] if tags else arguments.model
        raise invalid_config("--models", [*entries], f"contradicts MODEL={model}; add it to the list")
    if len(tags) > 1:
        if arguments.model is not None:
            raise invalid_config("--model", arguments.model, "must be left out with several MODELs; add it to them")
        entries = [{"model": tag} for tag in tags]
    if not entries:
        if options.models_memory_bytes is not None:
            raise invalid_config(
                "--models-memory-bytes", options.models_memory_bytes, "needs several MODELs or --models"
            )
        return []
    for name in _ONE_MODEL:
        if getattr(options, name) is not None:
            flag = options_of(type(options))[name].flag
            raise invalid_config(flag, getattr(options, name), "not implemented with several models; leave it out")
    models = [_read(dict(entry), arguments, engine, options, settings) for entry in entries]
    names = [model.name for model in models]
    for name in names:
        if names.count(name) > 1:
            raise invalid_config("--models", name, "must be the name of one model only; give each a name of its own")
    return models


def _read(
    entry: dict[str, Any],
    arguments: argparse.Namespace,
    engine: Mapping[str, Any],
    options: ServerOptions,
    settings: Callable[[ServerOptions, dict[str, Any]], ServerSettings],
) -> ModelSettings:
    from specrs.engine_options import EngineOptions
    from specrs.server.run import ModelSettings

    entry = {key.replace("-", "_"): value for key, value in entry.items()}
    declared = options_of(EngineOptions)
    known = ["name", "speculation", *declared, *SERVER_KEYS]
    for key in entry:
        if key not in known:
            raise invalid_config("--models", key, f"unknown key of a model{did_you_mean(key, known)}")
    model = entry.pop("model", None)
    name = entry.pop("name", None) or model or "bundled"
    if not isinstance(name, str):
        raise invalid_config("--models", name, "must be a name, in quotes")
    own = {key: entry.pop(key) for key in SERVER_KEYS if key in entry}
    if {"speculation", "speculative_config"}.intersection(entry):  # take precedence over both flags
        engine = {key: value for key, value in engine.items() if key != "speculative_config"}
        speculation = entry.pop("speculation", None)
        if speculation is not None:
            check_bool(InvalidConfigError, "--models[].speculation", speculation)
        if speculation is False and entry.get("speculative_config") is not None:
            reason = f"contradicts speculation=False of {name!r}; leave one of them out"
            raise invalid_config("--models[].speculative_config", entry["speculative_config"], reason)
    else:
        speculation = arguments.speculation
    given = {**engine, **{key: _number(declared[key].values, value) for key, value in entry.items()}}
    one = argparse.Namespace(model_tag=None, model=model, speculation=speculation)
    arguments_of_engine = engine_settings(one, given)
    server = settings(replace(options, **own), arguments_of_engine)
    return ModelSettings(name=name, engine=arguments_of_engine, server=replace(server, served_model_names=(name,)))


def _number(values: Any, value: Any) -> Any:
    """Return the number that a text such as `2G` stands for, if the option has units; else `value`."""
    if not (isinstance(values, Integer) and values.units and isinstance(value, str)):
        return value
    try:
        return human_int(value)
    except argparse.ArgumentTypeError:
        return value  # whose check names the option
