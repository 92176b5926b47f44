"""Experts of a layer on a CUDA device, as kernels that do not wait for the host. Norms nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specrs.kernels.coding import Coding
from specrs.kernels.cuda._codes import coding_as_list
from specrs.kernels.cuda.configs import LinearShape, linear_config
from specrs.kernels.cuda.device import DeviceLimits
from specrs.kernels.cuda.experts import add_pairs, route, sort_pairs, weigh_inputs
from specrs.kernels.cuda.grouped_linear import grouped_linear
from specrs.kernels.cuda.linear_product import MAX_ROWS, block_m
from specrs.kernels.quantized_weight import QuantizedWeight
from specrs.models.config import ModelConfig
from specrs.models.torch_weights import TorchExperts, TorchLayer

CHUNK_ROWS = 2048
"""Largest number of rows that go through experts at once. Buffers have a row for each pair of row and expert."""


Codings = Mapping[str, Collection[Coding | None]]
"""For each of the two products of experts, by name, the formats that its weights have in any layer. None stands for
weights that are not quantized."""
DENSE: Codings = {"gate_up": (None,), "down": (None,)}
"""Codings of a model whose experts are not quantized."""


def codings_of(layers: Sequence[TorchLayer]) -> Codings:
    """Return the codings of the experts of a model's layers."""
    found: dict[str, set[Coding | None]] = {"gate_up": set(), "down": set()}
    for layer in layers:
        if layer.experts is not None:
            for name, weight in zip(found, layer.experts.stacked_quantized or (None, None), strict=True):
                found[name].add(weight.coding if isinstance(weight, QuantizedWeight) else None)
    return found


def expert_shapes(c: ModelConfig, dtype: torch.dtype) -> dict[str, LinearShape]:
    """Return the products of a layer's experts with dense weights, by name. Empty for a model without experts."""
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
    """[P, hidden], output of each pair, and before it its weighted input if experts have one."""
    shared_gate_up: Tensor
    """[rows, 2 * shared intermediate], gate and up of a shared expert, for many rows. 0 columns without one."""
    shared_activated: Tensor
    """[rows, shared intermediate], activations of a shared expert. 0 columns without one."""
    shared_made: Tensor
    """[rows, hidden], output of a shared expert. No rows without one."""
    configs: dict[tuple[str, Coding | None, int], list[int]]
    """Fields of the `LinearConfig` for each (product, format of its weight, number of columns of its tiles)."""

    @classmethod
    def allocate(
        cls, c: ModelConfig, max_rows: int, dtype: torch.dtype, device: torch.device, limits: DeviceLimits
    ) -> ExpertBuffers | None:
        """Return buffers for passes of at most `max_rows` rows. None for a model without experts."""
        if c.experts is None:
            return None
        e, rows = c.experts, min(max_rows, CHUNK_ROWS)
        pairs, h, i = rows * e.per_token, c.hidden_size, e.intermediate_size
        shared = e.shared or 0

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
            shared_gate_up=buffer(rows, 2 * shared),
            shared_activated=buffer(rows, shared),
            shared_made=buffer(rows if shared else 0, h),
            configs=_configs(c, dtype, limits, DENSE),
        )

    def of_codings(self, c: ModelConfig, dtype: torch.dtype, limits: DeviceLimits, codings: Codings) -> ExpertBuffers:
        """Return buffers with the same memory, for weights of the formats `codings`."""
        return replace(self, configs=_configs(c, dtype, limits, codings))

    @property
    def tensors(self) -> list[Tensor]:
        """Return all buffers as a list."""
        routed = [self.logits, self.ids, self.shares, self.pairs, self.starts, self.activated, self.made]
        return [*routed, self.shared_gate_up, self.shared_activated, self.shared_made]


def _configs(
    c: ModelConfig, dtype: torch.dtype, limits: DeviceLimits, codings: Codings
) -> dict[tuple[str, Coding | None, int], list[int]]:
    """Return `ExpertBuffers.configs`."""
    return {
        (name, coding, width): linear_config(replace(shape, coding=coding), width, limits).as_list()
        for name, shape in expert_shapes(c, dtype).items()
        for coding in codings[name]
        for width in {block_m(rows) for rows in (1, 17, MAX_ROWS)}
    }


def mixture(
    c: ModelConfig,
    b: ExpertBuffers,
    x: Tensor,
    positions: Tensor,
    w: TorchExperts,
    shared: list[Tensor],
    out: Tensor,
    dependent: bool,
) -> None:
    """Write the output of the experts for x `[N, hidden]` into `out` `[N, hidden]`. The buffers hold the router's
    logits. `shared` is that of `add_pairs`.

    At most `CHUNK_ROWS` rows. Rows at position -1 use no expert, so none is read for them, and give 0.
    """
    assert c.experts is not None
    rows, each, gelu = x.shape[0], c.experts.per_token, c.activation != "silu"
    width = block_m(min(rows, MAX_ROWS))
    ids, shares, count = b.ids[:rows], b.shares[:rows], rows * each
    pairs, activated, made = [b.pairs[:count], b.starts], b.activated[:count], b.made[:count]
    clamp = [] if c.experts.swiglu is None else list(c.experts.swiglu)
    scales = None if w.scales is None else w.scales.experts
    weighs_input, routing = c.experts.weighs_input, [c.experts.norm_topk_prob, c.experts.sigmoids, dependent]
    route(b.logits[:rows], positions, ids, shares, routing, scales, w.bias, c.experts.factor)
    sort_pairs(ids, pairs[0], b.starts, dependent)
    sent = x, each
    if weighs_input:
        weigh_inputs(x, ids, shares, made, dependent)
        sent = made, 1
    for name, given, to, flags, limits in (
        ("gate_up", sent[0], activated, [sent[1], 1, int(gelu), rows], clamp),
        ("down", activated, made, [1, 0, 0, rows], []),
    ):
        weights, coding = _operands(w, name)
        own = [] if coding is None else coding_as_list(coding)
        grouped_linear(given, weights, pairs, to, flags + own, limits, b.configs[name, coding, width], dependent)
    add_pairs(made, ids, None if weighs_input else shares, shared, out, dependent)


def _operands(w: TorchExperts, name: str) -> tuple[list[Tensor], Coding | None]:
    """Return weights, scales and biases of the product `name` of all experts, and the coding of the weights."""
    i = list(DENSE).index(name)
    biases = [] if w.stacked_biases is None else [w.stacked_biases[i]]
    if w.stacked_quantized is None:
        assert w.stacked is not None, "experts packed for a CPU"
        return [w.stacked[i], *biases], None
    weight = w.stacked_quantized[i]
    assert isinstance(weight, QuantizedWeight)
    codes = weight.codes.view(len(w.gate_up), -1, weight.codes.shape[1])
    return [codes, weight.scales, *biases], weight.coding
