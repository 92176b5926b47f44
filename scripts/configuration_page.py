"""Prints docs/configuration.md: tables of every option that is declared with `specrs.options`. See `make generate`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from specrs import vllm_arguments
from specrs.drafters import methods_of
from specrs.engine_options import EngineOptions
from specrs.kv_events_config import KVEventsConfig
from specrs.options import Option, options_of
from specrs.sampling import SamplingParams
from specrs.server.limits import HTTPLimits
from specrs.server.options import ServerOptions
from specrs.speculative_config import SpeculativeConfig
from specrs.vllm_arguments import VLLMArgument

HEAD = """# Configuration

This page is generated from the declarations in the code: run `make generate` after a change.

[Environment variables](environment.md) configure a process, too: its number of threads, its instruction set, keys.

"""
SECTIONS = (
    (
        "Engine",
        EngineOptions,
        "Arguments of `LLM` and `AsyncLLM`. The flags are those of commands that make an engine. In the YAML file of "
        "`specrs serve --config`, a key is a flag without the dashes at its start.",
    ),
    (
        "Drafting",
        SpeculativeConfig,
        "Keys of `speculative_config`. Each is also a flag, as in `--speculative-config.max_model_len=4096`.",
    ),
    (
        "Events of the prefix cache",
        KVEventsConfig,
        "Keys of `kv_events_config`. Each is also a flag, as in `--kv-events-config.topic=kv`.",
    ),
    ("Server", ServerOptions, "Flags of `specrs serve`, and keys of its YAML file."),
    (
        "Limits of the server",
        HTTPLimits,
        "Flags of `specrs serve`. They limit how much of the server one client can use.",
    ),
    (
        "Sampling parameters",
        SamplingParams,
        "Fields of `SamplingParams`. Request bodies have most of them ([server](server.md)). Flags are those of "
        "`specrs generate`, which has other defaults: `temperature` is 0 (greedy), `seed` is 0 and `max_tokens` 128.",
    ),
)
VLLM = """## Arguments and flags of vLLM

These arguments of vLLM's `LLM`, and flags of `vllm serve`, are accepted if their value changes nothing:
"""
REJECTED = """
These flags are rejected whatever their value. Use the one in the second column:
"""
WITHOUT = """
These flags are rejected, too. Nothing here corresponds to them:
"""


def page() -> str:
    """Return the text of the page."""
    return "\n".join(lines()) + "\n"


def lines() -> Iterator[str]:
    """Yield the lines of the page."""
    yield HEAD
    for title, owner, intro in SECTIONS:
        yield f"## {title}\n\n{intro}\n"
        yield "| option | flag | values | default | meaning |\n| --- | --- | --- | --- | --- |"
        yield from (row(declared, owner) for declared in options_of(owner).values())
        yield ""
    yield VLLM + "\n| argument | accepted |\n| --- | --- |"
    accepted = {**vllm_arguments.ENGINE, **vllm_arguments.SERVER}
    yield from (f"| `{name}` | {_cell(values(argument))} |" for name, argument in sorted(accepted.items()))
    yield REJECTED + "\n| flag | instead |\n| --- | --- |"
    replaced = {name: argument for name, argument in vllm_arguments.REJECTED.items() if argument.instead is not None}
    yield from (f"| `--{name}` | `{argument.instead}` |" for name, argument in sorted(replaced.items()))
    others = sorted(vllm_arguments.REJECTED.keys() - replaced.keys())
    flags = textwrap.fill(" ".join(f"--{name}" for name in others), 110, break_on_hyphens=False)
    yield f"{WITHOUT}\n```\n{flags}\n```"


def row(declared: Option, owner: type) -> str:
    """Return the table row of one option of the dataclass `owner`."""
    flags = [declared.flag, *([declared.short] if declared.short else [])] if declared.commands else []
    meaning = declared.help[0].upper() + declared.help[1:] + (f"; {declared.note}" if declared.note else "") + "."
    methods = methods_of(declared.name) if owner is SpeculativeConfig else ()
    if methods:
        meaning += f" Only with {' or '.join(f'`{method}`' for method in methods)}."
    cells = (
        f"`{declared.name}`",
        ", ".join(f"`{flag}`" for flag in flags),
        declared.values.allowed().removeprefix("one of ") or declared.values.noun,
        declared.default_text,
        f"{meaning} {declared.details}".strip(),
    )
    return f"| {' | '.join(map(_cell, cells))} |"


def values(argument: VLLMArgument) -> str:
    """Return the accepted values of an argument of vLLM."""
    return ", ".join(f"`{value!r}`" for value in argument.accepted)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
