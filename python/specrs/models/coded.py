"""Codes and scales of quantized files as the kernels of a GPU read them, and the part of them that a rank holds."""

from __future__ import annotations

import torch

from specrs.kernels.coded_weight import IN, OUT, CodedWeight
from specrs.kernels.coding import LEAST_GROUP, Coding
from specrs.models.config import ModelConfig
from specrs.models.quantization.grouped import Grouped, Raw, Scaled8
from specrs.models.shards import Shard
from specrs.models.torch_arrays import to_torch


def coded_weight(raw: Raw | None) -> CodedWeight | None:
    """Return the numbers of `raw` as the kernels of a GPU read them; None where no layout of theirs holds them."""
    if raw is None:
        return None
    return _of_fp8(raw) if isinstance(raw, Scaled8) else _of_integers(raw)


def shard_codes(shard: Shard, name: str, whole: CodedWeight, c: ModelConfig) -> CodedWeight | None:
    """Return a rank's part of the weight `name` of a checkpoint of `c`.

    None where it cannot be cut between groups, or where heads of a fused weight are held by several ranks.
    """
    leaf, kv_heads, rank, size = name.split(".")[-2], c.num_kv_heads, shard.rank, shard.size
    try:
        if leaf in ("o_proj", "down_proj"):
            return whole.shard(IN, rank, size)
        if leaf in ("k_proj", "v_proj") and kv_heads < size:
            return whole.shard(OUT, shard.kv_heads(c)[0], kv_heads)
        if leaf == "gate_up_proj":
            return whole.shard(OUT, rank, size, [whole.shape[0] // 2] * 2)
        if leaf == "qkv_proj":
            kv = kv_heads * c.head_dim
            return whole.shard(OUT, rank, size, [c.num_heads * c.head_dim, kv, kv])
        return whole.shard(OUT, rank, size)
    except ValueError:
        return None


def _of_fp8(raw: Scaled8) -> CodedWeight | None:
    coding = Coding("fp8", raw.group, raw.outputs)
    if coding.unit(raw.values.shape[1]) is None:
        return None
    return CodedWeight.of(to_torch(raw.values).view(torch.uint8), to_torch(raw.scales), coding)


def _of_integers(raw: Grouped) -> CodedWeight | None:
    (out, size), groups = raw.values.shape, raw.scales.shape[1]
    group = size // groups
    if raw.group_of is not None or group % LEAST_GROUP:
        return None
    values, scales = to_torch(raw.values), to_torch(raw.scales).contiguous()
    bounds = values.view(out, groups, group).aminmax(dim=2)
    low, high = int(bounds.min.min()), int(bounds.max.max())
    # A zero point is found, not read: the least that leaves no code below 0.
    zeros = -bounds.min.to(torch.int32).clamp(max=0)
    room = not bool((scales.view(torch.int32) & 15).any())
    symmetric = low >= -8 and high <= 7
    zeroed = room and low >= -15 and int((bounds.max + zeros).max()) <= 15
    coding = Coding("int4", group, zeros=not symmetric)
    if (symmetric or zeroed) and coding.unit(size):
        if symmetric:
            zeros = torch.full_like(zeros, 8)
        else:
            scales = (scales.view(torch.int32) | zeros).view(torch.float32)
        return CodedWeight.of((values + zeros.repeat_interleave(group, 1)).to(torch.uint8), scales, coding)
    coding = Coding("int8", group)
    if low >= -128 and high <= 127 and coding.unit(size):
        return CodedWeight.of(values.to(torch.int8).view(torch.uint8), scales, coding)
    return None
