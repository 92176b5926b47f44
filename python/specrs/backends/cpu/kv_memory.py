"""Number of KV blocks of an engine on a CPU. Allocates nothing."""

from __future__ import annotations

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

    def left() -> int:
        return max(0, host_memory() // ranks_here(config.tensor_parallel_size) - state_bytes)

    given = given_num_blocks(config, bytes_per_block, max_model_len, least_blocks, left)
    if given is not None:
        return given
    memory = min(DEFAULT_CPU_KV_CACHE_BYTES, left()) if state_bytes else DEFAULT_CPU_KV_CACHE_BYTES
    blocks = memory // bytes_per_block
    if blocks < least_blocks:
        fit = f"{blocks} KV blocks fit in {memory / GIB:g} GiB"
        if memory < DEFAULT_CPU_KV_CACHE_BYTES:
            fit += f", which {state_bytes / GIB:.2f} GiB of states leave of the memory"
        least = f"{least_blocks * bytes_per_block} bytes"
        raise too_few_blocks("kv_cache_memory_bytes", None, fit, max_model_len, least_blocks, least)
    per_request = num_groups * -(-max_model_len // config.block_size)
    return min(blocks, per_request * config.most_seqs)
