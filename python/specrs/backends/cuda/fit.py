"""Check that a GPU's kernels serve an engine's models, and that these fit in its memory. Reads configurations alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from specrs.backends.cuda.adapters import slots_bytes
from specrs.backends.cuda.decoder import check_head_dim
from specrs.backends.cuda.delta_states import check_net
from specrs.backends.cuda.device import CUDA_DTYPES
from specrs.backends.cuda.weight_bytes import Layouts, weight_bytes
from specrs.backends.cuda.workspace import layer_sizes
from specrs.backends.model_source import ModelSource, draft_ranks, draft_source, drafts_by_model, drafts_by_own_head
from specrs.config import EngineConfig
from specrs.drafters.eagle3 import EAGLE3
from specrs.drafters.eagle3.config import head_layer
from specrs.drafters.mtp.reader import head_config, mtp_shapes
from specrs.errors import InvalidConfigError, invalid
from specrs.models.checkpoint import read_json, resolve_folder
from specrs.models.config import ModelConfig
from specrs.models.errors import OF_DRAFT, OF_TARGET, about, of_folder
from specrs.models.loader import open_checkpoint, resolve_dtype, stored_config
from specrs.models.quantization.at_load import PROJECTIONS, coding_at_load
from specrs.models.quantization.base import QuantizedTensors
from specrs.models.quantization.table import method_of, resolve_quantization
from specrs.models.shards import Shard
from specrs.models.tensors import optional_shapes, tensor_shapes
from specrs.models.torch_arrays import TORCH_DTYPES
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
    """Raise UnsupportedModelError or UnsupportedConfigError for a target, draft model or EAGLE-3 head that the GPU's
    kernels do not serve. Reads configurations."""
    with about(*OF_TARGET):
        dtype = _check_model(ModelSource.of_target(config), device)
    draft, speculative = draft_source(config), config.speculative_config
    if draft is None or speculative is None:
        return
    with about(*OF_DRAFT):
        if drafts_by_model(config):
            _check_model(ModelSource.of_draft(config, str(dtype)), device)
        elif speculative.model_method is EAGLE3:
            folder = resolve_folder(*draft, weights=False)
            with of_folder(folder):
                check_head_dim(head_layer(read_json(folder / "config.json")).head_dim, torch.device(device))


def _check_model(source: ModelSource, device: str) -> np.dtype[Any]:
    """Raise an error for a model that the kernels do not serve. Return the dtype of its activations."""
    types = source.types(CUDA_DTYPES)
    for sizes in layer_sizes(types.model):
        check_head_dim(sizes.head_dim, torch.device(device))
    if types.model.delta is not None:
        check_net(types.model.delta, torch.device(device))
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
        option = "quantization" if field == "model" else "speculative_config.quantization"
        at_load = resolve_quantization(option, quantization, source, revision, load_format=config.load_format)
        layouts, own = layouts_of(source, revision, model, at_load, config.load_format), parts[field]
        shard = None if own is None else Shard(own.rank, own.size)
        sizes[field] = weight_bytes(model, layouts, TORCH_DTYPES[dtype], shard)
        if field == "model" and has_own_head:
            head, own = head_config(model), draft_ranks(config, ranks)
            held = head if own is None else Shard(own.rank, own.size).of_config(head)
            sizes["its MTP head"] = sum(map(math.prod, mtp_shapes(held).values())) * dtype.itemsize
        if field == "model" and config.enable_lora:
            itemsize, loras = dtype.itemsize, config.max_loras
            held = model if shard is None else shard.of_config(model)
            sizes[f"max_loras={loras} adapters"] = slots_bytes(held, loras, config.max_lora_rank, itemsize)
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


def layouts_of(source: str, revision: str | None, model: ModelConfig, at_load: str | None, load_format: str) -> Layouts:
    """Return the layouts in which a GPU holds a model's quantized matrices. `at_load` is the format to which they are
    quantized while they are loaded; None: they stay as the checkpoint has them. Reads no tensor data.

    Raises CheckpointError if a checkpoint's tensors do not fit its config.json.
    """
    matrices = {name: shape for name, shape in tensor_shapes(model).items() if len(shape) == 2}
    if at_load is not None:
        sizes = {name: shape[1] for name, shape in matrices.items() if name.endswith(PROJECTIONS)}
        made = {name: coding_at_load(at_load, size) for name, size in sizes.items()}
        return Layouts({name: coding for name, coding in made.items() if coding is not None})
    if load_format == "dummy" or method_of(source, revision) is None:
        return Layouts()
    checkpoint = open_checkpoint(source, revision, load_format)[1]
    assert isinstance(checkpoint, QuantizedTensors)
    checkpoint.check(tensor_shapes(model), optional_shapes(model))
    quantized = [name for name in matrices if checkpoint.is_quantized(name)]
    codings = {name: coding for name in quantized if (coding := checkpoint.coding(name)) is not None}
    groups = {name: group for name in quantized if (group := checkpoint.super_group(name)) is not None}
    return Layouts(codings, groups)
