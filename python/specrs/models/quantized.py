"""Quantized weights of files, converted to the layout that the GPU kernels read and sliced for tensor parallel
ranks."""

from __future__ import annotations

import numpy as np
import torch

from specrs.kernels.coding import LEAST_GROUP, Coding
from specrs.kernels.quantized_weight import IN, OUT, QuantizedWeight
from specrs.models.config import ModelConfig
from specrs.models.quantization.grouped import E2M1, Grouped, Raw, Scaled8, WithMinima
from specrs.models.shards import Shard
from specrs.models.torch_arrays import to_torch


def quantized_weight(raw: Raw | None) -> QuantizedWeight | None:
    """Return `raw` in the layout of the GPU kernels. None if `raw` is None or no layout can hold it exactly."""
    if raw is None:
        return None
    if isinstance(raw, Scaled8):
        return _of_fp8(raw)
    if isinstance(raw, WithMinima):
        return _with_minima(raw)
    return _of_mxfp4(raw) if isinstance(raw, E2M1) else _of_integers(raw)


def shard_codes(shard: Shard, name: str, whole: QuantizedWeight, c: ModelConfig) -> QuantizedWeight | None:
    """Return a rank's slice of the quantized weight `name` in a checkpoint of the model `c`.

    None if the slice would split a scale group, if no kernel reads it, or if ranks share KV heads of a fused weight.
    """
    leaf, kv_heads, rank, size = name.split(".")[-2], c.num_kv_heads, shard.rank, shard.size
    outward = ("o_proj", "down_proj") if c.experts is None else ("o_proj", "down_proj", c.experts.projections[2])
    try:
        if leaf in outward:
            return whole.shard(IN, rank, size)
        if leaf in ("k_proj", "v_proj") and kv_heads < size:
            return whole.shard(OUT, shard.kv_heads(c)[0], kv_heads)
        if c.delta is not None and leaf == "out_proj":
            # A turned projection has an equal part for each value head of a key head.
            parts = c.delta.value_heads // c.delta.key_heads if c.delta.turned else 1
            return whole.shard(IN, rank, size, [c.delta.inner // parts] * parts)
        if c.delta is not None and leaf == "in_proj_qkv":
            keys = c.delta.key_heads * c.delta.key_dim
            return whole.shard(OUT, rank, size, [keys, keys, c.delta.inner])
        if leaf == "gate_up_proj":
            return whole.shard(OUT, rank, size, [whole.shape[0] // 2] * 2)
        if leaf == "qkv_proj":
            kv = kv_heads * c.head_dim
            return whole.shard(OUT, rank, size, [c.num_heads * c.head_dim, kv, kv])
        return whole.shard(OUT, rank, size)
    except ValueError:
        return None


def _of_fp8(raw: Scaled8) -> QuantizedWeight | None:
    coding = Coding("fp8", raw.group, raw.outputs)
    if coding.unit(raw.values.shape[1]) is None:
        return None
    return QuantizedWeight.of(to_torch(raw.values).view(torch.uint8), to_torch(raw.scales), coding)


def _of_mxfp4(raw: E2M1) -> QuantizedWeight | None:
    coding = Coding("mxfp4", 32)
    if coding.unit(raw.codes.shape[1]) is None:
        return _of_integers(raw.grouped())
    return QuantizedWeight.of(to_torch(raw.codes), to_torch(raw.exponents), coding)


def _with_minima(raw: WithMinima) -> QuantizedWeight | None:
    (out, size), blocks = raw.values.shape, raw.scales.shape[1]
    halves = np.stack((raw.scales, raw.minima), axis=-1).view(np.int32)
    words, group, minima = halves, size // blocks, "pairs"
    if raw.factors is not None:
        factors = np.ascontiguousarray(raw.factors).reshape(out, blocks, -1).view(np.int32)
        words, group, minima = np.concatenate((halves, factors), axis=-1), size // raw.factors.shape[1], "blocks"
    coding = Coding("int4" if raw.bits == 4 else "int8", group, minima=minima)
    if coding.unit(size) is None:
        return None
    return QuantizedWeight.of(to_torch(raw.values).view(torch.uint8), to_torch(words.reshape(out, -1)), coding)


def _of_integers(raw: Grouped) -> QuantizedWeight | None:
    (out, size), groups = raw.values.shape, raw.scales.shape[1]
    group = size // groups
    if raw.group_of is not None or group % LEAST_GROUP:
        return None
    values, scales = to_torch(raw.values), to_torch(raw.scales).contiguous()
    bounds = values.view(out, groups, group).aminmax(dim=2)
    low, high = int(bounds.min.min()), int(bounds.max.max())
    # Zero points are derived from the values: the smallest that leaves no code below 0.
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
        return QuantizedWeight.of((values + zeros.repeat_interleave(group, 1)).to(torch.uint8), scales, coding)
    coding = Coding("int8", group)
    if low >= -128 and high <= 127 and coding.unit(size):
        return QuantizedWeight.of(values.to(torch.int8).view(torch.uint8), scales, coding)
    return None
