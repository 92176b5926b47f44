"""Models in several GGUF files: they equal the model in one file, and a missing or wrong part is named."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import pytest
import torch
from checkpoints import make_checkpoint
from gguf_files import write_gguf, write_metadata
from specrs.backends.cpu.weights import load_native
from specrs.errors import CheckpointError
from specrs.models.gguf.checkpoint import gguf_path
from specrs.models.gguf.file import open_gguf
from specrs.models.loader import load_config
from specrs.models.quantization.table import method_of
from specrs.tokenizer import Tokenizer

from models.harness import Feeder

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("source"), "qwen3", vocab=400, layers=1)


@pytest.fixture
def parts(source: Path, tmp_path: Path) -> list[Path]:
    """The checkpoint in three files of at most five tensors."""
    first = write_gguf(source, tmp_path / "model-Q4_0.gguf", "Q4_0", tensors_in_a_part=5)
    found = sorted(first.parent.glob("*.gguf"))
    assert [path.name for path in found] == [f"model-Q4_0-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    return found


def logits(path: Path) -> torch.Tensor:
    return Feeder(load_native(path)).feed_chunks(TOKENS, [len(TOKENS)])


def test_parts_are_the_model_in_one_file(parts: list[Path], source: Path, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = write_gguf(source, tmp_path / "whole" / "model.gguf", "Q4_0")
    folder = parts[0].parent / "folder"
    folder.mkdir()
    for part in parts:
        shutil.copy(part, folder)
    for path in (parts[0], folder):
        assert torch.equal(logits(path), logits(whole))
        assert load_config(path) == load_config(whole)
        assert Tokenizer(str(path)).encode("a text") == Tokenizer(str(whole)).encode("a text")
        assert method_of(path, None) == "gguf"


def test_a_part_that_is_missing_is_named(parts: list[Path]) -> None:
    for number in (2, 3):
        moved = parts[number - 1].rename(parts[0].parent / "elsewhere")
        message = rf"^.*/{parts[number - 1].name}: is missing, part {number} of 3; put all parts into one folder$"
        for read in (load_config, load_native, lambda path: Tokenizer(str(path))):
            with pytest.raises(CheckpointError, match=message):
                read(parts[0])
        moved.rename(parts[number - 1])
    parts[0].unlink()
    with pytest.raises(CheckpointError, match=rf"^.*/{parts[0].name}: is missing, part 1 of 3"):
        load_config(parts[0].parent)


def test_a_part_that_is_not_the_first_is_named(parts: list[Path]) -> None:
    message = rf"^model='.*': is part 2 of 3; pass the first one: .*/{parts[0].name}$"
    with pytest.raises(CheckpointError, match=message):
        load_config(parts[1])


def test_parts_in_a_wrong_order(parts: list[Path]) -> None:
    other = parts[1].rename(parts[1].with_suffix(".other"))
    parts[2].rename(parts[1])
    other.rename(parts[2])
    with pytest.raises(CheckpointError, match=rf"^.*/{parts[1].name}: split\.no=2: must be 1, as its name and the oth"):
        load_native(parts[0])


@pytest.mark.parametrize(
    ("number", "field", "value", "message"),
    [
        (1, "split.count", 4, r"split\.count=4: must be 3"),
        (2, "split.count", None, r"split\.count=None: must be 3"),
        (3, "split.no", None, r"split\.no=None: must be 2"),
        (3, "split.no", "2", r"split\.no='2': must be 2"),
        (1, "split.tensors.count", 14, r"split\.tensors\.count=14: must be 13"),
        (3, "split.tensors.count", None, r"split\.tensors\.count=None: must be 13"),
    ],
)
def test_parts_that_do_not_belong_together(
    number: int, field: str, value: Any, message: str, parts: list[Path]
) -> None:
    rewrite(parts[number - 1], {field: value})
    with pytest.raises(CheckpointError, match=rf"^.*/{parts[number - 1].name}: {message}, as its name and the other p"):
        load_native(parts[0])


def test_a_tensor_in_two_parts(parts: list[Path]) -> None:
    again = gguf.GGUFReader(parts[0]).tensors[0].name
    rewrite(parts[2], {}, names={gguf.GGUFReader(parts[2]).tensors[0].name: again})
    with pytest.raises(CheckpointError, match=rf"^.*/{parts[2].name}: damaged: tensor '{again}' is in {parts[0].name}"):
        load_native(parts[0])


def test_a_truncated_part_is_named(parts: list[Path]) -> None:
    parts[1].write_bytes(parts[1].read_bytes()[:-40])
    with pytest.raises(CheckpointError, match=rf"^.*/{parts[1].name}: truncated"):
        load_config(parts[0])


def test_a_part_that_changes_is_read_again(parts: list[Path]) -> None:
    load_config(parts[0])
    parts[2].write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=rf"^.*/{parts[2].name}: truncated"):
        load_config(parts[0])


def test_one_part_of_one(tmp_path: Path) -> None:
    path = write_metadata(tmp_path / "model-00001-of-00001.gguf", {"split.count": 1, "split.no": 0})
    assert open_gguf(path).metadata["split.count"] == 1


def test_parts_of_the_hub_are_downloaded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"Q8_0/m-Q8_0-0000{i}-of-00002.gguf" for i in (1, 2)]
    files, downloaded = ["m-Q4_0.gguf", *names], []

    def download(repository: str, name: str, *, revision: str | None) -> str:
        downloaded.append(name)
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda repository, *, revision: files)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert gguf_path("a/b:Q8_0") == tmp_path / names[0]
    assert downloaded == names
    files.remove(names[1])
    with pytest.raises(CheckpointError, match=rf"^model='a/b:Q8_0': has 2 parts, and the repository lacks {names[1]}$"):
        gguf_path("a/b:Q8_0")
    assert downloaded == names


def rewrite(path: Path, fields: dict[str, Any], names: dict[str, str] | None = None) -> None:
    """Rewrite a part with other metadata (None leaves a field out) and other names of tensors."""
    read = gguf.GGUFReader(path)
    known = {name: field.contents() for name, field in read.fields.items() if not name.startswith("GGUF.")}
    tensors = [(tensor.name, tensor.data.copy(), tensor.tensor_type) for tensor in read.tensors]
    known |= fields
    writer = gguf.GGUFWriter(path, "qwen3")
    for name, value in known.items():
        if value is not None and name != "general.architecture":
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
            (writer.add_bool if isinstance(value, bool) else add[type(value)])(name, value)
    for name, data, kind in tensors:
        writer.add_tensor((names or {}).get(name, name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
