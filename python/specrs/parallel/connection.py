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
"""Maximum number of body bytes that are sent in one call together with the message's header."""
BEGUN = struct.Struct("<Q")
"""Body of ALIVE messages from other ranks: the number of exchanges that the rank has begun."""
DID = struct.Struct("<QI")
"""Body of DONE messages: the number of steps before this one, and a checksum of its results."""


class Kind(IntEnum):
    """Kind of a message between ranks."""

    SETUP = 1
    """From rank 0, JSON: the engine's settings and where the ranks meet."""
    HERE = 9
    """To rank 0, JSON: the rank has read its setup and connects to the other ranks now."""
    READY = 2
    """To rank 0, JSON: the rank is connected and loaded; holds the number of KV blocks that fit in its memory."""
    START = 3
    """From rank 0, JSON: the number of KV blocks that every rank allocates."""
    STEP = 4
    """From rank 0: the used part of a step's record."""
    LORA = 11
    """From rank 0, JSON: id and name of a LoRA adapter whose layers follow, and the ids of adapters still in use."""
    LORA_LAYER = 12
    """From rank 0: the rank's part of one layer of the last LORA message's adapter, as `pack_layer` writes it."""
    DONE = 10
    """To rank 0: the outcome of a step, packed as `DID`."""
    ALIVE = 5
    """In both directions, if there is nothing else to send. From other ranks it holds the number of exchanges that they
    have begun."""
    FAILED = 6
    """To rank 0, text: the exception that ends the rank."""
    LOST = 7
    """To rank 0, text: this rank ends because another rank did not answer."""
    END = 8
    """From rank 0: the engine has ended."""


class Message(NamedTuple):
    """A message that arrived from another rank."""

    kind: Kind
    body: bytes

    def json(self) -> Any:
        """The body, read as JSON."""
        return json.loads(self.body)


class ExchangeError(EngineError):
    """Error of an exchange among ranks that failed because another rank has ended or hangs."""


class DisconnectedError(EngineError):
    """Error of a connection whose other side has closed it or did not answer in time. The message says which, as in
    "has closed its connection"."""


class Connection:
    """One end of a socket connection between two ranks. `send` may be called from several threads, `receive` from
    one."""

    def __init__(self, end: socket.socket, timeout: float) -> None:
        """Wrap the socket `end`. `timeout`: seconds that the other side may take to send or accept data."""
        end.settimeout(timeout)
        self.socket = end
        self.timeout = timeout
        self._sending = threading.Lock()

    def send(self, kind: Kind, body: bytes | memoryview = b"") -> None:
        """Send a message. Raises DisconnectedError if the other side has closed the connection or does not accept the
        message in time."""
        with self._sending:
            self._send(kind, body)

    def send_json(self, kind: Kind, content: object) -> None:
        """Send `content` as a JSON message. Raises DisconnectedError if the other side has closed the connection or
        does not accept the message in time."""
        self.send(kind, json.dumps(content).encode())

    def send_alive(self, body: bytes = b"") -> None:
        """Send an ALIVE message, unless another thread is sending. Raises DisconnectedError if the other side has
        closed the connection or does not accept the message in time."""
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
        """Wait for the next message and return it. Raises DisconnectedError if the other side has closed the connection
        or sends nothing in time."""
        kind, length = _HEAD.unpack(self._read(_HEAD.size))
        return Message(Kind(kind), bytes(self._read(length)))

    def receive_news(self) -> Message:
        """Wait for the next message that is not ALIVE and return it. Raises DisconnectedError if the other side has
        closed the connection or sends nothing in time."""
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
        """Close the socket, which the other side notices. May be called twice, from any thread."""
        with contextlib.suppress(OSError):  # the other side was first
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


class Beat:
    """Thread that regularly sends ALIVE messages for its rank. When a message cannot be sent, it calls `lost` and
    ends."""

    def __init__(self, connection: Connection, state: Callable[[], bytes], lost: Callable[[], None]) -> None:
        """Start the thread. `state()` returns the body of each ALIVE message."""
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
