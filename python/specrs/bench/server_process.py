"""Runs a server as a child process: starts it, waits until it is ready, and stops it with all its children. Sends no
requests except to see whether it is ready."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specrs.errors import EngineError, InvalidConfigError, invalid_config

STOP_SECONDS = 15.0
TAIL = 5


@dataclass
class ServerProcess:
    """A running server process. `log` is the file with its output."""

    command: Sequence[str]
    base_url: str
    log: Path
    process: subprocess.Popen[bytes]

    def wait_ready(self, timeout_seconds: float, path: str = "/health") -> None:
        """Wait until the server answers 200 at `path`. Raises `EngineError` if the process ends first, or is not ready
        within `timeout_seconds`."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            if self.process.poll() is not None:
                raise self.died("before it was ready")
            # urlopen raises for every status that is no success
            with (
                contextlib.suppress(urllib.error.URLError, OSError),
                urllib.request.urlopen(self.base_url + path, timeout=5),
            ):
                return
            if time.monotonic() > deadline:
                raise self.died(f"{path} did not answer in {timeout_seconds:g} s")
            time.sleep(0.2)

    def ended(self, within_seconds: float = 2.0) -> bool:
        """Return True if the process has ended or ends within `within_seconds`. Its connections may break shortly
        before it is gone."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(within_seconds)
        return self.process.poll() is not None

    def died(self, how: str) -> EngineError:
        """Return an error with the server's exit code and the end of its log. `how` says what failed."""
        code = self.process.poll()
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-TAIL:]
        state = "" if code is None else f" with exit code {code}"
        return EngineError(f"the server ended {how}{state}: {' | '.join(lines) or 'nothing printed'} (log: {self.log})")

    def stop(self) -> None:
        """Stop the process and its children: first by a signal that they can handle, then by force."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextlib.contextmanager
def serving(
    command: Sequence[str], port: int, log: Path, environment: Mapping[str, str], timeout_seconds: float
) -> Iterator[ServerProcess]:
    """Start `command`, wait until it is ready, and stop it when the context ends. Its output goes to the file `log`.

    Raises `InvalidConfigError` if the command cannot be started or the port is taken, `EngineError` if the process ends
    before it is ready or is not ready within `timeout_seconds`.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise invalid_config("--port", port, f"must be free: {error.strerror}") from None
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as sink:
            # A session of its own: an interrupt is the sweep's to answer, and stop() reaches all children.
            process = subprocess.Popen(
                list(command),
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **environment},
            )
    except OSError as error:
        raise InvalidConfigError(f"--serve-cmd={command[0]}: cannot be started: {error}") from None
    server = ServerProcess(command, f"http://127.0.0.1:{port}", log, process)
    try:
        server.wait_ready(timeout_seconds)
        yield server
    finally:
        server.stop()


def free_port() -> int:
    """Return a port on which no socket listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
