"""Time of a recorded coding session with a restart of the server, against llama.cpp's server on the same file.

    python benches/bench_session.py FILE.gguf [--llama-server PATH] [--threads 2] [--rounds 3] [--constrain]
        [--save-slot] [--out FILE.json]

`coding_session.py` has the session: 20 requests with tools, edits and test runs. Both servers get the same prompts as
token ids, one request at a time, and generate greedily as many tokens as the recorded answer has. The answers are
discarded: the history has the recorded ones. After request 10 the server restarts.

- specrs: drafters `grammar` and `suffix`, and the prefix cache on disk
- specrs, plain: no drafter and no cache on disk
- llama.cpp: `--spec-default`, its prompt cache in memory (`--cache-ram`), and with `--save-slot` its slot, which is
  saved before the restart and restored after it

`--constrain` demands by a JSON schema that an answer is a call where the recorded one is. It may then end early.

The servers take turns in each round, and every round begins with empty caches. Seconds are those of the requests
alone, and with the start and the restart. The restart goes from the last answer to the new server's readiness, with
saving and restoring a slot. Figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import http.client
import json
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import specrs
from coding_session import REQUESTS, RESTART_AFTER, TOOLS, messages
from peers.run_llama_cpp import HOST, ask, free_port
from specrs.tokenizer import Tokenizer

MAIN = "import sys; from specrs.cli import main; sys.exit(main())"
SLOT = {"filename": "session.bin"}


@dataclass(frozen=True)
class Contestant:
    """A server with its options. `command(port, folder)` is its command line; `folder` is empty at its first start.

    `schema_field(schema)` are the fields of a request that demand JSON of `schema`. With `saves_slot`, KV is saved by a
    request before a restart, and restored by one after it.
    """

    name: str
    command: Callable[[int, Path], list[str]]
    schema_field: Callable[[dict[str, Any]], dict[str, Any]]
    saves_slot: bool = False


@dataclass(frozen=True)
class Times:
    """Seconds of one session's requests, of the start and the restart, and counts of tokens."""

    requests: list[float]
    starts: list[float]
    tokens: int
    cached_tokens: int

    @property
    def answering(self) -> float:
        """Seconds of all requests."""
        return sum(self.requests)

    @property
    def total(self) -> float:
        """Seconds of all requests, the start and the restart."""
        return sum(self.requests) + sum(self.starts)


def call_schema() -> dict[str, Any]:
    """Return the JSON schema of a call of one of the session's tools."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool["function"]["name"]}, "arguments": tool["function"]["parameters"]},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in TOOLS
    ]
    return {"anyOf": calls}


def contestants(args: argparse.Namespace) -> list[Contestant]:
    """Return the servers that the arguments ask for."""
    model, threads, length = str(args.model), str(args.threads), str(args.max_model_len)

    def specrs_command(port: int, *more: str) -> list[str]:
        return [
            sys.executable, "-c", MAIN, "serve", model, "--host", HOST, "--port", str(port), "--threads", threads,
            "--max-model-len", length, "--max-num-seqs", "1", "--disable-uvicorn-access-log", *more,
            *shlex.split(args.specrs_args),
        ]  # fmt: skip

    def full(port: int, folder: Path) -> list[str]:
        drafts = ("--spec-method", "grammar,suffix")
        return specrs_command(port, *drafts, "--kv-cache-path", str(folder / "kv"))

    def plain(port: int, folder: Path) -> list[str]:
        return specrs_command(port, "--spec-tokens", "0", "--spec-method", "suffix")

    def llama(port: int, folder: Path) -> list[str]:
        slot = ["--slot-save-path", str(folder)] if args.save_slot else []
        return [
            str(args.llama_server), "-m", model, "-t", threads, "-tb", threads, "-np", "1", "-c", length, "-ngl", "0",
            "--spec-default", "--cache-ram", str(args.cache_ram), *slot, "--no-webui", "--host", HOST, "--port",
            str(port), *shlex.split(args.llama_args),
        ]  # fmt: skip

    def outputs(schema: dict[str, Any]) -> dict[str, Any]:
        return {"structured_outputs": {"json": schema}}

    found = [Contestant("specrs", full, outputs), Contestant("specrs, plain", plain, outputs)]
    if args.llama_server is not None:
        found.append(Contestant("llama.cpp", llama, lambda schema: {"json_schema": schema}, args.save_slot))
    return found


def make_requests(model: Path, characters: int | None) -> list[dict[str, Any]]:
    """Return the bodies of the session's requests. With `characters`, only so many of each message are used."""
    tokenizer = Tokenizer(str(model))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    bodies = []
    for i, request in enumerate(REQUESTS):
        chat = [message | {"content": message["content"][:characters]} for message in messages(i)]
        prompt, answer = encode(tokenizer.render_chat(chat)), encode(request.answer[:characters])
        bodies.append({"prompt": prompt, "max_tokens": len(answer), "temperature": 0})
    return bodies


@contextmanager
def started(command: list[str], port: int, log: Path) -> Iterator[None]:
    """Run a server and wait until it is ready. Ends it afterwards.

    Raises SystemExit with the end of its output if it ends by itself.
    """
    with log.open("ab") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            while not is_ready(port):
                if process.poll() is not None:
                    raise SystemExit(
                        f"{shlex.join(command)}: ended with {process.returncode}\n{log.read_text()[-2000:]}"
                    )
                time.sleep(0.01)
            yield
        finally:
            process.terminate()


def is_ready(port: int) -> bool:
    """Return True if the server's model is loaded."""
    with closing(http.client.HTTPConnection(HOST, port, timeout=60)) as connection:
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == HTTPStatus.OK
        except OSError:
            return False  # it does not listen yet


def expect(port: int, path: str, body: dict[str, Any]) -> tuple[Any, float]:
    """Send a request and return its answer and seconds. Raises SystemExit if it fails."""
    begun = time.perf_counter()
    status, answer = ask(port, "POST", path, body)
    if status != HTTPStatus.OK:
        raise SystemExit(f"{path}: {status} {answer}")
    return answer, time.perf_counter() - begun


def run_session(contestant: Contestant, bodies: list[dict[str, Any]], *, constrain: bool) -> Times:
    """Send the session's requests to a new server, which restarts once, and return the times."""
    times, starts, tokens, cached = list[float](), list[float](), 0, 0
    schema = call_schema()
    with tempfile.TemporaryDirectory() as name:
        folder, begun = Path(name), time.perf_counter()
        for part in (range(RESTART_AFTER), range(RESTART_AFTER, len(bodies))):
            port = free_port()
            with started(contestant.command(port, folder), port, folder / "log"):
                if part.start and contestant.saves_slot:
                    expect(port, "/slots/0?action=restore", SLOT)
                starts.append(time.perf_counter() - begun)
                for i in part:
                    is_free = not (constrain and REQUESTS[i].answer.startswith("<tool_call>"))
                    more = {"ignore_eos": True} if is_free else contestant.schema_field(schema)
                    answer, seconds = expect(port, "/v1/completions", bodies[i] | more)
                    count, details = answer["usage"]["completion_tokens"], answer["usage"].get("prompt_tokens_details")
                    if is_free and count < bodies[i]["max_tokens"]:
                        raise SystemExit(f"{contestant.name}: request {i + 1} ended after {count} tokens")
                    times.append(seconds)
                    tokens += count
                    cached += (details or {}).get("cached_tokens") or answer.get("timings", {}).get("cache_n", 0)
                begun = time.perf_counter()  # of the restart
                if not part.start and contestant.saves_slot:
                    expect(port, "/slots/0?action=save", SLOT)
    return Times(times, starts, tokens, cached)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-server", type=Path, help="default: specrs alone")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--constrain", action="store_true", help="calls follow a JSON schema")
    parser.add_argument("--cache-ram", type=int, default=8192, help="MiB of llama.cpp's prompt cache")
    parser.add_argument("--save-slot", action="store_true", help="llama.cpp's KV outlives the restart")
    parser.add_argument("--specrs-args", default="", help="more options of `specrs serve`")
    parser.add_argument("--llama-args", default="", help="more options of `llama-server`")
    parser.add_argument("--characters", type=int, help="of each message, for models with a short context")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    bodies = make_requests(args.model, args.characters)
    names = contestants(args)
    runs: dict[str, list[Times]] = {one.name: [] for one in names}
    for i in range(args.rounds):
        for one in names[i % len(names) :] + names[: i % len(names)]:
            runs[one.name].append(run_session(one, bodies, constrain=args.constrain))
    rows = []
    for name, of in runs.items():
        row: dict[str, Any] = {"server": name, "requests": len(of[0].requests), "restarts": len(of[0].starts) - 1}
        for figure in ("answering", "total"):
            row[f"{figure}_s"] = round(statistics.median(getattr(times, figure) for times in of), 3)
        row |= {"tokens": of[0].tokens, "cached_prompt_tokens": of[0].cached_tokens}
        row["rounds"] = [{"requests_s": times.requests, "starts_s": times.starts} for times in of]
        rows.append(row)
        print(
            f"{name:14} {row['requests']} requests, {row['restarts']} restart: {row['answering_s']:.2f} s, "
            f"with starts {row['total_s']:.2f} s; {row['tokens']} tokens generated, "
            f"{row['cached_prompt_tokens']} of the prompts from a cache",
            flush=True,
        )
    ours, others = rows[0], rows[1:]
    ratios = {row["server"]: {key: row[key] / ours[key] for key in ("answering_s", "total_s")} for row in others}
    for name, ratio in ratios.items():
        print(f"{name} takes {ratio['answering_s']:.2f} times as long as specrs, {ratio['total_s']:.2f} with starts")
    if args.out is not None:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        left_out = ("out", "model", "llama_server")
        report = {
            "machine": platform.processor() or platform.machine(),
            "settings": {name: value for name, value in vars(args).items() if name not in left_out},
            "model": args.model.name,
            "versions": {"specrs": specrs.__version__, "commit": commit.stdout.strip()},
            "prompt_tokens": [len(body["prompt"]) for body in bodies],
            "rows": rows,
            "ratios": ratios,
        }
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
