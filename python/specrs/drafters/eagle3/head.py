"""Forward pass of an EAGLE-3 head (Li et al. 2025) in torch. Chooses no tokens and keeps no state.

For position i, one decoder layer reads the embedding of the token at i + 1 and the target's fused hidden state of i.
While drafting, it reads the output of the head's previous pass instead of the hidden state. It returns logits for
position i + 2 over the head's own ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specrs.drafters.eagle3.weights import Eagle3Facts, HeadWeights
from specrs.kernels.activation import silu_and_mul
from specrs.kernels.linear import Weight
from specrs.kernels.paged_attention import AttentionShape, paged_attention, plan_attention, write_kv
from specrs.kernels.rms_norm import rms_norm
from specrs.kernels.rotary import apply_rotary_, rotary_cos_sin
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache
from specrs.models.torch_weights import CPU, TorchHeld
from specrs.parallel.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Eagle3Weights(HeadWeights[Tensor, Weight, torch.dtype]):
    """Weights of a head on one device, or one rank's part of them. A bf16 head on a CPU has an fp32 LM head, see
    `TorchDecoder.compute_logits`."""

    device: torch.device = CPU


class Eagle3Head(TorchHeld, Eagle3Facts):
    """An EAGLE-3 head on a CPU, computed by torch. Read-only, so it may serve several caches at once."""

    weights: Eagle3Weights

    def __init__(self, weights: Eagle3Weights, ranks: Ranks | None = None) -> None:
        """Use `weights`. `ranks` are the tensor parallel ranks that compute the head together, each with its part;
        None: there is one rank."""
        self.weights = weights
        self.ranks = ranks

    @property
    def target_ids(self) -> Tensor:
        """For each of the head's own ids, the target's id, `[Vd]` int64, ascending."""
        return self.weights.target_ids

    def allocate_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Allocate K and V for `num_blocks` blocks of `block_size` positions on the head's device."""
        return KVCache.allocate(self.weights.config.layer, num_blocks, block_size, self._cached, self.device)

    def fuse(self, entries: Tensor) -> Tensor:
        """Return the target's hidden states `[N, L, target's hidden]` projected to the head's width, `[N, H]`."""
        w = self.weights
        entries = entries.to(w.dtype)
        eps = w.config.layer.rms_norm_eps
        if w.fc_norm is not None:
            entries = rms_norm(entries if w.config.fc_norm else entries.flatten(1), w.fc_norm, eps)
        return w.fc.product(entries.flatten(1))

    def forward(
        self, inputs: PassInputs, hidden: Tensor, kv_cache: KVCache, k_start: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Feed N rows and return (recurrent, final), each `[N, H]`. Writes K and V of every row with a slot, and
        nothing else.

        `inputs.input_ids` are the tokens after the rows' positions: t_{i+1} at position i. `hidden` `[N, H]` is `fuse`
        of the target's states there, or `recurrent` of the previous pass, which need not be copied. `final` is the
        input of `compute_logits`. Rows attend to positions from `k_start` `[B]` on; None: from 0.
        """
        w = self.weights
        config, layer = w.config, w.layer
        c = config.layer
        heads, kv_heads, eps = c.num_heads, c.num_kv_heads, c.rms_norm_eps
        cos, sin = rotary_cos_sin(inputs.positions, w.rotary, w.dtype)
        shape = AttentionShape(heads, kv_heads, c.head_dim, kv_cache.block_size, w.dtype, self._cached)
        attention = plan_attention(inputs.positions, inputs.slots, inputs.q_start, inputs.block_table, shape, k_start)
        cache = kv_cache.layers[0]
        normed = rms_norm(hidden, w.hidden_norm, eps)
        residual = normed if config.norm_before_residual else hidden
        ids, ranks = inputs.input_ids, self.ranks
        token = (w.embedding.index_select(0, ids) if ranks is None else ranks.look_up(w.embedding, ids)).to(w.dtype)
        x = torch.cat((rms_norm(token, layer.input_norm, eps), normed), dim=1)
        qkv = layer.qkv.product(x).view(-1, heads + 2 * kv_heads, c.head_dim)
        qk = qkv.narrow(1, 0, heads + kv_heads)
        if layer.qk_norm is not None:
            rms_norm(qk, layer.qk_norm, eps, inplace=True)
        apply_rotary_(qk, cos, sin)
        write_kv(qkv.narrow(1, heads, 2 * kv_heads), cache, attention)
        attended = paged_attention(qkv.narrow(1, 0, heads), cache, attention, c.head_dim**-0.5)
        h = self._sum(layer.o.product(attended)).add_(residual)
        gate_up = layer.gate_up.product(rms_norm(h, layer.post_attention_norm, eps))
        h = self._sum(layer.down.product(silu_and_mul(gate_up))).add_(h)
        final = rms_norm(h, w.final_norm, eps)
        return (final if config.norm_output else h), final

    def compute_logits(self, final: Tensor) -> Tensor:
        """Return logits over the head's own ids, `[N, Vd]`: fp32, or float64 for float64 heads. Sums nothing in
        bf16."""
        w = self.weights
        logits = w.lm_head.product(final.float() if w.dtype == torch.bfloat16 else final)
        return logits if self.ranks is None else self.ranks.side_by_side(logits, self.vocab_size)

    def _sum(self, x: Tensor) -> Tensor:
        return x if self.ranks is None else self.ranks.add_(x)
