"""The size of the KV pool: what the user asks for, what one request needs, what the machine has."""

import pytest
from specrs.backends.cpu.kv_memory import resolve_num_blocks
from specrs.config import EngineConfig
from specrs.engine import build
from specrs.errors import InvalidConfigError


def test_blocks_of_the_pool() -> None:
    assert resolve_num_blocks(EngineConfig(num_gpu_blocks_override=128), 1 << 10, 2048, 128) == 128
    with pytest.raises(
        InvalidConfigError,
        match=r"^num_gpu_blocks_override=3: 3 KV blocks fit, one request of max_model_len=2048 needs "
        r"128; must be at least 128, or set a smaller max_model_len$",
    ):
        resolve_num_blocks(EngineConfig(num_gpu_blocks_override=3), 1 << 10, 2048, 128)
    # what fits in 4 GiB, but no more than all requests can use
    assert resolve_num_blocks(EngineConfig(), 1 << 20, 2048, 128) == 4096
    assert resolve_num_blocks(EngineConfig(max_num_seqs=2, block_size=16), 1 << 10, 100, 7) == 14
    assert resolve_num_blocks(EngineConfig(kv_cache_memory_bytes=1000), 10, 16 * 100, 100) == 100
    with pytest.raises(
        InvalidConfigError, match=r"^kv_cache_memory_bytes=1000: 100 KV blocks fit, .* needs 101; .* 1010 bytes"
    ):
        resolve_num_blocks(EngineConfig(kv_cache_memory_bytes=1000), 10, 16 * 100 + 1, 101)
    with pytest.raises(
        InvalidConfigError,
        match=r"^kv_cache_memory_bytes=None: 4 KV blocks fit in 4 GiB, one request of max_model_len=2048 needs 5; "
        r"must be at least 5368709120 bytes, or set a smaller max_model_len$",
    ):
        resolve_num_blocks(EngineConfig(), 1 << 30, 2048, 5)
    # a window needs fewer than its positions take
    assert resolve_num_blocks(EngineConfig(kv_cache_memory_bytes=1000), 10, 16 * 1000, 100) == 100


def test_more_memory_than_there_is_is_rejected_before_a_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("backend", "kv_memory"):
        monkeypatch.setattr(f"specrs.backends.cpu.{module}.host_memory", lambda: 8 << 30)

    def load(config: EngineConfig) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(build, "load_weights", load)
    given = 999 * 10**9
    with pytest.raises(
        InvalidConfigError,
        match=r"^kv_cache_memory_bytes=999000000000: 930.39 GiB of KV cache; must be at most 8.00 GiB, the memory",
    ):
        build.build_engine(EngineConfig.from_kwargs(kv_cache_memory_bytes=given, device="cpu"))
    with pytest.raises(InvalidConfigError, match=r"^num_gpu_blocks_override=9000: 8.79 GiB"):
        resolve_num_blocks(EngineConfig(num_gpu_blocks_override=9000), 1 << 20, 2048, 128)
