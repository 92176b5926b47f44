"""Keeps responses of `/v1/responses` in memory, within limits of bytes and time. Knows neither HTTP nor what a response
holds."""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

STORE_BYTES = 256 << 20
"""Default maximum number of bytes of all stored responses."""
STORE_SECONDS = 86_400.0
"""Default number of seconds that a response is kept after its last use."""
ENTRY_BYTES = 400
"""Bytes that a stored response counts beyond its texts: Python's objects, and its place in the table."""

OWNER: ContextVar[bytes] = ContextVar("owner", default=b"")
"""Digest of the API key of the request that the current task serves. Empty if the server needs no key."""

Link = tuple[str, int]
"""Id and serial number of a stored response. A response that is stored later under the same id has another number."""


class MissingResponse(LookupError):
    """A response that is not stored. `needed_by`: id of the stored response that continues it; None: it was asked for
    itself."""

    def __init__(self, response_id: str, needed_by: str | None = None) -> None:
        super().__init__(response_id)
        self.response_id = response_id
        self.needed_by = needed_by


@dataclass(frozen=True, slots=True)
class Texts:
    """JSON of a stored response: the response without its output, and lists of the items of its own input
    and of its output."""

    head: bytes
    input_items: bytes
    output: bytes


@dataclass(slots=True)
class StoredResponse:
    """A response in the store. The conversation before it is that of `previous`."""

    owner: bytes
    link: Link
    texts: Texts
    previous: Link | None
    used: float
    """Time of the last use, by the store's clock."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes that count towards the store's limit."""
        texts = self.texts.head, self.texts.input_items, self.texts.output
        names = self.owner, self.link[0], *(() if self.previous is None else self.previous[:1])
        return ENTRY_BYTES + sum(map(sys.getsizeof, (*texts, *names)))


class ResponseStore:
    """Responses by owner and id. The least recently used ones are evicted first.

    Each response holds its own input and output, and a link to the response that it continues. Using a response also
    uses all responses that it continues. So eviction removes the newest response of a conversation first, and never one
    that a stored response continues. A user may delete any response: later responses can then still be read, but not be
    continued.

    Not safe to use from several threads.
    """

    def __init__(
        self,
        max_bytes: int = STORE_BYTES,
        max_seconds: float = STORE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create an empty store. With `max_bytes` or `max_seconds` 0, it stores nothing. `clock` returns seconds."""
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds
        self._clock = clock
        self._entries: OrderedDict[tuple[bytes, str], StoredResponse] = OrderedDict()  # least recently used first
        self._next_serial = 0
        self.num_bytes = 0
        """Number of bytes of all stored responses, as counted towards the limit."""
        self.evictions = {"bytes": 0, "age": 0}
        """Number of responses that were evicted, by the limit that evicted them."""

    @property
    def enabled(self) -> bool:
        """True if the store takes responses."""
        return self._max_bytes > 0 and self._max_seconds > 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: tuple[bytes, str]) -> bool:
        """Return True if an owner has a response of an id. Does not count as a use."""
        self.expire()
        return key in self._entries

    def put(self, owner: bytes, response_id: str, texts: Texts, previous: Link | None = None) -> None:
        """Store a response, in place of an earlier one with its id. Evicts others, or the new one if it does not
        fit."""
        if not self.enabled:
            return
        self.expire()
        self.delete(owner, response_id)
        link = response_id, self._next_serial
        self._next_serial += 1
        entry = StoredResponse(owner, link, texts, previous, self._clock())
        self._entries[owner, response_id] = entry
        self.num_bytes += entry.num_bytes
        self._use(entry)
        while self.num_bytes > self._max_bytes:
            self._evict("bytes")

    def get(self, owner: bytes, response_id: str) -> StoredResponse:
        """Return a response. Counts as a use of it and of all that it continues. Raises `MissingResponse`."""
        self.expire()
        entry = self._entries.get((owner, response_id))
        if entry is None:
            raise MissingResponse(response_id)
        self._use(entry)
        return entry

    def conversation(self, owner: bytes, response_id: str) -> list[StoredResponse]:
        """Return a response and all that it continues, the first one first. Raises `MissingResponse` if one of them is
        not stored."""
        chain = list(self._chain(self.get(owner, response_id)))
        missing = chain[-1].previous
        if missing is not None:
            raise MissingResponse(missing[0], needed_by=chain[-1].link[0])
        return chain[::-1]

    def delete(self, owner: bytes, response_id: str) -> bool:
        """Delete a response. Return False if it is not stored."""
        self.expire()
        entry = self._entries.pop((owner, response_id), None)
        if entry is None:
            return False
        self.num_bytes -= entry.num_bytes
        return True

    def expire(self) -> None:
        """Evict the responses that were last used too long ago."""
        oldest = self._clock() - self._max_seconds
        while self._entries and next(iter(self._entries.values())).used <= oldest:
            self._evict("age")

    def _evict(self, limit: str) -> None:
        _, entry = self._entries.popitem(last=False)
        self.num_bytes -= entry.num_bytes
        self.evictions[limit] += 1

    def _use(self, entry: StoredResponse) -> None:
        """Make a response and all that it continues the most recently used ones, the first of them last."""
        now = self._clock()
        for one in self._chain(entry):
            one.used = now
            self._entries.move_to_end((one.owner, one.link[0]))

    def _chain(self, entry: StoredResponse | None) -> Iterator[StoredResponse]:
        """Yield a response and those that it continues, the newest first, up to one that is not stored."""
        while entry is not None:
            yield entry
            if entry.previous is None:
                return
            found = self._entries.get((entry.owner, entry.previous[0]))
            entry = found if found is not None and found.link == entry.previous else None
