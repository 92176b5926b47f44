"""Drawn models of Gemma 4: transformers' logits by torch and natively, for any kinds and sizes of layers, shared keys
and values, embeddings of layers, and experts."""

from __future__ import annotations

import random
from typing import Any

import pytest
from checkpoints import make_gemma4
from gemma4_reference import float64, logits_and_margins
from hypothesis import assume, given
from hypothesis import strategies as st
from specrs.backends.cpu.weights import load_native
from specrs.models.torch_loader import load_model
from sweep import sweep

from models.harness import Feeder

TOKENS = random.Random(7).choices(range(61), k=40)
TIE = 5e-5
"""Two experts whose probabilities differ by less are tied: float32 may choose either."""
BOUND = 2e-5
"""Largest difference of native logits from those in float64, relative to the largest logit, where torch's own in
float32 differ by no more than a quarter of it. Drawn models of six layers exist in which both differ by 4e-5."""


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    """Draw fields of a small model: heads, layers with windows, layers that share keys, embeddings of layers, and
    experts."""
    kinds = [*draw(st.lists(st.booleans(), min_size=3, max_size=5)), False]
    sharing = [n for n in range(1, len(kinds)) if {*kinds} == {*kinds[:-n]}]
    shared = draw(st.sampled_from(sharing)) if sharing and draw(st.integers(0, 3)) else 0
    kv_heads, group = draw(st.sampled_from([(1, 3), (2, 2), (3, 1), (2, 1)]))
    global_heads = [n for n in (1, 2, 3) if kv_heads * group % n == 0]
    fields: dict[str, Any] = {
        "layers": len(kinds),
        "layer_types": ["sliding_attention" if window else "full_attention" for window in kinds],
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": draw(st.booleans()),
        "sliding_window": draw(st.sampled_from([1, 5, 8, 39])),
        "kv_heads": kv_heads,
        "group": group,
        "hidden": draw(st.sampled_from([40, 64])),
        "head_dim": draw(st.sampled_from([12, 16])),
        "global_head_dim": draw(st.sampled_from([16, 24])),
        "attention_k_eq_v": draw(st.booleans()),
        "num_global_key_value_heads": draw(st.sampled_from([None, *global_heads])),
        "hidden_size_per_layer_input": draw(st.sampled_from([0, 8, 21])),
        "final_logit_softcapping": draw(st.sampled_from([None, 5.0])),
        "seed": draw(st.integers(0, 99)),
    }
    if draw(st.booleans()):
        count = draw(st.integers(1, 6))
        fields |= {"enable_moe_block": True, "num_experts": count, "top_k_experts": draw(st.integers(1, count))}
        fields["moe_intermediate_size"] = draw(st.sampled_from([8, 20, 72]))
    return fields


@sweep(24)
@given(shapes(), st.lists(st.integers(1, 17), min_size=1, max_size=3))
def test_drawn_models(tmp_path_factory: pytest.TempPathFactory, fields: dict[str, Any], chunks: list[int]) -> None:
    """A router's softmax is in float32 in both, so its weights may differ by a rounding. Native sums are in float32.
    Rows from the first on for which two experts are tied are left out."""
    path = make_gemma4(tmp_path_factory.mktemp("drawn") / "model", "gemma4", with_tokenizer=False, **fields)
    chunks = [*chunks, len(TOKENS) - sum(chunks)] if sum(chunks) < len(TOKENS) else [len(TOKENS)]
    expected, margins = logits_and_margins(path, TOKENS)
    certain = next((row for row, margin in enumerate(margins.tolist()) if margin < TIE), len(TOKENS))
    assume(certain > 0)

    def error(model: Any) -> float:
        """The largest difference relative to the largest logit."""
        found = Feeder(model, block_size=4, max_len=44).feed_chunks(TOKENS, chunks)
        return float((found.double() - expected)[:certain].abs().max() / expected[:certain].abs().max())

    with float64():
        assert error(load_model(path, dtype="float64")) < (1e-6 if "enable_moe_block" in fields else 1e-12)
    assert error(load_native(path)) < max(BOUND, 4 * error(load_model(path, dtype="float32")))
