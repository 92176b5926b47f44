"""The forward pass of a dense decoder, as plain functions over weight tensors. Samples nothing and keeps no state.

A pass is a function of its arguments: weights, one PassInputs, one KVCache. There are no modules and no hooks, because
their call overhead is a third of a small model's pass on a CPU. Call it under `torch.inference_mode()`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from specrs.kernels.activation import silu_and_mul
from specrs.kernels.linear import Linear, linear
from specrs.kernels.paged_attention import AttentionPlan, paged_attention, plan_attention, plan_steps, write_kv
from specrs.kernels.rms_norm import rms_norm
from specrs.kernels.rotary import apply_rotary_, rotary_cos_sin
from specrs.models.config import ModelConfig
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Projections that share an input are one matrix: q, k, v above each other, and gate, up."""

    input_norm: Tensor
    """[hidden]"""
    qkv: Linear
    """hidden -> (heads + 2 * kv_heads) * head_dim"""
    qk_norm: Tensor | None
    """[heads + kv_heads, head_dim]: the query norm for each query head, then the key norm for each KV head."""
    o: Linear
    """heads * head_dim -> hidden"""
    post_attention_norm: Tensor
    """[hidden]"""
    gate_up: Linear
    """hidden -> 2 * intermediate"""
    down: Linear
    """intermediate -> hidden"""


class _AttentionShape(TypedDict):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class PassPlan:
    """What a pass over N rows needs besides their ids: the same in every layer."""

    cos: Tensor
    """[N, 1, head_dim], as `rotary_cos_sin` gives it; like sin."""
    sin: Tensor
    attention: AttentionPlan


@dataclass(frozen=True, slots=True)
class Decoder:
    """Weights of a model on one device; read-only after loading, so it may serve several caches at once."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    embedding: Tensor
    """[vocab, hidden]"""
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    """[hidden]"""
    lm_head: Linear
    """hidden -> vocab; fp32 on a CPU also for bf16 models, see `compute_logits`."""
    rotary: Tensor
    """[head_dim] fp32, signed frequencies."""

    @property
    def num_parameters(self) -> int:
        """Weights that a pass reads (see ModelConfig.num_parameters)."""
        return self.config.num_parameters

    def forward(self, inputs: PassInputs, kv_cache: KVCache) -> Tensor:
        """Feed N rows; return their final-normed hidden states `[N, hidden]` of the model's dtype.

        Writes K and V of every row with a slot into `kv_cache` and changes nothing else. Rows at position -1 give
        finite values that mean nothing.
        """
        cos, sin = rotary_cos_sin(inputs.positions, self.rotary, self.dtype)
        attention = plan_attention(
            inputs.positions, inputs.slots, inputs.q_start, inputs.block_table, **self._shape(kv_cache)
        )
        return self.forward_planned(inputs.input_ids, PassPlan(cos, sin, attention), kv_cache)

    def plan_steps(self, positions: Tensor, slots: Tensor, block_table: Tensor, kv_cache: KVCache) -> list[PassPlan]:
        """Plans of S passes of one row per request, `positions` and `slots` `[S, B]` as in
        `paged_attention.plan_steps`."""
        num_steps, batch = positions.shape
        angles = rotary_cos_sin(positions.view(-1), self.rotary, self.dtype)
        cos, sin = (values.view(num_steps, batch, 1, -1).unbind(0) for values in angles)
        plans = plan_steps(positions, slots, block_table, **self._shape(kv_cache))
        return [PassPlan(*parts) for parts in zip(cos, sin, plans, strict=True)]

    def forward_planned(self, input_ids: Tensor, plan: PassPlan, kv_cache: KVCache) -> Tensor:
        """`forward` of N rows whose positions, slots and tables are in `plan`."""
        c = self.config
        heads, kv_heads = c.num_heads, c.num_kv_heads
        cos, sin, attention = plan.cos, plan.sin, plan.attention
        eps, scale = c.rms_norm_eps, c.head_dim**-0.5
        h = self.embedding.index_select(0, input_ids)
        for w, cache in zip(self.layers, kv_cache.layers, strict=True):
            qkv = linear(rms_norm(h, w.input_norm, eps), w.qkv).view(-1, heads + 2 * kv_heads, c.head_dim)
            qk = qkv.narrow(1, 0, heads + kv_heads)  # indexing takes twice as long
            if w.qk_norm is not None:
                rms_norm(qk, w.qk_norm, eps, inplace=True)
            apply_rotary_(qk, cos, sin)
            write_kv(qkv.narrow(1, heads, 2 * kv_heads), cache, attention)
            h = linear(paged_attention(qkv.narrow(1, 0, heads), cache, attention, scale), w.o).add_(h)
            h = linear(silu_and_mul(linear(rms_norm(h, w.post_attention_norm, eps), w.gate_up)), w.down).add_(h)
        return rms_norm(h, self.final_norm, eps)

    def _shape(self, kv_cache: KVCache) -> _AttentionShape:
        c = self.config
        return {
            "num_heads": c.num_heads,
            "num_kv_heads": c.num_kv_heads,
            "head_dim": c.head_dim,
            "block_size": kv_cache.block_size,
            "dtype": self.dtype,
        }

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits `[L, vocab]` of hidden states `[L, hidden]`: fp32, float64 for float64 models.

        bf16 logits would tie at the top in 1 of 20 rows of a 150k vocabulary. On a GPU the product keeps its fp32
        accumulators; on a CPU torch cannot, so a bf16 model holds its LM head in fp32: 4 bytes for each of
        vocab * hidden more, and a product at fp32 speed.
        """
        if self.dtype != torch.bfloat16:
            return linear(hidden, self.lm_head)
        if self.device.type == "cpu":
            return linear(hidden.float(), self.lm_head)
        assert self.lm_head.plain is not None
        return torch.mm(hidden, self.lm_head.plain, out_dtype=torch.float32)
