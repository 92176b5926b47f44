"""A layer's experts in a pass on a CUDA device: seven kernels, none of which waits for the host. Norms nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specrs.kernels.cuda.configs import LinearShape, linear_config
from specrs.kernels.cuda.device import DeviceLimits
from specrs.kernels.cuda.experts import add_pairs, route, sort_pairs
from specrs.kernels.cuda.grouped_linear import grouped_linear
from specrs.kernels.cuda.linear_product import MAX_ROWS, block_m
from specrs.models.config import ModelConfig
from specrs.models.torch_weights import TorchExperts

CHUNK_ROWS = 2048
"""Rows that go through experts at once: the buffers between have a row for each of a row's experts."""


def expert_shapes(c: ModelConfig, dtype: torch.dtype) -> dict[str, LinearShape]:
    """The products of a layer's experts, by name; none of a model without."""
    if c.experts is None:
        return {}
    experts, h, i = (c.experts.count, c.experts.per_token), c.hidden_size, c.experts.intermediate_size
    return {
        "gate_up": LinearShape(i, h, dtype, gated=True, experts=experts),
        "down": LinearShape(h, i, dtype, experts=experts),
    }


@dataclass(frozen=True, slots=True)
class ExpertBuffers:
    """What experts pass their results through; P pairs are the rows at once times the experts of a row."""

    logits: Tensor
    """[rows, experts] fp32, of the router."""
    ids: Tensor
    """[rows, experts of a row] int32"""
    shares: Tensor
    """Like `ids`, fp32."""
    pairs: Tensor
    """[P] int32"""
    starts: Tensor
    """[experts + 1] int32"""
    activated: Tensor
    """[P, intermediate]"""
    made: Tensor
    """[P, hidden]"""
    configs: dict[tuple[str, int], list[int]]
    """Fields of the LinearConfig of (product, columns of its tiles)."""

    @classmethod
    def allocate(
        cls, c: ModelConfig, max_rows: int, dtype: torch.dtype, device: torch.device, limits: DeviceLimits
    ) -> ExpertBuffers | None:
        """Of a model's passes of at most `max_rows` rows; None for one without experts."""
        if c.experts is None:
            return None
        e, rows = c.experts, min(max_rows, CHUNK_ROWS)
        pairs, h, i = rows * e.per_token, c.hidden_size, e.intermediate_size
        widths = {block_m(rows) for rows in (1, 17, MAX_ROWS)}
        configs = {
            (name, width): linear_config(shape, width, limits).as_list()
            for name, shape in expert_shapes(c, dtype).items()
            for width in widths
        }

        def buffer(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        f32, i32 = torch.float32, torch.int32
        return cls(
            logits=buffer(rows, e.count, dtype=f32),
            ids=buffer(rows, e.per_token, dtype=i32),
            shares=buffer(rows, e.per_token, dtype=f32),
            pairs=buffer(pairs, dtype=i32),
            starts=buffer(e.count + 1, dtype=i32),
            activated=buffer(pairs, i),
            made=buffer(pairs, h),
            configs=configs,
        )

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [self.logits, self.ids, self.shares, self.pairs, self.starts, self.activated, self.made]


def mixture(
    c: ModelConfig, b: ExpertBuffers, x: Tensor, positions: Tensor, w: TorchExperts, out: Tensor, dependent: bool
) -> None:
    """Write into `out` `[N, hidden]` what experts make of x `[N, hidden]`, whose router's logits are in the buffers.

    At most `CHUNK_ROWS` rows. Rows at position -1 are sent to no expert, so that none is read for them; they give 0.
    """
    assert c.experts is not None
    assert w.stacked is not None, "experts packed for a CPU"
    rows, each, gelu = x.shape[0], c.experts.per_token, c.activation != "silu"
    width = block_m(min(rows, MAX_ROWS))
    ids, shares, count = b.ids[:rows], b.shares[:rows], rows * each
    pairs, activated, made = [b.pairs[:count], b.starts], b.activated[:count], b.made[:count]
    gate_up, down = ([weight] for weight in w.stacked)
    if w.stacked_biases is not None:
        gate_up, down = ([*both] for both in zip(w.stacked, w.stacked_biases, strict=True))
    clamp = [] if c.experts.swiglu is None else list(c.experts.swiglu)
    route(b.logits[:rows], positions, ids, shares, c.experts.norm_topk_prob, dependent)
    sort_pairs(ids, pairs[0], b.starts, dependent)
    flags = [each, 1, int(gelu), rows]
    grouped_linear(x, gate_up, pairs, activated, flags, clamp, b.configs["gate_up", width], dependent)
    grouped_linear(activated, down, pairs, made, [1, 0, 0, rows], [], b.configs["down", width], dependent)
    add_pairs(made, ids, shares, out, dependent)
