"""Every option has its flag in each command that it names, and no flag of an option is written by hand."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from specrs.cli import main, parser
from specrs.cli.arguments import spell
from specrs.cli.model_flags import DEFAULT_TEXT_DRAFTS
from specrs.config import EngineConfig
from specrs.engine_options import EngineOptions
from specrs.kv_events_config import KVEventsConfig
from specrs.options import Choice, Integer, ListOf, Number, Option, Settings, Switch, Text, options_of
from specrs.sampling import SamplingParams
from specrs.server import run
from specrs.server.limits import HTTPLimits
from specrs.server.options import ServerOptions
from specrs.speculative_config import SpeculativeConfig

from .test_help import COMMANDS

WORDS = {
    "serve": ["serve"],
    "chat": ["chat"],
    "generate": ["generate"],
    "bench": ["bench throughput", "bench latency", "bench acceptance"],
    "bench serve": ["bench serve"],
    "advise": ["advise"],
    "demo": ["demo"],
    "forecast": ["forecast"],
    "tune": ["tune"],
}
"""Words with which each command is called on the command line, by the name that declarations give to the command."""
NO_FLAG = {"model": "MODEL of serve, whose --model is the same"}
"""Options of an engine for which `specrs serve` has no derived flag, with the reason or the flag that replaces it."""
BY_HAND = {
    **{(name, "--model"): "the positional MODEL has the help" for name in ("serve", "chat", "generate")},
    ("chat", "--chat-template"): "of a conversation in the terminal",
    ("demo", "--model"): "defaults of a command that compares drafters",
    ("forecast", "--model"): "the help says what --measure and --target-ms do with it",
    ("bench serve", "--model"): "a name that a server lists",
    ("convert-head", "--revision"): "of a head",
    ("tune", "--model"): "several models, of which config.json is read",
    **{("bench serve", flag): "of the server that is measured" for flag in ("--host", "--port", "--served-model-name")},
    ("bench sweep", "--port"): "of the servers that are started",
    ("demo", "--speculative-config"): "without K, which comes from --k",
    ("forecast", "--speculative-config"): "without K, which comes from --k",
    ("tune", "--dtype"): "of a GPU, without float64",
    ("forecast", "--kv-cache-dtype"): "of a computed model in bf16",
    ("advise", "--quantization"): "a list of types to compare",
    ("forecast", "--quantization"): "of a computed model, at load",
    **{(f"bench {kind}", "--seed"): "of prompts" for kind in ("serve", "throughput", "latency", "acceptance", "sweep")},
    **{(name, "--max-tokens"): "per prompt" for name in ("advise", "demo", "forecast")},
    **{(f"bench {kind}", "--temperature"): "a list" for kind in ("acceptance", "sweep")},
}
"""Flags that have the name of an option and are not derived from it, and why."""
OTHERS_DEFAULTS = {"bench serve": "the server's", "chat": "the checkpoint's, for sampling"}
"""Commands whose flags have other defaults than the options declare, with the source of these defaults."""
OWNERS: tuple[type, ...] = (EngineOptions, SamplingParams, ServerOptions, HTTPLimits)


def flag_of(command: str, declared: Option) -> argparse.Action:
    return COMMANDS[command]._option_string_actions[declared.flag]


def cases(*owners: type) -> list[Any]:
    return [
        pytest.param(words, declared, id=f"{words} {declared.flag}")
        for owner in owners
        for declared in options_of(owner).values()
        for command in declared.commands
        for words in WORDS[command]
        if not (declared.flag == "--spec-tokens" and has(words, "--k"))
    ]


def has(command: str, flag: str) -> bool:
    return flag in COMMANDS[command]._option_string_actions


@pytest.mark.parametrize(("command", "declared"), cases(*OWNERS, SpeculativeConfig))
def test_every_command_has_the_flags_that_options_name(command: str, declared: Option) -> None:
    """The help states the allowed values, and the default unless the command has another."""
    action = flag_of(command, declared)
    text = str(action.help).replace("%%", "%")
    assert text.startswith(declared.help)
    assert declared.values.allowed() in text
    if action.default is None and command not in OTHERS_DEFAULTS:
        assert f"default: {declared.default_text}" in text
    assert declared.short is None or declared.short in action.option_strings


@pytest.mark.parametrize("declared", options_of(EngineConfig).values(), ids=lambda declared: declared.name)
def test_every_option_of_an_engine_has_a_flag_in_serve(declared: Option) -> None:
    assert ("serve" in declared.commands) != (declared.name in NO_FLAG)


SPECULATING = [name for name in COMMANDS if has(name, "--speculative-config")]


@pytest.mark.parametrize("command", SPECULATING)
def test_flags_of_drafting_set_keys_of_the_speculative_config(command: str) -> None:
    """Every command with --speculative-config has the short flags, whose later value counts."""
    flags = ["--spec-model", "d", "-sc.max-model-len=9", "--spec-method", "eagle3", "--spec-method", "suffix"]
    expected: dict[str, Any] = {"model": "d", "max_model_len": 9, "method": "suffix"}
    if not has(command, "--k"):
        flags += ["--spec-tokens", "auto"]
        expected["num_speculative_tokens"] = "auto"
    assert parser().parse_args(spell([*command.split(), *flags])).speculative_config == expected


@pytest.mark.parametrize("command", [name for name in COMMANDS if has(name, "--k") or name in SPECULATING])
def test_every_command_that_drafts_has_the_flag_of_k(command: str) -> None:
    """--spec-tokens is the name of the flag in every command, and --k a second one of commands with several K."""
    actions = COMMANDS[command]._option_string_actions
    assert actions.get("--k", actions["--spec-tokens"]) is actions["--spec-tokens"]


def test_a_list_of_k_has_two_names() -> None:
    for flag in ("--k", "--spec-tokens", "--spec_tokens"):
        assert parser().parse_args(spell(["bench", "acceptance", flag, "2,4"])).k == [2, 4]


@pytest.mark.parametrize("command", SPECULATING)
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--spec-method=ngram", "-sc.method=suffix"],
            "{sc}.method='suffix': contradicts --spec-method='ngram'; leave",
        ),
        (
            ["-sc.method=suffix", "--spec-method=ngram"],
            "--spec-method='ngram': contradicts {sc}.method='suffix'; leave",
        ),
        (
            ["--spec-model", "a", "--speculative-config", '{"method": "mtp", "model": "b"}'],
            "{sc}.model='b': contradicts --spec-model='a'; leave one of them out",
        ),
    ],
)
def test_two_flags_that_contradict_each_other(
    command: str, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*command.split(), *flags])
    assert stopped.value.code == 2
    assert f"error: {message.format(sc='--speculative-config')}" in capsys.readouterr().err


def test_flags_that_agree_do_not_contradict_each_other() -> None:
    flags = ["--spec-tokens=3", "-sc", '{"num-speculative-tokens": 3}', "-sc.method=suffix", "-sc.method=ngram"]
    read = parser().parse_args(spell(["generate", *flags])).speculative_config
    assert read == {"num_speculative_tokens": 3, "method": "ngram"}


@pytest.mark.parametrize("command", [f"{name} --measure" if name == "forecast" else name for name in SPECULATING
                                     if has(name, "--k")])  # fmt: skip
@pytest.mark.parametrize("key", ["num_speculative_tokens", "num-speculative-tokens"])
def test_k_comes_from_one_flag(command: str, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--speculative-config", json.dumps({key: 3})]) == 2
    assert "--speculative-config.num_speculative_tokens=3: must come from --k" in capsys.readouterr().err


def test_a_forecast_has_one_draft_model(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--spec-model", "--speculative-config.model"):
        assert main(["forecast", "--measure", "--draft-model", "a", flag, "b"]) == 2
        assert f"--draft-model='a': contradicts {flag}='b'; leave one of them out" in capsys.readouterr().err


def test_no_flag_of_an_option_is_written_by_hand() -> None:
    known: dict[str, tuple[str, ...]] = {}
    for declared in (declared for owner in OWNERS for declared in options_of(owner).values()):
        known[declared.flag] = (*known.get(declared.flag, ()), declared.help_text(stated=""))
    found = {
        (command, flag)
        for command, made in COMMANDS.items()
        for flag, action in made._option_string_actions.items()
        if flag in known and action.help != argparse.SUPPRESS and not str(action.help).startswith(known[flag])
    }
    assert found == BY_HAND.keys()


def given(declared: Option) -> Any:
    """Return a value that is allowed and is not the default."""
    match declared.values:
        case Integer(power_of_two=True):
            return 32
        case Integer(low=low):
            return low if declared.default != low else low + 1
        case Number(low=low):
            return low + 0.5
        case Switch():
            return not declared.default
        case Choice(names=names):
            return names[-1]
        case ListOf():
            return [1, 2]
        case Settings(made=made):
            return {"method": "ngram", "num_speculative_tokens": 2} if made is SpeculativeConfig else {"topic": "x"}
        case Text():
            return "some/name"
        case _:
            return {"device": "cuda:1"}[declared.name]


SERVED = [declared for declared in options_of(EngineOptions).values() if "serve" in declared.commands]


@pytest.mark.parametrize("way", ["flag", "file"])
@pytest.mark.parametrize("declared", SERVED, ids=lambda declared: declared.name)
def test_flags_and_keys_of_the_file_reach_the_engine(
    declared: Option, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flag or a file of flags gives an option the same value as a keyword argument does."""
    made: list[dict[str, Any]] = []

    def serve(engine: dict[str, Any], settings: object) -> int:
        made.append(engine)
        return 0

    monkeypatch.setattr(run, "run_server", serve)
    monkeypatch.setattr("specrs.cli.threads.set_torch_threads", lambda *_, **__: None)
    value = given(declared)
    if way == "file":
        path = tmp_path / "flags.yaml"
        path.write_text(yaml.safe_dump({declared.flag.removeprefix("--"): value}))
        argv = ["--config", str(path)]
    else:
        texts = [str(one) for one in value] if isinstance(value, list) else [
            json.dumps(value) if isinstance(value, dict) else str(value)
        ]  # fmt: skip
        argv = [declared.flag, *texts]
    assert main(["serve", *argv, "--model", "m"]) == 0
    name = declared.name
    drafts = {} if value == 2 and name == "max_steps_in_flight" else {"speculative_config": DEFAULT_TEXT_DRAFTS}
    assert made[0] == {"model": "m", **drafts, name: value}
    assert declared.check(ValueError, name, made[0][name]) == declared.check(ValueError, name, value)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", options_of(KVEventsConfig))
def test_keys_of_nested_settings_are_flags(name: str) -> None:
    read = parser().parse_args(spell(["serve", f"--kv-events-config.{name.replace('_', '-')}=7"]))
    assert read.kv_events_config == {name: 7}
