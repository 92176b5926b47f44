"""Measures the cost of serving: streamed tokens per second over HTTP against `LLM.generate` with the same batch.

Both run the bundled pair on one thread, greedy, `--concurrency` prompts at a time, in alternating rounds. The client is
this process, with raw sockets; the server is a process of its own. Prints tokens per second of each round, the medians
and their ratio, and the ratio of processor time, which says more on a machine that does other work; `--save` appends
them to a file as JSON.

    OMP_NUM_THREADS=1 python benches/bench_server.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from specrs import LLM, SamplingParams
from specrs.pair.prompts import PROMPTS


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--num-speculative-tokens", type=int, default=5)
    parser.add_argument("--save", type=Path)
    return parser.parse_args()


@contextmanager
def server(num_speculative_tokens: int) -> Iterator[int]:
    """Run a server on a free port. Yields the port."""
    command = [
        *(sys.executable, "-c", "import sys; from specrs.cli import main; sys.exit(main())", "serve", "--port", "0"),
        f"--speculative-config.num_speculative_tokens={num_speculative_tokens}",
        "--disable-uvicorn-access-log",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"on http://127\.0\.0\.1:(\d+)", line):
                yield int(found[1])
                break
        else:
            raise SystemExit("the server did not start")
    finally:
        process.terminate()
        process.wait()


async def stream(port: int, prompt: str, max_tokens: int) -> tuple[int, int]:
    """Complete `prompt`. Return the numbers of completion tokens and of chunks."""
    body = json.dumps(
        {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    tokens = chunks = 0
    while (line := await reader.readline()) != b"data: [DONE]\n":
        if line.startswith(b"data: "):
            chunk = json.loads(line[6:])
            chunks += bool(chunk["choices"])
            if chunk["usage"]:
                tokens = chunk["usage"]["completion_tokens"]
    writer.close()
    return tokens, chunks


def cpu_seconds(port: int) -> float:
    """Return the processor time of the server so far."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("process_cpu_seconds_total"))


async def round_over_http(port: int, prompts: list[str], max_tokens: int) -> tuple[float, int]:
    """Complete all prompts at once. Return the tokens per second and the number of chunks."""
    start = time.perf_counter()
    done = await asyncio.gather(*(stream(port, prompt, max_tokens) for prompt in prompts))
    seconds = time.perf_counter() - start
    return sum(tokens for tokens, _ in done) / seconds, sum(chunks for _, chunks in done)


def round_in_process(llm: LLM, prompts: list[str], max_tokens: int) -> float:
    """Return the tokens per second of `LLM.generate` on all prompts."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


def main() -> None:
    arguments = parse()
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(arguments.concurrency)]
    tokens = arguments.max_tokens
    llm = LLM(
        dtype="float32",
        speculative_config={"num_speculative_tokens": arguments.num_speculative_tokens},
        enable_prefix_caching=True,
    )
    direct, http, chunks = [], [], 0
    cpu_direct = cpu_http = 0.0
    with server(arguments.num_speculative_tokens) as port:
        asyncio.run(round_over_http(port, prompts, 16))
        round_in_process(llm, prompts, 16)
        for i in range(arguments.rounds):
            started = time.process_time()
            direct.append(round_in_process(llm, prompts, tokens))
            cpu_direct += time.process_time() - started
            started = cpu_seconds(port)
            speed, chunks = asyncio.run(round_over_http(port, prompts, tokens))
            cpu_http += cpu_seconds(port) - started
            http.append(speed)
            print(f"round {i + 1}: LLM.generate {direct[-1]:.0f} tokens/s, HTTP {speed:.0f} tokens/s, {chunks} chunks")
    result = {
        "bench": "server",
        "concurrency": arguments.concurrency,
        "max_tokens": tokens,
        "num_speculative_tokens": arguments.num_speculative_tokens,
        "rounds": arguments.rounds,
        "llm_generate_tokens_per_second": round(statistics.median(direct), 1),
        "http_tokens_per_second": round(statistics.median(http), 1),
        "ratio": round(statistics.median(http) / statistics.median(direct), 4),
        "cpu_seconds_ratio": round(cpu_http / cpu_direct, 4),
        "chunks": chunks,
        "specrs": version("specrs"),
        "torch": version("torch"),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
    }
    print(json.dumps(result))
    if arguments.save is not None:
        with arguments.save.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
