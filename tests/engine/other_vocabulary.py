"""Checkpoints whose token ids are permuted, with some tokens unknown. Holds no tests."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from checkpoints import edit_json
from safetensors.torch import load_file, save_file


@dataclass(frozen=True)
class Renamed:
    """A checkpoint with permuted token ids: `ids[i]` is the new id of the original id i; None if i is padding or its
    token was renamed."""

    path: Path
    ids: list[int | None]


def rename(source: Path, path: Path, *, dropped: int = 0, seed: int = 0) -> Renamed:
    """Copy the checkpoint at `source` with its ids in another order, and its last `dropped` tokens renamed."""
    config = json.loads((source / "config.json").read_text())
    order = list(range(config["vocab_size"]))
    random.Random(seed).shuffle(order)
    path.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (path / file.name).write_bytes(file.read_bytes())
            continue
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name in ("model.embed_tokens.weight", "lm_head.weight"):
                tensors[name] = torch.empty_like(tensor).index_copy_(0, torch.tensor(order), tensor)
        save_file(tensors, path / file.name, metadata={"format": "pt"})
    content = json.loads((source / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    last = sorted(vocab, key=vocab.__getitem__)[len(vocab) - dropped :]
    content["model"]["merges"] = [pair for pair in content["model"]["merges"] if "".join(pair) not in last]
    ids: list[int | None] = list(order)
    for token in last:
        ids[vocab[token]] = None
    renamed = {token: order[token_id] for token, token_id in vocab.items() if token not in last}
    content["model"]["vocab"] = renamed | {f"\u0120unheard-of-{i}": order[vocab[token]] for i, token in enumerate(last)}
    for token in content["added_tokens"]:
        token["id"] = order[token["id"]]
    (path / "tokenizer.json").write_text(json.dumps(content))
    for name in ("config.json", "generation_config.json"):
        edit_json(path / name, eos_token_id=order[0], **({"pad_token_id": order[0]} if name == "config.json" else {}))
    padding = set(range(len(order))) - set(vocab.values())
    return Renamed(path, [None if i in padding else ids[i] for i in range(len(ids))])
