"""Train an EAGLE-3 head for a target by self-distillation; what it writes, specrs, vLLM and SGLang read.

    python scripts/train_eagle3.py --out build/eagle3                          # for the bundled target
    python scripts/train_eagle3.py --target FOLDER --prompts prompts.jsonl --out build/eagle3 --device cuda
    python scripts/train_eagle3.py --target MODEL.gguf --chats --num-plain 0 --bf16 --out build/eagle3

Three steps, each resumed where it was left when the same command is given again:

1. The target continues prompts (`--prompts`: one JSON object a line with `prompt`, or plain lines; the default is
   pieces of the Python standard library, of which the last 2 % are never used, as in `train_pair.py`), some greedily,
   some at random. What it wrote is in `OUT/text`. Longer pieces of the same text are learned from as they are.
   With `--chats` the prompts are chats whose one user turn the target writes, too, behind the beginning of its chat
   template (Xu et al. 2024, "Magpie"): in `OUT/chats.jsonl`, and no other text is in them.
2. The head learns the target's own distribution over the ids that it drafts, at every position of prompt and
   continuation. As in drafting, only its first pass sees the target's hidden states: each of the passes behind it reads
   what the pass before has left, and attends what a draft of that depth would find in the KV cache (Li et al. 2025,
   section 3.2, "training-time test"). Losses are weighted with 0.8 for each pass. `OUT/state.pt` holds it on the way.
   With `--keep-states` the target runs once over each sequence, and `OUT/states` holds its hidden states in bf16:
   8 H bytes a token.
3. `OUT/head` is the head, in the layout of `LlamaForCausalLMEagle3`; embeddings are the target's.

It prints how often the draft of each pass is the target's choice on text that it has not seen, given that those before
were right. For the bundled head: see python/specrs/pair/__init__.py.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from eagle3_text import HELD_OUT, Text, save, write_chats, write_text
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

BUNDLED = Path(__file__).parents[1] / "python" / "specrs" / "pair" / "target"
DECAY = 0.8
"""Weight of a pass's loss relative to that of the pass before."""
NORM_SCALE = 0.3
"""Initial weights of the head's final norm, as a factor of the target's."""
REST_LR = 1e-3
"""Highest learning rate of the parameters that Muon does not train: LM head and norms."""


@dataclass(frozen=True)
class Shape:
    """Content of the head's `config.json`, and the layers of the target that it reads."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float
    layer_ids: list[int]


class Head(nn.Module):
    """The head in fp32, under the names of its checkpoint. Embedding rows are the target's and not trained."""

    def __init__(self, shape: Shape, norm: Tensor, lm_head: Tensor) -> None:
        super().__init__()
        h, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.shape = shape
        self.fc = nn.Linear(len(shape.layer_ids) * h, h, bias=False)
        self.midlayer = nn.ModuleDict(
            {
                "self_attn": nn.ModuleDict(
                    {
                        "q_proj": nn.Linear(2 * h, q, bias=False),
                        "k_proj": nn.Linear(2 * h, kv, bias=False),
                        "v_proj": nn.Linear(2 * h, kv, bias=False),
                        "o_proj": nn.Linear(q, h, bias=False),
                    }
                ),
                "mlp": nn.ModuleDict(
                    {
                        "gate_proj": nn.Linear(h, shape.intermediate, bias=False),
                        "up_proj": nn.Linear(h, shape.intermediate, bias=False),
                        "down_proj": nn.Linear(shape.intermediate, h, bias=False),
                    }
                ),
                "hidden_norm": nn.RMSNorm(h, shape.eps),
                "input_layernorm": nn.RMSNorm(h, shape.eps),
                "post_attention_layernorm": nn.RMSNorm(h, shape.eps),
            }
        )
        self.norm = nn.RMSNorm(h, shape.eps)
        self.lm_head = nn.Linear(h, lm_head.shape[0], bias=False)
        with torch.no_grad():
            # The target's norm makes its own hidden states into sharp logits: a head that knows nothing yet would begin
            # with confident nonsense and unlearn it for the first hundred steps.
            self.norm.weight.copy_(NORM_SCALE * norm)
            self.lm_head.weight.copy_(lm_head)
            self.fc.weight.mul_(0.1)

    def forward(self, entries: Tensor, embedded: Tensor, passes: int, rows: Tensor) -> Iterator[Tensor]:
        """Return logits `[R, Vd]` of each pass, for the R rows that are set in `rows` `[B, N]`. `entries` `[B, N, L *
        H]` are hidden states of the target at N positions, `embedded` `[B, N, H]` the embeddings of the tokens after
        them. Row i of pass j is valid for i >= j."""
        n = entries.shape[1]
        cos, sin = rotary_angles(n, self.shape.head_dim, self.shape.theta, entries.device)
        layer: Any = self.midlayer
        attn, mlp = layer["self_attn"], layer["mlp"]
        tokens = layer["input_layernorm"](embedded)
        hidden = self.fc(entries)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for j in range(passes):
            if j:  # what the pass before left at the position before
                hidden = hidden.roll(1, dims=1)
            x = torch.cat((tokens, layer["hidden_norm"](hidden)), dim=-1)
            q, k, v = (self._split(attn[f"{name}_proj"](x)) for name in "qkv")
            q, k = rotate_half(q, cos, sin), rotate_half(k, cos, sin)
            repeats = self.shape.heads // self.shape.kv_heads
            keys.append(k.repeat_interleave(repeats, dim=1))
            values.append(v.repeat_interleave(repeats, dim=1))
            attended = attend(q, keys, values)
            hidden = hidden + attn["o_proj"](attended.transpose(1, 2).flatten(2))
            y = layer["post_attention_layernorm"](hidden)
            hidden = hidden + mlp["down_proj"](silu(mlp["gate_proj"](y)) * mlp["up_proj"](y))
            yield self.lm_head(self.norm(hidden)[rows])

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)


def rotary_angles(n: int, size: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[n, size / 2]` of RoPE for `size` features at positions 0 to n - 1."""
    exponents = torch.arange(0, size, 2, device=device) / size
    angles = torch.arange(n, device=device).view(-1, 1) / theta**exponents
    return angles.cos(), angles.sin()


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs of features i and i + D / 2 of `x` `[..., n, D]`, in fp32."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def attend(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attend from the rows of the newest pass j. Row i attends what a draft at depth j finds: rows 0..i-j of the first
    pass, row i - j + s of pass s."""
    j, scale = len(keys) - 1, q.shape[-1] ** -0.5
    n = q.shape[2]
    behind = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1 - j)
    behind[:j, 0] = False  # rows that mean nothing attend something
    scores = [(q @ keys[0].float().transpose(-1, -2) * scale).masked_fill(behind, -torch.inf)]
    pairs = zip(keys, values, strict=True)
    later = [(k.roll(j - s, dims=2), v.roll(j - s, dims=2)) for s, (k, v) in enumerate(pairs) if s]
    scores += [(q * k).sum(-1, keepdim=True) * scale for k, _ in later]
    weights = torch.cat(scores, dim=-1).softmax(dim=-1)
    out = weights[..., :n] @ values[0].float()
    for at, (_, v) in enumerate(later):
        out = out + weights[..., n + at : n + at + 1] * v
    return out


def load_target(source: Path, device: torch.device) -> Any:
    """Load transformers' module in fp32, also of a GGUF file, whose weights transformers would leave packed."""
    if source.suffix != ".gguf":
        return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval().to(device)
    from specrs.arrays import FLOAT32
    from specrs.models.gguf.checkpoint import GGUFCheckpoint
    from specrs.models.gguf.config import raw_config

    checkpoint = GGUFCheckpoint(source)
    raw = raw_config(checkpoint.file)
    kind = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
    config = AutoConfig.for_model(kind[raw["architectures"][0]], **raw)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, weight in model.state_dict().items():
        if name in checkpoint:
            weight.copy_(torch.from_numpy(checkpoint.read(name, FLOAT32)))
        elif not (name == "lm_head.weight" and config.tie_word_embeddings):
            raise SystemExit(f"{source}: {name} is missing")
    return model


def make_optimizers(head: Head, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """AdamW for all, or Muon (Jordan 2024; Liu et al. 2025) for matrices that are not the LM head."""
    betas = (0.9, 0.95)
    if args.optimizer == "adamw":
        return [torch.optim.AdamW(head.parameters(), lr=args.lr, betas=betas, weight_decay=0.01)]
    matrices = [p for name, p in head.named_parameters() if p.ndim == 2 and not name.startswith("lm_head")]
    rest = [p for name, p in head.named_parameters() if p.ndim != 2 or name.startswith("lm_head")]
    muon = torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(rest, lr=REST_LR, betas=betas, weight_decay=0.01)]


class States:
    """Hidden states and choices of the target for each sequence, in bf16 in two files that grow as sequences are first
    read; or nothing."""

    def __init__(self, folder: Path | None, shape: tuple[int, int], width: int) -> None:
        self.hidden: Tensor | None = None
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        sequences, length = shape

        def file(name: str, size: int, dtype: torch.dtype) -> Tensor:
            return torch.from_file(str(folder / name), shared=True, size=sequences * size, dtype=dtype)

        self.hidden = file("hidden", length * width, torch.bfloat16).view(sequences, length, width)
        self.chosen = file("chosen", length, torch.int32).view(sequences, length)
        """Ids and 1; 0: not read yet"""

    def read(self, at: Tensor, length: int) -> tuple[Tensor, Tensor] | None:
        """Return hidden states and ids of the first `length` tokens of sequences `at`; None if not all of these were
        written."""
        if self.hidden is None or not bool((self.chosen[at, 0] > 0).all()):
            return None
        return self.hidden[at, :length], (self.chosen[at, :length] - 1).long()

    def write(self, at: Tensor, hidden: Tensor, chosen: Tensor) -> None:
        """Store hidden states and ids of sequences `at`. The ids are written last: they mark the other values as
        complete."""
        if self.hidden is not None:
            length = hidden.shape[1]
            self.hidden[at, :length] = hidden.to("cpu", torch.bfloat16)
            self.chosen[at, :length] = chosen.to("cpu", torch.int32) + 1


class Trainer:
    """A head, its optimizer, and the target that it learns from."""

    def __init__(self, args: argparse.Namespace, text: Text) -> None:
        torch.manual_seed(0)
        self.args, self.device = args, torch.device(args.device)
        self.target: Any = load_target(args.target, self.device).requires_grad_(False)
        c = self.target.config
        n = c.num_hidden_layers
        self.shape = Shape(
            hidden=c.hidden_size,
            intermediate=args.intermediate_size or c.intermediate_size,
            heads=args.num_heads or c.num_attention_heads,
            kv_heads=args.num_kv_heads or c.num_key_value_heads,
            head_dim=args.head_dim or getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
            eps=c.rms_norm_eps,
            theta=args.rope_theta,
            layer_ids=sorted(set(args.layers or (2, n // 2, n - 3))),
        )
        held_out = max(1, int(len(text) * HELD_OUT))
        self.text, self.learned = text, len(text) - held_out
        folder = args.out / "states" if args.keep_states else None
        self.states = States(folder, tuple(text.ids.shape), (len(self.shape.layer_ids) + 1) * c.hidden_size)
        self.kept = self.frequent_ids(args.draft_vocab_size or c.vocab_size, c.vocab_size)
        self.is_kept = torch.zeros(c.vocab_size, dtype=torch.bool).index_fill_(0, self.kept, True).to(self.device)
        self.kept_here = self.kept.to(self.device)
        self.target_rows = self.target.lm_head.weight[self.kept_here] / getattr(c, "logits_scaling", 1.0)
        self.head = Head(self.shape, self.target.model.norm.weight, self.target_rows).to(self.device)
        self.optimizers = make_optimizers(self.head, args)
        self.step = 0

    def frequent_ids(self, size: int, vocab: int) -> Tensor:
        """Return the most frequent ids of the text, ascending."""
        ids, lengths = self.text.ids[: self.learned], self.text.lengths[: self.learned]
        real = torch.arange(ids.shape[1]) < lengths.unsqueeze(1)
        counts = torch.bincount(ids[real].long(), minlength=vocab)
        kept = counts.sort(descending=True, stable=True).indices[:size].sort().values
        print(f"{size} ids cover {counts[kept].sum() / counts.sum():.2%} of the text")
        return kept

    def read_target(self, at: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the target's results for ids `[B, T]`, the sequences `at` `[B]`: hidden states `[B, T, L * H + H]` at
        the entries of the layers and after the final norm, and its chosen ids `[B, T]`."""
        found = self.states.read(at, ids.shape[1])
        if found is None:
            with torch.no_grad(), self.autocast():
                out = self.target(ids, output_hidden_states=True, use_cache=False)
                hidden = torch.cat([out.hidden_states[i] for i in (*self.shape.layer_ids, -1)], dim=-1)
                found = hidden, out.logits.argmax(dim=-1)
            self.states.write(at, *found)
        return found[0].to(self.device).float(), found[1].to(self.device)

    def losses(self, at: Tensor) -> tuple[Tensor, list[tuple[int, int]]]:
        """Return the loss of the sequences `at` `[B]`, and for each pass (right, rows), of the rows at which earlier
        passes were right."""
        lengths = self.text.lengths[at]
        ids = self.text.ids[at, : int(lengths.max())].to(self.device).long()
        hidden, best = self.read_target(at, ids)
        entries, last = hidden[:, :-1, : -self.shape.hidden], hidden[:, 1:, -self.shape.hidden :]
        best = best[:, 1:]  # row i of the head is about position i + 2, as row i + 1 of the target
        row = torch.arange(ids.shape[1] - 1, device=self.device).expand(len(at), -1)
        real = row + 1 < lengths.to(self.device).unsqueeze(1)
        rows = real & self.is_kept[best]  # the others' choice cannot be drafted
        with torch.no_grad(), self.autocast():
            wanted = (last[rows] @ self.target_rows.T).float().softmax(dim=-1)
            embedded = self.target.get_input_embeddings()(ids[:, 1:]).float()
        loss, right_before, counts = torch.zeros((), device=self.device), real, []
        with self.autocast():
            for j, found in enumerate(self.head(entries, embedded, self.args.passes, rows)):
                terms = cross_entropy(found.float(), wanted, reduction="none")
                loss = loss + DECAY**j * terms[row[rows] >= j].mean()
                right = torch.zeros_like(real)
                right[rows] = self.kept_here[found.argmax(dim=-1)] == best[rows]
                if j:  # row i drafts behind row i - 1 of the pass before
                    right_before = right_before.roll(1, dims=1) & real & (row >= j)
                counts.append((int((right & right_before).sum()), int(right_before.sum())))
                right_before = right_before & right
        return loss, counts

    def sequences(self, step: int) -> Tensor:
        """Return the indices `[B]` of the sequences for step `step`: all of the text once in a random order, before any
        sequence twice."""
        first = step * self.args.batch_size
        epochs = range(first // self.learned, (first + self.args.batch_size - 1) // self.learned + 1)
        drawn = [torch.randperm(self.learned, generator=torch.Generator().manual_seed(epoch)) for epoch in epochs]
        start = first - epochs[0] * self.learned
        return torch.cat(drawn)[start : start + self.args.batch_size]

    def autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.args.bf16)

    def train(self, state: Path) -> None:
        """Take the steps that are left; writes `state` every minute."""
        args = self.args
        if state.exists():
            kept = torch.load(state, weights_only=True, map_location=self.device)
            self.head.load_state_dict(kept["head"])
            for optimizer, state_dict in zip(self.optimizers, kept["optimizers"], strict=True):
                optimizer.load_state_dict(state_dict)
            self.step = kept["step"]
        total, saved = args.steps, time.monotonic()
        shown = 0.0
        with tqdm(total=total, initial=self.step, desc="Training", unit="step", mininterval=5) as bar:
            while self.step < total:
                warm, done = min(1.0, (self.step + 1) / 30), self.step / total
                for optimizer in self.optimizers:
                    for group in optimizer.param_groups:
                        highest = group.setdefault("highest_lr", group["lr"])
                        group["lr"] = highest * warm * (0.95 * 0.5 * (1 + math.cos(math.pi * done)) + 0.05)
                loss, _ = self.losses(self.sequences(self.step))
                self.head.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
                for optimizer in self.optimizers:
                    optimizer.step()
                self.step += 1
                shown = loss.item() if shown == 0 else 0.98 * shown + 0.02 * loss.item()
                bar.update()
                bar.set_postfix(loss=f"{shown:.3f}", refresh=False)
                if time.monotonic() - saved > 60 or self.step == total:
                    kept = {
                        "head": self.head.state_dict(),
                        "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                        "step": self.step,
                    }
                    save(state, lambda path, kept=kept: torch.save(kept, path))
                    saved = time.monotonic()

    @torch.no_grad()
    def evaluate(self) -> list[float]:
        """Return for each pass how often its draft is the target's choice on unseen text, given that earlier ones
        were."""
        sums = [[0, 0] for _ in range(self.args.passes)]
        for at in torch.arange(self.learned, len(self.text)).split(self.args.batch_size):
            _, counts = self.losses(at)
            for total, (right, rows) in zip(sums, counts, strict=True):
                total[0] += right
                total[1] += rows
        return [right / max(1, rows) for right, rows in sums]

    def write(self, folder: Path) -> None:
        """Write the head as a checkpoint, and read it with this package's loader as a check."""
        s, vocab = self.shape, self.target.config.vocab_size
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "attention_bias": False,
            "draft_vocab_size": len(self.kept),
            "dtype": "bfloat16",
            "eagle_aux_hidden_state_layer_ids": s.layer_ids,
            "head_dim": s.head_dim,
            "hidden_act": "silu",
            "hidden_size": s.hidden,
            "intermediate_size": s.intermediate,
            "max_position_embeddings": self.target.config.max_position_embeddings,
            "mlp_bias": False,
            "num_attention_heads": s.heads,
            "num_hidden_layers": 1,
            "num_key_value_heads": s.kv_heads,
            "rms_norm_eps": s.eps,
            "rope_theta": s.theta,
            "tie_word_embeddings": False,
            "vocab_size": vocab,
        }
        n = self.target.config.num_hidden_layers
        if s.layer_ids == sorted({2, n // 2, n - 3}):
            del config[
                "eagle_aux_hidden_state_layer_ids"
            ]  # what it means differs between engines; the default's does not
        tensors = {k: v.to(torch.bfloat16).contiguous().cpu() for k, v in self.head.state_dict().items()}
        tensors["d2t"] = self.kept - torch.arange(len(self.kept))
        tensors["t2d"] = self.is_kept.cpu()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

        from specrs.backends.cpu.eagle3 import load_eagle3
        from specrs.models.torch_loader import load_model

        load_eagle3(folder, load_model(self.args.target, dtype="float32"))


def main() -> None:
    """Take the steps that are left."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--target", type=Path, default=BUNDLED, help="checkpoint folder; default: the bundled target")
    add("--out", type=Path, required=True, help="folder for text, state and head")
    add("--prompts", type=Path, help="file of prompts; default: the Python standard library")
    add("--chats", action="store_true", help="prompts are chats whose user turns the target writes")
    add("--num-prompts", type=int, default=4096, help="default: 4096")
    add("--num-plain", type=int, default=4096, help="pieces of the prompts' text, not continued; default: 4096")
    add("--prompt-tokens", type=int, default=64, help="the most of a prompt; default: 64")
    add("--new-tokens", type=int, default=192, help="the most of a continuation; default: 192")
    add("--temperature", type=float, nargs="+", default=[0.0, 1.0], help="of continuations, in turn; default: 0 1")
    add("--concurrency", type=int, default=64, help="continuations at a time; default: 64")
    add("--layers", type=int, nargs="+", help="target layers whose entry is read; default: 2, n / 2 and n - 3")
    add("--draft-vocab-size", type=int, help="ids that are drafted, the most frequent; default: all")
    add("--intermediate-size", type=int, help="default, as of the next three: the target's")
    add("--num-heads", type=int)
    add("--num-kv-heads", type=int)
    add("--head-dim", type=int)
    add("--rope-theta", type=float, default=10000.0, help="default: 10000")
    add("--passes", type=int, default=5, help="passes that a step unrolls; default: 5")
    add("--steps", type=int, default=3000, help="default: 3000")
    add("--batch-size", type=int, default=8, help="sequences of a step; default: 8")
    add("--lr", type=float, default=1e-3, help="the highest learning rate; default: 1e-3")
    add("--optimizer", choices=("adamw", "muon"), default="adamw", help="muon learns from less text; default: adamw")
    add("--bf16", action="store_true", help="products in bf16")
    add("--keep-states", action="store_true", help="run the target once over each sequence, and keep what it made")
    add("--device", default="cpu", help="cpu or cuda; default: cpu")
    args = parser.parse_args()
    if args.chats:
        if args.prompts is not None:
            parser.error("--chats: the target writes the prompts; allowed: without --prompts")
        args.out.mkdir(parents=True, exist_ok=True)
        args.prompts = args.out / "chats.jsonl"
        write_chats(args, args.prompts)
    text = write_text(args, args.out / "text")
    trainer = Trainer(args, text)
    trainer.train(args.out / "state.pt")
    rates = trainer.evaluate()
    print("right where those before were, by pass:", " ".join(f"{rate:.3f}" for rate in rates))
    length = 1 + sum(math.prod(rates[: i + 1]) for i in range(len(rates)))
    print(f"expected acceptance length at K = {len(rates)}: {length:.2f}")
    trainer.write(args.out / "head")
    print(f"written to {args.out / 'head'}")


if __name__ == "__main__":
    main()
