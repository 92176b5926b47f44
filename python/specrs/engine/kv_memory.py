"""The number of KV blocks of an engine, and whether the memory that a user asks for is there. Allocates nothing."""

from __future__ import annotations

import os
from pathlib import Path

from specrs.config import EngineConfig
from specrs.engine.device import resolve_device
from specrs.engine_options import DEFAULT_CPU_KV_CACHE_BYTES
from specrs.errors import InvalidConfigError, invalid

GIB = 2**30
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def memory_of(device: str) -> int:
    """Return the bytes that an engine may use on `device`, such as "cpu" or "cuda:1".

    On a GPU this is the free memory. On a CPU it is the machine's memory, or the limit of the container.
    """
    if device != "cpu":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = _CGROUP_LIMIT.read_text().strip()
    except OSError:  # no container, or an older kernel
        return most
    return min(most, int(limit)) if limit.isdigit() else most


def check_memory(config: EngineConfig) -> None:
    """Raise `InvalidConfigError` if `kv_cache_memory_bytes` exceeds the device's memory. Reads no weights."""
    given = config.kv_cache_memory_bytes
    if given is not None:
        _check_room("kv_cache_memory_bytes", given, given, memory_of(str(resolve_device(config.device))))


def given_num_blocks(
    config: EngineConfig, bytes_per_block: int, max_model_len: int, least_blocks: int, device: str
) -> int | None:
    """Return the blocks that the user asked for: `num_gpu_blocks_override`, or what fits in `kv_cache_memory_bytes`.

    None if neither is set. `bytes_per_block` counts target and draft. `least_blocks` is what one request of
    `max_model_len` positions needs; with a sliding window it is fewer than the positions take. `device` is "cpu",
    "cuda" or "cuda:N".

    Raises:
        InvalidConfigError: no request of full length fits, or the pool is larger than the memory of `device`.
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
    """Return the number of blocks of the KV pool on a CPU.

    It is the number that the user asked for. Otherwise it is what fits in 4 GiB, but no more than `max_num_seqs`
    requests of full length can use. Each position takes a block in each of `num_groups` KV groups.

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
    """Return the error for a pool without room for one request of full length. `least` is in the field's unit."""
    needs = f"one request of max_model_len={max_model_len} needs {least_blocks}"
    reason = f"{fit}, {needs}: allowed are at least {least}, or a smaller max_model_len"
    return invalid(InvalidConfigError, field, value, reason)


def _check_room(field: str, value: int, needed: int, memory: int) -> None:
    if needed > memory:
        reason = f"{needed / GIB:.2f} GiB of KV cache, allowed are at most {memory / GIB:.2f} GiB, the memory there is"
        raise invalid(InvalidConfigError, field, value, reason)
