"""Help texts say what the code does: allowed values, defaults, and --threads wherever an engine is made."""

import argparse
import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import specrs.engine_options
import specrs.llm
import specrs.speculative_config
import torch
from specrs.backends.cuda.device import CUDA_DTYPES
from specrs.bench.figures import FORMATS
from specrs.bench.metrics import GOODPUT, LATENCIES
from specrs.cli import main, parser
from specrs.cli.bench.serve import find_target
from specrs.cli.help_text import invocation, plain, short
from specrs.config import EngineConfig
from specrs.errors import EngineError, InvalidConfigError
from specrs.forecast.roofline import WEIGHT_BITS, cache_dtype, gpu_of
from specrs.model_values import AT_LOAD, QUANTIZATIONS
from specrs.models.loader import load_config, resolve_dtype
from specrs.models.quantization import table
from specrs.options import options_of
from specrs.pair import TARGET
from specrs.sampling import SamplingParams
from specrs.server import run
from specrs.server.options import ServerOptions
from specrs.speculative_config import SpeculativeConfig
from specrs.vllm_arguments import REJECTED

ENGINE = ["serve", "chat", "generate", "bench throughput", "bench latency", "bench acceptance", "demo", "forecast"]


def commands(top: argparse.ArgumentParser, path: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield the words and the parser of each command that has no subcommands."""
    groups = [action for action in top._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield path.strip(), top
    for group in groups:
        for name, command in group.choices.items():
            yield from commands(command, f"{path} {name}")


COMMANDS = dict(commands(parser()))
SHOWN = [(name, action) for name, command in COMMANDS.items() for action in command._actions
         if action.help not in (None, argparse.SUPPRESS)]  # fmt: skip


def values(action: argparse.Action) -> list[str] | None:
    """Return the closed set of values that a help text names, or None if it names none."""
    if action.choices is not None:
        return list(map(str, action.choices))
    found = re.search(r"one of ([^;]+)", str(action.help))
    return None if found is None else found[1].split(", ")


def raises_nothing(call: Callable[[str], object]) -> Callable[[str], bool]:
    def accepts(value: str) -> bool:
        try:
            call(value)
        except InvalidConfigError:
            return False
        return True

    return accepts


def of_engine(field: str) -> Callable[[str], bool]:
    def make(value: str) -> object:
        given: Any = value.replace(":N", ":1")
        return EngineConfig(**{field: given})

    return raises_nothing(make)


def backend(value: str) -> object:
    given = COMMANDS["bench serve"].parse_args(["--model", "m", "--backend", value])
    return find_target(given)


def tuned(value: str) -> object:
    return resolve_dtype(value, load_config(TARGET), CUDA_DTYPES)


def of_server(field: str) -> Callable[[str], bool]:
    return raises_nothing(lambda value: ServerOptions(**{field: value}))  # type: ignore[arg-type]


CHECKS: dict[str, Callable[[str], bool]] = {
    **{field: of_engine(field) for field in (
        "device", "load_format", "model_impl", "quantization", "kv_cache_dtype", "cpu_prefill",
        "cpu_activations", "logprobs_mode",
    )},
    # Other spellings are taken and not listed.
    "dtype": lambda value: value not in specrs.engine_options._DTYPE.aliases and of_engine("dtype")(value),
    "--spec-method": raises_nothing(lambda value: SpeculativeConfig(method=value, num_speculative_tokens=1)),
    **{field: of_server(field) for field in (
        "generation_config", "tool_call_parser", "reasoning_parser", "uvicorn_log_level",
        "per_request_spec_decode_metrics",
    )},
    "backend": raises_nothing(backend),
    "percentile_metrics": LATENCIES.__contains__,
    "goodput": GOODPUT.__contains__,
    "format": FORMATS.__contains__,
    "roofline": raises_nothing(gpu_of),
    "advise quantization": AT_LOAD.__contains__,
    "forecast quantization": WEIGHT_BITS.__contains__,
    "forecast draft_quantization": WEIGHT_BITS.__contains__,
    "forecast kv_cache_dtype": raises_nothing(cache_dtype),
    "tune dtype": raises_nothing(tuned),
}  # fmt: skip
"""Functions that say whether a value is allowed, by flag, field, or command and field."""


def check_of(command: str, action: argparse.Action) -> Callable[[str], bool] | None:
    names = [f"{command} {action.dest}", *action.option_strings, action.dest]
    return next((CHECKS[name] for name in names if name in CHECKS), None)


CONSTANTS = [vars(module).values() for module in (specrs.engine_options, specrs.speculative_config)]
KNOWN = [str(value) for group in CONSTANTS for values in group if isinstance(values, tuple) for value in values]
EVERY = sorted({*KNOWN, *(value for _, action in SHOWN for value in values(action) or []), "nonsense", "0", "3"})
"""Every value that a help text names or that is allowed somewhere, and some that are not allowed."""
CLOSED = [(name, action) for name, action in SHOWN if check_of(name, action) is not None and action.dest != "config"]


@pytest.mark.parametrize(
    ("command", "action"), [pytest.param(*x, id=f"{x[0]} {x[1].option_strings[0]}") for x in CLOSED]
)
def test_the_values_in_the_help_are_those_that_the_code_takes(command: str, action: argparse.Action) -> None:
    accepts = check_of(command, action)
    assert accepts is not None
    assert sorted(values(action) or []) == [value for value in EVERY if accepts(value)]


def test_every_closed_set_in_a_help_is_checked() -> None:
    """Check that every closed set in a help text is checked, by argparse or by a row of CHECKS."""
    named = [(name, action) for name, action in SHOWN if action.choices is None and values(action) is not None]
    assert named
    unchecked = {action.dest for name, action in named if check_of(name, action) is None}
    assert unchecked == set()


def test_every_quantization_is_read_by_something() -> None:
    assert AT_LOAD == table.AT_LOAD
    assert set(QUANTIZATIONS) == {*table.AT_LOAD, *table.METHODS, table.GGUF}


def shown_default(action: argparse.Action) -> object:
    """Return the default that the code has: argparse's, or the engine's if argparse has None."""
    fields = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    default = fields.get(action.dest) if action.default is None else action.default
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, list | tuple):
        return ",".join(f"{part:g}" if isinstance(part, float) else str(part) for part in default)
    return f"{default:g}" if isinstance(default, float) else default


UNSTATED = (None, "", argparse.SUPPRESS)
OF_CHECKPOINT = {("chat", name) for name in options_of(SamplingParams)}
"""Options whose default may come from the checkpoint; tests/cli/test_chat.py checks them."""
STATED = [
    (name, action)
    for name, action in SHOWN
    if "default: " in str(action.help)
    and shown_default(action) not in UNSTATED
    and (name, action.dest) not in OF_CHECKPOINT
]


@pytest.mark.parametrize(("command", "action"), [pytest.param(*x, id=f"{x[0]} {x[1].dest}") for x in STATED])
def test_the_default_in_the_help_is_the_codes(command: str, action: argparse.Action) -> None:
    text = str(action.help).partition("default: ")[2]
    assert re.match(rf"{re.escape(str(shown_default(action)))}(?![\w.])", text), f"{command}: {text}"


def test_defaults_are_stated() -> None:
    assert len(STATED) > 100


class Built(EngineError):
    """Raised where a command would make an engine, to end the command."""


@pytest.mark.parametrize("command", ENGINE)
def test_threads_reach_the_engine_and_torch(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    def make(*_: Any, **settings: Any) -> None:
        made.append(settings)
        raise Built("made")

    def serve(engine: dict[str, Any], _: Any) -> int:
        made.append(engine)
        return 2

    monkeypatch.setattr(specrs.llm, "LLM", make)
    monkeypatch.setattr(run, "run_server", serve)
    set_to: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    more = {"generate": ["--prompt", "x"], "forecast": ["--measure"]}.get(command, [])
    ended = pytest.raises(SystemExit) if command == "serve" else nullcontext()
    with ended:
        assert main([*command.split(), *more, "--threads", "3"]) == 2
    assert made[0]["threads"] == 3
    assert set_to == [3]
    # without it: the engine chooses, and torch has one thread for the small pair; the demo's heading states its number
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with ended:
        main([*command.split(), *more])
    assert made[-1].get("threads") == (1 if command == "demo" else None)
    assert set_to == [3, 1]


@pytest.mark.parametrize("threads", ["0", "-1"])
@pytest.mark.parametrize("command", ["chat", "generate --prompt x", "bench latency", "demo", "forecast --measure"])
def test_no_threads_are_an_error(command: str, threads: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), f"--threads={threads}"]) == 2
    assert f"--threads={threads}: must be an integer of at least 1" in capsys.readouterr().err


def test_every_command_that_can_speculate_has_threads() -> None:
    found = {name for name, command in COMMANDS.items() if "--speculative-config" in command._option_string_actions}
    assert found == set(ENGINE)
    assert all("--threads" in COMMANDS[name]._option_string_actions for name in [*found, "bench sweep"])


@pytest.mark.parametrize("instead", [row.instead for row in REJECTED.values() if row.instead is not None])
def test_what_a_rejected_flag_is_told_to_use_exists(instead: str) -> None:
    flag, _, value = instead.partition(" ")
    option, _, key = flag.partition(".")
    assert option in COMMANDS["serve"]._option_string_actions
    assert not key or key in {field.name for field in dataclasses.fields(SpeculativeConfig)}
    assert value in ("", "auto")


@pytest.mark.parametrize(
    ("command", "action"),
    [pytest.param(*x, id=f"{x[0]} {x[1].dest}") for x in SHOWN if x[1].choices is not None],
)
def test_choices_are_next_to_the_flag_or_in_its_text(command: str, action: argparse.Action) -> None:
    assert action.choices is not None
    names = list(map(str, action.choices))
    next_to_it = f"{action.option_strings[0]} {'|'.join(names)}" if action.option_strings else ""
    assert f"one of {', '.join(names)}" in plain(action) or (next_to_it and next_to_it in short(COMMANDS[command], 80))


@pytest.mark.parametrize("command", COMMANDS)
def test_the_short_help_has_a_line_for_each_flag(command: str) -> None:
    """Check that the short help has one line of at most 80 characters for each flag, and leaves out hidden flags and
    defaults."""
    lines = short(COMMANDS[command], 80).splitlines()
    assert max(map(len, lines)) <= 80
    for action in COMMANDS[command]._actions:
        starting = [line for line in lines if line.startswith(f"  {invocation(action)} ")]
        assert len(starting) == (action.help != argparse.SUPPRESS), action.option_strings
    assert not any("default:" in line for line in lines)


def test_the_short_help_of_a_terminal_is_as_wide_as_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    widths = []
    for columns in ("60", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        with pytest.raises(SystemExit):
            main(["serve", "--help", "m"])
        widths.append(max(map(len, capsys.readouterr().out.splitlines())))
    assert widths[0] <= 60 < widths[1] <= 200


def words(text: str) -> str:
    """Return the words of a wrapped text."""
    return " ".join(text.split())


def test_the_whole_help_has_every_text_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help=all"])
    assert ended.value.code == 0
    # argparse breaks lines at hyphens, too
    text = capsys.readouterr().out.replace("-\n", "- ")
    for action in COMMANDS["serve"]._actions:
        if action.help != argparse.SUPPRESS:
            assert words(plain(action)).replace(" ", "") in words(text).replace(" ", ""), action.dest


@pytest.mark.parametrize("word", ["--max-num", "max_num", "max-num"])
def test_the_help_of_a_word_has_the_flags_with_it(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", f"--help={word}"])
    text = capsys.readouterr().out
    found = re.findall(r"^  (--[\w-]+)", text, re.MULTILINE)
    assert found == ["--max-num-seqs", "--max-num-batched-tokens", "--max-num-queued-reqs"]
    assert "default: 256" in text


def test_help_takes_no_argument_that_follows(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["generate", "--help", "all"], ["generate", "-h", "m"]):
        with pytest.raises(SystemExit) as ended:
            main(argv)
        assert ended.value.code == 0
        assert "--help=all: every flag in full" in capsys.readouterr().out
