"""Prompts next to decoding requests, cut to what a GPU's verification passes have room for: each chunk fits into a
captured graph, and by the roofline's times of an H200 the throughput rises.

    python tests/core/test_merged_prompts.py    prints throughput and time to first token, with and without rooms
"""

from __future__ import annotations

import functools
import json
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from specrs.backends.cuda.shapes import FUSED_ROWS, MERGED_CHUNKS, MERGED_STEPS, Buckets, LogitsMode, batch_buckets
from specrs.backends.ring import Header, section_arrays
from specrs.core import FINISH_LENGTH, FINISH_NONE, PLAN_STEP, CachedDrafter, Scheduler
from specrs.forecast.gpus import ATTENTION_US, GPUS, KERNEL_US
from specrs.forecast.roofline import FIRST_PASS_ROWS, model_pass
from specrs.models.config import ModelConfig
from specrs.models.loader import load_config

RATES = (0.72, 0.52, 0.34, 0.27, 0.21)
"""Acceptance by position of InstructCoder, unconditional."""
PROMPT, OUTPUT = 150, 200
CONTEXT = PROMPT + OUTPUT // 2
SHAPES = {"target": (64, 5120, 64, 25600, False), "draft": (28, 2048, 16, 6144, True)}
"""Layers, hidden size, heads, intermediate size and tied embedding of Qwen3-32B and Qwen3-1.7B."""
H200 = GPUS["H200"]


@functools.cache
def model(name: str) -> ModelConfig:
    layers, hidden, heads, intermediate, tied = SHAPES[name]
    content = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": tied,
    }
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(content))
        return load_config(folder)


@functools.cache
def pass_ms(name: str, batch: int, each: int, chunk_rows: int) -> float:
    """Milliseconds of a pass over `each` rows of `batch` sequences and `chunk_rows` rows of prompts, which have an
    attention kernel of their own in each layer."""
    config, is_draft, own = model(name), name == "draft", ("attention", "lm_head", "argmax")
    if batch == 0:  # a prompt ends in logits of its last row
        prompt = model_pass(config, H200, 1, chunk_rows, PROMPT // 2, is_draft=is_draft)
        last = model_pass(config, H200, 1, 1, PROMPT, is_draft=is_draft)
        ms = sum(work.ms(H200) for work in prompt.work if work.name not in own[1:])
        return ms + sum(work.ms(H200) for work in last.work if work.name in own[1:])
    verification = model_pass(config, H200, batch, each, CONTEXT, is_draft=is_draft)
    if chunk_rows == 0:
        return verification.ms(H200)
    whole = model_pass(config, H200, 1, batch * each + chunk_rows, CONTEXT)
    ms = sum(work.ms(H200) for work in verification.work if work.name in own)
    ms += sum(work.ms(H200) for work in whole.work if work.name not in own)
    return ms + 1e-3 * config.num_layers * (ATTENTION_US + KERNEL_US)


@dataclass
class Gpu:
    """Times of steps, with the shapes that are captured."""

    buckets: Buckets
    num_merged: int = 0
    """Number of steps whose prompt chunks ran in one pass with the verification."""
    num_alone: int = 0

    def ms(self, ks: list[int], chunk_rows: int, chunks: int, catch_up: int) -> float:
        """Return the milliseconds of a step. If it has prompt chunks next to decoding sequences, it is counted in
        `num_merged` or `num_alone`."""
        around, batch = 1e-3 * 3 * KERNEL_US, len(ks)
        ms = around + (pass_ms("draft", 0, 0, catch_up) if catch_up else 0.0)
        if not ks:
            return ms + pass_ms("target", 0, 0, chunk_rows)
        k = ks[0]
        whole = self.buckets.whole(ks, LogitsMode.GREEDY, k)
        padded, each = (batch, k + 1) if whole is None else (whole.batch, k + 1)
        if k:
            ms += pass_ms("draft", padded, FIRST_PASS_ROWS, 0) + (k - 1) * pass_ms("draft", padded, 1, 0)
        if not chunks:
            return ms + pass_ms("target", padded, each, 0)
        merged = None if whole is None else self.buckets.merged(whole, batch, chunk_rows, chunks)
        if merged is not None:
            self.num_merged += 1
            return ms + pass_ms("target", merged.decode.batch, each, merged.chunk_rows)
        self.num_alone += 1
        shape = self.buckets.chunks(chunk_rows, chunks)
        return ms + pass_ms("target", padded, each, 0) + pass_ms("target", 0, 0, shape.rows if shape else chunk_rows)


@dataclass(frozen=True)
class Outcome:
    tokens_per_s: float
    ttft_ms: float
    """Mean milliseconds from a request's arrival to its first token."""
    merged: int
    alone: int


def simulate(concurrency: int, k: int, *, rooms: bool, spread: int = 0, shift: int = 0) -> Outcome:
    """Serve 12 requests for each of `concurrency` clients, each of which sends the next when one has ended. Prompts
    have 150 tokens, or with `spread` up to `spread` more or fewer. `shift` is added to the number of tokens of every
    room."""
    seqs, random = max(concurrency, 8), np.random.default_rng(concurrency)
    buckets = Buckets(batch_buckets(256), k, max_chunk_rows=8192, max_chunks=256, merges=MERGED_CHUNKS)
    known = [(drafts, count, tokens + shift) for drafts, count, tokens in buckets.merged_rooms()]
    scheduler = Scheduler(
        max_num_seqs=seqs,
        max_model_len=1024,
        num_blocks=seqs * 64,
        block_size=16,
        max_num_batched_tokens=8192,
        num_speculative_tokens=k,
        drafter=CachedDrafter(max_model_len=1024, max_draft_lag=2, cost_ratio=0.05) if k else None,
        enable_prefix_caching=False,
        merged_rooms=known if rooms else None,
        max_merged_chunks=MERGED_CHUNKS if rooms else 0,
        max_merged_steps=MERGED_STEPS if rooms else 0,
    )
    gpu = Gpu(buckets)
    record = np.zeros(scheduler.record_size, np.int64)
    results, settled = np.zeros(scheduler.results_size, np.int64), np.zeros(scheduler.settled_size, np.int64)
    sections, given = (
        section_arrays(record, scheduler.record_layout()),
        section_arrays(results, scheduler.results_layout()),
    )
    told = section_arrays(settled, scheduler.settled_layout())
    length, limit = np.zeros(seqs, np.int64), np.zeros(seqs, np.int64)
    now, tokens, arrived, first = 0.0, 0, dict[int, float](), dict[int, float]()
    ids = iter(range(12 * concurrency))

    def arrive() -> None:
        request = next(ids, None)
        if request is None:
            return
        size = PROMPT + int(random.integers(-spread, spread + 1))
        scheduler.add_request(request, np.full(size, 7), limit=size + OUTPUT, num_speculative_tokens=k)
        arrived[request] = now

    starts = deque(sorted(random.uniform(0, 3000, concurrency)))  # so that clients are not in step
    middle: tuple[float, int] | None = None
    while True:
        while starts and (starts[0] <= now or scheduler.num_running + scheduler.num_waiting == 0):
            now = max(now, starts.popleft())
            arrive()
        if scheduler.plan(record) != PLAN_STEP:
            break
        header = Header.of(record)
        for i in range(header.num_admitted):
            row = sections["admit_row"][i]
            length[row], limit[row] = sections["admit_num_tokens"][i], sections["admit_limit"][i]
        results[:] = 0
        count = header.num_decode + header.num_prefill
        for sequence in range(count):
            row, own, chunk = sections["seq_row"][sequence], sections["seq_k"][sequence], sequence - header.num_decode
            if chunk >= 0 and not sections["chunk_is_last"][chunk]:
                continue
            drafted = max(0, min(own, limit[row] - length[row] - 1))
            stands = random.random()
            accepted = sum(1 for rate in RATES[:drafted] if stands < rate)
            length[row] += accepted + 1
            given["num_drafted"][sequence], given["num_accepted"][sequence] = drafted, accepted
            given["num_emitted"][sequence] = accepted + 1
            given["finish_reason"][sequence] = FINISH_LENGTH if length[row] == limit[row] else FINISH_NONE
        ks = sections["seq_k"][: header.num_decode].tolist()
        now += gpu.ms(ks, header.num_prefill_tokens, header.num_prefill, header.num_draft_tokens)
        scheduler.settle(header.step_id, results, settled)
        for sequence in range(count):
            request, new = int(told["request_id"][sequence]), int(told["num_new"][sequence])
            tokens += new
            if new and request not in first:
                first[request] = now - arrived[request]
            if told["finish_reason"][sequence] == FINISH_LENGTH:
                arrive()
        if middle is None and len(first) >= 3 * concurrency:
            middle = now, tokens
        if len(arrived) == 12 * concurrency and not starts:
            break  # from here on the batch drains
    assert middle is not None
    rate = (tokens - middle[1]) / (now - middle[0]) * 1e3
    late = [ms for request, ms in first.items() if request >= 3 * concurrency]
    return Outcome(rate, float(np.mean(late)), gpu.num_merged, gpu.num_alone)


@pytest.mark.parametrize(
    ("concurrency", "k", "gain"), [(8, 0, 1.01), (16, 0, 1.02), (32, 0, 1.0), (4, 5, 0.98), (8, 5, 0.98)]
)
def test_cut_prompts_raise_the_throughput(concurrency: int, k: int, gain: float) -> None:
    without, cut = (simulate(concurrency, k, rooms=rooms, spread=60) for rooms in (False, True))
    assert cut.tokens_per_s >= 0.995 * gain * without.tokens_per_s, f"{cut} after {without}"
    assert cut.merged >= without.merged
    assert cut.ttft_ms < without.ttft_ms + 4 * 35, "a prompt is spread over four steps at most"


@pytest.mark.parametrize(("concurrency", "k"), [(3, 0), (16, 0), (40, 0), (2, 5), (7, 5)])
def test_every_chunk_that_is_cut_fits(concurrency: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler's table against the choice of graphs: a step with a room for its chunks has a graph for them. A
    table that is off by one row is found."""
    merged = Buckets.merged

    def checked(self: Buckets, whole: object, count: int, rows: int, chunks: int) -> object:
        found = merged(self, whole, count, rows, chunks)  # type: ignore[arg-type]
        rooms = {(drafts, seqs): tokens for drafts, seqs, tokens in self.merged_rooms()}
        room = rooms.get((whole.max_k, whole.batch))  # type: ignore[attr-defined]
        if room is not None and rows <= room + 1 and chunks <= MERGED_CHUNKS:
            assert found is not None, f"{rows} rows of {chunks} chunks next to {whole}"
            assert found.rows <= FUSED_ROWS
        return found

    monkeypatch.setattr(Buckets, "merged", checked)
    assert simulate(concurrency, k, rooms=True, spread=100).merged > concurrency
    with pytest.raises(AssertionError, match=r"rows of \d chunks next to"):
        simulate(concurrency, k, rooms=True, spread=100, shift=1)


def main() -> None:
    print(f"{'':>14}{'tokens/s':>22}{'first token, ms':>22}{'steps with prompts merged':>32}")
    for k, concurrencies in ((0, (4, 8, 16, 32, 48)), (5, (2, 4, 8))):
        for concurrency in concurrencies:
            a, b = (simulate(concurrency, k, rooms=rooms) for rooms in (False, True))
            shares = [f"{each.merged / (each.merged + each.alone):.0%}" for each in (a, b)]
            print(
                f"K = {k}, {concurrency:>4}: {a.tokens_per_s:>10.0f} -> {b.tokens_per_s:>6.0f}"
                f"{a.ttft_ms:>12.0f} -> {b.ttft_ms:>5.0f}{shares[0]:>18} -> {shares[1]:>5}"
            )


if __name__ == "__main__":
    main()
