"""What config.json says, read by ourselves and checked field by field. Reads no weights and no tokenizer.

transformers is not asked: it fills gaps with defaults and ignores fields that it does not know, and a decoder that
ignores a field computes another model. Both of its layouts are read: `rope_theta`, `rope_scaling`, `torch_dtype`
(version 4) and `rope_parameters`, `dtype` (version 5); a file that has both must say the same in both. `fields.py` has
the fields that are not read. Of generation_config.json the stop ids are read here, and sampling parameters by the
server; the rest says how to sample, which is for the request to say.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specrs.models.errors import malformed, unsupported
from specrs.models.fields import NEUTRAL
from specrs.models.registry import Family, family_of


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Scaling of RoPE frequencies of Llama 3.1 and later; see `kernels.rotary.inverse_frequencies`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dense decoder: embedding, `num_layers` x (attention, gated MLP), final norm, LM head. Immutable and checked."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    checkpoint_dtype: str | None
    """`dtype` of config.json, without the prefix `torch.`; None where it says nothing."""
    eos_token_ids: tuple[int, ...]
    """Ids that end a text; those of generation_config.json where it names any, as in transformers' `generate`."""
    mask_token_id: int | None
    """What a draft model for parallel drafting is fed in place of drafts; None where it is none."""

    @property
    def num_parameters(self) -> int:
        """Weights that a forward pass reads: all of them, but of an untied input embedding only single rows."""
        q, kv, h, i = (
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
            self.hidden_size,
            self.intermediate_size,
        )
        attention = h * (q + 2 * kv) + q * h + (q + 2 * kv) * self.qkv_bias + h * self.o_bias
        attention += 2 * self.head_dim * self.qk_norm
        mlp = 3 * h * i + (2 * i + h) * self.mlp_bias
        return self.num_layers * (attention + mlp + 2 * h) + h + self.vocab_size * h


def parse_config(raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Build a ModelConfig from the objects in config.json and generation_config.json (None: there is no such file).

    Raises UnsupportedModelError for what is not implemented and CheckpointError for what is no model; each names the
    field, its value and what is allowed.
    """
    architecture, family = family_of(raw.get("architectures"))
    for field, values in ({"model_type": (None, family.model_type)} | NEUTRAL).items():
        if raw.get(field) not in values:
            raise unsupported(field, raw[field], " or ".join(map(repr, values)))
    if raw.get("hidden_act", "silu") != "silu":
        raise unsupported("hidden_act", raw["hidden_act"], "'silu'")
    num_layers = _size(raw, "num_hidden_layers")
    _refuse_sliding_window(raw, family, num_layers)

    hidden, heads = _size(raw, "hidden_size"), _size(raw, "num_attention_heads")
    kv_heads = heads if family.kv_heads_default and raw.get("num_key_value_heads") is None else None
    kv_heads = kv_heads or _size(raw, "num_key_value_heads")
    if heads % kv_heads:
        raise malformed("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads={heads}")
    attention_bias = _flag(raw, "attention_bias", allowed=family.has_attention_bias)
    vocab = _size(raw, "vocab_size")
    max_positions = _size(raw, "max_position_embeddings")
    theta, scaling = _rope(raw, max_positions)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=_size(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(raw, family, hidden, heads),
        rms_norm_eps=_number(raw, "rms_norm_eps", default=1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=max_positions,
        tie_word_embeddings=_flag(raw, "tie_word_embeddings"),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias or attention_bias,
        o_bias=attention_bias,
        mlp_bias=_flag(raw, "mlp_bias", allowed=family.has_mlp_bias),
        checkpoint_dtype=_checkpoint_dtype(raw),
        eos_token_ids=_eos_token_ids(raw, generation or {}, vocab),
        mask_token_id=_mask_token_id(raw, vocab),
    )


def _refuse_sliding_window(raw: Mapping[str, Any], family: Family, num_layers: int) -> None:
    layer_types = raw.get("layer_types")
    if layer_types is not None and layer_types != ["full_attention"] * num_layers:
        kinds = isinstance(layer_types, list) and [kind for kind in layer_types if kind != "full_attention"]
        raise unsupported("layer_types", kinds or layer_types, f"'full_attention' in every one of {num_layers} layers")
    if family.window_switch and not _flag(raw, "use_sliding_window"):
        return
    window = raw.get("sliding_window", family.sliding_window)
    # A window no shorter than the context hides nothing.
    if window is not None and not (isinstance(window, int) and window >= raw.get("max_position_embeddings", math.inf)):
        missing = "" if "sliding_window" in raw else f" (missing: {window} is this family's default)"
        switch = " or use_sliding_window=False" if family.window_switch else ""
        raise unsupported("sliding_window", window, f"null, max_position_embeddings or more{switch}{missing}")


def _head_dim(raw: Mapping[str, Any], family: Family, hidden: int, heads: int) -> int:
    if raw.get("head_dim") is not None:
        head_dim = _size(raw, "head_dim")
    elif family.head_dim is not None:
        head_dim = family.head_dim
    elif hidden % heads == 0:
        head_dim = hidden // heads
    else:
        raise malformed("hidden_size", hidden, f"a multiple of num_attention_heads={heads} where head_dim is missing")
    if head_dim % 2:
        raise malformed("head_dim", head_dim, "even, because RoPE rotates pairs")
    return head_dim


_ROPE_FIELDS = (
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)


def _rope(raw: Mapping[str, Any], max_positions: int) -> tuple[float, Llama3Scaling | None]:
    """(theta, scaling) from `rope_parameters` or `rope_scaling`, and `rope_theta` where they lack it.

    transformers takes `rope_scaling` where a file has both, so one that is at odds with `rope_parameters` is refused.
    """
    names = [name for name in ("rope_parameters", "rope_scaling") if raw.get(name) not in (None, {})]
    found = [_rope_object(raw, name, max_positions) for name in names or ["rope_parameters"]]
    if found[0] != found[-1]:
        raise unsupported("rope_scaling", raw["rope_scaling"], "what rope_parameters says")
    scaling = found[0][1]
    # Some versions of transformers take this one, others the one of the object.
    length = raw.get("original_max_position_embeddings")
    if scaling is not None and length not in (None, scaling.original_max_position_embeddings):
        allowed = f"{scaling.original_max_position_embeddings}, as in {names[0]}"
        raise unsupported("original_max_position_embeddings", length, allowed)
    return found[0]


def _rope_object(raw: Mapping[str, Any], name: str, max_positions: int) -> tuple[float, Llama3Scaling | None]:
    rope = raw.get(name)
    if rope is None:
        rope = {}
    if not isinstance(rope, Mapping):
        raise malformed(name, rope, "an object")
    for field, value in rope.items():
        if field not in _ROPE_FIELDS and value is not None:
            raise unsupported(f"{name}.{field}", value, f"one object for all layers, of {', '.join(_ROPE_FIELDS)}")
    if rope.get("partial_rotary_factor") not in NEUTRAL["partial_rotary_factor"]:
        raise unsupported(f"{name}.partial_rotary_factor", rope["partial_rotary_factor"], "1")
    source = {"rope_theta": 10000.0} | {key: raw[key] for key in ("rope_theta",) if key in raw} | dict(rope)
    theta = _number(source, "rope_theta")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise unsupported(f"{name}.rope_type", kind, "'default' or 'llama3'")
    source.setdefault("original_max_position_embeddings", max_positions)
    scaling = Llama3Scaling(
        factor=_number(source, "factor"),
        low_freq_factor=_number(source, "low_freq_factor"),
        high_freq_factor=_number(source, "high_freq_factor"),
        original_max_position_embeddings=_size(source, "original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        allowed = f"greater than low_freq_factor={scaling.low_freq_factor}"
        raise malformed(f"{name}.high_freq_factor", scaling.high_freq_factor, allowed)
    return theta, scaling


def _eos_token_ids(raw: Mapping[str, Any], generation: Mapping[str, Any], vocab: int) -> tuple[int, ...]:
    for source, file in ((generation, "generation_config.json"), (raw, "config.json")):
        value = source.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(i) is int and 0 <= i < vocab for i in ids):
            allowed = f"an id or a list of ids from 0 to vocab_size - 1 = {vocab - 1}"
            raise malformed("eos_token_id", value, allowed, file=file)
        return tuple(dict.fromkeys(ids))
    return ()


MASK_TOKEN_FIELDS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Names of the mask token of parallel drafting; the first that is there counts, as in vLLM."""


def _mask_token_id(raw: Mapping[str, Any], vocab: int) -> int | None:
    for field in MASK_TOKEN_FIELDS:
        value = raw.get(field)
        if value is not None:
            if type(value) is not int or not 0 <= value < vocab:
                raise malformed(field, value, f"an id from 0 to vocab_size - 1 = {vocab - 1}")
            return value
    return None


def _checkpoint_dtype(raw: Mapping[str, Any]) -> str | None:
    value = raw.get("dtype")
    if value is None:
        value = raw.get("torch_dtype")
    if value is None:
        return None
    if not isinstance(value, str):
        raise malformed("dtype", value, "a string")
    return value.removeprefix("torch.")


def _size(raw: Mapping[str, Any], field: str) -> int:
    value = raw.get(field)
    if type(value) is not int or value < 1:
        raise malformed(field, value, "an integer of at least 1")
    return value


def _number(raw: Mapping[str, Any], field: str, default: float | None = None) -> float:
    value = raw.get(field, default)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise malformed(field, value, "a finite number greater than 0")
    return float(value)


def _flag(raw: Mapping[str, Any], field: str, *, allowed: bool = True) -> bool:
    value = raw.get(field)
    if value is not None and type(value) is not bool:
        raise malformed(field, value, "true or false")
    if value and not allowed:
        raise unsupported(field, value, "false for this architecture")
    return bool(value)
