"""Forward pass of a decoder on a CPU, as torch ops over weight tensors. Samples nothing and keeps no state.

A pass is a function of its arguments: weights, one PassInputs, one KVCache. There are no modules and no hooks, because
their call overhead is a third of a small model's pass on a CPU. For the same reason the pass calls the weights'
`product` method directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from specrs.arrays import Array
from specrs.kernels.activation import clamped_swiglu, gelu_and_mul, silu_and_mul
from specrs.kernels.linear import DenseWeight, Weight, dense_weight
from specrs.kernels.paged_attention import (
    AttentionPlan,
    AttentionShape,
    chunk,
    paged_attention,
    plan_attention,
    window,
    write_kv,
)
from specrs.kernels.rms_norm import rms_norm
from specrs.kernels.rotary import apply_interleaved_rotary_, apply_rotary_, query_factors, rotary_cos_sin
from specrs.models.base import HiddenStates
from specrs.models.experts import SUM_EPS, Experts
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache
from specrs.models.kv_groups import KVGroups, kv_groups
from specrs.models.lora import AdapterRows, expert_projection
from specrs.models.rope import Rope, rope_magnitude
from specrs.models.torch_delta_net import delta_net
from specrs.models.torch_short_conv import short_conv
from specrs.models.torch_states import Runs, runs_of
from specrs.models.torch_weights import TorchExperts, TorchFacts, TorchWeights
from specrs.parallel.ranks import Ranks


@dataclass(frozen=True, slots=True)
class PassPlan:
    """Rotations and attention plans of a pass over N rows, computed once and used by every layer."""

    rotations: tuple[tuple[Tensor, Tensor] | None, ...]
    """cos and sin of each layer, both `[N, 1, rotary_dim]` as from `rotary_cos_sin`. None: the layer has no RoPE."""
    attention: tuple[AttentionPlan, ...]
    """Attention plan of each layer."""
    query_factors: Tensor | None = None
    """Factors of queries after their rotation, `[N, 1, 1]`, in the layers that `QueryScaling` says. None: all are 1."""
    runs: Runs | None = None
    """Rows by request, for layers with states. None: there are no such layers."""


def rows_of(lm_head: Weight, ids: Tensor) -> DenseWeight:
    """Return a copy of the rows `ids` `[n]` of an LM head."""
    rows = lm_head.weight if isinstance(lm_head, DenseWeight) else lm_head.dequantized()
    return dense_weight(rows[ids])


@dataclass(frozen=True)
class TorchDecoder(TorchFacts):
    """A decoder that torch computes on a CPU. It is the reference of the CUDA backend's `CudaDecoder`."""

    weights: TorchWeights
    kv_groups: KVGroups | None = None
    """KV groups by which passes look up blocks. None: all layers are in one group."""
    ranks: Ranks | None = None
    """Tensor parallel ranks, each with a part of the weights and of the KV cache. None: there is one rank."""

    def with_kv_groups(self, size: int) -> TorchDecoder:
        """Return the model with its layers in KV groups of at most `size` layers, a number from `kv_group_sizes`."""
        return replace(self, kv_groups=kv_groups(self.config.windows, size))

    def with_ids(self, ids: Array) -> TorchDecoder:
        """Return the model with logits of `ids` `[n]` int64, ascending, only. It can still be fed any id. Copies their
        rows of the LM head."""
        assert self.ranks is None, "the configuration was to refuse a draft in parts"
        chosen = torch.from_numpy(ids).to(self.device)
        weights = replace(self.weights, lm_head=rows_of(self.weights.lm_head, chosen), target_ids=chosen)
        return replace(self, weights=weights)

    def forward(self, inputs: PassInputs, kv_cache: KVCache, hidden_layers: Sequence[int] = ()) -> HiddenStates:
        """Feed N rows. Writes K and V of every row with a slot into `kv_cache`, and the requests' states, and changes
        nothing else.

        `hidden_layers` are the layers whose inputs are returned with the final states. The number of layers stands for
        the last layer's output, and one more for the final states.
        """
        return self.forward_from(self.embed(inputs.input_ids), inputs, kv_cache, hidden_layers)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings of tokens, `[N, hidden]`, as the first layer reads them."""
        c = self.config
        h = self._embed(input_ids).to(self.weights.dtype)
        return h if c.embedding_multiplier == 1 else h * c.embedding_multiplier

    def forward_from(
        self, h: Tensor, inputs: PassInputs, kv_cache: KVCache, hidden_layers: Sequence[int] = ()
    ) -> HiddenStates:
        """`forward` that begins with `h` `[N, hidden]` as the input of the first layer, instead of the embeddings of
        the tokens of `inputs`. Layers that add embeddings of their own still look up these tokens."""
        windows = self.config.windows or (None,) * self.num_layers
        groups = (0,) * self.num_layers if self.kv_groups is None else self.kv_groups.of_layer
        shapes = [self._shape(kv_cache, i) for i in range(self.num_layers)]
        kinds, plans = list(zip(groups, windows, shapes, strict=True)), {}
        for group, size, shape in set(kinds):
            slots, table = inputs.in_group(group)
            visibility = None if size is None else chunk(size) if self.config.chunked else window(size)
            plans[group, size, shape] = plan_attention(
                inputs.positions, slots, inputs.q_start, table, shape, inputs.k_start, visibility
            )
        attention = tuple(plans[kind] for kind in kinds)
        runs = None
        if self.config.states is not None:
            runs = runs_of(inputs.positions, inputs.q_start, inputs.state_rows, inputs.prompts, inputs.snapshots)
        scaling, factors = self.config.query_scaling, None
        if scaling is not None:
            counted = inputs.positions + scaling.offset
            factors = query_factors(counted, scaling.beta, scaling.length, self.weights.dtype)
        plan = PassPlan(self._rotations(inputs.positions), attention, factors, runs)
        added = None if self.weights.layer_embedding is None else self._layer_embeddings(inputs.input_ids, h)
        return self._run(h, added, plan, kv_cache, hidden_layers, inputs.adapters)

    def _rotations(self, positions: Tensor) -> tuple[tuple[Tensor, Tensor] | None, ...]:
        """Return cos and sin of each layer for `positions` [N], as in `PassPlan.rotations`."""
        weights, c = self.weights, self.config
        if not weights.rotaries:
            return (rotary_cos_sin(positions, weights.rotary, weights.dtype, c.rope_magnitude),) * self.num_layers
        made: dict[tuple[Rope | None, int], tuple[Tensor, Tensor] | None] = {}
        turns = [(rope, c.rotary_dim_of(i)) for i, rope in enumerate(c.ropes)]
        for turn, rotary in zip(turns, weights.rotaries, strict=True):
            if turn not in made:
                magnitude = rope_magnitude(None if turn[0] is None else turn[0][1])
                made[turn] = None if rotary is None else rotary_cos_sin(positions, rotary, weights.dtype, magnitude)
        return tuple(made[turn] for turn in turns)

    def _run(
        self,
        h: Tensor,
        added: Tensor | None,
        plan: PassPlan,
        kv_cache: KVCache,
        hidden_layers: Sequence[int],
        adapters: Sequence[AdapterRows] = (),
    ) -> HiddenStates:
        weights = self.weights
        c = weights.config
        heads, rotary_dim = c.num_heads, c.partial_rotary_dim
        eps, scale, residual = c.rms_norm_eps, c.attention_scale, c.residual_multiplier
        normed = c.norms != "after"
        only_unrotated = c.query_scaling is not None and c.query_scaling.unrotated
        rotate = apply_interleaved_rotary_ if c.interleaved_rope else apply_rotary_
        activate = silu_and_mul if c.activation == "silu" else gelu_and_mul
        entries: dict[int, Tensor] = {}
        caches = dict(zip(c.attention_layers, kv_cache.layers, strict=True))
        layers = zip(weights.layers, plan.attention, plan.rotations, strict=True)
        for i, (w, attention, rotation) in enumerate(layers):
            if i in hidden_layers:
                entries[i] = h
            x = rms_norm(h, w.input_norm, eps) if normed else h
            qkv = w.qkv.product(x)
            if plan.runs is not None and kv_cache.states is not None and c.has_state(i):
                runs, states = plan.runs, kv_cache.states
                for adapter in adapters:
                    adapter.add_(qkv, x, i, "qkv")
                if w.delta is not None:
                    netted = delta_net(qkv, w.delta, c, i, runs, states)
                else:
                    assert w.conv is not None
                    netted = short_conv(qkv, w.conv, i, runs, states)
                x = w.o.product(netted)
                for adapter in adapters:
                    adapter.add_(x, netted, i, "o")
            else:
                cache, gate, sizes = caches[i], None, c.sizes_of(i)
                kv_heads = sizes.num_kv_heads if sizes.source is None else 0
                for adapter in adapters:
                    adapter.add_(qkv, x, i, "qkv")
                if c.output_gate:
                    qkv, gate = _without_gate(qkv, heads, c.head_dim)
                qkv = qkv.view(-1, heads + sizes.projected_heads, sizes.head_dim)
                if sizes.keys_are_values:
                    qkv = torch.cat((qkv, qkv.narrow(1, heads, kv_heads)), 1)
                qk = qkv.narrow(1, 0, heads + kv_heads)  # indexing takes twice as long
                if w.qk_norm is not None and c.qk_norm_whole and self.ranks is not None:
                    self._norm_heads(qk, w.qk_norm, self.ranks)
                elif w.qk_norm is not None and c.qk_norm_whole:
                    for part, weight in ((qk[:, :heads], w.qk_norm[:heads]), (qk[:, heads:], w.qk_norm[heads:])):
                        rms_norm(part.flatten(1), weight.flatten(), eps, inplace=True)
                elif w.qk_norm is not None:
                    rms_norm(qkv if c.value_norm else qk, w.qk_norm, eps, inplace=True)
                if rotation is not None:
                    rotate(qk if rotary_dim is None else qk.narrow(2, 0, rotary_dim), *rotation)
                if plan.query_factors is not None and (rotation is None or not only_unrotated):
                    qkv.narrow(1, 0, heads).mul_(plan.query_factors)
                if sizes.source is None:
                    write_kv(qkv.narrow(1, heads, 2 * kv_heads), cache, attention, w.kv_scales)
                x = paged_attention(
                    qkv.narrow(1, 0, heads), cache, attention, scale, sinks=w.sinks, kv_scales=w.kv_scales
                )
                if gate is not None:
                    x = x * torch.sigmoid(gate)
                attended, x = x, w.o.product(x)
                for adapter in adapters:
                    adapter.add_(x, attended, i, "o")
            x = self._sum(x)
            if w.attention_output_norm is not None:
                rms_norm(x, w.attention_output_norm, eps, inplace=True)
            h = x.add_(h) if residual == 1 else x.mul_(residual).add_(h)
            x, mixed = rms_norm(h, w.post_attention_norm, eps) if normed else h, None
            norms = None if w.experts is None else w.experts.norms
            if w.experts is not None and c.experts is not None:
                sent = x if norms is None else rms_norm(h, norms.expert_input, eps)
                routed = self._routed(w.experts, sent, h)
                mixed = mixture(sent, w.experts, c.experts, activate, routed, i, adapters)
            if mixed is None or norms is not None:
                gate_up = w.gate_up.product(x)
                for adapter in adapters:
                    adapter.add_(gate_up, x, i, "gate_up")
                activated = activate(gate_up)
                x = w.down.product(activated)
                for adapter in adapters:
                    adapter.add_(x, activated, i, "down")
            if mixed is not None and norms is not None:
                x = rms_norm(x, norms.mlp_output, eps) + rms_norm(mixed, norms.expert_output, eps)
            elif mixed is not None:
                x = mixed
            x = self._sum(x)
            if w.mlp_output_norm is not None:
                rms_norm(x, w.mlp_output_norm, eps, inplace=True)
            h = x.add_(h) if residual == 1 else x.mul_(residual).add_(h)
            if w.addition is not None and added is not None:
                own = activate(torch.cat((w.addition.gate.product(h), added[:, i]), 1))
                h = rms_norm(w.addition.projection.product(own), w.addition.norm, eps).add_(h)
            if w.scalar != 1:
                h = h * w.scalar
        if self.num_layers in hidden_layers:
            entries[self.num_layers] = h
        final = rms_norm(h, weights.final_norm, eps)
        if self.num_layers + 1 in hidden_layers:
            entries[self.num_layers + 1] = final
        kept = torch.stack([entries[i] for i in hidden_layers], dim=1) if hidden_layers else None
        return HiddenStates(final, kept)

    def _sum(self, x: Tensor) -> Tensor:
        """Return `x` summed over all ranks. Mutates `x`."""
        return x if self.ranks is None else self.ranks.add_(x)

    def _embed(self, input_ids: Tensor) -> Tensor:
        embedding = self.weights.embedding
        if self.ranks is None:
            return embedding.index_select(0, input_ids)
        return self.ranks.look_up(embedding, input_ids)

    def whole_embedding(self) -> Tensor:
        """Return the embedding of the whole vocabulary, `[vocab, hidden]`. Ranks must call this together."""
        embedding = self.weights.embedding
        return embedding if self.ranks is None else self.ranks.gather(embedding).flatten(0, 1)[: self.vocab_size]

    def whole_lm_head(self) -> Weight:
        """Return the LM head of the whole vocabulary. Ranks must call this together."""
        weights = self.weights
        if self.ranks is None:
            return weights.lm_head
        kept = torch.float32 if weights.dtype == torch.bfloat16 and weights.device.type == "cpu" else weights.dtype
        own = weights.lm_head
        rows = self.ranks.gather(own.weight if isinstance(own, DenseWeight) else own.dequantized().to(kept))
        return dense_weight(rows.flatten(0, 1)[: self.vocab_size])

    def _norm_heads(self, qk: Tensor, weight: Tensor, ranks: Ranks) -> None:
        """Norm `qk` [N, heads + kv_heads, head_dim] over the query heads of all ranks, and over their KV heads. Mutates
        `qk`.

        The formula is that of `rms_norm`.
        """
        c, heads = self.weights.config, self.weights.config.num_heads
        parts = (slice(0, heads), slice(heads, None))
        squares = torch.stack([qk[:, part].float().square().sum((1, 2)) for part in parts], dim=1)
        # Each KV head has the same number of copies among ranks, so counting all of them leaves the mean as it is.
        means = ranks.add_(squares) / (ranks.size * c.head_dim * torch.tensor([heads, c.num_kv_heads]))
        for part, mean in zip(parts, means.unbind(1), strict=True):
            scale = (mean + c.rms_norm_eps).rsqrt()[:, None, None]
            qk[:, part] = qk[:, part].float().mul_(scale).to(qk.dtype).mul_(weight[part])

    @property
    def num_parameters(self) -> int:
        """Number of weights that this rank's pass over one row reads."""
        c = self.config
        elsewhere = 0 if self.ranks is None else c.vocab_size - len(self.weights.embedding)
        return super().num_parameters - elsewhere * c.hidden_size

    def _layer_embeddings(self, input_ids: Tensor, embedded: Tensor) -> Tensor:
        """Return each layer's embedding of N tokens, `[N, layers, size]`, as `LayerEmbeddingWeights` describes.
        `embedded` `[N, hidden]` has the tokens' scaled embeddings."""
        w, c = self.weights.layer_embedding, self.config
        assert w is not None
        assert c.layer_embedding is not None
        shape = (-1, c.num_layers, c.layer_embedding.size)
        projected = (w.projection.product(embedded) * c.hidden_size**-0.5).view(shape)
        looked_up = w.table.index_select(0, input_ids).to(embedded.dtype) * c.layer_embedding.size**0.5
        made: Tensor = (rms_norm(projected, w.norm, c.rms_norm_eps) + looked_up.view(shape)) * 2**-0.5
        return made

    def _routed(self, weights: TorchExperts, sent: Tensor, h: Tensor) -> Tensor:
        """Return the router's input `[N, hidden]`: the experts' input `sent`, or of the residual stream `h` what
        `RouterScales` describes."""
        if weights.scales is None:
            return sent
        normed = rms_norm(h, torch.ones_like(weights.scales.hidden), self.config.rms_norm_eps)
        routed: Tensor = normed * weights.scales.hidden * self.config.hidden_size**-0.5
        return routed

    def _shape(self, kv_cache: KVCache, layer: int) -> AttentionShape:
        c, sizes = self.weights.config, self.weights.config.sizes_of(layer)
        dtypes = self.weights.dtype, kv_cache.layers[0].dtype
        return AttentionShape(c.num_heads, sizes.num_kv_heads, sizes.head_dim, kv_cache.block_size, *dtypes)

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the logits of final hidden states `[L, hidden]`: fp32, or float64 for float64 models.

        With `out` `[L, ids]`, the logits of the first ids are written into it.

        In bf16, the top two logits would tie in 1 of 20 rows of a 150k vocabulary, and torch's CPU products cannot
        return their fp32 sums. So a bf16 model holds its LM head in fp32. That costs 4 bytes for each of its vocab *
        hidden weights, and a product at fp32 speed.
        """
        if self.weights.dtype == torch.bfloat16:
            hidden = hidden.float()
        logits = self.weights.lm_head.product(hidden)
        cap = self.config.final_logit_softcapping
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        if self.ranks is not None:
            logits = self.ranks.side_by_side(logits, self.vocab_size)
        return logits if out is None else out.copy_(logits[:, : out.shape[1]])


def _without_gate(qkv: Tensor, heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return q, k and v as one tensor, and the gates `[N, heads * head_dim]`, which lie after each head's query."""
    q, rest = torch.split(qkv, [2 * heads * head_dim, qkv.shape[1] - 2 * heads * head_dim], 1)
    q, gate = q.view(-1, heads, 2, head_dim).unbind(2)
    return torch.cat((q.flatten(1), rest), 1), gate.flatten(1)


def mixture(
    x: Tensor,
    weights: TorchExperts,
    experts: Experts,
    activate: Callable[[Tensor], Tensor],
    routed: Tensor,
    layer: int,
    adapters: Sequence[AdapterRows] = (),
) -> Tensor:
    """Return the output of a layer's experts for `x` `[N, hidden]`: the weighted sum over the experts that the router
    chose.

    `routed` `[N, hidden]` is the router's input. `activate` is the model's activation of gate and up features. Rows are
    sorted by expert, so each expert in use has one product. A row adds up its experts in a fixed order, which does not
    depend on the other rows. `adapters` add to the experts of layer number `layer`.
    """
    logits = weights.router.product(routed)
    if experts.sigmoids:
        all_shares = logits.to(torch.promote_types(x.dtype, torch.float32)).sigmoid()
        scores = logits if weights.bias is None else all_shares + weights.bias
        ids = scores.topk(experts.per_token, dim=-1).indices
        shares = all_shares.gather(-1, ids)
        if experts.norm_topk_prob:
            shares = shares / (shares.sum(-1, keepdim=True) + SUM_EPS)
    elif experts.softmax_of_chosen:
        chosen, ids = logits.topk(experts.per_token, dim=-1)
        shares = chosen.softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32))
    else:
        shares, ids = logits.softmax(-1, dtype=torch.float32).topk(experts.per_token, dim=-1)
        if experts.norm_topk_prob:
            shares = shares / shares.sum(-1, keepdim=True)
    if weights.scales is not None:
        shares = shares * weights.scales.experts[ids]
    if experts.factor != 1:
        shares = shares * experts.factor
    if experts.swiglu is not None:
        activate = partial(clamped_swiglu, **experts.swiglu._asdict())
    adapters = [own for own in adapters if own.adapter.changes_experts(layer)]
    order = ids.view(-1).argsort(stable=True)
    rows = order.div(experts.per_token, rounding_mode="floor")
    sent, first = x.index_select(0, rows), 0
    weighed = shares.to(x.dtype).view(-1, 1).index_select(0, order)
    if experts.weighs_input:
        sent.mul_(weighed)
    out = torch.empty_like(sent)
    for i, count in enumerate(ids.view(-1).bincount(minlength=experts.count).tolist()):
        if count:
            given, of = sent.narrow(0, first, count), rows.narrow(0, first, count)
            gate_up = weights.gate_up[i].product(given)
            mine = [AdapterRows(own.adapter, torch.isin(of, own.rows).nonzero().view(-1)) for own in adapters]
            for adapter in mine:
                adapter.add_(gate_up, given, layer, expert_projection(i, "gate_up"))
            hidden = activate(gate_up)
            made = weights.down[i].product(hidden)
            for adapter in mine:
                adapter.add_(made, hidden, layer, expert_projection(i, "down"))
            out.narrow(0, first, count).copy_(made)
            first += count
    if not experts.weighs_input:
        out.mul_(weighed)
    out = torch.zeros_like(x).index_add_(0, rows, out)
    if weights.shared is not None:
        shared = weights.shared
        y = shared.down.product(activate(shared.gate_up.product(x)))
        out += y if shared.gate is None else torch.sigmoid(shared.gate.product(x)) * y
    return out
