"""Forward pass of a decoder on a CPU as one call of `specrs-cpu`. Samples nothing and keeps no state.

The sums of a row have a fixed order. It does not depend on other rows, threads or the instruction set, so the logits
always have the same bits. Weights are read in place: fp32, bf16 or packed integers. Products are summed in fp32. Hidden
states are fp32 for bf16 models too. `torch_decoder` rounds them to bf16, so its numbers differ.

Steps of an engine run these passes in the Rust core. The passes called here serve tests and measurements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from specrs.arrays import BFLOAT16, FLOAT32, Array, aligned, bits, converted
from specrs.core import CpuDecoder, CpuLora, CpuPool, CpuWeights, PackedMatrix
from specrs.instruction_sets import start_pool
from specrs.models.config import ModelConfig
from specrs.models.decoder_weights import DecoderFacts, DeltaWeights, NativeLayer, NativeWeights, NumpyHeld
from specrs.models.delta_net import DeltaNet
from specrs.models.experts import Experts
from specrs.models.kv_groups import KVGroups, kv_groups
from specrs.models.lora import LoRAAdapter, LoRAPart, expert_projection
from specrs.models.native_cache import NativeKVCache
from specrs.models.native_inputs import Ints, NativeInputs, NativeStates
from specrs.models.rope import Rope, rope_magnitude
from specrs.models.stored import NativeWeight, StackedWeight
from specrs.models.varied_layers import LayerSizes


class NativeDecoder(NumpyHeld, DecoderFacts):
    """A decoder on a CPU without torch. `torch_decoder.TorchDecoder` is its reference."""

    weights: NativeWeights
    decoder: CpuDecoder

    def __init__(
        self,
        weights: NativeWeights,
        native: CpuWeights | None = None,
        pool: CpuPool | None = None,
        activations: str = "auto",
        prompt_tiles: bool = False,
        kv_groups: KVGroups | None = None,
    ) -> None:
        """Wrap `weights` as `backends.cpu.weights.load_native` lays them out. They must not change while this object
        lives.

        `pool` has the threads of passes; None: the caller's thread. `activations` is what rows are rounded to
        before products, as `cpu_activations` says. `prompt_tiles` multiplies the rows of prompts with bf16
        weights on AMX tiles.

        Raises:
            InvalidConfigError: `prompt_tiles` on a machine without AMX tiles.
            InvalidBufferError: an array that cannot be read in place, by name; a matrix that is not bf16 with
                activations `bf16`.
        """
        self.weights = weights
        self._kv_groups = kv_groups
        self._native = CpuWeights(**decoder_arrays(weights)) if native is None else native
        own = start_pool(1) if pool is None else pool
        self.decoder = CpuDecoder(self._native, own, activations=activations, prompt_tiles=prompt_tiles)
        self._loras: WeakKeyDictionary[LoRAAdapter, CpuLora] = WeakKeyDictionary()

    def on_pool(self, pool: CpuPool, *, activations: str = "auto", prompt_tiles: bool = False) -> NativeDecoder:
        """Return a model with the same weights, whose passes run on the threads of `pool` and have their own scratch
        memory."""
        return NativeDecoder(self.weights, self._native, pool, activations, prompt_tiles, self.kv_groups)

    def with_kv_groups(self, size: int) -> NativeDecoder:
        """Return the model with its layers in KV groups of at most `size` layers, a number from `kv_group_sizes`. Its
        passes run on the caller's thread."""
        return NativeDecoder(self.weights, self._native, kv_groups=kv_groups(self.config.windows, size))

    def with_ids(self, ids: Array) -> NativeDecoder:
        """Return the model with logits of `ids` `[n]` int64, ascending, only. It can still be fed any id. Copies their
        rows of the LM head. Its passes run on the caller's thread."""
        weights = replace(self.weights, lm_head=rows_of(self.weights.lm_head, ids), target_ids=ids)
        return NativeDecoder(weights, kv_groups=self.kv_groups)

    @property
    def device_name(self) -> str:
        """Device that holds the weights: `cpu`."""
        return "cpu"

    @property
    def states_dtype(self) -> np.dtype[Any]:
        """Dtype of the hidden states that a pass returns: float32."""
        return FLOAT32

    @property
    def kv_groups(self) -> KVGroups | None:
        """KV groups by which passes look up blocks. None: all layers are in one group."""
        return self._kv_groups

    def place(self, array: Array) -> Array:
        """Return `array` in the model's dtype, aligned in memory as native passes need it."""
        return aligned(converted(array, self.dtype))

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all matrices that passes may read, including every expert and the LM head."""
        layers = self.weights.layers
        matrices = [weight for w in layers for weight in (w.qkv, w.o, w.gate_up, w.down)]
        mixtures = [w.experts for w in layers if w.experts is not None]
        additions = [w.addition for w in layers if w.addition is not None]
        matrices += [weight for w in additions for weight in (w.gate, w.projection)]
        if self.weights.layer_embedding is not None:
            matrices.append(self.weights.layer_embedding.projection)
        matrices += [weight for w in mixtures for weight in (w.router, *w.gate_up, *w.down)]
        shared = [w.shared for w in mixtures if w.shared is not None]
        matrices += [weight for w in shared for weight in (w.gate, w.gate_up, w.down) if weight is not None]
        return sum(weight.num_bytes for weight in (*matrices, self.weights.lm_head))

    def native_lora(self, adapter: LoRAAdapter) -> CpuLora:
        """Return the adapter for native passes, which read its matrices in place.

        Raises InvalidBufferError for an adapter of another model.
        """
        found = self._loras.get(adapter)
        if found is None:
            layers = [_native_layer(layer, self.config.experts) for layer in adapter.layers]
            found = self._loras[adapter] = CpuLora(self._native, layers)
        return found

    def allocate_cache(self, num_blocks: int, block_size: int) -> NativeKVCache:
        """Return a zeroed cache of `num_blocks` blocks of `block_size` positions, and a scratch block."""
        return NativeKVCache.allocate(self.config, num_blocks, block_size, self.cache_dtype, self.kv_groups)

    def forward(self, inputs: NativeInputs, kv_cache: NativeKVCache, hidden_layers: Sequence[int] = ()) -> NativeStates:
        """Feed N rows. Writes K and V of every row with a slot into `kv_cache`, and the requests' states, and changes
        nothing else.

        Rows at position -1 are masked: their output is finite but meaningless. `hidden_layers` are the layers whose
        inputs are returned with the final states.

        Raises:
            InvalidBufferError: a token, position, slot, block or layer out of range. Nothing is written then.
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
        """Return the logits of final hidden states `[L, hidden]`: `[L, ids]` float32."""
        logits = np.empty((len(hidden), self._num_ids), FLOAT32)
        self.decoder.logits(np.ascontiguousarray(hidden), logits)
        return logits

    def compute_argmax(self, hidden: Array, num_ids: int | None = None) -> tuple[Array, Array]:
        """Return the most probable token of each row of `hidden` `[L, hidden]` and its logit: `[L]` int64 and `[L]`
        float32. With `target_ids`, tokens are numbered by their place there.

        The lowest id wins a tie. The logit is NaN if the row has a NaN. With `num_ids`, only the first ids are
        candidates.
        """
        known = self._num_ids if num_ids is None else min(num_ids, self._num_ids)
        ids, top = np.empty(len(hidden), np.int64), np.empty(len(hidden), FLOAT32)
        self.decoder.argmax(np.ascontiguousarray(hidden), known, ids, top)
        return ids, top

    @property
    def _num_ids(self) -> int:
        """Number of logits of a row."""
        return self.vocab_size if self.target_ids is None else len(self.target_ids)


def rows_of(lm_head: NativeWeight, ids: Array) -> NativeWeight:
    """Return a copy of the rows `ids` of an LM head, as bfloat16 if they are quantized: that suffices for drafts."""
    (matrix,) = lm_head.parts
    rows = converted(matrix.numbers()[ids], BFLOAT16) if isinstance(matrix, PackedMatrix) else matrix[ids]
    return StackedWeight((aligned(rows),))


def pass_arrays(inputs: NativeInputs) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Return the arrays of a pass in the order of `CpuDecoder.forward`: ids, positions, slots, q_start, block table."""
    return inputs.input_ids, inputs.positions, inputs.slots, inputs.q_start, inputs.block_table


def model_arrays(
    c: ModelConfig, embedding: Array, layers: Sequence[NativeLayer], final_norm: Array, lm_head: NativeWeight
) -> dict[str, Any]:
    """Return the arguments of `CpuWeights` that decoders and EAGLE-3 heads share. `c` has the sizes of the layers."""
    layer_sizes = c.varied or (c.plain_sizes,)
    return {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": max(sizes.intermediate_size for sizes in layer_sizes),
        "num_heads": c.num_heads,
        "num_kv_heads": max(sizes.num_kv_heads for sizes in layer_sizes),
        "head_dim": max(sizes.head_dim for sizes in layer_sizes),
        "rms_norm_eps": c.rms_norm_eps,
        "embedding": _stored(embedding),
        "layers": [layer_arrays(layer, c, c.sizes_of(i)) for i, layer in enumerate(layers)],
        "final_norm": bits(final_norm),
        "lm_head": stored_parts(lm_head),
    }


def decoder_arrays(weights: NativeWeights) -> dict[str, Any]:
    """Return the arguments of `CpuWeights` for a decoder."""
    c = weights.config
    arrays = model_arrays(c, weights.embedding, weights.layers, weights.final_norm, weights.lm_head)
    embedding = weights.layer_embedding
    return {
        **arrays,
        "frequencies": np.zeros(arrays["head_dim"] // 2, dtype=np.float32),
        "rotations": _rotations(weights),
        "multipliers": (c.embedding_multiplier, c.residual_multiplier, c.attention_scale),
        "query_scaling": None if c.query_scaling is None else astuple(c.query_scaling),
        "windows": list(c.windows) or None,
        "chunked": c.chunked,
        "interleaved_rope": c.interleaved_rope,
        "activation": c.activation,
        "clamped_swiglu": None if c.experts is None else c.experts.swiglu,
        "kv_scales": [layer.kv_scales for layer in weights.layers],
        "layer_embedding": None
        if embedding is None or c.layer_embedding is None
        else (c.layer_embedding.size, _stored(embedding.table), stored_parts(embedding.projection), embedding.norm),
        "softcap": c.final_logit_softcapping,
        "target_ids": None if weights.target_ids is None else weights.target_ids.tolist(),
    }


def _rotations(weights: NativeWeights) -> tuple[list[tuple[list[float], float]], list[int | None]]:
    """Return the rotations for `CpuWeights`: the distinct ones, as (frequencies, magnitude), and for each layer the
    index of its rotation, None without RoPE."""
    c = weights.config
    rotaries = weights.rotaries or (weights.rotary,) * c.num_layers
    known: dict[tuple[Rope, int], int] = {}
    made: list[tuple[list[float], float]] = []
    layers: list[int | None] = []
    for i, rotary in enumerate(rotaries):
        rope = c.rope_of(i)
        if rope is None or rotary is None:
            layers.append(None)
            continue
        turn = rope, c.rotary_dim_of(i)
        if turn not in known:
            known[turn] = len(made)
            made.append((rotary[turn[1] // 2 :].tolist(), rope_magnitude(rope[1])))
        layers.append(known[turn])
    return made, layers


_DELTA_FIELDS = ("key_heads", "value_heads", "key_dim", "value_dim", "kernel", "turned", "by_key_head")
"""Fields of `DeltaNet` that `CpuWeights` reads."""
Stored = Array | PackedMatrix
"""A matrix for `CpuWeights`: an array, or packed integers with scales."""


def layer_arrays(layer: NativeLayer, c: ModelConfig, sizes: LayerSizes) -> dict[str, Any]:
    """Return the arrays of one layer of the model `c` for `CpuWeights`, by argument name. `sizes` are the layer's."""
    q_norm = k_norm = None
    if layer.qk_norm is not None and c.qk_norm_whole:
        q_norm, k_norm = layer.qk_norm[: c.num_heads].reshape(-1), layer.qk_norm[c.num_heads :].reshape(-1)
    elif layer.qk_norm is not None:
        q_norm = layer.qk_norm[0]
        # A layer that attends to another one's keys has no norm of keys, and none is read.
        k_norm = layer.qk_norm[c.num_heads] if sizes.source is None else np.ones_like(q_norm)
    before = c.norms != "after"
    return {
        "input_norm": layer.input_norm if before else None,
        "qkv": stored_parts(layer.qkv),
        "q_norm": q_norm,
        "k_norm": k_norm,
        "qk_norm_whole": c.qk_norm_whole,
        "sinks": layer.sinks,
        "output_gate": c.output_gate and layer.delta is None,
        "delta": None if layer.delta is None or c.delta is None else _delta_arrays(layer.delta, c.delta),
        "conv": None
        if layer.conv is None or c.conv is None
        else {"kernel": c.conv.kernel, "conv": layer.conv.reshape(-1)},
        "o": stored_parts(layer.o),
        "attention_output_norm": layer.attention_output_norm,
        "post_attention_norm": layer.post_attention_norm if before else None,
        "mlp_output_norm": layer.mlp_output_norm,
        "varied": _varied_arrays(layer, c, sizes) if c.varied else None,
        **_mlp_arrays(layer, c),
    }


def _delta_arrays(weights: DeltaWeights[Array], delta: DeltaNet) -> dict[str, Any]:
    return {
        **{name: getattr(delta, name) for name in _DELTA_FIELDS},
        "conv": weights.conv.reshape(-1),
        "a_log": weights.a_log,
        "dt_bias": weights.dt_bias,
        "norm": weights.norm,
    }


def _varied_arrays(layer: NativeLayer, c: ModelConfig, sizes: LayerSizes) -> dict[str, Any]:
    own = layer.addition
    return {
        **{name: getattr(sizes, name) for name in ("num_kv_heads", "head_dim", "intermediate_size")},
        "keys_are_values": sizes.keys_are_values,
        "source": sizes.source,
        "value_norm": c.value_norm,
        "addition": None if own is None else (stored_parts(own.gate), stored_parts(own.projection), own.norm),
        "scalar": layer.scalar,
    }


def _mlp_arrays(layer: NativeLayer, c: ModelConfig) -> dict[str, Any]:
    mlp = {"gate_up": stored_parts(layer.gate_up), "down": stored_parts(layer.down)}
    if layer.experts is None or c.experts is None:
        return mlp
    shared, scales, norms = layer.experts.shared, layer.experts.scales, layer.experts.norms
    mixture = {
        "router": stored_parts(layer.experts.router),
        "gate_up": [stored_parts(weight) for weight in layer.experts.gate_up],
        "down": [stored_parts(weight) for weight in layer.experts.down],
        "per_token": c.experts.per_token,
        "normalized": c.experts.norm_topk_prob,
        "sigmoids": c.experts.sigmoids,
        "bias": layer.experts.bias,
        "factor": c.experts.factor,
        "weighs_input": c.experts.weighs_input,
        "shared": None
        if shared is None
        else {
            "gate": None if shared.gate is None else stored_parts(shared.gate),
            "gate_up": stored_parts(shared.gate_up),
            "down": stored_parts(shared.down),
        },
        "scales": None if scales is None else (scales.hidden, scales.experts),
        "norms": None if norms is None else (norms.mlp_output, norms.expert_input, norms.expert_output),
    }
    return {"experts": mixture} if norms is None else {"experts": mixture} | mlp


def stored_parts(weight: NativeWeight) -> list[tuple[Stored, Array | None]]:
    """Return a projection for `CpuWeights`: for each fused part its matrix and its bias (None: it has none)."""
    parts: tuple[Stored, ...] = weight.parts
    biases = weight.biases or (None,) * len(parts)
    return list(zip(map(_stored, parts), biases, strict=True))


def _stored(part: Stored) -> Stored:
    return part if isinstance(part, PackedMatrix) else bits(part)


def _native_layer(layer: Mapping[str, Sequence[LoRAPart]], experts: Experts | None) -> dict[str, list[Any]]:
    """Return a layer of an adapter as `CpuLora` takes it."""

    def parts(name: str) -> list[tuple[Array, Array, int]]:
        return [(bits(part.a), bits(part.b), part.first) for part in layer.get(name, ())]

    made: dict[str, list[Any]] = {name: parts(name) for name in ("qkv", "o", "gate_up", "down")}
    count = 0 if experts is None or made.keys() >= layer.keys() else experts.count
    made["experts"] = [
        (parts(expert_projection(i, "gate_up")), parts(expert_projection(i, "down"))) for i in range(count)
    ]
    return made
