"""Loads the checkpoints that an engine names as models on a CPU: native, computed by torch, or computed by
transformers' modules."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from specrs.arrays import BFLOAT16, FLOAT32
from specrs.backends.cpu.weights import Rounding, load_native
from specrs.backends.model_source import ModelSource
from specrs.config import EngineConfig
from specrs.errors import UnsupportedConfigError, invalid
from specrs.extras import require
from specrs.models.base import Model
from specrs.models.loader import CPU_DTYPES

if TYPE_CHECKING:
    from specrs.parallel.ranks import Ranks  # and torch

logger = logging.getLogger("specrs")
NATIVE_DTYPES = (FLOAT32, BFLOAT16)
"""Dtypes in which native passes compute. torch computes float64."""


def load(source: ModelSource, ranks: Ranks | None) -> Model:
    """Load a model for a CPU, or this rank's part of it.

    The Rust core computes it in float32 or bfloat16, unless it has ranks or `enforce_eager` is set. Otherwise torch
    does. Raises `InvalidConfigError` and its subclasses, also if torch is needed and not installed.
    """
    if source.is_generic:
        return _load_generic(source)
    config, types = source.config, source.types(CPU_DTYPES)
    if not config.enforce_eager and ranks is None:
        if types.dtype in NATIVE_DTYPES:
            return load_native(
                source.path,
                dtype=types.dtype,
                revision=source.revision,
                load_format=config.load_format,
                quantization=types.quantization,
                max_model_len=config.max_model_len,
                cache_dtype=types.cache_dtype,
                rounding=Rounding(config.dtype != "auto", _activations(source)),
            )
        config.check_device(CPU_DTYPES.kind, str(types.dtype))
        logger.info("%s: torch computes %s, the native pass computes float32 and bfloat16", source.path, types.dtype)
    _check_torch(config, types.dtype)
    from specrs.models.torch_loader import load_model  # and torch, which the native pass does without

    return load_model(
        source.path,
        dtype=types.dtype,
        cache_dtype=types.cache_dtype,
        device=CPU_DTYPES.kind if ranks is None else ranks,
        revision=source.revision,
        load_format=config.load_format,
        max_model_len=config.max_model_len,
        quantization=types.quantization,
    )


def _activations(source: ModelSource) -> str:
    """Return the type that activations are rounded to before products. A draft model follows `int16` and `int8` only if
    its file has quantized blocks."""
    config = source.config
    return "auto" if source.is_draft and config.rounds_to_integers else config.cpu_activations


def _check_torch(config: EngineConfig, dtype: np.dtype[Any]) -> None:
    """Raise `InvalidConfigError` if torch, which has to compute the model, is not installed."""
    field = f"dtype={str(dtype)!r}"
    if config.enforce_eager:
        field = "enforce_eager=True"
    elif config.tensor_parallel_size > 1:
        field = f"tensor_parallel_size={config.tensor_parallel_size}"
    require("torch", "transformers", field)


def _load_generic(source: ModelSource) -> Model:
    """Load a model that transformers' modules compute."""
    if source.quantization is not None:
        reason = f"not implemented with model_impl='transformers', which {source.path} needs; allowed: None"
        raise invalid(UnsupportedConfigError, source.option("quantization"), source.quantization, reason)
    require("torch", "transformers", f"model={source.path!r}")
    require("transformers", "transformers", f"model={source.path!r}")
    from specrs.models.generic_loader import load_generic  # and transformers' models, which others do without

    model = load_generic(
        source.path,
        dtype=source.dtype,
        revision=source.revision,
        load_format=source.config.load_format,
        kv_cache_dtype=source.kv_cache_dtype,
        field=source.option("kv_cache_dtype"),
    )
    if source.config.model_impl == "auto":
        name = type(model.module).__name__
        logger.info("%s: specrs knows no %s: transformers' modules compute it, with our attention", source.path, name)
    return model
