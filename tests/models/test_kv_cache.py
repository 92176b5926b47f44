"""Shape, size and zeros of the KV cache."""

from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from specrs.models.config import ModelConfig
from specrs.models.kv_cache import KVCache
from specrs.models.loader import load_config


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
    def resident() -> int:
        status = Path("/proc/self/status")
        if not status.exists():
            pytest.skip("reads the resident size from /proc")
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) * 1024

    before = resident()
    blocks = (1 << 30) // KVCache.bytes_per_block(config, 16, torch.float32)
    cache = KVCache.allocate(config, blocks, 16, torch.float32, "cpu")
    cache.layers[-1][-1].fill_(1)
    assert resident() - before < 1 << 28
