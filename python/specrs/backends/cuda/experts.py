"""Experts of a layer on a CUDA device: seven kernels, none of which waits for the host. Norms nothing."""

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
"""Largest number of rows that go through experts at once. Buffers have a row for each pair of row and expert."""


def expert_shapes(c: ModelConfig, dtype: torch.dtype) -> dict[str, LinearShape]:
    """Return the products of a layer's experts, by name. Empty for a model without experts."""
    if c.experts is None:
        return {}
    experts, h, i = (c.experts.count, c.experts.per_token), c.hidden_size, c.experts.intermediate_size
    return {
        "gate_up": LinearShape(i, h, dtype, gated=True, experts=experts),
        "down": LinearShape(h, i, dtype, experts=experts),
    }


@dataclass(frozen=True, slots=True)
class ExpertBuffers:
    """Intermediate results of experts. P pairs are the rows at once, times the experts of a row."""

    logits: Tensor
    """[rows, experts] fp32, logits of the router."""
    ids: Tensor
    """[rows, experts of a row] int32, the chosen experts."""
    shares: Tensor
    """[rows, experts of a row] fp32, weights of the chosen experts."""
    pairs: Tensor
    """[P] int32, pairs of row and expert, sorted by expert."""
    starts: Tensor
    """[experts + 1] int32, first pair of each expert."""
    activated: Tensor
    """[P, intermediate], activations of each pair."""
    made: Tensor
    """[P, hidden], output of each pair."""
    configs: dict[tuple[str, int], list[int]]
    """Fields of the LinearConfig for (product, columns of its tiles)."""

    @classmethod
    def allocate(
        cls, c: ModelConfig, max_rows: int, dtype: torch.dtype, device: torch.device, limits: DeviceLimits
    ) -> ExpertBuffers | None:
        """Return buffers for passes of at most `max_rows` rows. None for a model without experts."""
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
        """Return all buffers as a list."""
        return [self.logits, self.ids, self.shares, self.pairs, self.starts, self.activated, self.made]


def mixture(
    c: ModelConfig, b: ExpertBuffers, x: Tensor, positions: Tensor, w: TorchExperts, out: Tensor, dependent: bool
) -> None:
    """Write the output of the experts for x `[N, hidden]` into `out` `[N, hidden]`. The buffers hold the router's
    logits.

    At most `CHUNK_ROWS` rows. Rows at position -1 use no expert, so none is read for them, and give 0.
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
