"""Text of ranks in fp32: that of one process whose weights this test splits by hand, without code of specrs.

The reference is plain torch on the tensors of the checkpoint. Each part multiplies its rows of q, k, v, gate and up and
its columns of o and down; parts are added in the order of ranks, logits of parts of the vocabulary laid side by side.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint, perturb_checkpoint
from engine.harness import config as engine_config
from engine.harness import request, run
from models.harness import Feeder
from safetensors.torch import load_file
from specrs.models.torch_loader import load_model
from torch import Tensor

from parallel.harness import engine_on_threads
from parallel.threads import on_ranks

HEADS, KV_HEADS, DIM, HIDDEN, LAYERS, VOCAB, EPS = 6, 2, 12, 48, 3, 211, 1e-6
NEW = 12
PROMPTS = [[5, 9, 2, 33, 7, 7, 1, 12, 40, 3], [60, 61], [9, 100, 200, 30, 4]]


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def rotate(x: Tensor) -> Tensor:
    """Return `x` `[T, heads, DIM]` with RoPE at positions 0 to T - 1, base 10^4."""
    angles = torch.outer(torch.arange(len(x)).float(), 1e4 ** (-torch.arange(0, DIM, 2).float() / DIM))
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def split_logits(w: dict[str, Tensor], ids: list[int], parts: int) -> Tensor:
    """Return logits `[T, VOCAB]` of a model split into `parts`."""
    h = w["model.embed_tokens.weight"][ids]
    future = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)
    for i in range(LAYERS):
        layer = {k.removeprefix(f"model.layers.{i}."): v for k, v in w.items() if k.startswith(f"model.layers.{i}.")}
        x, sums = norm(h, layer["input_layernorm.weight"]), []
        for r in range(parts):
            q, k, v = (
                (x @ layer[f"self_attn.{name}_proj.weight"].chunk(parts)[r].T).view(len(ids), -1, DIM) for name in "qkv"
            )
            if "self_attn.q_norm.weight" in layer:
                q, k = norm(q, layer["self_attn.q_norm.weight"]), norm(k, layer["self_attn.k_norm.weight"])
            q, k = rotate(q), rotate(k).repeat_interleave(HEADS // KV_HEADS, 1)
            v = v.repeat_interleave(HEADS // KV_HEADS, 1)
            scores = torch.einsum("qhd,khd->hqk", q, k) / DIM**0.5
            mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), v)
            sums.append(mixed.flatten(1) @ layer["self_attn.o_proj.weight"].chunk(parts, 1)[r].T)
        h = h + sum(sums[1:], sums[0])
        x, sums = norm(h, layer["post_attention_layernorm.weight"]), []
        for r in range(parts):
            gate, up = (x @ layer[f"mlp.{name}_proj.weight"].chunk(parts)[r].T for name in ("gate", "up"))
            sums.append((gate * gate.sigmoid() * up) @ layer["mlp.down_proj.weight"].chunk(parts, 1)[r].T)
        h = h + sum(sums[1:], sums[0])
    x = norm(h, w["model.norm.weight"])
    return torch.cat([x @ part.T for part in w["lm_head.weight"].tensor_split(parts)], 1)


def greedy(w: dict[str, Tensor], prompt: list[int]) -> list[int]:
    """Return the `NEW` greedy tokens after `prompt`. Checks that the best logit always leads by more than the orders of
    sums can change."""
    ids = list(prompt)
    for _ in range(NEW):
        logits, tokens = split_logits(w, ids, 2)[-1].topk(2)
        assert logits[0] - logits[1] > 1e-3
        ids.append(int(tokens[0]))
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.inference_mode()
def test_logits_and_text(family: str, tmp_path: Path) -> None:
    shape = {"hidden": HIDDEN, "intermediate": 48, "kv_heads": KV_HEADS, "head_dim": DIM, "group": 3, "layers": LAYERS}
    folder = make_checkpoint(tmp_path / "target", family, seed=5, tie=False, rms_norm_eps=EPS, vocab=VOCAB, **shape)
    w = load_file(folder / "model.safetensors")
    ids = PROMPTS[0] + PROMPTS[2]
    made = on_ranks(2, lambda ranks: Feeder(load_model(folder, dtype="float32", device=ranks)).feed_chunks(ids, [9, 6]))
    assert torch.equal(*made)
    torch.testing.assert_close(made[0], split_logits(w, ids, 2), rtol=0, atol=5e-5)
    config = engine_config(
        folder, perturb_checkpoint(folder, tmp_path / "draft", noise=0.03, seed=2), k=3, dtype="float32"
    )
    requests = [request(i, prompt, k=None, max_tokens=NEW, engine_k=3) for i, prompt in enumerate(PROMPTS)]
    with engine_on_threads(replace(config, tensor_parallel_size=2)) as engine:
        for asked in requests:
            engine.add_request(asked)
        run(engine)
    assert [asked.output_token_ids for asked in requests] == [greedy(w, prompt) for prompt in PROMPTS]
    assert sum(sum(asked.acceptance.histogram[1:]) for asked in requests) > 0, "drafts are accepted, too"
