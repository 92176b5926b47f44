"""Parser of the config.json of a Gemma 4 assistant. Finds the target's layers whose keys and values the assistant's
layers attend. Reads no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from specrs.errors import CheckpointError
from specrs.models.config import ModelConfig, parse_config
from specrs.models.errors import malformed, unsupported
from specrs.models.rope import Rope
from specrs.models.values import flag, size
from specrs.models.varied_layers import LayerSizes
from specrs.models.wrappers import text_config

TARGET = "Gemma4ForCausalLM"
"""Architecture of the targets of assistants."""
ARCHITECTURES = {
    "Gemma4AssistantForCausalLM": "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedAssistantForCausalLM": "Gemma4UnifiedForConditionalGeneration",
}
"""Architectures of assistants, each with the multimodal one whose `text_config` has the same fields and defaults."""
_WHERE = "text_config."


@dataclass(frozen=True, slots=True)
class AssistantConfig:
    """Configuration of an assistant for one target."""

    layers: ModelConfig
    """The assistant's layers in the form of a model's configuration. Layer i has no keys and values. It attends those
    of one of the target's layers, and `varied[i].source` is this layer's index among the target's layers that have keys
    and values. Numbers of KV heads are the target's. Windows are one larger than in config.json, because with n tokens
    a row stands at position n - 2."""
    sources: tuple[int, ...]
    """For each of the assistant's layers, the index of the target's layer whose keys and values it attends."""
    ordered: bool
    """True if the checkpoint has centroids of groups of token ids. Other engines choose by them which ids to score;
    specrs scores all ids."""


def parse_assistant_config(raw: Mapping[str, Any], target: ModelConfig) -> AssistantConfig:
    """Build an assistant's configuration from `raw`, the object in its config.json, and the target's configuration.

    Raises UnsupportedModelError for what is not implemented, and CheckpointError for a config that is not an
    assistant's, or not one of this target. Each names the field, its value and what is allowed.
    """
    wrapper = next((theirs for own, theirs in ARCHITECTURES.items() if raw.get("architectures") == [own]), None)
    if wrapper is None:
        allowed = " or ".join(f"[{name!r}]" for name in ARCHITECTURES)
        raise unsupported("architectures", raw.get("architectures"), f"{allowed} with speculative_config.method='mtp'")
    hidden = size(raw, "backbone_hidden_size")
    if hidden != target.hidden_size:
        raise malformed("backbone_hidden_size", hidden, f"{target.hidden_size}, the target's hidden_size")
    text = text_config({"architectures": [wrapper], "text_config": raw.get("text_config")})
    own = _layers(text)
    if own.vocab_size != target.vocab_size:
        raise malformed(_WHERE + "vocab_size", own.vocab_size, f"{target.vocab_size}, the target's")
    sources = tuple(_source(own, i, text, target) for i in range(own.num_layers))
    with_keys = [i for i, sizes in enumerate(target.varied) if sizes.source is None]
    layers = replace(
        own,
        varied=tuple(
            _sizes(own, i, target.varied[source], with_keys.index(source)) for i, source in enumerate(sources)
        ),
        # A row at n - 2 stands for the token at n - 1. As in transformers, it attends the W + 1 positions before that.
        windows=tuple(None if window is None else window + 1 for window in own.windows),
        tie_word_embeddings=flag(raw, "tie_word_embeddings", default=True),
        embedding_multiplier=target.embedding_multiplier,
        final_logit_softcapping=None,
    )
    return AssistantConfig(layers, sources, flag(raw, "use_ordered_embeddings"))


def describes_assistant(raw: Mapping[str, Any]) -> bool:
    """Return whether `raw`, the object in a config.json, is that of an assistant."""
    return raw.get("architectures") in [[name] for name in ARCHITECTURES]


def _layers(text: Mapping[str, Any]) -> ModelConfig:
    """Return `text_config` as the configuration of a model whose layers have keys and values of their own. It has no
    ids that end texts, because only the target decides that."""
    fields = {**text, "num_kv_shared_layers": 0, "eos_token_id": None}
    try:
        own = parse_config(fields)
    except CheckpointError as error:
        raise type(error)(str(error).replace("config.json: ", f"config.json: {_WHERE}", 1)) from error
    if own.layer_embedding is not None:
        field = "hidden_size_per_layer_input"
        raise unsupported(_WHERE + field, text.get(field), "0: an assistant adds no embeddings of single layers")
    if own.experts is not None:
        raise unsupported(_WHERE + "enable_moe_block", True, "false: an assistant has no experts")
    if flag(text, "use_double_wide_mlp"):
        raise unsupported(_WHERE + "use_double_wide_mlp", True, "false")
    shared = text.get("num_kv_shared_layers")
    if shared not in (None, 0, own.num_layers):
        raise unsupported(_WHERE + "num_kv_shared_layers", shared, f"{own.num_layers}, all layers of an assistant")
    return own


def _kind(config: ModelConfig, layer: int) -> tuple[int | None, Rope | None]:
    """Return the window and the RoPE of a layer. A layer can only attend keys and values of a layer with the same
    two."""
    return config.windows[layer] if config.windows else None, config.rope_of(layer)


def _source(own: ModelConfig, layer: int, text: Mapping[str, Any], target: ModelConfig) -> int:
    """Return the index of the target's layer whose keys and values the assistant's `layer` attends: the last one that
    has keys and values, and has the same window and RoPE. Raises CheckpointError if there is none."""
    with_keys = [i for i, sizes in enumerate(target.varied) if sizes.source is None]
    window, rope = _kind(own, layer)
    found = [i for i in with_keys if _kind(target, i) == (window, rope)]
    if found:
        return found[-1]
    windows = {_kind(target, i)[0] for i in with_keys}
    if window not in windows:
        if window is not None and windows != {None}:
            allowed = " or ".join(str(size) for size in windows if size is not None)
            raise malformed(_WHERE + "sliding_window", window, f"{allowed}, the target's")
        kinds = text.get("layer_types")
        allowed = "layers of kinds that the target has: its last layer of the kind has the keys and values to attend"
        raise malformed(f"{_WHERE}layer_types", kinds, allowed)
    allowed = f"the target's, whose keys layer {layer} attends: they are rotated already"
    raise malformed(_WHERE + "rope_parameters", text.get("rope_parameters"), allowed)


def _sizes(own: ModelConfig, layer: int, target: LayerSizes, place: int) -> LayerSizes:
    """Return the sizes of the assistant's `layer`. `target` has the sizes of the target's layer that it attends, and
    `place` is this layer's index among the target's layers that have keys and values. Raises CheckpointError if the
    heads of both do not match."""
    sizes = own.varied[layer]
    if sizes.head_dim != target.head_dim:
        allowed = f"{target.head_dim}, as the keys and values of the target that it attends"
        raise malformed(f"{_WHERE}head_dim of layer {layer}", sizes.head_dim, allowed)
    if own.num_heads % target.num_kv_heads:
        allowed = f"a multiple of the target's {target.num_kv_heads} KV heads, which layer {layer} attends"
        raise malformed(_WHERE + "num_attention_heads", own.num_heads, allowed)
    return replace(sizes, num_kv_heads=target.num_kv_heads, keys_are_values=False, source=place)
