"""CUDA graphs of iterations and of single passes: captured once, largest first, from one memory pool, then replayed.

Decides nothing about launches. The functions captured write into persistent buffers and allocate nothing, so a graph
costs its kernel nodes and no activations.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import partial

import torch
from tqdm import tqdm

from specrs.runner.cuda.chunks import catch_up_pass, feeds_chunks, prompt_pass
from specrs.runner.cuda.context import Context, LaunchEntries
from specrs.runner.cuda.drafting import draft_pass
from specrs.runner.cuda.iteration import run, run_merged, verify_pass
from specrs.runner.cuda.shapes import Buckets

WARM_UPS = 2
"""Eager runs before a capture: the first compiles kernels and sets up cuBLAS, which a capture must not see."""


class Graphs:
    """Graphs by what they do: a `Shape` or `MergedShape`, `("draft", batch, pass, tail)`,
    `("verify", batch, rows, greedy)`, or `("prompts", ChunkShape)` and `("catch up", ChunkShape)`."""

    def __init__(self, device: torch.device) -> None:
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def capture(self, key: Hashable, function: Callable[[], None]) -> None:
        """Record `function` under `key`; it runs eagerly before, which must do no harm."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                function()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # The mode keeps a thread of NCCL, which asks for events of earlier exchanges, from ending the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            function()
        self._graphs[key] = graph

    def replay(self, key: Hashable) -> None:
        """Enqueue the graph of `key` on the current stream. KeyError if there is none."""
        self._graphs[key].replay()


class Uncaptured:
    """What is run in place of graphs, by the same keys (`enforce_eager`, and Triton's interpreter): the same functions
    over the same shapes, op by op. No whole iterations, in which a draft pass that raises could not be told apart."""

    def __init__(self, ctx: Context, buckets: Buckets, decode: LaunchEntries) -> None:
        self._work: dict[Hashable, Callable[[], None]] = {
            key: work for key, work in tasks(ctx, buckets, decode) if isinstance(key, tuple)
        }

    def __contains__(self, key: Hashable) -> bool:
        return key in self._work

    def replay(self, key: Hashable) -> None:
        """Run the function of `key` on the current stream. KeyError if there is none."""
        self._work[key]()

    def run_all(self) -> None:
        """Each once, which compiles its kernels; the record must hold no entries, so that nothing is written."""
        for work in self._work.values():
            work()


def tasks(ctx: Context, buckets: Buckets, decode: LaunchEntries) -> Iterable[tuple[Hashable, Callable[[], None]]]:
    """Everything that is captured, largest first: `(key, function)`."""
    for shape in buckets.whole_shapes():
        yield shape, lambda shape=shape: run(ctx, shape, decode)  # type: ignore[misc]
    for merged in buckets.merged_shapes():
        yield merged, partial(run_merged, ctx, merged)
    for batch, rows, greedy in buckets.verify_passes():
        width = buckets.max_k + 1
        yield (
            ("verify", batch, rows, greedy),
            lambda a=(batch, rows, width), g=greedy: verify_pass(ctx, *a, greedy=g),  # type: ignore[misc]
        )
    for batch, i, tail in buckets.draft_passes():
        yield ("draft", batch, i, tail), lambda a=(i, batch, tail): draft_pass(ctx, *a)  # type: ignore[misc]
    passes = {"prompts": prompt_pass, "catch up": catch_up_pass}
    for kind, function in passes.items() if feeds_chunks(ctx) else [("prompts", prompt_pass)]:
        for chunks in buckets.chunk_shapes():
            yield (kind, chunks), partial(function, ctx, chunks)


def capture_all(ctx: Context, buckets: Buckets, decode: LaunchEntries, device: torch.device) -> Graphs:
    """Capture every graph with a progress bar; the record must hold no entries, so that nothing is written."""
    graphs = Graphs(device)
    work = list(tasks(ctx, buckets, decode))
    for key, function in tqdm(work, desc="Capturing CUDA graphs", disable=None):
        graphs.capture(key, function)
    torch.cuda.synchronize(device)
    return graphs


def measure_bytes(ctx: Context, buckets: Buckets, decode: LaunchEntries, device: torch.device) -> int:
    """Device memory that all graphs will take, by capturing the first and largest of each kind.

    Each is captured twice and the second counts: the first one's interval has what is allocated once for all of a kind,
    32 MiB of cuBLAS workspace for the new stream among it.
    """
    graphs, work = Graphs(device), list(tasks(ctx, buckets, decode))
    each: dict[str, int] = {}
    for key, function in work:
        kind = _kind(key)
        if kind in each:
            continue
        function()
        torch.cuda.synchronize(device)
        for attempt in range(2):
            before = torch.cuda.mem_get_info(device)[0]
            graphs.capture((key, attempt), function)
            graphs.replay((key, attempt))  # the driver uploads a graph at its first replay
            torch.cuda.synchronize(device)
            each[kind] = max(0, before - torch.cuda.mem_get_info(device)[0])
    return sum(each[_kind(key)] for key, _ in work)


def _kind(key: Hashable) -> str:
    return str(key[0]) if isinstance(key, tuple) else "whole"
