"""transformers' Qwen3.5 in float64 throughout: its own code takes some sums in float32. Holds no tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from hf_reference import load
from specrs.drafters.mtp import head as mtp_head
from specrs.models import torch_decoder
from torch import Tensor
from torch.nn.functional import silu
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule token by token, `[batch, tokens, heads, features]`, in the dtype of its arguments."""
    shared = value.shape[2] // key.shape[2]
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    q, k = (x.repeat_interleave(shared, dim=2) for x in (q / query.shape[-1] ** 0.5, k))
    batch, tokens, heads, features = value.shape
    state = value.new_zeros(batch, heads, k.shape[-1], features) if initial_state is None else initial_state.to(value)
    out = torch.zeros_like(value)
    for t in range(tokens):
        state = state * g[:, t].exp()[..., None, None]
        known = (state * k[:, t, :, :, None]).sum(-2)
        state = state + k[:, t, :, :, None] * (beta[:, t, :, None] * (value[:, t] - known))[:, :, None]
        out[:, t] = (state * q[:, t, :, :, None]).sum(-2)
    return out, state if output_final_state else None


def _norm(self: Any, x: Tensor) -> Tensor:
    scaled: Tensor = self._norm(x) * (1 + self.weight)
    return scaled


def _gated_norm(self: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
    scale = (hidden_states.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
    normed: Tensor = self.weight * hidden_states * scale * silu(gate)
    return normed


def _net(self: Any, *arguments: Any, **named: Any) -> Any:
    """The layer, in which `float()` leaves float64 as it is: it takes the decay in float32 otherwise."""
    with patch.object(torch.Tensor, "float", torch.Tensor.double):
        return _FORWARD(self, *arguments, **named)


_FORWARD = modeling.Qwen3_5GatedDeltaNet.forward


def wide_norm(x: Tensor, weight: Tensor, eps: float, *, inplace: bool = False) -> Tensor:
    """`specrs.kernels.rms_norm.rms_norm` in float64: its own is in float32 for every dtype."""
    made = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
    return x.copy_(made) if inplace else made


@contextmanager
def float64() -> Iterator[None]:
    """Let transformers and `TorchDecoder` compute the norms and the delta rule of Qwen3.5 in float64."""
    with (
        patch.object(modeling, "torch_chunk_gated_delta_rule", delta_rule),
        patch.object(modeling, "torch_recurrent_gated_delta_rule", delta_rule),
        patch.object(modeling.Qwen3_5GatedDeltaNet, "forward", _net),
        patch.object(modeling.Qwen3_5RMSNorm, "forward", _norm),
        patch.object(torch_decoder, "rms_norm", wide_norm),
        patch.object(mtp_head, "rms_norm", wide_norm),
        patch.object(modeling.Qwen3_5RMSNormGated, "forward", _gated_norm),
    ):
        yield


@torch.inference_mode()
def logits(path: Path, tokens: list[int]) -> Tensor:
    """Logits of transformers `[tokens, vocab]` in float64."""
    with float64():
        found: Tensor = load(path)(torch.tensor([tokens]), use_cache=False).logits[0]
    return found
