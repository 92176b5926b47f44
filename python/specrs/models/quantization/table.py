"""Table of quantized formats: their parsers, and the form in which each device computes them.

It defines the values of `quantization=`. None accepts the checkpoint's own format. A method's name must be the
checkpoint's. fp8, int8, int4, q8_0, q4_0 and q4_k quantize unquantized weights while they are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrs.errors import UnsupportedConfigError, invalid
from specrs.models.checkpoint import read_json, resolve_folder
from specrs.models.errors import malformed, unsupported
from specrs.models.gguf.checkpoint import gguf_path
from specrs.models.gguf.file import open_gguf
from specrs.models.gguf.types import PLAIN
from specrs.models.quantization import awq, compressed_tensors, fp8, gptq, mxfp4
from specrs.models.quantization.base import Scheme
from specrs.models.wrappers import text_config

METHODS: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "fp8": fp8.scheme,
    "compressed-tensors": compressed_tensors.scheme,
    "gptq": gptq.scheme,
    "awq": awq.scheme,
    "mxfp4": mxfp4.scheme,
}
"""Parser of a `quantization_config` for each `quant_method`."""
STACKED = ("mxfp4",)
"""Methods for checkpoints that store all experts of a layer in one tensor per projection. Other methods do not support
these."""
GGUF = "gguf"
AT_LOAD = ("fp8", "int8", "int4", "q8_0", "q4_0", "q4_k")
"""Formats to which unquantized weights can be quantized while they are loaded."""
FIELDS = ("quantization_config", "compression_config")
"""Fields of config.json that may hold the configuration. Older checkpoints of compressed-tensors use the second
name."""
OWN_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files that older quantizers wrote instead of the field, with their `quant_method`."""
_AWQ_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}
"""Names of fields in `quantization_config`, by the names of the same fields in AWQ's own file."""


@dataclass(frozen=True, slots=True)
class Format:
    """Row of the table in docs/supported.md."""

    method: str
    """Value of `quantization`."""
    weights: str
    """Description of the quantized weights."""
    cpu: str
    """Form that native CPU passes read. `enforce_eager` and float64 always read dequantized numbers."""
    cuda: str
    """Form that GPU kernels read. Dequantized numbers have the model's dtype."""


_BF16 = "bf16, made at load"
_NUMBERS = "numbers, made at load"
_FP8 = "FP8 codes"
_CODES_4, _CODES_8, _MXFP4 = "INT4 codes", "INT8 codes", "MXFP4 codes"
_PACKED_4, _PACKED_8, _PACKED = "INT4, packed", "INT8, packed", "the file's blocks, packed"
TABLE = (
    Format("fp8", "e4m3, a scale for each block (Qwen3-FP8) or for the matrix (Ministral 3)", _BF16, _FP8),
    Format("compressed-tensors", "FP8: a scale for the matrix, each output or each block", _BF16, _FP8),
    Format("compressed-tensors", "INT8 (W8A8, W8A16), symmetric", _PACKED_8, _CODES_8),
    Format("compressed-tensors", "INT8, not symmetric", _BF16, _NUMBERS),
    Format("compressed-tensors", "packed INT4 by group or output, symmetric", _PACKED_4, _CODES_4),
    Format("compressed-tensors", "packed INT4, not symmetric", _PACKED_4, _CODES_4),
    Format("compressed-tensors", "packed INT8, symmetric", _PACKED_8, _CODES_8),
    Format("compressed-tensors", "packed INT4, act-order (`weight_g_idx`)", _PACKED_4, _NUMBERS),
    Format("compressed-tensors", "NVFP4", _BF16, _CODES_8),
    Format("gptq", "4 bit, symmetric", _PACKED_4, _CODES_4),
    Format("gptq", "4 bit, not symmetric", _PACKED_4, _CODES_4),
    Format("gptq", "8 bit, symmetric", _PACKED_8, _CODES_8),
    Format("gptq", "`desc_act` with groups out of order", "INT4 or INT8, packed", _NUMBERS),
    Format("awq", "4 bit, gemm order", _PACKED_4, _CODES_4),
    Format("mxfp4", "experts in MXFP4 (gpt-oss)", _PACKED, _MXFP4),
    Format("gguf", "F32, F16, BF16", "as the file has them", _NUMBERS),
    Format("gguf", "Q4_0, Q4_1, Q2_K, Q3_K, Q4_K", _PACKED, _CODES_4),
    Format("gguf", "Q8_0, Q5_0, Q5_1, Q5_K, Q6_K, IQ4_NL, IQ4_XS", _PACKED, _CODES_8),
    Format("gguf", "MXFP4", _PACKED, _MXFP4),
    Format("gguf", "other types that the package `gguf` reads", _BF16, _NUMBERS),
    Format("int4", "any of 16 or 32 bit, quantized at load", _PACKED_4, _CODES_4),
    Format("int8", "any of 16 or 32 bit, quantized at load", _PACKED_8, _CODES_8),
    Format("q8_0", "any of 16 or 32 bit, quantized at load", _PACKED_8, _CODES_8),
    Format("q4_0", "any of 16 or 32 bit, quantized at load", _PACKED_4, _CODES_4),
    Format("q4_k", "any of 16 or 32 bit, quantized at load", "Q4_K blocks, packed", _CODES_4),
    Format("fp8", "any of 16 or 32 bit, quantized at load", _BF16, _FP8),
)


def methods_of(*, stacked: bool) -> tuple[str, ...]:
    """Return the methods for checkpoints with, or without, stacked experts: see `STACKED`."""
    return tuple(method for method in METHODS if (method in STACKED) == stacked)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of a folder, or of a multimodal checkpoint's text model.

    If it lacks a `quantization_config`, the content of one of `OWN_FILES` is added as that field. Raises
    UnsupportedModelError for a text model that is not implemented, and CheckpointError.
    """
    raw, path = text_config(read_json(folder / "config.json")), quantization_file(folder)
    if path is None or any(raw.get(field) is not None for field in FIELDS):
        return raw
    given = {_AWQ_NAMES.get(name, name): value for name, value in read_json(path).items()}
    return raw | {FIELDS[0]: {"quant_method": OWN_FILES[path.name]} | given}


def quantization_file(folder: Path) -> Path | None:
    """Return the first of `OWN_FILES` in a folder; None if there is none."""
    return next((folder / name for name in OWN_FILES if (folder / name).is_file()), None)


def scheme_of(raw: Mapping[str, Any]) -> Scheme | None:
    """Return the quantization that config.json describes; None: weights are not quantized. Raises UnsupportedModelError
    for an unknown `quant_method` or what is not implemented, and CheckpointError."""
    field = next((name for name in FIELDS if raw.get(name) is not None), None)
    if field is None:
        return None
    given = raw[field]
    if not isinstance(given, Mapping):
        raise malformed(field, given, "an object")
    method = given.get("quant_method", "compressed-tensors" if field == FIELDS[1] else None)
    if not isinstance(method, str) or method not in METHODS:
        raise unsupported(f"{field}.quant_method", method, ", ".join(METHODS))
    return METHODS[method](given)


def method_of(source: str | Path, revision: str | None) -> str | None:
    """Return the method by which a checkpoint's weights are quantized; None: they are not. Raises UnsupportedModelError
    and CheckpointError."""
    file = gguf_path(source, revision)
    if file is not None:
        plain = all(info.kind in PLAIN for info in open_gguf(file).tensors.values())
        return None if plain else GGUF
    scheme = scheme_of(read_config(resolve_folder(source, revision, weights=False)))
    return None if scheme is None else scheme.method


def resolve_quantization(
    field: str, given: str | None, source: str, revision: str | None, *, load_format: str = "auto"
) -> str | None:
    """Return the format to quantize weights to while they are loaded. None: weights stay as the checkpoint has them.

    `given` is the value of the option `field`. Random weights (`dummy`) are unquantized whatever the checkpoint holds,
    so each format of `AT_LOAD` is allowed for them. Raises UnsupportedConfigError if `given` contradicts the
    checkpoint.
    """
    method = None if load_format == "dummy" and given in (None, *AT_LOAD) else method_of(source, revision)
    if given is None or given == method:
        return None
    if method is not None:
        reason = f"contradicts {source}, whose weights are quantized by {method!r}; allowed: None or {method!r}"
        raise invalid(UnsupportedConfigError, field, given, reason)
    if given not in AT_LOAD:
        reason = (
            f"contradicts {source}, whose weights are not quantized; allowed: None, {', '.join(map(repr, AT_LOAD))}"
        )
        raise invalid(UnsupportedConfigError, field, given, reason)
    return given


def table() -> str:
    """Return the table in Markdown, as docs/supported.md has it."""
    lines = ["| `quantization` | weights | on a CPU they stay, or become | on a GPU |", "| --- | --- | --- | --- |"]
    lines += [f"| `{row.method.replace(', ', '`, `')}` | {row.weights} | {row.cpu} | {row.cuda} |" for row in TABLE]
    return "\n".join(lines)
