"""Converts grammar masks to torch's boolean masks, for passes that torch computes."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def unpack_mask(words: Tensor, vocab_size: int) -> Tensor:
    """Return `[N, V]` bool, true where a token is forbidden, from packed masks `[N, ceil(V / 32)]` int32."""
    # A byte's eight bools are looked up at once, as the int64 they make: 20 us for 150,000 tokens, where shifts take
    # 400. Bytes are little-endian, as every machine with torch is.
    octets = words.contiguous().view(torch.uint8).flatten().int()
    return _forbidden_bits(words.device).index_select(0, octets).view(torch.bool).view(len(words), -1)[:, :vocab_size]


@cache
def _forbidden_bits(device: torch.device) -> Tensor:
    """Return a table `[256]` int64: entry b holds eight bools, true if bit i of b is 0."""
    bits = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
    return bits.eq(0).view(torch.int64).squeeze(1).to(device)
