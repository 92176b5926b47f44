"""The forward pass of a dense decoder on a CPU as one call of `specrs-cpu`. Samples nothing and keeps no state.

Every row's sums have one order, whatever the other rows, the threads and the instruction set: its logits are the same
bits. Weights are read where they are, fp32, bf16, INT8 or INT4, and products are summed in fp32; hidden states are fp32
for bf16 models too, which is better than the rounding of `dense`, and so not the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specrs.core import CpuDecoder, CpuKVCache, CpuLora, CpuPool, CpuWeights
from specrs.kernels.linear import Codes, QuantizedWeight, StackedWeight, Weight
from specrs.models.base import HiddenStates
from specrs.models.config import ModelConfig
from specrs.models.dense import Dense
from specrs.models.dense_weights import DenseFacts, DenseWeights, LayerWeights
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import CODES, KVCache
from specrs.models.kv_groups import KVGroups, kv_groups
from specrs.models.lora import LoRAAdapter
from specrs.models.rope import Rope, rope_magnitude

_Ints: TypeAlias = NDArray[np.int64]
TORCH_TOKENS = 256
"""Rows of a request from which torch's passes, in which products are faster and all else is slower, may be worth it."""


@dataclass(frozen=True, slots=True)
class NativeKVCache(KVCache):
    """A cache that native passes know."""

    native: CpuKVCache


class NativeDense(DenseFacts):
    """A dense decoder on a CPU, without torch in its passes; `dense.Dense` is its reference."""

    def __init__(
        self,
        weights: DenseWeights,
        native: CpuWeights | None = None,
        pool: CpuPool | None = None,
        torch_rows: int | None = None,
        bf16_rows: bool = False,
        prompt_tiles: bool = False,
        kv_groups: KVGroups | None = None,
    ) -> None:
        """`weights` as `loader.load_native` lays them out; they must not be written while this lives. Without a pool
        passes run on the caller's thread.

        Passes that feed a request `torch_rows` rows or more are torch's, in fp32, on the same weights and cache; None:
        none are. With `bf16_rows` the native ones round rows to bf16 before every product, with `prompt_tiles` they
        multiply the rows of prompts with bf16 weights by AMX's tiles.

        Raises:
            InvalidConfigError: `prompt_tiles` on a machine that has none.
            InvalidBufferError: a tensor that cannot be read where it is, by name; a matrix that is not bf16 with
                `bf16_rows`.
        """
        self.weights = weights
        self.torch_rows = torch_rows
        self._kv_groups = kv_groups
        self._native = _borrow(weights) if native is None else native
        self._torch = Dense(replace(weights, dtype=torch.float32), kv_groups)
        own = CpuPool(1) if pool is None else pool
        self.decoder = CpuDecoder(self._native, own, bf16_rows=bf16_rows, prompt_tiles=prompt_tiles)
        self._loras: WeakKeyDictionary[LoRAAdapter, CpuLora] = WeakKeyDictionary()

    def on_pool(
        self, pool: CpuPool, *, torch_rows: int | None = None, bf16_rows: bool = False, prompt_tiles: bool = False
    ) -> NativeDense:
        """The same weights on the threads of `pool`, with work space of its own."""
        return NativeDense(self.weights, self._native, pool, torch_rows, bf16_rows, prompt_tiles, self.kv_groups)

    def with_kv_groups(self, size: int) -> NativeDense:
        """See `Dense`. Passes run on the caller's thread."""
        return NativeDense(self.weights, self._native, kv_groups=kv_groups(self.config.windows, size))

    @property
    def states_dtype(self) -> torch.dtype:
        """See `Model`."""
        return torch.float32

    @property
    def kv_groups(self) -> KVGroups | None:
        """See `Model`."""
        return self._kv_groups

    @property
    def num_bytes(self) -> int:
        """Bytes of the matrices that passes read."""
        layers = self.weights.layers
        matrices = [weight for w in layers for weight in (w.qkv, w.o, w.gate_up, w.down)]
        mixtures = [w.experts for w in layers if w.experts is not None]
        matrices += [weight for w in mixtures for weight in (w.router, *w.gate_up, *w.down)]
        return sum(weight.num_bytes for weight in (*matrices, self.weights.lm_head))

    def native_lora(self, adapter: LoRAAdapter) -> CpuLora:
        """The adapter as native passes read it, where it is.

        Raises InvalidBufferError for one of another model.
        """
        found = self._loras.get(adapter)
        if found is None:
            layers = [
                {
                    name: [(array(part.a), array(part.b), part.first) for part in layer.get(name, ())]
                    for name in ("qkv", "o", "gate_up", "down")
                }
                for layer in adapter.layers
            ]
            found = self._loras[adapter] = CpuLora(self._native, layers)
        return found

    def with_buffers(self, max_rows: int, max_seqs: int, num_hidden_layers: int = 0) -> NativeDense:
        """See `Model`."""
        return self

    def allocate_cache(self, num_blocks: int, block_size: int) -> NativeKVCache:
        """See `Model`."""
        cache = super().allocate_cache(num_blocks, block_size)
        return NativeKVCache(cache.layers, block_size, native_cache(cache, self.kv_groups))

    def forward(self, inputs: PassInputs, kv_cache: KVCache, hidden_layers: Sequence[int] = ()) -> HiddenStates:
        """See `Model`; states are fp32 whatever the dtype.

        Raises:
            InvalidBufferError: a token, position, slot, block or layer that is none; nothing is written then.
        """
        if self.torch_rows is not None and inputs.max_q_len >= self.torch_rows:
            return self._torch.forward(inputs, kv_cache, hidden_layers)
        rows, size = len(inputs.input_ids), self.config.hidden_size
        hidden = torch.empty((rows, size), dtype=torch.float32)
        entries = torch.empty((rows, len(hidden_layers), size), dtype=torch.float32) if hidden_layers else None
        self.decoder.forward(
            *pass_arrays(inputs),
            native_of(kv_cache, self.kv_groups),
            hidden.numpy(),
            list(hidden_layers),
            None if entries is None else entries.numpy(),
            k_start=_numbers(inputs.k_start),
            group_slots=_numbers(inputs.group_slots),
            group_tables=_numbers(inputs.group_tables),
            prompts=inputs.prompts,
            adapters=[(self.native_lora(given.adapter), given.rows.tolist()) for given in inputs.adapters],
        )
        return HiddenStates(hidden, entries)

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Model`."""
        if out is None or not out.is_contiguous():
            columns = self.vocab_size if out is None else out.shape[1]
            made = torch.empty((len(hidden), columns), dtype=torch.float32)
            self.decoder.logits(hidden.contiguous().numpy(), made.numpy())
            return made if out is None else out.copy_(made)
        self.decoder.logits(hidden.contiguous().numpy(), out.numpy())
        return out

    def compute_argmax(self, hidden: Tensor, ids: Tensor, top: Tensor, num_ids: int | None = None) -> None:
        """See `Model`."""
        known = self.vocab_size if num_ids is None else min(num_ids, self.vocab_size)
        self.decoder.argmax(hidden.contiguous().numpy(), known, ids.numpy(), top.numpy())


def pass_arrays(inputs: PassInputs) -> tuple[_Ints, _Ints, _Ints, _Ints, _Ints]:
    """What a pass is fed, in the order of `CpuDecoder.forward`: ids, positions, slots, starts of requests, blocks."""
    return (
        inputs.input_ids.contiguous().numpy(),
        inputs.positions.contiguous().numpy(),
        inputs.slots.contiguous().numpy(),
        inputs.q_start.contiguous().numpy(),
        inputs.block_table.contiguous().numpy(),
    )


def _numbers(tensor: Tensor | None) -> NDArray[np.int64] | None:
    return None if tensor is None else tensor.contiguous().numpy()


def native_of(cache: KVCache, groups: KVGroups | None = None) -> CpuKVCache:
    """The cache as native passes know it: its own where it has one."""
    return cache.native if isinstance(cache, NativeKVCache) else native_cache(cache, groups)


def native_cache(cache: KVCache, groups: KVGroups | None = None) -> CpuKVCache:
    """The cache's memory, as native passes know it; `groups` are those that it was allocated for."""
    codes = next((name for name, dtype in CODES.items() if dtype == cache.layers[0].dtype), None)
    if groups is None:
        return CpuKVCache([array(layer) for layer in cache.layers], codes=codes)
    # The first group has a layer at every place.
    places = [array(layer) for layer, group in zip(cache.layers, groups.of_layer, strict=True) if group == 0]
    return CpuKVCache(places, list(zip(groups.of_layer, groups.places, strict=True)), codes)


def _borrow(weights: DenseWeights) -> CpuWeights:
    c = weights.config
    return CpuWeights(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_heads=c.num_heads,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps,
        embedding=array(weights.embedding),
        layers=[layer_arrays(layer, c) for layer in weights.layers],
        final_norm=array(weights.final_norm),
        lm_head=stored_parts(weights.lm_head),
        frequencies=np.zeros(c.head_dim // 2, dtype=np.float32),
        rotations=_rotations(weights),
        multipliers=(c.embedding_multiplier, c.residual_multiplier, c.attention_scale),
        windows=list(c.windows) or None,
        activation=c.activation,
        clamped_swiglu=None if c.experts is None else c.experts.swiglu,
        kv_scales=[layer.kv_scales for layer in weights.layers],
    )


def _rotations(weights: DenseWeights) -> tuple[list[tuple[list[float], float]], list[int | None]]:
    """As `CpuWeights` takes them: those that there are, and which of them each layer has."""
    c = weights.config
    rotaries = weights.rotaries or (weights.rotary,) * c.num_layers
    known: dict[Rope, int] = {}
    made: list[tuple[list[float], float]] = []
    layers: list[int | None] = []
    for i, rotary in enumerate(rotaries):
        rope = c.rope_of(i)
        if rope is None or rotary is None:
            layers.append(None)
            continue
        if rope not in known:
            known[rope] = len(made)
            made.append((rotary[c.rotary_dim // 2 :].tolist(), rope_magnitude(rope[1])))
        layers.append(known[rope])
    return made, layers


Stored = NDArray[np.generic] | tuple[NDArray[np.generic], NDArray[np.generic]]
"""A matrix as `CpuWeights` takes it: an array, or codes and scales."""


def layer_arrays(layer: LayerWeights, c: ModelConfig) -> dict[str, Any]:
    """A layer of a model of `c` as `CpuWeights` takes it."""
    q_norm = k_norm = None
    if layer.qk_norm is not None and c.qk_norm_whole:
        q_norm, k_norm = (
            array(part.flatten()) for part in (layer.qk_norm[: c.num_heads], layer.qk_norm[c.num_heads :])
        )
    elif layer.qk_norm is not None:
        q_norm, k_norm = array(layer.qk_norm[0]), array(layer.qk_norm[-1])
    before = c.norms != "behind"
    return {
        "input_norm": array(layer.input_norm) if before else None,
        "qkv": stored_parts(layer.qkv),
        "q_norm": q_norm,
        "k_norm": k_norm,
        "qk_norm_whole": c.qk_norm_whole,
        "sinks": _optional(layer.sinks),
        "o": stored_parts(layer.o),
        "attention_output_norm": _optional(layer.attention_output_norm),
        "post_attention_norm": array(layer.post_attention_norm) if before else None,
        "mlp_output_norm": _optional(layer.mlp_output_norm),
        **_mlp_arrays(layer, c),
    }


def _mlp_arrays(layer: LayerWeights, c: ModelConfig) -> dict[str, Any]:
    if layer.experts is None or c.experts is None:
        return {"gate_up": stored_parts(layer.gate_up), "down": stored_parts(layer.down)}
    mixture = {
        "router": stored_parts(layer.experts.router),
        "gate_up": [stored_parts(weight) for weight in layer.experts.gate_up],
        "down": [stored_parts(weight) for weight in layer.experts.down],
        "per_token": c.experts.per_token,
        "normalized": c.experts.norm_topk_prob,
    }
    return {"experts": mixture}


def stored_parts(weight: Weight) -> list[tuple[Stored, NDArray[np.generic] | None]]:
    """A projection as `CpuWeights` takes it."""
    assert isinstance(weight, StackedWeight | QuantizedWeight)
    parts: tuple[Tensor | Codes, ...] = weight.parts
    biases = weight.biases or (None,) * len(parts)
    return [(_stored(part), None if bias is None else array(bias)) for part, bias in zip(parts, biases, strict=True)]


def _optional(tensor: Tensor | None) -> NDArray[np.generic] | None:
    return None if tensor is None else array(tensor)


def _stored(part: Tensor | Codes) -> Stored:
    return (array(part.codes), array(part.scales)) if isinstance(part, Codes) else array(part)


def array(tensor: Tensor) -> NDArray[np.generic]:
    """The tensor's memory; of types that numpy does not know, bf16 and FP8, the bits."""
    bits = {torch.bfloat16: torch.uint16} | dict.fromkeys(CODES.values(), torch.uint8)
    array: NDArray[np.generic] = tensor.view(bits.get(tensor.dtype, tensor.dtype)).numpy()
    return array
