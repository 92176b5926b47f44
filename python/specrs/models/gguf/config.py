"""What the metadata of a GGUF file says of a model, in the words of config.json; and what its tensors are called."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from specrs.arrays import FLOAT64
from specrs.errors import CheckpointError, UnsupportedModelError, invalid, short
from specrs.kernels.frequencies import inverse_frequencies
from specrs.models.gguf.file import GGUFFile
from specrs.models.gguf.vocabulary import end_ids
from specrs.models.values import number, size

ROPE_FACTORS = "rope_freqs.weight"
"""What frequencies are divided by, where they are scaled as Llama 3.1's."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A family as GGUF files name it."""

    name: str
    """In `architectures` of config.json."""
    interleaved: bool = False
    """Rows of q and k are in the order in which RoPE rotates neighbours; config.json's rotates halves."""


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", interleaved=True),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
}

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SCALING = {"none", "", None}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of every model that GGUF files have factors of: they are written, what they were made of is not."""


def checkpoint_name(name: str) -> str:
    """The name that a checkpoint of transformers gives the tensor `name`; an unknown one stays as it is."""
    stem, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer is not None and layer[2] in _LAYER:
        return f"model.layers.{layer[1]}.{_LAYER[layer[2]]}.{kind}"
    return f"{_TOP[stem]}.{kind}" if stem in _TOP else name


def architecture_of(file: GGUFFile) -> Architecture:
    """Raises UnsupportedModelError for one that is not in the table."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        reason = f"not implemented; allowed: {', '.join(ARCHITECTURES)} ({file.path})"
        raise invalid(UnsupportedModelError, "general.architecture", name, reason)
    return ARCHITECTURES[name]


def raw_config(file: GGUFFile) -> dict[str, Any]:
    """What config.json of the same model says, for `models.config.parse_config`.

    Raises CheckpointError for what is missing or no size, UnsupportedModelError for what is not implemented.
    """
    architecture, prefix = architecture_of(file), file.metadata["general.architecture"]
    values = _Fields(file, prefix)
    heads, hidden = values.size("attention.head_count"), values.size("embedding_length")
    head_dim = values.size("attention.key_length", max(1, hidden // heads))
    for field, expected in (
        ("attention.value_length", head_dim),
        ("rope.dimension_count", head_dim),
        ("expert_count", 0),
    ):
        found = values.get(field, expected)
        if found != expected:
            raise invalid(UnsupportedModelError, f"{prefix}.{field}", found, f"not implemented; allowed: {expected}")
    if "attention.sliding_window" in values:
        raise values.unsupported("attention.sliding_window", "a file without it")
    if values.get("rope.scaling.type") not in _SCALING:
        raise values.unsupported("rope.scaling.type", "'none'")
    for field in ("rope.scaling.factor", "rope.scale_linear"):
        # Without a type the factor is that of linear scaling.
        if values.get("rope.scaling.type") != "none" and values.get(field) not in (None, 0, 1):
            raise values.unsupported(field, "1, or a file without it")
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path}: token_embd.weight is missing")
    theta = values.number("rope.freq_base", 10000.0)
    kinds = {info.kind for info in file.tensors.values()}
    biased = any(name.endswith("attn_q.bias") for name in file.tensors)
    return {
        "architectures": [architecture.name],
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": values.size("feed_forward_length"),
        "num_hidden_layers": values.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": values.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": values.size("context_length"),
        "rope_parameters": {"rope_theta": theta, **_scaling(file, head_dim, theta)},
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "sliding_window": None,
        "dtype": "bfloat16" if "BF16" in kinds else "float16" if "F16" in kinds else "float32",
        "eos_token_id": end_ids(file.metadata),
    } | ({"attention_bias": True} if biased and architecture.name != "Qwen2ForCausalLM" else {})


class _Fields:
    """Fields of the architecture's own."""

    def __init__(self, file: GGUFFile, prefix: str) -> None:
        self.file, self.prefix = file, prefix

    def __contains__(self, field: str) -> bool:
        return f"{self.prefix}.{field}" in self.file.metadata

    def __getitem__(self, field: str) -> Any:
        if field not in self:
            raise CheckpointError(f"{self.file.path}: {self.prefix}.{field} is missing, a model must have it")
        return self.get(field)

    def get(self, field: str, default: Any = None) -> Any:
        value = self.file.metadata.get(f"{self.prefix}.{field}", default)
        if isinstance(value, list):
            if not value or any(other != value[0] for other in value):
                raise self.unsupported(field, "the same in every layer")
            return value[0]
        return value

    def size(self, field: str, default: int | None = None) -> int:
        """An integer of at least 1."""
        name = f"{self.prefix}.{field}"
        return size({name: self[field] if default is None else self.get(field, default)}, name)

    def number(self, field: str, default: float | None = None) -> float:
        """A finite number above 0: the shortest decimal that a float32 stands for, as config.json has it."""
        name = f"{self.prefix}.{field}"
        value = number({name: self[field] if default is None else self.get(field, default)}, name)
        return float(str(np.float32(value)))

    def unsupported(self, field: str, allowed: str) -> UnsupportedModelError:
        value = short(self.file.metadata[f"{self.prefix}.{field}"])
        reason = f"{self.file.path}: {self.prefix}.{field}={value}: not implemented; allowed: {allowed}"
        return UnsupportedModelError(reason)


def _scaling(file: GGUFFile, head_dim: int, theta: float) -> dict[str, Any]:
    """The scaling that `rope_freqs.weight` holds the result of. Raises UnsupportedModelError for another rule's."""
    if ROPE_FACTORS not in file.tensors:
        return {}
    found = file.numbers(ROPE_FACTORS).astype(FLOAT64).reshape(-1)
    fields = _LLAMA3 | {"factor": float(found.max()) if len(found) else 1.0}
    plain = inverse_frequencies(head_dim, theta).astype(FLOAT64)
    if len(found) == len(plain) and found.min() > 0:
        made = plain / inverse_frequencies(head_dim, theta, **fields).astype(FLOAT64)  # type: ignore[arg-type]
        if float(np.abs(found / made - 1).max()) < 1e-4:
            return {"rope_type": "llama3", **fields}
    allowed = "the factors of rope_type llama3 with " + ", ".join(f"{name}={value}" for name, value in _LLAMA3.items())
    raise UnsupportedModelError(f"{file.path}: {ROPE_FACTORS}: not implemented; allowed: {allowed}")
