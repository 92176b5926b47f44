"""Effects of one client on others, on loopback with default limits: pauses of /health, memory, places in the batch, log
lines.

Each bound is a time or a size, so that these tests are `make test-abuse`, and not part of `make test`. Times are for an
idle machine; `SPECRS_MOST_PAUSE` gives another one: where cores and memory are shared, only what hangs is found.
"""

import json
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from server.harness import Answer, Server, serving

MOST_PAUSE = float(os.environ.get("SPECRS_MOST_PAUSE", "0.25"))
MEMORY_FACTOR, MEMORY_FLOOR = 20, 64 * 2**20
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def victim() -> Iterator[Server]:
    with serving("--max-model-len", "2048", "--disable-uvicorn-access-log") as server:
        server.complete(prompt="x", max_tokens=1, structured_outputs={"choice": ["a"]})
        yield server


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a model with SmolLM2-135M's sizes and random weights."""
    folder = tmp_path_factory.mktemp("larger")
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps({**config, **sizes, **heads, "rms_norm_eps": 1e-5}))
    flags = ("--load-format", "dummy", "--skip-tokenizer-init", "--max-model-len", "4096", "--dtype", "bfloat16")
    with serving("--model", str(folder), *flags) as server:
        server.complete(prompt=[5], max_tokens=1)
        yield server


@pytest.fixture
def server(victim: Server) -> Iterator[Server]:
    yield victim
    assert victim.process.poll() is None, "".join(victim.lines)
    victim.wait_until_idle()
    assert not any("never retrieved" in line or "Traceback" in line for line in victim.lines), "".join(victim.lines)


def ask(port: int, pipe: Connection) -> None:
    """Run in a process of its own: ask for /health until told to end, and send the longest time of an answer through
    `pipe`."""
    import http.client

    longest = 0.0
    pipe.send(longest)
    while not pipe.poll():
        then = time.monotonic()
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            connection.request("GET", "/health")
            assert connection.getresponse().status == 200
        longest = max(longest, time.monotonic() - then)
        time.sleep(0.005)
    pipe.send(longest)


@contextmanager
def watching(server: Server, most: float = MOST_PAUSE) -> Iterator[None]:
    """Check that /health answers within `most` seconds while the block runs."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=ask, args=(server.port, theirs))
    process.start()
    try:
        ours.recv()
        yield
        ours.send(None)
        longest = ours.recv()
    finally:
        process.join()
    assert longest <= most, f"/health took {longest:.3f} s"


def resident(server: Server, field: str = "VmRSS") -> int:
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def reset_peak(server: Server) -> None:
    Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")


BODIES: dict[str, tuple[str, Any, int]] = {
    "a prompt of 16 MB": (COMPLETIONS, {"prompt": "a" * 16_700_000, "max_tokens": 1}, 400),
    "a prompt of 16 MB of words": (COMPLETIONS, {"prompt": "if x: y = [1, 2]\n" * 900_000}, 400),
    "a text of 15 MB to tokenize": ("/tokenize", {"prompt": "a" * 15_000_000}, 400),
    "five million ids": (COMPLETIONS, {"prompt": [5] * 5_000_000}, 413),
    "five million ids to detokenize": ("/detokenize", {"tokens": [5] * 5_000_000}, 413),
    "4,000 messages": (CHAT, {"messages": [{"role": "user", "content": "a" * 4000}] * 4000, "max_tokens": 1}, 400),
    "deep JSON": (COMPLETIONS, b'{"prompt":' + b"[" * 8_000_000, 400),
    "a field's name of 1 MB": (COMPLETIONS, {"prompt": "x", "q" * 1_000_000: 1}, 400),
    "log probabilities of 512 prompts": (
        COMPLETIONS,
        {"prompt": [[5] * 2000] * 512, "echo": True, "logprobs": 20, "max_tokens": 0},
        413,
    ),
    "log probabilities of 100 prompts": (
        COMPLETIONS,
        {"prompt": [[5] * 2000] * 100, "echo": True, "logprobs": 20, "max_tokens": 0},
        400,
    ),
    "20,000 choices": (
        COMPLETIONS,
        {"prompt": "x", "max_tokens": 3, "structured_outputs": {"choice": [f"label{i}" for i in range(20_000)]}},
        200,
    ),
    "a grammar of 60,000 alternatives": (
        COMPLETIONS,
        {"prompt": "x", "structured_outputs": {"grammar": "start: " + " | ".join(f'"l{i}"' for i in range(60_000))}},
        400,
    ),
    "a schema of 60,000 tools' names": (
        CHAT,
        {
            "messages": [{"role": "user", "content": "x"}],
            "tool_choice": "required",
            "max_tokens": 3,
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": f"f{i}",
                        "parameters": {"type": "object", "properties": {"x": {"enum": [f"e{j}" for j in range(1000)]}}},
                    },
                }
                for i in range(60)
            ],
        },
        200,
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_one_request_pauses_no_other_and_its_memory_comes_back(server: Server, name: str) -> None:
    path, body, status = BODIES[name]
    encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
    before = resident(server)
    reset_peak(server)
    with watching(server):
        answer = server.post(path, encoded)
    assert answer.status == status, answer.body[:500]
    assert len(answer.body) < 4096
    assert resident(server, "VmHWM") - before <= MEMORY_FACTOR * len(encoded) + MEMORY_FLOOR


def test_three_long_prompts_at_once(server: Server) -> None:
    encoded = json.dumps({"prompt": "a" * 16_700_000}).encode()
    header = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(encoded)
    with ExitStack() as stack, watching(server, 2 * MOST_PAUSE):
        connections = [stack.enter_context(closing(server.connect())) for _ in range(3)]
        for connection in connections:
            connection.sendall(header + encoded)
        for connection in connections:
            assert connection.recv(64).startswith(b"HTTP/1.1 400 ")


TOLD = {"echo": True, "logprobs": 20}


@pytest.mark.parametrize("prompts", [1, 6])
@pytest.mark.parametrize("asked", [{}, TOLD], ids=["plain", "log probabilities"])
def test_long_prompts_pause_no_other_stream(server: Server, prompts: int, asked: dict[str, Any]) -> None:
    """Check that long prompts pause no other stream: their chunks in others' steps are bounded, and log probabilities
    are written 64 positions at a time."""
    pause_of_a_stream(server, {"prompt": [ids(i, 2000) for i in range(prompts)], "max_tokens": 1, **asked})


def test_long_prompts_of_a_larger_model_pause_no_other_stream(larger: Server) -> None:
    """Check long prompts of a larger model, where 2,000 tokens take seconds."""
    pause_of_a_stream(larger, {"prompt": ids(1, 2000), "max_tokens": 1})


def ids(seed: int, count: int) -> list[int]:
    """Return a random prompt of `count` tokens. Prompts of other seeds share nothing with it."""
    own = random.Random(seed)
    return [own.randrange(5, 1500) for _ in range(count)]


def pause_of_a_stream(server: Server, body: dict[str, Any]) -> None:
    """Check that a stream that runs while `body` is answered never pauses for longer than the bound."""
    answers: list[Answer] = []
    with server.streaming(prompt=[7, 8, 9], max_tokens=1900, ignore_eos=True) as events:
        next(events)
        asking = threading.Thread(target=lambda: answers.append(server.post(COMPLETIONS, body)))
        asking.start()
        longest, last = 0.0, time.monotonic()
        for _ in events:
            now = time.monotonic()
            longest, last = max(longest, now - last), now
            if answers:
                break
        asking.join()
    assert [answer.status for answer in answers] == [200], answers
    print(f"the longest pause: {longest:.3f} s")
    assert longest <= MOST_PAUSE, f"the stream paused {longest:.3f} s"


def test_1500_silent_sockets(server: Server) -> None:
    """Check 1,500 silent sockets: requests on new connections are answered at once, and the server logs at most about a
    line a second."""
    then, lines = time.monotonic(), len(server.lines)
    with ExitStack() as stack:
        for _ in range(1500):
            stack.enter_context(closing(server.connect()))
        server.get("/version")  # after those that were not accepted yet
        for _ in range(20):
            asked = time.monotonic()
            answer: Answer = server.get("/version")
            assert answer.status == 200
            assert time.monotonic() - asked <= 0.4 * MOST_PAUSE
    assert len(server.lines) - lines <= time.monotonic() - then + 1
