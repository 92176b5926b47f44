"""Messages between rank 0 and another rank, over a socket. Decides nothing about them.

A message is its kind, its length and bytes. Nothing that arrives is executed or unpickled.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

from specrs.errors import EngineError

_HEAD = struct.Struct("<BI")
_SMALL = 4096
"""Bytes up to which a message is sent in one piece."""
BEGUN = struct.Struct("<Q")
"""Exchanges that a rank has begun."""
DID = struct.Struct("<QI")
"""Launches before it, and a checksum of its results."""


class Kind(IntEnum):
    """What a message says."""

    SETUP = 1
    """From rank 0, JSON: what to serve."""
    HERE = 9
    """To rank 0, JSON: it has read what it is to serve, and connects to the others now."""
    READY = 2
    """To rank 0, JSON: connected and loaded; the KV blocks that fit."""
    START = 3
    """From rank 0, JSON: the KV blocks of all ranks."""
    LAUNCH = 4
    """From rank 0: the part of a record that is read."""
    DONE = 10
    """To rank 0: what came of a launch, as `DID`."""
    ALIVE = 5
    """Either way, while there is nothing else to say; from other ranks with the exchanges that they have begun."""
    FAILED = 6
    """To rank 0, text: the exception that ends the rank."""
    LOST = 7
    """To rank 0, text: that the rank ends because another one did not answer."""
    END = 8
    """From rank 0: the engine has ended."""


class Message(NamedTuple):
    """What arrived."""

    kind: Kind
    body: bytes

    def json(self) -> Any:
        """The body, read as JSON."""
        return json.loads(self.body)


class ExchangeError(EngineError):
    """An exchange among ranks that did not come about: another rank has ended or hangs."""


class DisconnectedError(EngineError):
    """The other side is gone, or did not answer in time: what became of it, as "has closed its connection"."""


class Connection:
    """One end. `send` may be called from several threads, `receive` from one."""

    def __init__(self, end: socket.socket, timeout: float) -> None:
        """`timeout`: seconds that the other side may take to send or take something."""
        end.settimeout(timeout)
        self.socket = end
        self.timeout = timeout
        self._sending = threading.Lock()

    def send(self, kind: Kind, body: bytes | memoryview = b"") -> None:
        """Send a message. Raises DisconnectedError."""
        with self._sending:
            self._send(kind, body)

    def send_json(self, kind: Kind, content: object) -> None:
        """The same with JSON as body."""
        self.send(kind, json.dumps(content).encode())

    def send_alive(self, body: bytes = b"") -> None:
        """Say that this side is there, unless another thread is saying something. Raises DisconnectedError."""
        if self._sending.acquire(blocking=False):
            try:
                self._send(Kind.ALIVE, body)
            finally:
                self._sending.release()

    def _send(self, kind: Kind, body: bytes | memoryview) -> None:
        head = _HEAD.pack(kind, len(body))
        try:
            if len(body) <= _SMALL:
                self.socket.sendall(head + bytes(body))
            else:
                self.socket.sendall(head)
                self.socket.sendall(body)
        except OSError as fault:
            raise self._lost(fault) from fault

    def receive(self) -> Message:
        """The next message. Raises DisconnectedError."""
        kind, length = _HEAD.unpack(self._read(_HEAD.size))
        return Message(Kind(kind), bytes(self._read(length)))

    def receive_news(self) -> Message:
        """The next message that is not ALIVE. Raises DisconnectedError."""
        while (message := self.receive()).kind == Kind.ALIVE:
            pass
        return message

    def _read(self, length: int) -> bytearray:
        found, view = bytearray(length), 0
        target = memoryview(found)
        while view < length:
            try:
                count = self.socket.recv_into(target[view:])
            except OSError as fault:
                raise self._lost(fault) from fault
            if not count:
                raise DisconnectedError("has closed its connection")
            view += count
        return found

    def _lost(self, fault: OSError) -> DisconnectedError:
        slow = isinstance(fault, TimeoutError)
        return DisconnectedError(f"did not answer for {self.timeout:g} s" if slow else f"is lost: {fault}")

    def close(self) -> None:
        """Close the socket; the other side sees it. May be called twice, from any thread."""
        with contextlib.suppress(OSError):  # the other side was first
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


class Beat:
    """A thread that says every so often that a rank is there, until it cannot; then it calls `lost`."""

    def __init__(self, connection: Connection, state: Callable[[], bytes], lost: Callable[[], None]) -> None:
        """`state()` gives the body of its messages."""
        self._stop = threading.Event()
        self._connection, self._state, self._lost = connection, state, lost
        self._thread = threading.Thread(target=self._run, name="specrs-rank-alive", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(min(1.0, self._connection.timeout / 4)):
            try:
                self._connection.send_alive(self._state())
            except DisconnectedError:
                if not self._stop.is_set():
                    self._lost()
                return

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()
