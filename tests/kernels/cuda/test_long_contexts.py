"""128k contexts, interpreted: positions beyond 2^17, block tables of over 8,192 entries, offsets beyond 2^31
elements."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from specrs.kernels.cuda import paged_attention
from specrs.kernels.cuda.qk_norm_rope import qk_norm_rope
from triton.runtime import interpreter

from .test_adversary import planted
from .test_paged_attention import Pass, cut, span

pytestmark = pytest.mark.skipif(os.environ.get("SPECRS_GPU", "0") != "0", reason="kernels run on a GPU, or as if")


@pytest.mark.parametrize("splits", [1, 3])
def test_positions_beyond_2_17(splits: int) -> None:
    """Check the last rows of a context of 131,300 positions with a window of 300, in a block table of 8,207 entries."""
    p = Pass([span((1 << 17) + 220, (1 << 17) + 222), [7]], 2, 1, 16, 16, window=300)
    assert p.table.shape[1] > 8192
    p.check(cut(p, 2, splits, 64))


class FarMemory:
    """A cache whose blocks pretend to lie `shift` bytes further. Accesses there are redirected; accesses at the true
    place are rejected, because a 32-bit offset would land there."""

    def __init__(self, cache: torch.Tensor, shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begin, self.size, self.shift = cache.data_ptr(), cache.nbytes, shift
        self.taken_back = 0
        builder = type(interpreter.interpreter_builder)
        load, store = builder.create_masked_load, builder.create_masked_store
        monkeypatch.setattr(builder, "create_masked_load", lambda own, ptrs, mask, *rest: load(
            own, self.near(ptrs, mask), mask, *rest))  # fmt: skip
        monkeypatch.setattr(builder, "create_masked_store", lambda own, ptrs, value, mask, *rest: store(
            own, self.near(ptrs, mask), value, mask, *rest))  # fmt: skip

    def near(self, ptrs: Any, mask: Any) -> Any:
        addresses = ptrs.data.astype(np.int64)
        chosen = addresses[np.broadcast_to(mask.data, addresses.shape).astype(bool)]
        far = (addresses >= self.begin + self.shift) & (addresses < self.begin + self.shift + self.size)
        inside = (chosen >= self.begin) & (chosen < self.begin + self.size)
        known = (chosen >= self.begin + self.shift) & (chosen < self.begin + self.shift + self.size)
        if inside.any():
            raise AssertionError("an offset has lost its upper bits")
        self.taken_back += int(known.sum())
        return interpreter.TensorHandle(
            np.where(far, addresses - self.shift, addresses).astype(ptrs.data.dtype), ptrs.dtype
        )


def test_attention_reads_beyond_2_31_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    p = Pass([span(20, 23), [40]], 4, 2, 16, 16)
    expected = p.run(cut(p, 3, 2))
    each = p.cache[0].numel()
    blocks = -(-(1 << 32) // each)  # 2^32 elements: in 32 bits the offset would be the same
    p.table = torch.where(p.table < len(p.cache), p.table + blocks, p.table)
    memory = FarMemory(p.cache, blocks * each * p.cache.element_size(), monkeypatch)
    assert p.run(cut(p, 3, 2)).nan_to_num().equal(expected.nan_to_num())
    assert memory.taken_back > 0


def test_an_offset_in_32_bits_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    change = "mask=inside, other=0)\n            base", "mask=inside, other=0).to(tl.int32)\n            base"
    faulty = planted(paged_attention, tmp_path, [change])
    monkeypatch.setattr("kernels.cuda.test_paged_attention.paged_attention", faulty.paged_attention)
    with pytest.raises(Exception, match="an offset has lost its upper bits"):
        test_attention_reads_beyond_2_31_elements(monkeypatch)


def test_k_and_v_are_written_beyond_2_31_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    heads, kv_heads, dim, block_size = 2, 1, 16, 4
    qkv = torch.randn(3, (heads + 2 * kv_heads) * dim)
    slots = torch.tensor([5, 0, 9])
    caches = [torch.zeros(4, 2, kv_heads, block_size, dim) for _ in range(2)]
    qk_norm_rope(qkv.clone(), None, [], slots, caches[0], [heads, 0], [1e-6, 1.0, 1.0], False)
    each = caches[1][0].numel()
    blocks = -(-(1 << 32) // each)
    memory = FarMemory(caches[1], blocks * each * 4, monkeypatch)
    qk_norm_rope(qkv.clone(), None, [], slots + blocks * block_size, caches[1], [heads, 0], [1e-6, 1.0, 1.0], False)
    assert memory.taken_back > 0
    assert caches[0].any()
    assert caches[1].equal(caches[0])
