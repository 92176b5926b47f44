"""llama.cpp's `llama-server` on a job, prompts as ids over HTTP on this machine. Models are GGUF files.

Times of a group of one are the server's own, without HTTP; of larger groups, whose requests are sent at once, the
total is the client's clock.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from peers.job import NGRAM, Group, Ids, Job, measure, read_job

HOST = "127.0.0.1"
SERVER = "llama-build/bin/llama-server"


def command(job: Job, port: int) -> list[str]:
    """Return the server's command line: one slot for each request of a batch, KV cache in the job's dtype."""
    cache = "f16" if job.is_quantized else {"float32": "f32", "bfloat16": "bf16"}[job.dtype]
    threads, context = str(job.threads), -(-job.context // 256) * 256
    found = [
        str(Path(job.peers) / SERVER), "-m", job.model, "-t", threads, "-tb", threads, "-np", str(job.batch),
        "-c", str(context * job.batch), "-ctk", cache, "-ctv", cache, "-fa", "auto", "-ngl", "0", "--warmup",
        "--cache-ram", "0", "--no-webui", "--host", HOST, "--port", str(port),
    ]  # fmt: skip
    if job.draft is not None:
        found += [
            "--spec-type", "draft-simple", "-md", job.draft, "--spec-draft-n-max", str(job.k),
            "--spec-draft-n-min", "0", "--spec-draft-p-min", "0", "-td", threads, "-tbd", threads,
            "-ctkd", cache, "-ctvd", cache,
        ]  # fmt: skip
    if job.method:
        found += [
            "--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", str(NGRAM), "--spec-ngram-simple-size-m",
            str(job.k),
        ]  # fmt: skip
    return found


def free_port() -> int:
    """Return a port that nothing listens on."""
    with closing(socket.socket()) as server:
        server.bind((HOST, 0))
        return int(server.getsockname()[1])


def ask(port: int, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """Send a request. Return the status and the decoded JSON answer."""
    with closing(http.client.HTTPConnection(HOST, port, timeout=600)) as connection:
        headers = {"Content-Type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def wait_until_ready(server: subprocess.Popen[bytes], port: int) -> None:
    """Return when the model is loaded.

    Raises RuntimeError if the server ended.
    """
    while server.poll() is None:
        try:
            if ask(port, "GET", "/health")[0] == 200:
                return
        except OSError:
            pass  # it does not listen yet
        time.sleep(0.05)
    raise RuntimeError(f"llama-server ended with {server.returncode} before it was ready")


def main(job: Job) -> None:
    """Measure the job. No text ends early: `peers.prepare_gguf` names a token that is never generated as the end, and
    files that were not made by it have theirs ignored."""
    port = free_port()
    began = time.perf_counter()
    with subprocess.Popen(command(job, port)) as server:
        try:
            wait_until_ready(server, port)
            load_s = time.perf_counter() - began
            with ThreadPoolExecutor(job.batch) as clients:
                measure(job, lambda prompts: run(job, port, clients, prompts), versions(job), load_s, server.pid)
        finally:
            server.terminate()


def run(job: Job, port: int, clients: ThreadPoolExecutor, prompts: Ids) -> Group:
    """Run one group, whose requests are sent at once."""

    def complete(prompt: list[int]) -> Any:
        greedy = {"temperature": 0.0, "top_k": 1, "samplers": ["top_k"]}
        body = {
            "prompt": prompt,
            "n_predict": job.new_tokens,
            "cache_prompt": False,
            "return_tokens": True,
            "ignore_eos": True,
            **greedy,
        }
        status, answer = ask(port, "POST", "/completion", body)
        if status != 200:
            raise RuntimeError(f"llama-server answered {status}: {str(answer)[:500]}")
        return answer

    start = time.perf_counter()
    answers = list(clients.map(complete, prompts))
    total_s = time.perf_counter() - start
    timings = [answer["timings"] for answer in answers]
    if len(prompts) == 1:
        total_s = (timings[0]["prompt_ms"] + timings[0]["predicted_ms"]) / 1e3
    first_s = sum(timing["prompt_ms"] for timing in timings) / len(timings) / 1e3
    ids = [answer["tokens"] for answer in answers]
    passes = None
    if job.drafts:
        passes = sum(map(len, ids)) - len(ids) - sum(timing.get("draft_n_accepted", 0) for timing in timings)
    return Group(ids, first_s, total_s, len(ids), passes)


def versions(job: Job) -> dict[str, str]:
    """Return the version that `llama-server --version` prints."""
    done = subprocess.run([str(Path(job.peers) / SERVER), "--version"], capture_output=True, text=True, check=True)
    lines = (done.stdout + done.stderr).splitlines()
    return {"llama.cpp": next((line.partition(":")[2].strip() for line in lines if line.startswith("version")), "?")}


if __name__ == "__main__":
    main(read_job())
