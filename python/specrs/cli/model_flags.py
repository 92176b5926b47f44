"""Flags that `chat`, `generate` and `serve` share: MODEL, with the bundled pair as default, and default drafting."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from specrs.errors import invalid_config

DEFAULT_DRAFTS = {"rejection_sample_method": "coupled"}
"""Default drafting of the bundled pair. With `coupled`, sampled text is the same with and without drafts for a seed, so
drafts that the user did not ask for change no text."""
DEFAULT_TEXT_DRAFTS = {"method": "suffix", **DEFAULT_DRAFTS}
"""Default drafting of other models: from the text, because that needs no second model."""
METHOD_OF_TARGET = "mtp"
"""Method that is added to the default drafting of a target with an MTP head."""
ABOUT_DRAFTS = (
    "Drafts are on. The bundled pair has a draft model; for another model, drafts repeat earlier parts of the text, or "
    "come from its MTP head."
)


def add_model(parser: argparse.ArgumentParser, engine: argparse._ArgumentGroup, *, several: bool = False) -> None:
    """Add MODEL and `--model` to a command, and the flag that turns drafting off to its group `engine`. With `several`,
    MODEL may be given more than once."""
    from specrs.cli.option_flags import MODEL

    nargs, also = ("*", "; several: each is loaded when a request asks for it") if several else ("?", "")
    parser.add_argument("model_tag", nargs=nargs, metavar="MODEL", help=f"{MODEL}{also}; default: the bundled pair")
    engine.add_argument("--model", metavar="TEXT", help="the same as MODEL")
    engine.add_argument(
        "--speculation",
        action=argparse.BooleanOptionalAction,
        help="draft if no flag names a drafter: with the bundled draft model, or from the text of another model and "
        "with its MTP head; default: on",
    )


def model_of(arguments: argparse.Namespace) -> str | None:
    """Return the model that the arguments name; None for the bundled pair.

    Raises `InvalidConfigError` if MODEL and --model differ.
    """
    tag: str | None = arguments.model_tag
    named: str | None = arguments.model
    if None not in (tag, named) and named != tag:
        raise invalid_config("--model", named, f"must equal MODEL={tag}, or be left out")
    return named if tag is None else tag


def engine_settings(arguments: argparse.Namespace, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `LLM`: those in `given`, the model, and the default drafting. A `speculative_config` that
    names no drafter, such as one with a number of drafts alone, changes other options of the default drafting.

    Only commands draft by default. `LLM(...)`, like vLLM's, drafts only with a `speculative_config`: programs that
    compare runs with and without drafts rely on that.

    Drafts from the text need one step in flight. With two (`max_steps_in_flight`, `async_scheduling`), they are not
    added by default.

    Raises `InvalidConfigError` for two different models, and for --no-speculation with a `speculative_config`.
    """
    model = model_of(arguments)
    settings = {**given, "model": model}
    if model is None:
        settings.setdefault("dtype", "float32")
    asked = settings.get("speculative_config", {})
    if arguments.speculation is False:
        if asked is not None and "speculative_config" in settings:
            from specrs.cli.option_flags import drafting_flag

            raise invalid_config(*drafting_flag(asked), "contradicts --no-speculation; leave one of them out")
    elif isinstance(asked, Mapping) and not {"method", "model"}.intersection(asked):
        changes = {key.replace("-", "_"): value for key, value in asked.items()}
        drafting = {**_default_drafting(settings, "speculative_config" in settings, arguments.speculation), **changes}
        if drafting:
            settings["speculative_config"] = drafting
    return settings


def _default_drafting(settings: Mapping[str, Any], asked: bool, text: bool | None) -> dict[str, str]:
    """Return the default drafting with the settings of an engine; empty if nothing can draft. `asked`: whether drafting
    was asked for, by whatever drafts. `text`: whether drafts from the text were."""
    if settings["model"] is None:
        return dict(DEFAULT_DRAFTS)
    ahead = settings.get("max_steps_in_flight") == 2 or settings.get("async_scheduling") is True
    methods = [METHOD_OF_TARGET] if _has_head(settings) else []
    if text or not ahead or (asked and not methods):
        methods = [DEFAULT_TEXT_DRAFTS["method"], *methods]
    return {"method": ",".join(methods), **DEFAULT_DRAFTS} if methods else {}


def _has_head(settings: Mapping[str, Any]) -> bool:
    """Return whether the target of the settings has an MTP head that can draft with them."""
    from specrs.drafters.mtp.files import has_mtp_head

    if settings.get("load_format") == "dummy" or settings.get("model_impl") == "transformers":
        return False
    return has_mtp_head(settings["model"], settings.get("revision"))
