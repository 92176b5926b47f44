"""Text models of multimodal checkpoints: their part of config.json, and their tensors' names. Reads no file.

A multimodal checkpoint wraps a text model and towers for images or sound. Its config.json has the text model's fields
in `text_config`, and its tensors' names have a prefix. specrs reads the text model and skips the towers.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrs.errors import CheckpointError
from specrs.models.errors import malformed, unsupported

logger = logging.getLogger("specrs")


@dataclass(frozen=True, slots=True)
class Wrapper:
    """Properties of a multimodal architecture."""

    models: str
    """Names of the models, for the table in docs/supported.md."""
    text_models: Mapping[str, str]
    """Architecture of the text model for each `model_type` that `text_config` may have."""
    defaults: Mapping[str, object]
    """Values of transformers' configuration class for fields that published files may leave out: required ones, and
    those whose default differs from the text model's family."""
    tied: bool = False
    """Value of `tie_word_embeddings` if config.json has none."""


WRAPPERS: dict[str, Wrapper] = {
    "Gemma3ForConditionalGeneration": Wrapper(
        "Gemma 3, 4B and larger",
        {"gemma3_text": "Gemma3ForCausalLM"},
        {
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "max_position_embeddings": 131072,
        },
        tied=True,
    ),
    "Gemma4ForConditionalGeneration": Wrapper(
        "Gemma 4",
        {"gemma4_text": "Gemma4ForCausalLM"},
        {
            "vocab_size": 262144,
            "num_attention_heads": 8,
            "max_position_embeddings": 131072,
        },
        tied=True,
    ),
    "Gemma4UnifiedForConditionalGeneration": Wrapper(
        "Gemma 4 12B",
        {"gemma4_unified_text": "Gemma4ForCausalLM"},
        {
            "vocab_size": 262144,
            "num_attention_heads": 8,
            "max_position_embeddings": 262144,
            "sliding_window": 1024,
            "hidden_size_per_layer_input": 0,
        },
        tied=True,
    ),
    "Mistral3ForConditionalGeneration": Wrapper(
        "Mistral Small 3.1, 3.2, Ministral 3, Devstral Small 2",
        {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"},
        {},
        tied=True,
    ),
    "Llama4ForConditionalGeneration": Wrapper("Llama 4 Scout, Maverick", {"llama4_text": "Llama4ForCausalLM"}, {}),
    "Qwen3_5ForConditionalGeneration": Wrapper(
        "Qwen3.5, Qwen3.6, Qwen3.8, dense", {"qwen3_5_text": "Qwen3_5ForCausalLM"}, {}
    ),
    "Qwen3_5MoeForConditionalGeneration": Wrapper(
        "Qwen3.5, Qwen3.6, experts", {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}, {}
    ),
}
"""Multimodal architectures whose text model is read, by their name in `architectures`."""

_SHARED = ("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings", "quantization_config", "compression_config")
"""Fields of config.json that hold for the text model, too, unless `text_config` has them."""
_TOWERS = re.compile(
    r"(model\.)?(vision_tower|visual|vision_model|multi_modal_projector|audio_tower|embed_vision|embed_audio"
    r"|vision_embedder)\."
)
"""Beginnings of the names of tensors that only images and sound need."""
HEAD = "mtp."
"""Beginning of the names of the tensors of an MTP head."""
TEXT_BEGINNINGS = ("language_model.model.", "model.language_model.")
"""Beginnings of the names of a text model's layers in a multimodal checkpoint, in place of `model.`."""
_TEXT = re.compile(rf"({'|'.join(re.escape(each[:-1]) for each in TEXT_BEGINNINGS)}|language_model\.(?=lm_head))\.?")
"""Beginnings of the names of a text model's tensors in a multimodal checkpoint."""


def is_wrapped(raw: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes a multimodal checkpoint of `WRAPPERS`."""
    names = raw.get("architectures")
    return isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) and names[0] in WRAPPERS


def is_of_mtp_head(name: str) -> bool:
    """Return whether a checkpoint's tensor belongs to an MTP head, which the drafter `mtp` reads."""
    return name.startswith(HEAD)


def log_mtp_head(path: Path, count: int) -> None:
    """Log that a model's checkpoint has `count` tensors of an MTP head, which the model does not read."""
    logger.info("%s: %d tensors of an MTP head, which speculative_config.method='mtp' reads", path, count)


def text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a multimodal checkpoint's text model; `raw` itself for other checkpoints.

    Raises UnsupportedModelError for a text model that is not implemented, and CheckpointError for a `text_config` that
    is no object.
    """
    if not is_wrapped(raw):
        return raw
    wrapper, inner = WRAPPERS[raw["architectures"][0]], raw.get("text_config")
    if not isinstance(inner, Mapping):
        raise malformed("text_config", inner, "an object")
    kind = inner.get("model_type", next(iter(wrapper.text_models)))
    if not isinstance(kind, str) or kind not in wrapper.text_models:
        raise unsupported("text_config.model_type", kind, " or ".join(map(repr, wrapper.text_models)))
    made = dict(wrapper.defaults)
    made |= {field: raw[field] for field in _SHARED if raw.get(field) is not None}
    made |= {field: value for field, value in inner.items() if value is not None or field not in made}
    # One of the two objects may have a class's default. The tensors decide: see `loader.with_own_head`.
    ties = [place["tie_word_embeddings"] for place in (inner, raw) if place.get("tie_word_embeddings") is not None]
    made["tie_word_embeddings"] = wrapper.tied if not ties else True if True in ties else ties[0]
    # The type was checked here. It is the family's own in all wrappers but Gemma 4 12B's.
    return made | {"model_type": None, "architectures": [wrapper.text_models[kind]]}


def text_names(source: object, names: Iterable[str]) -> dict[str, str]:
    """Return the names in a multimodal checkpoint of its text model's tensors, by their names in the text model.

    Tensors of towers are left out, and a log line says so. `source` names the checkpoint in messages. Raises
    CheckpointError if two tensors are the same one of the text model.
    """
    found: dict[str, str] = {}
    skipped = []
    for name in sorted(names):
        if _TOWERS.match(name):
            skipped.append(name)
            continue
        own = text_name(name)
        if own in found:
            raise CheckpointError(f"{source}: {found[own]} and {name} are both {own} of the text model; remove one")
        found[own] = name
    if skipped:
        logger.info(
            "%s: %d tensors for images or sound (%s, ...) are skipped: only text is served",
            source,
            len(skipped),
            skipped[0],
        )
    return found


def text_name(name: str) -> str:
    """Return the name in the text model of a multimodal checkpoint's tensor or module."""
    match = _TEXT.match(name)
    if match is None:
        return name
    rest = name[match.end() :]
    return rest if rest.startswith("lm_head") else f"model.{rest}"
