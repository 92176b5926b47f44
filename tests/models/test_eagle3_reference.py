"""The plain script of EAGLE-3 against transformers' own layers, and its speculation against plain generation."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, make_eagle3
from eagle3_reference import Head, Statistics, read, speculate
from hf_reference import generate, load
from torch import nn
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3MLP

WIDTH, HEADS, KV_HEADS, DIM, INTERMEDIATE = 64, 4, 2, 20, 72


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "target", layers=7, hidden=WIDTH, head_dim=16)


@pytest.mark.parametrize("layer", ["llama", "qwen3"])
@pytest.mark.parametrize("before_residual", [False, True])
def test_its_rows_are_those_of_layers_of_transformers(
    target: Path, tmp_path: Path, layer: str, before_residual: bool
) -> None:
    path = make_eagle3(
        tmp_path, target, "speculators", layer=layer, vocab=60, norm_before_residual=before_residual, rope_theta=500.0
    )
    head = Head(path, load(target))
    config_class, attention_class = {"llama": (LlamaConfig, LlamaAttention), "qwen3": (Qwen3Config, Qwen3Attention)}[
        layer
    ]
    config: Any = config_class(
        hidden_size=WIDTH,
        intermediate_size=INTERMEDIATE,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        attn_implementation="sdpa",
    )
    t = head.tensors

    def filled(module: nn.Module, prefix: str) -> Any:
        module.to(torch.float64).load_state_dict({k[len(prefix) :]: v for k, v in t.items() if k.startswith(prefix)})
        return module.eval()

    attention = attention_class(config, 0)
    for name in ("q_proj", "k_proj", "v_proj"):
        old: Any = getattr(attention, name)
        setattr(attention, name, nn.Linear(2 * WIDTH, old.out_features, bias=False))
    filled(attention, "layers.0.self_attn.")
    norms = {
        name: filled(LlamaRMSNorm(WIDTH, 1e-5), f"layers.0.{name}.")
        for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    }
    mlp, last = (
        filled((LlamaMLP if layer == "llama" else Qwen3MLP)(config), "layers.0.mlp."),
        filled(LlamaRMSNorm(WIDTH, 1e-5), "norm."),
    )
    n = 23
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(n, WIDTH, generator=generator, dtype=torch.float64)
    ids, positions = torch.randint(0, 200, (n,), generator=generator), torch.arange(n)
    with torch.inference_mode():
        g = norms["hidden_norm"](hidden)
        x = torch.cat([norms["input_layernorm"](head.embedding[ids]), g], dim=-1)
        mask = torch.full((n, n), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        angles = LlamaRotaryEmbedding(config)(x[None], positions[None])
        h = (g if before_residual else hidden) + attention(x[None], angles, mask)[0][0]
        h = h + mlp(norms["post_attention_layernorm"](h))
        expected = last(h) @ t["lm_head.weight"].t()
        left, logits = head.run(hidden, ids, positions)
    torch.testing.assert_close(left, h, rtol=0, atol=1e-11)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("k", [1, 4])
def test_its_text_is_that_of_plain_generation(target: Path, tmp_path: Path, k: int) -> None:
    path = make_eagle3(tmp_path, target, vocab=60)
    model, statistics, prompt = load(target), Statistics(), list(range(1, 20))
    head = Head(path, model)
    found = speculate(model, head, prompt, 30, k, [], statistics)
    assert found.tokens == generate(model, prompt, 30)
    assert statistics.draft_tokens == sum(len(r.drafts) for r in found.rounds)
    assert statistics.accepted_tokens == sum(r.accepted for r in found.rounds) == sum(statistics.per_position)
    # What a round drafts is a function of the text before it.
    with torch.inference_mode():
        for r in found.rounds[::7]:
            text = (prompt + found.tokens)[: r.n]
            _, entries = read(model, text, head.layer_ids)
            assert head.draft(entries, text, len(r.drafts))[0] == r.drafts
