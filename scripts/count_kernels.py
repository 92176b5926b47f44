"""Count the kernels of passes and iterations of Qwen3-32B with Qwen3-1.7B on a GPU, without one: docs/gpu.md's tables.
Predict passes and throughput on an H200: tables in docs/benchmarks.md.

    python scripts/count_kernels.py                   print them
    python scripts/count_kernels.py --write           write them into the pages
    python scripts/count_kernels.py --products FILE   print them for an engine with this table of products
    python scripts/count_kernels.py --start           print how many kernels the start compiles
    python scripts/count_kernels.py --graphs          print how many kernels all graphs hold, and their memory

Kernels are counted as they are launched, an op of cuBLAS or torch as one. Measures no time.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/gpu.md"
BEGIN, END = "<!-- scripts/count_kernels.py -->\n", "<!-- end -->\n"
BEGIN_ASKING = "<!-- scripts/count_kernels.py: requests that ask -->\n"
BENCHMARKS = ROOT / "docs/benchmarks.md"
BEGIN_GAINS = "<!-- scripts/count_kernels.py: a table of products -->\n"
BEGIN_LOAD = "<!-- scripts/count_kernels.py: throughput under load -->\n"
BEGIN_DRAFTS = "<!-- scripts/count_kernels.py: cheaper drafts -->\n"
BEGIN_WAVE = "<!-- scripts/count_kernels.py: one wave -->\n"
NODE_BYTES = 10_000
"""Bytes of a kernel in a CUDA graph: "around 10KB per kernel node" (https://github.com/NVIDIA/cccl/pull/3768)."""
FASTER_TFLOPS = 790.0
"""Rate of products of many rows that the table of gains assumes next to today's."""
MEASURED = ROOT / "benches/results/NVIDIA_H200_9d1f9a6_bench_gpu.json"
INPUT_LEN, OUTPUT_LEN = 150, 200
"""Tokens of a prompt and of an output under load, and in the measured wave."""
CHEAP_DRAFT = "FP8 and 32,768 ids"
DRAFTS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "32,768 ids": {"draft_vocab_size": 32768},
    "FP8": {"draft_quantization": "fp8"},
    CHEAP_DRAFT: {"draft_quantization": "fp8", "draft_vocab_size": 32768},
}
"""Settings of the roofline for each draft of the tables."""
GOALS = {1: (60, 2.35), 16: (900, 2.05), 64: (2950, 1.31), 128: (4300, 1.05), 256: (4900, 1.00)}
"""Goals by number of requests: tokens per second at K = 0, and speed-up of the best K."""
VLLM = {1: ("57", 1.68), 16: ("854", 1.43), 64: ("2,690", 1.10), 128: ("3,690", 0.92), 256: ("4,000 to 4,250", 0.80)}
"""Figures of vLLM on an H200 by a model of its published rows on another GPU: tokens per second, and speed-up."""
sys.path.insert(0, str(ROOT / "tests"))


@contextmanager
def with_products(path: Path | None) -> Iterator[None]:
    """Give engines the table of products at `path` in the context; None: the package's."""
    from specrs.backends.cuda.providers import Providers
    from specrs.kernels.cuda.configs import TABLE

    of = Providers.of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Providers, "of", lambda gpu, given=path or TABLE: of(gpu, given))
        yield


def counts() -> dict[str, tuple[int, int]]:
    """Return the number of kernels, greedy and sampled, for each row of the table."""
    from kernel_launches import Recorder, fake_context, reference_configs
    from specrs.backends.cuda import drafting, iteration
    from specrs.backends.cuda.context import sequences_of
    from specrs.backends.cuda.shapes import LogitsMode, Shape

    k = 5
    found: dict[str, tuple[int, int]] = {}

    def add(name: str, work: Callable[[LogitsMode], None]) -> None:
        numbers = []
        for logits_mode in (LogitsMode.GREEDY, LogitsMode.SAMPLED):
            with Recorder() as recorder:
                work(logits_mode)
            numbers.append(len(recorder.kernels))
        found[name] = numbers[0], numbers[1]

    def verify(batch: int, rows: int) -> Callable[[LogitsMode], None]:
        return lambda logits_mode: iteration.verify_pass(
            ctx, batch, batch * rows, rows, greedy=logits_mode is LogitsMode.GREEDY
        )

    with tempfile.TemporaryDirectory() as folder, fake_context(*reference_configs(Path(folder)), k) as ctx:
        sequences = sequences_of(ctx.record.views, "num_decode")

        add("draft pass, batch 1", lambda logits_mode: drafting.draft_pass(ctx, 2, 1, logits_mode))
        add("draft pass, batch 64", lambda logits_mode: drafting.draft_pass(ctx, 2, 64, logits_mode))
        add("target pass, batch 1, K = 0", verify(1, 1))
        add("target pass, batch 1, K = 5", verify(1, k + 1))
        add("target pass, batch 64, K = 0", verify(64, 1))
        add("target pass, batch 64, K = 1", verify(64, 2))
        add("target pass, batch 64, K = 5", verify(64, k + 1))
        add("iteration, batch 1, K = 0", lambda logits_mode: iteration.run(ctx, Shape(1, 0, 1, logits_mode), sequences))
        add(
            "iteration, batch 1, K = 5",
            lambda logits_mode: iteration.run(ctx, Shape(1, k, k + 1, logits_mode), sequences),
        )
    adapted = {"max_loras": 4}
    with tempfile.TemporaryDirectory() as folder, fake_context(*reference_configs(Path(folder)), k, **adapted) as ctx:
        for batch, rows in ((1, 1), (1, k + 1), (64, k + 1)):
            add(f"target pass with LoRA adapters, batch {batch}, K = {rows - 1}", verify(batch, rows))
    return found


@dataclass(frozen=True)
class Asking:
    """Kernels, bytes and time that one request with a mask, bias or penalty adds to an iteration of others."""

    name: str
    kernels: int
    bytes: float

    @property
    def us(self) -> float:
        """Predicted microseconds on an H200: bytes over bandwidth, and a fixed time for each kernel."""
        from specrs.forecast.gpus import GPUS, KERNEL_US

        return self.kernels * KERNEL_US + self.bytes / GPUS["H200"].bytes_per_us


class FakeGrammar:
    """Stand-in for the grammar of one sequence when kernels are counted. It works on fake tensors only: its masks have
    no bit set, which would forbid every token.

    `masks` runs one kernel, which stands for the copy of the masks of all rows to the device. `observe` copies the
    drafts of a pass to the host.
    """

    def __init__(self, words: int, rows: int, all_rows: int) -> None:
        self._words, self._rows, self._all_rows = words, rows, all_rows

    def masks(self, sequences: Any, offsets: Any, device: Any) -> Any:
        """Write masks on the device, in place of a copy."""
        import torch

        count = self._rows if len(offsets) == self._all_rows else 1
        return torch.zeros((count, self._words), dtype=torch.int32, device=device)

    def observe(self, tokens: Any, live: Any) -> None:
        """Copy the drafts to the host."""
        import torch

        torch.stack((tokens, live.to(tokens.dtype))).cpu()

    def finish(self) -> None:
        """Do nothing: no grammar was advanced over drafts."""


def asking(batch: int = 64, k: int = 5, context: int = 1024) -> tuple[list[Asking], Asking]:
    """Return what each kind of request adds to a sampled iteration of `batch` requests, one of which asks. And what a
    greedy iteration pays for being sampled, pass by pass."""
    import torch
    from kernel_launches import Recorder, fake_context, reference_configs
    from specrs.backends.cuda import adjusted, iteration
    from specrs.backends.cuda.context import sequences_of
    from specrs.backends.cuda.sampling.asked import AskedPlan, RowMasks, RowSampling
    from specrs.backends.cuda.sampling.sampling_state import SequenceSampling
    from specrs.backends.cuda.sequences import FlatRows, Iteration
    from specrs.backends.cuda.shapes import LogitsMode, Shape
    from specrs.core import SAMPLING_STEPS
    from specrs.verify.params import SamplingRows, Steps

    def bits(*names: str) -> int:
        return sum(1 << SAMPLING_STEPS.index(name) for name in names)

    free = RowSampling(0, 0, 0, -2, -2)
    kinds: dict[str, tuple[int, RowMasks | None, int]] = {
        "penalties": (bits("repetition", "counts"), None, 0),
        "`logit_bias`, `bad_words`": (bits("constraints"), RowMasks(None, [7] * 300, [1.0] * 300, [[1, 2]] * 20), 0),
        "`min_tokens`": (bits("min_tokens"), None, 0),
        "a grammar": (bits("extras"), None, 0),
        "20 log probabilities": (bits("logprobs"), None, 20),
        "penalties and log probabilities": (bits("repetition", "counts", "logprobs"), None, 20),
    }
    planned, rows = (k,) * batch, batch * (k + 1)
    with tempfile.TemporaryDirectory() as folder, fake_context(*reference_configs(Path(folder)), k) as ctx:
        b, vocab = ctx.buffers, ctx.buffers.logits.shape[1]
        device, shape = b.row.device, Shape(batch, k, rows, LogitsMode.LOGITS)
        index = torch.arange(rows, device=device).view(batch, k + 1)
        flat = FlatRows(index.flatten() // (k + 1), index.flatten() % (k + 1), index)

        def chain(request: RowSampling | None) -> list[Any]:
            """Launches between the passes."""
            requests = [free if request is None else request] + [free] * (batch - 1)
            steps = Steps.of(requests[0].steps)
            with pytest.MonkeyPatch.context() as patch, Recorder() as recorder:
                patch.setattr(
                    "specrs.backends.cuda.sampling.asked.to_device",
                    lambda t, d: torch.zeros(t.shape, dtype=t.dtype, device=d),
                )
                patch.setattr(adjusted, "flat_rows", lambda _: flat)
                plan = AskedPlan.of(planned, requests, vocab, device)
                sampling = SequenceSampling(
                    state=ctx.state,
                    it=Iteration(b.row[:batch], planned, flat, b.k[:batch], context),
                    steps=steps,
                    params=SamplingRows(ctx.params.values),
                    prompt_len=ctx.state.limit,
                    plan=plan,
                    grammar=FakeGrammar(-(-vocab // 32), k + 1, rows) if steps.extras else None,
                    logprobs={0: requests[0].logprobs} if steps.logprobs else {},
                )
                recorder.kernels.clear()  # what a steady batch does once
                for i in range(1, k + 1):
                    adjusted.draft_adjusted(ctx, i, batch, sampling, [False] * batch)
                slot = SimpleNamespace(logprobs={})
                adjusted.accept_adjusted(ctx, shape, sampling, slot, 0, "raw_logprobs")
            return recorder.kernels

        def moved(launches: list[Any], logprobs: bool) -> float:
            """Bytes of logits and counts that these launches read and write, and those of tokens that are counted."""
            found = 64.0 * (k + 1) * vocab if logprobs else 0.0
            for launch in launches:
                name = launch if isinstance(launch, str) else launch.name
                if name in ("tops_kernel", "adjust_kernel"):
                    found += (8 if name == "tops_kernel" else 12) * vocab * launch.grid[1]
                found += 12 * context if name == "history_kernel" else 0
            return found

        plain = len(chain(None))
        found = []
        for name, (steps, masks, logprobs) in kinds.items():
            launches = chain(RowSampling(0, 0, steps, logprobs or -2, -2, masks))
            found.append(Asking(name, len(launches) - plain, moved(launches, logprobs > 0)))
        sequences, numbers = sequences_of(ctx.record.views, "num_decode"), []
        for logits_mode in (LogitsMode.GREEDY, LogitsMode.SAMPLED):
            with Recorder() as recorder:
                iteration.run(ctx, Shape(batch, k, rows, logits_mode), sequences)
            numbers.append(len(recorder.kernels))
        # Draft passes write logits and read them again. Each pass of a chain is a graph of its own.
        chained = Asking("the others are greedy", numbers[1] - numbers[0] + k + 2, 8.0 * k * batch * vocab)
    return found, chained


def asking_table(found: list[Asking], chained: Asking) -> str:
    """Return what requests that ask add, as the table in docs/gpu.md."""
    rows = [
        f"| {one.name} | {one.kernels} | {one.bytes / 1e6:.0f} MB | {one.us / 1e3:.2f} ms | "
        f"{(one.us + chained.us) / 1e3:.2f} ms |"
        for one in found
    ]
    head = ["| one request of 64 asks for | kernels | moved | others sample | others are greedy |"]
    return "\n".join([*head, "| --- | --- | --- | --- | --- |", *rows]) + "\n"


def write_own(path: Path) -> None:
    """Write a table of products to `path` that names our kernel for every product of Qwen3-32B on an H200."""
    import torch
    from kernel_launches import H200, reference_configs
    from specrs.backends.cuda.providers import OWN, OWN_BUCKETS, Choice, write_providers
    from specrs.backends.cuda.workspace import linear_shapes
    from specrs.models.loader import load_config

    target, _ = reference_configs(path.parent)
    shapes = linear_shapes(load_config(target), torch.bfloat16).values()
    write_providers(path, H200.name, {shape: dict.fromkeys(OWN_BUCKETS, Choice(OWN)) for shape in shapes})


def gains_table(context: int = 250) -> str:
    """Return what a table of products could gain in passes of Qwen3-32B on an H200, by the roofline, as the table in
    docs/benchmarks.md."""
    from kernel_launches import reference_configs
    from specrs.forecast.gpus import COMPUTE_SHARE, GPUS
    from specrs.forecast.roofline import Rows, model_pass
    from specrs.models.loader import load_config

    today = GPUS["H200"]
    faster = replace(today, bf16_tflops=FASTER_TFLOPS / COMPUTE_SHARE)
    lines = [
        f"| requests, K (rows) | today | kernels, moved | fused to 128 rows | kernels, moved | {FASTER_TFLOPS:.0f} "
        "TFLOP/s | both |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    with tempfile.TemporaryDirectory() as folder:
        target, own = load_config(reference_configs(Path(folder))[0]), Path(folder) / "own.json"
        write_own(own)
        tuned = replace(today, products=own)
        for batch, k in ((16, 5), (64, 1), (128, 0), (64, 2), (128, 1), (64, 5)):
            plain, fused = (model_pass(target, gpu, Rows(batch, k + 1, context)) for gpu in (today, tuned))
            same = fused == plain
            cells = [f"{plain.ms(today):.1f} ms", f"{plain.kernels:,}, {plain.bytes / 1e9:.1f} GB"]
            cells.append("the same" if same else f"{fused.ms(today):.1f} ms")
            cells.append("the same" if same else f"{fused.kernels:,}, {fused.bytes / 1e9:.1f} GB")
            cells += [f"{each.ms(faster):.1f} ms" for each in (plain, fused)]
            lines.append(f"| {batch}, {k} ({plain.rows}) | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def published_rates(name: str) -> list[float]:
    """Return the acceptance by position of the data set `name`."""
    from module_files import load_file

    module = load_file("rates", ROOT / "benches/gpu/rates.py")
    rates: list[float] = module.rates(name, len(module.RATES[name]))
    return rates


def reference_pair(**fields: Any) -> Any:
    """Return the roofline of both models on an H200 at the mean length of a request under load."""
    from kernel_launches import reference_configs
    from specrs.forecast.gpus import GPUS
    from specrs.forecast.roofline import Roofline
    from specrs.models.loader import load_config

    with tempfile.TemporaryDirectory() as folder:
        models = [load_config(model) for model in reference_configs(Path(folder))]
    return Roofline(GPUS["H200"], *models, context=INPUT_LEN + OUTPUT_LEN // 2, **fields)


@dataclass(frozen=True)
class Loads:
    """Predictions of one engine under load, at InstructCoder's acceptance."""

    of: dict[int, list[float]]
    """For each number of requests, the tokens per second at K = 0, 1, ...."""
    auto: dict[int, int]
    """For each number of requests, the K that `auto` chooses."""

    def best(self, count: int) -> int:
        """Return the best K that drafts."""
        rates = self.of[count]
        return max(range(1, len(rates)), key=rates.__getitem__)

    def cell(self, count: int, k: int) -> str:
        """Return the tokens per second at K = `k`, with their ratio to K = 0."""
        rates = self.of[count]
        return f"{rates[k]:,.0f}, {rates[k] / rates[0]:.2f} ({k})"


def loads(counts: Sequence[int], *, merges: bool = True, **fields: Any) -> Loads:
    """Return the predictions for each number of requests in `counts`. `fields` are those of the roofline. Without
    `merges`, prompts have a pass of their own."""
    from specrs.forecast.steady import StepCosts, auto_k, steady_state

    rates, roofline = published_rates("instructcoder"), reference_pair(**fields)
    costs = [StepCosts.of_engine(roofline, k, INPUT_LEN, merges=merges) for k in range(len(rates) + 1)]
    return Loads(
        {count: [steady_state(one, count, OUTPUT_LEN, rates).tokens_per_s for one in costs] for count in counts},
        {count: auto_k(costs, count, rates) for count in counts},
    )


def load_table() -> str:
    """Return the predicted throughput under load next to its goals, as the table in docs/benchmarks.md."""
    counts = list(GOALS)
    apart, now, cheap = loads(counts, merges=False), loads(counts), loads(counts, **DRAFTS[CHEAP_DRAFT])
    lines = [
        "| requests | K = 0: prompts apart | now | goal | vLLM | best K: prompts apart | now | FP8 draft, 32,768 ids | "
        "goal | vLLM | `auto` now |",
        "|" + " --- |" * 11,
    ]
    for count, (goal, ratio) in GOALS.items():
        plain, gain = VLLM[count]
        cells = [f"{apart.of[count][0]:,.0f}", f"{now.of[count][0]:,.0f}", f"{goal:,}", plain]
        cells += [one.cell(count, one.best(count)) for one in (apart, now, cheap)]
        cells += [f"{ratio:.2f}", f"{gain:.2f}", now.cell(count, now.auto[count])]
        lines.append(f"| {count} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def drafts_table() -> str:
    """Return what cheaper drafts are predicted to gain under load, as the table in docs/benchmarks.md."""
    counts = [1, 16, 32, 64, 128, 256]
    lines = [f"| draft | {' | '.join(map(str, counts))} |", "| --- |" + " --- |" * len(counts)]
    for name, fields in DRAFTS.items():
        found = loads(counts, **fields)
        lines.append(f"| {name} | {' | '.join(found.cell(count, found.best(count)) for count in counts)} |")
    return "\n".join(lines) + "\n"


def wave_table() -> str:
    """Return the predicted throughput of the wave that was measured on an H200, with its errors, as the table in
    docs/benchmarks.md. The engine had six batch sizes, no graphs of prompts, and steps of 2,048 tokens."""
    from specrs.backends.cuda.shapes import Buckets
    from specrs.forecast.steady import StepCosts, one_wave

    measured = json.loads(MEASURED.read_text(encoding="utf-8"))["throughput"]
    sizes, rates, roofline = [int(size) for size in measured["k0"]], published_rates("mt-bench"), reference_pair()
    lines = [f"| requests at once | {' | '.join(map(str, sizes))} |", "| --- |" + " --- |" * len(sizes)]
    for k in (0, 5):
        costs, cells = StepCosts(roofline, Buckets(sizes, k), k, INPUT_LEN, 2048), []
        for size in sizes:
            rate = one_wave(costs, size, OUTPUT_LEN, rates[:k], waves=1 + 512 // size)
            cells.append(f"{rate:,.0f} ({rate / measured[f'k{k}'][str(size)]['tokens_per_s'] - 1:+.1%})")
        lines.append(f"| K = {k} | {' | '.join(cells)} |".replace("%", " %"))
    return "\n".join(lines) + "\n"


def compiled_at_start(max_num_seqs: int = 64) -> list[tuple[str, int]]:
    """Return the number of kernels compiled for graphs, and how many more for graphs with chunks after verification and
    for launches outside graphs, at K = 5."""
    from kernel_launches import Recorder, fake_context, reference_configs
    from specrs.backends.cuda.context import sequences_of
    from specrs.backends.cuda.graphs import tasks
    from specrs.backends.cuda.shapes import MERGED_CHUNKS, Buckets, MergedShape, batch_buckets
    from specrs.backends.cuda.warm_up import warm_up

    k, sizes = 5, {"max_chunk_rows": 2048, "max_chunks": max_num_seqs, "merges": MERGED_CHUNKS}
    buckets = Buckets(batch_buckets(max_num_seqs), k, **sizes)
    with (
        tempfile.TemporaryDirectory() as folder,
        fake_context(*reference_configs(Path(folder)), k, max_num_seqs=max_num_seqs) as ctx,
    ):
        work = list(tasks(ctx, buckets, sequences_of(ctx.record.views, "num_decode")))
        kinds: dict[str, list[Callable[[], None]]] = {
            "graphs": [run for key, run in work if not isinstance(key, MergedShape)],
            "graphs with chunks after verification": [run for key, run in work if isinstance(key, MergedShape)],
            "outside of graphs": [lambda: warm_up(ctx, buckets)],
        }
        known: set[tuple[object, ...]] = set()
        found = []
        for kind, runs in kinds.items():
            before = len(known)
            for run in runs:
                with Recorder() as recorder:
                    run()
                known |= {launch.key() for launch in recorder.launches}
            found.append((kind, len(known) - before))
    return found


@dataclass(frozen=True)
class GraphTotals:
    """Graphs of an engine with Qwen3-32B and Qwen3-1.7B."""

    graphs: int
    kernels: int
    reserved: int
    """Kernels for which the sizing of the KV pool leaves room: each graph counts as the first of its kind."""


def graph_totals(max_num_seqs: int, *, every_k: bool = False) -> GraphTotals:
    """Return the totals at K = 5. Kernels are counted with one and two layers of each model. They are linear in both
    numbers of layers."""
    from kernel_launches import Recorder, fake_context, reference_configs
    from specrs.backends.cuda.context import sequences_of
    from specrs.backends.cuda.graphs import kind, tasks
    from specrs.backends.cuda.shapes import MERGED_CHUNKS, Buckets, batch_buckets
    from specrs.models.loader import load_config

    k, sizes = 5, {"max_chunk_rows": 2048, "max_chunks": max_num_seqs, "merges": MERGED_CHUNKS}
    buckets = Buckets(batch_buckets(max_num_seqs), k, every_k=every_k, **sizes)

    def counted(*layers: int) -> dict[Any, int]:
        with tempfile.TemporaryDirectory() as folder:
            models = reference_configs(Path(folder))
            for model, count in zip(models, layers, strict=True):
                fields = json.loads((model / "config.json").read_text())
                (model / "config.json").write_text(json.dumps(fields | {"num_hidden_layers": count}))
            found = {}
            with fake_context(*models, k, max_num_seqs=max_num_seqs) as ctx:
                for key, run in tasks(ctx, buckets, sequences_of(ctx.record.views, "num_decode")):
                    with Recorder() as recorder:
                        run()
                    found[key] = len(recorder.kernels)
            return found

    with tempfile.TemporaryDirectory() as folder:
        target, draft = (load_config(model).num_layers for model in reference_configs(Path(folder)))
    one, of_target, of_draft = counted(1, 1), counted(2, 1), counted(1, 2)
    whole = {key: n + (target - 1) * (of_target[key] - n) + (draft - 1) * (of_draft[key] - n) for key, n in one.items()}
    first: dict[Any, int] = {}
    for key, n in whole.items():
        first.setdefault(kind(key), n)
    return GraphTotals(len(whole), sum(whole.values()), sum(first[kind(key)] for key in whole))


def graphs_table(found: dict[str, GraphTotals]) -> str:
    """Return the totals, and the memory that they are predicted to take, as the table in docs/gpu.md."""
    head = ["| K | graphs | kernels | their memory | reserved |", "| --- | --- | --- | --- | --- |"]
    rows = [
        f"| {k} | {one.graphs} | {one.kernels:,} | {one.kernels * NODE_BYTES / 1e9:.1f} GB | "
        f"{one.reserved * NODE_BYTES / 1e9:.1f} GB |"
        for k, one in found.items()
    ]
    return "\n".join([*head, *rows]) + "\n"


def table(found: dict[str, tuple[int, int]]) -> str:
    """Return the counts as the table in docs/gpu.md."""
    rows = [f"| {name} | {greedy:,} | {sampled:,} |" for name, (greedy, sampled) in found.items()]
    return "\n".join(["| kernels of a | greedy | sampled |", "| --- | --- | --- |", *rows]) + "\n"


def predictions() -> dict[str, str]:
    """Return the tables of docs/benchmarks.md by the line with which each begins."""
    return {
        BEGIN_LOAD: load_table(),
        BEGIN_DRAFTS: drafts_table(),
        BEGIN_GAINS: gains_table(),
        BEGIN_WAVE: wave_table(),
    }


def page_with(text: str, page: str, begin: str = BEGIN) -> str:
    """Return `page` with its table replaced by `text`. The table begins with `begin`."""
    whole = f"{begin}\n{text}\n{END}"
    changed, count = re.subn(re.escape(begin) + ".*?" + re.escape(END), lambda _: whole, page, flags=re.DOTALL)
    assert count == 1, f"the page has {count} places for the table"
    return changed


def main() -> None:
    """Print the tables, or write them into the pages that have them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/gpu.md and docs/benchmarks.md")
    parser.add_argument("--products", type=Path, help="table of products of the engine; default: the package's")
    parser.add_argument("--start", action="store_true", help="print what the start compiles instead: a minute")
    parser.add_argument("--graphs", action="store_true", help="print what all graphs hold instead: minutes")
    arguments = parser.parse_args()
    if arguments.graphs:
        print(graphs_table({"5": graph_totals(256), "auto": graph_totals(256, every_k=True)}), end="")
        return
    if arguments.start:
        found = compiled_at_start()
        print(*(f"{kind}: {count}" for kind, count in found), f"all: {sum(n for _, n in found)}", sep="\n")
        return
    if arguments.products is not None:
        with with_products(arguments.products):
            print(table(counts()), end="")
        return
    kernels = {BEGIN: table(counts()), BEGIN_ASKING: asking_table(*asking())}
    predicted = predictions()
    if arguments.write:
        for path, tables in ((PAGE, kernels), (BENCHMARKS, predicted)):
            page = path.read_text(encoding="utf-8")
            for begin, text in tables.items():
                page = page_with(text, page, begin)
            path.write_text(page, encoding="utf-8")
    print(*kernels.values(), *predicted.values(), sep="\n", end="")


if __name__ == "__main__":
    main()
