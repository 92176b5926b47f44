"""Gated short convolutions as torch ops on a CPU. The reference of the native pass.

A state is computed row by row, in one order for prompts, decoding and drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specrs.models.torch_states import LayerStates, Runs


def short_conv(x: Tensor, weight: Tensor, layer: int, runs: Runs, states: LayerStates) -> Tensor:
    """Return what a short convolution gives its output projection, `[N, channels]`. Mutates `states`.

    `x` `[N, 3 * channels]` is the output of the layer's input projection: B, C and x of each row. `weight` `[kernel,
    channels]` has the row's own input last. Masked rows get zeros.
    """
    kernel, channels = weight.shape
    out = x.new_zeros((len(x), channels))
    x = x.to(weight.dtype)
    zero = (x.new_zeros((kernel - 1, channels)),)
    return states.run(layer, runs, zero, lambda i, state: step(x[i], weight, state[0]), out)


def step(x: Tensor, weight: Tensor, before: Tensor) -> tuple[Tensor, tuple[Tensor]]:
    """Return one row's output `[channels]`, and the state after it: inputs of the convolution at the last positions,
    `[kernel - 1, channels]`. `before` is the state before it."""
    b, c, own = x.chunk(3)
    inputs = torch.cat((before, (b * own)[None]))
    return c * (inputs * weight).sum(0), (inputs[1:],)
