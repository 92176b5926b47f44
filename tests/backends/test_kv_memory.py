"""The size of the KV pool: what the user asks for, what one request needs, what the machine has."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrs.backends.cpu.kv_memory import longest_request, resolve_num_blocks
from specrs.config import EngineConfig
from specrs.engine import build
from specrs.engine.request import Request
from specrs.errors import InvalidConfigError
from specrs.model_values import DEFAULT_CPU_KV_CACHE_BYTES
from specrs.pair import TARGET
from specrs.sampling import SamplingParams


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


@given(st.integers(2, 5000), st.integers(1, 40), st.integers(0, 60), st.integers(0, 400))
def test_the_longest_request_that_fits(most: int, size: int, further: int, blocks: int) -> None:
    """Check that one more token would not fit, and that nothing is lowered if all fits, nothing fits, or the user sized
    the cache."""

    def needed(length: int) -> int:
        return -(-length // size) + further

    def longest(config: EngineConfig) -> int:
        return longest_request(config, DEFAULT_CPU_KV_CACHE_BYTES // max(1, blocks), most, needed)

    held = DEFAULT_CPU_KV_CACHE_BYTES // (DEFAULT_CPU_KV_CACHE_BYTES // max(1, blocks))
    fit = longest(EngineConfig())
    if needed(2) > held:
        assert fit == most
    else:
        assert needed(fit) <= held
        assert fit == most or needed(fit + 1) > held
    for sized in (EngineConfig(num_gpu_blocks_override=1), EngineConfig(kv_cache_memory_bytes=1)):
        assert longest(sized) == most


def test_a_long_model_is_served_by_default(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Check that a model that is longer than the default KV cache is served up to what fits. A length that the user set
    is rejected."""
    monkeypatch.setattr("specrs.backends.cpu.kv_memory.DEFAULT_CPU_KV_CACHE_BYTES", 400_000)
    with caplog.at_level(logging.INFO, "specrs"):
        engine = build.build_engine(EngineConfig.from_kwargs(model=str(TARGET), device="cpu", speculative_config=None))
    length = engine.max_model_len
    assert f"max_model_len is lowered from 2048 to {length}: more does not fit" in caplog.text
    assert 16 <= length < 2048
    params = SamplingParams(temperature=0.0, max_tokens=2 * length, ignore_eos=True, detokenize=False)
    job = Request(0, [1, 2, 3], params, num_speculative_tokens=0)
    engine.add_request(job)
    while engine.has_unfinished():
        engine.step()
    assert (len(job.output_token_ids), job.finish_reason) == (length - 3, "length")
    with pytest.raises(InvalidConfigError, match=f"one request of max_model_len={length + 16} needs"):
        build.build_engine(EngineConfig.from_kwargs(model=str(TARGET), device="cpu", max_model_len=length + 16))
