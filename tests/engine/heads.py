"""EAGLE-3 heads for a small random target, one of them trained on its texts. Holds no tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from checkpoints import make_eagle3
from eagle3_reference import Head, read
from hf_reference import load
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy

from engine.harness import Bank, make_bank

LAYERS = 6


def fit(folder: Path, target: Any, texts: list[list[int]]) -> None:
    """Train the head in `folder` on `texts`, so that some of its drafts are accepted. Rewrites the head's file."""
    head = Head(folder, target, torch.float32)
    row_of = torch.full((target.config.vocab_size,), -1).index_copy_(
        0, head.target_ids, torch.arange(len(head.target_ids))
    )
    learned = [tensor.requires_grad_() for tensor in head.tensors.values() if tensor.is_floating_point()]
    with torch.no_grad():
        states = [[x.float() for x in read(target, text, head.layer_ids)[1]] for text in texts]
    optimizer = torch.optim.Adam(learned, lr=4e-3)
    for _ in range(24):
        optimizer.zero_grad()
        for text, entries in zip(texts, states, strict=True):
            hidden = head.fuse([x[:-2] for x in entries])
            _, logits = head.run(hidden, torch.tensor(text[1:-1]), torch.arange(len(text) - 2))
            cross_entropy(logits, row_of[text[2:]], ignore_index=-1).backward()
        optimizer.step()
    save_file({name: tensor.detach() for name, tensor in head.tensors.items()}, folder / "model.safetensors")


def make_head_bank(folder: Path) -> Bank:
    """Make a bank of a Qwen3 target of six layers, with heads of both formats, with all ids or some, random or trained
    on the target's texts."""
    bank = make_bank(folder, layers=LAYERS, hidden=64, head_dim=16)
    target = load(bank.target)
    texts = [prompt + text for prompt, text in zip(bank.prompts[3:11], bank.continuations[3:11], strict=True)]
    made = {
        "random": make_eagle3(folder / "random", bank.target, seed=1, vocab=60),
        "fitted": make_eagle3(folder / "fitted", bank.target, "speculators", seed=2, layer="qwen3", vocab=150),
        "all ids": make_eagle3(folder / "all", bank.target, seed=4, fc_norm=True, norm_output=True, layer_ids=[1, 4]),
    }
    fit(made["fitted"], target, texts)
    bank.drafts.clear()
    bank.drafts.update(made)
    return bank
