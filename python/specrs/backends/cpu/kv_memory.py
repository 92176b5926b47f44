"""Number of KV blocks of an engine on a CPU. Allocates nothing."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from specrs.backends.kv_memory import GIB, given_num_blocks, host_memory, too_few_blocks
from specrs.config import EngineConfig
from specrs.model_values import DEFAULT_CPU_KV_CACHE_BYTES
from specrs.parallel.start import ranks_here


def resolve_num_blocks(
    config: EngineConfig,
    bytes_per_block: int,
    max_model_len: int,
    least_blocks: int,
    num_groups: int = 1,
    state_bytes: int = 0,
) -> int:
    """Return the number of blocks of the KV pool on a CPU.

    It is the number that the user asked for. Otherwise it is what fits in 4 GiB, but no more than `max_num_seqs`
    requests of full length can use. Each position takes a block in each of `num_groups` KV groups. `state_bytes` of the
    memory are subtracted first, for states and their snapshots. The ranks on a machine have equal shares of its memory.

    Raises `InvalidConfigError` if no request of full length fits, or if the pool that the user asked for is larger than
    the memory.
    """
    given = given_num_blocks(config, bytes_per_block, max_model_len, least_blocks, lambda: _left(config, state_bytes))
    if given is not None:
        return given
    memory = _default_bytes(config, state_bytes)
    blocks = memory // bytes_per_block
    if blocks < least_blocks:
        fit = f"{blocks} KV blocks fit in {memory / GIB:g} GiB"
        if memory < DEFAULT_CPU_KV_CACHE_BYTES:
            fit += f", which {state_bytes / GIB:.2f} GiB of states leave of the memory"
        least = f"{least_blocks * bytes_per_block} bytes"
        raise too_few_blocks("kv_cache_memory_bytes", None, fit, max_model_len, least_blocks, least)
    per_request = num_groups * -(-max_model_len // config.block_size)
    return min(blocks, per_request * config.most_seqs)


def longest_request(
    config: EngineConfig,
    bytes_per_block: int,
    max_model_len: int,
    least_blocks: Callable[[int], int],
    state_bytes: int = 0,
) -> int:
    """Return the largest number of tokens, at most `max_model_len`, of which one request fits in the default KV cache.

    `least_blocks` returns the number of blocks that a request of so many tokens needs. The result is `max_model_len` if
    the user sized the cache, or if not even two tokens fit.
    """
    if config.num_gpu_blocks_override is not None or config.kv_cache_memory_bytes is not None:
        return max_model_len
    blocks = _default_bytes(config, state_bytes) // bytes_per_block
    if least_blocks(max_model_len) <= blocks or least_blocks(2) > blocks:
        return max_model_len
    return bisect_right(range(2, max_model_len), blocks, key=least_blocks) + 1


def _left(config: EngineConfig, state_bytes: int) -> int:
    """Return the bytes of memory that states leave to a rank."""
    return max(0, host_memory() // ranks_here(config.tensor_parallel_size) - state_bytes)


def _default_bytes(config: EngineConfig, state_bytes: int) -> int:
    """Return the bytes of the KV cache if the user did not size it."""
    return min(DEFAULT_CPU_KV_CACHE_BYTES, _left(config, state_bytes)) if state_bytes else DEFAULT_CPU_KV_CACHE_BYTES
