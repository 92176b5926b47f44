"""CUDA graphs of iterations and of single passes: captured once, largest first, from one memory pool, then replayed.

The captured functions write into persistent buffers and allocate nothing. So a graph costs memory for its kernel nodes,
but none for activations.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial

import torch
from tqdm import tqdm

from specrs.backends.cuda.chunks import catch_up_pass, feeds_chunks, prompt_pass
from specrs.backends.cuda.context import Context, StepSequences
from specrs.backends.cuda.drafting import draft_pass
from specrs.backends.cuda.iteration import run, run_merged, verify_pass
from specrs.backends.cuda.shapes import Buckets, MergedShape, Shape

_COUNTED = 3
"""Captures by which the memory of a graph is measured."""
WARM_UPS = 2
"""Eager runs before the first capture. The first one compiles kernels and sets up cuBLAS, which must not happen in a
capture. Each later capture has one such run, for the kernels of its own shape."""


class Graphs:
    """Captured graphs by key: a `Shape` or `MergedShape` for whole iterations; `("draft", batch, pass, logits_mode)`,
    `("verify", batch, rows, greedy)`, `("prompts", ChunkShape)` or `("catch up", ChunkShape)` for passes."""

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
        """Capture `function` under `key`. It also runs eagerly before, which must be harmless."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(1 if self._graphs else WARM_UPS):
                function()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # In other modes NCCL's thread, which queries events of earlier exchanges, would end the capture.
        mode = "thread_local"
        with (
            _without_collection(),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=mode),
        ):
            function()
        self._graphs[key] = graph

    def replay(self, key: Hashable) -> None:
        """Enqueue the graph of `key` on the current stream. Raises KeyError if there is none."""
        self._graphs[key].replay()


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Run no garbage collection in the context. A finaliser that frees memory of the device in the middle of a capture
    makes the capture invalid."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Uncaptured:
    """Replacement for `Graphs` with the same keys, for `enforce_eager` and Triton's interpreter. Runs the same
    functions over the same shapes, op by op. It has no whole iterations, because a failing draft pass inside one could
    not be isolated."""

    def __init__(self, ctx: Context, buckets: Buckets, decode: StepSequences) -> None:
        self._work: dict[Hashable, Callable[[], None]] = {
            key: work for key, work in tasks(ctx, buckets, decode) if isinstance(key, tuple)
        }

    def __contains__(self, key: Hashable) -> bool:
        return key in self._work

    def replay(self, key: Hashable) -> None:
        """Run the function of `key` on the current stream. Raises KeyError if there is none."""
        self._work[key]()

    def run_all(self) -> None:
        """Run each function once, which compiles its kernels. The record must hold no sequences, so that nothing is
        written."""
        for work in self._work.values():
            work()


def tasks(ctx: Context, buckets: Buckets, decode: StepSequences) -> Iterable[tuple[Hashable, Callable[[], None]]]:
    """Yield `(key, function)` of everything that is captured, largest first."""
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
    for batch, i, logits_mode in buckets.draft_passes():
        yield ("draft", batch, i, logits_mode), lambda a=(i, batch, logits_mode): draft_pass(ctx, *a)  # type: ignore[misc]
    passes = {"prompts": prompt_pass, "catch up": catch_up_pass}
    for kind, function in passes.items() if feeds_chunks(ctx) else [("prompts", prompt_pass)]:
        for chunks in buckets.chunk_shapes():
            yield (kind, chunks), partial(function, ctx, chunks)


def capture_all(ctx: Context, buckets: Buckets, decode: StepSequences, device: torch.device) -> Graphs:
    """Capture every graph, with a progress bar. The record must hold no sequences, so that nothing is written."""
    graphs = Graphs(device)
    work = list(tasks(ctx, buckets, decode))
    for key, function in tqdm(work, desc="Capturing CUDA graphs", disable=None):
        graphs.capture(key, function)
    torch.cuda.synchronize(device)
    return graphs


def measure_bytes(ctx: Context, buckets: Buckets, decode: StepSequences, device: torch.device) -> int:
    """Return the device memory that all graphs will take, estimated from the first graph of each `kind`, which has the
    most kernels.

    Each of these is captured several times, and the mean counts: the driver allocates more than one graph needs at a
    time, so a single capture may take none. The first capture does not count. It also allocates what all graphs of a
    kind share, such as 32 MiB of cuBLAS workspace for the new stream.
    """
    graphs, work = Graphs(device), list(tasks(ctx, buckets, decode))
    each: dict[Hashable, int] = {}
    for key, function in work:
        if kind(key) in each:
            continue
        function()
        torch.cuda.synchronize(device)
        free = []
        for attempt in range(1 + _COUNTED):
            graphs.capture((key, attempt), function)
            graphs.replay((key, attempt))  # the driver uploads a graph at its first replay
            torch.cuda.synchronize(device)
            free.append(torch.cuda.mem_get_info(device)[0])
        each[kind(key)] = max(0, -(-(free[0] - free[-1]) // _COUNTED))
    return sum(each[kind(key)] for key, _ in work)


def kind(key: Hashable) -> Hashable:
    """Return what the graphs have in common of which the first in `tasks` has the most kernels."""
    if isinstance(key, MergedShape):
        return "merged", key.decode.depth
    if isinstance(key, Shape):
        return "whole", key.depth
    assert isinstance(key, tuple)
    name, *_, mode = key
    return (name, mode) if name in ("draft", "verify") else name
