"""LFM2: transformers' logits however tokens are fed, and no effect of rejected drafts."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import torch
from checkpoints import edit_json, make_checkpoint
from hf_reference import load
from hybrid_reference import float64
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from specrs.backends.cpu.weights import load_native
from specrs.core import CpuPool, InvalidBufferError
from specrs.errors import CheckpointError, UnsupportedModelError
from specrs.models import torch_short_conv
from specrs.models.config import parse_config
from specrs.models.loader import load_config
from specrs.models.torch_loader import load_model
from specrs.models.torch_short_conv import step
from torch import Tensor

from models.harness import Feeder
from models.layers_with_states import ROUNDS, ROUNDS_OR_PROMPTS, TOKENS, check_native_bits, check_snapshot, close

BOUND = 2e-5
"""Largest allowed difference of native logits from logits in float64, relative to the largest logit."""


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    """Draw sizes of a small model: kernel, kinds of layers, how the MLP's size is written, tied embeddings."""
    kinds = draw(st.permutations(["full_attention", *draw(st.lists(st.sampled_from(["conv", "full_attention"])))]))[:4]
    kinds = kinds if "full_attention" in kinds else [*kinds[:3], "full_attention"]
    indices = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    named = {"layer_types": kinds} if draw(st.booleans()) else {"full_attn_idxs": indices, "layer_types": None}
    return named | {
        "layers": len(kinds),
        "conv_L_cache": draw(st.integers(2, 5)),
        "block_auto_adjust_ff_dim": draw(st.booleans()),
        "block_ffn_dim_multiplier": draw(st.sampled_from([1.0, 0.7])),
        "block_multiple_of": draw(st.sampled_from([1, 24])),
        "tie": draw(st.booleans()),
        "kv_heads": draw(st.integers(1, 2)),
        "hidden": draw(st.sampled_from([40, 64, 96])),
        "head_dim": draw(st.sampled_from([16, 48])),
        "norm_eps": draw(st.sampled_from([1e-5, 0.1])),
        "seed": draw(st.integers(0, 9)),
    }


@torch.inference_mode()
def logits(path: Path) -> Tensor:
    """Return the logits of transformers for `TOKENS`, `[tokens, vocab]` in float64."""
    with float64():
        found: Tensor = load(path)(torch.tensor([TOKENS]), use_cache=False).logits[0]
    return found


@settings(max_examples=15)
@given(shapes(), st.integers(1, 9))
def test_the_logits_of_transformers(tmp_path_factory: pytest.TempPathFactory, shape: Any, first: int) -> None:
    """Check logits by torch in float64, and those of native passes, against transformers."""
    path = make_checkpoint(tmp_path_factory.mktemp("lfm2"), "lfm2", **shape)
    expected, chunks = logits(path), [first, 1, len(TOKENS) - first - 1]
    with float64():
        close(Feeder(load_model(path, dtype="float64")).feed_chunks(TOKENS, chunks), expected, 1e-12)
    close(Feeder(load_native(path)).feed_chunks(TOKENS, chunks), expected, BOUND)


KINDS = ["conv", "full_attention", "conv"]
SIZES: dict[str, dict[str, Any]] = {
    "small": {"hidden": 40, "conv_L_cache": 4},
    "by 32": {"hidden": 64, "intermediate": 96, "head_dim": 32},
}
"""Sizes of models for native passes. The sizes `by 32` fit quantized weights."""


def make_sized(folder: Path, sizes: str, **fields: Any) -> Path:
    return make_checkpoint(folder, "lfm2", layer_types=KINDS, layers=3, **SIZES[sizes] | fields)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sized(tmp_path_factory.mktemp("lfm2"), "small")


@settings(max_examples=25)
@given(ROUNDS, st.integers(1, 6), st.integers(1, 12))
def test_rejected_drafts_leave_no_trace_and_snapshots_go_on(
    path: Path, rounds: list[tuple[int, int]], prompt: int, length: int
) -> None:
    check_snapshot(load_model(path, dtype="float64"), rounds, prompt, length)


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


def test_bf16_weights_and_rows(tmp_path: Path) -> None:
    """Check bf16 weights against float64, and that rows rounded to bf16 have the same bits for any chunks."""
    path = make_sized(tmp_path / "model", "by 32", dtype=torch.bfloat16)
    native = load_native(path, dtype="bfloat16")
    close(Feeder(native).feed_chunks(TOKENS, [1, 2, 20]), logits(path), 0.05)
    rounded = native.on_pool(CpuPool(2), activations="bf16")
    whole = Feeder(rounded).feed_chunks(TOKENS, [23])
    assert torch.equal(Feeder(rounded).feed_chunks(TOKENS, [1, 8, 14]), whole)
    close(whole, logits(path), 0.1)


def late_inputs(x: Tensor, weight: Tensor, before: Tensor) -> tuple[Tensor, tuple[Tensor]]:
    """Compute a convolution with a planted mistake: it is one position off."""
    return step(x, weight.roll(1, 0), before)


def other_gate(x: Tensor, weight: Tensor, before: Tensor) -> tuple[Tensor, tuple[Tensor]]:
    """Compute a convolution with a planted mistake: C multiplies its input, and B its output."""
    b, c, own = x.chunk(3)
    return step(torch.cat((c, b, own)), weight, before)


def ungated_state(x: Tensor, weight: Tensor, before: Tensor) -> tuple[Tensor, tuple[Tensor]]:
    """Compute a convolution with a planted mistake: its state has x without B."""
    out, (inputs,) = step(x, weight, before)
    return out, (torch.cat((inputs[:-1], x.chunk(3)[2][None])),)


@pytest.mark.parametrize("mistake", [late_inputs, other_gate, ungated_state])
def test_planted_mistakes_are_far_beyond_the_bound(mistake: Any, path: Path) -> None:
    found = Feeder(load_native(path)).feed_chunks(TOKENS, [23])
    with float64(), patch.object(torch_short_conv, "step", mistake):
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


def test_native_states_are_counted() -> None:
    model = native("by 32")
    feeder = Feeder(model)
    feeder.feed({0: [(1, 0)]})
    row, draft = model.state_bytes
    assert (row, draft) == (2 * 2 * 64 * 4, 2 * 64 * 4)
    assert feeder.cache.native.state_bytes == row
    feeder.feed({0: [(2, 1), (3, 2)]})
    assert feeder.cache.native.state_bytes == row + draft
    with pytest.raises(InvalidBufferError, match=r"positions\[0\]=7: must be 0, or from 2 to 3"):
        feeder.feed({0: [(3, 7)]})


def test_without_convolutions_all_layers_have_attention(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "lfm2", layer_types=None, full_attn_idxs=None)
    edit_json(path / "config.json", layer_types=None)
    model = load_native(path)
    assert (model.config.states, model.config.attention_layers, model.state_bytes) == (None, (0, 1), (0, 0))
    close(Feeder(model).feed_chunks(TOKENS, [20, 3]), logits(path), BOUND)


BASE: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "layer_types": ["conv", "full_attention"],
}


def test_fields_that_win_over_others() -> None:
    """Check the fields of which a file may have two: transformers reads `layer_types`, `block_ff_dim` and
    `tie_embedding`."""
    config = parse_config(BASE | {"full_attn_idxs": [0], "block_ff_dim": 960, "tie_embedding": False})
    assert config.conv is not None
    assert config.conv.layers == (True, False)
    assert (config.intermediate_size, config.tie_word_embeddings) == (768, False)
    assert (config.rms_norm_eps, config.rope_theta, config.conv.kernel) == (1e-5, 1e6, 3)
    tied = parse_config(BASE | {"tie_word_embeddings": False, "tie_embedding": True, "norm_eps": 0.5})
    assert (tied.tie_word_embeddings, tied.rms_norm_eps) == (True, 0.5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["conv", "sliding_attention"]}, "layer_types="),
        ({"layer_types": ["conv"]}, "layer_types=['conv']: not implemented; allowed: 'conv' or 'full_attention' in"),
        ({"layer_types": ["conv", "conv"]}, "full attention in at least one layer"),
        ({"layer_types": None, "full_attn_idxs": []}, "full_attn_idxs=[]"),
        ({"layer_types": None, "full_attn_idxs": ["1"]}, "full_attn_idxs=['1']: must be a list of layers"),
        ({"conv_L_cache": 1}, "conv_L_cache=1: not implemented; allowed: at least 2"),
        ({"conv_bias": True}, "conv_bias=True"),
        ({"block_use_swiglu": False}, "block_use_swiglu=False"),
        ({"use_pos_enc": False}, "use_pos_enc=False"),
        ({"block_ff_dim": None}, "block_ff_dim=None"),
        ({"block_ff_dim": 1}, "block_ff_dim=1: must be at least 2, because the MLP has two thirds of it"),
        (
            {"block_ff_dim": 2**30, "block_multiple_of": 2**30 + 1, "block_ffn_dim_multiplier": 3.0},
            "block_multiple_of=1073741825: must be a number to whose multiple 2147483646 is",
        ),
        ({"block_multiple_of": 0}, "block_multiple_of=0"),
        ({"block_ffn_dim_multiplier": 0}, "block_ffn_dim_multiplier=0"),
        *(
            (
                {"block_ffn_dim_multiplier": factor},
                f"block_ffn_dim_multiplier={factor}: must be a number whose product with two thirds of "
                "intermediate_size=96 is from 1 to 2147483647",
            )
            for factor in (0.01, 1e9, 1e308)
        ),
        ({"tie_embedding": "no"}, "tie_embedding='no'"),
        ({"norm_eps": None}, "norm_eps=None"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_what_is_not_implemented_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError)) as fault:
        parse_config(BASE | fields)
    assert message in str(fault.value)


def test_tensors_have_lfm2_s_names(path: Path, tmp_path: Path) -> None:
    """Check that a tensor under two names is an error, and that a missing one and an unknown one are."""
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.feed_forward.w2.weight"
    for changed, message in (
        (tensors | {"model.layers.0.mlp.down_proj.weight": tensors[name].clone()}, "are the same tensor; remove one"),
        ({own: tensor for own, tensor in tensors.items() if own != name}, "mlp.down_proj.weight"),
        (tensors | {"model.layers.0.conv.conv.bias": torch.ones(40)}, "conv.conv.bias"),
    ):
        save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=message):
            load_native(tmp_path)


def test_a_checkpoint_of_the_base_model(path: Path, tmp_path: Path) -> None:
    """Check that tensors of `Lfm2Model`, without the prefix `model.`, are read."""
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    edit_json(tmp_path / "config.json", architectures=["Lfm2Model"])
    tensors = load_file(path / "model.safetensors")
    base = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(base, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert load_config(tmp_path).conv == load_config(path).conv
    found = Feeder(load_native(tmp_path)).feed_chunks(TOKENS, [23])
    assert torch.equal(found, Feeder(load_native(path)).feed_chunks(TOKENS, [23]))
