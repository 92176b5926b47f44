"""Measures the cost of states, in models of gated delta nets and attention with the sizes of Qwen3.5-0.8B.

    python benches/bench_hybrids.py FOLDER [--threads 2] [--rounds 5] [--parts pass state ...] [--out FILE.json]
    python benches/bench_hybrids.py FOLDER --parts peer --gguf FILE.gguf... --llama-bench PATH

- pass: time per token of plain decoding, against a model of the same width with attention alone and as many weights
- state: time of a verification of 4 rows on one thread, in a model that has the states of the 0.8B and few weights,
  against one of as many weights and attention layers without states; nearly all drafts of the hybrid are accepted, so
  that their updates are replayed
- prefix: a prompt of 4,000 tokens that the prefix cache knows, with and without the MTP head: tokens computed, and the
  time of the first token against a cold one
- snapshot: the first token of a prompt of 1,024 tokens with snapshots for the prefix cache, against one without
- peer: plain decoding of GGUF files against llama.cpp's `llama-bench`

FOLDER receives the checkpoints, with random weights (3 GB). Figures are medians of rounds in which the compared ones
take turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import specrs
import torch
from safetensors.torch import load_file, save_file
from specrs import LLM, SamplingParams
from specrs.pair import TARGET
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM

QWEN35_0_8B: dict[str, Any] = {
    "vocab_size": 248320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "mtp_num_hidden_layers": 1,
}
ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
TOKENS = 480
"""Tokens of a request that measures passes. Longer ones would measure attention."""
PARTS = ("pass", "state", "prefix", "snapshot", "peer")


def make_hybrid(folder: Path, **fields: Any) -> Path:
    """Write a hybrid of random bf16 weights with an MTP head, if it is not there yet."""
    if not folder.exists():
        torch.manual_seed(0)
        config = Qwen3_5TextConfig(**(QWEN35_0_8B | fields), rope_parameters=ROPE, dtype="bfloat16")
        model = Qwen3_5ForCausalLM(config).to(torch.bfloat16)
        _save(model, folder)
        _add_head(folder, config)
    return folder


def make_attention_only(folder: Path, num_weights: int, **fields: Any) -> Path:
    """Write a Qwen3 of the same width and depth with about `num_weights` weights, if it is not there yet. `fields`
    replaces some of config.json."""
    if not folder.exists():
        torch.manual_seed(0)
        names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        fields = {name: QWEN35_0_8B[name] for name in (*names, "head_dim", "max_position_embeddings")} | fields
        with torch.device("meta"):
            least = Qwen3ForCausalLM(Qwen3Config(**fields, intermediate_size=64, tie_word_embeddings=True))
        missing = num_weights - sum(weights.numel() for weights in least.parameters())
        size = 64 + missing // (3 * fields["hidden_size"] * fields["num_hidden_layers"]) // 64 * 64
        config = Qwen3Config(**fields, intermediate_size=size, tie_word_embeddings=True, dtype="bfloat16")
        _save(Qwen3ForCausalLM(config).to(torch.bfloat16), folder)
    return folder


def _save(model: Any, folder: Path) -> None:
    part = folder.with_suffix(".part")
    model.save_pretrained(part)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TARGET / name, part)
    part.rename(folder)


def _add_head(folder: Path, config: Qwen3_5TextConfig) -> None:
    """Add an MTP head: a layer of attention with random weights, its norms and its projection."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    (layer,) = sorted(i for i, kind in enumerate(config.layer_types) if kind == "full_attention")[:1]
    prefix = next(name.partition("layers.")[0] for name in tensors if f"layers.{layer}." in name)
    size = config.hidden_size
    head = {
        name.replace(f"{prefix}layers.{layer}.", "mtp.layers.0."): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(f"{prefix}layers.{layer}.")
    }
    head["mtp.fc.weight"] = (torch.randn(size, 2 * size) / size**0.5).to(torch.bfloat16)
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        head[f"mtp.{name}.weight"] = torch.zeros(size, dtype=torch.bfloat16)
    save_file(tensors | head, file, metadata={"format": "pt"})


def in_turns(rounds: int, ways: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Call each of `ways` once per round, in another order each round, and return the results of each."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            found[name].append(ways[name]())
    return found


def prompt(length: int, seed: int = 0) -> dict[str, list[int]]:
    """Return a prompt of random ids."""
    return {"prompt_token_ids": np.random.default_rng(seed).integers(5, 2000, length).tolist()}


def seconds_per_token(llm: LLM, tokens: int) -> float:
    """Return the seconds per decoded token, without the prompt and the first token."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    [output] = llm.generate(prompt(64), params, use_tqdm=False)
    metrics = output.metrics
    return (metrics.finish_time - metrics.first_token_time) / (tokens - 1)


def measure_pass(args: argparse.Namespace) -> dict[str, Any]:
    hybrid = make_hybrid(args.folder / "hybrid-0.8b")
    weights = weights_of(hybrid)
    plain = make_attention_only(args.folder / "attention-0.8b", weights)
    engines = {name: LLM(str(folder), **settings(args), speculative_config=None) for name, folder in
               (("hybrid", hybrid), ("attention", plain))}  # fmt: skip
    times = in_turns(args.rounds, {name: lambda llm=llm: seconds_per_token(llm, 48) for name, llm in engines.items()})
    medians = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    return {"ms_per_token": medians, "ratio": medians["hybrid"] / medians["attention"], "weights": weights}


def measure_state(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the time per pass of one row, and of 4 rows of which most are accepted, with states and without."""
    fields: dict[str, Any] = {"hidden_size": 64, "vocab_size": 2048}
    hybrid = make_hybrid(args.folder / "states-of-0.8b", **fields, intermediate_size=64)
    weights = weights_of(hybrid)
    # Every fourth layer of the hybrid has attention.
    depth = QWEN35_0_8B["num_hidden_layers"] // 4
    plain = make_attention_only(args.folder / "no-states", weights, **fields, num_hidden_layers=depth)
    found: dict[str, Any] = {"weights": weights}
    for k in (0, 3):
        drafts = {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_min": 1} if k else None
        engines = {
            name: LLM(str(folder), **(settings(args) | {"threads": 1}), speculative_config=drafts)
            for name, folder in (("states", hybrid), ("none", plain))
        }
        times = in_turns(args.rounds, {name: lambda llm=llm: seconds_per_pass(llm) for name, llm in engines.items()})
        row = {f"ms_per_pass_{name}": 1e3 * statistics.median(values) for name, values in times.items()}
        row["ms_of_states"] = row["ms_per_pass_states"] - row["ms_per_pass_none"]
        row["tokens_per_pass"] = TOKENS / engines["states"].stats().target_passes
        found[f"K={k}"] = row
    return found


def seconds_per_pass(llm: LLM) -> float:
    """Return the seconds per target pass behind a prompt of 64 tokens."""
    llm.reset_stats()
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    [output] = llm.generate(prompt(64), params, use_tqdm=False)
    return (output.metrics.finish_time - output.metrics.first_token_time) / (llm.stats().target_passes - 1)


def weights_of(folder: Path) -> int:
    """Return the number of weights without the MTP head's."""
    tensors = load_file(folder / "model.safetensors")
    return sum(tensor.numel() for name, tensor in tensors.items() if not name.startswith("mtp."))


def measure_prefix(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the time to the first token of a prompt of 4,000 tokens, with and without a prefix hit, and the tokens
    computed on a hit, without drafts and with the MTP head."""
    folder, found = make_hybrid(args.folder / "hybrid-0.8b"), {}
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)
    heads: dict[str, Any] = {"K=0": None, "mtp": {"method": "mtp", "num_speculative_tokens": 2}}
    for name, drafts in heads.items():
        llm = LLM(str(folder), **settings(args), speculative_config=drafts)
        cold, known, computed = [], [], []
        for i in range(min(args.rounds, 3)):
            for times in (cold, known):
                [output] = llm.generate(prompt(4000, seed=i), params, use_tqdm=False)
                metrics = output.metrics
                times.append(metrics.first_token_time - metrics.arrival_time)
            computed.append(4000 - metrics.num_cached_tokens)
        found[name] = {
            "cold_s": statistics.median(cold),
            "known_s": statistics.median(known),
            "share": statistics.median(known) / statistics.median(cold),
            "computed_tokens": computed,
            "stored": llm.stats().state_cache.stored,
        }
    return found


def measure_snapshot(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the time to the first token of prompts of 1,024 tokens, with snapshots for the prefix cache and
    without."""
    folder = make_hybrid(args.folder / "hybrid-0.8b")
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    engines = {
        caching: LLM(str(folder), **settings(args), speculative_config=None, enable_prefix_caching=caching)
        for caching in (True, False)
    }
    seeds = itertools.count()

    def first_token(llm: LLM) -> float:
        [output] = llm.generate(prompt(1024, seed=next(seeds)), params, use_tqdm=False)
        return output.metrics.first_token_time - output.metrics.arrival_time

    ways = {str(caching): lambda llm=llm: first_token(llm) for caching, llm in engines.items()}
    medians = {name: statistics.median(values) for name, values in in_turns(args.rounds, ways).items()}
    stored = engines[True].stats().state_cache.stored
    return {"first_token_s": medians, "ratio": medians["True"] / medians["False"], "stored": stored}


def measure_peer(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for file in args.gguf:
        llm = LLM(str(file), **settings(args), speculative_config=None)

        def peer(file: Path = file) -> float:
            command = [args.llama_bench, "-m", file, "-p", "0", "-n", "48", "-t", str(args.threads), "-r", "1"]
            [row] = json.loads(subprocess.run([*command, "-o", "json"], capture_output=True, check=True).stdout)
            return 1 / float(row["avg_ts"])

        times = in_turns(args.rounds, {"specrs": lambda llm=llm: seconds_per_token(llm, 48), "llama.cpp": peer})
        speeds = {name: 1 / statistics.median(values) for name, values in times.items()}
        found[file.name] = {"tokens_per_s": speeds, "ratio": speeds["specrs"] / speeds["llama.cpp"]}
        print(file.name, found[file.name], flush=True)
    return found


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of every engine."""
    return {"threads": args.threads, "max_num_seqs": 1, "max_model_len": 4608, "seed": 0}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", nargs="+", default=list(PARTS[:-1]), choices=PARTS)
    parser.add_argument("--gguf", nargs="+", type=Path, default=[])
    parser.add_argument("--llama-bench", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    args.folder.mkdir(parents=True, exist_ok=True)
    measured: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
        "pass": measure_pass,
        "state": measure_state,
        "prefix": measure_prefix,
        "snapshot": measure_snapshot,
        "peer": measure_peer,
    }
    results: dict[str, Any] = {}
    for part in args.parts:
        results[part] = measured[part](args)
        print(part, json.dumps(results[part]), flush=True)
    if args.out is not None:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        report = {
            "results": results,
            "machine": {"processor": platform.machine(), "threads": args.threads},
            "versions": {"specrs": specrs.__version__, "commit": commit.stdout.strip()},
            "date": time.strftime("%Y-%m-%d"),
        }
        args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
