"""The model that a command answers with, and its drafter if none is named. No model is loaded."""

from pathlib import Path
from typing import Any

import pytest
import specrs.llm
from checkpoints import make_checkpoint
from mtp_reference import add_head
from specrs.cli import main
from specrs.cli.model_flags import DEFAULT_DRAFTS, DEFAULT_TEXT_DRAFTS
from specrs.config import EngineConfig
from specrs.errors import EngineError
from specrs.server import run

COMMANDS = [["serve"], ["chat"], ["generate", "--prompt", "x"]]
PAIR, TEXT, NONE = DEFAULT_DRAFTS, DEFAULT_TEXT_DRAFTS, None
STANDARD = {"rejection_sample_method": "standard"}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return a list that gets the arguments of each engine that a command would make."""
    seen: list[dict[str, Any]] = []

    def make(*_: Any, **settings: Any) -> None:
        seen.append(settings)
        raise EngineError("made")

    def serve(engine: dict[str, Any], _: object) -> int:
        seen.append(engine)
        return 0

    monkeypatch.setattr(specrs.llm, "LLM", make)
    monkeypatch.setattr(run, "run_server", serve)
    monkeypatch.setattr("specrs.cli.threads.set_torch_threads", lambda *_, **__: None)
    return seen


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize(
    ("argv", "model", "drafts"),
    [
        ([], None, PAIR),
        (["--no-speculation"], None, NONE),
        (["m/m"], "m/m", TEXT),
        (["--model", "m/m"], "m/m", TEXT),
        (["m/m", "--model", "m/m", "--speculation"], "m/m", TEXT),
        (["m/m", "--no-speculation"], "m/m", NONE),
        (["m/m", "--speculative-config.method=ngram"], "m/m", {"method": "ngram"}),
        (["--speculative-config.num_speculative_tokens=3"], None, {**PAIR, "num_speculative_tokens": 3}),
        (["--spec-model=d/d", "--spec-tokens=3"], None, {"model": "d/d", "num_speculative_tokens": 3}),
        (["m/m", "--spec-tokens", "3"], "m/m", {**TEXT, "num_speculative_tokens": 3}),
        (["m/m", "-sc", '{"rejection-sample-method": "standard"}'], "m/m", {**TEXT, **STANDARD}),
        (["m/m", "-sc", "{}"], "m/m", TEXT),
    ],
)
def test_the_model_and_what_drafts_for_it(
    made: list[dict[str, Any]], command: list[str], argv: list[str], model: str | None, drafts: dict[str, Any] | None
) -> None:
    main([*command, *argv])
    (settings,) = made
    assert settings["model"] == model
    assert settings.get("speculative_config") == drafts
    assert settings.get("dtype") == ("float32" if model is None else None)


@pytest.mark.parametrize("ahead", [["--max-steps-in-flight=2"], ["--async-scheduling"]], ids=" ".join)
def test_two_steps_in_flight_leave_no_drafts_from_the_text(made: list[dict[str, Any]], ahead: list[str]) -> None:
    """Check that with two steps in flight no drafts come from the text, unless the user asks for them, which the engine
    then rejects. The bundled draft model drafts in any case."""
    for argv in (["m/m"], [], ["m/m", "--speculation"], ["m/m", "--spec-tokens=3"]):
        main(["serve", *argv, *ahead])
    found = [settings.get("speculative_config") for settings in made]
    assert found == [NONE, PAIR, TEXT, {**TEXT, "num_speculative_tokens": 3}]


def test_the_mtp_head_of_a_target_drafts_too(made: list[dict[str, Any]], tmp_path: Path) -> None:
    """Check that the MTP head of a target drafts by default, unless the target is loaded in a way that leaves it
    out."""
    target = str(add_head(make_checkpoint(tmp_path / "target", "qwen3_5_text")))
    others = (["--max-steps-in-flight=2"], ["--no-speculation"], ["--load-format=dummy"], ["--spec-method=ngram"])
    for argv in (["--device=cuda"], [], *others):
        main(["serve", target, *argv])
    found = [settings.get("speculative_config") for settings in made]
    both = {"method": "suffix,mtp", **PAIR}
    assert found == [both, both, {"method": "mtp", **PAIR}, NONE, TEXT, {"method": "ngram"}]
    assert EngineConfig.from_kwargs(**made[1]).model == target


def test_a_number_of_drafts_alone_keeps_the_mtp_head(made: list[dict[str, Any]], tmp_path: Path) -> None:
    target = str(add_head(make_checkpoint(tmp_path / "target", "qwen3_5_text")))
    for argv in ([], ["--max-steps-in-flight=2"]):
        main(["serve", target, "--spec-tokens=3", *argv])
    configs = [EngineConfig.from_kwargs(**settings).speculative_config for settings in made]
    found = [(config.method, config.num_speculative_tokens) for config in configs if config is not None]
    assert found == [("suffix,mtp", 3), ("mtp", 3)]


@pytest.mark.parametrize("drafts", [PAIR, TEXT])
def test_default_drafts_are_chosen_by_the_engine_and_keep_the_text_of_a_seed(drafts: dict[str, str]) -> None:
    config = EngineConfig(model="m" if drafts is TEXT else None, speculative_config=drafts)  # type: ignore[arg-type]
    assert config.plans_speculation
    assert config.rule == "coupled"
    assert config.draft is None or drafts is PAIR


def test_a_program_drafts_only_if_it_says_so() -> None:
    assert EngineConfig.from_kwargs(model="m").speculative_config is None


@pytest.mark.parametrize("method", ["suffix", "ngram"])
def test_a_method_alone_is_enough(made: list[dict[str, Any]], method: str) -> None:
    main(["serve", "m/m", "--spec-method", method])
    config = EngineConfig.from_kwargs(**made[0])
    assert config.speculative_config is not None
    assert (config.speculative_config.method, config.plans_speculation) == (method, True)
