"""Shape, size and zeros of the KV cache."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from process_memory import status
from specrs.arrays import BFLOAT16, FLOAT8_E4M3, FLOAT32
from specrs.models.config import ModelConfig
from specrs.models.kv_cache import KVCache
from specrs.models.kv_dtypes import kv_block_bytes
from specrs.models.kv_groups import kv_groups
from specrs.models.loader import load_config
from specrs.models.native_cache import NativeKVCache


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return load_config(make_checkpoint(tmp_path_factory.mktemp("model"), kv_heads=3, head_dim=10, layers=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_shape_and_size(config: ModelConfig, dtype: torch.dtype) -> None:
    cache = KVCache.allocate(config, 7, 4, dtype, "cpu")
    assert cache.num_blocks == 7
    assert len(cache.layers) == len(cache.k) == len(cache.v) == 2
    for k, v in zip(cache.k, cache.v, strict=True):
        assert k.shape == v.shape == (8, 3, 4, 10)
        assert k.dtype == dtype
        assert not k.any()
        assert not v.any()
    total = sum(layer.nbytes for layer in cache.layers)
    assert KVCache.bytes_per_block(config, 4, dtype) * 8 == total


def test_k_and_v_are_views(config: ModelConfig) -> None:
    cache = KVCache.allocate(config, 2, 4, torch.float32, "cpu")
    cache.k[1].fill_(1)
    cache.v[1].fill_(2)
    assert (cache.layers[1][:, 0] == 1).all()
    assert (cache.layers[1][:, 1] == 2).all()
    assert not cache.layers[0].any()


def test_untouched_memory_is_not_mapped(config: ModelConfig) -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("reads the resident size from /proc")
    before = status("VmRSS")
    blocks = (1 << 30) // KVCache.bytes_per_block(config, 16, torch.float32)
    caches = (
        KVCache.allocate(config, blocks, 16, torch.float32, "cpu"),
        NativeKVCache.allocate(config, blocks, 16, FLOAT32),
    )
    for cache in caches:
        cache.layers[-1][-1] = 1
    assert status("VmRSS") - before < 1 << 28


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT8_E4M3])
def test_a_native_cache(config: ModelConfig, dtype: np.dtype[Any]) -> None:
    cache = NativeKVCache.allocate(config, 7, 4, dtype)
    assert cache.num_blocks == 7
    assert [layer.shape for layer in (*cache.k, *cache.v)] == [(8, 3, 4, 10)] * 4
    assert {layer.dtype for layer in cache.layers} == {dtype}
    assert not any(layer.any() for layer in cache.layers)
    cache.k[1][...] = 1
    assert (cache.layers[1][:, 0] == 1).all()
    assert not cache.v[1].any()
    assert sum(layer.nbytes for layer in cache.layers) == 8 * kv_block_bytes(config, 4, dtype.itemsize)


def test_layers_of_native_groups_share_memory(config: ModelConfig) -> None:
    groups = kv_groups((None, 8), 1)
    cache = NativeKVCache.allocate(config, 3, 4, FLOAT32, groups)
    assert groups.places == (0, 0)
    cache.k[0][2] = 5
    assert (cache.k[1][2] == 5).all()
