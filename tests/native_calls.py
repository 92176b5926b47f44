"""Wraps native models as Python callables, whose passes a test can watch or break. Holds no tests.

`NativeCalls` gives the same bits as the native model by itself, because it calls the same decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from specrs.backends.cpu.callable_model import Returned
from specrs.drafters.eagle3.native import NativeEagle3Head
from specrs.models.native_cache import NativeKVCache
from specrs.models.native_decoder import NativeDecoder

PASS_ARRAYS = ("input_ids", "positions", "slots", "q_start", "block_table")


class NativeCalls:
    """A native model or head and its KV cache: `CallableModel` of `specrs._core`. Knows no LoRA adapters."""

    def __init__(self, model: NativeDecoder | NativeEagle3Head, kv_cache: NativeKVCache, vocab_size: int) -> None:
        """Wrap a model or head. `vocab_size`: the target's, whose ids a head is fed."""
        self.model, self.kv_cache = model, kv_cache
        self.num_ids = model.vocab_size
        self.hidden_size = model.config.hidden_size if isinstance(model, NativeDecoder) else model.hidden_size
        self.target_ids: NDArray[np.int64] | None = None
        self.aux_hidden_state_layers: Sequence[int] = ()
        self.aux_hidden_state_size = 0
        self._kept = np.empty((0, self.hidden_size), dtype=np.float32)
        if isinstance(model, NativeEagle3Head):
            self.vocab_size, self.num_layers = vocab_size, 1
            if model.vocab_size != vocab_size:
                self.target_ids = model.target_ids
            self.aux_hidden_state_layers = list(model.aux_layer_ids)
            self.aux_hidden_state_size = model.weights.config.target_hidden_size
        else:
            self.vocab_size, self.num_layers = model.vocab_size, model.num_layers

    def forward(
        self,
        inputs: dict[str, Any],
        wanted: NDArray[np.int64],
        keeps: bool,
        layers: list[int],
        beside: NDArray[np.float32] | None,
    ) -> Returned:
        """Run a pass of the native decoder."""
        rows = len(inputs["input_ids"])
        hidden = np.empty((rows, self.hidden_size), dtype=np.float32)
        entries = np.empty((rows, len(layers), self.hidden_size), dtype=np.float32) if layers else None
        self.model.decoder.forward(
            *(inputs[name] for name in PASS_ARRAYS),
            self.kv_cache.native,
            hidden,
            layers,
            entries,
            beside,
            inputs.get("k_start"),
            inputs.get("group_slots"),
            inputs.get("group_tables"),
            inputs["prompts"],
        )
        finite = None
        if isinstance(self.model, NativeDecoder) and self.model.ends_in_window:
            finite = np.isfinite(hidden).all(axis=1)
        self._kept = hidden[wanted]
        logits = self._logits(self._kept) if len(wanted) and not keeps else None
        return logits, entries, finite

    def logits(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the logits of rows that the last pass kept."""
        return self._logits(self._kept[rows])

    def fuse(self, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return what the head is fed for the target's hidden states."""
        out = np.empty((len(states), self.hidden_size), dtype=np.float32)
        self.model.decoder.fuse(states, out)
        return out

    def _logits(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        out = np.empty((len(hidden), self.num_ids), dtype=np.float32)
        self.model.decoder.logits(hidden, out)
        return out


def call_native(patch: pytest.MonkeyPatch, vocab_size: int) -> list[NativeCalls]:
    """Let runners that are made from now on call their native models through `NativeCalls`; returns these as they are
    made. `vocab_size`: the targets'."""
    made: list[NativeCalls] = []

    def source(model: NativeDecoder | NativeEagle3Head, kv_cache: NativeKVCache) -> NativeCalls:
        made.append(NativeCalls(model, kv_cache, vocab_size))
        return made[-1]

    patch.setattr("specrs.backends.cpu.runner._native", source)
    return made
