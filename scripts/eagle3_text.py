"""Makes the training text of `train_eagle3.py`: prompts, chats whose user turns the target writes, and its answers to
them.

Each step is resumed where it was left. Trains nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

HELD_OUT = 0.02
"""Share of the text, at its end, that is kept for evaluation and not trained on."""
PART = 256
"""Number of prompts that are continued together, and kept in one file."""
CHAT_TOKENS = 96
"""Maximum number of tokens of a user turn; longer turns are dropped."""


@dataclass(frozen=True)
class Text:
    """Sequences of ids, padded at the end."""

    ids: Tensor
    """Ids, [S, T] int32."""
    lengths: Tensor
    """Length of each sequence, [S] int32."""

    def __len__(self) -> int:
        return len(self.ids)


def read_prompts(args: argparse.Namespace, tokenizer: Any, count: int, size: int) -> list[list[int]]:
    """Return `count` prompts as ids, at most `size` tokens each. For the same size, the first prompts are the same for
    any count."""
    rng = random.Random(0)
    if args.prompts is not None:
        lines = [line for line in args.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
        texts = [json.loads(line)["prompt"] if line.startswith("{") else line for line in lines]
        prompts = [ids[-size:] for ids in map(tokenizer.encode, texts) if ids]
        return [prompts[i % len(prompts)] for i in range(count)]
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "test", "tests", "idlelib"}
    files = sorted(p for p in root.rglob("*.py") if not skip & set(p.relative_to(root).parts))
    rng.shuffle(files)
    texts = [p.read_text(encoding="utf8", errors="ignore") for p in files]
    stream = [i for ids in map(tokenizer.encode, texts) for i in [tokenizer.eos_token_id, *ids]]
    end = int(len(stream) * (1 - HELD_OUT)) - size
    return [stream[at : at + size] for at in (rng.randrange(end) for _ in range(count))]


def load_engine(args: argparse.Namespace, length: int) -> Any:
    """Return an engine of specrs for the target."""
    from specrs import LLM

    dtype = "bfloat16" if args.bf16 else "auto"
    return LLM(
        str(args.target), max_model_len=length, max_num_seqs=args.concurrency, device=args.device, dtype=dtype,
        cpu_activations="bf16" if args.bf16 and args.device == "cpu" else "auto",
    )  # fmt: skip


def write_chats(args: argparse.Namespace, path: Path) -> None:
    """Let the target generate user turns, and write the chats with one such turn as prompts, one JSON object per
    line."""
    from specrs import SamplingParams

    llm = load_engine(args, args.prompt_tokens)
    chat = llm.tokenizer.render_chat([{"role": "user", "content": "\0"}])
    before = llm.tokenizer.encode(chat.partition("\0")[0], add_special_tokens=False)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    with path.open("a", encoding="utf-8") as file, tqdm(total=args.num_prompts, desc="Chats", unit="chat") as bar:
        bar.update(len(lines))
        seed = len(lines)
        while len(lines) < args.num_prompts:
            params = [SamplingParams(temperature=1.0, max_tokens=CHAT_TOKENS, seed=seed + i) for i in range(PART)]
            outputs = llm.generate([{"prompt_token_ids": before}] * PART, params, use_tqdm=False)
            ended = [out.outputs[0] for out in outputs if out.outputs[0].finish_reason == "stop"]
            turns = [turn for out in ended if (turn := out.text.strip())]
            if not turns:
                raise SystemExit(f"{args.target} ended none of {PART} user turns within {CHAT_TOKENS} tokens")
            prompts = [llm.tokenizer.render_chat([{"role": "user", "content": turn}]) for turn in turns]
            found = [json.dumps({"prompt": prompt}) for prompt in prompts][: args.num_prompts - len(lines)]
            file.writelines(f"{line}\n" for line in found)
            file.flush()
            lines += found
            seed += PART
            bar.update(len(found))


def write_text(args: argparse.Namespace, folder: Path) -> Text:
    """Let the target continue the prompts, `PART` at a time, and keep each part in a file."""
    from specrs.tokenizer import Tokenizer

    tokenizer = Tokenizer(str(args.target))
    prompts = read_prompts(args, tokenizer, args.num_prompts, args.prompt_tokens)
    length = args.prompt_tokens + args.new_tokens
    folder.mkdir(parents=True, exist_ok=True)
    starts = range(0, len(prompts), PART)
    missing = [at for at in starts if not (folder / f"{at}.safetensors").exists()]
    if missing:
        from specrs import SamplingParams

        llm = load_engine(args, length)
        with tqdm(
            total=len(prompts), initial=max(0, len(prompts) - len(missing) * PART), desc="Text", unit="prompt"
        ) as bar:
            for at in missing:
                part = prompts[at : at + PART]
                params = [
                    SamplingParams(temperature=args.temperature[i % len(args.temperature)], max_tokens=args.new_tokens)
                    for i in range(len(part))
                ]
                outputs = llm.generate([{"prompt_token_ids": ids} for ids in part], params, use_tqdm=False)
                rows = [[*ids, *out.outputs[0].token_ids] for ids, out in zip(part, outputs, strict=True)]
                ids, lengths = pad(rows, length)
                save(
                    folder / f"{at}.safetensors",
                    lambda path, a=ids, b=lengths: save_file({"ids": a, "lengths": b}, path),
                )
                bar.update(len(part))
    parts = [load_file(folder / f"{at}.safetensors") for at in starts]
    plain = pad(read_prompts(args, tokenizer, args.num_plain, length), length)
    written = [(part["ids"], part["lengths"]) for part in parts]
    return Text(*map(torch.cat, zip(plain, *written, strict=True)))


def pad(rows: list[list[int]], length: int) -> tuple[Tensor, Tensor]:
    """Return ids `[S, T]`, padded with zeros, and lengths `[S]`."""
    ids = torch.zeros(len(rows), length, dtype=torch.int32)
    for row, found in zip(ids, rows, strict=True):
        row[: len(found)] = torch.tensor(found, dtype=torch.int32)
    return ids, torch.tensor([len(found) for found in rows], dtype=torch.int32)


def save(path: Path, write: Any) -> None:
    """Write a file with `write(path)`, so that it exists whole or not at all: it is written under another name and then
    renamed."""
    partial = path.with_name(path.name + ".partial")
    write(partial)
    partial.rename(path)
