"""How `specrs serve` reads several models: from MODELs and from the list of `--models`. Serves nothing."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from specrs.cli import main
from specrs.cli.model_flags import DEFAULT_DRAFTS, DEFAULT_TEXT_DRAFTS
from specrs.server import run
from specrs.server.run import ModelSettings, ServerSettings
from specrs.server.tools import ToolSettings

Seen = list[tuple[Sequence[ModelSettings], ServerSettings, int | None]]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Return models and settings that `specrs serve` hands to the server, which is not started."""
    seen: Seen = []

    def serve(models: Sequence[ModelSettings], settings: ServerSettings, memory_bytes: int | None) -> int:
        seen.append((models, settings, memory_bytes))
        return 0

    monkeypatch.setattr(run, "run_models", serve)
    return seen


def test_models_on_the_command_line(served: Seen) -> None:
    flags = ["--port", "0", "A", "B/C", "--max-model-len", "100", "--models-memory-bytes", "2K"]
    assert main(["serve", *flags]) == 0
    ((models, settings, memory),) = served
    common = {"max_model_len": 100, "speculative_config": DEFAULT_TEXT_DRAFTS}
    assert [(model.name, model.engine) for model in models] == [
        ("A", {"model": "A", **common}),
        ("B/C", {"model": "B/C", **common}),
    ]
    assert (settings.port, memory) == (0, 2048)
    assert [model.server.served_model_names for model in models] == [("A",), ("B/C",)]


def test_models_in_a_file(served: Seen, tmp_path: Path) -> None:
    """Check a list of models in a file: options of a model take precedence over options for all models."""
    path = tmp_path / "specrs.yaml"
    path.write_text(
        """
models-memory-bytes: 1G
max-model-len: 100
reasoning-parser: qwen3
models:
  - name: small
    model: A
    kv-cache-memory-bytes: 3K
    max_model_len: 50
    speculative-config: {method: ngram, num_speculative_tokens: 3}
  - model: B
    speculation: false
    tool-call-parser: hermes
    enable-auto-tool-choice: true
    reasoning-parser: deepseek_r1
  - {}
"""
    )
    assert main(["serve", "--config", str(path), "--max-num-seqs", "7"]) == 0
    ((models, _, memory),) = served
    assert memory == 1 << 30
    assert [model.name for model in models] == ["small", "B", "bundled"]
    small, other, bundled = (model.engine for model in models)
    assert small == {
        "model": "A",
        "kv_cache_memory_bytes": 3072,
        "max_model_len": 50,
        "max_num_seqs": 7,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    }
    assert other == {"model": "B", "max_model_len": 100, "max_num_seqs": 7}
    assert (bundled["model"], bundled["dtype"], bundled["speculative_config"]) == (None, "float32", DEFAULT_DRAFTS)
    assert [model.server.tools for model in models] == [
        ToolSettings(tool_parser="auto", reasoning_parser="qwen3"),
        ToolSettings(auto_choice=True, tool_parser="hermes", reasoning_parser="deepseek_r1"),
        ToolSettings(tool_parser="auto", reasoning_parser="qwen3"),
    ]


@pytest.mark.parametrize(
    ("flags", "drafts"),
    [
        ([], [None, {"method": "ngram"}, DEFAULT_TEXT_DRAFTS]),
        (["--no-speculation"], [None, {"method": "ngram"}, None]),
        (["--spec-tokens=3"], [None, {"method": "ngram"}, {**DEFAULT_TEXT_DRAFTS, "num_speculative_tokens": 3}]),
    ],
    ids=["by default", "off", "three drafts"],
)
def test_drafting_of_a_model_takes_precedence_over_that_of_all(
    served: Seen, flags: list[str], drafts: list[dict[str, object] | None]
) -> None:
    models = ['{"model": "A", "speculation": false}', '{"model": "B", "speculative_config": {"method": "ngram"}}']
    assert main(["serve", "--models", *models, '{"model": "C"}', *flags]) == 0
    ((found, _, _),) = served
    assert [model.engine.get("speculative_config") for model in found] == drafts


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["A", "B", "--model", "C"], "--model='C': must be left out with several MODELs"),
        (["A", "A"], "--models='A': must be the name of one model only"),
        (["A", "--models", '{"model": "B"}'], "contradicts MODEL=A; add it to the list"),
        (["--models", '{"model": "B"}', "--model=A"], "contradicts MODEL=A; add it to the list"),
        (["--models", '{"modle": "B"}'], "--models='modle': unknown key of a model; did you mean model?"),
        (["--models", '{"name": 1}'], "--models=1: must be a name"),
        (["--models", "B"], "--models[0]='B': must be a dictionary, such as"),
        (
            ["--models", '{"model": "B", "speculation": false, "speculative-config": {"method": "ngram"}}'],
            "--models[].speculative_config={'method': 'ngram'}: contradicts speculation=False of 'B'; leave one of",
        ),
        (["--models", '{"speculation": "off"}'], "--models[].speculation='off': must be True or False"),
        (["A", "B", "--no-speculation", "--spec-tokens=3"], "--spec-tokens=3: contradicts --no-speculation; leave one"),
        (["A", "B", "--served-model-name", "x"], "--served-model-name=('x',): not implemented with several models"),
        (["A", "B", "--enable-lora", "--lora-modules", "x=y"], "--lora-modules=('x=y',): not implemented"),
        (["A", "--models-memory-bytes", "5"], "--models-memory-bytes=5: needs several MODELs or --models"),
    ],
)
def test_lists_that_are_rejected(
    served: Seen, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert main(["serve", *argv]) == 2
    assert message in capsys.readouterr().err
    assert served == []


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"model": "A", "tensor_parallel_size": 2}, "tensor_parallel_size=2: must be 1 with several models"),
        ({"model": "A", "block_size": 3}, "block_size=3: must be a power of two"),
    ],
)
def test_settings_are_checked_before_anything_is_served(engine: dict[str, object], message: str) -> None:
    from specrs.errors import InvalidConfigError

    model = ModelSettings(name="A", engine=engine, server=ServerSettings(served_model_names=("A",)))
    with pytest.raises(InvalidConfigError, match=message):
        run.run_models([model], model.server, None)
