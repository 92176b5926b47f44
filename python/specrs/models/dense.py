"""The forward pass of a dense decoder on a CPU, as torch ops over weight tensors. Samples nothing and keeps no state.

A pass is a function of its arguments: weights, one PassInputs, one KVCache. There are no modules and no hooks, because
their call overhead is a third of a small model's pass on a CPU. For the same reason products are asked of the weights
themselves, without a function between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specrs.kernels.activation import silu_and_mul
from specrs.kernels.paged_attention import (
    AttentionPlan,
    AttentionShape,
    paged_attention,
    plan_attention,
    plan_steps,
    write_kv,
)
from specrs.kernels.rms_norm import rms_norm
from specrs.kernels.rotary import apply_rotary_, rotary_cos_sin
from specrs.models.base import HiddenStates, Model
from specrs.models.dense_weights import DenseFacts, DenseWeights
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class PassPlan:
    """What a pass over N rows needs besides their ids: the same in every layer."""

    cos: Tensor
    """[N, 1, head_dim], as `rotary_cos_sin` gives it; like sin."""
    sin: Tensor
    attention: AttentionPlan


@dataclass(frozen=True)
class Dense(DenseFacts):
    """A dense decoder on a CPU, by torch; the reference of `dense_cuda.CudaDense`."""

    weights: DenseWeights

    def with_buffers(self, max_rows: int, max_seqs: int, num_hidden_layers: int = 0) -> Model:
        """See `Model`: the CUDA pass over the same weights."""
        from specrs.models.dense_cuda import CudaDense  # Triton, which a CPU does without

        return CudaDense.allocate(self.weights, max_rows, max_seqs, num_hidden_layers)

    def forward(self, inputs: PassInputs, kv_cache: KVCache, hidden_layers: Sequence[int] = ()) -> HiddenStates:
        """See `Model`."""
        weights = self.weights
        cos, sin = rotary_cos_sin(inputs.positions, weights.rotary, weights.dtype)
        attention = plan_attention(
            inputs.positions, inputs.slots, inputs.q_start, inputs.block_table, self._shape(kv_cache)
        )
        return self._run(inputs.input_ids, PassPlan(cos, sin, attention), kv_cache, hidden_layers)

    def plan_steps(self, positions: Tensor, slots: Tensor, block_table: Tensor, kv_cache: KVCache) -> list[PassPlan]:
        """See `Model`: the attention of all passes is planned at once."""
        num_steps, batch = positions.shape
        angles = rotary_cos_sin(positions.view(-1), self.weights.rotary, self.dtype)
        cos, sin = (values.view(num_steps, batch, 1, -1).unbind(0) for values in angles)
        plans = plan_steps(positions, slots, block_table, self._shape(kv_cache))
        return [PassPlan(*parts) for parts in zip(cos, sin, plans, strict=True)]

    def forward_planned(self, input_ids: Tensor, plan: PassPlan, kv_cache: KVCache) -> Tensor:
        """See `Model`."""
        return self._run(input_ids, plan, kv_cache, ()).final

    def _run(self, input_ids: Tensor, plan: PassPlan, kv_cache: KVCache, hidden_layers: Sequence[int]) -> HiddenStates:
        weights = self.weights
        c = weights.config
        heads, kv_heads = c.num_heads, c.num_kv_heads
        cos, sin, attention = plan.cos, plan.sin, plan.attention
        eps, scale = c.rms_norm_eps, c.head_dim**-0.5
        entries: dict[int, Tensor] = {}
        h = weights.embedding.index_select(0, input_ids)
        for i, (w, cache) in enumerate(zip(weights.layers, kv_cache.layers, strict=True)):
            if i in hidden_layers:
                entries[i] = h
            qkv = w.qkv.product(rms_norm(h, w.input_norm, eps)).view(-1, heads + 2 * kv_heads, c.head_dim)
            qk = qkv.narrow(1, 0, heads + kv_heads)  # indexing takes twice as long
            if w.qk_norm is not None:
                rms_norm(qk, w.qk_norm, eps, inplace=True)
            apply_rotary_(qk, cos, sin)
            write_kv(qkv.narrow(1, heads, 2 * kv_heads), cache, attention)
            h = w.o.product(paged_attention(qkv.narrow(1, 0, heads), cache, attention, scale)).add_(h)
            gate_up = w.gate_up.product(rms_norm(h, w.post_attention_norm, eps))
            h = w.down.product(silu_and_mul(gate_up)).add_(h)
        kept = torch.stack([entries[i] for i in hidden_layers], dim=1) if hidden_layers else None
        return HiddenStates(rms_norm(h, weights.final_norm, eps), kept)

    def _shape(self, kv_cache: KVCache) -> AttentionShape:
        c = self.weights.config
        return AttentionShape(c.num_heads, c.num_kv_heads, c.head_dim, kv_cache.block_size, self.weights.dtype)

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Model`.

        bf16 logits would tie at the top in 1 of 20 rows of a 150k vocabulary, and torch's products on a CPU cannot keep
        their fp32 sums. So a bf16 model holds its LM head in fp32: 4 bytes for each of vocab * hidden more, and a
        product at fp32 speed.
        """
        if self.weights.dtype == torch.bfloat16:
            hidden = hidden.float()
        logits = self.weights.lm_head.product(hidden)
        return logits if out is None else out.copy_(logits[:, : out.shape[1]])
