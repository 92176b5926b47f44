"""Measures attention of one request alone: six rows of verification against the device's copy bandwidth, and prompt
chunks."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from specrs.kernels.cuda.attention_config import AttentionConfig
from specrs.kernels.cuda.device import limits_of
from specrs.kernels.cuda.paged_attention import AttentionRows, MaskParams, paged_attention
from torch import Tensor

from gpu.timing import graphed, milliseconds

ROWS, KV_HEADS, GROUP, DIM, BLOCK = 6, 8, 8, 128, 16


def measure(device: torch.device, contexts: list[int]) -> dict[str, Any]:
    """Return for each context milliseconds, TB/s of K and V read, and share of the copy bandwidth."""
    copied = copy_bandwidth(device)
    return {"copy_tb_per_s": copied} | {str(context): one(device, context, copied) for context in contexts}


def prefill(device: torch.device, chunks: list[int], contexts: list[int]) -> dict[str, Any]:
    """Return milliseconds, TFLOP/s, TB/s and the splits of chunks of `chunks` rows that end a context."""
    copied = copy_bandwidth(device)
    sizes = [(rows, context) for rows in chunks for context in contexts]
    return {f"{rows} rows at {context}": one(device, context, copied, rows) for rows, context in sizes}


@torch.inference_mode()
def one(device: torch.device, context: int, copied: float, rows: int = ROWS) -> dict[str, float]:
    """Measure `rows` rows after a context. Its blocks are shuffled, as in a pool that has served for a while."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    heads, blocks, limits = GROUP * KV_HEADS, -(-(context + rows) // BLOCK), limits_of(device)
    cut = AttentionConfig.choose(
        batch=1,
        max_q_len=rows,
        num_heads=heads,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        dtypes=(dtype, dtype),
        limits=limits,
        span=context + rows,
    )
    span = context + rows
    cut = cut.of_chunks(rows, batch=1, max_q_len=rows, num_kv_heads=KV_HEADS, limits=limits, span=span)
    cache = torch.randn(blocks + 1, 2, KV_HEADS, BLOCK, DIM, device=device).to(dtype)
    q = torch.randn(rows, heads * DIM, device=device).to(dtype)
    positions = torch.arange(context, context + rows, device=device)
    q_start = torch.tensor([0, rows], device=device)
    table = torch.randperm(blocks, device=device)[None].contiguous()
    out = torch.empty_like(q)
    sizes = cut.scratch_sizes(batch=1, max_q_len=rows, num_kv_heads=KV_HEADS, head_dim=DIM)
    partials, stats = (torch.empty(size, device=device) for size in sizes[:2])
    counters = torch.zeros(sizes[2], dtype=torch.int32, device=device)
    fields = list(dataclasses.astuple(cut))

    def call() -> None:
        paged_attention(
            q,
            cache,
            AttentionRows(positions, q_start, table, rows),
            out,
            (partials, stats, counters),
            MaskParams(DIM**-0.5),
            fields,
            limits.capability >= 90,
        )

    ms = milliseconds(graphed(call), calls=50)
    rate = 2 * KV_HEADS * DIM * (context + rows) * dtype.itemsize / ms / 1e9
    flops = 4e-9 * heads * DIM * rows * (context + rows / 2)
    return {
        "ms": ms,
        "tb_per_s": rate,
        "share_of_copy": rate / copied,
        "tflop_per_s": flops / ms,
        "splits": cut.splits,
    }


def copy_bandwidth(device: torch.device) -> float:
    """Return the bandwidth of a copy of 1 GiB in TB/s, counting bytes read and bytes written."""
    size = (1 << 30) if device.type == "cuda" else 1 << 20
    source: Tensor = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    return 2 * size / milliseconds(copy) / 1e9
