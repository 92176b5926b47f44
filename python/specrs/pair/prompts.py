"""Prompts for the bundled pair: beginnings of Python files, written for this project, of 60 to 150 tokens each."""

from typing import Final

PROMPTS: Final[tuple[str, ...]] = (
    '''import socket
import selectors


class EchoServer:
    """Send every line back to the client that sent it."""

    def __init__(self, host="localhost", port=0, backlog=5):
        self.selector = selectors.DefaultSelector()
        self.sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.sock.bind((host, port))
        self.sock.listen(backlog)
        self.sock.setblocking(False)

    def close(self):''',
    '''"""A bounded queue of jobs that worker threads take from."""

import threading
from collections import deque


class JobQueue:
    """Jobs in the order in which they arrived.

    maxsize is the number of jobs that may wait.  If it is zero or
    less, there is no limit.
    """

    def __init__(self, maxsize=0):
        self.maxsize = maxsize
        self.closed = False

    def put(self, job, timeout=None):''',
    '''import os
import sys


def read_settings(path, defaults=None, encoding="utf-8"):
    """Read "name = value" lines from the file at path.

    Empty lines and lines that start with '#' are skipped.  Return a
    dictionary of strings.
    """
    settings = dict(defaults or {})
    with open(path, encoding=encoding) as f:
        for lineno, line in enumerate(f, 1):
            line = line.strip()
            if not line or line.startswith("#"):''',
    '''class Interval:
    """A closed interval of numbers, from low to high."""

    def __init__(self, low, high):
        if low > high:
            raise ValueError("low must not be greater than high")
        self._low = low
        self._high = high

    def __repr__(self):
        return f"{self.__class__.__name__}({self._low!r}, {self._high!r})"

    def __eq__(self, other):
        if not isinstance(other, Interval):''',
    """def main(argv=None):
    parser = argparse.ArgumentParser(description="Count the words of text files.")
    parser.add_argument("files", nargs="*", help="the files to read; default: standard input")
    parser.add_argument("-i", "--ignore-case", action="store_true", help="treat upper and lower case alike")
    parser.add_argument("-n", "--top", type=int, default=10,""",
    '''def format_table(rows, headers, sep="  "):
    """Return the rows as a string of aligned columns.

    Each row is a sequence of values, converted with str().  A row that
    is shorter than the headers is filled with empty strings.
    """
    widths = [len(header) for header in headers]
    for row in rows:
        for i, value in enumerate(row):''',
    """    def parse_date(self, text):
        match = self._date_re.match(text)
        if match is None:
            raise ValueError("invalid date: %r" % text)
        year, month, day = map(int, match.groups())
        if not 1 <= month <= 12:
            raise ValueError("month must be in 1..12, not %d" % month)
        return datetime.date(year, month, day)

    def parse_time(self, text):""",
    '''class LRUMapping(MutableMapping):
    """A mapping that forgets the key that was not used for the longest time."""

    def __init__(self, maxsize):
        self._maxsize = maxsize
        self._data = OrderedDict()
        self._lock = RLock()

    def __getitem__(self, key):
        with self._lock:
            value = self._data[key]
            self._data.move_to_end(key)
            return value

    def __setitem__(self, key, value):''',
    '''async def gather_limited(coros, limit, *, return_exceptions=False):
    """Run the coroutines, at most limit of them at the same time.

    The results are in the order of coros.  If return_exceptions is
    true, exceptions are returned like results.
    """
    if limit < 1:
        raise ValueError("limit must be at least 1")
    loop = asyncio.get_running_loop()
    semaphore = asyncio.Semaphore(limit)''',
    '''def walk_archive(archive, pattern=None):
    """Yield (name, size) for each regular file of the archive."""
    for member in archive.getmembers():
        if not member.isfile():
            continue
        if pattern is not None and not fnmatch.fnmatch(member.name, pattern):
            continue
        yield member.name, member.size


def extract_member(archive, member, target, mode=0o644):
    """Extract one member of the archive to the file target.''',
)
