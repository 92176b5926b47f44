"""Starts ranks as processes of rank 0, or finds those of torchrun. Loads nothing and serves nothing.

Processes on one machine meet by a file in a folder that only this user may read, and by sockets that they inherit. For
their exchanges they listen on 127.0.0.1, at ports that the system chooses. Processes of torchrun meet by its
rendezvous. On several machines they listen at the address that leads to MASTER_ADDR.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrs.errors import InvalidConfigError, RankLostError, invalid
from specrs.parallel.connection import Connection
from specrs.parallel.team import START_TIMEOUT, Team

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

LOCAL = "127.0.0.1"
_KEY = "specrs/rank-0"


@dataclass(frozen=True, slots=True)
class Meeting:
    """Rendezvous of the ranks for their exchanges: the arguments from which `Ranks` is made."""

    store: Store
    rank: int
    size: int
    address: str
    local: tuple[int, int] | None = None
    """(rank, number of ranks) on this machine; None: all ranks are on it."""

    @property
    def place(self) -> tuple[int, int]:
        """(rank, number of ranks) on this machine, where each rank has a GPU."""
        return (self.rank, self.size) if self.local is None else self.local

    def exchange_timeout(self, timeout: float) -> float:
        """Return the maximum seconds of an exchange: a little more than those after which a rank counts as hanging, so
        that the error can name it."""
        return timeout + 2.0


def torchrun_rank() -> int | None:
    """Return this process's rank if torchrun started it with others, otherwise None."""
    size = os.environ.get("WORLD_SIZE", "")
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() and size.isdecimal() and int(size) > 1 else None


def own_place(size: int) -> tuple[int, int]:
    """Return (rank, number of ranks) on this machine for this process, which is rank 0 of the ranks that it will start,
    or one of torchrun's."""
    return 0 if torchrun_rank() is None else int(os.environ["LOCAL_RANK"]), ranks_here(size)


def ranks_here(size: int) -> int:
    """Return the number of ranks on this machine, of the `size` ranks of an engine."""
    return size if size == 1 or torchrun_rank() is None else int(os.environ["LOCAL_WORLD_SIZE"])


def lead(size: int, timeout: float, module: str, setup: dict[str, Any]) -> tuple[Team, Meeting]:
    """Start `size - 1` processes that run `module`, or find those of torchrun, and send them `setup`. Return them and
    the place where they meet.

    Raises:
        InvalidConfigError: torchrun started another number of processes.
        RankLostError: a process could not be started, did not connect, or ended before it got `setup`.
    """
    if torchrun_rank() is not None:
        meeting = _torchrun(size, timeout)
        team = Team(_accept(meeting, timeout), timeout=timeout)
        path = ""
    else:
        folder = Path(tempfile.mkdtemp(prefix="specrs-ranks-"))
        path = str(folder / "store")
        team = _spawn(size, timeout, module, folder)
        meeting = Meeting(_file_store(path, size), 0, size, LOCAL)
    try:
        team.setup(lambda rank: {**setup, "rank": rank, "size": size, "store": path})
    except BaseException:
        team.close()
        raise
    return team, meeting


def follow_under_torchrun(size: int, timeout: float) -> tuple[Connection, Meeting]:
    """Connect to rank 0 from another rank of torchrun. Return the connection and the place where the ranks meet.

    Raises InvalidConfigError if torchrun started another number of processes.
    """
    meeting = _torchrun(size, timeout)
    where, port, token = meeting.store.get(_KEY).decode().rsplit(" ", 2)
    connection = Connection(socket.create_connection((where, int(port)), timeout=START_TIMEOUT), timeout)
    connection.socket.sendall(token.encode() + meeting.rank.to_bytes(4, "little"))
    return connection, meeting


def follow(setup: dict[str, Any]) -> Meeting:
    """Return the place where the ranks meet, in a process that rank 0 started with the settings `setup`."""
    return Meeting(_file_store(setup["store"], setup["size"]), setup["rank"], setup["size"], LOCAL)


def _file_store(path: str, size: int) -> Store:
    from torch._C._distributed_c10d import FileStore  # torch, which takes seconds to load

    return FileStore(path, size)


def _spawn(size: int, timeout: float, module: str, folder: Path) -> Team:
    # the interpreter's own path, in case the program changed it; -P, because the current folder is no package root
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TQDM_DISABLE": "1"}
    connections: dict[int, Connection] = {}
    processes: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for rank in range(1, size):
            ours, theirs = socket.socketpair()
            connections[rank] = Connection(ours, timeout)
            with contextlib.closing(theirs):
                processes[rank] = subprocess.Popen(
                    [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(timeout)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=environment,
                )
    except OSError as fault:
        for process in processes.values():
            process.kill()
            process.wait()
        for connection in connections.values():
            connection.close()
        raise RankLostError(len(processes) + 1, size, f"could not be started: {fault}") from fault
    return Team(connections, timeout=timeout, processes=processes, folder=folder)


def _torchrun(size: int, timeout: float) -> Meeting:
    from torch.distributed.rendezvous import rendezvous

    world = int(os.environ["WORLD_SIZE"])
    if world != size:
        allowed = f"must be {world}, the processes that torchrun started"
        raise invalid(InvalidConfigError, "tensor_parallel_size", size, allowed)
    store, rank, _ = next(rendezvous("env://", timeout=timedelta(seconds=max(timeout, START_TIMEOUT))))
    return Meeting(store, rank, size, _own_address(world), own_place(size))


def _own_address(world: int) -> str:
    """Return 127.0.0.1 if all ranks are on this machine, else this machine's address towards MASTER_ADDR."""
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world):
        return LOCAL
    family, _, _, _, address = socket.getaddrinfo(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def _accept(meeting: Meeting, timeout: float) -> dict[int, Connection]:
    token = secrets.token_hex(16)
    family = socket.AF_INET6 if ":" in meeting.address else socket.AF_INET
    found: dict[int, Connection] = {}
    with socket.socket(family) as listener:
        listener.bind((meeting.address, 0))
        listener.listen(meeting.size)
        listener.settimeout(max(timeout, START_TIMEOUT))
        meeting.store.set(_KEY, f"{meeting.address} {listener.getsockname()[1]} {token}")
        end = time.monotonic() + max(timeout, START_TIMEOUT)
        while len(found) < meeting.size - 1:
            try:
                accepted, _ = listener.accept()
            except TimeoutError:
                missing = min(set(range(1, meeting.size)) - set(found))
                raise RankLostError(missing, meeting.size, "did not come") from None
            rank = _hello(accepted, token)
            if rank is None or not 0 < rank < meeting.size or rank in found or time.monotonic() > end:
                accepted.close()
                continue
            found[rank] = Connection(accepted, timeout)
    return found


def _hello(accepted: socket.socket, token: str) -> int | None:
    """Return the rank that connected; None if something else did."""
    accepted.settimeout(5.0)
    said = b""
    try:
        while len(said) < len(token) + 4 and (more := accepted.recv(len(token) + 4 - len(said))):
            said += more
    except OSError:
        return None
    known = hmac.compare_digest(said[: len(token)], token.encode()) and len(said) == len(token) + 4
    return int.from_bytes(said[len(token) :], "little") if known else None
