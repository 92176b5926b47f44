"""The forward pass of a dense decoder on a CPU as one call of `specrs-cpu`. Samples nothing and keeps no state.

Every row's sums have one order, whatever the other rows, the threads and the instruction set: its logits are the same
bits. Weights are read where they are, fp32, bf16, INT8 or INT4, and products are summed in fp32; hidden states are fp32
for bf16 models too, which is better than the rounding of `dense`, and so not the same numbers.

Steps of an engine run such passes in the Rust core. Those that are called here are for tests and measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from specrs.arrays import FLOAT32, Array, aligned, bits, converted
from specrs.core import CpuDecoder, CpuLora, CpuPool, CpuWeights
from specrs.models.config import ModelConfig
from specrs.models.dense_weights import DenseFacts, NativeLayer, NativeWeights
from specrs.models.kv_groups import KVGroups, kv_groups
from specrs.models.lora import LoRAAdapter
from specrs.models.native_cache import NativeKVCache
from specrs.models.native_inputs import Ints, NativeInputs, NativeStates
from specrs.models.rope import Rope, rope_magnitude
from specrs.models.stored import Codes, NativeWeight


class NativeDense(DenseFacts):
    """A dense decoder on a CPU, without torch; `dense.Dense` is its reference."""

    weights: NativeWeights

    def __init__(
        self,
        weights: NativeWeights,
        native: CpuWeights | None = None,
        pool: CpuPool | None = None,
        bf16_rows: bool = False,
        prompt_tiles: bool = False,
        kv_groups: KVGroups | None = None,
    ) -> None:
        """`weights` as `native_loader.load_native` lays them out; they must not be written while this lives. Without a
        pool passes run on the caller's thread.

        With `bf16_rows` passes round rows to bf16 before every product, with `prompt_tiles` they multiply the rows of
        prompts with bf16 weights by AMX's tiles.

        Raises:
            InvalidConfigError: `prompt_tiles` on a machine that has none.
            InvalidBufferError: an array that cannot be read where it is, by name; a matrix that is not bf16 with
                `bf16_rows`.
        """
        self.weights = weights
        self._kv_groups = kv_groups
        self._native = _borrow(weights) if native is None else native
        own = CpuPool(1) if pool is None else pool
        self.decoder = CpuDecoder(self._native, own, bf16_rows=bf16_rows, prompt_tiles=prompt_tiles)
        self._loras: WeakKeyDictionary[LoRAAdapter, CpuLora] = WeakKeyDictionary()

    def on_pool(self, pool: CpuPool, *, bf16_rows: bool = False, prompt_tiles: bool = False) -> NativeDense:
        """Return the same weights on the threads of `pool`, with work space of its own."""
        return NativeDense(self.weights, self._native, pool, bf16_rows, prompt_tiles, self.kv_groups)

    def with_kv_groups(self, size: int) -> NativeDense:
        """Return the same with its layers in KV groups of at most `size`, one of `group_sizes`. Passes run on the
        caller's thread."""
        return NativeDense(self.weights, self._native, kv_groups=kv_groups(self.config.windows, size))

    @property
    def dtype(self) -> np.dtype[Any]:
        """See `Model`; like what follows."""
        return self.weights.dtype

    @property
    def cache_dtype(self) -> np.dtype[Any]:
        """See `DenseFacts`."""
        return self.weights.dtype if self.weights.cache_dtype is None else self.weights.cache_dtype

    @property
    def device_type(self) -> str:
        """See `Model`."""
        return "cpu"

    @property
    def states_dtype(self) -> np.dtype[Any]:
        """See `Model`."""
        return FLOAT32

    @property
    def kv_groups(self) -> KVGroups | None:
        """See `Model`."""
        return self._kv_groups

    def place(self, array: Array) -> Array:
        """See `DenseFacts`."""
        return aligned(converted(array, self.dtype))

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
                    name: [(bits(part.a), bits(part.b), part.first) for part in layer.get(name, ())]
                    for name in ("qkv", "o", "gate_up", "down")
                }
                for layer in adapter.layers
            ]
            found = self._loras[adapter] = CpuLora(self._native, layers)
        return found

    def allocate_cache(self, num_blocks: int, block_size: int) -> NativeKVCache:
        """See `Model`."""
        return NativeKVCache.allocate(self.config, num_blocks, block_size, self.cache_dtype, self.kv_groups)

    def forward(self, inputs: NativeInputs, kv_cache: NativeKVCache, hidden_layers: Sequence[int] = ()) -> NativeStates:
        """Feed N rows. Writes K and V of every row with a slot into `kv_cache` and changes nothing else.

        Rows at position -1 give finite values that mean nothing. `hidden_layers` are the layers whose entries are
        returned with the final states.

        Raises:
            InvalidBufferError: a token, position, slot, block or layer that is none; nothing is written then.
        """
        rows, size = len(inputs.input_ids), self.config.hidden_size
        hidden = np.empty((rows, size), FLOAT32)
        entries = np.empty((rows, len(hidden_layers), size), FLOAT32) if hidden_layers else None
        self.decoder.forward(
            *pass_arrays(inputs),
            kv_cache.native,
            hidden,
            list(hidden_layers),
            entries,
            k_start=inputs.k_start,
            group_slots=inputs.group_slots,
            group_tables=inputs.group_tables,
            prompts=inputs.prompts,
            adapters=[(self.native_lora(adapter), rows) for adapter, rows in inputs.adapters],
        )
        return NativeStates(hidden, entries)

    def compute_logits(self, hidden: Array) -> Array:
        """Return the logits of final hidden states `[L, hidden]`: `[L, vocab]` float32."""
        logits = np.empty((len(hidden), self.vocab_size), FLOAT32)
        self.decoder.logits(np.ascontiguousarray(hidden), logits)
        return logits

    def compute_argmax(self, hidden: Array, num_ids: int | None = None) -> tuple[Array, Array]:
        """Return the most probable token of each row of `hidden` `[L, hidden]` and its logit: `[L]` int64 and float32.

        The lowest id in a tie; the logit is NaN if the row has a NaN. `num_ids` looks at the first ids only.
        """
        known = self.vocab_size if num_ids is None else min(num_ids, self.vocab_size)
        ids, top = np.empty(len(hidden), np.int64), np.empty(len(hidden), FLOAT32)
        self.decoder.argmax(np.ascontiguousarray(hidden), known, ids, top)
        return ids, top


def pass_arrays(inputs: NativeInputs) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Return what a pass is fed, in the order of `CpuDecoder.forward`: ids, positions, slots, starts, blocks."""
    return inputs.input_ids, inputs.positions, inputs.slots, inputs.q_start, inputs.block_table


def _borrow(weights: NativeWeights) -> CpuWeights:
    c = weights.config
    return CpuWeights(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_heads=c.num_heads,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps,
        embedding=bits(weights.embedding),
        layers=[layer_arrays(layer, c) for layer in weights.layers],
        final_norm=bits(weights.final_norm),
        lm_head=stored_parts(weights.lm_head),
        frequencies=np.zeros(c.head_dim // 2, dtype=np.float32),
        rotations=_rotations(weights),
        multipliers=(c.embedding_multiplier, c.residual_multiplier, c.attention_scale),
        windows=list(c.windows) or None,
        activation=c.activation,
        clamped_swiglu=None if c.experts is None else c.experts.swiglu,
        kv_scales=[layer.kv_scales for layer in weights.layers],
    )


def _rotations(weights: NativeWeights) -> tuple[list[tuple[list[float], float]], list[int | None]]:
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


Stored = Array | tuple[Array, Array]
"""A matrix as `CpuWeights` takes it: an array, or codes and scales."""


def layer_arrays(layer: NativeLayer, c: ModelConfig) -> dict[str, Any]:
    """Return a layer of a model of `c` as `CpuWeights` takes it."""
    q_norm = k_norm = None
    if layer.qk_norm is not None and c.qk_norm_whole:
        q_norm, k_norm = layer.qk_norm[: c.num_heads].reshape(-1), layer.qk_norm[c.num_heads :].reshape(-1)
    elif layer.qk_norm is not None:
        q_norm, k_norm = layer.qk_norm[0], layer.qk_norm[-1]
    before = c.norms != "behind"
    return {
        "input_norm": layer.input_norm if before else None,
        "qkv": stored_parts(layer.qkv),
        "q_norm": q_norm,
        "k_norm": k_norm,
        "qk_norm_whole": c.qk_norm_whole,
        "sinks": layer.sinks,
        "o": stored_parts(layer.o),
        "attention_output_norm": layer.attention_output_norm,
        "post_attention_norm": layer.post_attention_norm if before else None,
        "mlp_output_norm": layer.mlp_output_norm,
        **_mlp_arrays(layer, c),
    }


def _mlp_arrays(layer: NativeLayer, c: ModelConfig) -> dict[str, Any]:
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


def stored_parts(weight: NativeWeight) -> list[tuple[Stored, Array | None]]:
    """Return a projection as `CpuWeights` takes it."""
    parts: tuple[Array | Codes, ...] = weight.parts
    biases = weight.biases or (None,) * len(parts)
    return [(_stored(part), bias) for part, bias in zip(parts, biases, strict=True)]


def _stored(part: Array | Codes) -> Stored:
    return (part.codes, bits(part.scales)) if isinstance(part, Codes) else bits(part)
