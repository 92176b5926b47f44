"""A causal decoder in float64, for one text at a time and without a KV cache. It is slow and follows the formulas
literally.

It computes every family of `specrs.models.registry` from a checkpoint's tensors. Norms, the angles of RoPE and factors
of queries are rounded to float32, as in transformers, so its logits equal those of transformers to 1e-12.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from specrs.arrays import FLOAT64, Array
from specrs.models.experts import SUM_EPS, Experts
from specrs.models.loader import open_checkpoint
from specrs.models.rope import frequencies, rope_magnitude
from specrs.models.tensors import (
    EMBEDDING,
    EXPERT_BIAS,
    EXPERT_SCALES,
    FINAL_NORM,
    LAYER_EMBEDDING,
    LM_HEAD,
    PARALLEL_NORMS,
    ROUTER_SCALE,
    norm_names,
)


class Decoder:
    """The model in a folder of safetensors files or in a GGUF file."""

    def __init__(self, source: Path, *, max_model_len: int | None = None) -> None:
        """Open the files. Tensors are read in each pass. `max_model_len` selects the frequencies of LongRoPE, see
        `ModelConfig`.

        Raises CheckpointError if `source` is no model.
        """
        config, self.tensors = open_checkpoint(source, None, "auto")
        self.config = config.for_length(max_model_len)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits after each of N tokens, `[N, V]`."""
        c, final = self.config, self.hidden_states(tokens)[-1]
        head = self._read(EMBEDDING if c.tie_word_embeddings else LM_HEAD)
        logits = linear(self._norm(final, FINAL_NORM.removesuffix(".weight")), head) / c.logits_scaling
        cap = c.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def hidden_states(self, tokens: Sequence[int]) -> list[Tensor]:
        """Return the residual stream `[N, hidden]` before each layer, and after the last."""
        c, states = self.config, [self._read(EMBEDDING)[list(tokens)] * self.config.embedding_multiplier]
        added, kept = self._layer_embeddings(tokens, states[0]), dict[int, tuple[Tensor, Tensor]]()
        for i in range(c.num_layers):
            layer, x = f"model.layers.{i}.", states[-1]
            before, after, before_mlp, after_mlp = (name and layer + name for name in norm_names(c))
            attended = self._norm(self._attention(self._norm(x, before), i, layer + "self_attn.", kept), after)
            x = x + attended * c.residual_multiplier
            y = self._norm(x, before_mlp)
            has_experts = c.experts is not None and c.experts.layers[i]
            if c.experts is None or not has_experts:
                y = self._mlp(y, layer + "mlp.")
            elif c.experts.parallel_mlp:
                after_dense, before_experts, after_experts = (layer + name for name in PARALLEL_NORMS)
                dense = self._norm(self._mlp(y, layer + "mlp."), after_dense)
                sparse = self._mixture(self._norm(x, before_experts), x, c.experts, f"{layer}{c.experts.block}")
                y = dense + self._norm(sparse, after_experts)
            else:
                y = self._mixture(y, x, c.experts, f"{layer}{c.experts.block}")
            x = x + self._norm(y, after_mlp) * c.residual_multiplier
            if added is not None:
                gated = gelu(self._linear(x, layer + "per_layer_input_gate"), approximate="tanh") * added[:, i]
                projected = self._linear(gated, layer + "per_layer_projection")
                x = x + self._norm(projected, layer + "post_per_layer_input_norm")
            states.append(x * self._read(layer + "layer_scalar") if c.layer_scalars else x)
        return states

    def _layer_embeddings(self, tokens: Sequence[int], embedded: Tensor) -> Tensor | None:
        """Return the embedding of each token that each layer adds, `[N, layers, size]`; None if layers add none.
        `embedded` `[N, hidden]` has the scaled embeddings."""
        c = self.config
        if c.layer_embedding is None:
            return None
        shape = len(tokens), c.num_layers, c.layer_embedding.size
        projected = self._linear(embedded, "model.per_layer_model_projection") / math.sqrt(c.hidden_size)
        looked_up = self._read(LAYER_EMBEDDING)[list(tokens)] * math.sqrt(c.layer_embedding.size)
        normed = self._norm(projected.view(shape), "model.per_layer_projection_norm")
        return (normed + looked_up.view(shape)) / math.sqrt(2)

    def _attention(self, x: Tensor, i: int, prefix: str, kept: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
        """Compute attention of layer `i` over `x` `[N, hidden]`. `kept` has keys and values of earlier layers, and gets
        this layer's."""
        c, count, sizes = self.config, len(x), self.config.sizes_of(i)
        if c.fused_projections:
            rows = [heads * c.head_dim for heads in (c.num_heads, c.num_kv_heads, c.num_kv_heads)]
            q, k, v = torch.split(self._linear(x, prefix + "qkv_proj"), rows, dim=1)
        else:
            q = self._linear(x, prefix + "q_proj")
            k = q if sizes.source is not None else self._linear(x, prefix + "k_proj")
            v = k if sizes.source is not None or sizes.keys_are_values else self._linear(x, prefix + "v_proj")
        q = self._scale(self._turn(self._head_norm(q, prefix + "q_norm", sizes.head_dim), i), i)
        if sizes.source is None:
            v = v.view(count, -1, sizes.head_dim)
            v = self._normed(v) if c.value_norm else v
            kept[i] = self._turn(self._head_norm(k, prefix + "k_norm", sizes.head_dim), i), v
        k, v = kept[i if sizes.source is None else sizes.source]
        k, v = (part.repeat_interleave(c.num_heads // sizes.num_kv_heads, dim=1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * c.attention_scale
        row, column = torch.arange(count)[:, None], torch.arange(count)
        window = c.windows[i] if c.windows else None
        sees = column <= row
        if window is not None:
            sees = sees & (row // window == column // window if c.chunked else row - column < window)
        scores = scores.masked_fill(~sees, -math.inf)
        if c.sinks:  # takes its share of the softmax and adds nothing
            sinks = self._read(prefix + "sinks").view(-1, 1, 1).expand(-1, count, 1)
            scores = torch.cat((scores, sinks), dim=2)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1)[:, :, :count], v)
        return self._linear(attended.reshape(count, -1), prefix + "o_proj")

    def _head_norm(self, x: Tensor, name: str, head_dim: int) -> Tensor:
        """Return `x` `[N, heads * head_dim]` by head, `[N, heads, head_dim]`, after the norm `name` of each head or of
        all heads as one, if the model has it."""
        c = self.config
        if c.qk_norm and c.qk_norm_whole:
            x = self._norm(x, name)
        x = x.view(len(x), -1, head_dim)
        return self._norm(x, name) if c.qk_norm and not c.qk_norm_whole else x

    def _turn(self, x: Tensor, i: int) -> Tensor:
        """Apply the RoPE of layer `i` to heads `[N, heads, head_dim]`, and the norm after it, if the layer has them."""
        if self.config.rope_of(i) is None:
            return x
        if self.config.interleaved_rope:
            halves = self._rotate(torch.cat((x[:, :, ::2], x[:, :, 1::2]), dim=2), i)
            x = torch.stack(halves.chunk(2, dim=2), dim=3).flatten(2)
        else:
            x = self._rotate(x, i)
        return self._normed(x) if self.config.rotated_norm else x

    def _rotate(self, x: Tensor, i: int) -> Tensor:
        """Apply the RoPE of layer `i` to heads `[N, heads, head_dim]` (Su et al. 2021)."""
        rope, dim = self.config.rope_of(i), self.config.rotary_dim_of(i)
        assert rope is not None, "such a layer is not rotated"

        def powers(size: int, theta: float) -> Array:
            made: Array = (theta ** (torch.arange(0, size, 2).float() / size)).numpy()
            return made

        angles = torch.arange(len(x)).float().view(-1, 1, 1) * torch.from_numpy(frequencies(rope, dim, powers))
        cos, sin = (angles.cos() * rope_magnitude(rope[1])).double(), (angles.sin() * rope_magnitude(rope[1])).double()
        a, b, rest = x[:, :, : dim // 2], x[:, :, dim // 2 : dim], x[:, :, dim:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=2)

    def _scale(self, q: Tensor, i: int) -> Tensor:
        """Multiply query heads `[N, heads, head_dim]` of layer `i` by the factors of their positions, which are rounded
        to float32, as in transformers."""
        scaling = self.config.query_scaling
        if scaling is None or (scaling.unrotated and self.config.rope_of(i) is not None):
            return q
        steps = (torch.arange(len(q)) + scaling.offset).float().div(scaling.length).floor()
        return q * (1 + scaling.beta * (1 + steps).log()).double().view(-1, 1, 1)

    def _mlp(self, x: Tensor, prefix: str) -> Tensor:
        c = self.config
        if c.fused_projections:
            gate, up = self._linear(x, prefix + "gate_up_proj").chunk(2, dim=1)
        else:
            gate, up = self._linear(x, prefix + "gate_proj"), self._linear(x, prefix + "up_proj")
        return self._linear(self._activate(gate) * up, prefix + "down_proj")

    def _activate(self, gate: Tensor) -> Tensor:
        return silu(gate) if self.config.activation == "silu" else gelu(gate, approximate="tanh")

    def _mixture(self, x: Tensor, residual: Tensor, experts: Experts, prefix: str) -> Tensor:
        """Return the weighted sum of the outputs of each row's experts, `[N, hidden]`.

        `x` `[N, hidden]` is the input of the experts and of the router. With `scaled_router`, the router reads the
        normed `residual` stream `[N, hidden]` instead.
        """
        scales, routed = torch.ones(experts.count, dtype=torch.float64), x
        if experts.scaled_router:
            scales = self._read(prefix + EXPERT_SCALES)
            routed = self._normed(residual) * self._read(prefix + ROUTER_SCALE) / math.sqrt(x.shape[1])
        logits = self._linear(routed, prefix + experts.router)
        shares = logits.sigmoid() if experts.sigmoids else logits.softmax(1)
        bias = self._read(prefix + EXPERT_BIAS) if experts.biased_choice else 0.0
        eps = SUM_EPS if experts.sigmoids else 0.0
        gate_name, up_name, down_name = experts.projections
        rows = []
        for row, own in zip(x, shares, strict=True):
            chosen, total = (own + bias).topk(experts.per_token).indices.tolist(), torch.zeros_like(row)
            scale = own[chosen].sum() + eps if experts.norm_topk_prob or experts.softmax_of_chosen else 1.0
            for expert in chosen:
                name, weight = f"{prefix}experts.{expert}.", own[expert] / scale * scales[expert] * experts.factor
                sent, factor = (row * weight, 1.0) if experts.weighs_input else (row, weight)
                gate, up = self._linear(sent, name + gate_name), self._linear(sent, name + up_name)
                if experts.swiglu is None:
                    activated = self._activate(gate) * up
                else:
                    alpha, limit = experts.swiglu
                    gate = gate.clamp(max=limit)
                    activated = gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + 1)
                total = total + factor * self._linear(activated, name + down_name)
            rows.append(total)
        mixed = torch.stack(rows)
        if experts.shared is None:
            return mixed
        shared = self._mlp(x, prefix + "shared_expert.")
        gate_of_all = self._linear(x, prefix + "shared_expert_gate").sigmoid() if experts.shared_gate else 1.0
        return mixed + gate_of_all * shared

    def _norm(self, x: Tensor, name: str | None) -> Tensor:
        """Apply RMSNorm over the last dimension (Zhang and Sennrich 2019). With `name` None, return `x`."""
        if name is None:
            return x
        return self._normed(x) * (self._read(f"{name}.weight") + self.config.norm_offset)

    def _normed(self, x: Tensor) -> Tensor:
        """Apply RMSNorm without a weight over the last dimension."""
        rounded = x.float()
        return (rounded * (rounded.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt()).double()

    def _linear(self, x: Tensor, name: str) -> Tensor:
        bias = f"{name}.bias"
        return linear(x, self._read(f"{name}.weight"), self._read(bias) if bias in self.tensors else None)

    def _read(self, name: str) -> Tensor:
        return torch.from_numpy(self.tensors.read(name, FLOAT64))
