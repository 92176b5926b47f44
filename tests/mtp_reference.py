"""MTP heads of small random checkpoints, and what transformers' `MtpModel` says, called by hand. Uses no code of
specrs. Holds no tests.

`Script` has the members of `eagle3_reference.Head` that `eagle3_reference.speculate` uses. Nothing is cached: every
draft computes the head's whole sequence anew. Row i of the head has position i, the target's state of position i after
the final norm, and the token at i + 1; its logits are for position i + 2. While drafting, a row's state is what the row
before has left.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers.modeling_layers import MtpModel

RENAMED = {
    "layers.0.eh_proj.": "mtp.fc.",
    "layers.0.enorm.": "mtp.pre_fc_norm_embedding.",
    "layers.0.hnorm.": "mtp.pre_fc_norm_hidden.",
    "layers.0.post_norm.": "mtp.norm.",
    "layers.0.mtp_block.": "mtp.layers.0.",
}
"""Prefixes of tensor names in a checkpoint, by the corresponding prefixes of `MtpModel`."""


def head_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors of an MTP head, for the config.json `c` of a Qwen3.5."""
    h, q, kv = c["hidden_size"], c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    layer = "mtp.layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        "mtp.fc.weight": (h, 2 * h),
        f"{layer}self_attn.q_proj.weight": (2 * q, h),
        f"{layer}self_attn.k_proj.weight": (kv, h),
        f"{layer}self_attn.v_proj.weight": (kv, h),
        f"{layer}self_attn.o_proj.weight": (h, q),
    }
    dense, size = f"{layer}mlp.", c["intermediate_size"]
    if "num_experts" in c:
        count, own = c["num_experts"], c["moe_intermediate_size"]
        shapes |= {
            f"{layer}mlp.gate.weight": (count, h),
            f"{layer}mlp.experts.gate_up_proj": (count, 2 * own, h),
            f"{layer}mlp.experts.down_proj": (count, h, own),
            f"{layer}mlp.shared_expert_gate.weight": (1, h),
        }
        dense, size = f"{layer}mlp.shared_expert.", c["shared_expert_intermediate_size"]
    shapes |= {f"{dense}{name}_proj.weight": (size, h) for name in ("gate", "up")}
    shapes[f"{dense}down_proj.weight"] = (h, size)
    norms = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
    norms += (f"{layer}input_layernorm", f"{layer}post_attention_layernorm")
    shapes |= {f"{name}.weight": (h,) for name in norms}
    return shapes | {f"{layer}self_attn.{x}_norm.weight": (c["head_dim"],) for x in "qk"}


def add_head(path: Path, *, seed: int = 0, scale: float = 0.2, dtype: torch.dtype | None = None) -> Path:
    """Add a random MTP head to the checkpoint at `path`, and return `path`. `dtype` is that of its tensors; None: the
    file's."""
    file, generator = path / "model.safetensors", torch.Generator().manual_seed(seed)
    tensors = load_file(file)
    kind = next(iter(tensors.values())).dtype if dtype is None else dtype
    for name, shape in head_shapes(json.loads((path / "config.json").read_text())).items():
        tensors[name] = (torch.randn(shape, generator=generator) * scale).to(kind)
    save_file(tensors, file, metadata={"format": "pt"})
    return path


class Script:
    """The MTP head in a checkpoint, next to `target`, the checkpoint as a transformers model."""

    def __init__(self, target: Any) -> None:
        target.config.num_mtp_layers = 1
        target.config.mtp_layer_types = ["full_attention"]
        self.model = MtpModel.from_pretrained(target).eval()
        if target.dtype == torch.float64 and self.model._can_set_experts_implementation():
            self.model.set_experts_implementation("eager")  # torch's grouped product has no float64
        self.layer_ids = [target.config.num_hidden_layers]
        """Index of the target's hidden state after the final norm, which transformers returns last."""
        self.target_ids = torch.arange(target.config.vocab_size)

    def run(self, hidden: Tensor, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states that rows hand to their successors, `[N, H]`, and logits, `[N, V]`. Each row attends to
        itself and the rows before."""
        left = self.model.forward_layer(0, hidden[None], positions[None], None, input_ids=tokens[None])
        return left[0], self.model._project_to_logits(left)[0]

    def draft(self, entries: list[Tensor], tokens: list[int], k: int, start: int = 0) -> tuple[list[int], Tensor]:
        """Draft greedily for the k positions after `tokens`. Return drafts, and the logits `[k, V]` they come from.
        `entries` has the target's hidden states of all tokens but the last; rows before `start` do not exist."""
        hidden, text, rows = entries[0][start : len(tokens) - 1], list(tokens), []
        for _ in range(k):
            positions = torch.arange(start, len(text) - 1)
            left, logits = self.run(hidden, torch.tensor(text[start + 1 :]), positions)
            own = logits[-1][self.target_ids]
            rows.append(own)
            text.append(int(self.target_ids[own.argmax()]))
            hidden = torch.cat([hidden, left[-1:]])
        return text[len(tokens) :], torch.stack(rows) if rows else hidden.new_empty(0, len(self.target_ids))


def fit(path: Path, target: Any, texts: list[list[int]], steps: int = 24) -> None:
    """Train the head in the checkpoint at `path` on `texts`, so that some of its drafts are accepted. Rewrites the
    head's tensors. `target` is the checkpoint as a float32 model."""
    script = Script(target)
    with torch.no_grad():
        states = [target(torch.tensor([t]), output_hidden_states=True).hidden_states[-1][0] for t in texts]
    shared = {id(p) for p in target.parameters()}
    learned = {name: p for name, p in script.model.named_parameters() if id(p) not in shared}
    optimizer = torch.optim.Adam(learned.values(), lr=4e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        for text, hidden in zip(texts, states, strict=True):
            tokens, positions = torch.tensor(text[1:-1]), torch.arange(len(text) - 2)
            left, logits = script.run(hidden[:-2], tokens, positions)
            again = script.run(left[:-1], tokens[1:], positions[1:])[1]
            loss = cross_entropy(logits, torch.tensor(text[2:])) + cross_entropy(again, torch.tensor(text[3:]))
            loss.backward()
        optimizer.step()
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name, parameter in learned.items():
        own = next(stored + name[len(of) :] for of, stored in RENAMED.items() if name.startswith(of))
        tensors[own] = parameter.detach().to(tensors[own].dtype).clone()
    save_file(tensors, file, metadata={"format": "pt"})
