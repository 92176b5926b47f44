"""Number of KV blocks that a user sets, and the check that memory suffices. Allocates nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from specrs.config import EngineConfig
from specrs.errors import InvalidConfigError, invalid

GIB = 2**30
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def host_memory() -> int:
    """Return the bytes that an engine may use on a CPU: the machine's memory, or the container's limit."""
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = _CGROUP_LIMIT.read_text().strip()
    except OSError:  # no container, or an older kernel
        return most
    return min(most, int(limit)) if limit.isdigit() else most


def check_memory(config: EngineConfig, free_memory: Callable[[], int]) -> None:
    """Raise `InvalidConfigError` if `kv_cache_memory_bytes` exceeds what `free_memory` returns. Reads no weights."""
    given = config.kv_cache_memory_bytes
    if given is not None:
        _check_room("kv_cache_memory_bytes", given, given, free_memory())


def given_num_blocks(
    config: EngineConfig, bytes_per_block: int, max_model_len: int, least_blocks: int, free_memory: Callable[[], int]
) -> int | None:
    """Return the number of blocks that the user set: `num_gpu_blocks_override`, or what fits in
    `kv_cache_memory_bytes`.

    None if neither is set. `bytes_per_block` counts target and draft. `least_blocks` is the need of one request of
    `max_model_len` positions, which is smaller with a sliding window. `free_memory` returns the bytes that the device
    has free.

    Raises:
        InvalidConfigError: no request of full length fits, or the pool is larger than the memory.
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
        raise too_few_blocks(field, given, f"{blocks} KV blocks fit", max_model_len, least_blocks, least)
    _check_room(field, given, blocks * bytes_per_block, free_memory())
    return blocks


def too_few_blocks(
    field: str, value: int | None, fit: str, max_model_len: int, least_blocks: int, least: str
) -> InvalidConfigError:
    """Return the error for a pool without room for one request of full length. `least` is in the field's unit."""
    needs = f"one request of max_model_len={max_model_len} needs {least_blocks}"
    reason = f"{fit}, {needs}; must be at least {least}, or set a smaller max_model_len"
    return invalid(InvalidConfigError, field, value, reason)


def _check_room(field: str, value: int, needed: int, memory: int) -> None:
    if needed > memory:
        reason = f"{needed / GIB:.2f} GiB of KV cache; must be at most {memory / GIB:.2f} GiB, the memory there is"
        raise invalid(InvalidConfigError, field, value, reason)
