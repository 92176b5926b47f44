"""Host time per token at the start and at the end of one long stream: it must not grow with the stream.

A small random checkpoint with a context of 40,960 tokens writes `--tokens` tokens. Host time is the processor time of
the process without that of the runner. The checkpoint attends to the last 64 positions, so that reading a longer
context does not push the host's data out of the processor's caches. Prints microseconds per token in the first and in
the last thousand tokens and their ratio, for `AsyncLLM.generate` and for the server's events.

    OMP_NUM_THREADS=1 python benches/bench_stream_length.py
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from checkpoints import make_checkpoint
from specrs import AsyncLLM, SamplingParams
from specrs.chat_template import Rendered
from specrs.server.context import Context
from specrs.server.endpoints import chat_completions, completions
from specrs.server.generation import Generation
from specrs.server.metrics import Metrics
from specrs.server.protocol import ChatCompletionRequest, CompletionRequest
from specrs.server.tools import ToolSettings

CONTEXT = 40_960
STOP = ["a stop string that never comes", "zzzzzzzz", "qqqq"]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": 2},
    "stop": {"stop": STOP},
    "logprobs+stop": {"logprobs": 2, "stop": STOP},
}
ENDPOINTS: dict[str, tuple[Any, Any]] = {
    "completions": (CompletionRequest, completions),
    "chat": (ChatCompletionRequest, chat_completions),
}


class HostClock:
    """Processor time of the process, without that of a runner."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._passes = 0.0
        runner = llm._engine.runner
        for name in ("execute", "wait"):
            setattr(runner, name, self._timed(getattr(runner, name)))

    def _timed(self, function: Any) -> Any:
        def timed(*args: Any) -> None:
            begun = time.thread_time()
            function(*args)
            self._passes += time.thread_time() - begun

        return timed

    def seconds(self) -> float:
        """Seconds so far."""
        return time.process_time() - self._passes


class LastMessage:
    """A chat template that outputs the text of the last message."""

    async def render(self, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> Rendered:
        return Rendered(str(messages[-1]["content"]))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32_000)
    parser.add_argument("--paths", nargs="+", default=["CUMULATIVE", "DELTA", *ENDPOINTS])
    parser.add_argument("--options", nargs="+", default=[*OPTIONS], choices=[*OPTIONS])
    return parser.parse_args()


async def engine_stream(llm: AsyncLLM, kind: str, options: dict[str, Any], tokens: int) -> AsyncIterator[int]:
    """Return the number of characters of each output of a stream of `kind`."""
    if kind == "DELTA":
        from specrs import RequestOutputKind

        options = options | {"output_kind": RequestOutputKind.DELTA}
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=1, **options)
    async for output in llm.generate("the", params):
        yield len(output.outputs[0].delta)


async def server_stream(llm: AsyncLLM, path: str, options: dict[str, Any], tokens: int) -> AsyncIterator[int]:
    """Return the number of bytes of each event of an answer."""
    context = Context(
        llm=llm,
        model_names=["m"],
        metrics=Metrics(llm, "m"),
        templates=LastMessage(),  # type: ignore[arg-type]
        tools=ToolSettings(),
    )
    body = {"stream": True, "max_tokens": tokens, "ignore_eos": True, "seed": 1, **options}
    if path == "chat":
        body["messages"] = [{"role": "user", "content": "the"}]
        if "logprobs" in body:
            body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    else:
        body["prompt"] = "the"
    model, endpoint = ENDPOINTS[path]
    generation = await endpoint(context, model.model_validate(body))
    assert isinstance(generation, Generation)
    with generation:
        async for event in generation.events():
            yield len(event)


async def measure(llm: AsyncLLM, clock: HostClock, path: str, options: dict[str, Any], tokens: int) -> None:
    """Print host microseconds per token in the first and last thousand tokens of one stream."""
    stream = server_stream if path in ENDPOINTS else engine_stream
    async for _ in stream(llm, path, options, 64):
        pass
    outputs = llm._engine.outputs
    start = outputs.num_tokens
    times = [(0, clock.seconds())]  # by the number of tokens so far
    async for _ in stream(llm, path, options, tokens):
        times += [(outputs.num_tokens - start, clock.seconds())]
    part = min(1000, tokens // 4)
    first = _per_token([moment for moment in times if moment[0] <= part])
    last = _per_token([moment for moment in times if moment[0] >= tokens - part])
    print(f"first {first:7.1f} us  last {last:7.1f} us  ratio {last / first:5.2f}  ({len(times)} chunks)", flush=True)


def _per_token(moments: list[tuple[int, float]]) -> float:
    """Median over parts of 50 outputs of the microseconds per token: what other processes do adds to a few of them."""
    parts = [moments[i : i + 51] for i in range(0, len(moments) - 50, 50)]
    return statistics.median(1e6 * (part[-1][1] - part[0][1]) / (part[-1][0] - part[0][0]) for part in parts)


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        path = make_checkpoint(
            Path(folder),
            "mistral",
            sliding_window=64,
            kv_heads=1,
            group=1,
            head_dim=16,
            hidden=32,
            intermediate=32,
            layers=1,
            max_position_embeddings=CONTEXT,
        )
        llm = AsyncLLM(model=str(path), dtype="float32", threads=1, max_num_seqs=1, speculative_config=None)
        clock = HostClock(llm)
        try:
            for name in args.paths:
                for options in args.options:
                    print(f"{name:12} {options:14}", end=" ", flush=True)
                    asyncio.run(measure(llm, clock, name, OPTIONS[options], args.tokens))
        finally:
            llm.shutdown()


if __name__ == "__main__":
    main()
