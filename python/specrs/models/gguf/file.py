"""Reads GGUF files: the metadata of a model, and where its tensors lie, in one file or several. Knows no model.

The header is read here. The package `gguf` is only used, and only imported, to dequantize types that `blocks` does not
read.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from specrs.arrays import FLOAT32, Array, converted
from specrs.errors import CheckpointError, UnsupportedModelError, invalid, short
from specrs.models.gguf.blocks import GROUPED
from specrs.models.gguf.splits import check_parts, parts_of
from specrs.models.gguf.types import PLAIN, TYPES

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Format of `struct` for each scalar type, by the type's number."""
_STRING, _ARRAY = 8, 9
_unpack_length = struct.Struct("<Q").unpack_from


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Location of one tensor in a GGUF file, with its shape and type."""

    shape: tuple[int, ...]
    """Shape in torch's order: elements of the last dimension are adjacent in memory."""
    kind: str
    """Name of the tensor's GGML type, for example `Q4_K`."""
    block: tuple[int, int]
    """(number of elements in a block, number of bytes in a block) of the tensor's type."""
    start: int
    """Offset of the tensor's first byte in its file."""
    part: int = 0
    """Index of the tensor's file; 0 unless the model has several files."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes that the tensor takes in the file."""
        return math.prod(self.shape) // self.block[0] * self.block[1]


@dataclass(frozen=True)
class GGUFFile:
    """A model whose header has been read. Its tensors are memory-mapped, and read from the files when they are
    touched."""

    path: Path
    """Path of the file, or of the first of several files."""
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    data: tuple[Array, ...]
    """For each file, all its bytes as uint8, memory-mapped."""

    def blocks(self, name: str) -> Array:
        """Return the blocks of a tensor, `[rows, bytes of a row]` uint8, as a view of the mapped file. Writing to it
        does not change the file."""
        info = self.tensors[name]
        rows = math.prod(info.shape[:-1])
        return self.data[info.part][info.start : info.start + info.num_bytes].reshape(rows, -1)

    def release(self, name: str, rows: slice = slice(None)) -> None:
        """Release the memory of `rows` of a tensor. Pages that are touched later are read from the file again."""
        pages = getattr(self.data[self.tensors[name].part].base, "obj", None)
        if not isinstance(pages, mmap.mmap) or not hasattr(pages, "madvise"):
            return
        whole, part = self.blocks(name), self.blocks(name)[rows]
        first = self.tensors[name].start + whole.shape[1] * (rows.start or 0)
        start = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (first + part.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if start < end:
            pages.madvise(mmap.MADV_DONTNEED, start, end - start)

    def numbers(self, name: str, rows: slice = slice(None)) -> Array:
        """Return the numbers in `rows` of a tensor. They are a view of the mapped file if its type is a plain number,
        otherwise dequantized float32.

        Raises CheckpointError for a dequantized number that is not finite, UnsupportedModelError if the package gguf is
        needed and missing.
        """
        info, blocks = self.tensors[name], self.blocks(name)[rows]
        shape = (len(blocks), *info.shape[-1:])
        if info.kind in PLAIN:
            plain = blocks.view(PLAIN[info.kind])
            return plain.reshape(info.shape if len(blocks) == math.prod(info.shape[:-1]) else shape)
        if info.kind in GROUPED:
            made = GROUPED[info.kind](blocks).numbers().reshape(shape)
        else:
            made = dequantize(blocks, info.kind, self.path).reshape(shape)
        if not np.isfinite(made).all():
            row, column = np.argwhere(~np.isfinite(made))[0]
            at = f"{name}[{row + (rows.start or 0)}, {column}]"
            raise CheckpointError(f"{self.path}: {at}={made[row, column]}: weights must be finite")
        return made


def open_gguf(path: Path) -> GGUFFile:
    """Read the header of the GGUF file `path`, or of all files of the model if `path` is the first of several.

    The results for the last four models are cached. A file whose modification time or size has changed is read again.

    Raises:
        CheckpointError: a file is missing, is no GGUF file or is cut off; or the parts of a model are out of order.
        UnsupportedModelError: a tensor has a type that is not implemented.
    """
    stats = [(part, part.stat()) for part in parts_of(path)]
    return _open(tuple((part, status.st_mtime_ns, status.st_size) for part, status in stats))


def dequantize(blocks: Array, kind: str, path: Path) -> Array:
    """Return the numbers of the blocks `[rows, bytes]` of GGML type `kind`, `[rows, numbers]` float32. `path` is the
    file that error messages name.

    Raises NotImplementedError if the package gguf cannot dequantize `kind`, UnsupportedModelError if that package is
    missing.
    """
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize as by_package
    except ImportError as fault:
        reason = f"weights of type {kind} need the package gguf ({fault}); install it: pip install gguf"
        raise invalid(UnsupportedModelError, "model", str(path), reason) from None
    with np.errstate(all="ignore"):  # scales that are not finite are the caller's to name
        made: Array = by_package(blocks, GGMLQuantizationType[kind])
    return converted(made, FLOAT32)


@lru_cache(maxsize=4)
def _open(parts: tuple[tuple[Path, int, int], ...]) -> GGUFFile:
    """Read the headers of `parts` for `open_gguf`. Each part is a path with its modification time in nanoseconds and
    its size in bytes, so a file that has changed is read again."""
    files = [_read(path, size, part) for part, (path, _, size) in enumerate(parts)]
    check_parts([(file.path, file.metadata, file.tensors) for file in files])
    tensors = {name: info for file in files for name, info in file.tensors.items()}
    return GGUFFile(files[0].path, files[0].metadata, tensors, tuple(file.data[0] for file in files))


def _read(path: Path, size: int, part: int) -> GGUFFile:
    """Read the header of the GGUF file `path`, `size` bytes long. `part` is its index among the files of the model."""
    pages: mmap.mmap | bytes = b""
    if size:
        with path.open("rb") as file:
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    data = np.frombuffer(pages, np.uint8)
    reader = _Reader(path, pages)
    if pages[:4] != _MAGIC:
        raise CheckpointError(f"{path}: starts with {pages[:4]!r}, a GGUF file with {_MAGIC!r}")
    reader.at = 4
    version, num_tensors, num_fields = reader.scalars("IQQ")
    if version not in _VERSIONS:
        raise CheckpointError(f"{path}: version={version}: must be one of {_VERSIONS}, in this byte order")
    metadata = {reader.string(): reader.value(reader.scalars("I")[0]) for _ in range(num_fields)}
    found: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(num_tensors):
        name = reader.string()
        dims = reader.scalars("I")[0]
        if dims > 4 or name in found:
            raise CheckpointError(f"{path}: damaged: tensor {short(name)} is there twice or has {dims} dimensions")
        shape = tuple(reversed(reader.scalars(f"{dims}Q")))
        kind, offset = reader.scalars("IQ")
        found[name] = shape, kind, offset
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: general.alignment={short(alignment)}: must be a power of two of at least 8")
    start = -(-reader.at // alignment) * alignment
    tensors = {}
    for name, (shape, number, offset) in found.items():
        if number not in TYPES:
            allowed = ", ".join(kind.name for kind in TYPES.values())
            raise UnsupportedModelError(f"{path}: {name} has type {number}: not implemented; allowed: {allowed}")
        kind, *block = TYPES[number]
        info = TensorInfo(shape, kind, (block[0], block[1]), start + offset, part)
        if not shape or 0 in shape or shape[-1] % block[0] or offset % 8:
            raise CheckpointError(f"{path}: {name} of {kind} has shape {shape}, no whole blocks of {block[0]}")
        if info.start + info.num_bytes > len(data):
            missing = info.start + info.num_bytes - len(data)
            raise CheckpointError(f"{path}: truncated: {name} ends {missing} bytes after the end of the file")
        tensors[name] = info
    return GGUFFile(path, metadata, tensors, (data,))


class _Reader:
    """Reader of a GGUF header. `at` is the offset of the next byte that it reads."""

    def __init__(self, path: Path, data: mmap.mmap | bytes) -> None:
        self.path, self.data, self.at = path, data, 0

    def scalars(self, form: str) -> tuple[Any, ...]:
        try:
            values = struct.unpack_from("<" + form, self.data, self.at)
        except struct.error:
            raise self.truncated() from None
        self.at += struct.calcsize("<" + form)
        return values

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """Read `count` strings and advance past them. Vocabularies have up to 262,144 strings, so the loop does little
        for each."""
        data, at, end, found = self.data, self.at, len(self.data), []
        try:
            for _ in range(count):
                first = at + 8
                at = first + _unpack_length(data, at)[0]
                if at > end:
                    raise self.truncated()
                found.append(str(data[first:at], "utf-8", "replace"))
        except struct.error:
            raise self.truncated() from None
        self.at = at
        return found

    def value(self, kind: int) -> Any:
        if kind in _FORMATS:
            return self.scalars(_FORMATS[kind])[0]
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise CheckpointError(f"{self.path}: damaged: a field of type {kind}, the last one is {max(_FORMATS)}")
        of, length = self.scalars("IQ")
        if length > len(self.data) - self.at:
            raise CheckpointError(f"{self.path}: truncated: an array of {length} elements in the header")
        if of == _ARRAY:
            raise CheckpointError(f"{self.path}: damaged: an array of arrays in the header")
        if of in _FORMATS:
            return list(self.scalars(f"{length}{_FORMATS[of]}"))
        return self.strings(length) if of == _STRING else [self.value(of) for _ in range(length)]

    def truncated(self) -> CheckpointError:
        return CheckpointError(f"{self.path}: truncated: the header goes on after the end of the file")
