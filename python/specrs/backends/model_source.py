"""Checkpoints and dtypes that an engine's options choose for target and draft. Reads no weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specrs.config import EngineConfig
from specrs.errors import UnsupportedConfigError, invalid
from specrs.models.config import ModelConfig
from specrs.models.errors import without_states
from specrs.models.kv_dtypes import resolve_cache_dtype
from specrs.models.loader import DeviceDtypes, is_known_family, load_config, resolve_dtype
from specrs.models.quantization.at_load import INT4_GROUPS
from specrs.models.quantization.table import resolve_quantization
from specrs.models.registry import FAMILIES

if TYPE_CHECKING:
    from specrs.parallel.ranks import Ranks  # and torch


class ModelTypes(NamedTuple):
    """Dtypes in which a model is loaded."""

    dtype: np.dtype[Any]
    """Dtype of activations."""
    cache_dtype: np.dtype[Any]
    """Dtype of K and V in the cache."""
    quantization: str | None
    """Format to which weights are quantized while they are loaded. None: they stay as the checkpoint has them."""
    model: ModelConfig
    """Configuration of the checkpoint, from which the dtypes follow."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Checkpoint of a target or draft model, with the options for loading it."""

    config: EngineConfig
    path: str
    """Folder, hub id or GGUF file."""
    revision: str | None
    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    is_draft: bool = False

    @classmethod
    def of_target(cls, config: EngineConfig) -> ModelSource:
        """Return the source of the target of `config`."""
        return cls(config, config.target, config.revision, config.dtype, config.quantization, config.kv_cache_dtype)

    @classmethod
    def of_draft(cls, config: EngineConfig, dtype: str) -> ModelSource:
        """Return the source of the draft model of `config`. `dtype` is the target's, in which the draft is computed
        too."""
        speculative, draft = config.speculative_config, draft_source(config)
        assert speculative is not None
        assert draft is not None
        cache = speculative.kv_cache_dtype or config.kv_cache_dtype
        return cls(config, *draft, dtype, speculative.quantization, cache, is_draft=True)

    def option(self, name: str) -> str:
        """Return the full name of the option `name` of this model, for messages."""
        return f"speculative_config.{name}" if self.is_draft else name

    @property
    def is_generic(self) -> bool:
        """True if transformers' modules compute the model."""
        impl = self.config.model_impl
        return impl == "transformers" or (impl == "auto" and not is_known_family(self.path, revision=self.revision))

    def types(self, dtypes: DeviceDtypes) -> ModelTypes:
        """Return the dtypes for loading the model on a device that computes in `dtypes`.

        Raises `UnsupportedModelError` or `UnsupportedConfigError` for dtypes that are not served, `CheckpointError` for
        a checkpoint whose configuration cannot be read.
        """
        field, load_format = self.option("quantization"), self.config.load_format
        quantization = resolve_quantization(field, self.quantization, self.path, self.revision, load_format=load_format)
        model = load_config(self.path, revision=self.revision)
        if self.is_draft:
            without_states(model, "as a draft model")
        if quantization in ("int4", "q8_0", "q4_0", "q4_k"):
            _check_groups(field, quantization, self.path, model)
        dtype = resolve_dtype(self.dtype, model, dtypes)
        cache_dtype = resolve_cache_dtype(self.option("kv_cache_dtype"), self.kv_cache_dtype, dtype)
        return ModelTypes(dtype, cache_dtype, quantization, model)


def draft_source(config: EngineConfig) -> tuple[str, str | None] | None:
    """Return folder or hub id of the draft model or head, and its revision. They are the target's for an MTP head. None
    if the engine never speculates with one."""
    speculative, draft = config.speculative_config, config.draft
    if speculative is None or draft is None or speculative.most_speculative_tokens == 0:
        return None
    return draft, config.revision if drafts_by_own_head(config) else speculative.revision


def drafts_by_own_head(config: EngineConfig) -> bool:
    """Return whether a head in the target's checkpoint drafts."""
    method = None if config.speculative_config is None else config.speculative_config.model_method
    return method is not None and method.bundled is None


def drafts_by_model(config: EngineConfig) -> bool:
    """Return whether a whole draft model drafts. It is read, quantized and split over ranks as the target is."""
    method = None if config.speculative_config is None else config.speculative_config.model_method
    return method is not None and method.is_model


def draft_ranks(config: EngineConfig, ranks: Ranks | None) -> Ranks | None:
    """Return the ranks that compute the draft together. None if each computes all of it."""
    speculative = config.speculative_config
    return None if speculative is None or speculative.draft_tensor_parallel_size == 1 else ranks


def _check_groups(field: str, quantization: str, source: str, model: ModelConfig) -> None:
    """Raise `UnsupportedConfigError` for a model whose matrices have inputs that do not divide into groups of 32."""
    smallest = INT4_GROUPS[-1]
    experts: list[tuple[str, int]] = []
    if model.experts is not None:
        experts.append(("an expert's intermediate size", model.experts.intermediate_size))
        if model.experts.shared is not None:
            experts.append(("a shared expert's intermediate size", model.experts.shared))
    dense = model.experts is None or model.experts.parallel_mlp or not all(model.experts.layers)
    layers = model.varied or (model.plain_sizes,)
    for name, size in (
        ("hidden_size", model.hidden_size),
        *([(FAMILIES[model.architecture].intermediate_field, s.intermediate_size) for s in layers] if dense else []),
        *experts,
        *(("num_attention_heads * head_dim", model.num_heads * sizes.head_dim) for sizes in layers),
        *([] if model.delta is None else [("linear_num_value_heads * linear_value_head_dim", model.delta.inner)]),
    ):
        if size % smallest:
            reason = (
                f"{source} has {name} = {size}, groups need a multiple of {smallest}; allowed: None, 'fp8' or 'int8'"
            )
            raise invalid(UnsupportedConfigError, field, quantization, reason)
