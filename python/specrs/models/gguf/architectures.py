"""Table of the architectures that GGUF files name, with the model family of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from specrs.errors import UnsupportedModelError, short
from specrs.models.gguf.file import GGUFFile
from specrs.models.registry import FAMILIES, Family


@dataclass(frozen=True, slots=True)
class Architecture:
    """Storage of a model family in GGUF files."""

    name: str
    """Name of the family in `architectures` of config.json."""
    interleaved: bool = False
    """True if rows of q and k are stored in the order in which RoPE rotates neighbours. Models of config.json rotate
    halves."""
    mlp_norm: str = "ffn_norm"
    """Name of the norm before the MLP."""
    final_norm: str = "output_norm"
    """Name of the norm before the LM head."""
    window_period: int | None = None
    """Period of layers without a sliding window: all layers but every `window_period`-th have one. 0: all layers have
    one. None: no layer has one."""
    one_theta: bool = False
    """True if layers with a window have the theta of all other layers, unless the file names another one. False: the
    family's `local_rope_theta`."""
    attention_factor: bool = False
    """True if `rope.scaling.yarn_attn_factor` is the `attention_factor` of config.json."""
    delta_net: Literal["turned", "by key head"] | None = None
    """Order of value heads in the tensors of a gated delta net. `turned`: the first value head of every key head, then
    the second of every key head, and so on. `by key head`: the checkpoint's order. None: there are no delta nets."""

    @property
    def family(self) -> Family:
        """Row of `registry.FAMILIES` for the architecture."""
        return FAMILIES[self.name]


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", interleaved=True),
    "mistral3": Architecture("MistralForCausalLM", interleaved=True),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM"),
    "olmo2": Architecture("Olmo2ForCausalLM"),
    "seed_oss": Architecture("SeedOssForCausalLM", mlp_norm="post_attention_norm"),
    "phi3": Architecture("Phi3ForCausalLM", window_period=0),
    "granite": Architecture("GraniteForCausalLM", interleaved=True),
    "smollm3": Architecture("SmolLM3ForCausalLM", interleaved=True),
    "gemma3": Architecture("Gemma3ForCausalLM", window_period=6),
    "gemma4": Architecture("Gemma4ForCausalLM", window_period=6),
    "llama4": Architecture("Llama4ForCausalLM"),
    "qwen35": Architecture("Qwen3_5ForCausalLM", mlp_norm="post_attention_norm", delta_net="turned"),
    "qwen35moe": Architecture("Qwen3_5MoeForCausalLM", mlp_norm="post_attention_norm", delta_net="turned"),
    "qwen3next": Architecture("Qwen3NextForCausalLM", mlp_norm="post_attention_norm", delta_net="by key head"),
    "lfm2": Architecture("Lfm2ForCausalLM", final_norm="token_embd_norm"),
    "lfm2moe": Architecture("Lfm2MoeForCausalLM", final_norm="token_embd_norm"),
    "gpt-oss": Architecture("GptOssForCausalLM", mlp_norm="post_attention_norm", window_period=2),
}
"""Architectures by `general.architecture`. A pattern of windows in the file takes precedence over `window_period`."""
MIXTRAL = Architecture("MixtralForCausalLM", interleaved=True)
"""Mixtral. Its files name the architecture `llama`, and have experts."""
OLMO3 = Architecture("Olmo3ForCausalLM", window_period=4, one_theta=True, attention_factor=True)
"""OLMo 3. Its files name the architecture `olmo2`, and have a sliding window."""
MINISTRAL3 = Architecture("Ministral3ForCausalLM", interleaved=True)
"""Ministral 3. Its files name the architecture `mistral3`, and have a `temperature_scale` other than 0."""
READ = frozenset(known.name for known in (*ARCHITECTURES.values(), MIXTRAL, OLMO3, MINISTRAL3))
"""Families, by their names in config.json, that can be loaded from GGUF files."""


def architecture_of(file: GGUFFile) -> Architecture:
    """Return the architecture of `file`. Raises UnsupportedModelError for one that is not in the table."""
    metadata: Mapping[str, Any] = file.metadata
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        reason = f"not implemented; allowed: {', '.join(ARCHITECTURES)}"
        raise UnsupportedModelError(f"{file.path}: general.architecture={short(name)}: {reason}")
    if name == "llama" and metadata.get("llama.expert_count", 0) != 0:
        return MIXTRAL
    if name == "olmo2" and metadata.get("olmo2.attention.sliding_window", 0) != 0:
        return OLMO3
    if name == "mistral3" and metadata.get("mistral3.attention.temperature_scale", 0) != 0:
        return MINISTRAL3
    return ARCHITECTURES[name]
