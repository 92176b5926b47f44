"""config.json of published models: each is read as transformers reads it, and each of its keys has an effect or is
declared to have none.

A key that is removed or has another value is rejected by name, makes another configuration, or is without effect for a
reason: `models/fields.py` has it, or transformers takes the file for the same model as before.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_reference import load
from specrs.errors import CheckpointError
from specrs.kernels.frequencies import rounded_powers
from specrs.models.config import ModelConfig, parse_config
from specrs.models.fields import NEUTRAL, WITHOUT_EFFECT
from specrs.models.loader import load_config
from specrs.models.registry import FAMILIES
from specrs.models.rope import LongRopeScaling
from specrs.models.tensors import tensor_shapes
from specrs.models.torch_loader import load_model
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from models.harness import Feeder
from models.published_configs import PUBLISHED

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
ROPE = ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor")
"""Keys that transformers puts into `rope_parameters`."""
WINDOWS = ("sliding_window", "use_sliding_window", "sliding_window_pattern", "layer_types")
KINDS = ["sliding_attention"]
"""Kinds of layers of a family whose config.json does not name them."""
DECLARED = {
    "model_type": "the architecture says it",
    "max_window_layers": "of windows, which use_sliding_window=false switches off",
    "original_max_position_embeddings": "of a scaling of RoPE, and there is none, or its length is that of the model",
    "no_rope_layer_interval": "no_rope_layers says it for each layer",
    "_sliding_window_pattern": "layer_types says it for each layer",
    "experts_per_token": "num_experts_per_tok says it, too",
    "block_multiple_of": "of a size that is a multiple of the other value, too",
}

WITH = {
    "block_ff_dim": ("intermediate_size",),
    "num_hidden_layers": ("layer_types", "no_rope_layers"),
    "hidden_size": ("rope_scaling",),
    "num_attention_heads": ("rope_scaling",),
    "partial_rotary_factor": ("rope_scaling",),
    "rope_scaling": ("low_freq_factor", "high_freq_factor", "factor"),
}
"""Keys of config.json that a test must change together, because their values must fit each other."""


def without(raw: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key not in keys}


def plain(raw: dict[str, Any]) -> dict[str, Any]:
    return without(raw, "quantization_config")


@pytest.mark.parametrize("model", PUBLISHED)
def test_it_is_read_with_the_published_number_of_parameters(model: str, tmp_path: Path) -> None:
    """Check that each published config is read with the published number of parameters, quantized weights included."""
    raw, parameters = PUBLISHED[model]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert sum(map(math.prod, tensor_shapes(load_config(tmp_path)).values())) == parameters


def test_there_is_one_of_every_family() -> None:
    # No published file of families with delta nets, of Gemma 4, and of these two could be opened.
    opened = {name for name, family in FAMILIES.items() if not (family.delta_net or family.varied_layers)}
    opened -= {"Olmo3ForCausalLM", "SeedOssForCausalLM"}
    assert {raw["architectures"][0] for raw, _ in PUBLISHED.values()} == opened


def shrunk(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the config's keys with small sizes. Heads, their dimension unless `head_dim` gives it, layers and their
    kinds keep their relations. A window is shorter than the text here."""
    heads, kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
    head_dim = raw.get("head_dim", raw["hidden_size"] // heads)
    small = {
        "num_attention_heads": 2,
        "num_key_value_heads": 2 if kv_heads == heads else 1,
        "hidden_size": 32 if "head_dim" in raw else 2 * head_dim,
        "intermediate_size": 24,
        "block_ff_dim": 24,
        "moe_intermediate_size": 8,
        "vocab_size": 64,
        "num_local_experts": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "experts_per_token": 2,
        "initializer_range": 0.2,
    }
    made = plain(raw) | {key: value for key, value in small.items() if key in raw}
    made["num_hidden_layers"] = layers = 8
    made |= {key: made[key][:layers] for key in ("layer_types", "no_rope_layers") if key in raw}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if key in made:
            made[key] = 7
    if made.get("sliding_window") and made["sliding_window"] < made["max_position_embeddings"]:
        made["sliding_window"] = 5
    return made


@pytest.mark.parametrize("model", PUBLISHED)
def test_small_ones_have_the_logits_of_transformers(model: str, tmp_path: Path) -> None:
    raw = shrunk(PUBLISHED[model][0])
    # transformers does not know the older name of longrope any more.
    theirs = json.loads(json.dumps(raw).replace('"type": "su"', '"type": "longrope"'))
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), dtype=torch.float32)
    made.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    with torch.inference_mode():
        expected = load(tmp_path)(torch.tensor([TOKENS])).logits[0]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found = Feeder(load_model(tmp_path, dtype="float64", max_model_len=16)).feed_chunks(TOKENS, [len(TOKENS)])
    # Norms of Gemma and gpt-oss have weights in fp32 there, and Llama 4 is rotated in fp32.
    atol = 1e-5 if raw["model_type"] in ("gemma3_text", "gpt_oss", "llama4_text") else 1e-9
    torch.testing.assert_close(found, expected, rtol=0, atol=atol * float(expected.abs().max()))


@pytest.mark.parametrize("model", ["Phi-3-mini-128k-instruct", "Phi-3.5-mini-instruct", "Phi-4-mini-instruct"])
def test_factors_of_long_texts(model: str) -> None:
    """Check the factors of long texts: the long ones, unless the engine serves no text beyond the original length. The
    magnitude does not depend on that."""
    raw = PUBLISHED[model][0]
    config = parse_config(raw)
    for length, factors in ((None, "long_factor"), (4097, "long_factor"), (4096, "short_factor")):
        scaling = config.for_length(length).rope_scaling
        assert isinstance(scaling, LongRopeScaling)
        dim = len(raw["rope_scaling"][factors]) * 2
        expected = [1 / (raw["rope_scaling"][factors][i] * 10000 ** (2 * i / dim)) for i in range(dim // 2)]
        np.testing.assert_allclose(scaling.frequencies(dim, 10000.0, rounded_powers), expected, rtol=1e-5)
        assert scaling.magnitude == pytest.approx(math.sqrt(1 + math.log(131072 / 4096) / math.log(4096)))


def changes(value: Any) -> list[Any]:
    """Return other values for a key with this value."""
    if type(value) is bool:
        return [not value, None]
    if type(value) is int:
        return [value + 1, value * 2, 0, None]
    if type(value) is float:
        return [value * 2 + 1, None]
    if isinstance(value, str):
        return [value + "x", None]
    if isinstance(value, list):
        return [[], value[:-1], None]
    if isinstance(value, dict):
        return [{}, {**value, "unheard_of": 1}, *(without(value, key) for key in value), None]
    return [1, 3.5, True, "x", {"a": 1}]


def reference(model_type: str, raw: dict[str, Any], key: str) -> Any:
    """Return what transformers reads as `key`, and what else the key may decide; None if it rejects the file."""
    try:
        config = CONFIG_MAPPING[model_type].from_dict(json.loads(json.dumps(raw)))
    except Exception:
        return None
    ropes = config.rope_parameters
    for rope in (ropes, *(inner for inner in ropes.values() if isinstance(inner, dict))):
        if "rope_theta" in rope and rope["rope_theta"] is None:
            return None  # it fails when the model is made
        rope.pop("type", None)  # the older name of rope_type, which has its value by now
        if rope.get("rope_type") == "yarn":
            rope |= {"beta_fast": 32.0, "beta_slow": 1.0} | rope  # what its code takes where they are missing
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if window is not None and (window >= config.max_position_embeddings or "sliding_attention" not in (kinds or KINDS)):
        window = None
    # A flag that is missing is false where code asks for it.
    named = None if key in (*ROPE, *WINDOWS) else getattr(config, key, None) or None
    return named, ropes, window, window and kinds


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", PUBLISHED)
def test_every_key_counts_or_is_declared(model: str) -> None:
    raw = plain(PUBLISHED[model][0])
    before = parse_config(raw)
    neutral = NEUTRAL | dict(FAMILIES[before.architecture].neutral)
    silent = []
    for key, value in raw.items():
        for changed in (without(raw, key), *({**raw, key: other} for other in changes(value))):
            told = f"{key}={changed.get(key, 'removed')!r}"
            try:
                after: ModelConfig | None = parse_config(changed)
            except CheckpointError as fault:
                if not any(name in str(fault) for name in (key, *WITH.get(key, ()))):
                    silent.append(f"{told}: {fault}")
                continue
            if after != before or key in WITHOUT_EFFECT or key in DECLARED:
                continue
            if changed.get(key) in neutral.get(key, ()):
                continue
            taken = reference(raw["model_type"], changed, key)
            if taken not in (None, reference(raw["model_type"], raw, key)):
                silent.append(told)
    assert not silent


def test_what_is_declared_here_is_so_in_the_family_that_has_it() -> None:
    """Check declared exceptions in the family that has them: a declared key has an effect where its reason does not
    hold."""
    qwen = plain(PUBLISHED["Qwen2.5-0.5B-Instruct"][0]) | {"use_sliding_window": True, "sliding_window": 100}
    assert parse_config(qwen) != parse_config(qwen | {"use_sliding_window": False})
    assert parse_config(qwen | {"max_window_layers": 3}) != parse_config(qwen)
    phi = PUBLISHED["Phi-3.5-mini-instruct"][0]
    assert parse_config(phi | {"original_max_position_embeddings": 8192}) != parse_config(phi)
    smollm = without(PUBLISHED["SmolLM3-3B"][0], "no_rope_layers")
    assert parse_config(smollm | {"no_rope_layer_interval": 2}) != parse_config(smollm)
    gemma = without(PUBLISHED["gemma-3-270m"][0], "layer_types")
    with pytest.raises(CheckpointError, match="_sliding_window_pattern=2: not implemented; allowed: 6, or layer_types"):
        parse_config(gemma | {"_sliding_window_pattern": 2})
    lfm2 = PUBLISHED["LFM2-1.2B"][0]
    assert [parse_config(lfm2 | {"block_multiple_of": size}).intermediate_size for size in (256, 1000)] == [8192, 9000]
    oss = plain(PUBLISHED["gpt-oss-20b"][0])
    with pytest.raises(CheckpointError, match="experts_per_token=2: must be num_experts_per_tok=4"):
        parse_config(oss | {"experts_per_token": 2})
