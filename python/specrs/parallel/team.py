"""The other tensor parallel ranks, as rank 0 sees them. Sends them steps and watches whether they respond. Computes
nothing.

If one rank ends, all end: rank 0 closes the connections, and each of the others ends when it sees that, or is killed.
The error names the rank that ended first, failed by itself, or is waited for by the others.
"""

from __future__ import annotations

import contextlib
import selectors
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrs.errors import RankLostError
from specrs.parallel.connection import BEGUN, DID, Connection, DisconnectedError, ExchangeError, Kind, Message

if TYPE_CHECKING:
    from specrs.parallel.ranks import Ranks  # and torch

START_TIMEOUT = 120.0
"""Minimum number of seconds that a process has for its first message, because it loads torch before."""
GRACE = 2.0
"""Seconds that ranks have to end by themselves before they are killed."""


@dataclass(slots=True)
class _Member:
    connection: Connection
    heard: float
    process: subprocess.Popen[bytes] | None
    spoke: bool = False
    begun: int = 0  # exchanges
    lost: str | None = None
    inbox: list[Message] = field(default_factory=list)
    done: dict[int, int] = field(default_factory=dict)  # checksums of steps that were not compared yet


class Team:
    """Ranks 1 to `size - 1`, seen from rank 0. Use it from one thread at a time; its own watching thread does not
    count."""

    def __init__(
        self,
        connections: Mapping[int, Connection],
        *,
        timeout: float,
        processes: Mapping[int, subprocess.Popen[bytes]] | None = None,
        folder: Path | None = None,
    ) -> None:
        """Start to watch the ranks.

        Args:
            connections: connection to each rank.
            timeout: seconds without an answer after which a rank counts as hanging.
            processes: processes of ranks that were started here; killed if they do not end.
            folder: folder to remove at the end.
        """
        now, started = time.monotonic(), processes or {}
        self._members = {rank: _Member(end, now, started.get(rank)) for rank, end in connections.items()}
        self._timeout, self._folder = timeout, folder
        self.ranks: Ranks | None = None
        """Exchanges of rank 0 with the other ranks. None until it is connected to them."""
        self.error: RankLostError | None = None
        self.on_error: Callable[[RankLostError], None] | None = None
        """Function that is called with the error, from the watching thread, when a rank is lost."""
        self._changed = threading.Condition()
        self._done: dict[int, int] = {}  # rank 0's checksums, until all others have been compared
        self._closing = False
        self._thread = threading.Thread(target=self._watch, name="specrs-ranks", daemon=True)
        self._thread.start()

    @property
    def size(self) -> int:
        """Number of ranks, including rank 0."""
        return 1 + len(self._members)

    def send(self, kind: Kind, body: bytes | memoryview = b"") -> None:
        """Send a message to every other rank. Raises RankLostError if a rank has ended or does not respond."""
        self.send_each(kind, lambda _: body)

    def send_each(self, kind: Kind, body: Callable[[int], bytes | memoryview]) -> None:
        """Send every other rank its own message, `body(rank)`. Raises RankLostError if a rank has ended or does not
        respond."""
        self.check()
        for rank, member in self._members.items():
            try:
                member.connection.send(kind, body(rank))
            except DisconnectedError as fault:
                raise self.failed(fault, rank) from fault

    def setup(self, content: Callable[[int], dict[str, Any]]) -> None:
        """Send every other rank its setup, `content(rank)`. Raises RankLostError if a rank has ended or does not
        respond."""
        for rank, member in self._members.items():
            try:
                member.connection.send_json(Kind.SETUP, content(rank))
            except DisconnectedError as fault:
                raise self.failed(fault, rank) from fault

    def collect(self, kind: Kind) -> list[Any]:
        """Wait for the next message of every other rank, which must be of `kind`, and return the messages read as JSON.
        Raises RankLostError if a rank has ended, does not respond or sends a message of another kind."""
        found = []
        for rank, member in self._members.items():
            with self._changed:
                self._changed.wait_for(lambda member=member: member.inbox or self.error is not None)  # type: ignore[misc]
                self.check()
                message = member.inbox.pop(0)
            if message.kind != kind:
                raise self.failed(DisconnectedError(f"said {message.kind.name}, not {kind.name}"), rank)
            found.append(message.json())
        return found

    def done(self, step: int, checksum: int) -> None:
        """Record the checksum of step `step` on rank 0, without waiting for the other ranks. If another rank reports a
        different one, that rank counts as lost, and all ranks end. Each rank computes drafts by itself, and they agree
        only if their processors and libraries compute alike."""
        with self._changed:
            self._done[step] = checksum
            self._compare()

    def check(self) -> None:
        """Raise RankLostError if a rank is lost."""
        if self.error is not None:
            raise self.error

    def failed(self, fault: BaseException, rank: int = 0) -> RankLostError:
        """Return the error to raise after `fault` happened on rank 0, or while it communicated with `rank`. The error
        names the rank that caused it. Ends all ranks."""
        if rank or isinstance(fault, ExchangeError):
            with self._changed:
                # the rank that is lost may be seen a moment later than what it was waited for
                self._changed.wait_for(lambda: self.error is not None, GRACE)
        if rank:
            self._fail(rank, str(fault))
        elif isinstance(fault, ExchangeError):
            self._fail(self._waited_for(), f"did not answer: {fault}")
        else:
            self._fail(0, f"failed: {fault!r}")
        assert self.error is not None
        return self.error

    def close(self) -> None:
        """End all ranks and wait for them. May be called again, and after a failure.

        First waits, for at most `GRACE` seconds, until all ranks have finished the last step. A rank that ends resets
        its connections, and another rank may still have to read from them.
        """
        with self._changed:
            if threading.current_thread() is not self._thread:
                self._changed.wait_for(lambda: not self._done or self.error is not None, GRACE)
            first, self._closing = not self._closing, True
        if first and self.error is None:
            for member in self._members.values():
                with contextlib.suppress(DisconnectedError):
                    member.connection.send(Kind.END)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._reap()

    def _watch(self) -> None:
        """Run the watching thread: receive messages of every rank, send ALIVE messages to them, and find ranks that are
        lost. On a loss, calls `on_error` and waits until all processes have ended."""
        every = min(0.25, self._timeout / 8)
        with selectors.DefaultSelector() as selector:
            for rank, member in self._members.items():
                selector.register(member.connection.socket, selectors.EVENT_READ, rank)
            told = 0.0
            while not self._closing and self.error is None:
                for key, _ in selector.select(every):
                    self._hear(selector, key.data)
                if time.monotonic() - told > min(1.0, self._timeout / 4):
                    told = time.monotonic()
                    for member in self._members.values():
                        with contextlib.suppress(DisconnectedError):  # heard of below
                            member.connection.send_alive()
                if not self._closing and self.error is None:
                    self._judge()
        if self.error is not None:
            if self.on_error is not None:
                self.on_error(self.error)
            self._reap()

    def _hear(self, selector: selectors.BaseSelector, rank: int) -> None:
        member = self._members[rank]
        try:
            message = member.connection.receive()
        except (DisconnectedError, ValueError) as fault:
            with contextlib.suppress(KeyError, ValueError):
                selector.unregister(member.connection.socket)
            if self._closing:
                return
            if member.lost is None:
                self._fail(rank, _how_it_ended(member.process, fault))
            return
        member.heard, member.spoke = time.monotonic(), True
        if message.kind == Kind.ALIVE:
            (member.begun,) = BEGUN.unpack(message.body)
        elif message.kind == Kind.DONE:
            with self._changed:
                step, member.done[step] = DID.unpack(message.body)
                self._compare()
        elif message.kind == Kind.FAILED:
            self._fail(rank, f"failed: {message.body.decode(errors='replace')}")
        elif message.kind == Kind.LOST:
            member.lost = message.body.decode(errors="replace")
        else:
            with self._changed:
                member.inbox.append(message)
                self._changed.notify_all()

    def _compare(self) -> None:
        members = self._members.values()
        for step in [step for step in self._done if all(step in member.done for member in members)]:
            own = self._done.pop(step)
            for rank, member in self._members.items():
                if member.done.pop(step) != own:
                    self._fail(rank, "came to other results than rank 0")
        self._changed.notify_all()

    def _judge(self) -> None:
        now, ranks = time.monotonic(), self.ranks
        for rank, member in self._members.items():
            allowed = self._timeout if member.spoke else max(self._timeout, START_TIMEOUT)
            if member.lost is None and now - member.heard > allowed:
                self._fail(rank, f"did not answer for {allowed:g} s")
            elif member.lost is not None and now - member.heard > GRACE / 2:
                self._fail(rank, f"was lost: {member.lost}")  # and no other is to be named
        since = None if ranks is None else ranks.waiting_since
        if ranks is not None and since is not None and now - since > self._timeout:
            self._fail(self._waited_for(), f"did not answer for {self._timeout:g} s: it hangs")

    def _waited_for(self) -> int:
        """Return the rank that has begun the fewest exchanges, which the others wait for."""
        return min(self._members, key=lambda rank: self._members[rank].begun)

    def _fail(self, rank: int, what: str) -> None:
        """Record that `rank` was lost first, because of `what`, and end the other ranks. Does nothing if a rank was
        lost before."""
        with self._changed:
            if self.error is None:
                self.error = RankLostError(rank, self.size, what)
                if self.ranks is not None:
                    self.ranks.give_up()
                for member in self._members.values():
                    member.connection.close()
                hung = self._members.get(rank)
                if hung is not None and hung.process is not None:
                    hung.process.kill()  # so that what waits for it fails now
            self._changed.notify_all()

    def _reap(self) -> None:
        """Wait until the processes of all ranks have ended, and kill those that do not end in time. Then close all
        connections and remove the folder."""
        end = time.monotonic() + GRACE
        for member in self._members.values():
            process = member.process
            if process is None:
                _hear_out(member.connection, end)
            else:
                try:
                    process.wait(max(0.0, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            member.connection.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _hear_out(connection: Connection, end: float) -> None:
    """Read messages until the other side closes the connection or `end` has passed. A rank in its last step would take
    a connection that closes earlier for a lost rank."""
    with contextlib.suppress(DisconnectedError, ValueError, OSError):
        connection.socket.settimeout(GRACE)
        while time.monotonic() < end:
            connection.receive()


def _how_it_ended(process: subprocess.Popen[bytes] | None, fault: Exception) -> str:
    code = None
    if process is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(GRACE)
    if code is None:
        return str(fault)
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
