"""Check that a GPU's kernels serve an engine's models, and that these fit in its memory. Reads configurations alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from specrs.backends.cuda.adapters import slots_bytes
from specrs.backends.cuda.decoder import check_head_dim
from specrs.backends.cuda.device import CUDA_DTYPES
from specrs.backends.cuda.net_states import check_net
from specrs.backends.cuda.workspace import layer_sizes
from specrs.backends.model_source import ModelSource, draft_ranks, draft_source, drafts_by_model, drafts_by_own_head
from specrs.config import EngineConfig
from specrs.drafters.mtp.reader import head_config, mtp_shapes
from specrs.errors import InvalidConfigError, invalid
from specrs.models.checkpoint import resolve_folder
from specrs.models.config import ModelConfig
from specrs.models.errors import OF_DRAFT, OF_TARGET, about
from specrs.models.loader import load_config, open_checkpoint, resolve_dtype, stored_config
from specrs.models.quantization.at_load import PROJECTIONS, bits_at_load
from specrs.models.quantization.base import QuantizedTensors
from specrs.models.quantization.table import method_of, resolve_quantization
from specrs.models.shards import Shard
from specrs.models.tensors import LM_HEAD, tensor_shapes
from specrs.parallel.ranks import Ranks


def check_formats(config: EngineConfig) -> None:
    """Raise UnsupportedConfigError for options of quantization that contradict a checkpoint."""
    draft, speculative, has_model = draft_source(config), config.speculative_config, drafts_by_model(config)
    load_format = config.load_format
    resolve_quantization("quantization", config.quantization, config.target, config.revision, load_format=load_format)
    if draft is not None and speculative is not None and has_model:
        with about(*OF_DRAFT):
            field, quantization = "speculative_config.quantization", speculative.quantization
            resolve_quantization(field, quantization, *draft, load_format=load_format)


def check_models(config: EngineConfig, device: str) -> None:
    """Raise UnsupportedModelError or UnsupportedConfigError for a target or draft model that the GPU's kernels do
    not serve. Reads configurations."""
    with about(*OF_TARGET):
        dtype = _check_model(ModelSource.of_target(config), device)
    if drafts_by_model(config) and draft_source(config) is not None:
        with about(*OF_DRAFT):
            _check_model(ModelSource.of_draft(config, str(dtype)), device)


def _check_model(source: ModelSource, device: str) -> np.dtype[Any]:
    """Raise an error for a model that the kernels do not serve. Return the dtype of its activations."""
    types = source.types(CUDA_DTYPES)
    model = load_config(source.path, revision=source.revision)
    for sizes in layer_sizes(model):
        check_head_dim(sizes.head_dim, torch.device(device))
    if model.delta is not None:
        check_net(model.delta, torch.device(device))
    return types.dtype


def check_weights_fit(config: EngineConfig, device: str, ranks: Ranks | None = None) -> None:
    """Raise InvalidConfigError if the weights, and room for LoRA adapters, do not fit in the GPU's free memory. With
    `ranks`, only this rank's part counts.

    Reads configurations. For models with tied embeddings it also reads whether the files hold a different LM head.
    """
    sizes, draft, speculative = {}, draft_source(config), config.speculative_config
    sources = [("model", config.target, config.revision, config.quantization)]
    parts = {"model": ranks, "speculative_config.model": draft_ranks(config, ranks)}
    has_own_head = draft is not None and drafts_by_own_head(config)
    if draft is not None and not drafts_by_model(config) and not has_own_head:
        with about(*OF_DRAFT):
            files = resolve_folder(*draft).glob("*.safetensors")
        sizes["speculative_config.model"] = sum(file.stat().st_size for file in files)
    elif draft is not None and not has_own_head:
        assert speculative is not None
        sources.append(("speculative_config.model", *draft, speculative.quantization))
    dtype: np.dtype[Any] | None = None
    for field, source, revision, quantization in sources:
        with about(*(OF_TARGET if field == "model" else OF_DRAFT)):
            model = stored_config(source, revision=revision, load_format=config.load_format)
        dtype = resolve_dtype(config.dtype, model, CUDA_DTYPES) if dtype is None else dtype
        own = parts[field]
        shapes = tensor_shapes(model) if own is None else Shard(own.rank, own.size).tensor_shapes(model)
        sizes[field] = sum(map(math.prod, shapes.values())) * dtype.itemsize
        for name, bits in _quantized_bits(source, revision, model, quantization, config.load_format).items():
            sizes[field] -= math.prod(shapes[name]) * (8 * dtype.itemsize - bits) // 8
        if field == "model" and has_own_head:
            head, own = head_config(model), draft_ranks(config, ranks)
            held = head if own is None else Shard(own.rank, own.size).of_config(head)
            sizes["its MTP head"] = sum(map(math.prod, mtp_shapes(held).values())) * dtype.itemsize
        if field == "model" and config.enable_lora:
            itemsize, loras = dtype.itemsize, config.max_loras
            sizes[f"max_loras={loras} adapters"] = slots_bytes(model, loras, config.max_lora_rank, itemsize)
    free, needed = torch.cuda.mem_get_info(device)[0], sum(sizes.values())
    if needed > free:
        told = " and ".join(f"{size / 2**30:.2f} GiB for {field}" for field, size in sizes.items())
        raise invalid(
            InvalidConfigError,
            "model",
            config.target,
            f"weights need {told}, {free / 2**30:.2f} GiB of the GPU are free, {(needed - free) / 2**30:.2f} GiB too "
            "little; use a smaller model, a dtype of fewer bytes, or device='cpu'",
        )


def _quantized_bits(
    source: str, revision: str | None, model: ModelConfig, quantization: str | None, load_format: str
) -> dict[str, int]:
    """Return the bits per weight of matrices that stay quantized on a GPU, by name. Reads no tensor data.

    Raises CheckpointError if a checkpoint's tensors do not fit its config.json.
    """
    if load_format == "dummy":
        return {}
    made = method_of(source, revision) is None
    if made and quantization is None:
        return {}
    projections = [name for name in tensor_shapes(model) if name.endswith("_proj.weight") or ".experts." in name]
    projections = [name for name in projections if name.endswith(".weight")]
    if made:
        assert quantization is not None
        names = {name for name in projections if name.endswith(PROJECTIONS)}
        sizes = {name: shape[1] for name, shape in tensor_shapes(model).items() if name in names}
        made_bits = {name: bits_at_load(quantization, size) for name, size in sizes.items()}
        return {name: bits for name, bits in made_bits.items() if bits is not None}
    checkpoint = open_checkpoint(source, revision, load_format)[1]
    assert isinstance(checkpoint, QuantizedTensors)
    checkpoint.check(tensor_shapes(model), {LM_HEAD: (model.vocab_size, model.hidden_size)})
    found = {name: checkpoint.quantized_bits(name) for name in projections if checkpoint.is_quantized(name)}
    return {name: bits for name, bits in found.items() if bits is not None}
