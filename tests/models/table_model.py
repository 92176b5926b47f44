"""A model of two tables: logits depend on the token at a position and on the one before, read from the cache.

Shares no code with `models.torch_decoder`; what a runner may ask of any model is `TorchModel` alone. Holds no tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from specrs.arrays import FLOAT32
from specrs.models.base import HiddenStates, TorchModel
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache
from torch import Tensor

CPU = torch.device("cpu")


@dataclass(frozen=True)
class TableModel(TorchModel):
    """Model with logits(p) = own[token p] + before[token p - 1]; both tables are `[V, V]`. Its cache holds ids, its
    hidden states are logits."""

    own: Tensor
    before: Tensor
    dtype: np.dtype[Any] = FLOAT32
    device: torch.device = CPU
    device_name: str = "cpu"
    max_position_embeddings: int = 64
    num_layers: int = 1
    eos_token_ids: tuple[int, ...] = ()

    @property
    def hidden_size(self) -> int:
        """Size of final hidden states, which are the logits."""
        return self.vocab_size

    @classmethod
    def random(cls, vocab_size: int, seed: int, **fields: Any) -> TableModel:
        generator = torch.Generator().manual_seed(seed)
        own, before = (2.0 * torch.randn(vocab_size, vocab_size, generator=generator) for _ in range(2))
        return cls(own, before, **fields)

    def near(self, noise: float, seed: int) -> TableModel:
        """Return another model that often agrees with this one."""
        generator = torch.Generator().manual_seed(seed)
        return TableModel(self.own + noise * torch.randn(self.own.shape, generator=generator), self.before)

    @property
    def vocab_size(self) -> int:
        return self.own.shape[0]

    @property
    def num_parameters(self) -> int:
        return self.own.numel() + self.before.numel()

    def bytes_per_block(self, block_size: int) -> int:
        return 8 * block_size

    def allocate_cache(self, num_blocks: int, block_size: int) -> KVCache:
        return KVCache([torch.full((num_blocks + 1, block_size), -1)], block_size)

    def forward(self, inputs: PassInputs, kv_cache: KVCache, hidden_layers: Sequence[int] = ()) -> HiddenStates:
        flat = kv_cache.layers[0].view(-1)
        written = inputs.slots >= 0
        flat[inputs.slots[written]] = inputs.input_ids[written]
        count = len(inputs.input_ids)
        request = (torch.searchsorted(inputs.q_start, torch.arange(count), right=True) - 1).clamp(
            max=len(inputs.block_table) - 1
        )
        at = (inputs.positions - 1).clamp(min=0)
        block = inputs.block_table[request, at // kv_cache.block_size]
        previous = flat[block * kv_cache.block_size + at % kv_cache.block_size]
        live = inputs.positions > 0
        assert (previous[live] >= 0).all(), "a position was read that was never written"
        logits = self.own[inputs.input_ids] + torch.where(live[:, None], self.before[previous.clamp(min=0)], 0.0)
        entries = torch.stack([self.own[inputs.input_ids]] * len(hidden_layers), dim=1) if hidden_layers else None
        return HiddenStates(logits, entries)

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return hidden if out is None else out.copy_(hidden[:, : out.shape[1]])

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """Return the greedy text, without any engine."""
        tokens = list(prompt)
        for _ in range(count):
            logits = self.own[tokens[-1]] + (self.before[tokens[-2]] if len(tokens) > 1 else 0.0)
            tokens.append(int(logits.argmax()))
        return tokens[len(prompt) :]
