"""A config.json with odd values is rejected with file, field and value. Values that nothing reads may be odd."""

import os
from pathlib import Path
from typing import Any

import pytest
from checkpoints import edit_json
from specrs.config import EngineConfig
from specrs.engine.tokenizer import load_tokenizer
from specrs.errors import CheckpointError
from specrs.models.checkpoint import MAX_JSON
from specrs.models.loader import load_config
from tokenizer_files import copy_of_pair


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copy_of_pair(tmp_path / "model")


def refusal(folder: Path) -> str:
    """Return the error of an engine's start, which reads the tokenizer first, then the model's configuration."""

    def start() -> None:
        load_tokenizer(EngineConfig.from_kwargs(model=str(folder), speculative_config=None))
        load_config(folder)

    with pytest.raises(CheckpointError) as raised:
        start()
    return str(raised.value)


@pytest.mark.parametrize("value", [None, [], {}, "x", 1.5, True, [1], {"a": 1}], ids=repr)
@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads"])
def test_a_value_of_another_type_is_reported_with_file_and_field(folder: Path, field: str, value: Any) -> None:
    edit_json(folder / "config.json", **{field: value})
    told = refusal(folder)
    assert told.startswith(f"{folder}/config.json: {field}={value!r}: must be "), told


@pytest.mark.parametrize(("field", "value"), [("eos_token_id", "x"), ("dtype", []), ("head_dim", "x")])
def test_fields_that_may_be_missing_are_told_too(folder: Path, field: str, value: Any) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    edit_json(folder / "config.json", **{field: value})
    told = refusal(folder)
    assert told.startswith(f"{folder}/config.json: "), told
    assert field in told
    assert repr(value) in told


@pytest.mark.parametrize(("field", "value"), [("bos_token_id", [1]), ("initializer_range", []), ("head_dim", None)])
def test_fields_that_only_transformers_reads_may_be_odd(folder: Path, field: str, value: Any) -> None:
    edit_json(folder / "config.json", **{field: value})
    assert load_tokenizer(EngineConfig.from_kwargs(model=str(folder), speculative_config=None)) is not None
    load_config(folder)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["a pipe", "a device", "a long file"])
def test_what_is_no_file_of_a_config_is_not_read(folder: Path, kind: str) -> None:
    path = folder / "config.json"
    path.unlink()
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(MAX_JSON + 1)
    assert refusal(folder) == f"{path}: must be a regular file of at most 64 MiB"
