"""Measures the host's part of a step, without a model: plan + settle next to a scheduler in plain Python, and plan to
delivered outputs.

    python benches/bench_scheduler.py [--batch 1 32 256] [--k 5] [--steps 1000] [--turn 50]

Every row decodes with K drafts, blocks of 16, prefix caching on, acceptance uniform from 0 to K; a request that ends is
followed by a new one. Both see the same requests and draws, in turn, some steps each: a turn is long enough to find
its own data in the caches and short enough to share what the machine is busy with. `--turn 1` has each step find the
other's, as behind a model that runs on the same cores. Only the calls to plan and settle are timed, not what stands in
for the device.

Plan to delivered is all of `Engine.step` but the device: plan, settle, tokens, text and stop strings in the requests'
hands. Its tokens are of a made-up byte-level vocabulary of 151,936 words, drawn by Zipf's law; the four stop strings of
each request never come, but their first letters do.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from python_scheduler import PythonScheduler
from specrs import SamplingParams
from specrs.backends.ring import Header, Ring, RingSlot
from specrs.config import EngineConfig
from specrs.core import FINISH_LENGTH, FINISH_NONE, PLAN_STEP, CachedDrafter, Scheduler, TokenDecoder
from specrs.engine.engine import Engine
from specrs.engine.parts import EngineParts
from specrs.engine.request import Request
from specrs.sampling import RequestLimits

Sections = dict[str, NDArray[np.int64]]
BLOCK_SIZE, PROMPT, OUTPUT = 16, 64, 960
WORDS = 151_936
STOPS = ("\n\nQuestion:", "</answer>", "aZ", "theend.")


def prompt(request_id: int) -> list[int]:
    """Return a prompt that differs from all others from the first token on, so that the prefix cache is looked up and
    misses."""
    return [(request_id * 7919 + i) % 150_000 for i in range(PROMPT)]


def limit(request_id: int) -> int:
    """Return the number of tokens that a request may reach. Limits differ, or all requests would end in the same
    step."""
    return PROMPT + OUTPUT // 2 + request_id * 389 % (OUTPUT // 2)


def rust(batch: int, k: int) -> Iterator[float]:
    """Yield the seconds of each step of the Rust core, without end."""
    scheduler = Scheduler(
        max_num_seqs=batch,
        max_model_len=PROMPT + OUTPUT,
        num_blocks=batch * ((PROMPT + OUTPUT) // BLOCK_SIZE + 2),
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=max(2048, batch * (k + 1)),
        num_speculative_tokens=k,
        drafter=CachedDrafter(max_model_len=PROMPT + OUTPUT, cost_ratio=0.05),
    )
    record = np.zeros(scheduler.record_size, dtype=np.int64)
    results = np.zeros(scheduler.results_size, dtype=np.int64)
    settled = np.zeros(scheduler.settled_size, dtype=np.int64)
    sections = {name: results[at : at + length] for name, (at, length) in scheduler.results_layout().items()}
    first, length = scheduler.settled_layout()["finish_reason"]
    reasons = settled[first : first + length]
    views = {name: record[at : at + length] for name, (at, length) in scheduler.record_layout().items()}
    device, next_id, missing = Acceptance(batch, k), 0, batch
    sections["tokens"][:] = 7
    while True:
        for _ in range(missing):
            tokens = np.array(prompt(next_id))
            scheduler.add_request(next_id, tokens, limit=limit(next_id), num_speculative_tokens=k)
            next_id += 1
        start = time.perf_counter()
        status = scheduler.plan(record)
        planned = time.perf_counter() - start
        assert status == PLAN_STEP
        header = Header.of(record)
        device.report(header, views, sections)
        start = time.perf_counter()
        scheduler.settle(header.step_id, results, settled)
        seconds = planned + time.perf_counter() - start
        missing = int(np.count_nonzero(reasons))
        yield seconds


class Acceptance:
    """Write results as a device reports them: 0 to K drafts of each row are accepted, and a row ends at its limit."""

    def __init__(self, batch: int, k: int) -> None:
        self._left = np.zeros(batch, dtype=np.int64)
        self._k = k
        self._rng = np.random.default_rng(0)

    def report(self, header: Header, record: Sections, results: Sections) -> None:
        """Write the results of a planned step but its tokens."""
        decode, prefill, admitted = header.num_decode, header.num_prefill, header.num_admitted
        count = decode + prefill
        limits, tokens = record["admit_limit"][:admitted], record["admit_num_tokens"][:admitted]
        self._left[record["admit_row"][:admitted]] = limits - tokens
        rows = record["seq_row"][:count]
        drafted = np.minimum(record["seq_k"][:count], np.maximum(self._left[rows] - 1, 0))
        accepted = np.minimum(self._rng.integers(0, self._k + 1, count), drafted)
        emitted = accepted + 1
        emitted[decode:] = record["chunk_is_last"][:prefill]
        self._left[rows] -= emitted
        results["num_drafted"][:count] = drafted
        results["num_accepted"][:count] = accepted
        results["num_emitted"][:count] = emitted
        ended = (emitted > 0) & (self._left[rows] == 0)
        results["finish_reason"][:count] = np.where(ended, FINISH_LENGTH, FINISH_NONE)


class Device:
    """A runner without models, which emits words and records the time that it takes itself."""

    drafter = kv_cache = None

    def __init__(self, batch: int, k: int) -> None:
        self.num_target_passes = 0
        self.seconds = 0.0
        self._acceptance = Acceptance(batch, k)
        self._rng = np.random.default_rng(1)

    def use_extras(self, lookup: object) -> None:
        """Do nothing: no request here has extras."""

    def execute(self, slot: RingSlot, header: Header) -> None:
        start = time.perf_counter()
        results = slot.results_arrays
        self._acceptance.report(header, slot.record_arrays, results)
        # As often as words of a text: the chance of the i-th is about 1 / i (Zipf's law).
        results["tokens"][:] = WORDS ** self._rng.random(len(results["tokens"])) - 1
        self.seconds += time.perf_counter() - start

    def wait(self, slot: RingSlot) -> None:
        """Do nothing: there is nothing to wait for."""


def decoder() -> TokenDecoder:
    """Make a decoder with a byte-level vocabulary of `WORDS` words of two to seven letters, half of them after a
    space."""
    rng = np.random.default_rng(1)
    words: dict[str, int] = {}
    while len(words) < WORDS:
        letters = rng.integers(97, 123, int(rng.integers(2, 8))).astype(np.uint8).tobytes().decode()
        words.setdefault(("\u0120" if rng.random() < 0.5 else "") + letters, len(words))
    model = {"type": "WordLevel", "vocab": words, "unk_token": "aa"}
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return TokenDecoder(json.dumps({"version": "1.0", "added_tokens": [], "model": model, "decoder": byte_level}))


def delivered(batch: int, k: int, text: TokenDecoder | None, stops: tuple[str, ...]) -> Iterator[float]:
    """Yield the seconds of each step of an engine without the device's time, without end."""
    config = EngineConfig(max_num_seqs=batch, max_num_batched_tokens=max(2048, batch * (k + 1)))
    scheduler = Scheduler(
        max_num_seqs=batch,
        max_model_len=PROMPT + OUTPUT,
        num_blocks=batch * ((PROMPT + OUTPUT) // BLOCK_SIZE + 2),
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=max(2048, batch * (k + 1)),
        num_speculative_tokens=k,
        drafter=CachedDrafter(max_model_len=PROMPT + OUTPUT, cost_ratio=0.05),
    )
    limits = RequestLimits(max_model_len=PROMPT + OUTPUT, vocab_size=WORDS, num_speculative_tokens=k, eos_token_ids=())
    device = Device(batch, k)
    parts = EngineParts(config, None, limits, scheduler, Ring(scheduler, k, 1), device)  # type: ignore
    engine = Engine(parts)
    next_id, missing = 0, batch
    while True:
        for _ in range(missing):
            length = limit(next_id) - PROMPT
            params = SamplingParams(
                temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=text is not None, stop=stops or None
            )
            engine.add_request(Request(next_id, prompt(next_id), params, decoder=text, num_speculative_tokens=k))
            next_id += 1
        device.seconds = 0.0
        start = time.perf_counter()
        touched = engine.step()
        seconds = time.perf_counter() - start - device.seconds
        missing = sum(request.finished for request in touched)
        yield seconds


def plain_python(batch: int, k: int) -> Iterator[float]:
    """Yield the seconds of each step of the scheduler in plain Python, without end."""
    scheduler = PythonScheduler(
        max_num_seqs=batch,
        num_blocks=batch * ((PROMPT + OUTPUT) // BLOCK_SIZE + 2),
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=max(2048, batch * (k + 1)),
        num_drafts=k,
    )
    rng = np.random.default_rng(0)
    next_id = 0
    missing = batch
    while True:
        for _ in range(missing):
            scheduler.add_request(next_id, prompt(next_id), limit(next_id))
            next_id += 1
        start = time.perf_counter()
        sequences = scheduler.plan()
        planned = time.perf_counter() - start
        accepted = rng.integers(0, k + 1, len(sequences)).tolist()
        emitted = [
            [7] * (min(m, sequence.num_drafts) + 1) if sequence.is_last or not sequence.chunk else []
            for sequence, m in zip(sequences, accepted, strict=True)
        ]
        start = time.perf_counter()
        ended = scheduler.settle(sequences, emitted)
        seconds = planned + time.perf_counter() - start
        missing = len(ended)
        yield seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--turn", type=int, default=50, help="steps of one before the other's turn")
    args = parser.parse_args()
    rows, words = [], decoder()
    for batch in args.batch:
        contestants = {
            "rust": rust(batch, args.k),
            "python": plain_python(batch, args.k),
            "delivered": delivered(batch, args.k, None, ()),
            "delivered_text": delivered(batch, args.k, words, ()),
            "delivered_4_stops": delivered(batch, args.k, words, STOPS),
        }
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for contestant in contestants.values():
            for _ in range(200):  # past the prompts, rows at different lengths
                next(contestant)
        for _ in range(0, args.steps, args.turn):
            for name, contestant in contestants.items():
                times[name] += [1e6 * next(contestant) for _ in range(args.turn)]
        cuts = {name: statistics.quantiles(values, n=10) for name, values in times.items()}
        row: dict[str, object] = {"batch": batch}
        for name, cut in cuts.items():
            row[f"{name}_us"] = {"p10": round(cut[0], 1), "median": round(cut[4], 1), "p90": round(cut[8], 1)}
        row["ratio"] = round(cuts["python"][4] / cuts["rust"][4], 1)
        rows.append(row)
    what = (
        f"plan + settle through Python (rust, python), and plan to delivered (delivered*), K = {args.k}, "
        "microseconds a step"
    )
    print(json.dumps({"what": what, "python": platform.python_version(), "results": rows}, indent=2))


if __name__ == "__main__":
    main()
