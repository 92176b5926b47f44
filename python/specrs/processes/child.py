"""A child process that answers one line of JSON with another, within a time limit. Knows nothing of the content.

It is for work on untrusted input (grammars, chat templates): a thread cannot be ended, a process can.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from typing import Any

from specrs.errors import EngineError


class Child:
    """One child process. Not thread-safe: use it from one thread at a time."""

    def __init__(self, script: str, setup: bytes, *, purpose: str, start_timeout: float) -> None:
        """Run `script`, a path, and hand it `setup`, one line; it answers when it is ready.

        Raises `EngineError` that begins with `purpose`, if it does not start within `start_timeout` seconds.
        """
        # the interpreter's own path, in case the program changed it; -P, because the script's folder is no package root
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
        except OSError as fault:
            raise EngineError(f"{purpose}: no process could be started: {fault}") from fault
        self.timed_out = False
        if self.ask(setup, start_timeout) is None:
            self.close()
            raise EngineError(f"{purpose}: the process did not start")

    def ask(self, message: bytes, timeout: float) -> dict[str, Any] | None:
        """Send a message of one line and return the answer. None if the process ended by itself, or was killed because
        `timeout` seconds had passed."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None

        def kill() -> None:
            self.timed_out = True
            process.kill()

        timer = threading.Timer(timeout, kill)
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(message + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except (BrokenPipeError, ConnectionResetError):
            line = b""
        finally:
            timer.cancel()
            timer.join()  # past this, it has either killed the process or never will
        return json.loads(line) if line.endswith(b"\n") and not self.timed_out else None

    @property
    def alive(self) -> bool:
        """True if the process runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End the process."""
        self._process.kill()

    def close(self) -> None:
        """End the process and wait for it."""
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # what was not written yet went with the process
                    continue
        self._process.wait()
