"""Connections to the other ranks, on rank 0."""

import socket
import threading

from specrs.parallel.connection import DID, Connection, Kind
from specrs.parallel.team import Team


def test_none_ends_before_all_have_run_the_last_step() -> None:
    ours, theirs = socket.socketpair()
    team = Team({1: Connection(ours, 0.4)}, timeout=0.4)  # says every tenth of a second that it is there
    rank = Connection(theirs, 5.0)
    team.done(0, 7)
    closing = threading.Thread(target=team.close, daemon=True)
    closing.start()
    assert [rank.receive().kind for _ in range(4)] == [Kind.ALIVE] * 4
    rank.send(Kind.DONE, DID.pack(0, 7))
    assert rank.receive_news().kind == Kind.END
    rank.close()
    closing.join()
    assert team.error is None
