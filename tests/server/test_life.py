"""The life of the server process: clients that leave, signals, a broken engine. What ends leaves nothing running."""

import json
import signal
import socket
import struct
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from .harness import MAIN, Server, alive, serving

LONG: dict[str, Any] = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}
ENDLESS: dict[str, Any] = {"prompt": "x", "n": 4, "max_tokens": 2000, "ignore_eos": True}


def send(connection: Any, body: dict[str, Any], path: str = "/v1/completions") -> None:
    encoded = json.dumps(body).encode()
    connection.sendall(
        b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(encoded)) + encoded
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reset", [False, True])
def test_a_client_that_goes_away_frees_its_blocks(server: Server, stream: bool, reset: bool) -> None:
    before = server.wait_until_idle()
    with closing(server.connect()) as connection:
        if reset:
            # lingering for no time: closing sends a reset
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        send(connection, LONG | {"stream": stream, "n": 2})
        server.wait_until("vllm:num_requests_running", 2)
    after = server.wait_until_idle()
    # had they run to their end, they would have made 800
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] < 700
    aborted = 'vllm:request_success_total{finished_reason="abort"}'
    assert after[aborted] - before[aborted] == 2


def test_clients_that_go_away_while_they_wait(server: Server) -> None:
    """Check clients that disconnect while they wait, more than can run at once: the waiting requests end too, and the
    next answer comes immediately."""
    held = [server.connect() for _ in range(40)]
    for connection in held:
        send(connection, LONG | {"stream": True})
    server.wait_until("vllm:num_requests_waiting", 1)
    for connection in held:
        connection.close()
    before = server.metrics()["vllm:generation_tokens_total"]
    assert server.complete(prompt="y", max_tokens=4, ignore_eos=True)["usage"]["completion_tokens"] == 4
    after = server.wait_until_idle()
    assert after["vllm:generation_tokens_total"] - before < 40 * 400


def errors_of(events: list[Any]) -> list[dict[str, Any]]:
    return [event["error"] for event in events if isinstance(event, dict) and "error" in event]


def test_a_signal_drains_and_nothing_new_is_taken_in() -> None:
    with serving("--shutdown-timeout", "60") as server, server.connect() as kept:
        with server.streaming(**LONG) as events:
            first = next(events)
            children = server.children()
            server.process.send_signal(signal.SIGTERM)
            while server.get("/health").status == 200:
                continue
            send(kept, {"prompt": "y"})
            answer = kept.recv(4096)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after" in answer.lower()
            rest = list(events)
        assert rest[-1] == "[DONE]"
        assert errors_of(rest) == []
        assert rest[-2]["choices"][0]["finish_reason"] == "length"
        assert first["choices"]
        assert server.wait() == 0
        assert children
        assert not any(alive(pid) for pid in children)


@pytest.mark.parametrize("signals", [2, 1])
def test_what_is_not_drained_is_aborted(signals: int) -> None:
    """Check that requests are aborted which are not finished by a second signal, or immediately if there is no time
    to drain."""
    flags = ("--shutdown-timeout", "600") if signals == 2 else ()
    with serving(*flags) as server, closing(server.connect(receive_buffer=4096)) as deaf:
        send(deaf, ENDLESS | {"stream": True, "logprobs": 20})
        with server.streaming(**ENDLESS) as events:
            next(events)
            server.wait_until("vllm:generation_tokens_total", 300)
            server.process.send_signal(signal.SIGTERM)
            if signals == 2:
                while server.get("/health").status == 200:
                    continue
                server.process.send_signal(signal.SIGINT)
            rest = list(events)
        assert rest[-1] == "[DONE]"
        (error,) = errors_of(rest)
        assert error["code"] == 503
        assert error["type"] == "ServiceUnavailableError"
        assert server.wait() == 0


BREAKING = """
import os, time
from specrs.engine.engine import Engine
step, execute = Engine.step, Engine._execute
def broken_step(self):
    if any(request.params.max_tokens == 77 for request in self.requests.values()):
        raise RuntimeError("a fault at /some/path")
    while not os.path.exists(GATE) and any(request.params.max_tokens == 79 for request in self.requests.values()):
        time.sleep(0.001)
    return step(self)
def broken_execute(self, slot, header):
    if any(request.params.max_tokens == 78 for request in self.requests.values()):
        runner, self.runner.execute = self.runner.execute, None
        try:
            return execute(self, slot, header)
        finally:
            self.runner.execute = runner
    return execute(self, slot, header)
Engine.step, Engine._execute = broken_step, broken_execute
"""


def test_a_step_that_fails_and_an_engine_that_breaks(tmp_path: Path) -> None:
    gate = tmp_path / "open"
    with serving(code=f"GATE = {str(gate)!r}{BREAKING}{MAIN}") as server:
        # a step that takes its time: meanwhile requests that need no engine are answered
        with server.streaming(**ENDLESS | {"max_tokens": 79}) as events:
            for path in ("/health", "/v1/models", "/version"):
                assert server.get(path).status == 200
            assert server.post("/tokenize", {"prompt": "x" * 1000}).status == 200
            assert server.post("/v1/completions", {"prompt": ""}).status == 400
            gate.touch()
            assert list(events)[-1] == "[DONE]"
        # a step: its requests end with an error, and the server serves on
        failed = server.post("/v1/completions", {"prompt": "x", "max_tokens": 78})
        assert failed.status == 500
        assert failed.error["type"] == "InternalServerError"
        assert server.complete(prompt="x", max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3
        assert server.get("/health").status == 200
        # the engine: streams and new requests end with an error, and the process ends
        with server.streaming(**ENDLESS) as events:
            next(events)
            broken = server.post("/v1/completions", {"prompt": "x", "max_tokens": 77})
            rest = list(events)
        assert rest[-1] == "[DONE]"
        (error,) = errors_of(rest)
        assert error["code"] == 503
        assert "path" not in error["message"]
        assert broken.status == 503
        assert server.get("/health").error["type"] == "ServiceUnavailableError"
        assert server.post("/v1/completions", {"prompt": "x"}).status == 503
        assert server.get("/metrics").status == 200
        assert server.wait() == 1
    assert any("a fault at" in line for line in server.lines)
