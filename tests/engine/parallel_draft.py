"""A draft model for parallel drafting, trained on given texts for a few seconds, and its bank. Holds no tests."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from checkpoints import edit_json, make_checkpoint
from hf_reference import load
from torch.nn.functional import cross_entropy

from engine.harness import VOCAB, Bank

MASK = VOCAB - 1
"""Id of the mask token. No tokenizer has it; it is one of the padding."""
DEPTH = 6
"""Number of drafts that the model was trained for."""


def train_parallel_draft(path: Path, texts: list[list[int]], *, steps: int = 80, mask: int = MASK) -> Path:
    """Write a draft model trained on `texts` until it is right several tokens ahead, but not always.

    It is trained as PARD is: a text is cut at a random place, and the last token and the mask tokens after it predict
    what follows.
    """
    make_checkpoint(path, "qwen3", seed=4, tie=False, vocab=VOCAB, hidden=64, layers=2, kv_heads=2, head_dim=32)
    edit_json(path / "config.json", mask_token_id=mask)
    model = load(path, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
    rng = random.Random(0)
    for _ in range(steps):
        ids = torch.zeros((len(texts), max(map(len, texts))), dtype=torch.int64)
        labels = torch.full_like(ids, -100)
        for row, text in enumerate(texts):
            cut = rng.randrange(1, len(text) - DEPTH)
            fed = [*text[:cut], *[mask] * (DEPTH - 1)]
            ids[row, : len(fed)] = torch.tensor(fed)
            labels[row, cut - 1 : len(fed)] = torch.tensor(text[cut : cut + DEPTH])
        loss = cross_entropy(model(ids).logits.flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)
    edit_json(path / "config.json", mask_token_id=mask)
    return path


def with_parallel_draft(bank: Bank, path: Path) -> Bank:
    """Return the bank with a parallel draft, called `parallel`, trained on all prompts and their continuations."""
    texts = [prompt + text for prompt, text in zip(bank.prompts, bank.continuations, strict=True)]
    return replace(bank, drafts=bank.drafts | {"parallel": train_parallel_draft(path, texts)})


@functools.cache
def loaded(path: Path) -> Any:
    """Load the checkpoint in float64, by transformers."""
    return load(path)
