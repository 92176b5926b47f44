"""Gated delta nets: transformers' logits however tokens are fed, and no effect of rejected drafts."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import torch
from checkpoints import edit_json, make_checkpoint
from hybrid_reference import float64, logits
from hypothesis import given, settings
from hypothesis import strategies as st
from specrs.backends.cpu.weights import load_native
from specrs.core import CpuPool, InvalidBufferError, cpu_instruction_sets
from specrs.errors import CheckpointError, UnsupportedModelError
from specrs.models import torch_delta_net
from specrs.models.loader import load_config
from specrs.models.torch_delta_net import step
from specrs.models.torch_loader import load_model
from torch import Tensor

from models.harness import Feeder
from models.layers_with_states import ROUNDS, ROUNDS_OR_PROMPTS, TOKENS, VOCAB, check_native_bits, check_snapshot, close


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    """Draw sizes of a small model: value heads per key head, head sizes, kernel, kinds of layers, tied embeddings."""
    key_heads, shared = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    kinds = draw(st.lists(st.sampled_from(["linear_attention", "full_attention"]), min_size=1, max_size=3))
    return {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * shared,
        "linear_key_head_dim": draw(st.sampled_from([8, 16, 20])),
        "linear_value_head_dim": draw(st.sampled_from([8, 16, 36])),
        "linear_conv_kernel_dim": draw(st.integers(2, 5)),
        "layer_types": [*kinds, "full_attention"],
        "layers": len(kinds) + 1,
        "tie": draw(st.booleans()),
        "kv_heads": draw(st.integers(1, 2)),
        "head_dim": draw(st.sampled_from([16, 48])),
        "seed": draw(st.integers(0, 9)),
    }


def make(folder: Path, **fields: Any) -> Path:
    return make_checkpoint(folder, "qwen3_5_text", **fields)


@settings(max_examples=12)
@given(shapes(), st.lists(st.integers(1, 7), min_size=1, max_size=3))
def test_the_logits_of_transformers(tmp_path_factory: pytest.TempPathFactory, shape: Any, chunks: list[int]) -> None:
    path = make(tmp_path_factory.mktemp("hybrid"), **shape)
    tokens = TOKENS[: sum(chunks)]
    with float64():
        found = Feeder(load_model(path, dtype="float64")).feed_chunks(tokens, chunks)
    close(found, logits(path, tokens), 1e-12)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("hybrid"))


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=5), st.integers(1, 6))
def test_rejected_drafts_leave_no_trace(path: Path, rounds: list[tuple[int, int]], prompt: int) -> None:
    """Check that rejected drafts leave no trace. Each round feeds K drafts, of which the first ones are accepted."""
    model = load_model(path, dtype="float64")
    expected = Feeder(model).feed_chunks(TOKENS, [1] * len(TOKENS))
    feeder, wrong = Feeder(model), random.Random(1)
    feeder.feed({0: [(TOKENS[p], p) for p in range(prompt)]})
    at = prompt
    for drafts, accepted in rounds:
        rows = [(TOKENS[at + i] if i <= accepted else wrong.randrange(VOCAB), at + i) for i in range(drafts + 1)]
        found = feeder.feed({0: rows})
        kept = min(drafts, accepted) + 1
        close(found[:kept], expected[at : at + kept], 1e-12)
        at += kept
        if at + 5 > len(TOKENS):
            break


@settings(max_examples=25)
@given(ROUNDS, st.integers(1, 6), st.integers(1, 12))
def test_a_snapshot_goes_on_as_the_text_does(
    path: Path, rounds: list[tuple[int, int]], prompt: int, length: int
) -> None:
    states = check_snapshot(load_model(path, dtype="float64"), rounds, prompt, length)
    with pytest.raises(ValueError, match="snapshot=6: must be a slot that a pass has written"):
        states.restore(0, 6)


SIZES: dict[str, dict[str, Any]] = {
    "small": {},
    "by 32": {"hidden": 64, "intermediate": 96, "head_dim": 32, "linear_value_head_dim": 24},
    "wide": {"linear_key_head_dim": 20, "linear_value_head_dim": 100, "linear_conv_kernel_dim": 3},
    "one head": {"linear_num_key_heads": 1, "linear_num_value_heads": 1, "kv_heads": 1},
}
"""Sizes of models for native passes. The sizes `by 32` fit quantized weights."""
BOUND = 2e-5
"""Largest allowed difference of native logits from logits in float64, relative to the largest logit."""


def make_sized(folder: Path, sizes: str, **fields: Any) -> Path:
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    return make(folder, layer_types=kinds, layers=3, **SIZES[sizes] | fields)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_logits(sizes: str, dtype: str, tmp_path: Path) -> None:
    """Check native logits against torch in float64. With bfloat16, K and V are bf16 and the weights are exact in
    bf16."""
    path = make_sized(tmp_path / "model", sizes, dtype=getattr(torch, dtype))
    with float64():
        expected = Feeder(load_model(path, dtype="float64")).feed_chunks(TOKENS, [9, 14])
    found = Feeder(load_native(path, dtype=dtype)).feed_chunks(TOKENS, [1, 2, 20])
    close(found, expected, BOUND if dtype == "float32" else 0.05)


@pytest.mark.parametrize("quantization", ["int8", "int4", "q8_0", "q4_0", "fp8"])
def test_native_logits_of_quantized_weights(quantization: str, tmp_path: Path) -> None:
    """Check native logits of quantized weights against torch with the dequantized ones; activations are rounded to
    16-bit integers."""
    path = make_sized(tmp_path / "model", "by 32")
    with float64():
        model = load_model(path, dtype="float64", quantization=quantization)
        expected = Feeder(model).feed_chunks(TOKENS, [23])
    plain = Feeder(load_native(path)).feed_chunks(TOKENS, [23])
    found = Feeder(load_native(path, quantization=quantization)).feed_chunks(TOKENS, [4, 1, 18])
    bound = 0.02 if quantization == "fp8" else 2e-3  # fp8 becomes bf16
    close(found, expected, bound)
    assert (plain.double() - expected).abs().max() > 1.5 * bound * float(expected.abs().max())


@pytest.mark.parametrize("activations", ["auto", "bf16", "tiles"])
def test_other_products_have_one_order_of_sums(activations: str, tmp_path: Path) -> None:
    """Check that bf16 rows, and prompts by tiles if the processor has them, give the same bits for any chunks."""
    if activations == "tiles" and "amx" not in cpu_instruction_sets():
        pytest.skip("no AMX tiles")
    fields = {"linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_num_value_heads": 4, "head_dim": 32}
    path = make_sized(tmp_path / "model", "small", hidden=64, intermediate=96, **fields, dtype=torch.bfloat16)
    rounded = {"activations": "bf16"} if activations == "bf16" else {"prompt_tiles": activations == "tiles"}
    model = load_native(path, dtype="bfloat16").on_pool(CpuPool(2), **rounded)  # type: ignore[arg-type]
    whole = Feeder(model).feed({0: list(zip(TOKENS, range(23), strict=True))}, prompts=True)
    feeder = Feeder(model)
    parts = [(0, 1), (1, 9), (9, 23)]
    cut = [feeder.feed({0: [(TOKENS[p], p) for p in range(*part)]}, prompts=True) for part in parts]
    assert torch.equal(torch.cat(cut), whole)
    exact = Feeder(load_native(path, dtype="bfloat16")).feed_chunks(TOKENS, [23])
    close(whole, exact.double(), 0.1)


def heads_by_turns(x: Tensor, w: Any, d: Any, state: Any, eps: float) -> tuple[Tensor, Any]:
    """Compute a delta net with a planted mistake: value head j uses key head j mod key_heads, as in GGUF files."""
    order = torch.arange(d.value_heads).view(d.key_heads, -1).T.flatten()
    rows = (order[:, None] * d.value_dim + torch.arange(d.value_dim)).flatten()
    keys = 2 * d.key_heads * d.key_dim
    at = torch.cat((torch.arange(keys), keys + rows, d.conv_dim + rows))
    at = torch.cat((at, d.conv_dim + d.inner + order, d.conv_dim + d.inner + d.value_heads + order))
    conv = w.conv[:, torch.cat((torch.arange(keys), keys + rows))]
    w = replace(w, conv=conv, a_log=w.a_log[order], dt_bias=w.dt_bias[order])
    out, after = step(x[at], w, d, state, eps)
    made = torch.empty_like(out)
    made[rows] = out
    return made, after


def shifted_norm(x: Tensor, w: Any, d: Any, state: Any, eps: float) -> tuple[Tensor, Any]:
    return step(x, replace(w, norm=1 + w.norm), d, state, eps)


def late_inputs(x: Tensor, w: Any, d: Any, state: Any, eps: float) -> tuple[Tensor, Any]:
    """Compute a delta net with a planted mistake: the convolution is one position off."""
    out, after = step(x, replace(w, conv=w.conv.roll(1, 0)), d, state, eps)
    return out, after


def twice(x: Tensor, w: Any, d: Any, state: Any, eps: float) -> tuple[Tensor, Any]:
    """Compute a delta net with a planted mistake: each update is replayed twice."""
    out, after = step(x, w, d, state, eps)
    return out, after._replace(heads=step(x, w, d, after._replace(inputs=state.inputs), eps)[1].heads)


def scaled_keys(x: Tensor, w: Any, d: Any, state: Any, eps: float) -> tuple[Tensor, Any]:
    """Compute a delta net with a planted mistake: keys are scaled as queries are."""
    with patch.object(torch_delta_net, "_unit", lambda part: part * d.key_dim**-0.25):
        return step(x, w, d, state, eps)


@pytest.mark.parametrize("mistake", [heads_by_turns, shifted_norm, late_inputs, twice, scaled_keys])
def test_planted_mistakes_are_far_beyond_the_bound(mistake: Any, tmp_path: Path) -> None:
    path = make_sized(tmp_path / "model", "small")
    found = Feeder(load_native(path)).feed_chunks(TOKENS, [23])
    with float64(), patch.object(torch_delta_net, "step", mistake):
        wrong = Feeder(load_model(path, dtype="float64")).feed_chunks(TOKENS, [23])
    assert (found.double() - wrong).abs().max() > 100 * BOUND * float(wrong.abs().max())


@settings(max_examples=40)
@given(st.sampled_from(sorted(SIZES)), ROUNDS_OR_PROMPTS, st.integers(0, 99))
def test_native_bits_do_not_depend_on_drafts(sizes: str, rounds: list[tuple[int, int, bool]], seed: int) -> None:
    check_native_bits(native(sizes), rounds, seed)


@cache
def native(sizes: str) -> Any:
    with TemporaryDirectory() as folder:
        return load_native(make_sized(Path(folder) / "model", sizes))


def test_native_states_are_rejected_elsewhere_and_counted(path: Path) -> None:
    model = load_native(path)
    feeder = Feeder(model)
    assert feeder.cache.native.state_bytes == 0
    feeder.feed({0: [(1, 0)]})
    row, draft = model.state_bytes
    # Heads are whole vectors: the convolution of a head has 64 inputs.
    assert feeder.cache.native.state_bytes == row == model.config.delta.row_bytes
    feeder.feed({0: [(2, 1), (3, 2)]})
    assert feeder.cache.native.state_bytes == row + draft
    with pytest.raises(InvalidBufferError, match=r"positions\[0\]=7: must be 0, or from 2 to 3"):
        feeder.feed({0: [(3, 7)]})


def test_states_that_native_passes_cannot_place_are_rejected(path: Path) -> None:
    """Check that a native feeder rejects snapshots, which it cannot write, and requests other than the first ones,
    whose states it would write to the rows of others."""
    feeder = Feeder(load_native(path), num_requests=2)
    with pytest.raises(ValueError, match=r"snapshots=\(\(0, 1, 5\),\): native passes called from Python write none"):
        feeder.feed({0: [(1, 0)]}, snapshots=((0, 1, 5),))
    with pytest.raises(ValueError, match=r"state_rows=\(1,\): native passes take the first requests in order"):
        feeder.feed({1: [(1, 0)]})
    assert feeder.cache.native.state_bytes == 0
    feeder.feed({0: [(1, 0)], 1: [(2, 0)]})
    assert feeder.cache.native.state_bytes > 0


def test_another_position_than_the_next_is_rejected(path: Path) -> None:
    feeder = Feeder(load_model(path, dtype="float64"))
    feeder.feed({0: [(1, 0), (2, 1)]})
    with pytest.raises(ValueError, match=r"row 0 has states before \[1, 2\]; must have one before 5"):
        feeder.feed({0: [(3, 5)]})


SHAPES = {
    # hidden_size, num_hidden_layers, intermediate_size, num_attention_heads, num_key_value_heads, value heads
    "0.8B": ((1024, 24, 3584, 8, 2, 16), 20.2),
    "9B": ((4096, 32, 12288, 16, 4, 32), 52.7),
    "27B": ((5120, 64, 17408, 24, 4, 48), 156.9),
}
"""Sizes of Qwen3.5 models, with the megabytes of a request's states."""


@pytest.mark.parametrize("model", SHAPES)
def test_a_config_of_published_form(model: str, tmp_path: Path) -> None:
    """Check a config with the fields of published multimodal files."""
    names = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    sizes, megabytes = SHAPES[model]
    rope = {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 10000000}
    text = dict(zip(names, sizes, strict=False)) | {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (sizes[1] // 4),
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": sizes[5],
        "mamba_ssm_dtype": "float32",
        "mlp_only_layers": [],
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "rope_parameters": rope | {"partial_rotary_factor": 0.25},
        "tie_word_embeddings": model == "0.8B",
    }
    raw = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text}
    raw |= {"vision_config": {}, "image_token_id": 1, "tie_word_embeddings": model == "0.8B"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = load_config(tmp_path)
    assert config.delta is not None
    assert round(config.delta.row_bytes / 1e6, 1) == megabytes
    assert (config.rotary_dim, config.rope_theta, config.norm_offset) == (64, 1e7, 1.0)
    assert len(config.attention_layers) == sizes[1] // 4
    assert config.tie_word_embeddings is (model == "0.8B")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["linear_attention", "sliding_attention"]}, "layer_types="),
        ({"layer_types": ["linear_attention"] * 2}, "'full_attention' in at least one layer"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads=3: must be a multiple of linear_num_key_heads=2"),
        ({"linear_num_key_heads": 0}, "linear_num_key_heads=0"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim=1: not implemented; allowed: at least 2"),
        ({"attn_output_gate": False}, "attn_output_gate=False"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype='bfloat16'"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings=True"),
        ({"num_experts": 4}, "num_experts=4"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_what_is_not_implemented_is_named(path: Path, fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    edit_json(tmp_path / "config.json", **fields)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message.replace("[", r"\[")):
        load_config(tmp_path)
