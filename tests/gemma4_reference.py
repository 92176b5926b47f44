"""transformers' Gemma 4 in float64 throughout; by default its norms and rotations are in float32. Holds no tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from hf_reference import load
from hybrid_reference import wide_norm
from specrs.models import torch_decoder
from torch import Tensor
from transformers.models.gemma4 import modeling_gemma4 as modeling


def _norm(self: Any, x: Tensor) -> Tensor:
    made: Tensor = self._norm(x) * (self.weight if self.with_scale else 1.0)
    return made


@contextmanager
def float64() -> Iterator[None]:
    """Let transformers and `TorchDecoder` compute Gemma 4's norms in float64."""
    with patch.object(modeling.Gemma4RMSNorm, "forward", _norm), patch.object(torch_decoder, "rms_norm", wide_norm):
        yield


def logits(path: Path, tokens: list[int]) -> Tensor:
    """Return the logits of transformers, `[tokens, vocab]` in float64."""
    return logits_and_margins(path, tokens)[0]


@torch.inference_mode()
def logits_and_margins(path: Path, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """Return the logits of transformers, `[tokens, vocab]` in float64, and how clear the choice of experts is for each
    token, `[tokens]`.

    The margin of a token is the smallest difference, over all layers, of the probabilities of the last expert that is
    chosen and the first that is not. It is infinite if all experts are chosen or there are none.
    """
    margins = torch.full((len(tokens),), torch.inf)

    def routed(module: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        ranked, most = output[0].sort(dim=-1, descending=True).values, module.config.top_k_experts
        if most < ranked.shape[-1]:
            torch.minimum(margins, ranked[:, most - 1] - ranked[:, most], out=margins)

    with float64():
        model = load(path)
        for module in model.modules():
            if isinstance(module, modeling.Gemma4TextRouter):
                module.register_forward_hook(routed)
        # Given a number of rows to keep, as by default, transformers takes these rows of the layers' embeddings before
        # layers that share keys, and stops with a TypeError if there are no embeddings. Rows by index it leaves alone.
        rows = torch.arange(len(tokens))
        found: Tensor = model(torch.tensor([tokens]), use_cache=False, logits_to_keep=rows).logits[0]
    return found, margins
