"""Memory that a model will take, from the sizes of its files. Loads nothing."""

from __future__ import annotations

from pathlib import Path

from specrs.backends.model_source import draft_source, drafts_by_model
from specrs.backends.table import backend_of, resolve_device
from specrs.config import EngineConfig
from specrs.engine.states import fit_states
from specrs.errors import UnsupportedModelError, invalid_config
from specrs.model_values import DEFAULT_CPU_KV_CACHE_BYTES
from specrs.models.checkpoint import resolve_folder
from specrs.models.gguf.checkpoint import gguf_path
from specrs.models.gguf.splits import part_names
from specrs.models.kv_dtypes import kv_block_bytes
from specrs.models.loader import load_config

_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number in the KV cache, by the dtype of the model."""


def memory_of(config: EngineConfig) -> int:
    """Return the bytes of an engine's weight files, KV cache and states. Files of a hub id are downloaded first.

    Buffers are not counted, and weights count as they are stored: `quantization` at load takes less.

    Raises `CheckpointError` for a model that cannot be read, `InvalidConfigError` for a KV cache on a GPU without
    `kv_cache_memory_bytes`, which would take all memory.
    """
    draft = draft_source(config)
    sources = [(config.target, config.revision), *([] if draft is None else [draft])]
    weights = sum(_file_bytes(source, revision) for source, revision in sources)
    kv_sources = sources if drafts_by_model(config) else sources[:1]
    return weights + _kv_bytes(config, kv_sources) + _state_bytes(config)


def _file_bytes(source: str, revision: str | None) -> int:
    file = gguf_path(source, revision)
    if file is not None:
        return sum((file.parent / name).stat().st_size for name in part_names(file.name))
    folder: Path = resolve_folder(source, revision)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _state_bytes(config: EngineConfig) -> int:
    """Return the bytes of the states of all requests, and of snapshots. 0 if no layer of the target has a state."""
    try:
        row, draft = load_config(config.target, revision=config.revision).state_bytes
    except UnsupportedModelError:
        return 0
    if row == 0:
        return 0
    device = resolve_device(config.device)
    memory = backend_of(device).free_memory(device)
    requests, snapshots = fit_states(config, row, draft, memory)
    return (requests + snapshots) * row


def _kv_bytes(config: EngineConfig, sources: list[tuple[str, str | None]]) -> int:
    """Return the bytes of the KV cache for the models at `sources`, the first of which is the target."""
    if config.kv_cache_memory_bytes is not None and config.num_gpu_blocks_override is None:
        return config.kv_cache_memory_bytes
    on_cpu = resolve_device(config.device) == "cpu"
    if not on_cpu and config.num_gpu_blocks_override is None:
        raise invalid_config("kv_cache_memory_bytes", None, "must be given on a GPU with --models-memory-bytes")
    try:
        models = [load_config(source, revision=revision) for source, revision in sources]
    except UnsupportedModelError:
        return DEFAULT_CPU_KV_CACHE_BYTES  # transformers computes it; its cache is at most that large
    item = 1 if config.kv_cache_dtype.startswith("fp8") else _ITEM_BYTES.get(config.dtype, 4 if on_cpu else 2)
    block = sum(kv_block_bytes(model, config.block_size, item) for model in models)
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override * block
    longest = config.max_model_len or models[0].max_position_embeddings
    requests = -(-longest // config.block_size) * config.most_seqs
    return min(DEFAULT_CPU_KV_CACHE_BYTES, requests * block)
