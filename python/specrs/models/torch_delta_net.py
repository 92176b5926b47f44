"""Gated delta nets as torch ops on a CPU. The reference of the native pass.

A state is computed row by row, in one order for prompts, decoding and drafts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from specrs.models.config import ModelConfig
from specrs.models.decoder_weights import DeltaWeights
from specrs.models.delta_net import DeltaNet
from specrs.models.torch_states import DeltaStates, State


class Runs(NamedTuple):
    """Rows of a pass by request, as delta nets read them."""

    rows: tuple[tuple[int, tuple[int, ...], int], ...]
    """For each request with rows, its state row, the indices of its rows in the pass, and the first position."""
    prompts: bool
    """True if all rows are committed tokens, so that only the last state is kept."""
    snapshots: tuple[tuple[int, int, int], ...] = ()
    """State row, length and slot of each snapshot to write, as in `PassInputs`."""


def runs_of(
    positions: Tensor,
    q_start: Tensor,
    state_rows: Sequence[int] | None,
    prompts: bool,
    snapshots: tuple[tuple[int, int, int], ...] = (),
) -> Runs:
    """Return the rows of a pass by request. `state_rows` has the state row of each; None: its index."""
    at, starts = positions.tolist(), q_start.tolist()
    found = []
    for b, (first, end) in enumerate(itertools.pairwise(starts)):
        rows = tuple(i for i in range(first, end) if at[i] >= 0)
        if rows:
            found.append((b if state_rows is None else state_rows[b], rows, at[rows[0]]))
    return Runs(tuple(found), prompts, snapshots)


def delta_net(
    x: Tensor, w: DeltaWeights[Tensor], c: ModelConfig, layer: int, runs: Runs, states: DeltaStates
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
    zero = State(
        x.new_zeros((d.value_heads, d.key_dim, d.value_dim)),
        x.new_zeros((d.kernel - 1, d.conv_dim)),
    )
    for row, indices, first in runs.rows:
        state = states.begin(row, layer, first, zero)
        # States from the committed one on; those after it are of drafts, accepted up to `first`.
        known = states.rows[row, layer] if first else {0: zero}
        wanted = {length: slot for of, length, slot in runs.snapshots if of == row and length > min(known)}
        for length in wanted.keys() & known.keys():
            if length <= first:
                states.keep(wanted[length], layer, length, known[length])
        kept = {}
        for count, index in enumerate(indices, 1):
            o, state = step(x[index], w, d, state, c.rms_norm_eps)
            out[index] = o
            if first + count in wanted and (runs.prompts or count == 1):
                states.keep(wanted[first + count], layer, first + count, state)
            if not runs.prompts or count == len(indices):
                kept[first + count] = state
        states.rows[row, layer] = kept
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


def step(x: Tensor, w: DeltaWeights[Tensor], d: DeltaNet, state: State, eps: float) -> tuple[Tensor, State]:
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
    return (o * silu(z.view(d.value_heads, d.value_dim))).flatten(), State(heads, inputs[1:])


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
