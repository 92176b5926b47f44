"""Sizes of layers that differ within a model, keys and values that layers share, and embeddings of single layers.
Parses their fields of config.json; computes no layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specrs.models.errors import malformed, unsupported
from specrs.models.values import flag, size

_SLIDING, _FULL = "sliding_attention", "full_attention"
_OVERRIDES = ("head_dim", "num_key_value_heads")
"""Fields that `per_layer_config` may have for a layer."""


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Sizes of one layer, and where its keys and values come from."""

    head_dim: int
    num_kv_heads: int
    intermediate_size: int
    keys_are_values: bool = False
    """True if the layer has no v projection: its values are the output of the k projection, before norm and RoPE."""
    source: int | None = None
    """Earlier layer whose keys and values this layer attends to. Then it has no k and v projection, and no KV cache.
    None: the layer has keys and values of its own."""

    @property
    def projected_heads(self) -> int:
        """Number of KV heads that the layer projects: key heads, and value heads if keys are no values."""
        return 0 if self.source is not None else self.num_kv_heads * (1 if self.keys_are_values else 2)


@dataclass(frozen=True, slots=True)
class LayerEmbedding:
    """Sizes of the embeddings that each layer adds for the row's token (PLE)."""

    vocab_size: int
    size: int
    """Number of features for each layer."""


def parse_layer_sizes(
    raw: Mapping[str, Any], kinds: Sequence[str], heads: int, plain: LayerSizes
) -> tuple[LayerSizes, ...]:
    """Return the sizes of each layer.

    `kinds` has the kind of attention of each layer, `heads` is the number of query heads, and `plain` has the sizes of
    a layer with a sliding window. Layers without one have those of `per_layer_config`, or else of `global_head_dim` and
    `num_global_key_value_heads`. Raises UnsupportedModelError and CheckpointError, which name field and value.
    """
    k_eq_v = flag(raw, "attention_k_eq_v")
    shared = raw.get("num_kv_shared_layers") or 0
    if type(shared) is not int or not 0 <= shared < len(kinds):
        raise malformed("num_kv_shared_layers", shared, f"an integer from 0 to {len(kinds) - 1}")
    first, wide = len(kinds) - shared, 1 + flag(raw, "use_double_wide_mlp")
    made: list[LayerSizes] = []
    for i, (kind, (head_dim, kv_heads)) in enumerate(zip(kinds, _heads(raw, kinds, plain, k_eq_v), strict=True)):
        if head_dim % 2:
            raise malformed(f"head_dim of layer {i}", head_dim, "even, because RoPE rotates pairs")
        if heads % kv_heads:
            raise malformed(f"num_key_value_heads of layer {i}", kv_heads, f"a divisor of num_attention_heads={heads}")
        own = LayerSizes(head_dim, kv_heads, plain.intermediate_size, k_eq_v and kind == _FULL)
        if i >= first:
            source = _source(kinds, i, first)
            own = LayerSizes(head_dim, kv_heads, plain.intermediate_size * wide, source=source)
            if (head_dim, kv_heads) != (made[source].head_dim, made[source].num_kv_heads):
                allowed = f"the heads of layer {source}, whose keys and values layer {i} shares"
                raise unsupported("per_layer_config", raw.get("per_layer_config"), allowed)
        made.append(own)
    return tuple(made)


def parse_layer_embedding(raw: Mapping[str, Any], vocab_size: int) -> LayerEmbedding | None:
    """Return the sizes of the layers' embeddings; None if they have none. Raises UnsupportedModelError and
    CheckpointError, which name field and value."""
    if raw.get("hidden_size_per_layer_input", 256) in (None, 0):
        return None
    ids = size(raw, "vocab_size_per_layer_input", 262144)
    if ids < vocab_size:
        raise unsupported("vocab_size_per_layer_input", ids, f"at least vocab_size={vocab_size}")
    return LayerEmbedding(ids, size(raw, "hidden_size_per_layer_input", 256))


def _heads(raw: Mapping[str, Any], kinds: Sequence[str], plain: LayerSizes, k_eq_v: bool) -> list[tuple[int, int]]:
    """Return head_dim and the number of KV heads of each layer."""
    given = raw.get("per_layer_config")
    if given is None:
        full = size(raw, "global_head_dim", 512), plain.num_kv_heads
        if k_eq_v and raw.get("num_global_key_value_heads") is not None:
            full = full[0], size(raw, "num_global_key_value_heads")
        return [full if kind == _FULL else (plain.head_dim, plain.num_kv_heads) for kind in kinds]
    if not isinstance(given, Mapping):
        raise malformed("per_layer_config", given, "an object")
    heads = [(plain.head_dim, plain.num_kv_heads)] * len(kinds)
    for key, fields in given.items():
        name = f"per_layer_config.{key}"
        if not str(key).isdecimal() or int(key) >= len(kinds):
            raise unsupported("per_layer_config", key, f"layers from 0 to {len(kinds) - 1}")
        if not isinstance(fields, Mapping):
            raise malformed(name, fields, "an object")
        for field in fields:
            if field not in _OVERRIDES:
                raise unsupported(f"{name}.{field}", fields[field], f"only {' and '.join(_OVERRIDES)}")
        heads[int(key)] = size(fields, _OVERRIDES[0], plain.head_dim), size(fields, _OVERRIDES[1], plain.num_kv_heads)
    return heads


def _source(kinds: Sequence[str], layer: int, first: int) -> int:
    """Return the index of the layer whose K and V `layer` uses: the last one of the same kind before `first`, the first
    layer that shares."""
    found = [i for i in range(first) if kinds[i] == kinds[layer]]
    if not found:
        allowed = (
            f"fewer, so that a layer of each kind has keys and values: none before layer {first} is {kinds[layer]}"
        )
        raise unsupported("num_kv_shared_layers", len(kinds) - first, allowed)
    return found[-1]
