"""The tensors of a GGUF file under the names of a checkpoint of transformers, and where such a file is. Builds no
model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from specrs.arrays import Array
from specrs.core import InvalidBufferError, PackedMatrix
from specrs.errors import CheckpointError, UnsupportedModelError, invalid
from specrs.kernels.coding import Coding
from specrs.models.checkpoint import check_tensors
from specrs.models.config import ModelConfig, parse_config
from specrs.models.gguf.architectures import architecture_of
from specrs.models.gguf.blocks import CODINGS, GROUPED, SUPER_BLOCKS, WITH_MINIMA, e2m1
from specrs.models.gguf.config import raw_config
from specrs.models.gguf.file import GGUFFile, TensorInfo, dequantize, open_gguf
from specrs.models.gguf.names import places
from specrs.models.gguf.splits import first_parts, part_names, whole_name
from specrs.models.gguf.types import PLAIN
from specrs.models.hub import hub_error
from specrs.models.quantization.base import QuantizedTensors, coding_of
from specrs.models.quantization.grouped import E2M1, LARGEST_EXPONENT, Grouped, Raw, WithMinima
from specrs.models.wrappers import is_of_mtp_head, log_mtp_head


def gguf_path(source: str | Path, revision: str | None = None) -> Path | None:
    """Return the GGUF file that `source` names: a file, a folder whose weights are one GGUF file, or `owner/name:TYPE`,
    whose one file of that type is downloaded. For a model in several files, return the first; all are downloaded.

    None for other sources. Raises CheckpointError if a repository has no file of the type, if there are several, or for
    a `revision` of a file.
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
        raise invalid(CheckpointError, "model", text, "must name a type after the colon, as owner/name:Q4_K_M")
    try:
        return _hub_file(repository, revision, f"{kind}.gguf", text)
    except CheckpointError:
        raise
    except Exception as fault:
        raise hub_error(fault, text, repository, revision) from fault


def _only_file(folder: Path, revision: str | None) -> Path | None:
    """Return the GGUF file of a folder. None if it has none, if it has safetensors, or with a `revision`, which no
    folder has.

    Raises CheckpointError that names the files if there are several.
    """
    files = first_parts([file.name for file in folder.glob("*.gguf")])
    if not files or revision is not None or any(folder.glob("*.safetensors*")):
        return None
    if len(files) > 1:
        reason = f"holds several GGUF files; name one of them, for example {folder / files[0]}: {', '.join(files)}"
        raise invalid(CheckpointError, "model", str(folder), reason)
    return folder / files[0]


def _hub_file(repository: str, revision: str | None, ending: str, text: str) -> Path:
    """Return the one file with this `ending`, or the first part of the one model whose part files have it before their
    numbers. Files are counted before any is downloaded, because each may take gigabytes. If the hub cannot be asked,
    the file is taken from its cache.

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
    found = [file for file in first_parts(files) if whole_name(file).endswith(ending)]
    if len(found) != 1:
        names = ", ".join(found) or "none"
        raise invalid(CheckpointError, "model", text, f"must name one file *{ending} of {where}, found: {names}")
    parts = part_names(found[0])
    missing = [part for part in parts if part not in files]
    if missing:
        raise invalid(CheckpointError, "model", text, f"has {len(parts)} parts, and {where} lacks {missing[0]}")
    if folder is not None:
        return folder / parts[0]
    first, *_ = [Path(huggingface_hub.hf_hub_download(repository, part, revision=revision)) for part in parts]
    return first


def gguf_config(path: Path) -> ModelConfig:
    """Return the configuration in the file. Raises CheckpointError, or UnsupportedModelError for what is not
    implemented."""
    try:
        config = parse_config(raw_config(open_gguf(path)))
    except CheckpointError as fault:
        raise type(fault)(str(fault).replace("config.json", str(path), 1)) from fault
    if config.delta is not None:
        turned = architecture_of(open_gguf(path)).delta_net == "turned"
        config = replace(config, delta=replace(config.delta, turned=turned, by_key_head=False))
    # Files hold the sum of a norm's weights and its offset, in fp32 as the passes compute it.
    return replace(config, norm_offset=0.0)


class GGUFCheckpoint(QuantizedTensors):
    """The tensors of one file, or of one model in several. Blocks stay in the file until they are asked for."""

    def __init__(self, path: Path, *, mtp_head: bool = False) -> None:
        """Read the header. With `mtp_head`, the tensors are those of the file's MTP head, else those of the model
        without it. Raises what `open_gguf` and `gguf_config` raise."""
        self.folder = path
        self.file: GGUFFile = open_gguf(path)
        found = places(self.file, architecture_of(self.file), gguf_config(path))
        self._places = {name: place for name, place in found.items() if is_of_mtp_head(name) == mtp_head}
        if not mtp_head and len(self._places) < len(found):
            log_mtp_head(path, len(found) - len(self._places))

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._places)

    def check(self, required: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]]) -> None:
        """Check that exactly the `required` tensors, and perhaps `optional` ones, are there in their shapes.

        Raises CheckpointError that names the tensors, UnsupportedModelError for a type that nothing here dequantizes.
        """
        shapes = {name: place.shape for name, place in self._places.items()}
        check_tensors(self.folder, shapes, required, optional)
        for kind in {self._info(name).kind for name in shapes} - {*PLAIN, *GROUPED, *PackedMatrix.KINDS}:
            block = next(info.block for info in self.file.tensors.values() if info.kind == kind)
            try:
                dequantize(np.zeros((1, block[1]), np.uint8), kind, self.folder)
            except UnsupportedModelError:
                raise
            except (NotImplementedError, ValueError):
                name = next(name for name in shapes if self._info(name).kind == kind)
                reason = f"{self.folder}: {name} is of type {kind}: not implemented by the package gguf"
                raise UnsupportedModelError(reason) from None

    def is_quantized(self, name: str) -> bool:
        """Return whether the file stores `name` in quantized blocks."""
        return self._info(name).kind not in PLAIN

    def mapped(self, name: str) -> Array:
        """Return one tensor, with its rows in the order of transformers' checkpoints.

        Numbers keep the file's dtype; quantized blocks are dequantized to float32 by each call. Raises what
        `GGUFFile.numbers` raises, and CheckpointError if numbers that are computed from the file's are not finite.
        """
        place, info = self._places[name], self._info(name)
        numbers = self.file.numbers(place.name, self._rows(name))
        numbers = numbers.reshape(info.shape if place.expert is None else info.shape[1:])
        if place.rows is not None:
            numbers = numbers[place.rows]
        if place.computed is not None:
            computed = place.computed(numbers)
            wrong = ~np.isfinite(computed)
            if wrong.any():
                raise CheckpointError(f"{self.folder}: {place.name}: {numbers[wrong][0]:g} must be finite and below 0")
            numbers = computed
        return numbers.reshape(place.shape)

    def packed(self, name: str) -> PackedMatrix | None:
        """Return the matrix `name` packed for a CPU; None for types that have no packed layout.

        Releases the file's pages from memory. Raises CheckpointError for a scale that is not finite.
        """
        kind, tensor, rows = self._info(name).kind, self._places[name].name, self._rows(name)
        if kind not in PackedMatrix.KINDS:
            return None
        order, blocks = self._places[name].rows, self.file.blocks(tensor)[rows]
        if order is not None and len(order) < len(blocks):
            order, blocks = None, blocks[order]
        try:
            made = PackedMatrix(kind, blocks, order)
        except InvalidBufferError:
            self.file.numbers(tensor, rows)  # raises, and says where
            raise
        self.file.release(tensor, rows)
        return made

    def coding(self, name: str) -> Coding | None:
        """Return the layout in which GPU kernels read the matrix `name`. None: they read it dequantized. Reads no
        blocks."""
        kind, size = self._info(name).kind, self._places[name].shape[1]
        if kind in WITH_MINIMA:
            coding = WITH_MINIMA[kind][1]
            return coding if coding.unit(size) else None
        kinds, group = CODINGS.get(kind, ((), 32))
        return coding_of(kinds, group, size)

    def packed_bits(self, name: str) -> float:
        """Return the bits per weight of the tensor's type."""
        numbers, num_bytes = self._info(name).block
        return 8 * num_bytes / numbers

    def raw(self, name: str) -> Raw | None:
        """Return the codes, scales and minima of `name`; None for types that no class of `Raw` holds.

        Raises CheckpointError for a scale that is not finite.
        """
        kind, rows = self._info(name).kind, self._rows(name)
        if kind not in GROUPED and kind not in WITH_MINIMA:
            return None
        order = self._places[name].rows
        if kind in WITH_MINIMA:
            return self._with_minima(name, WITH_MINIMA[kind][0])
        if kind == "MXFP4":
            codes = e2m1(self.file.blocks(self._places[name].name)[rows])
            if (codes.exponents > LARGEST_EXPONENT).any():
                self.file.numbers(self._places[name].name, rows)  # raises, and says where
            return codes if order is None else E2M1(codes.codes[order], codes.exponents[order])
        grouped = GROUPED[kind](self.file.blocks(self._places[name].name)[rows])
        if not np.isfinite(grouped.scales).all():
            self.file.numbers(self._places[name].name, rows)  # raises, and says where
        if order is not None:
            grouped = Grouped(grouped.values[order], grouped.scales[order])
        return grouped

    def super_blocks(self, name: str) -> WithMinima | None:
        """Return the matrix `name` as super-blocks, whose minima may be 0; None for other types. Raises CheckpointError
        for a scale that is not finite."""
        kind = self._info(name).kind
        return self._with_minima(name, SUPER_BLOCKS[kind]) if kind in SUPER_BLOCKS else None

    def super_group(self, name: str) -> int | None:
        """Return the number of inputs of a group of `super_blocks`. None if that returns None. Reads no blocks."""
        kind = self._info(name).kind
        if kind not in SUPER_BLOCKS:
            return None
        return WITH_MINIMA[kind][1].group if kind in WITH_MINIMA else CODINGS[kind][1]

    def _with_minima(self, name: str, split: Callable[[Array], WithMinima]) -> WithMinima:
        place, rows = self._places[name], self._rows(name)
        made = split(self.file.blocks(place.name)[rows])
        if not (np.isfinite(made.scales).all() and np.isfinite(made.minima).all()):
            self.file.numbers(place.name, rows)  # raises, and says where
        return made if place.rows is None else made.in_order(place.rows)

    def _info(self, name: str) -> TensorInfo:
        return self.file.tensors[self._places[name].name]

    def _rows(self, name: str) -> slice:
        """Return the rows of the file's tensor that `name` has: all of them, or its expert's."""
        expert = self._places[name].expert
        if expert is None:
            return slice(None)
        rows = math.prod(self._info(name).shape[1:-1])
        return slice(expert * rows, (expert + 1) * rows)
