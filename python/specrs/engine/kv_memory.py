"""How many KV blocks an engine has room for, and whether what a user asks for fits. Allocates nothing."""

from __future__ import annotations

import os
from pathlib import Path

from specrs.config import EngineConfig
from specrs.engine.device import device_type, resolve_device
from specrs.engine_options import DEFAULT_CPU_KV_CACHE_BYTES
from specrs.errors import InvalidConfigError, invalid

GIB = 2**30
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def memory_of(device: str) -> int:
    """Bytes of memory that an engine can have there: of a GPU what is free, on a CPU its, or a container's."""
    if device_type(device) == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = _CGROUP_LIMIT.read_text().strip()
    except OSError:  # no container, or an older kernel
        return most
    return min(most, int(limit)) if limit.isdigit() else most


def check_memory(config: EngineConfig) -> None:
    """Raise `InvalidConfigError` where `kv_cache_memory_bytes` are more than there is, before a weight is read."""
    given = config.kv_cache_memory_bytes
    if given is not None:
        _check_room("kv_cache_memory_bytes", given, given, memory_of(resolve_device(config.device)))


def given_num_blocks(
    config: EngineConfig, bytes_per_block: int, max_model_len: int, least_blocks: int, device: str
) -> int | None:
    """Blocks by `num_gpu_blocks_override`, or those that `kv_cache_memory_bytes` hold; None where neither is given.

    `bytes_per_block` counts target and draft; `least_blocks` are what one request of full length needs: with a sliding
    window fewer than its positions take. Raises `InvalidConfigError` if no such request fits, or if the pool takes more
    than the memory of `device`.
    """
    field, given = "num_gpu_blocks_override", config.num_gpu_blocks_override
    blocks, least = given, str(least_blocks)
    if given is None:
        field, given = "kv_cache_memory_bytes", config.kv_cache_memory_bytes
        if given is None:
            return None
        blocks, least = given // bytes_per_block, f"{least_blocks * bytes_per_block} bytes"
    assert blocks is not None
    if blocks < least_blocks:
        raise _too_few(field, given, f"{blocks} KV blocks fit", max_model_len, least_blocks, least)
    _check_room(field, given, blocks * bytes_per_block, memory_of(device))
    return blocks


def resolve_num_blocks(
    config: EngineConfig, bytes_per_block: int, max_model_len: int, least_blocks: int, num_groups: int = 1
) -> int:
    """Blocks of the KV pool on a CPU: those that were asked for, else what fits in 4 GiB, but no more than
    `max_num_seqs` requests of full length can use, whose positions take a block in each of `num_groups`.

    Raises `InvalidConfigError` as `given_num_blocks` does, and if not even one request of full length fits in 4 GiB.
    """
    given = given_num_blocks(config, bytes_per_block, max_model_len, least_blocks, "cpu")
    if given is not None:
        return given
    blocks = DEFAULT_CPU_KV_CACHE_BYTES // bytes_per_block
    if blocks < least_blocks:
        fit = f"{blocks} KV blocks fit in {DEFAULT_CPU_KV_CACHE_BYTES // GIB} GiB"
        least = f"{least_blocks * bytes_per_block} bytes"
        raise _too_few("kv_cache_memory_bytes", None, fit, max_model_len, least_blocks, least)
    per_request = num_groups * -(-max_model_len // config.block_size)
    return min(blocks, per_request * config.max_num_seqs)


def _too_few(
    field: str, value: int | None, fit: str, max_model_len: int, least_blocks: int, least: str
) -> InvalidConfigError:
    """That one request of full length does not fit; `least`: what is allowed at least, in the field's unit."""
    needs = f"one request of max_model_len={max_model_len} needs {least_blocks}"
    reason = f"{fit}, {needs}: allowed are at least {least}, or a smaller max_model_len"
    return invalid(InvalidConfigError, field, value, reason)


def _check_room(field: str, value: int, needed: int, memory: int) -> None:
    if needed > memory:
        reason = f"{needed / GIB:.2f} GiB of KV cache, allowed are at most {memory / GIB:.2f} GiB, the memory there is"
        raise invalid(InvalidConfigError, field, value, reason)
