"""The file that each tensor is read from if index and files of a checkpoint disagree."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from hf_reference import load
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from specrs.errors import CheckpointError
from specrs.models.checkpoint import INDEX, SINGLE, Checkpoint
from specrs.models.generic_loader import load_generic
from specrs.models.torch_loader import load_model

from models.harness import Feeder

FILES = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
TOKENS = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("whole"), "llama", layers=1)


def logits(path: Path) -> torch.Tensor:
    return Feeder(load_model(path, dtype="float64")).feed_chunks(TOKENS, [len(TOKENS)])


def write(folder: Path, shards: dict[str, dict[str, torch.Tensor]], weight_map: dict[str, str]) -> Path:
    for file, tensors in shards.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.fixture
def shards(whole: Path, tmp_path: Path) -> tuple[Path, dict[str, dict[str, torch.Tensor]], dict[str, str]]:
    """A folder with the model in two files, their tensors, and their index."""
    folder = shutil.copytree(whole, tmp_path / "shards")
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    parts: dict[str, dict[str, torch.Tensor]] = {file: {} for file in FILES[:2]}
    for i, (name, value) in enumerate(sorted(tensors.items())):
        parts[FILES[i % 2]][name] = value
    return folder, parts, {name: file for file, names in parts.items() for name in names}


@pytest.mark.parametrize("stale", FILES[:2])
def test_the_index_decides_which_of_two_copies_is_read(stale: str, whole: Path, shards, caplog) -> None:  # type: ignore[no-untyped-def]
    """Check that of two copies of a tensor the one in the file that the index names is read, whichever file is opened
    last."""
    folder, parts, weight_map = shards
    other = FILES[0] if stale == FILES[1] else FILES[1]
    parts[stale] |= {name: value * 3 for name, value in parts[other].items()}
    write(folder, parts, weight_map)
    with caplog.at_level(logging.WARNING, "specrs"):
        assert torch.equal(logits(folder), logits(whole))
    assert "those copies are not read" in caplog.text


def test_tensors_that_the_index_does_not_list(whole: Path, shards, caplog) -> None:  # type: ignore[no-untyped-def]
    """Check tensors that the index does not list: they are read if the model has them, else ignored, as in
    transformers."""
    folder, parts, weight_map = shards
    parts[FILES[1]]["model.layers.7.left_over.weight"] = torch.ones(3)
    del weight_map["model.norm.weight"]
    write(folder, parts, weight_map)
    with caplog.at_level(logging.WARNING, "specrs"):
        found = logits(folder)
    assert "2 tensors (model.layers.7.left_over.weight, ...) are not in the index" in caplog.text
    assert torch.equal(found, logits(whole))
    with torch.inference_mode():
        reference = load(folder)(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(found, reference, rtol=0, atol=1e-11)
    weight_map["model.layers.7.left_over.weight"] = FILES[1]
    write(folder, parts, weight_map)
    with pytest.raises(CheckpointError, match=r"left_over\.weight is not part of this architecture"):
        load_model(folder)


@pytest.mark.parametrize("content", ["stale", "malformed", "other weights"])
def test_an_index_next_to_a_single_file_that_it_does_not_name(content: str, whole: Path, shards, caplog) -> None:  # type: ignore[no-untyped-def]
    """Check an index next to a single file that it does not name: the single file counts, as in transformers, whether
    the index's files exist or not."""
    folder, parts, weight_map = shards
    shutil.copy(whole / SINGLE, folder)
    if content == "other weights":
        write(
            folder, {file: {name: -value for name, value in part.items()} for file, part in parts.items()}, weight_map
        )
    else:
        (folder / INDEX).write_text("{" if content == "malformed" else json.dumps({"weight_map": weight_map}))
    with caplog.at_level(logging.WARNING, "specrs"):
        found = logits(folder)
    assert f"{INDEX} is not read, because {SINGLE} is there, too" in caplog.text
    assert torch.equal(found, logits(whole))
    with torch.inference_mode():
        reference = load(folder)(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(found, reference, rtol=0, atol=1e-11)


def test_an_index_that_names_the_single_file(whole: Path, shards) -> None:  # type: ignore[no-untyped-def]
    folder, parts, _ = shards
    names = {SINGLE: parts[FILES[0]], FILES[1]: parts[FILES[1]]}
    write(folder, names, {name: file for file, part in names.items() for name in part})
    assert torch.equal(logits(folder), logits(whole))


def test_one_file_of_another_name(whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = shutil.copytree(whole, tmp_path / "renamed")
    (folder / SINGLE).rename(folder / "gptq_model-4bit-128g.safetensors")
    save_file({"a": torch.ones(1)}, folder / "adapter_model.safetensors")
    with caplog.at_level(logging.WARNING, "specrs"):
        assert torch.equal(logits(folder), logits(whole))
    assert "gptq_model-4bit-128g.safetensors is read as model.safetensors, which is missing" in caplog.text
    save_file({"a": torch.ones(1)}, folder / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor .*index\.json is there"):
        load_model(folder)


def test_a_stale_copy_of_a_model_that_transformers_computes(shards) -> None:  # type: ignore[no-untyped-def]
    """Check that a checkpoint with a stale copy is rejected for models that transformers computes, because transformers
    reads the last copy."""
    folder, parts, weight_map = shards
    parts[FILES[1]] |= {name: value * 3 for name, value in parts[FILES[0]].items()}
    write(folder, parts, weight_map)
    with pytest.raises(CheckpointError, match=r"is in several of its files.*remove the copies that the index does not"):
        load_generic(folder, dtype="float32")


homes = st.tuples(st.integers(0, 2), st.sets(st.integers(0, 2)), st.sampled_from(["home", "absent", "elsewhere"]))


@settings(max_examples=60, deadline=None)
@given(tensors=st.lists(homes, min_size=1, max_size=5))
def test_any_disagreement_is_settled_or_named(
    tensors: list[tuple[int, set[int], str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Check that any disagreement between index and files is resolved or reported. For each tensor, `tensors` has the
    file of its true value, the files with stale copies, and the index's entry.

    The true value is read if the index names its file, or if there is no other copy. Otherwise nothing tells which copy
    is meant, and a model that needs the tensor is rejected with its name and files.
    """
    folder = tmp_path_factory.mktemp("any")
    parts: dict[str, dict[str, torch.Tensor]] = {file: {"filler": torch.zeros(1)} for file in FILES}
    weight_map = {f"listed.{file}": file for file in FILES}  # all three are opened
    for i, (home, copies, listed) in enumerate(tensors):
        held = {home, *copies}
        for file in held:
            parts[FILES[file]][f"t{i}"] = torch.tensor([i + 10.0 if file == home else -1.0])
        empty = [file for file in range(3) if file not in held]
        if listed == "home":
            weight_map[f"t{i}"] = FILES[home]
        elif listed == "elsewhere" and empty:
            weight_map[f"t{i}"] = FILES[empty[0]]
    checkpoint = Checkpoint(write(folder, parts, weight_map))
    for i, (home, copies, listed) in enumerate(tensors):
        if listed == "home" or copies <= {home}:
            checkpoint.check({f"t{i}": (1,)}, {}, [f"t{j}" for j in range(len(tensors))])
            assert checkpoint.mapped(f"t{i}").item() == i + 10
        else:
            with pytest.raises(CheckpointError, match=rf"t{i} is in model-.* and .*names none of them for it; list it"):
                checkpoint.check({f"t{i}": (1,)}, {})
