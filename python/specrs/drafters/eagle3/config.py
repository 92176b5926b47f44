"""Reads and checks the config.json of an EAGLE-3 head, in both published formats. Reads no weights.

`LlamaForCausalLMEagle3` (SafeAILab, SpecForge, AngelSlim) has the fields of a Llama model. `speculators` (Red Hat) has
the fields of the head's layer in `transformer_layer_config`. Heads of both formats read the residual stream of three
target layers, unless their config says otherwise. The meaning of an explicit layer id differs between engines: see
`aux_hidden_state_layer_ids`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specrs.errors import CheckpointError, InvalidConfigError, check_int, check_number, invalid
from specrs.models.config import ModelConfig, parse_config
from specrs.models.errors import malformed, unsupported

logger = logging.getLogger("specrs")
ARCHITECTURES = ("LlamaForCausalLMEagle3", "LlamaForCausalLM")
LAYER_TYPES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Allowed values of `transformer_layer_config.model_type`, each with the model class whose fields it has."""
_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """Facts about the target that its head depends on."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Configuration of an EAGLE-3 head: one layer over fused hidden states of the target. Immutable and checked."""

    layer: ModelConfig
    """Shape of the head's layer. `vocab_size` is the target's."""
    layer_prefix: str
    """Prefix of the layer's tensor names: `midlayer.` or `layers.0.`."""
    target_hidden_size: int
    draft_vocab_size: int
    aux_layer_ids: tuple[int, ...]
    """Target layers at whose entry hidden states are read, ascending."""
    norm_before_residual: bool
    """True if the layer adds its output to the normed hidden state, False if to the hidden state before the norm."""
    norm_before_fc: bool
    """True if one RMSNorm is applied to the concatenated hidden states before `fc`."""
    fc_norm: bool
    """True if each hidden state has an RMSNorm of its own before `fc`."""
    norm_output: bool
    """True if a pass hands its state to the next pass after the final norm, as in EAGLE-3.1."""


def parse_eagle3_config(
    raw: Mapping[str, Any],
    target: TargetFacts,
    *,
    aux_hidden_state_layer_ids: Sequence[int] | None = None,
    rope_theta: float | None = None,
) -> Eagle3Config:
    """Build an Eagle3Config from the object in config.json. The keyword arguments override fields.

    Raises UnsupportedModelError for an option that is not implemented; CheckpointError for a config that is not a
    head's, or not a head's of this target; InvalidConfigError for an impossible override. Each names the field, its
    value and what is allowed.
    """
    layer, prefix, where = _layer_fields(raw)
    nested = raw.get("eagle_config")
    if nested is not None and not isinstance(nested, Mapping):
        raise malformed("eagle_config", nested, "an object")
    options: dict[str, Any] = {**(nested or {}), **raw}
    if options.get("use_aux_hidden_state") is False:
        raise unsupported("eagle_config.use_aux_hidden_state", False, "true: the states of inner layers")
    if layer.get("num_hidden_layers", 1) != 1:
        raise unsupported(where + "num_hidden_layers", layer["num_hidden_layers"], "1")
    config = _shape(layer, where, rope_theta)
    draft_vocab = _draft_vocab(raw, config, where, target.hidden_size, target.vocab_size)
    norm_before_fc, fc_norm = _flag(options, "norm_before_fc"), _flag(options, "fc_norm")
    if norm_before_fc and fc_norm:
        raise malformed("fc_norm", True, "false where norm_before_fc is true")
    if prefix == "layers.0." and raw.get("norm_before_residual") is None:
        logger.warning(
            "config.json: norm_before_residual is missing; taken as false, as speculators 0.9 writes it. Some engines "
            "take it as true: where few drafts are accepted, set it in the file"
        )
    if config.max_position_embeddings < target.max_position_embeddings:
        logger.info(
            "the head's max_position_embeddings=%d is less than the target's %d: drafts after it may be worse",
            config.max_position_embeddings,
            target.max_position_embeddings,
        )
    return Eagle3Config(
        layer=config,
        layer_prefix=prefix,
        target_hidden_size=target.hidden_size,
        draft_vocab_size=draft_vocab,
        aux_layer_ids=_layer_ids(options, aux_hidden_state_layer_ids, target.num_layers),
        norm_before_residual=_flag(options, "norm_before_residual"),
        norm_before_fc=norm_before_fc,
        fc_norm=fc_norm,
        norm_output=_flag(options, "norm_output"),
    )


def check_fit(raw: Mapping[str, Any], hidden_size: int, vocab_size: int) -> None:
    """Check that the head whose config.json is `raw` is for a target of these sizes.

    Raises UnsupportedModelError for an option that is not implemented, and CheckpointError for another size.
    """
    _draft_vocab(raw, head_layer(raw), _layer_fields(raw)[2], hidden_size, vocab_size)


def _draft_vocab(raw: Mapping[str, Any], layer: ModelConfig, where: str, hidden_size: int, vocab_size: int) -> int:
    """Return the number of ids that the head drafts. Raises CheckpointError if its sizes are not those of a target with
    `hidden_size` and `vocab_size`."""
    other = "; use a head that was trained for this target"
    if layer.vocab_size != vocab_size:
        raise malformed(where + "vocab_size", layer.vocab_size, f"{vocab_size}, the target's{other}")
    hidden = raw.get("target_hidden_size")
    if (layer.hidden_size if hidden is None else hidden) != hidden_size:
        field, value = (where + "hidden_size", layer.hidden_size) if hidden is None else ("target_hidden_size", hidden)
        raise malformed(field, value, f"{hidden_size}, the target's hidden_size{other}")
    size = raw.get("draft_vocab_size")
    size = vocab_size if size is None else size
    if type(size) is not int or not 1 <= size <= vocab_size:
        raise malformed("draft_vocab_size", size, f"an integer from 1 to {vocab_size}, the target's ids{other}")
    return size


def head_layer(raw: Mapping[str, Any]) -> ModelConfig:
    """Return the shape of the layer of the head whose config.json is `raw`, as a model of one layer.

    Raises UnsupportedModelError for an option that is not implemented, and CheckpointError for a wrong value.
    """
    layer, _, where = _layer_fields(raw)
    return _shape(layer, where, rope_theta=1.0)


def _layer_fields(raw: Mapping[str, Any]) -> tuple[dict[str, Any], str, str]:
    """Return the fields of the layer under the names of a model's fields, the prefix of its tensors, and where the
    fields are."""
    kind = raw.get("speculators_model_type")
    if kind is not None:
        if kind != "eagle3":
            raise unsupported("speculators_model_type", kind, "'eagle3'")
        layer, where = raw.get("transformer_layer_config"), "transformer_layer_config."
        if not isinstance(layer, Mapping):
            raise malformed("transformer_layer_config", layer, "an object")
        if layer.get("model_type") not in LAYER_TYPES:
            raise unsupported(where + "model_type", layer.get("model_type"), " or ".join(map(repr, LAYER_TYPES)))
        fields = {**layer, "architectures": [LAYER_TYPES[layer["model_type"]]]}
        return fields, "layers.0.", where
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        allowed = f"a list of one of {', '.join(ARCHITECTURES)}, or speculators_model_type='eagle3'"
        raise unsupported("architectures", names, allowed)
    return {**raw, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "midlayer.", ""


def _shape(layer: dict[str, Any], where: str, rope_theta: float | None) -> ModelConfig:
    """Return the shape of the layer, as a model of one layer. It has no ids that end texts, because only the target
    decides that."""
    kinds = layer.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise unsupported(where + "layer_types", kinds, "'full_attention' in every one")
    layer = {**layer, "num_hidden_layers": 1, "layer_types": None, "eos_token_id": None}
    ropes = [layer, *(layer.get(name) for name in ("rope_parameters", "rope_scaling"))]
    if rope_theta is None and not any(isinstance(rope, Mapping) and "rope_theta" in rope for rope in ropes):
        logger.info(
            "config.json: %srope_theta is missing; taken as 10000, as the head's trainers do. "
            "speculative_config.rope_theta overrides it",
            where,
        )
    try:
        config = parse_config(layer, rope_kinds=("default", "llama3"))
    except CheckpointError as error:
        raise type(error)(str(error).replace("config.json: ", f"config.json: {where}", 1)) from error
    if config.windows:
        raise unsupported(where + "sliding_window", layer.get("sliding_window"), "null")
    if rope_theta is None:
        return config
    theta = check_number(InvalidConfigError, "speculative_config.rope_theta", rope_theta, 0, open_low=True)
    return replace(config, rope_theta=theta)


def _layer_ids(options: Mapping[str, Any], override: Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    """Return the ids of the target layers whose input the head reads, ascending: `override`, else config.json's, else
    vLLM's default. Ids of config.json are sorted, and each counts once.

    Raises InvalidConfigError for an `override` that does not ascend, CheckpointError for wrong ids in config.json.
    """
    if override is not None:
        field = "speculative_config.aux_hidden_state_layer_ids"
        if isinstance(override, str | bytes) or not isinstance(override, Sequence) or not override:
            raise invalid(InvalidConfigError, field, override, "must be a list of at least one layer id")
        checked = [
            check_int(InvalidConfigError, f"{field}[{i}]", layer, 0, num_layers - 1, also=", a layer of the target")
            for i, layer in enumerate(override)
        ]
        if sorted(set(checked)) != checked:
            raise invalid(InvalidConfigError, field, override, "must ascend")
        return tuple(checked)
    ids = options.get(_IDS)
    if ids is None:
        default = sorted({2, num_layers // 2, num_layers - 3})
        if default[0] < 0 or default[-1] >= num_layers:
            raise malformed(_IDS, None, f"given for a target of {num_layers} layers, the default is {default}")
        return tuple(default)
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < num_layers for i in ids):
        raise malformed(_IDS, ids, f"a list of layers of the target, from 0 to {num_layers - 1}")
    logger.info(
        "config.json: %s=%s is read as 'hidden states at the entry of layer id', as vLLM does; SGLang reads 'at the "
        "exit', which is one more. speculative_config.aux_hidden_state_layer_ids overrides it",
        _IDS,
        ids,
    )
    return tuple(sorted(set(ids)))


def _flag(options: Mapping[str, Any], field: str) -> bool:
    value = options.get(field)
    if value is not None and type(value) is not bool:
        raise malformed(field, value, "true or false")
    return bool(value)
