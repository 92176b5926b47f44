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


@torch.inference_mode()
def logits(path: Path, tokens: list[int]) -> Tensor:
    """Return the logits of transformers, `[tokens, vocab]` in float64."""
    with float64():
        found: Tensor = load(path)(torch.tensor([tokens]), use_cache=False).logits[0]
    return found
