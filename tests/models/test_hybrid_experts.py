"""Hybrids with experts, Qwen3.5 and Qwen3-Next: transformers' logits by torch and natively, whatever tensors the
checkpoint has, and mistakes that would show."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from checkpoints import edit_json, make_checkpoint
from hybrid_reference import float64, logits
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from specrs.backends.cpu.weights import Rounding, load_native
from specrs.core import CpuPool
from specrs.errors import CheckpointError, UnsupportedModelError
from specrs.models import torch_decoder, torch_delta_net
from specrs.models.config import parse_config
from specrs.models.loader import load_config
from specrs.models.tensors import tensor_shapes
from specrs.models.torch_loader import load_model, open_model
from torch import Tensor

from models.harness import Feeder

FAMILIES = ("qwen3_5_moe_text", "qwen3_next")
VOCAB = 211
TOKENS = random.Random(0).choices(range(VOCAB), k=23)
KINDS = ["linear_attention", "full_attention", "linear_attention"]
SIZES: dict[str, dict[str, Any]] = {
    "small": {},
    "by 32": {
        "hidden": 64,
        "intermediate": 96,
        "head_dim": 32,
        "linear_value_head_dim": 24,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
    "three value heads": {"linear_num_value_heads": 6, "linear_value_head_dim": 20, "moe_intermediate_size": 7},
}
BOUND = 2e-5
"""Largest allowed difference of native logits from logits in float64, relative to the largest logit."""


def make(folder: Path, family: str, sizes: str = "small", **fields: Any) -> Path:
    return make_checkpoint(folder, family, **{"layer_types": KINDS, "layers": 3} | SIZES[sizes] | fields)


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest logit."""
    return float((found.double() - expected).abs().max() / expected.abs().max())


def by_torch(path: Path, chunks: list[int] | None = None, **options: Any) -> Tensor:
    with float64():
        model = load_model(path, dtype="float64", **options)
        return Feeder(model).feed_chunks(TOKENS[: sum(chunks or [23])], chunks or [23])


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    """Sizes of a small model: experts, heads, and for Qwen3-Next the layers with an MLP."""
    key_heads, shared, experts = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 6))
    family = draw(st.sampled_from(FAMILIES))
    fields = {
        "family": family,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * shared,
        "linear_key_head_dim": draw(st.sampled_from([8, 20])),
        "linear_value_head_dim": draw(st.sampled_from([8, 36])),
        "num_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, experts)),
        "shared_expert_intermediate_size": draw(st.sampled_from([8, 40, 72])),
        "tie": draw(st.booleans()),
        "seed": draw(st.integers(0, 9)),
    }
    if family == "qwen3_next":
        fields["mlp_only_layers"] = draw(st.sampled_from([[], [0], [1, 2]]))
        fields["decoder_sparse_step"] = draw(st.integers(1, 2))
        fields["norm_topk_prob"] = draw(st.booleans())
    return fields


@settings(max_examples=12)
@given(shapes(), st.lists(st.integers(1, 7), min_size=1, max_size=3))
def test_the_logits_of_transformers(tmp_path_factory: pytest.TempPathFactory, shape: Any, chunks: list[int]) -> None:
    """Check logits against transformers. The router's softmax is in float32 in both."""
    path = make(tmp_path_factory.mktemp("experts") / "model", **shape)
    assert difference(by_torch(path, chunks), logits(path, TOKENS[: sum(chunks)])) < 1e-6


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_logits(family: str, sizes: str, dtype: str, tmp_path: Path) -> None:
    """Check native logits, with one thread and two, whose bits are the same. With bfloat16, K and V are bf16."""
    path = make(tmp_path / "model", family, sizes, dtype=getattr(torch, dtype))
    model = load_native(path, dtype=dtype)
    found = Feeder(model).feed_chunks(TOKENS, [1, 2, 20])
    assert difference(found, by_torch(path)) < (BOUND if dtype == "float32" else 0.08)
    assert torch.equal(Feeder(model.on_pool(CpuPool(2))).feed_chunks(TOKENS, [9, 14]), found)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_rounded_to_bf16_have_one_order_of_sums(family: str, tmp_path: Path) -> None:
    fields = {"linear_value_head_dim": 32, "dtype": torch.bfloat16}
    path = make(tmp_path / "model", family, "by 32", **fields)
    model = load_native(path, dtype="bfloat16").on_pool(CpuPool(2), activations="bf16")
    whole = Feeder(model).feed_chunks(TOKENS, [23])
    assert torch.equal(Feeder(model).feed_chunks(TOKENS, [1, 8, 14]), whole)
    assert difference(whole, Feeder(load_native(path, dtype="bfloat16")).feed_chunks(TOKENS, [23]).double()) < 0.3


@pytest.mark.parametrize("quantization", ["int8", "int4", "q8_0", "q4_0", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_native_logits_of_quantized_weights(family: str, quantization: str, tmp_path: Path) -> None:
    """Check native logits of quantized weights against torch with the dequantized ones, with activations in fp32 and
    rounded to 16-bit integers."""
    path = make(tmp_path / "model", family, "by 32")
    expected = by_torch(path, quantization=quantization)
    for activations, bound in (("fp32", 1e-4), ("auto", 0.02)):
        model = load_native(path, quantization=quantization, rounding=Rounding(activations=activations))
        found = Feeder(model).feed_chunks(TOKENS, [4, 1, 18])
        assert difference(found, expected) < (0.03 if quantization == "fp8" else bound), activations
    # The large projections of delta nets are quantized, too.
    names = ("in_proj_qkvz",) if family == "qwen3_next" else ("in_proj_qkv", "in_proj_z")
    tensors = open_model(path, None, "auto", None, quantization)[1]
    assert all(tensors.is_quantized(f"model.layers.0.linear_attn.{name}.weight") for name in (*names, "out_proj"))
    assert not tensors.is_quantized("model.layers.0.mlp.shared_expert_gate.weight")
    assert difference(by_torch(path), expected) > 0.01


def stack(path: Path) -> Path:
    """Put the experts of each layer into one tensor per projection, as in published files."""
    tensors = load_file(path / "model.safetensors")
    for i in range(len(KINDS)):
        prefix = f"model.layers.{i}.mlp.experts."
        experts = [
            {name: tensors.pop(f"{prefix}{e}.{name}_proj.weight") for name in ("gate", "up", "down")} for e in range(5)
        ]
        tensors[f"{prefix}gate_up_proj"] = torch.stack([torch.cat((e["gate"], e["up"])) for e in experts])
        tensors[f"{prefix}down_proj"] = torch.stack([e["down"] for e in experts])
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_stacked_experts_are_the_same(family: str, tmp_path: Path) -> None:
    """Check that stacked experts give the same bits, native and torch, and quantized at load."""
    apart, stacked = make(tmp_path / "apart", family, "by 32"), stack(make(tmp_path / "stacked", family, "by 32"))
    assert torch.equal(by_torch(stacked), by_torch(apart))
    for quantization in (None, "q8_0"):
        models = [load_native(path, quantization=quantization) for path in (stacked, apart)]
        found, expected = (Feeder(model).feed_chunks(TOKENS, [23]) for model in models)
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("experts.gate_up_proj", (5, 80, 95)),
        ("experts.gate_up_proj", (4, 80, 96)),
        ("experts.down_proj", (5, 40, 96)),
        ("gate.weight", (6, 96)),
        ("shared_expert_gate.weight", (2, 96)),
        ("shared_expert.gate_proj.weight", (55, 96)),
        ("shared_expert.down_proj.weight", (96, 40)),
    ],
)
def test_wrong_shapes_are_rejected_by_name(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    path = stack(make(tmp_path / "model", "qwen3_5_moe_text"))
    tensors = load_file(path / "model.safetensors")
    tensors[f"model.layers.1.mlp.{name}"] = torch.zeros(shape)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=rf"layers\.1\.mlp\.{name.split('.')[0]}\S* (has shape|is missing|are mis)"
    ):
        load_native(path)


@pytest.mark.parametrize("name", ["in_proj_qkvz", "in_proj_ba"])
def test_fused_projections_of_a_wrong_shape_are_named(name: str, tmp_path: Path) -> None:
    path = make(tmp_path / "model", "qwen3_next")
    tensors = load_file(path / "model.safetensors")
    tensors[f"model.layers.0.linear_attn.{name}.weight"] = torch.zeros(31, 96)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"layers\.0\.linear_attn\.{name}\.weight has shape \(31, 96\)"):
        load_native(path)


MIXTURE = torch_decoder.mixture


def without_gate(x: Tensor, w: Any, experts: Any, *rest: Any) -> Tensor:
    """Plant a mistake: the shared expert's output has no gate."""
    chosen = MIXTURE(x, replace(w, shared=None), experts, *rest)
    return chosen + w.shared.down.product(torch_decoder.silu_and_mul(w.shared.gate_up.product(x)))


def without_shared(x: Tensor, w: Any, experts: Any, *rest: Any) -> Tensor:
    return MIXTURE(x, replace(w, shared=None), experts, *rest)


def without_sum(x: Tensor, w: Any, experts: Any, *rest: Any) -> Tensor:
    """Plant a mistake: the weights of chosen experts do not add up to 1."""
    return MIXTURE(x, w, replace(experts, norm_topk_prob=False), *rest)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mistake", [without_gate, without_shared, without_sum])
def test_planted_mistakes_of_experts_are_found(mistake: Callable[..., Tensor], family: str, tmp_path: Path) -> None:
    path = make(tmp_path / "model", family)
    found = Feeder(load_native(path)).feed_chunks(TOKENS, [23])
    with patch.object(torch_decoder, "mixture", mistake):
        assert difference(found, by_torch(path)) > 100 * BOUND


def heads_by_turns(x: Tensor, w: Any, d: Any, state: Any, eps: float) -> tuple[Tensor, Any]:
    """Plant a mistake: value heads of the output are in the order of GGUF files."""
    out, after = torch_delta_net_step(x, w, d, state, eps)
    return out.view(d.key_heads, -1, d.value_dim).transpose(0, 1).flatten(), after


def shifted_norm(x: Tensor, w: Any, d: Any, state: Any, eps: float) -> tuple[Tensor, Any]:
    return torch_delta_net_step(x, replace(w, norm=1 + w.norm), d, state, eps)


torch_delta_net_step = torch_delta_net.step


@pytest.mark.parametrize("mistake", [heads_by_turns, shifted_norm])
def test_planted_mistakes_of_delta_nets_are_found(mistake: Any, tmp_path: Path) -> None:
    path = make(tmp_path / "model", "qwen3_next")
    found = Feeder(load_native(path)).feed_chunks(TOKENS, [23])
    with patch.object(torch_delta_net, "step", mistake):
        assert difference(found, by_torch(path)) > 100 * BOUND


def test_the_order_by_key_head_matters(tmp_path: Path) -> None:
    """Check that the order by key head matters: read without it, a checkpoint of Qwen3-Next gives other logits."""
    path = make(tmp_path / "model", "qwen3_next")
    found = Feeder(load_native(path)).feed_chunks(TOKENS, [23])
    with patch.object(torch_delta_net, "_order", lambda d: torch.arange(d.outputs)):
        assert difference(found, by_torch(path)) > 100 * BOUND


@settings(max_examples=15)
@given(
    st.sampled_from(FAMILIES),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=5),
)
def test_native_bits_do_not_depend_on_drafts(models: Callable[[str], Any], family: str, rounds: Any) -> None:
    """Check that native bits do not depend on drafts. Each round feeds K drafts, of which the first ones are
    accepted."""
    model, wrong = models(family), random.Random(1)
    expected = Feeder(model).feed_chunks(TOKENS, [1] * len(TOKENS))
    feeder, at = Feeder(model), 0
    for drafts, accepted in rounds:
        rows = [(TOKENS[at + i] if i <= accepted else wrong.randrange(VOCAB), at + i) for i in range(drafts + 1)]
        found, kept = feeder.feed({0: rows}), min(drafts, accepted) + 1
        assert torch.equal(found[:kept], expected[at : at + kept])
        at += kept


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    made = {name: load_native(make(tmp_path_factory.mktemp(name) / "model", name)) for name in FAMILIES}
    return made.__getitem__


DELTA_NET = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_size": 2048,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
FORMS = {
    "Qwen3.5-35B-A3B": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "vocab_size": 248320,
        "num_hidden_layers": 40,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "attn_output_gate": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [11, 11, 10]},
    },
    "Qwen3-Next-80B-A3B": {
        "architectures": ["Qwen3NextForCausalLM"],
        "vocab_size": 151936,
        "num_hidden_layers": 48,
        "intermediate_size": 5120,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.25,
        "rope_scaling": None,
        "rope_theta": 10000000,
    },
}
"""Fields of models of published sizes."""


@pytest.mark.parametrize("name", FORMS)
def test_models_of_published_sizes_have_the_weights_of_their_names(name: str) -> None:
    config = parse_config(DELTA_NET | FORMS[name])
    total, active = (float(part.strip("AB")) for part in name.split("-")[-2:])
    assert abs(sum(map(math.prod, tensor_shapes(config).values())) / 1e9 / total - 1) < 0.03
    assert abs(config.num_parameters / 1e9 - active) < 0.6
    assert config.num_parameters_read(10**9) == pytest.approx(
        sum(map(math.prod, tensor_shapes(config).values())) - config.vocab_size * config.hidden_size, rel=1e-6
    )
    assert (config.rotary_dim, config.rope_theta) == (64, 1e7)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("qwen3_5_moe_text", {"num_experts_per_tok": 6}, "num_experts_per_tok=6: must be at most num_experts=5"),
        ("qwen3_5_moe_text", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size=0"),
        ("qwen3_5_moe_text", {"mlp_only_layers": [1]}, "mlp_only_layers="),
        ("qwen3_5_moe_text", {"decoder_sparse_step": 2}, "decoder_sparse_step=2: not implemented; allowed: .* 1"),
        ("qwen3_5_moe_text", {"attn_output_gate": False}, "attn_output_gate=False"),
        ("qwen3_next", {"mlp_only_layers": "all"}, "mlp_only_layers='all': must be a list of layers"),
        ("qwen3_next", {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        ("qwen3_next", {"norm_topk_prob": 1}, "norm_topk_prob=1: must be true or false"),
        ("qwen3_next", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("qwen3_next", {"linear_num_value_heads": 3}, "linear_num_value_heads=3: must be a multiple"),
    ],
)
def test_what_is_not_implemented_is_named(family: str, fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = make(tmp_path / "model", family, with_tokenizer=False)
    edit_json(path / "config.json", **fields)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        load_config(path)
