"""Layers with states: transformers' logits however tokens are fed, and no trace of rejected drafts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from checkpoints import edit_json, make_checkpoint
from hybrid_reference import float64, logits
from hypothesis import given, settings
from hypothesis import strategies as st
from specrs.errors import CheckpointError, UnsupportedModelError
from specrs.models.loader import load_config
from specrs.models.torch_loader import load_model
from torch import Tensor

from models.harness import Feeder

VOCAB = 211
TOKENS = random.Random(0).choices(range(VOCAB), k=23)


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    """Sizes of a small model: value heads per key head, head sizes, kernel, kinds of layers, ties."""
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


def close(found: Tensor, expected: Tensor, bound: float) -> None:
    scale = float(expected.abs().max())
    assert (found.double() - expected).abs().max() <= bound * scale, "logits differ"


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
    """Each round feeds K drafts, of which the first ones are accepted."""
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


def test_another_position_than_the_next_is_rejected(path: Path) -> None:
    feeder = Feeder(load_model(path, dtype="float64"))
    feeder.feed({0: [(1, 0), (2, 1)]})
    with pytest.raises(ValueError, match=r"row 0 has states before \[1, 2\], expected one before 5"):
        feeder.feed({0: [(3, 5)]})


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
