"""First token of prompts by what `cpu_prefill` chooses from, on the same weights. Runs no drafts.

    python benches/bench_cpu_prefill.py [--model FOLDER] [--dtype float32] [--threads N] [--lengths 128,512]
        [--ways exact,amx]

The bundled target, or FOLDER, whose config.json is enough: without weights they are random numbers. Medians of the time
from a request to its first token, the ways in turns on one machine, and how many times as long the first of them takes.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path

from specrs.config import EngineConfig
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.engine.request import Request
from specrs.engine.weights import load_weights
from specrs.models.native_decoder import NativeDecoder
from specrs.sampling import SamplingParams


def first_token_ms(engine: Engine, request_id: int, length: int) -> float:
    """Measure milliseconds to the first token of a new random prompt of `length` tokens."""
    vocab = engine.limits.vocab_size
    prompt = random.Random(request_id).choices(range(3, vocab), k=length)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    begun = time.perf_counter()
    engine.add_request(Request(request_id, prompt, params, num_speculative_tokens=0))
    while engine.has_unfinished():
        engine.step()
    return (time.perf_counter() - begun) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", default="64,128,256,512,1024,2047")
    parser.add_argument("--ways", default="exact,amx", help="of cpu_prefill; amx wants a processor with tiles")
    parser.add_argument("--bf16-rows", action="store_true", help="cpu_activations=bf16")
    arguments = parser.parse_args()
    dummy = arguments.model is not None and not any(arguments.model.glob("*.safetensors"))
    engines = {}
    weights = None
    ways = arguments.ways.split(",")
    for way in ways:
        config = EngineConfig(
            model=None if arguments.model is None else str(arguments.model),
            dtype=arguments.dtype,
            threads=arguments.threads,
            load_format="dummy" if dummy else "auto",
            max_num_seqs=1,
            max_num_batched_tokens=4096,
            enable_prefix_caching=False,
            cpu_prefill=way,
            cpu_activations="bf16" if arguments.bf16_rows else "auto",
        )
        weights = load_weights(config) if weights is None else weights
        engines[way] = build_engine(config, weights)
        assert isinstance(engines[way].runner.target, NativeDecoder)
    name, native = arguments.model or "bundled target", engines[ways[0]].runner.target.decoder
    print(f"{name}, {arguments.dtype}, {native!r}")
    ratios = [f"{ways[0]}/{way}" for way in ways[1:]]
    print(
        f"{'tokens':>8}" + "".join(f" {way + ' ms':>10}" for way in ways) + "".join(f" {ratio:>12}" for ratio in ratios)
    )
    request_id = 0
    for length in [int(part) for part in arguments.lengths.split(",")]:
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(1 + arguments.rounds):
            for way, engine in engines.items():
                request_id += 1
                times[way].append(first_token_ms(engine, request_id, length))
        medians = [statistics.median(times[way][1:]) for way in ways]
        print(f"{length:8}" + "".join(f" {ms:10.1f}" for ms in medians), end="")
        print("".join(f" {medians[0] / ms:12.2f}" for ms in medians[1:]))


if __name__ == "__main__":
    main()
