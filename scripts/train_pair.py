"""Train the bundled pair again from the sources of the Python standard library (CPU, about 45 minutes on two cores).

    python scripts/train_pair.py --out build/pair                  # everything: tokenizer, target, draft
    python scripts/train_pair.py --out build/pair draft --minutes 12

`--out` then holds `target/` and `draft/` as `python/specrs/pair` does, and the token stream that they were trained on.
Both are Qwen3ForCausalLM with one byte-level BPE tokenizer; the last 2 % of the stream is never trained on.

The schedule follows the clock, so a second run gives an equally good pair, not the same bits. The bundled one has
validation losses 2.99 (target) and 3.39 (draft), and on held-out text (greedy, fp32) acceptance lengths
1.75 / 2.65 / 3.36 / 3.55 at K = 1 / 3 / 5 / 7. `train_hybrid.py` trains the bundled hybrid on the same text.
"""

import argparse
import json
import math
import random
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCAB, SEQ_LEN, BATCH, HELD_OUT = 2048, 256, 8, 0.02
END = "<|endoftext|>"
CHAT_TEMPLATE = "{{ messages | map(attribute='content') | join('\\n') }}"
SHAPES = {
    "target": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "draft": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
}
MINUTES = {"target": 30.0, "draft": 12.0}


def read_texts() -> list[str]:
    """Return sources of the Python standard library, in a fixed order that mixes its packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "test", "tests", "idlelib"}
    files = sorted(p for p in root.rglob("*.py") if not skip & set(p.relative_to(root).parts))
    random.Random(0).shuffle(files)
    return [p.read_text(encoding="utf8", errors="ignore") for p in files]


def make_tokens(out: Path) -> None:
    """Write `tokenizer.json` and the token stream `tokens.npy`."""
    texts = read_texts()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(out / "tokenizer.json"))
    np.save(out / "tokens.npy", encode(tokenizer, texts))


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Return the token stream of `texts` as uint16. Each text starts with the end token."""
    return np.array([i for text in texts for i in [0, *tokenizer.encode(text).ids]], dtype=np.uint16)


def train(name: str, out: Path, minutes: float) -> None:
    """Train one of the two on `tokens.npy` for that many minutes and save it as a checkpoint folder `out/name`."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        rope_theta=1e4,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        **SHAPES[name],
    )
    model = Qwen3ForCausalLM(config)
    ids = torch.from_numpy(np.load(out / "tokens.npy").astype(np.int64))
    split = int(len(ids) * (1 - HELD_OUT))
    rng = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    start, step = time.time(), 0
    while (done := (time.time() - start) / (minutes * 60)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, step / 100) * (0.95 * 0.5 * (1 + math.cos(math.pi * done)) + 0.05)
        at = torch.randint(0, split - SEQ_LEN - 1, (BATCH,), generator=rng)
        x = torch.stack([ids[i : i + SEQ_LEN + 1] for i in at])
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(x[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 100 == 0:
            print(f"{name} step {step} loss {loss.item():.3f} {done:.0%}", flush=True)
    model.to(torch.bfloat16).save_pretrained(out / name)
    save_tokenizer(out, name)


def save_tokenizer(out: Path, name: str) -> None:
    """Save the tokenizer next to the weights. The template goes into tokenizer_config.json, where older readers look,
    too."""
    PreTrainedTokenizerFast(
        tokenizer_file=str(out / "tokenizer.json"),
        eos_token=END,
        pad_token=END,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(out / name)
    path = out / name / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"chat_template": CHAT_TEMPLATE}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def main() -> None:
    """Train the models that the command line names; all models if it names none."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("what", nargs="?", choices=["tokenizer", *SHAPES], help="one step; default: all three")
    parser.add_argument("--out", type=Path, required=True, help="folder for the tokens, target/ and draft/")
    parser.add_argument("--minutes", type=float, help="training time; default 30 for the target, 12 for the draft")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.what in (None, "tokenizer"):
        make_tokens(args.out)
    for name in SHAPES:
        if args.what in (None, name):
            train(name, args.out, args.minutes or MINUTES[name])


if __name__ == "__main__":
    main()
