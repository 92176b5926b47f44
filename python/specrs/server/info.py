"""Answers of the endpoints that routers and operators read, under vLLM's and SGLang's names. Generates no tokens."""

from __future__ import annotations

import time
from typing import Any

from specrs.async_llm import AsyncLLM
from specrs.errors import EngineDeadError
from specrs.outputs import EngineStats
from specrs.server.context import Context, Shared
from specrs.server.models import Models


def models(models: Models[Context], shared: Shared) -> dict[str, Any]:
    """Answer `GET /v1/models`."""
    return {"object": "list", "data": [model(models, shared, name) for name in models.names]}


def model(models: Models[Context], shared: Shared, name: str) -> dict[str, Any]:
    """Answer `GET /v1/models/{name}`. Raises a 404 `APIError` if the server has no model or adapter of that name.

    A server with several models reports the `state` of each. `max_model_len` is null before a model is loaded.
    """
    found = models.find(name or "/")  # no name is no name of its own here
    context = found.loaded
    lora = None if context is None else context.lora_request(name)
    entry = {
        "id": name,
        "object": "model",
        "created": shared.created,
        "owned_by": "specrs",
        "root": found.root if lora is None else lora.lora_path,
        "parent": None if lora is None else lora.base_model_name or found.name,
        "max_model_len": None if context is None else context.llm.limits.max_model_len,
    }
    return {**entry, "state": found.state} if models.reloads else entry


async def load(models: Models[Context]) -> dict[str, Any]:
    """Answer `GET /load` in vLLM's form: the number of requests that run or wait."""
    stats = [one for _, one in await _stats(models)]
    return {"server_load": sum(one.num_running + one.num_waiting for one in stats)}


async def loads(models: Models[Context], shared: Shared) -> dict[str, Any]:
    """Answer `GET /v1/loads` in SGLang's form: running and waiting requests, and the tokens in the KV pools of all
    loaded models. There is always one rank."""
    found = await _stats(models)
    running = sum(stats.num_running for _, stats in found)
    waiting = sum(stats.num_waiting for _, stats in found)
    total = sum(stats.num_blocks * llm.config.block_size for llm, stats in found)
    held = sum((stats.num_blocks - stats.num_free_blocks) * llm.config.block_size for llm, stats in found)
    usage = held / total if total else 0.0
    figures = {
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_total_reqs": running + waiting,
        "num_used_tokens": held,
        "max_total_num_tokens": total,
        "token_usage": usage,
        "max_running_requests": sum(llm.config.most_seqs for llm, _ in found),
    }
    return {
        "timestamp": time.time(),
        "version": shared.version,
        "dp_rank_count": 1,
        "loads": [{"dp_rank": 0, **figures}],
        "aggregate": {
            "total_running_reqs": running,
            "total_waiting_reqs": waiting,
            "total_reqs": running + waiting,
            "avg_token_usage": usage,
        },
    }


async def _stats(models: Models[Context]) -> list[tuple[AsyncLLM, EngineStats]]:
    """Return the statistics of each loaded model. One that ends meanwhile is left out if the server goes on."""
    found = []
    for context in models.loaded:
        try:
            found.append((context.llm, await context.llm.stats()))
        except EngineDeadError:
            if not models.reloads:
                raise
    return found


def model_info(context: Context) -> dict[str, Any]:
    """Answer `GET /model_info` in SGLang's form."""
    config = context.llm.config
    return {
        "model_path": config.target,
        "tokenizer_path": config.tokenizer or config.target,
        "served_model_name": context.model_names[0],
        "is_generation": True,
    }


async def server_info(context: Context) -> dict[str, Any]:
    """Answer `GET /server_info`: the settings of the server and their effective values, under vLLM's and SGLang's
    names."""
    config, limits = context.llm.config, context.llm.limits
    stats, speculative = await context.llm.stats(), config.speculative_config
    return {
        **model_info(context),
        "version": context.shared.version,
        "dtype": context.llm.dtype,
        "quantization": config.quantization,
        "kv_cache_dtype": config.kv_cache_dtype,
        "max_model_len": limits.max_model_len,
        "max_num_seqs": config.most_seqs,
        "max_num_batched_tokens": config.batched_tokens,
        "enable_prefix_caching": config.enable_prefix_caching,
        "block_size": config.block_size,
        "num_gpu_blocks": stats.num_blocks,
        "max_total_num_tokens": stats.num_blocks * config.block_size,
        "speculative_config": None
        if speculative is None
        else {
            "method": speculative.method,
            "model": speculative.model,
            "num_speculative_tokens": speculative.num_speculative_tokens,
            "max_num_speculative_tokens": limits.num_speculative_tokens,
        },
        "tp_size": config.tensor_parallel_size,
        "dp_size": 1,
    }
