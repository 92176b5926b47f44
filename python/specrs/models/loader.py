"""The configuration of a folder, hub id or GGUF file, and where its tensors come from. Builds no model."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from specrs.models.tensors import EMBEDDING, LM_HEAD, Named, Tensors, tensor_shapes

logger = logging.getLogger("specrs")
DTYPES: dict[str, np.dtype[Any]] = {str(dtype): dtype for dtype in (FLOAT32, FLOAT64, BFLOAT16, FLOAT16)}
"""By the values of `dtype`."""
_ELSEWHERE = {"cpu": "float16", "cuda": "float64"}
"""What a device does not serve: half precision is slow on CPUs and emulated, the GPU kernels have no float64."""


def load_config(source: str | Path, *, revision: str | None = None) -> ModelConfig:
    """Read and check the configuration of a folder, hub id or GGUF file; of a hub id no weights are downloaded, but for
    GGUF files, which hold it.

    Raises CheckpointError, or UnsupportedModelError for what is not implemented.
    """
    file = gguf_path(source, revision)
    return _read_config(resolve_folder(source, revision, weights=False)) if file is None else gguf_config(file)


def check_is_model(source: str | Path, *, revision: str | None = None) -> None:
    """Check that `source` is a GGUF file, or a folder or hub id with a readable config.json.

    Of a hub id no weights are downloaded, but for GGUF files. Raises CheckpointError.
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
    """`load_config`, untied where the weights of a folder hold an LM head of their own, see `with_own_head`.

    Weights of a hub id are not downloaded for it. Raises as `load_model`.
    """
    config = load_config(source, revision=revision)
    if load_format == "dummy" or not config.tie_word_embeddings or not Path(source).is_dir():
        return config
    return open_checkpoint(source, revision, load_format)[0]


def is_known_family(source: str | Path, *, revision: str | None = None) -> bool:
    """Whether a folder or hub id says an architecture of `registry.FAMILIES`; a GGUF file is for our readers. Raises
    CheckpointError."""
    if gguf_path(source, revision) is not None:
        return True
    raw = read_json(resolve_folder(source, revision, weights=False) / "config.json")
    return is_known(raw.get("architectures"))


def load_mask_token_id(source: str | Path, *, revision: str | None = None) -> int | None:
    """What a draft model of any family is fed in place of drafts; None where it is none for parallel drafting. Raises
    CheckpointError."""
    if gguf_path(source, revision) is not None:
        return None
    raw = read_json(resolve_folder(source, revision, weights=False) / "config.json")
    return mask_token_id(raw)


def open_checkpoint(
    source: str | Path, revision: str | None, load_format: str
) -> tuple[ModelConfig, Checkpoint | QuantizedTensors | DummyCheckpoint]:
    """The configuration of a folder, hub id or GGUF file, and where its tensors come from. Raises as `load_model`."""
    file = gguf_path(source, revision)
    if file is not None:
        config = gguf_config(file)
        return config, DummyCheckpoint(config) if load_format == "dummy" else GGUFCheckpoint(file)
    folder = resolve_folder(source, revision, weights=load_format != "dummy")
    config, scheme = _read_config(folder), scheme_of(read_config(folder))
    if load_format == "dummy":
        return config, DummyCheckpoint(config)
    files = StackedCheckpoint(folder) if _is_stacked(config) else Checkpoint(folder)
    tensors = files if scheme is None else QuantizedCheckpoint(files, scheme)
    return with_own_head(config, tensors, lambda: _has_same_head(tensors)), tensors


def with_own_head(config: ModelConfig, tensors: Named, has_same_head: Callable[[], bool]) -> ModelConfig:
    """Return `config`, untied if it says that embeddings are tied and the tensors hold an LM head that differs.

    As in transformers, the tensors are believed. `has_same_head` says whether their LM head equals their embedding.
    Raises CheckpointError for tensors that are not those of `config`.
    """
    if not config.tie_word_embeddings:
        return config
    tensors.check(tensor_shapes(config), {LM_HEAD: (config.vocab_size, config.hidden_size)})
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
    """Whether two matrices of a shape and any types are equal. Compares some rows at a time: the first often tell."""
    wide = FLOAT64 if FLOAT64 in (one.dtype, other.dtype) else FLOAT32
    rows = max(1, (1 << 20) // one.shape[1])
    for first in range(0, len(one), rows):
        mine, its = (converted(matrix[first : first + rows], wide) for matrix in (one, other))
        if not np.array_equal(mine, its):
            return False
    return True


def resolve_dtype(dtype: str | np.dtype[Any], config: ModelConfig, device_type: str) -> np.dtype[Any]:
    """Return the dtype to compute in on a `cpu` or a GPU (`cuda`); `auto` is the checkpoint's on a GPU.

    On a CPU `auto` is float32, and float64 for a float64 checkpoint. Raises UnsupportedModelError for any other.
    """
    return named_dtype(dtype, config.checkpoint_dtype, device_type)


def named_dtype(dtype: str | np.dtype[Any], checkpoint_dtype: str | None, device_type: str) -> np.dtype[Any]:
    """Return the dtype to compute in, see `resolve_dtype`, where config.json says `checkpoint_dtype`."""
    name = str(dtype)
    if name == "auto":
        name = checkpoint_dtype or "float32"
        if device_type == "cpu" and name != "float64":
            name = "float32"
    if name not in DTYPES:
        given = "" if str(dtype) != "auto" else f" (dtype='auto' and config.json says {checkpoint_dtype})"
        raise invalid(UnsupportedModelError, "dtype", name, f"must be one of auto, {', '.join(DTYPES)}{given}")
    if name == _ELSEWHERE.get(device_type):
        allowed = ", ".join(other for other in DTYPES if other != name)
        raise invalid(
            UnsupportedModelError, "dtype", name, f"not implemented on device {device_type}; allowed: {allowed}"
        )
    return DTYPES[name]


def _read_config(folder: Path) -> ModelConfig:
    raw = read_config(folder)
    with of_folder(folder):
        scheme = scheme_of(raw)
        if scheme is not None:
            raw = {field: value for field, value in raw.items() if field not in FIELDS}
        generation = folder / "generation_config.json"
        config = parse_config(raw, read_json(generation) if generation.exists() else None)
        allowed = methods_of(stacked=_is_stacked(config))
        if scheme is not None and scheme.method not in allowed:
            raise unsupported(
                f"{FIELDS[0]}.quant_method", scheme.method, f"for {config.architecture} {', '.join(allowed)}"
            )
        return config


def _is_stacked(config: ModelConfig) -> bool:
    return config.experts is not None and config.experts.stacked
