"""LFM2 with experts: transformers' logits by torch and natively, fields of its routing, the tensors that a checkpoint
may have, and mistakes that would show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from checkpoints import make_checkpoint
from hybrid_reference import float64, logits
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from specrs.backends.cpu.weights import load_native
from specrs.core import CpuPool
from specrs.errors import CheckpointError
from specrs.models import torch_decoder
from specrs.models.config import parse_config
from specrs.models.torch_loader import load_model
from torch import Tensor

from models.harness import Feeder
from models.layers_with_states import TOKENS, close

BOUND = 2e-5
"""Largest allowed difference of native logits from logits in float64, relative to the largest logit."""
KINDS = ["conv", "full_attention", "conv", "conv"]
LENGTH = len(TOKENS)


def make(folder: Path, **fields: Any) -> Path:
    return make_checkpoint(folder, "lfm2_moe", **{"layer_types": KINDS, "layers": len(KINDS), "hidden": 64} | fields)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("lfm2_moe") / "model")


def by_torch(path: Path) -> Tensor:
    with float64():
        return Feeder(load_model(path, dtype="float64")).feed_chunks(TOKENS, [LENGTH])


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    """Draw sizes of a small model, and the rules of its routing."""
    experts = draw(st.integers(1, 6))
    return {
        "num_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, experts)),
        "moe_intermediate_size": draw(st.sampled_from([7, 32])),
        "num_dense_layers": draw(st.integers(0, 3)),
        "use_expert_bias": draw(st.booleans()),
        "norm_topk_prob": draw(st.booleans()),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        "tie": draw(st.booleans()),
        "seed": draw(st.integers(0, 9)),
    }


@settings(max_examples=15)
@given(shapes(), st.integers(1, 9))
def test_the_logits_of_transformers(tmp_path_factory: pytest.TempPathFactory, shape: Any, first: int) -> None:
    """Check logits by torch in float64, and those of native passes, against transformers."""
    path = make(tmp_path_factory.mktemp("lfm2_moe") / "model", **shape)
    expected, chunks = logits(path, TOKENS), [first, 1, LENGTH - first - 1]
    with float64():
        close(Feeder(load_model(path, dtype="float64")).feed_chunks(TOKENS, chunks), expected, 1e-12)
    close(Feeder(load_native(path)).feed_chunks(TOKENS, chunks), expected, BOUND)


def test_native_bits_depend_on_nothing_else(path: Path) -> None:
    model = load_native(path)
    whole = Feeder(model).feed_chunks(TOKENS, [LENGTH])
    assert torch.equal(Feeder(model.on_pool(CpuPool(2))).feed_chunks(TOKENS, [4, 1, LENGTH - 5]), whole)


def weighs_bias(*arguments: Any) -> Tensor:
    """Compute a mixture with a planted mistake: weights have no bias, and neither has the choice."""
    x, w, *rest = arguments
    return MIXTURE(x, replace(w, bias=torch.zeros_like(w.bias)), *rest)


def with_rules(**rules: Any) -> Callable[..., Tensor]:
    def mixture(x: Tensor, w: Any, experts: Any, *rest: Any) -> Tensor:
        """Compute a mixture with a planted mistake: other rules."""
        return MIXTURE(x, w, replace(experts, **rules), *rest)

    return mixture


MIXTURE = torch_decoder.mixture


@pytest.mark.parametrize(
    "mistake",
    [weighs_bias, with_rules(norm_topk_prob=False), with_rules(factor=1.0), with_rules(weighs_input=True)],
    ids=["no bias", "weights that are not divided by their sum", "no factor", "weighted inputs"],
)
def test_planted_mistakes_are_far_beyond_the_bound(mistake: Any, path: Path) -> None:
    found = Feeder(load_native(path)).feed_chunks(TOKENS, [LENGTH])
    with patch.object(torch_decoder, "mixture", mistake):
        wrong = by_torch(path)
    assert (found.double() - wrong).abs().max() > 100 * BOUND * float(wrong.abs().max())


@pytest.mark.parametrize("stacked", [False, True])
def test_names_of_tensors(stacked: bool, path: Path, tmp_path: Path) -> None:
    """Check a tensor for each expert, as in published checkpoints, and one for all experts."""
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    tensors = load_file(path / "model.safetensors")
    experts = {name for name in tensors if ".experts." in name}
    kept = {name: tensor for name, tensor in tensors.items() if name not in experts}
    assert {"model.layers.1.feed_forward.expert_bias", "model.layers.0.feed_forward.w1.weight"} < {*kept}
    for block in {name.partition(".experts.")[0] + ".experts." for name in experts}:
        one = {leaf: [tensors[f"{block}{i}.{leaf}.weight"] for i in range(5)] for leaf in ("w1", "w2", "w3")}
        if stacked:
            gates = [torch.cat((gate, up)) for gate, up in zip(one["w1"], one["w3"], strict=True)]
            kept |= {f"{block}gate_up_proj": torch.stack(gates), f"{block}down_proj": torch.stack(one["w2"])}
        else:
            kept |= {f"{block}{i}.{leaf}.weight": own for leaf, of in one.items() for i, own in enumerate(of)}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = Feeder(load_native(tmp_path)).feed_chunks(TOKENS, [LENGTH])
    assert torch.equal(found, Feeder(load_native(path)).feed_chunks(TOKENS, [LENGTH]))


BASE: dict[str, Any] = {
    "architectures": ["Lfm2MoeForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "layer_types": ["conv", "full_attention", "conv"],
}


def test_fields_have_transformers_defaults() -> None:
    config = parse_config(BASE)
    experts = config.experts
    assert experts is not None
    assert (experts.count, experts.per_token, experts.intermediate_size, experts.layers) == (
        32,
        4,
        1792,
        (False, False, True),
    )
    assert (experts.sigmoids, experts.biased_choice, experts.norm_topk_prob, experts.factor) == (True, True, True, 1.0)
    # The size of its MLP is the field's.
    assert (config.intermediate_size, config.rms_norm_eps, config.tie_word_embeddings) == (96, 1e-5, True)
    assert parse_config(BASE | {"num_dense_layers": 3}).experts is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_dense_layers": -1}, "num_dense_layers=-1: must be a number of layers"),
        ({"num_dense_layers": None}, "num_dense_layers=None"),
        ({"use_expert_bias": 1}, "use_expert_bias=1: must be true or false"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor=0: must be a finite number greater than 0"),
        ({"num_experts_per_tok": 33}, "num_experts_per_tok=33: must be at most num_experts=32"),
    ],
)
def test_malformed_fields_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_config(BASE | fields)


def test_a_missing_bias_is_named(path: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.feed_forward.expert_bias"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"mlp\.expert_bias"):
        load_native(tmp_path)
