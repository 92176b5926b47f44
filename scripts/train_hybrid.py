"""Train the bundled hybrid with its MTP head from the sources of the Python standard library.

    python scripts/train_hybrid.py --out build/hybrid                          # everything
    python scripts/train_hybrid.py --out build/hybrid target --minutes 40

`--out` then holds `model/` as `python/specrs/pair/hybrid` does. The tokenizer is the bundled target's. The last 2 % of
the token stream is never trained on. A minute of work is lost at most: the same command goes on where it ended.

1. `target` trains the target and the head in one graph. The loss is the target's cross entropy and 0.3 of the head's.
   The head reads the target's state after the final norm, and the embedding of the next token.
2. `head` trains the head alone, on the target's own distribution, for three passes. The first pass reads the target's
   states, each later pass what the pass before left, as in drafting.
3. `write` writes the checkpoint, reads it with specrs, and measures acceptance lengths on held-out text.

`--compile` halves the time of a step. It needs a C++ compiler. The schedule follows the clock, so a second run gives an
equally good model, not the same bits.

The bundled hybrid had 44 minutes for the target and 18 for the head on a busy core, 1,723 and 1,075 steps. On held-out
text its losses are 2.48 (target) and 2.51 (head). Its acceptance lengths there (greedy, fp32) are 1.92 / 2.72 / 3.49 /
4.12 at K = 1 / 2 / 3 / 4. Before the stage `head` they were 1.89 / 2.54 / 3.14 / 3.53.
"""

from __future__ import annotations

import argparse
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from eagle3_text import save
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention, silu, softplus
from train_eagle3 import attend, rotary_angles, rotate_half
from train_pair import BATCH, HELD_OUT, SEQ_LEN, encode, read_texts
from transformers import Qwen3_5TextConfig

BUNDLED = Path(__file__).parents[1] / "python" / "specrs" / "pair" / "target"
MINUTES = {"target": 40.0, "head": 20.0}
CHUNK = 32
"""Tokens per chunk of the delta rule. Divides SEQ_LEN."""
PASSES, DECAY = 3, 0.8
"""Passes of the head in the stage `head`, and the weight of each pass relative to the one before."""
MTP_WEIGHT = 0.3
MUON_LR, REST_LR = 4e-3, 3e-3
"""Highest learning rates of matrices, and of embeddings, norms, convolutions and decays."""
EPS = 1e-6

CONFIG = Qwen3_5TextConfig(
    architectures=["Qwen3_5ForCausalLM"],
    vocab_size=2048,
    hidden_size=192,
    intermediate_size=352,
    num_hidden_layers=8,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=64,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    linear_conv_kernel_dim=4,
    max_position_embeddings=2048,
    rms_norm_eps=EPS,
    rope_parameters={
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [4, 2, 2],
    },
    tie_word_embeddings=True,
    mtp_num_hidden_layers=1,
    bos_token_id=None,
    eos_token_id=0,
    pad_token_id=0,
    dtype="bfloat16",
)
"""config.json. There are fewer key heads than value heads, so a mistake in the order of heads shows."""


def in_bf16() -> Any:
    """Context in which products are in bf16."""
    return torch.autocast("cpu", torch.bfloat16)


def linear(size_in: int, size_out: int) -> nn.Linear:
    """Projection without a bias."""
    return nn.Linear(size_in, size_out, bias=False)


def rms_normed(x: Tensor) -> Tensor:
    """Return `x` in fp32 divided by the root of its mean square."""
    x = x.float()
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()


class Norm(nn.Module):
    """RMS norm whose weight is stored without its 1."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return rms_normed(x) * (1 + self.weight)


class GatedNorm(nn.Module):
    """RMS norm of a delta net's heads, multiplied by the silu of `gate`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return rms_normed(x) * self.weight * silu(gate.float())


def delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Gated delta rule over chunks (Yang et al. 2025, "Gated Delta Networks"), all in fp32, from a state of zeros.

    `q`, `k`, `v`: `[B, H, T, D]`; `log_decay` and `beta`: `[B, H, T]`. Returns `[B, H, T, D]`.
    """
    b, h, t, d = v.shape
    n = t // CHUNK
    q, k, v = (x.reshape(b, h, n, CHUNK, d) for x in (q, k, v))
    beta = beta.reshape(b, h, n, CHUNK, 1)
    total = log_decay.reshape(b, h, n, CHUNK).cumsum(-1)
    between = (total[..., :, None] - total[..., None, :]).clamp(max=0).exp().tril()
    since = total.exp()[..., None]
    weighted = k * beta
    # What each row adds to the state depends on what the rows before it added: a triangular system per chunk.
    system = weighted @ k.transpose(-1, -2) * between
    sides = torch.cat((v * beta, weighted * since), dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    values, keys = solved.split(d, dim=-1)
    within = q @ k.transpose(-1, -2) * between
    q, k = q * since, (k * (total[..., -1:] - total).exp()[..., None]).transpose(-1, -2)
    kept = since[..., -1:, :]
    state, out = v.new_zeros(b, h, d, d), []
    for q_i, k_i, values_i, keys_i, within_i, kept_i in zip(
        *(x.unbind(2) for x in (q, k, values, keys, within, kept)), strict=True
    ):
        added = values_i - keys_i @ state
        out.append(q_i @ state + within_i @ added)
        state = state * kept_i + k_i @ added
    return torch.stack(out, dim=2).view(b, h, t, d)


class DeltaNet(nn.Module):
    """Gated delta net, with the names of a checkpoint."""

    def __init__(self, c: Qwen3_5TextConfig) -> None:
        super().__init__()
        self.head_dim = c.linear_value_head_dim
        self.key_heads, self.value_heads = c.linear_num_key_heads, c.linear_num_value_heads
        keys, values = self.key_heads * self.head_dim, self.value_heads * self.head_dim
        self.sizes = [keys, keys, values]
        self.in_proj_qkv = linear(c.hidden_size, sum(self.sizes))
        self.in_proj_z = linear(c.hidden_size, values)
        self.in_proj_b = linear(c.hidden_size, self.value_heads)
        self.in_proj_a = linear(c.hidden_size, self.value_heads)
        width = c.linear_conv_kernel_dim
        self.conv1d = nn.Conv1d(sum(self.sizes), sum(self.sizes), width, groups=sum(self.sizes), bias=False)
        # The decays of Mamba 2 at the start: exp(-A dt) with A up to 16 and dt from 0.001 to 0.1.
        dt = torch.empty(self.value_heads).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias = nn.Parameter(dt + (-torch.expm1(-dt)).log())
        self.A_log = nn.Parameter(torch.empty(self.value_heads).uniform_(0.01, 16).log())
        self.norm = GatedNorm(self.head_dim)
        self.out_proj = linear(values, c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        weight, tokens = self.conv1d.weight[:, 0], x.shape[1]
        width = weight.shape[1]
        rows = pad(self.in_proj_qkv(x).float(), (0, 0, width - 1, 0))
        mixed = silu(sum(rows[:, j : j + tokens] * weight[:, j] for j in range(width)))
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in mixed.split(self.sizes, dim=-1))
        q, k = (y * (y.square().sum(-1, keepdim=True) + EPS).rsqrt() for y in (q, k))
        shared = self.value_heads // self.key_heads
        q, k = ((y * scale).repeat_interleave(shared, dim=1) for y, scale in ((q, self.head_dim**-0.5), (k, 1.0)))
        beta = self.in_proj_b(x).float().sigmoid().transpose(1, 2)
        decay = (-self.A_log.exp() * softplus(self.in_proj_a(x).float() + self.dt_bias)).transpose(1, 2)
        torch._dynamo.graph_break()  # in one graph with what is above, torch 2.15 compiles gradients that are NaN
        with torch.autocast("cpu", enabled=False):
            out = delta_rule(q, k, v, decay, beta)
        gate = self.in_proj_z(x).unflatten(-1, (-1, self.head_dim))
        return self.out_proj(self.norm(out.transpose(1, 2), gate).flatten(2))


class Attention(nn.Module):
    """Gated attention, with the names of a checkpoint."""

    def __init__(self, c: Qwen3_5TextConfig) -> None:
        super().__init__()
        self.head_dim, self.theta = c.head_dim, c.rope_parameters["rope_theta"]
        self.rotary_dim = int(c.head_dim * c.rope_parameters["partial_rotary_factor"])
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj, self.o_proj = linear(c.hidden_size, 2 * q), linear(q, c.hidden_size)
        self.k_proj, self.v_proj = linear(c.hidden_size, kv), linear(c.hidden_size, kv)
        self.q_norm, self.k_norm = Norm(c.head_dim), Norm(c.head_dim)

    def forward(self, x: Tensor, passes: list[tuple[Tensor, Tensor]] | None) -> Tensor:
        """Attend the rows up to each row. With `passes` (keys and values of a head's earlier passes), attend to these
        too, as `train_eagle3.attend` does, and append this pass's."""
        q, gate = self.q_proj(x).unflatten(-1, (-1, 2, self.head_dim)).unbind(-2)
        k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.k_proj, self.v_proj))
        cos, sin = rotary_angles(x.shape[1], self.rotary_dim, self.theta, x.device)
        q, k = (rotated(norm(y).transpose(1, 2), cos, sin) for norm, y in ((self.q_norm, q), (self.k_norm, k)))
        v = v.transpose(1, 2)
        if passes is None:
            out = scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True, enable_gqa=True)
        else:
            passes.append((k, v.float()))
            keys, values = ([y.expand_as(q) for y in ys] for ys in zip(*passes, strict=True))
            with torch.autocast("cpu", enabled=False):
                out = attend(q, keys, values)
        return self.o_proj((out.transpose(1, 2) * gate.sigmoid()).flatten(2))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `x` `[..., T, D]` with as many of its first features rotated as there are angles."""
    size = 2 * cos.shape[-1]
    return torch.cat((rotate_half(x[..., :size], cos, sin), x[..., size:]), dim=-1)


class MLP(nn.Module):
    """MLP with a silu gate."""

    def __init__(self, c: Qwen3_5TextConfig) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (linear(c.hidden_size, c.intermediate_size) for _ in range(2))
        self.down_proj = linear(c.intermediate_size, c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Layer with a delta net or with attention."""

    def __init__(self, c: Qwen3_5TextConfig, kind: str) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(c.hidden_size), Norm(c.hidden_size)
        self.is_full = kind == "full_attention"
        if self.is_full:
            self.self_attn = Attention(c)
        else:
            self.linear_attn = DeltaNet(c)
        self.mlp = MLP(c)

    def forward(self, x: Tensor, passes: list[tuple[Tensor, Tensor]] | None = None) -> Tensor:
        y = self.input_layernorm(x)
        x = x + (self.self_attn(y, passes) if self.is_full else self.linear_attn(y))
        return x + self.mlp(self.post_attention_layernorm(x))


class Target(nn.Module):
    """Decoder, with the names of a checkpoint after `model.`."""

    def __init__(self, c: Qwen3_5TextConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, kind) for kind in c.layer_types)
        self.norm = Norm(c.hidden_size)

    def forward(self, ids: Tensor) -> Tensor:
        """States `[B, T, H]` after the final norm."""
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Head(nn.Module):
    """MTP head, with the names of a checkpoint after `mtp.`."""

    def __init__(self, c: Qwen3_5TextConfig) -> None:
        super().__init__()
        self.fc = linear(2 * c.hidden_size, c.hidden_size)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = Norm(c.hidden_size), Norm(c.hidden_size)
        self.layers = nn.ModuleList([Layer(c, "full_attention")])
        self.norm = Norm(c.hidden_size)

    def forward(self, embedded: Tensor, hidden: Tensor, passes: list[tuple[Tensor, Tensor]] | None = None) -> Tensor:
        """States `[B, T, H]` for the second token after each position, of which `hidden` are the target's states and
        `embedded` the tokens after it. `passes` is that of `Attention`."""
        x = torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)), dim=-1)
        return self.norm(self.layers[0](self.fc(x), passes))


class Hybrid(nn.Module):
    """The target and its head, with all names of a checkpoint."""

    def __init__(self, c: Qwen3_5TextConfig) -> None:
        super().__init__()
        self.model, self.mtp = Target(c), Head(c)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                last = name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * c.num_hidden_layers) if last else 0.02)

    def logits(self, states: Tensor) -> Tensor:
        """Return logits of final states of the target or the head."""
        return nn.functional.linear(states, self.model.embed_tokens.weight).float()

    def both_losses(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cross entropies of the target and of the head's first pass on `ids` `[B, SEQ_LEN + 2]`."""
        with in_bf16():
            hidden = self.model(ids[:, :-2])
            left = self.mtp(self.model.embed_tokens(ids[:, 1:-1]), hidden)
            rows = ((hidden, ids[:, 1:-1]), (left, ids[:, 2:]))
            target, head = (cross_entropy(self.logits(states).flatten(0, 1), ids.flatten()) for states, ids in rows)
        return target, head

    def drafts(self, ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the logits of each pass and the target's for the same tokens, both `[B, N, V]`; `ids` are `[B, T]`. Row
        i of each pass belongs to the drafts that begin at position i + 2."""
        with in_bf16():
            with torch.no_grad():
                hidden = self.model(ids)
                known = self.logits(hidden[:, 1:])
                embedded = self.model.embed_tokens(ids[:, 1:])
            hidden, passes = hidden[:, :-1], []
            for j in range(PASSES):
                if j:  # what the pass before left at the position before
                    hidden = hidden.roll(1, dims=1)
                hidden = self.mtp(embedded, hidden, passes)
                yield self.logits(hidden[:, j:]), known[:, j:]

    def draft_loss(self, ids: Tensor) -> Tensor:
        """Cross entropies of all passes with the target's distribution on `ids` `[B, SEQ_LEN]`."""
        total = torch.zeros(())
        for j, (drafted, known) in enumerate(self.drafts(ids)):
            total = total - DECAY**j * (known.softmax(-1) * drafted.log_softmax(-1)).sum(-1).mean()
        return total


class Trainer:
    """The hybrid, the token stream, and the training state in `out`."""

    def __init__(self, out: Path, compiled: bool) -> None:
        torch.manual_seed(0)
        self.out, self.hybrid = out, Hybrid(CONFIG)
        if not (out / "tokens.npy").exists():
            np.save(out / "tokens.npy", encode(Tokenizer.from_file(str(BUNDLED / "tokenizer.json")), read_texts()))
        self.ids = torch.from_numpy(np.load(out / "tokens.npy").astype(np.int64))
        self.split = int(len(self.ids) * (1 - HELD_OUT))
        if compiled:
            for layer in self.hybrid.model.layers:
                layer.compile()
            self.hybrid.mtp.compile()

    def train(self, stage: str, minutes: float) -> None:
        """Train until all calls together have taken `minutes` minutes. Writes `stage.pt` every minute and reads it at
        the start."""
        if stage == "head":
            self.load("target")
            self.hybrid.model.requires_grad_(False)
        optimizers = make_optimizers(self.hybrid)
        state = self.load(stage)
        used, step = 0.0, 0
        if state is not None:
            used, step = state["used"], state["step"]
            for optimizer, kept in zip(optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(kept)
        saved = time.monotonic()
        start = saved - used
        shown: list[float] = []
        while (done := (time.monotonic() - start) / (minutes * 60)) < 1:
            warm = min(1.0, (step + 1) / 100)
            for optimizer, highest in zip(optimizers, (MUON_LR, REST_LR), strict=True):
                optimizer.param_groups[0]["lr"] = highest * warm * (0.98 * 0.5 * (1 + math.cos(math.pi * done)) + 0.02)
            ids = self.batch(step, SEQ_LEN + (2 if stage == "target" else 0))
            if stage == "target":
                losses = self.hybrid.both_losses(ids)
                loss = losses[0] + MTP_WEIGHT * losses[1]
            else:
                losses = (self.hybrid.draft_loss(ids),)
                loss = losses[0]
            self.hybrid.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.hybrid.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
            step += 1
            now = [value.item() for value in losses]
            shown = [0.98 * a + 0.02 * b for a, b in zip(shown, now, strict=True)] if shown else now
            if step % 50 == 0:
                print(f"{stage} step {step} loss {' '.join(f'{x:.3f}' for x in shown)} {done:.1%}", flush=True)
            if time.monotonic() - saved > 60:
                saved = time.monotonic()
                self.save(stage, optimizers, saved - start, step)
        self.save(stage, optimizers, time.monotonic() - start, step)

    def batch(self, step: int, length: int) -> Tensor:
        """Sequences `[BATCH, length]` of that step."""
        generator = torch.Generator().manual_seed(step)
        return torch.stack(
            [self.ids[at : at + length] for at in torch.randint(self.split - length, (BATCH,), generator=generator)]
        )

    def save(self, stage: str, optimizers: list[Any], used: float, step: int) -> None:
        """Write the state of a stage after `step` steps and `used` seconds."""
        state = {
            "hybrid": self.hybrid.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            "used": used,
            "step": step,
        }
        save(self.out / f"{stage}.pt", lambda path: torch.save(state, path))

    def load(self, stage: str) -> dict[str, Any] | None:
        """Take the weights of a stage, if there are any. Returns its state."""
        path = self.out / f"{stage}.pt"
        if not path.exists():
            return None
        state: dict[str, Any] = torch.load(path, weights_only=True)
        self.hybrid.load_state_dict(state["hybrid"])
        return state

    @torch.no_grad()
    def evaluate(self) -> None:
        """Print the target's loss on held-out text, and how often the draft of each pass is the target's choice where
        those before were."""
        rows = self.ids[self.split :]
        sequences = rows[: len(rows) // (SEQ_LEN + 2) * (SEQ_LEN + 2)].view(-1, SEQ_LEN + 2)
        losses, right, total = [], [0] * PASSES, [0] * PASSES
        for ids in sequences.split(BATCH):
            losses.append([float(loss) * len(ids) for loss in self.hybrid.both_losses(ids)])
            before = torch.ones(len(ids), SEQ_LEN - 1, dtype=torch.bool)
            for j, (drafted, known) in enumerate(self.hybrid.drafts(ids[:, :SEQ_LEN])):
                before = before[:, : drafted.shape[1]]
                total[j] += int(before.sum())
                before = before & (drafted.argmax(-1) == known.argmax(-1))
                right[j] += int(before.sum())
        target, head = (sum(column) / len(sequences) for column in zip(*losses, strict=True))
        print(f"held-out loss: target {target:.3f}, head {head:.3f}")
        print("right where those before were, by pass:", *(f"{a / b:.3f}" for a, b in zip(right, total, strict=True)))

    def write(self) -> Path:
        """Write the checkpoint, and return its folder."""
        folder = self.out / "model"
        folder.mkdir(exist_ok=True)
        CONFIG.save_pretrained(folder)
        for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(BUNDLED / name, folder / name)
        tensors = {
            # Qwen3.5 has these two in fp32.
            name: tensor.to(torch.float32 if name.endswith(("A_log", "linear_attn.norm.weight")) else torch.bfloat16)
            for name, tensor in self.hybrid.state_dict().items()
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def measure(self, folder: Path) -> None:
        """Print the acceptance length at each K: greedy continuations of held-out text by specrs."""
        from specrs import LLM, SamplingParams

        starts = torch.linspace(self.split, len(self.ids) - 64, 32).long()
        prompts = [{"prompt_token_ids": self.ids[at : at + 64].tolist()} for at in starts]
        params = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True)
        for k in range(1, 5):
            llm = LLM(str(folder), speculative_config={"num_speculative_tokens": k}, dtype="float32", max_model_len=256)
            llm.generate(prompts, params, use_tqdm=False)
            print(f"K = {k}: acceptance length {llm.stats().acceptance_length:.2f}")


def make_optimizers(hybrid: Hybrid) -> list[torch.optim.Optimizer]:
    """Return the optimizers: Muon (Jordan 2024; Liu et al. 2025) for the matrices of layers, AdamW for all other
    parameters."""
    trained = [(name, p) for name, p in hybrid.named_parameters() if p.requires_grad]
    matrices = {name: p for name, p in trained if p.ndim == 2 and min(p.shape) > 8 and "embed" not in name}
    rest = [p for name, p in trained if name not in matrices]
    return [
        torch.optim.Muon(matrices.values(), weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.01),
    ]


def main() -> None:
    """Run the stages that the command line names; all stages if it names none."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("what", nargs="?", choices=[*MINUTES, "write"], help="one step; default: all three")
    parser.add_argument("--out", type=Path, required=True, help="folder for the tokens, the training state and model/")
    parser.add_argument("--minutes", type=float, help="training time; default 40 for the target, 20 for the head")
    parser.add_argument("--threads", type=int, default=1, help="default: 1")
    parser.add_argument("--compile", action="store_true", help="compile the layers")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    for stage in MINUTES:
        if args.what in (None, stage):
            Trainer(args.out, args.compile).train(stage, args.minutes or MINUTES[stage])
    if args.what in (None, "write"):
        trainer = Trainer(args.out, compiled=False)
        if trainer.load("head") is None and trainer.load("target") is None:
            parser.error(f"--out={args.out}: nothing is trained there")
        trainer.evaluate()
        trainer.measure(trainer.write())


if __name__ == "__main__":
    main()
