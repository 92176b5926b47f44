"""The tensors of a GGUF file under the names of a checkpoint of transformers, and where such a file is. Builds no
model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from specrs.arrays import Array
from specrs.errors import CheckpointError, UnsupportedModelError, invalid
from specrs.models.checkpoint import check_tensors
from specrs.models.config import ModelConfig, parse_config
from specrs.models.gguf.blocks import GROUPED
from specrs.models.gguf.config import ROPE_FACTORS, architecture_of, checkpoint_name, raw_config
from specrs.models.gguf.file import GGUFFile, TensorInfo, dequantize, open_gguf
from specrs.models.gguf.types import PLAIN
from specrs.models.hub import hub_error
from specrs.models.quantization.base import QuantizedTensors, bits_of
from specrs.models.quantization.grouped import Grouped
from specrs.models.stored import Codes


def gguf_path(source: str | Path, revision: str | None = None) -> Path | None:
    """The file that `source` names: its path, a folder whose weights are one GGUF file, or `owner/name:TYPE`, whose one
    file of that type is downloaded.

    None for what is no GGUF file. Raises CheckpointError if there is none, or several.
    """
    path, text = Path(source), str(source)
    if path.is_dir():
        return _only_file(path, revision)
    if path.suffix == ".gguf" and path.is_file():
        if revision is not None:
            raise invalid(CheckpointError, "revision", revision, f"must be None, because {path} is a file")
        return path
    repository, colon, kind = text.rpartition(":")
    if not colon or isinstance(source, Path) or repository.count("/") != 1 or "/" in kind or path.exists():
        return None
    if not kind:
        raise invalid(CheckpointError, "model", text, "must name a type behind the colon, as owner/name:Q4_K_M")
    try:
        return _hub_file(repository, revision, f"{kind}.gguf", text)
    except CheckpointError:
        raise
    except Exception as fault:
        raise hub_error(fault, text, repository, revision) from fault


def _only_file(folder: Path, revision: str | None) -> Path | None:
    """The GGUF file of a folder without safetensors; None if there is none, or a `revision`, which no folder has.

    Raises CheckpointError that names the files if there are several.
    """
    files = sorted(folder.glob("*.gguf"))
    if not files or revision is not None or any(folder.glob("*.safetensors*")):
        return None
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        reason = f"holds several GGUF files; name one of them, for example {files[0]}: {names}"
        raise invalid(CheckpointError, "model", str(folder), reason)
    return files[0]


def _hub_file(repository: str, revision: str | None, ending: str, text: str) -> Path:
    """The one file with this `ending`; counted before it is downloaded, because each may take gigabytes. Where the hub
    cannot be asked, that in its cache.

    Raises CheckpointError for `text` if there is none or several, and what the hub raises.
    """
    import huggingface_hub

    folder, where = None, "the repository"
    try:
        files = huggingface_hub.list_repo_files(repository, revision=revision)
    except Exception as fault:
        try:
            folder = Path(huggingface_hub.snapshot_download(repository, revision=revision, local_files_only=True))
        except Exception:
            raise fault from fault.__cause__  # `from None` would drop it, and it tells what happened
        files = [str(path.relative_to(folder)) for path in folder.rglob("*")]
        where = f"what is here of the repository, which could not be asked ({type(fault).__name__})"
    found = sorted(file for file in files if file.endswith(ending))
    if len(found) != 1:
        names = ", ".join(found) or "none"
        raise invalid(CheckpointError, "model", text, f"must name one file *{ending} of {where}, found: {names}")
    if folder is not None:
        return folder / found[0]
    return Path(huggingface_hub.hf_hub_download(repository, found[0], revision=revision))


def gguf_config(path: Path) -> ModelConfig:
    """The configuration in the file. Raises CheckpointError, or UnsupportedModelError for what is not implemented."""
    try:
        return parse_config(raw_config(open_gguf(path)))
    except CheckpointError as fault:
        raise type(fault)(str(fault).replace("config.json", str(path), 1)) from fault


class GGUFCheckpoint(QuantizedTensors):
    """The tensors of one file. Blocks stay in the file until they are asked for."""

    def __init__(self, path: Path) -> None:
        """Read the header. Raises as `open_gguf`."""
        self.folder = path
        self.file: GGUFFile = open_gguf(path)
        self._names = {checkpoint_name(name): name for name in self.file.tensors if name != ROPE_FACTORS}
        self._heads: dict[str, int] = {}
        if architecture_of(self.file).interleaved:
            raw = raw_config(self.file)
            self._heads = {"q_proj": raw["num_attention_heads"], "k_proj": raw["num_key_value_heads"]}

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def check(self, required: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]]) -> None:
        """See `QuantizedTensors`; types without numbers are refused by name."""
        shapes = {name: self._info(name).shape for name in self._names}
        check_tensors(self.folder, shapes, required, optional)
        for kind in {self._info(name).kind for name in self._names} - {*PLAIN, *GROUPED}:
            block = next(info.block for info in self.file.tensors.values() if info.kind == kind)
            try:
                dequantize(np.zeros((1, block[1]), np.uint8), kind, self.folder)
            except UnsupportedModelError:
                raise
            except (NotImplementedError, ValueError):
                name = next(name for name in self._names if self._info(name).kind == kind)
                reason = f"{self.folder}: {name} is of type {kind}: not implemented by the package gguf"
                raise UnsupportedModelError(reason) from None

    def is_quantized(self, name: str) -> bool:
        """See `QuantizedTensors`."""
        return self._info(name).kind not in PLAIN

    def mapped(self, name: str) -> Array:
        """See `QuantizedTensors`."""
        numbers = self.file.numbers(self._names[name])
        order = self._order(name)
        return numbers if order is None else numbers[order]

    def codes(self, name: str) -> Codes | None:
        """See `QuantizedTensors`: of types that are a code times a scale."""
        grouped = self.raw(name)
        return None if grouped is None else grouped.codes()

    def coded_bits(self, name: str) -> int | None:
        """See `QuantizedTensors`."""
        kinds = {"Q4_0": ("int4", "int8"), "Q8_0": ("int8",), "Q6_K": ("int8",)}.get(self._info(name).kind, ())
        return bits_of(kinds, 16 if self._info(name).kind == "Q6_K" else 32, self._info(name).shape[1])

    def raw(self, name: str) -> Grouped | None:
        """See `QuantizedTensors`, and `codes`."""
        kind, blocks = self._info(name).kind, self.file.blocks(self._names[name])
        if kind not in GROUPED:
            return None
        order = self._order(name)
        grouped = GROUPED[kind](blocks)
        if not np.isfinite(grouped.scales).all():
            self.file.numbers(self._names[name])  # raises, and says where
        if order is not None:
            grouped = Grouped(grouped.values[order], grouped.scales[order])
        return grouped

    def _info(self, name: str) -> TensorInfo:
        return self.file.tensors[self._names[name]]

    def _order(self, name: str) -> Array | None:
        """Where rows of q and k are that rotate neighbours: in pairs by head; here the halves are apart."""
        heads = self._heads.get(name.split(".")[-2])
        if heads is None:
            return None
        rows = self._info(name).shape[0]
        return np.arange(rows).reshape(heads, rows // heads // 2, 2).transpose(0, 2, 1).reshape(-1)
