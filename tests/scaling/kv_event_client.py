"""Follows a publisher of KV events as a router does, with ZeroMQ and MessagePack, without code of specrs. Holds no
tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import msgpack
import zmq

Keys = tuple[Any, ...]
Place = tuple[int | None, tuple[int, ...], Keys]  # hash of the block before, tokens, extra keys
TIMEOUT_MS = 60_000


class Mirror:
    """The cached blocks according to the events received."""

    def __init__(self) -> None:
        self.places: dict[int, Place] = {}
        self.hashes: dict[Place, int] = {}
        self.num_removed = self.num_cleared = 0

    def apply(self, payload: bytes) -> None:
        timestamp, events, rank = msgpack.unpackb(payload)
        assert (type(timestamp), rank) == (float, 0)
        for event in events:
            getattr(self, event.pop("type"))(**event)

    def BlockStored(
        self,
        block_hashes: list[int],
        parent_block_hash: int | None,
        token_ids: list[int],
        block_size: int,
        extra_keys: list[list[Any] | None],
        **rest: Any,
    ) -> None:
        assert (rest["lora_id"], rest["lora_name"], rest["medium"], rest["group_idx"]) == (None, None, "GPU", 0)
        assert len(token_ids) == block_size * len(block_hashes)
        parent = parent_block_hash
        for i, (block_hash, keys) in enumerate(zip(block_hashes, extra_keys, strict=True)):
            assert block_hash not in self.places, "stored twice"
            tokens = tuple(token_ids[i * block_size : (i + 1) * block_size])
            place = (parent, tokens, tuple(keys or ()))
            self.places[block_hash], self.hashes[place] = place, block_hash
            parent = block_hash

    def BlockRemoved(self, block_hashes: list[int], medium: str, group_idx: int) -> None:
        assert (medium, group_idx) == ("GPU", 0)
        for block_hash in block_hashes:
            del self.hashes[self.places.pop(block_hash)]
            self.num_removed += 1

    def AllBlocksCleared(self) -> None:
        self.places.clear()
        self.hashes.clear()
        self.num_cleared += 1

    def num_cached(self, tokens: Sequence[int], block_size: int, salt: str = "") -> int:
        """Return the number of a prompt's tokens that are cached: whole blocks from its start, never its last token."""
        parent, found = None, 0
        while found + block_size < len(tokens):
            keys = (salt,) if salt and found == 0 else ()
            parent = self.hashes.get((parent, tuple(tokens[found : found + block_size]), keys))
            if parent is None:
                break
            found += block_size
        return found


class Client:
    """A subscriber with a mirror. It asks the replay socket for messages that it missed."""

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str = "") -> None:
        self.mirror = Mirror()
        self.next = 0
        self.num_replays = 0
        self._topic = topic.encode()
        self._context = zmq.Context()
        self._subscriber = self._context.socket(zmq.SUB)
        self._subscriber.set_hwm(0)
        self._subscriber.connect(endpoint)
        self._subscriber.subscribe(topic)
        self._replay = self._context.socket(zmq.DEALER)  # REQ takes one answer for a request
        self._replay.connect(replay_endpoint)
        for opened in (self._subscriber, self._replay):
            opened.rcvtimeo = TIMEOUT_MS
            opened.linger = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.destroy(linger=0)

    def subscribed(self, publish: Callable[[], None]) -> None:
        """Wait until messages arrive. A subscription takes a moment, and earlier messages are lost."""
        while not self._subscriber.poll(20):
            publish()

    def catch_up(self, published: int, loses: Callable[[], bool] = lambda: False) -> None:
        """Read until message `published - 1` has come, and ask again for what was lost. A message is dropped, as if it
        were lost, if `loses` returns True."""
        last = self.next - 1
        while last < published - 1:
            topic, number, payload = self._subscriber.recv_multipart()
            assert topic == self._topic
            last = int.from_bytes(number, "big")
            if last == self.next and not loses():
                self.mirror.apply(payload)
                self.next += 1
        if self.next < published:
            self.replay()
        assert self.next == published

    def replay(self) -> None:
        """Ask the replay socket for all messages from the next number on."""
        self.num_replays += 1
        for number, payload in self.ask(self.next.to_bytes(8, "big")):
            assert number == self.next
            self.mirror.apply(payload)
            self.next += 1

    def ask(self, start: bytes) -> list[tuple[int, bytes]]:
        """Return the answers of the replay socket, without its end mark."""
        self._replay.send_multipart((b"", start))
        answers = []
        while True:
            empty, number, payload = self._replay.recv_multipart()
            assert (empty, len(number)) == (b"", 8)
            if number == b"\xff" * 8:
                assert payload == b""
                return answers
            answers.append((int.from_bytes(number, "big"), payload))
