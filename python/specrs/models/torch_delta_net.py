"""Gated delta nets as torch ops on a CPU. The reference of the native pass.

A state is computed row by row, in one order for prompts, decoding and drafts.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from specrs.models.config import ModelConfig
from specrs.models.decoder_weights import DeltaWeights
from specrs.models.delta_net import DeltaNet
from specrs.models.torch_states import LayerStates, Runs


class DeltaState(NamedTuple):
    """State of one layer after some position of a request."""

    heads: Tensor
    """[value_heads, key_dim, value_dim]"""
    inputs: Tensor
    """Inputs of the convolution at the last positions, [kernel - 1, conv_dim]."""


def delta_net(
    x: Tensor, w: DeltaWeights[Tensor], c: ModelConfig, layer: int, runs: Runs, states: LayerStates
) -> Tensor:
    """Return what a delta net gives its output projection, `[N, value_heads * value_dim]`. Mutates `states`.

    `x` `[N, outputs]` is the output of the layer's input projection. Masked rows get zeros.
    """
    assert c.delta is not None
    d, wide = c.delta, w.a_log.dtype
    out = x.new_zeros((len(x), d.inner))
    x = x.to(wide)
    if d.by_key_head:
        x = x[:, _order(d)]
    zero = DeltaState(
        x.new_zeros((d.value_heads, d.key_dim, d.value_dim)),
        x.new_zeros((d.kernel - 1, d.conv_dim)),
    )
    out = states.run(layer, runs, zero, lambda i, state: step(x[i], w, d, DeltaState(*state), c.rms_norm_eps), out)
    if d.turned:
        out = out.view(-1, d.key_heads, d.value_heads // d.key_heads, d.value_dim).transpose(1, 2).flatten(1)
    return out


@lru_cache(maxsize=8)
def _order(d: DeltaNet) -> Tensor:
    """Return the indices of q, k, v, z, b and a of all heads among outputs that lie by key head."""
    shared = d.value_heads // d.key_heads
    values, size = shared * d.value_dim, d.conv_dim + d.inner
    features = torch.split(torch.arange(size).view(d.key_heads, -1), [d.key_dim, d.key_dim, values, values], 1)
    gates = torch.arange(size, d.outputs).view(d.key_heads, 2, shared).unbind(1)
    return torch.cat([part.flatten() for part in (*features, *gates)])


def step(x: Tensor, w: DeltaWeights[Tensor], d: DeltaNet, state: DeltaState, eps: float) -> tuple[Tensor, DeltaState]:
    """Return one row's output `[value_heads * value_dim]`, and the state after it (Yang et al. 2025, eq. 10)."""
    mixed, z, b, a = torch.split(x, [d.conv_dim, d.inner, d.value_heads, d.value_heads])
    inputs = torch.cat((state.inputs, mixed[None]))
    keys = d.key_heads * d.key_dim
    q, k, v = torch.split(silu((inputs * w.conv).sum(0)), [keys, keys, d.inner])
    shared = d.value_heads // d.key_heads
    q, k = (_unit(part.view(d.key_heads, d.key_dim)).repeat_interleave(shared, 0) for part in (q, k))
    q, v = q * d.key_dim**-0.5, v.view(d.value_heads, d.value_dim)
    decay = torch.exp(-torch.exp(w.a_log) * softplus(a + w.dt_bias))[:, None, None]
    heads = state.heads * decay
    delta = torch.sigmoid(b)[:, None] * (v - torch.einsum("hk,hkv->hv", k, heads))
    heads = heads + k[:, :, None] * delta[:, None, :]
    o = torch.einsum("hk,hkv->hv", q, heads)
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + eps) * w.norm
    return (o * silu(z.view(d.value_heads, d.value_dim))).flatten(), DeltaState(heads, inputs[1:])


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
