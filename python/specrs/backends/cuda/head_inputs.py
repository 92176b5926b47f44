"""Input of a head's layer on a CUDA device: normed embeddings next to normed hidden states. Multiplies nothing."""

from __future__ import annotations

from torch import Tensor

from specrs.kernels.cuda.rms_norm import rms_norm

Normed = tuple[Tensor, Tensor]
"""Rows `[N, H]`, and the weight `[H]` of their norm."""


def join_normed(token: Normed, hidden: Normed, eps: float, normed: Tensor, out: Tensor) -> None:
    """Write the normed rows of `token`, then those of `hidden`, into `out` `[N, 2 * H]`. Leaves the latter in `normed`
    `[N, H]`, too."""
    width = normed.shape[1]
    for (rows, weight), columns in ((token, slice(0, width)), (hidden, slice(width, None))):
        rms_norm(rows, None, weight, normed, eps, False)
        out[:, columns].copy_(normed)
