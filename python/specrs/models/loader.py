"""Reader of a model's configuration, and of the tensors' source, from a folder, hub id or GGUF file. Builds no
model."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specrs.arrays import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, Array, converted
from specrs.errors import CheckpointError, UnsupportedModelError, invalid
from specrs.models.checkpoint import Checkpoint, read_json, resolve_folder
from specrs.models.config import ModelConfig, mask_token_id, parse_config
from specrs.models.dummy import DummyCheckpoint
from specrs.models.errors import of_folder, unsupported
from specrs.models.gguf.checkpoint import GGUFCheckpoint, gguf_config, gguf_path
from specrs.models.quantization.base import QuantizedTensors
from specrs.models.quantization.checkpoint import QuantizedCheckpoint
from specrs.models.quantization.table import FIELDS, methods_of, read_config, scheme_of
from specrs.models.registry import is_known
from specrs.models.stacked import StackedCheckpoint
from specrs.models.tensors import EMBEDDING, LM_HEAD, Named, Tensors, optional_shapes, tensor_shapes
from specrs.models.wrappers import is_wrapped

logger = logging.getLogger("specrs")
DTYPES: dict[str, np.dtype[Any]] = {str(dtype): dtype for dtype in (FLOAT32, FLOAT64, BFLOAT16, FLOAT16)}
"""Dtypes that a model may be computed in, by the value of the option `dtype`."""


class DeviceDtypes(NamedTuple):
    """Dtypes in which one kind of device computes: all of `DTYPES` but one."""

    kind: str
    """Name of the device in messages."""
    unsupported: str
    """The dtype in which the device does not compute."""
    auto_widens: bool
    """True if `auto` means float32 for checkpoints of 16 bit. False: `auto` is the checkpoint's dtype."""


CPU_DTYPES = DeviceDtypes("cpu", unsupported="float16", auto_widens=True)
"""Dtypes of CPUs, where 16 bit arithmetic is slow or emulated."""


def load_config(source: str | Path, *, revision: str | None = None) -> ModelConfig:
    """Return the checked configuration of a folder, hub id or GGUF file.

    Weights of a hub id are not downloaded, except GGUF files, which hold the configuration. Raises CheckpointError if a
    file is missing or malformed, or UnsupportedModelError for what is not implemented.
    """
    file = gguf_path(source, revision)
    return _read_config(resolve_folder(source, revision, weights=False)) if file is None else gguf_config(file)


def check_is_model(source: str | Path, *, revision: str | None = None) -> None:
    """Check that `source` is a GGUF file, or a folder or hub id with a readable config.json.

    Weights of a hub id are not downloaded, except GGUF files. Raises CheckpointError if it is none of them.
    """
    if gguf_path(source, revision) is not None:
        return
    folder = resolve_folder(source, revision, weights=False)
    if os.path.lexists(folder / "config.json"):
        read_json(folder / "config.json")
        return
    files = sorted(folder.glob("*.gguf"))
    remedy = f"the file {files[0]}" if files else "a folder with config.json, tokenizer.json and model.safetensors"
    also = "" if files else ", or a .gguf file"
    reason = f"holds no model, because config.json is missing; pass {remedy}{also}"
    raise invalid(CheckpointError, "model", str(source), reason)


def stored_config(source: str | Path, *, revision: str | None = None, load_format: str = "auto") -> ModelConfig:
    """Return the configuration of `load_config`, untied if the weights in a folder hold a different LM head: see
    `with_own_head`.

    Weights of a hub id are not downloaded. Raises CheckpointError if a file is missing or malformed, or
    UnsupportedModelError for what is not implemented.
    """
    config = load_config(source, revision=revision)
    if load_format == "dummy" or not config.tie_word_embeddings or not Path(source).is_dir():
        return config
    return open_checkpoint(source, revision, load_format)[0]


def is_known_family(source: str | Path, *, revision: str | None = None) -> bool:
    """Return whether a folder or hub id names an architecture of `registry.FAMILIES`. True for GGUF files, which have
    their own table. Raises CheckpointError if config.json is missing or malformed."""
    if gguf_path(source, revision) is not None:
        return True
    raw = read_json(resolve_folder(source, revision, weights=False) / "config.json")
    return is_wrapped(raw) or is_known(raw.get("architectures"))


def load_mask_token_id(source: str | Path, *, revision: str | None = None) -> int | None:
    """Return the token that a draft model for parallel drafting reads in place of drafts. None for other models and for
    GGUF files. Raises CheckpointError if config.json is missing or malformed."""
    if gguf_path(source, revision) is not None:
        return None
    return mask_token_id(read_config(resolve_folder(source, revision, weights=False)))


def open_checkpoint(
    source: str | Path, revision: str | None, load_format: str
) -> tuple[ModelConfig, Checkpoint | QuantizedTensors | DummyCheckpoint]:
    """Return the configuration of a folder, hub id or GGUF file, and the source of its tensors.

    Reads tensor data only to compare a tied LM head with the embedding. Raises CheckpointError if a file is missing or
    malformed, or UnsupportedModelError for what is not implemented.
    """
    file = gguf_path(source, revision)
    if file is not None:
        config = gguf_config(file)
        return config, DummyCheckpoint(config) if load_format == "dummy" else GGUFCheckpoint(file)
    folder = resolve_folder(source, revision, weights=load_format != "dummy")
    config, scheme = _read_config(folder), scheme_of(read_config(folder))
    if load_format == "dummy":
        return config, DummyCheckpoint(config)
    stacked = None if config.experts is None else config.experts.stacked
    files = Checkpoint(folder, allow_base_model=True) if stacked is None else StackedCheckpoint(folder, stacked)
    if files.prefix and not config.tie_word_embeddings and LM_HEAD not in files:
        config = replace(config, tie_word_embeddings=True, has_lm_head=False)
    tensors = files if scheme is None else QuantizedCheckpoint(files, scheme)
    return with_own_head(config, tensors, lambda: _has_same_head(tensors)), tensors


def with_own_head(config: ModelConfig, tensors: Named, has_same_head: Callable[[], bool]) -> ModelConfig:
    """Return `config`, untied if it says that embeddings are tied but the tensors hold an LM head that differs.

    transformers believes the tensors too. `has_same_head` returns whether the LM head equals the embedding. Raises
    CheckpointError if the tensors do not fit `config`.
    """
    if not config.tie_word_embeddings:
        return config
    tensors.check(tensor_shapes(config), optional_shapes(config))
    if LM_HEAD not in tensors:
        return config
    if has_same_head():
        return config
    logger.warning(
        "%s: tie_word_embeddings=true, but %s differs from %s: it is loaded as an LM head of its own",
        tensors.folder,
        LM_HEAD,
        EMBEDDING,
    )
    return replace(config, tie_word_embeddings=False)


def _has_same_head(tensors: Tensors) -> bool:
    quantized = isinstance(tensors, QuantizedTensors) and tensors.is_quantized(LM_HEAD)
    return not quantized and _same_numbers(tensors.mapped(LM_HEAD), tensors.mapped(EMBEDDING))


def _same_numbers(one: Array, other: Array) -> bool:
    """Return whether two matrices of one shape and any dtypes are equal. Compares some rows at a time, because the
    first rows often differ already."""
    wide = FLOAT64 if FLOAT64 in (one.dtype, other.dtype) else FLOAT32
    rows = max(1, (1 << 20) // one.shape[1])
    for first in range(0, len(one), rows):
        mine, its = (converted(matrix[first : first + rows], wide) for matrix in (one, other))
        if not np.array_equal(mine, its):
            return False
    return True


def resolve_dtype(dtype: str | np.dtype[Any], config: ModelConfig, device: DeviceDtypes = CPU_DTYPES) -> np.dtype[Any]:
    """Return the dtype in which `device` computes a model of `config`.

    `auto` is the checkpoint's dtype. On a CPU it is float32, or float64 for a float64 checkpoint. Raises
    UnsupportedModelError for a dtype in which the device does not compute.
    """
    return named_dtype(dtype, config.checkpoint_dtype, device)


def named_dtype(
    dtype: str | np.dtype[Any], checkpoint_dtype: str | None, device: DeviceDtypes = CPU_DTYPES
) -> np.dtype[Any]:
    """Return the dtype in which `device` computes a model whose config.json names `checkpoint_dtype`.

    `auto` is the checkpoint's dtype, float32 if it names none. If `device.auto_widens`, it is float32, or float64 for a
    float64 checkpoint. Raises UnsupportedModelError for a dtype in which the device does not compute.
    """
    name = str(dtype)
    if name == "auto":
        name = checkpoint_dtype or "float32"
        if device.auto_widens and name != "float64":
            name = "float32"
    if name not in DTYPES:
        given = "" if str(dtype) != "auto" else f" (dtype='auto' and config.json says {checkpoint_dtype})"
        raise invalid(UnsupportedModelError, "dtype", name, f"must be one of auto, {', '.join(DTYPES)}{given}")
    if name == device.unsupported:
        allowed = ", ".join(other for other in DTYPES if other != name)
        raise invalid(
            UnsupportedModelError, "dtype", name, f"not implemented on device {device.kind}; allowed: {allowed}"
        )
    return DTYPES[name]


def _read_config(folder: Path) -> ModelConfig:
    with of_folder(folder):
        raw = read_config(folder)
        scheme = scheme_of(raw)
        if scheme is not None:
            raw = {field: value for field, value in raw.items() if field not in FIELDS}
        generation = folder / "generation_config.json"
        config = parse_config(raw, read_json(generation) if generation.exists() else None)
        allowed = methods_of(stacked=config.experts is not None and config.experts.stacked == "alternating")
        if scheme is not None and scheme.method not in allowed:
            raise unsupported(
                f"{FIELDS[0]}.quant_method", scheme.method, f"for {config.architecture} {', '.join(allowed)}"
            )
        return config
