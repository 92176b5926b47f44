"""transformers' hybrids in float64 throughout; by default some of its sums are in float32. Holds no tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from hf_reference import load
from specrs.drafters.mtp import head as mtp_head
from specrs.models import torch_decoder
from torch import Tensor
from torch.nn.functional import silu
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.lfm2_moe import modeling_lfm2_moe
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

MODULES = {
    "Qwen3_5": modeling_qwen3_5,
    "Qwen3_5Moe": modeling_qwen3_5_moe,
    "Qwen3Next": modeling_qwen3_next,
}
"""Modules of transformers by the beginning of their classes' names."""


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
    """Compute the gated delta rule token by token, `[batch, tokens, heads, features]`, in the dtype of its
    arguments."""
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


def _plain_norm(self: Any, hidden_states: Tensor) -> Tensor:
    return wide_norm(hidden_states, self.weight, self.variance_epsilon)


def _gated_norm(self: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
    scale = (hidden_states.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
    normed: Tensor = self.weight * hidden_states * scale * silu(gate)
    return normed


def _wide(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a layer's `forward` so that `float()` leaves float64 as it is; by default the decay is in float32."""

    def wide(*arguments: Any, **named: Any) -> Any:
        with patch.object(torch.Tensor, "float", torch.Tensor.double):
            return forward(*arguments, **named)

    return wide


def wide_norm(x: Tensor, weight: Tensor, eps: float, *, inplace: bool = False) -> Tensor:
    """Compute `specrs.kernels.rms_norm.rms_norm` in float64; the original uses float32 for every dtype."""
    made = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
    return x.copy_(made) if inplace else made


@contextmanager
def float64() -> Iterator[None]:
    """Let transformers and `TorchDecoder` compute the norms and the delta rule of hybrids in float64. The router's
    softmax is in float32 in both."""
    with ExitStack() as stack:
        for owner in (torch_decoder, mtp_head):
            stack.enter_context(patch.object(owner, "rms_norm", wide_norm))
        for norm in (modeling_lfm2.Lfm2RMSNorm, modeling_lfm2_moe.Lfm2MoeRMSNorm):
            stack.enter_context(patch.object(norm, "forward", _plain_norm))
        for name, module in MODULES.items():
            net = getattr(module, f"{name}GatedDeltaNet")
            for owner, attribute, made in (
                (module, "torch_chunk_gated_delta_rule", delta_rule),
                (module, "torch_recurrent_gated_delta_rule", delta_rule),
                (net, "forward", _wide(net.forward)),
                (getattr(module, f"{name}RMSNorm"), "forward", _norm),
                (getattr(module, f"{name}RMSNormGated"), "forward", _gated_norm),
            ):
                stack.enter_context(patch.object(owner, attribute, made))
        yield


@torch.inference_mode()
def logits(path: Path, tokens: list[int]) -> Tensor:
    """Return the logits of transformers, `[tokens, vocab]` in float64."""
    with float64():
        found: Tensor = load(path)(torch.tensor([tokens]), use_cache=False).logits[0]
    return found
