"""EAGLE-3 speculation of one prompt, written in plain torch from its definition. Uses no code of specrs.

This module also reads the head from its folder. No state is kept: the drafts of a context, made once, recompute the
head's whole sequence. That is slow, and leaves no slot, mask or length that could be wrong. Row i of the head has
position i, the target's hidden states of position i and the token at i + 1; its logits are for position i + 2. The
hidden states are the inputs of the requested layers, as transformers numbers them. While drafting, a row's hidden state
is the output of the row before.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from hf_reference import Statistics
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, silu


@dataclass(frozen=True)
class Round:
    """One iteration after n tokens: the drafts for positions n, n + 1, .., and how many were accepted."""

    n: int
    drafts: list[int]
    accepted: int


@dataclass
class Speculation:
    """New tokens after one prompt, and the iterations that generated them."""

    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)


class Head:
    """An EAGLE-3 head for the transformers model `target`, in either `layout` of `checkpoints.make_eagle3`."""

    def __init__(self, folder: Path, target: Any, dtype: torch.dtype = torch.float64, layer_ids: Any = None) -> None:
        raw = json.loads((folder / "config.json").read_text())
        self.tensors = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        is_speculators = "speculators_model_type" in raw
        c = raw["transformer_layer_config"] if is_speculators else raw
        self.layer = "layers.0." if is_speculators else "midlayer."
        self.heads, self.kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.head_dim = c.get("head_dim") or c["hidden_size"] // self.heads
        self.eps = c["rms_norm_eps"]
        self.theta = (c.get("rope_parameters") or c).get("rope_theta", 10000.0)
        self.flags = {name: bool(raw.get(name)) for name in ("norm_before_residual", "norm_before_fc", "norm_output")}
        self.fc_norm = bool(raw.get("fc_norm"))
        n = target.config.num_hidden_layers
        given = layer_ids or raw.get("eagle_aux_hidden_state_layer_ids") or (2, n // 2, n - 3)
        self.layer_ids = sorted(set(given))
        self.embedding = self.tensors.get("embed_tokens.weight", target.model.embed_tokens.weight.detach().to(dtype))
        self.lm_head = self.tensors.get("lm_head.weight", target.lm_head.weight.detach().to(dtype))
        ids = torch.arange(self.lm_head.shape[0])
        self.target_ids = ids + self.tensors["d2t"] if "d2t" in self.tensors else ids

    def fuse(self, entries: list[Tensor]) -> Tensor:
        """Return one hidden state `[N, H]` from the target's states, `[N, Ht]` each."""
        if self.fc_norm:
            entries = [self.norm(x, f"fc_norm.{i}.weight") for i, x in enumerate(entries)]
        x = torch.cat(entries, dim=-1)
        if self.flags["norm_before_fc"]:
            x = self.norm(x, "input_norm.weight")
        return linear(x, self.tensors["fc.weight"])

    def run(self, hidden: Tensor, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states that rows hand to their successors, `[N, H]`, and logits, `[N, Vd]`. Each row attends to
        itself and the rows before."""
        t, p = self.tensors, self.layer
        g = self.norm(hidden, p + "hidden_norm.weight")
        x = torch.cat([self.norm(self.embedding[tokens], p + "input_layernorm.weight"), g], dim=-1)
        residual = g if self.flags["norm_before_residual"] else hidden
        q, k, v = (linear(x, t[f"{p}self_attn.{n}_proj.weight"]).view(len(x), -1, self.head_dim) for n in "qkv")
        if p + "self_attn.q_norm.weight" in t:
            q, k = self.norm(q, p + "self_attn.q_norm.weight"), self.norm(k, p + "self_attn.k_norm.weight")
        q, k = self.rotate(q, positions), self.rotate(k, positions)
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, dim=1) for y in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / self.head_dim**0.5
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(dim=-1)
        attended = torch.einsum("hij,jhd->ihd", weights, v).flatten(1)
        h = residual + linear(attended, t[p + "self_attn.o_proj.weight"])
        y = self.norm(h, p + "post_attention_layernorm.weight")
        gated = silu(linear(y, t[p + "mlp.gate_proj.weight"])) * linear(y, t[p + "mlp.up_proj.weight"])
        h = h + linear(gated, t[p + "mlp.down_proj.weight"])
        final = self.norm(h, "norm.weight")
        return final if self.flags["norm_output"] else h, linear(final, self.lm_head)

    def draft(self, entries: list[Tensor], tokens: list[int], k: int, start: int = 0) -> tuple[list[int], Tensor]:
        """Draft greedily for the k positions after `tokens` (target ids). Return drafts and the logits `[k, Vd]` they
        come from.

        `entries` are the target's hidden states of all tokens but the last; rows before `start` do not exist.
        """
        hidden = self.fuse([x[start : len(tokens) - 1] for x in entries])
        text, rows = list(tokens), []
        for _ in range(k):
            positions = torch.arange(start, len(text) - 1)
            left, logits = self.run(hidden, torch.tensor(text[start + 1 :]), positions)
            rows.append(logits[-1])
            text.append(int(self.target_ids[logits[-1].argmax()]))
            hidden = torch.cat([hidden, left[-1:]])
        return text[len(tokens) :], torch.stack(rows) if rows else hidden.new_empty(0, len(self.target_ids))

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Apply the RMSNorm called `name` to `x`, computed in fp32 whatever the dtype, as in transformers."""
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.tensors[name]

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Apply RoPE to `x`, with angles in fp32 as in transformers."""
        frequencies = 1.0 / self.theta ** (torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        angles = positions.float().view(-1, 1, 1) * frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


_known_drafts: WeakKeyDictionary[Any, dict[tuple[tuple[int, ...], int], list[int]]] = WeakKeyDictionary()


def drafts_of(head: Any, entries: list[Tensor], tokens: list[int], k: int, start: int = 0) -> list[int]:
    """Return the k drafts of `head.draft` with these arguments. Those of a context are computed once: fewer drafts are
    the first of more."""
    known, context = _known_drafts.setdefault(head, {}), (tuple(tokens), start)
    if len(known.get(context, ())) < k:
        known[context] = head.draft(entries, tokens, k, start)[0]
    return known.get(context, [])[:k]


@torch.inference_mode()
def speculate(
    target: Any,
    head: Head,
    prompt: list[int],
    max_new_tokens: int,
    k: int,
    eos: list[int],
    statistics: Statistics,
    start: int = 0,
) -> Speculation:
    """Decode one prompt greedily with speculation. Adds to `statistics` as `hf_reference.count_acceptance` does.

    The first token is the target's. Then each iteration with n tokens so far makes K_r = min(k, limit - n - 1) drafts.
    The target reads all of them, and the longest prefix that equals its own tokens is kept, with one more token. Drafts
    are counted before a stop token ends the text. The head has no rows before `start`.
    """
    out, tokens, limit = Speculation(), list(prompt), len(prompt) + max_new_tokens
    statistics.per_position += [0] * (k - len(statistics.per_position))
    logits, entries = read(target, tokens, head.layer_ids)
    tokens.append(int(logits[-1].argmax()))
    while tokens[-1] not in eos and len(tokens) < limit:
        n = len(tokens)
        k_r = min(k, limit - n - 1)
        drafts = drafts_of(head, entries, tokens, k_r, start)
        logits, entries = read(target, tokens + drafts, head.layer_ids)
        best = logits[n - 1 :].argmax(dim=-1).tolist()
        accepted = next((i for i in range(k_r) if drafts[i] != best[i]), k_r)
        out.rounds.append(Round(n, drafts, accepted))
        if k_r:
            statistics.drafts += 1
            statistics.draft_tokens += k_r
            statistics.accepted_tokens += accepted
            for i in range(accepted):
                statistics.per_position[i] += 1
        for token in best[: accepted + 1]:
            tokens.append(token)
            if token in eos:
                break
    out.tokens = tokens[len(prompt) :]
    return out


def read(target: Any, tokens: list[int], layer_ids: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Return logits `[N, V]` of all tokens, and the states that enter the layers `layer_ids`, `[N, Ht]` each."""
    out = target(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    return out.logits[0], [out.hidden_states[i][0] for i in layer_ids]
