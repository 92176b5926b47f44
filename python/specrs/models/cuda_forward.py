"""The forward pass on a CUDA device: six kernels a layer for few rows, cuBLAS and fused kernels around it for many.

A pass allocates nothing, waits for nothing and has no shape that depends on data, so it can be captured in a graph.
`Decoder.forward` is the same function for a CPU, and the reference. Samples nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from specrs.kernels.cuda.activation import silu_and_mul
from specrs.kernels.cuda.argmax import argmax
from specrs.kernels.cuda.attention_config import MAX_VERIFY_ROWS, AttentionConfig, block_d
from specrs.kernels.cuda.configs import LinearShape, linear_config
from specrs.kernels.cuda.device import DeviceLimits, limits_of
from specrs.kernels.cuda.embedding import embed
from specrs.kernels.cuda.lm_head import linear_argmax
from specrs.kernels.cuda.paged_attention import paged_attention
from specrs.kernels.cuda.qk_norm_rope import qk_norm_rope
from specrs.kernels.cuda.rms_norm import rms_norm
from specrs.kernels.cuda.sampling_scratch import SamplingScratch
from specrs.kernels.cuda.skinny_linear import MAX_ROWS, block_m, scratch_sizes, skinny_linear
from specrs.kernels.linear import Linear
from specrs.models.config import ModelConfig
from specrs.models.decoder import Decoder, LayerWeights
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache

_MLP_ROWS = 2048
"""Rows that go through a wide MLP at once: its activations are ten times as wide as the residual stream."""
_LOGITS_ROWS = 256
"""Rows whose logits are kept at once where an argmax follows the LM head of more than `MAX_ROWS` rows."""


def linear_shapes(config: ModelConfig, dtype: torch.dtype) -> dict[str, LinearShape]:
    """The products of a pass, by name."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "qkv": LinearShape(q + 2 * kv, config.hidden_size, dtype),
        "o": LinearShape(config.hidden_size, q, dtype),
        "gate_up": LinearShape(config.intermediate_size, config.hidden_size, dtype, gated=True),
        "down": LinearShape(config.hidden_size, config.intermediate_size, dtype),
        "lm_head": LinearShape(config.vocab_size, config.hidden_size, dtype),
    }


@dataclass(frozen=True, slots=True)
class Workspace:
    """Persistent buffers of one model's passes, and how its products are cut up. One pass at a time may use it.

    Between passes the buffers hold nothing that the next one needs, but `counters` stay zero.
    """

    hidden: Tensor
    """[max_rows, hidden], the residual stream."""
    normed: Tensor
    """[max_rows, hidden], what a pass returns a view of."""
    delta: Tensor
    """[max_rows, hidden], what a block adds to the residual stream; few rows add it in their product."""
    qkv: Tensor
    """[max_rows, (heads + 2 * kv_heads) * head_dim]"""
    attended: Tensor
    """[max_rows, heads * head_dim]"""
    gate_up: Tensor
    """[min(max_rows, 2048), 2 * intermediate], of many rows."""
    activated: Tensor
    """[min(max_rows, 2048), intermediate]"""
    cos: Tensor
    """[max_rows, head_dim / 2] fp32"""
    sin: Tensor
    """Like `cos`."""
    partials: Tensor
    """fp32 scratch of products and of attention."""
    stats: Tensor
    """fp32 scratch of attention."""
    counters: Tensor
    """int32; zero between kernels."""
    tile_top: Tensor
    """fp32 scratch of the LM head with an argmax behind it."""
    tile_id: Tensor
    """int32, like `tile_top`."""
    logits: Tensor
    """[0 or 256, vocab] fp32, for an argmax over more than 64 rows."""
    scratch: SamplingScratch
    """Of that argmax."""
    configs: Mapping[tuple[str, int], list[int]]
    """Fields of the LinearConfig of (product, columns of its tiles)."""
    limits: DeviceLimits
    dependent: bool
    """Kernels are launched dependently: each starts while the one before it ends."""

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        *,
        max_rows: int,
        max_seqs: int,
        dtype: torch.dtype,
        device: torch.device | str,
        dependent: bool | None = None,
    ) -> Workspace:
        """Buffers for passes of at most `max_rows` rows, and argmaxes of at most 17 rows of each of `max_seqs`.

        `dependent=None` launches kernels dependently where the device can: compute capability 9.0 or more.
        """
        device = torch.device(device)
        limits = limits_of(device)
        shapes = linear_shapes(config, dtype)
        widths = sorted({block_m(rows) for rows in (1, 17, MAX_ROWS)})
        configs = {(n, m): linear_config(s, m, limits) for n, s in shapes.items() for m in widths}
        # Splits times tiles are at most the multiprocessors, and tiles are half of them where there are splits.
        group = config.num_heads // config.num_kv_heads
        lines = limits.num_sms * max(64, 1 << (group - 1).bit_length())
        partials, counters = lines * block_d(config.head_dim), limits.num_sms
        for (name, m), c in configs.items():
            sizes = scratch_sizes(c, m, n=shapes[name].n, gated=shapes[name].gated)
            partials, counters = max(partials, sizes[0]), max(counters, sizes[1])
        tiles = max(-(-config.vocab_size // configs["lm_head", m].block_n) for m in widths)
        many = min(_LOGITS_ROWS, max_seqs * MAX_VERIFY_ROWS)
        many = many if many > MAX_ROWS else 0

        def buffer(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        f32, i32 = torch.float32, torch.int32
        mlp_rows = min(max_rows, _MLP_ROWS)
        return cls(
            hidden=buffer(max_rows, config.hidden_size),
            normed=buffer(max_rows, config.hidden_size),
            delta=buffer(max_rows, config.hidden_size),
            qkv=buffer(max_rows, shapes["qkv"].n),
            attended=buffer(max_rows, shapes["o"].k),
            gate_up=buffer(mlp_rows, 2 * config.intermediate_size),
            activated=buffer(mlp_rows, config.intermediate_size),
            cos=buffer(max_rows, config.head_dim // 2, dtype=f32),
            sin=buffer(max_rows, config.head_dim // 2, dtype=f32),
            partials=buffer(partials, dtype=f32),
            stats=buffer(2 * lines, dtype=f32),
            counters=buffer(counters, dtype=i32),
            tile_top=buffer(MAX_ROWS * tiles, dtype=f32),
            tile_id=buffer(MAX_ROWS * tiles, dtype=i32),
            logits=buffer(many, config.vocab_size, dtype=f32),
            scratch=SamplingScratch.allocate(many, 0, config.vocab_size, device),
            configs={key: c.as_list() for key, c in configs.items()},
            limits=limits,
            dependent=limits.capability >= 90 if dependent is None else dependent,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        buffers = [getattr(self, field.name) for field in dataclasses.fields(self)]
        return self.scratch.num_bytes + sum(buffer.nbytes for buffer in buffers if isinstance(buffer, Tensor))

    def config(self, name: str, rows: int) -> list[int]:
        """How the product `name` of `rows` rows is cut up."""
        return self.configs[name, block_m(rows)]


def forward(decoder: Decoder, inputs: PassInputs, kv_cache: KVCache, workspace: Workspace) -> Tensor:
    """Feed N rows; return their final-normed hidden states `[N, hidden]`, a view into `workspace`.

    Writes K and V of every row with a slot into `kv_cache`; slot -1 writes nothing. Rows at position -1 give finite
    values that mean nothing. Up to 64 rows take the fused products, more take cuBLAS.
    """
    ws, rows = workspace, inputs.input_ids.shape[0]
    assert rows <= ws.hidden.shape[0], f"rows={rows}: the workspace has room for {ws.hidden.shape[0]}"
    hidden, cos, sin = ws.hidden[:rows], ws.cos[:rows], ws.sin[:rows]
    embed(inputs.input_ids, inputs.positions, decoder.embedding, decoder.rotary, hidden, cos, sin, ws.dependent)
    attend = _attention(decoder, inputs, workspace)
    run = _few_rows if rows <= MAX_ROWS else _many_rows
    return run(decoder, attend, hidden, kv_cache, workspace)


def compute_logits(decoder: Decoder, hidden: Tensor, out: Tensor, workspace: Workspace) -> None:
    """Write the logits of `hidden` `[L, hidden]`, contiguous rows of any stride, into `out` `[L, ids]` fp32.

    `out` may have fewer columns than the vocabulary: the logits of its first ids. Each is rounded once, from the
    product's own fp32 sum.
    """
    weight = _stored(decoder.lm_head)[: out.shape[1]]
    if hidden.shape[0] > MAX_ROWS:
        _wide_logits(hidden, weight, out)
        return
    ws = workspace
    config = ws.config("lm_head", hidden.shape[0])
    skinny_linear(hidden, weight, None, None, out, ws.partials, ws.counters, 0.0, False, False, config, ws.dependent)


def compute_argmax(
    decoder: Decoder,
    hidden: Tensor,
    out_ids: Tensor,
    out_top: Tensor,
    workspace: Workspace,
    logits: Tensor | None = None,
    *,
    num_ids: int | None = None,
) -> None:
    """Write the most probable token of each row of `hidden` `[L, hidden]` and its logit: `[L]` int64 and `[L]` fp32.

    The lowest id in a tie; the logit is NaN if the row has a NaN. `logits` `[L, ids]` fp32 is written too if given.
    `num_ids` looks at the first ids only.
    """
    ws, weight = workspace, _stored(decoder.lm_head)[:num_ids]
    rows = hidden.shape[0]
    if rows <= MAX_ROWS:
        linear_argmax(
            hidden,
            weight,
            out_ids,
            out_top,
            logits,
            ws.tile_top,
            ws.tile_id,
            ws.partials,
            ws.counters,
            ws.config("lm_head", rows),
            ws.dependent,
        )
        return
    step = ws.logits.shape[0]
    assert step, f"rows={rows}: the workspace was allocated for argmaxes of at most {MAX_ROWS}"
    for first in range(0, rows, step):
        part = slice(first, min(first + step, rows))
        kept = ws.logits[: part.stop - first, : weight.shape[0]] if logits is None else logits[part]
        _wide_logits(hidden[part], weight, kept)
        argmax(kept, out_ids[part], out_top[part], ws.scratch)


_Attend = Callable[[LayerWeights, Tensor, Tensor, Tensor], None]
"""(layer, qkv, cache layer, out): from raw q, k, v to attention's output, K and V written on the way."""


def _attention(decoder: Decoder, inputs: PassInputs, ws: Workspace) -> _Attend:
    c, rows = decoder.config, inputs.input_ids.shape[0]
    width, scale = c.num_heads * c.head_dim, c.head_dim**-0.5
    cut = _attention_config(
        inputs.q_start.shape[0] - 1,
        inputs.max_q_len,
        c.num_heads,
        c.num_kv_heads,
        c.head_dim,
        decoder.dtype,
        ws.limits,
    )
    cos, sin = ws.cos[:rows], ws.sin[:rows]

    def attend(layer: LayerWeights, qkv: Tensor, cache: Tensor, out: Tensor) -> None:
        qk_norm_rope(qkv, layer.qk_norm, cos, sin, inputs.slots, cache, c.num_heads, c.rms_norm_eps, ws.dependent)
        paged_attention(
            qkv[:, :width],
            cache,
            inputs.positions,
            inputs.q_start,
            inputs.block_table,
            out,
            ws.partials,
            ws.stats,
            ws.counters,
            inputs.max_q_len,
            scale,
            cut,
            ws.dependent,
        )

    return attend


@lru_cache(maxsize=256)
def _attention_config(
    batch: int, max_q_len: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, limits: DeviceLimits
) -> list[int]:
    config = AttentionConfig.choose(
        batch=batch,
        max_q_len=max_q_len,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        dtype=dtype,
        limits=limits,
    )
    return list(dataclasses.astuple(config))


def _few_rows(decoder: Decoder, attend: _Attend, hidden: Tensor, kv_cache: KVCache, ws: Workspace) -> Tensor:
    """Six kernels a layer: the residual stream is normed on the way into products and added to on the way out."""
    rows, eps = hidden.shape[0], decoder.config.rms_norm_eps
    qkv, attended, activated = ws.qkv[:rows], ws.attended[:rows], ws.activated[:rows]

    def product(
        name: str,
        x: Tensor,
        w: Linear,
        out: Tensor,
        norm: Tensor | None = None,
        *,
        gated: bool = False,
        accumulate: bool = False,
    ) -> None:
        skinny_linear(
            x,
            _stored(w),
            w.bias,
            norm,
            out,
            ws.partials,
            ws.counters,
            eps,
            gated,
            accumulate,
            ws.config(name, rows),
            ws.dependent,
        )

    for w, cache in zip(decoder.layers, kv_cache.layers, strict=True):
        product("qkv", hidden, w.qkv, qkv, w.input_norm)
        attend(w, qkv, cache, attended)
        product("o", attended, w.o, hidden, accumulate=True)
        product("gate_up", hidden, w.gate_up, activated, w.post_attention_norm, gated=True)
        product("down", activated, w.down, hidden, accumulate=True)
    out = ws.normed[:rows]
    rms_norm(hidden, None, decoder.final_norm, out, eps, ws.dependent)
    return out


def _many_rows(decoder: Decoder, attend: _Attend, hidden: Tensor, kv_cache: KVCache, ws: Workspace) -> Tensor:
    """Products by cuBLAS; the addition to the residual stream and the norm behind it are one kernel."""
    rows, eps = hidden.shape[0], decoder.config.rms_norm_eps
    qkv, attended, normed, delta = ws.qkv[:rows], ws.attended[:rows], ws.normed[:rows], ws.delta[:rows]
    norms = [w.input_norm for w in decoder.layers[1:]] + [decoder.final_norm]
    rms_norm(hidden, None, decoder.layers[0].input_norm, normed, eps, ws.dependent)
    for w, cache, next_norm in zip(decoder.layers, kv_cache.layers, norms, strict=True):
        _wide_product(normed, w.qkv, qkv)
        attend(w, qkv, cache, attended)
        _wide_product(attended, w.o, delta)
        rms_norm(delta, hidden, w.post_attention_norm, normed, eps, ws.dependent)
        for first in range(0, rows, _MLP_ROWS):
            part = slice(first, min(first + _MLP_ROWS, rows))
            count = part.stop - first
            _wide_product(normed[part], w.gate_up, ws.gate_up[:count])
            silu_and_mul(ws.gate_up[:count], ws.activated[:count], ws.dependent)
            _wide_product(ws.activated[:count], w.down, delta[part])
        rms_norm(delta, hidden, next_norm, normed, eps, ws.dependent)
    return normed


def _wide_product(x: Tensor, w: Linear, out: Tensor) -> None:
    assert w.plain is not None
    if w.bias is None:
        torch.mm(x, w.plain, out=out)
    else:
        torch.addmm(w.bias, x, w.plain, out=out)


def _wide_logits(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
    if hidden.dtype == out.dtype:
        torch.mm(hidden, weight.t(), out=out)
    else:
        torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)


def _stored(w: Linear) -> Tensor:
    """The weight as checkpoints and `kernels.linear.pack` on a GPU store it, `[out, in]` contiguous."""
    assert w.plain is not None, "a weight packed for a CPU"
    return w.plain.t()
