"""Reference for Gemma 4's assistants: writes small random checkpoints, and drafts with transformers' own module. Uses
no code of specrs. Holds no tests.

`Script` has the members of `eagle3_reference.Head` that `eagle3_reference.speculate` uses. After n tokens, every draft
has position n - 1, and attends the target's keys and values of positions 0 to n - 2, which are computed anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from hf_reference import load
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

KINDS = ["sliding_attention", "sliding_attention", "full_attention"]


def _modes(config: Any) -> list[str | None]:
    """Return what each layer does with keys and values: `reuse` for layers that share, `store` for the last layer of
    each kind among the others, else None. transformers 5.23 fails if all layers share, and stores nothing if none
    does."""
    first = config.num_hidden_layers - config.num_kv_shared_layers
    modes: list[str | None] = [None] * first + ["reuse"] * config.num_kv_shared_layers
    for kind in set(config.layer_types[:first]):
        modes[max(i for i in range(first) if config.layer_types[i] == kind)] = "store"
    return modes


@contextmanager
def sharing() -> Iterator[None]:
    """Let transformers build assistants, and targets that return the keys and values that assistants read."""
    with patch.object(Gemma4TextConfig, "kv_sharing_modes", property(_modes)):
        yield


def load_target(path: Path, dtype: torch.dtype = torch.float64) -> Any:
    """Load the target at `path` as a model that returns keys and values."""
    with sharing():
        return load(path, dtype)


def make_assistant(
    path: Path,
    target: Path,
    *,
    seed: int = 0,
    kinds: list[str] = KINDS,
    hidden: int = 40,
    intermediate: int = 56,
    heads: int = 4,
    initializer_range: float = 0.2,
    dtype: torch.dtype = torch.float32,
    ordered: bool = False,
    **fields: Any,
) -> Path:
    """Write a random assistant to `path`, which is created, and return `path`. It is for the Gemma 4 checkpoint at
    `target`. `kinds` has the kind of each layer. `fields` go to the configuration of its text model."""
    c = json.loads((target / "config.json").read_text())
    full = c["layer_types"].index("full_attention")
    heads_of_full = c["per_layer_config"][str(full)]
    text = Gemma4TextConfig(
        vocab_size=c["vocab_size"],
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=len(kinds),
        num_kv_shared_layers=len(kinds),
        num_attention_heads=heads,
        num_key_value_heads=c["num_key_value_heads"],
        num_global_key_value_heads=heads_of_full.get("num_key_value_heads"),
        attention_k_eq_v="num_key_value_heads" in heads_of_full,
        head_dim=c["head_dim"],
        global_head_dim=heads_of_full["head_dim"],
        layer_types=list(kinds),
        sliding_window=c["sliding_window"],
        rope_parameters=c["rope_parameters"],
        max_position_embeddings=c["max_position_embeddings"],
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        tie_word_embeddings=True,
        **{"final_logit_softcapping": c["final_logit_softcapping"]} | fields,
    )
    config = Gemma4AssistantConfig(
        text_config=text, backbone_hidden_size=c["hidden_size"], use_ordered_embeddings=ordered, num_centroids=1
    )
    generator = torch.Generator().manual_seed(seed)
    with sharing():
        model = Gemma4AssistantForCausalLM(config)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point() and "inv_freq" not in name:
                noise = torch.randn(tensor.shape, generator=generator) * initializer_range
                tensor.copy_(1 + noise if "norm" in name or name.endswith("layer_scalar") else noise)
            elif name.endswith("token_ordering"):
                tensor.copy_(torch.randperm(len(tensor), generator=generator))
    model.to(dtype).save_pretrained(path)
    return path


class Script:
    """Drafts by transformers' own module: the assistant at `path`, for `target`, a model that `load_target`
    returned."""

    def __init__(self, path: Path, target: Any) -> None:
        with sharing():
            self.model = Gemma4AssistantForCausalLM.from_pretrained(
                path, dtype=target.dtype, local_files_only=True, attn_implementation="eager"
            ).eval()
        self.target = target
        self.layer_ids = [target.config.num_hidden_layers]
        """Index of the target's hidden state after the final norm, which transformers returns last."""
        self.target_ids = torch.arange(target.config.vocab_size)

    def keys_and_values(self, tokens: list[int]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the target's keys and values of `tokens`, by kind of layer."""
        out = self.target(torch.tensor([tokens]), use_cache=False, return_shared_kv_states=True)
        return dict(out.shared_kv_states)

    def draft(self, entries: list[Tensor], tokens: list[int], k: int, start: int = 0) -> tuple[list[int], Tensor]:
        """Draft greedily for the k positions after `tokens`. Return the drafts, and the logits `[k, V]` of which they
        are the argmax. `entries` has the target's hidden states of all tokens but the last. `start` must be 0."""
        assert start == 0
        known, hidden, drafts, rows = self.keys_and_values(tokens[:-1]), entries[0][len(tokens) - 2], [], []
        embedding = self.target.get_input_embeddings()
        for _ in range(k):
            token = torch.tensor([[drafts[-1] if drafts else tokens[-1]]])
            out = self.model(
                inputs_embeds=torch.cat([embedding(token), hidden[None, None]], dim=-1),
                position_ids=torch.tensor([[len(tokens) - 1]]),
                shared_kv_states=known,
            )
            hidden = out.last_hidden_state[0, -1]
            rows.append(out.logits[0, -1])
            drafts.append(int(rows[-1].argmax()))
        return drafts, torch.stack(rows) if rows else hidden.new_empty(0, len(self.target_ids))


def fit(path: Path, target: Any, texts: list[list[int]], steps: int = 24) -> None:
    """Train the assistant at `path` on `texts`, so that the target accepts some of its drafts. Rewrites its tensors.
    `target` is a float32 model that `load_target` returned."""
    script = Script(path, target)
    model, known = script.model.requires_grad_(True), []
    with torch.no_grad():
        for text in texts:
            hidden = target(torch.tensor([text]), output_hidden_states=True).hidden_states[-1]
            known.append((hidden, script.keys_and_values(text), target.get_input_embeddings()(torch.tensor([text]))))
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        for text, (hidden, kv, embedded) in zip(texts, known, strict=True):
            count = len(text) - 3  # rows, each of which drafts two tokens
            mask = torch.full((count, len(text)), -torch.inf).triu(1)[None, None]
            state, loss = hidden[:, :count], torch.tensor(0.0)
            for ahead in (1, 2):
                inputs = torch.cat([embedded[:, ahead : ahead + count], state], dim=-1)
                out = model.model(
                    inputs_embeds=model.pre_projection(inputs),
                    attention_mask=dict.fromkeys(("full_attention", "sliding_attention"), mask),
                    position_ids=torch.arange(1, count + 1)[None],
                    shared_kv_states=kv,
                    use_cache=False,
                    output_hidden_states=True,  # else it keeps the last row alone
                ).last_hidden_state
                state = model.post_projection(out)
                loss = loss + cross_entropy(model.lm_head(out)[0], torch.tensor(text[ahead + 1 : ahead + 1 + count]))
            loss.backward()
        optimizer.step()
    model.save_pretrained(path)
