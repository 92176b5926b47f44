"""Answers of the endpoints that routers and operators read, under vLLM's and SGLang's names. Generates no tokens."""

from __future__ import annotations

import time
from typing import Any

from specrs.server.context import Context


def models(context: Context) -> dict[str, Any]:
    """Answer `GET /v1/models`."""
    return {"object": "list", "data": [model(context, name) for name in (*context.model_names, *context.adapters)]}


def model(context: Context, name: str) -> dict[str, Any]:
    """Answer `GET /v1/models/{name}`. Raises a 404 `APIError` if the server has no model or adapter of that name."""
    context.check_model(name or "/")  # no name is no name of its own here
    lora, base = context.lora_request(name), context.model_names[0]
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "specrs",
        "root": base if lora is None else lora.lora_path,
        "parent": None if lora is None else lora.base_model_name or base,
        "max_model_len": context.llm.limits.max_model_len,
    }


async def load(context: Context) -> dict[str, Any]:
    """Answer `GET /load` in vLLM's form: the number of requests that run or wait."""
    stats = await context.llm.stats()
    return {"server_load": stats.num_running + stats.num_waiting}


async def loads(context: Context) -> dict[str, Any]:
    """Answer `GET /v1/loads` in SGLang's form: running and waiting requests, and the tokens in the KV pool. There is
    always one rank."""
    stats, block_size = await context.llm.stats(), context.llm.config.block_size
    held = stats.num_blocks - stats.num_free_blocks
    figures = {
        "num_running_reqs": stats.num_running,
        "num_waiting_reqs": stats.num_waiting,
        "num_total_reqs": stats.num_running + stats.num_waiting,
        "num_used_tokens": held * block_size,
        "max_total_num_tokens": stats.num_blocks * block_size,
        "token_usage": stats.kv_cache_usage,
        "max_running_requests": context.llm.config.max_num_seqs,
    }
    return {
        "timestamp": time.time(),
        "version": context.version,
        "dp_rank_count": 1,
        "loads": [{"dp_rank": 0, **figures}],
        "aggregate": {
            "total_running_reqs": stats.num_running,
            "total_waiting_reqs": stats.num_waiting,
            "total_reqs": stats.num_running + stats.num_waiting,
            "avg_token_usage": stats.kv_cache_usage,
        },
    }


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
        "version": context.version,
        "dtype": context.llm.dtype,
        "quantization": config.quantization,
        "kv_cache_dtype": config.kv_cache_dtype,
        "max_model_len": limits.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
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
        "tp_size": 1,
        "dp_size": 1,
    }
