"""Runs a real server process and sends it requests. Holds no tests."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAIN = "import sys; from specrs.cli import main; sys.exit(main())"
START_TIMEOUT = 120.0


@dataclass
class Answer:
    """A whole HTTP answer. `json` is the body, parsed."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """Error object of an answer that must be an error, after a check of its form."""
        assert self.headers["content-type"] == "application/json"
        assert set(self.json) == {"error"}, self.json
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == self.status
        assert error["message"]
        assert "Traceback" not in error["message"]
        assert "/" not in re.sub(r"HTTP/1\.1|application/[\w-]+", "", error["message"]), error["message"]
        return error


class Server:
    """A server process on a free port."""

    def __init__(self, *flags: str, code: str = MAIN, certificate: Path | None = None) -> None:
        """Start the server and wait until it has a port. `code`: Python source that the interpreter runs, which must
        end in the command's `main`. With `certificate`, which the flags give the server too, requests are sent over
        https and trust no other certificate."""
        self._context = None if certificate is None else ssl.create_default_context(cafile=str(certificate))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "serve", "--port", "0", *flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.lines: list[str] = []
        self._found = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._found.wait(START_TIMEOUT), "".join(self.lines)
        scheme = "http" if certificate is None else "https"
        match = re.search(rf"on {scheme}://127\.0\.0\.1:(\d+)", "".join(self.lines))
        assert match is not None, "".join(self.lines)
        self.port = int(match[1])

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr:
            for line in self.process.stderr:
                self.lines.append(line)
                if "://127" in line:
                    self._found.set()
        self._found.set()

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        if self._context is None:
            return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=timeout, context=self._context)

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout: float = 120
    ) -> Answer:
        """Send one request on a new connection. A body that is not bytes is sent as JSON."""
        with closing(self._connect(timeout)) as connection:
            encoded = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, encoded, headers or {})
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())

    def get(self, path: str, **headers: str) -> Answer:
        return self.request("GET", path, headers=headers)

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        return self.request("POST", path, body, headers)

    def complete(self, **body: Any) -> dict[str, Any]:
        """Return a completion that must succeed."""
        answer = self.post("/v1/completions", body)
        assert answer.status == 200, answer.body
        found: dict[str, Any] = answer.json
        return found

    def chat(self, **body: Any) -> dict[str, Any]:
        """Return a chat completion that must succeed."""
        answer = self.post("/v1/chat/completions", body)
        assert answer.status == 200, answer.body
        found: dict[str, Any] = answer.json
        return found

    @contextmanager
    def streaming(self, path: str = "/v1/completions", **body: Any) -> Iterator[Iterator[Any]]:
        """Yield the events of a stream as they come. Leaving the block closes the connection."""
        with closing(self._connect(120)) as connection:
            connection.request("POST", path, json.dumps({**body, "stream": True}))
            with closing(connection.getresponse()) as answer:
                assert answer.status == 200, answer.read()
                assert answer.headers["content-type"].startswith("text/event-stream")
                yield _events(answer)

    def stream(self, path: str = "/v1/completions", **body: Any) -> list[Any]:
        """Return all events of a stream except the last, which must be `[DONE]`."""
        with self.streaming(path, **body) as events:
            *chunks, done = events
        assert done == "[DONE]"
        return chunks

    def metrics(self) -> dict[str, float]:
        """Return metrics by name and labels other than model and engine: `name{label="x"}`."""
        answer = self.get("/metrics")
        assert answer.status == 200
        values = {}
        for line in answer.body.decode().splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                labels = re.sub(r'(engine|model_name)="[^"]*",?', "", name).replace(",}", "}").removesuffix("{}")
                values[labels] = float(value)
        return values

    def wait_for_line(self, pattern: str) -> None:
        """Wait until a log line matches."""
        deadline = time.monotonic() + START_TIMEOUT
        while not any(re.search(pattern, line) for line in self.lines):
            assert time.monotonic() < deadline, "".join(self.lines)
            self.get("/health")

    def wait_until_idle(self) -> dict[str, float]:
        """Wait until nothing runs, waits or holds a block. The test's own time limit ends a long wait."""
        while True:
            now = self.metrics()
            busy = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
            if not any(now[name] for name in busy):
                return now

    def wait_until(self, name: str, at_least: float) -> None:
        """Wait until a metric has grown to a value."""
        while self.metrics()[name] < at_least:
            continue

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        """Return a socket connected to the server."""
        connection = socket.socket()
        connection.settimeout(60)
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.connect(("127.0.0.1", self.port))
        return connection

    def children(self) -> list[int]:
        """Return the process ids of the server's children."""
        found = []
        for path in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            found += [int(pid) for pid in path.read_text().split()]
        return found

    def wait(self, timeout: float = 60) -> int:
        """Wait for the process to end. Return its exit code."""
        code = self.process.wait(timeout)
        self._reader.join(timeout)
        return code

    def stop(self) -> None:
        """End the process by SIGTERM, or by SIGKILL if it still runs after 20 seconds."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.wait()


def _events(answer: http.client.HTTPResponse) -> Iterator[Any]:
    while line := answer.readline():
        assert line.startswith(b"data: "), line
        assert answer.readline() == b"\n"
        data = line[6:].strip()
        yield "[DONE]" if data == b"[DONE]" else json.loads(data)


@contextmanager
def serving(*flags: str, code: str = MAIN, certificate: Path | None = None) -> Iterator[Server]:
    """Run a server while the block runs. Arguments are those of `Server`."""
    server = Server(*flags, code=code, certificate=certificate)
    try:
        yield server
    finally:
        server.stop()


def text_of(chunks: list[Any], index: int = 0) -> str:
    """Return the text that the chunks of one completion add up to."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"]["content"] for choice in choices)


def alive(pid: int) -> bool:
    """Return whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
