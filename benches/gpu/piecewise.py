"""A pass as most engines capture it: attention runs op by op, with graphs in between. For comparison only."""

from __future__ import annotations

from collections.abc import Callable

import specrs.backends.cuda.decoder as decoder
import torch

from gpu.timing import ON_GPU


class Piecewise:
    """Call it to replay. Captures `function`, a pass, in pieces that end where its attention begins."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._steps: list[Callable[[], None]] = []
        if not ON_GPU:
            self._steps.append(function)
            return
        function()
        torch.cuda.synchronize()
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        original = decoder.paged_attention
        graph = torch.cuda.CUDAGraph()

        def attention(*args: object) -> None:
            nonlocal graph
            graph.capture_end()
            self._steps += [graph.replay, lambda: original(*args)]
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=pool)

        stream.wait_stream(torch.cuda.current_stream())
        decoder.paged_attention = attention  # type: ignore[assignment]
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=pool)
                function()
                graph.capture_end()
        finally:
            decoder.paged_attention = original
        self._steps.append(graph.replay)
        torch.cuda.current_stream().wait_stream(stream)

    def __call__(self) -> None:
        for step in self._steps:
            step()
