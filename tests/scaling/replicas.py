"""Replicas of a server, and routers in front of them. Holds no tests."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from server.harness import MAIN, Server

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".venv-scaling"

# What a replica calls its answers, so that a client behind a router sees whose they are.
MARKED = """
import specrs.server.app as app
given = app._request_id
app._request_id = lambda scope: given(scope) + "@{mark}"
"""


def free_port() -> int:
    """Return a port that nothing listened on a moment ago."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def environment_python(name: str) -> str:
    """Return the path of the Python interpreter in the environment that `make test-NAME` creates. Fails if it does not
    exist."""
    path = ENVIRONMENTS / name / "bin" / "python"
    assert path.exists(), f"{path}: run make test-{name}"
    return str(path)


class Replica:
    """A server that can be killed and started again on its port; ids of its answers end in `@name.start`."""

    def __init__(self, name: str, flags: Sequence[str]) -> None:
        self.name = name
        self.starts = 0
        self._flags = flags
        self.port = free_port()
        self.server = self._start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def mark(self) -> str:
        """Return what ids of its answers have after `@` since its last start."""
        return f"{self.name}.{self.starts}"

    def _start(self) -> Server:
        self.starts += 1
        return Server(*self._flags, "--port", str(self.port), code=MARKED.format(mark=self.mark) + MAIN)

    def kill(self) -> None:
        """Kill the process by SIGKILL, as the kernel does when memory is short."""
        self.server.process.send_signal(signal.SIGKILL)
        self.server.wait()

    def start_again(self) -> None:
        self.server = self._start()


@contextmanager
def replicas(count: int, *flags: str) -> Iterator[list[Replica]]:
    """Run servers of the bundled pair under the name `pair`."""
    with ExitStack() as stack:
        made = []
        for i in range(count):
            made.append(Replica(f"replica{i}", ("--served-model-name", "pair", *flags)))
            stack.callback(lambda replica: replica.server.stop(), made[-1])
        yield made


class Router:
    """A router or frontend as a process, which must listen on `port`, and the lines that it prints."""

    def __init__(
        self, command: Sequence[str], port: int, folder: Path, environment: Mapping[str, str] = os.environ
    ) -> None:
        self.port = port
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            env={**environment, "HF_HUB_OFFLINE": "1"},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            self.lines.extend(self.process.stdout)

    def get(self, path: str) -> tuple[int, bytes]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def wait_until_ready(self, path: str = "/v1/models") -> None:
        """Ask until it serves; the test's time limit ends a long wait."""
        while True:
            assert self.process.poll() is None, self.output
            try:
                if self.get(path)[0] == 200:
                    return
            except OSError:
                continue

    @property
    def output(self) -> str:
        return "".join(self.lines)[-8000:]

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(20)


MODULES = {"vllm": "vllm_router.launch_router", "sglang": "sglang_router.launch_router", "smg": "smg"}


@contextmanager
def routing(kind: str, policy: str, made: Sequence[Replica], folder: Path) -> Iterator[Router]:
    """Run a router in front of replicas, with its own defaults except for times that tests wait for."""
    port = free_port()
    command = [environment_python("routers"), "-m", MODULES[kind], *(("launch",) if kind == "smg" else ())]
    command += ["--host", "127.0.0.1", "--port", str(port), "--policy", policy]
    command += ["--worker-urls", *(replica.url for replica in made)]
    command += ["--prometheus-port", str(free_port()), "--prometheus-host", "127.0.0.1"]
    command += [
        "--health-check-interval-secs",
        "1",
        "--health-success-threshold",
        "1",
        "--cb-timeout-duration-secs",
        "2",
    ]
    router = Router(command, port, folder)
    try:
        router.wait_until_ready()
        yield router
    finally:
        router.stop()
