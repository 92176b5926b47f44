"""Forward pass of a decoder on a CUDA device. With few rows a layer is five kernels, with many rows it uses cuBLAS.

Few rows need a sixth kernel if another one combines the splits of long contexts or prepares heads, and two more if
blocks' outputs are normed. A pass allocates nothing, waits for nothing and has no shape that depends on data, so a CUDA
graph can capture it. `torch_decoder.TorchDecoder` on a CPU is the reference. Samples nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from specrs.backends.cuda.adapters import AdapterSlots, LayerAdapters
from specrs.backends.cuda.attention import Attention
from specrs.backends.cuda.conv_states import ConvStates
from specrs.backends.cuda.delta_states import DeltaStates, check_net
from specrs.backends.cuda.experts import codings_of
from specrs.backends.cuda.net_states import NetPass, NetStates
from specrs.backends.cuda.parts import EmbeddingParts, LogitsParts
from specrs.backends.cuda.products import product, stored, write_argmax, write_logits
from specrs.backends.cuda.stream import Stream, stream_of
from specrs.backends.cuda.workspace import (
    Workspace,
    layer_shapes,
    layer_sizes,
    logits_rows,
    max_fused_rows,
    rotations,
)
from specrs.errors import UnsupportedModelError, invalid
from specrs.kernels.cuda.attention_config import MAX_VERIFY_ROWS
from specrs.kernels.cuda.configs import LinearShape
from specrs.kernels.cuda.embedding import embed
from specrs.kernels.cuda.layer_embedding import layer_embeddings
from specrs.kernels.cuda.linear_product import MAX_ROWS, Next
from specrs.kernels.cuda.output_gate import apply_gates, split_gates
from specrs.models.base import HiddenStates, TorchModel
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache
from specrs.models.kv_groups import KVGroups
from specrs.models.rope import rope_magnitude
from specrs.models.shards import check_gpu_parts
from specrs.models.torch_weights import TorchFacts, TorchLayer, TorchWeights, has_fp8_rows, has_fp8_wide_rows
from specrs.parallel.ranks import Ranks

HEAD_DIMS = (64, 96, 128, 256, 512)
"""Numbers of features per head for which the kernels are compiled and tested."""


@dataclass(frozen=True)
class CudaDecoder(TorchFacts):
    """A decoder on a GPU with its buffers. On a CPU, Triton's interpreter can run it."""

    weights: TorchWeights
    workspace: Workspace
    kv_groups: KVGroups | None = None
    """KV groups by which passes look up blocks. None: all layers are in one group."""
    ranks: Ranks | None = None
    """Tensor parallel ranks, each with a part of the weights and of the KV cache. None: there is one rank."""
    embedding_parts: EmbeddingParts | None = None
    """Exchange of embeddings among ranks. None: there is one rank."""
    logits_parts: LogitsParts | None = None
    """Exchange of logits and argmaxes among ranks. None: there is one rank."""
    states: NetStates[Any] | None = None
    """States of delta nets or short convolutions. None: all layers have attention."""
    adapters: AdapterSlots | None = None
    """Slots of LoRA adapters. None: no request has one."""
    rotary: tuple[Tensor, Tensor | None] = field(init=False)
    """Signed frequencies of each distinct RoPE, `[rotations, rotary_dim]` fp32, and the factors on their cos and sin,
    `[rotations]` fp32 (None: all are 1)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rotary", _rotary(self.weights))

    @classmethod
    def allocate(
        cls,
        weights: TorchWeights,
        max_rows: int,
        max_seqs: int,
        num_hidden_layers: int = 0,
        kv_groups: KVGroups | None = None,
        ranks: Ranks | None = None,
        num_drafts: int = 0,
        num_snapshots: int = 0,
    ) -> CudaDecoder:
        """Return a decoder of `weights` with persistent buffers for one pass at a time, which a CUDA graph can capture.

        Passes may have `max_rows` rows and `num_hidden_layers` hidden layers, and argmaxes 17 rows for each of
        `max_seqs` requests. A model whose layers have states keeps those of `max_seqs` requests, each with up to
        `num_drafts` drafts, and `num_snapshots` snapshots of them. Raises UnsupportedModelError for a model that the
        kernels do not serve.
        """
        c, device = weights.config, weights.device
        for sizes in layer_sizes(c):
            check_head_dim(sizes.head_dim, device)
        embedding_parts = logits_parts = None
        if ranks is not None:
            check_gpu_parts(c, "tensor_parallel_size", ranks.size)
            ranks.exchanges.reserve(min(max_rows, MAX_ROWS), c.hidden_size, weights.dtype)
            embedding_parts = EmbeddingParts.allocate(ranks, weights.embedding, max_rows)
            logits_parts = LogitsParts.allocate(
                ranks, stored(weights.lm_head), c.vocab_size, logits_rows(max_seqs), max_seqs * MAX_VERIFY_ROWS
            )
        shapes = _shapes_of(weights)
        workspace = Workspace.allocate(
            c,
            max_rows=max_rows,
            max_seqs=max_seqs,
            num_hidden_layers=num_hidden_layers,
            dtype=weights.dtype,
            device=device,
            shapes=shapes,
        )
        if workspace.experts is not None:
            experts = workspace.experts.of_codings(c, weights.dtype, workspace.limits, codings_of(weights.layers))
            workspace = dataclasses.replace(workspace, experts=experts)
        if has_fp8_wide_rows(weights):
            workspace = workspace.rounding_rows(shapes, few=has_fp8_rows(weights))
        states: NetStates[Any] | None = None
        if c.delta is not None:
            check_net(c.delta, device)
            states = DeltaStates.allocate(
                c,
                max_rows=max_rows,
                max_seqs=max_seqs,
                num_drafts=num_drafts,
                num_snapshots=num_snapshots,
                dtype=weights.dtype,
                device=device,
            )
        elif c.conv is not None:
            states = ConvStates.allocate(
                c.conv, max_seqs=max_seqs, num_drafts=num_drafts, num_snapshots=num_snapshots, device=device
            )
        return cls(weights, workspace, kv_groups, ranks, embedding_parts, logits_parts, states)

    def for_draft(self) -> CudaDecoder:
        """Return the decoder with buffers for fused passes of up to 128 rows, if a draft model like this may have them;
        otherwise `self`."""
        return self._fusing_more(is_draft=True)

    def with_own_products(self) -> CudaDecoder:
        """Return the decoder with buffers for fused passes of up to 128 rows, if the table of products names our kernel
        for all of its products with so many rows; otherwise `self`."""
        return self._fusing_more(is_draft=False)

    def _fusing_more(self, *, is_draft: bool) -> CudaDecoder:
        shapes, ws = _shapes_of(self.weights), self.workspace
        rows = max_fused_rows(self.config, shapes, ws.limits, ws.providers, is_draft=is_draft)
        if ws.fuses_more or self.ranks is not None or rows == MAX_ROWS:
            return self
        return dataclasses.replace(self, workspace=ws.fusing_more(self.config, shapes))

    def forward(self, inputs: PassInputs, kv_cache: KVCache, hidden_layers: Sequence[int] = ()) -> HiddenStates:
        """Feed N rows. Writes K and V of every row with a slot into `kv_cache`, and the requests' states, and returns
        views of the workspace.

        Up to 64 rows use fused products, and up to 128 of a small draft and where the table of products says so; more
        use `wide_product`. `hidden_layers` are the layers whose
        inputs are returned with the final states, or the number of layers + 1 alone for the final states themselves.
        """
        ws, weights, rows = self.workspace, self.weights, inputs.input_ids.shape[0]
        assert rows <= ws.hidden.shape[0], f"rows={rows}: the workspace has room for {ws.hidden.shape[0]}"
        hidden, norm = ws.hidden[:rows], weights.layers[0].input_norm if self.config.norms != "after" else None
        stream = stream_of(hidden, inputs.positions, ws, self.config, self.ranks)
        self.embed(inputs, hidden, stream.following(norm))
        return self._run(stream, inputs, kv_cache, hidden_layers)

    def forward_from(self, hidden: Tensor, inputs: PassInputs, kv_cache: KVCache) -> HiddenStates:
        """`forward` that begins with `hidden` `[N, hidden]`, a view of the workspace's, as the input of the first
        layer. `embed` must have written the angles of the rows."""
        stream = stream_of(hidden, inputs.positions, self.workspace, self.config, self.ranks)
        return self._run(stream, inputs, kv_cache, ())

    def embed(self, inputs: PassInputs, out: Tensor, following: Next | None = None) -> None:
        """Write the embeddings of the tokens of N rows into `out` `[N, hidden]`, and the RoPE angles of their positions
        into the workspace. With `following`, prepare the stream's first norm."""
        ws, rows = self.workspace, inputs.input_ids.shape[0]
        tables = [self.weights.embedding, *self.rotary, None if following is None else following.norm_weight]
        angles = [ws.cos[:, :rows], ws.sin[:, :rows]]
        prepared = [] if following is None else [following.x, following.squares]
        multiplier = self.config.embedding_multiplier

        def write(ids: Tensor, out: Tensor) -> None:
            embed(ids, inputs.positions, tables, out, angles, prepared, ws.dependent, multiplier)

        if self.embedding_parts is None:
            write(inputs.input_ids, out)
        else:
            self.embedding_parts.embed(inputs.input_ids, out, write)

    def entry_buffer(self, hidden_layers: Sequence[int]) -> Tensor:
        """Return the buffer `[max_rows, L, hidden]` into which passes write the L hidden states `hidden_layers`. The
        final states alone, whose number is `num_layers` + 1, are read where a pass leaves them."""
        if tuple(hidden_layers) == (self.num_layers + 1,):
            return self.workspace.normed.unsqueeze(1)
        room = self.workspace.entries.shape[1]
        assert len(hidden_layers) <= room, f"hidden_layers={hidden_layers}: the workspace has room for {room}"
        return self.workspace.entries[:, : len(hidden_layers)]

    def _run(self, stream: Stream, inputs: PassInputs, kv_cache: KVCache, hidden_layers: Sequence[int]) -> HiddenStates:
        """Run all layers and the final norm over `stream`."""
        ws, weights, c, rows = self.workspace, self.weights, self.config, inputs.input_ids.shape[0]
        norms = [w.input_norm if c.norms != "after" else None for w in weights.layers]
        added = None
        if weights.layer_embedding is not None:
            added = self._layer_embeddings(inputs.input_ids, ws.hidden[:rows])
        kept = self.entry_buffer(hidden_layers)[:rows] if hidden_layers else None
        attend = Attention.of(c, weights.dtype, inputs, ws, groups=self.kv_groups)
        nets = None if self.states is None else self.states.begin(inputs, ws.dependent)
        adapters = None if self.adapters is None else self.adapters.begin(inputs, ws.dependent)
        caches, num_nets = dict(zip(c.attention_layers, kv_cache.layers, strict=True)), 0
        for i, w in enumerate(weights.layers):
            entries = [] if kept is None else [kept[:, at] for at, layer in enumerate(hidden_layers) if layer == i]
            own = None if adapters is None else adapters.layer(i)
            if nets is not None and c.has_state(i):
                self._net(stream, nets, norms[i], w, num_nets, entries, own)
                num_nets += 1
            else:
                self._attention(stream, attend, norms[i], w, caches[i], i, entries, own)
            embedding = None if added is None else added[:, i]
            stream.add_mlp(w, norms[i + 1] if i + 1 < len(norms) else None, own, embedding)
        return HiddenStates(stream.normed(weights.final_norm), kept)

    def _layer_embeddings(self, input_ids: Tensor, hidden: Tensor) -> Tensor:
        """Return each layer's embedding of N tokens, `[N, layers, size]`, as `LayerEmbeddingWeights` describes, in the
        workspace. `hidden` `[N, hidden]` has the tokens' scaled embeddings."""
        ws, w, c = self.workspace, self.weights.layer_embedding, self.config
        assert w is not None
        assert c.layer_embedding is not None
        made = ws.layer_embeddings[: len(hidden)]
        flat = made.view(len(made), -1)
        product(ws, "layer_embeddings", hidden, w.projection, flat)
        floats = [c.hidden_size**-0.5, c.layer_embedding.size**0.5, c.rms_norm_eps]
        layer_embeddings(input_ids, w.table, w.norm, flat, floats, ws.dependent)
        return made

    def _attention(
        self,
        stream: Stream,
        attend: Attention,
        norm: Tensor | None,
        w: TorchLayer,
        cache: Tensor,
        index: int,
        entries: Sequence[Tensor],
        adapters: LayerAdapters | None,
    ) -> None:
        """Add the output of a layer's attention to the stream. Copies the stream at the layer's input into each of
        `entries` `[N, hidden]`. `adapters` are the layer's LoRA adapters."""
        ws, c, rows = self.workspace, self.config, attend.rows
        qkv, attended = ws.qkv[:rows], ws.part(ws.attended, rows, w.o.shape[1])
        if not c.output_gate:
            qkv = ws.part(ws.qkv, rows, w.qkv.shape[0])
        heads = attend.heads(w, cache, index)
        projected = ws.projection(rows, w.qkv.shape[0]) if c.output_gate else qkv
        stream.normed_product("qkv", norm, w.qkv, projected, heads, adapters)
        for entry in entries:
            entry.copy_(ws.hidden[:rows])
        if c.output_gate:
            split_gates(projected, qkv, c.num_heads, c.head_dim, ws.dependent)
        if heads is None:
            attend.apply_rope(w, qkv, cache, index)
        attend.scale_queries(qkv, index)
        attend(w, qkv, cache, attended, index)
        if c.output_gate:
            apply_gates(projected, attended, c.num_heads, c.head_dim, ws.dependent)
        stream.add_product("o", attended, w.o, w.post_attention_norm, w.attention_output_norm, adapters)

    def _net(
        self,
        stream: Stream,
        nets: NetPass[Any],
        norm: Tensor | None,
        w: TorchLayer,
        index: int,
        entries: Sequence[Tensor],
        adapters: LayerAdapters | None,
    ) -> None:
        """Add the output of delta net or short convolution number `index` to the stream. Copies the stream at the
        layer's input into each of `entries` `[N, hidden]`. `adapters` are the layer's LoRA adapters."""
        ws, rows = self.workspace, nets.rows
        projected, netted = ws.projection(rows, w.qkv.shape[0]), ws.netted[:rows]
        stream.normed_product("net", norm, w.qkv, projected, adapters=adapters)
        for entry in entries:
            entry.copy_(ws.hidden[:rows])
        nets(index, w.conv if w.delta is None else w.delta, projected, netted)
        stream.add_product("net_o", netted, w.o, w.post_attention_norm, w.attention_output_norm, adapters)

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the logits of final hidden states `[L, hidden]`, fp32. With `out` `[L, ids]`, write those of the first
        ids into it.

        Rows of `hidden` and `out` are contiguous, with any stride. Each logit is the product's fp32 sum, rounded once.
        """
        if out is None:
            out = torch.empty((hidden.shape[0], self.vocab_size), dtype=torch.float32, device=hidden.device)
        rows = stored(self.weights.lm_head)
        if self.logits_parts is None:
            write_logits(hidden, rows[: out.shape[1]], out, self.workspace, self.config.final_logit_softcapping)
        else:
            self.logits_parts.write_logits(hidden, out, lambda x, part: write_logits(x, rows, part, self.workspace))
        return out

    def compute_argmax(
        self, hidden: Tensor, ids: Tensor, top: Tensor, num_ids: int | None = None, logits: Tensor | None = None
    ) -> None:
        """Write the most probable token of each row of `hidden` `[L, hidden]` into `ids` `[L]` int64, and its logit
        into `top` `[L]`.

        The lowest id wins a tie. With `num_ids`, only the first ids are candidates. With `logits` `[L, ids]` fp32, the
        logits are written too.
        """
        weight = stored(self.weights.lm_head)
        if self.logits_parts is None:
            cap = self.config.final_logit_softcapping
            write_argmax(hidden, weight[:num_ids], (ids, top), self.workspace, logits, cap)
            return
        self.logits_parts.write_argmax(
            ids, top, num_ids, lambda held, best: write_argmax(hidden, weight[:held], best, self.workspace)
        )
        if logits is not None:
            self.compute_logits(hidden, logits)


def with_buffers(
    model: TorchModel,
    max_rows: int,
    max_seqs: int,
    num_hidden_layers: int = 0,
    num_drafts: int = 0,
    num_snapshots: int = 0,
    loras: tuple[int, int] | None = None,
) -> TorchModel:
    """Return a `CudaDecoder` over the weights of a decoder, made by `CudaDecoder.allocate`. Returns any other model
    unchanged. `loras` are the number of slots for LoRA adapters and their largest rank; None: no slots."""
    if not isinstance(model, TorchFacts):
        return model
    made = CudaDecoder.allocate(
        model.weights, max_rows, max_seqs, num_hidden_layers, model.kv_groups, model.ranks, num_drafts, num_snapshots
    )
    if loras is None:
        return made.with_own_products()
    adapters = AdapterSlots.allocate(
        made.config,
        max_loras=loras[0],
        max_rank=loras[1],
        max_rows=max_rows,
        max_seqs=max_seqs,
        dtype=made.weights.dtype,
        device=made.weights.device,
    )
    return dataclasses.replace(made, adapters=adapters)


def check_head_dim(head_dim: int, device: torch.device) -> None:
    """Raise UnsupportedModelError for heads whose size the kernels are not compiled for."""
    if device.type == "cuda" and head_dim not in HEAD_DIMS:
        allowed = f"the GPU kernels serve {', '.join(map(str, HEAD_DIMS))}; allowed: device='cpu'"
        raise invalid(UnsupportedModelError, "head_dim", head_dim, allowed)


def _rotary(weights: TorchWeights) -> tuple[Tensor, Tensor | None]:
    """Return the frequencies and magnitudes for `CudaDecoder.rotary`."""
    c, made = weights.config, rotations(weights.config)
    magnitudes = [rope_magnitude(scaling) for (_, scaling), _ in made]
    scales = torch.tensor(magnitudes, dtype=torch.float32).to(weights.device) if set(magnitudes) != {1.0} else None
    signed = {((c.rope_theta, c.rope_scaling), c.rotary_dim): weights.rotary}
    for i, (rope, own) in enumerate(zip(c.ropes, weights.rotaries, strict=True)):
        if rope and own is not None:
            signed[rope, c.rotary_dim_of(i)] = own
    widest = max(dim for _, dim in made) // 2
    # Frequencies after the last of a half are 0. No layer reads their angles.
    halves = [pad(signed[turn].view(2, -1), (0, widest - turn[1] // 2)) for turn in made]
    return torch.stack([half.flatten() for half in halves]), scales


def _shapes_of(weights: TorchWeights) -> dict[str, list[LinearShape]]:
    """Return the products of `layer_shapes`, each in every coding that a layer's weight of this size has. The LM head
    has as many outputs as this rank holds rows."""
    c = weights.config
    shapes = layer_shapes(c, weights.dtype, weights.device)
    shapes["lm_head"] = [dataclasses.replace(shape, n=len(stored(weights.lm_head))) for shape in shapes["lm_head"]]
    attention = [layer for i, layer in enumerate(weights.layers) if not c.has_state(i)]
    nets = [layer for i, layer in enumerate(weights.layers) if c.has_state(i)]
    experts = [layer.experts for layer in weights.layers if layer.experts is not None]
    shared = [one.shared for one in experts if one.shared is not None]
    products = {
        "qkv": [layer.qkv for layer in attention],
        "o": [layer.o for layer in attention],
        "net": [layer.qkv for layer in nets],
        "net_o": [layer.o for layer in nets],
        "gate_up": [layer.gate_up for layer in weights.layers],
        "down": [layer.down for layer in weights.layers],
        "layer_embeddings": [] if weights.layer_embedding is None else [weights.layer_embedding.projection],
        "layer_gate": [layer.addition.gate for layer in weights.layers if layer.addition is not None],
        "layer_projection": [layer.addition.projection for layer in weights.layers if layer.addition is not None],
        "shared_gate_up": [expert.gate_up for expert in shared],
        "shared_down": [expert.down for expert in shared],
    }
    for name in (name for name, every in products.items() if every and name in shapes):
        made = []
        for dense in shapes[name]:
            size = dense.n * dense.sides, dense.k
            of_size = [w for w in products[name] if len(shapes[name]) == 1 or tuple(w.shape) == size]
            # Products with quantized weights leave heads to `qk_norm_rope`: with two sides they have half as many
            # tiles.
            quantized = dataclasses.replace(dense, n=dense.n * dense.sides, head_dim=0) if dense.head_dim else dense
            kinds = {getattr(weight, "coding", None) for weight in of_size}
            made += [dense if kind is None else dataclasses.replace(quantized, coding=kind) for kind in kinds]
        shapes[name] = made
    return shapes
