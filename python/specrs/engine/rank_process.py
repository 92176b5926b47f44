"""Process of a rank that rank 0 has started: `python -m specrs.engine.rank_process SOCKET SECONDS`. It ignores signals
and ends with rank 0, because an interrupt at a terminal reaches all processes and rank 0 decides."""

import logging
import os
import signal
import socket
import sys


def main() -> int:
    """Run the rank and return the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    from specrs.engine.follow import serve_rank
    from specrs.parallel.connection import Connection
    from specrs.parallel.start import follow

    connection = Connection(socket.socket(fileno=int(sys.argv[1])), float(sys.argv[2]))
    return serve_rank(connection, follow, lost=lambda: os._exit(1))


if __name__ == "__main__":
    sys.exit(main())
