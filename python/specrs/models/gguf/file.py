"""A GGUF file: its metadata and where its tensors lie. Knows no model.

The header is read here. The package `gguf` turns blocks of the types that `blocks` does not read into numbers; nothing
else of it is used, and it is imported only for that.
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
from specrs.models.gguf.types import PLAIN, TYPES

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Of scalars, by the number of their type."""
_STRING, _ARRAY = 8, 9
_unpack_length = struct.Struct("<Q").unpack_from


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file."""

    shape: tuple[int, ...]
    """As torch writes it: the last dimension lies together."""
    kind: str
    """GGML's name of its type."""
    block: tuple[int, int]
    """Numbers of a block, and its bytes."""
    start: int
    """Its first byte in the file."""

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) // self.block[0] * self.block[1]


@dataclass(frozen=True)
class GGUFFile:
    """A file whose header has been read. Its tensors are pages of the file until they are touched."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    data: Array
    """uint8, all bytes of the file."""

    def blocks(self, name: str) -> Array:
        """`[rows, bytes of a row]` of a tensor, mapped: what is written to it does not reach the file."""
        info = self.tensors[name]
        rows = math.prod(info.shape[:-1])
        return self.data[info.start : info.start + info.num_bytes].reshape(rows, -1)

    def numbers(self, name: str, rows: slice = slice(None)) -> Array:
        """Return `rows` of a tensor; mapped in the file's type where that is numbers, else float32 in memory of their
        own.

        Raises CheckpointError for a number that is not finite among those made, UnsupportedModelError where the package
        gguf is needed and missing.
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
    """Read the header of a file; kept for as long as the file stays as it is.

    Raises CheckpointError for what is no such file or is cut off, UnsupportedModelError for types that are not known.
    """
    status = path.stat()
    return _open(path, status.st_mtime_ns, status.st_size)


def dequantize(blocks: Array, kind: str, path: Path) -> Array:
    """Return the numbers of blocks `[rows, bytes]` of the file `path`: `[rows, numbers]` float32.

    Raises NotImplementedError for a type without numbers, UnsupportedModelError where the package gguf is missing.
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
def _open(path: Path, modified: int, size: int) -> GGUFFile:
    del modified
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
        raise CheckpointError(f"{path}: version={version}: allowed are GGUF versions {_VERSIONS} of this byte order")
    metadata = {reader.string(): reader.value(reader.scalars("I")[0]) for _ in range(num_fields)}
    if metadata.get("split.count", 1) not in (0, 1):
        raise invalid(UnsupportedModelError, "split.count", metadata["split.count"], f"not implemented ({path})")
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
        info = TensorInfo(shape, kind, (block[0], block[1]), start + offset)
        if not shape or shape[-1] % block[0] or offset % 8:
            raise CheckpointError(f"{path}: {name} of {kind} has shape {shape}, no whole blocks of {block[0]}")
        if info.start + info.num_bytes > len(data):
            missing = info.start + info.num_bytes - len(data)
            raise CheckpointError(f"{path}: truncated: {name} ends {missing} bytes behind the end of the file")
        tensors[name] = info
    return GGUFFile(path, metadata, tensors, data)


class _Reader:
    """Reads a header from its place `at` on."""

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
        """The next `count` strings. Vocabularies have 262,144, so each takes as few steps as can be."""
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
        return CheckpointError(f"{self.path}: truncated: the header goes on behind the end of the file")
