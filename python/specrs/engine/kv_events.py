"""Publishes KV events over ZeroMQ in vLLM's form, from its own thread. The engine never waits for it.

A message is (topic, number, payload). Numbers count from 0, in 8 bytes, big-endian. A subscriber that misses a message
asks the replay socket for all from its number on.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from specrs.core import KVEventBatch
from specrs.errors import InvalidConfigError, invalid
from specrs.extras import missing
from specrs.kv_events_config import KVEventsConfig

if TYPE_CHECKING:
    import zmq

logger = logging.getLogger("specrs")

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
CLOSE_TIMEOUT = 2.0
"""Seconds that `close` waits until the thread has sent the queued batches."""
LINGER_MS = 1000
"""Milliseconds for which ZeroMQ still tries to deliver sent messages after the socket is closed."""


class KVEventPublisher:
    """Publisher with a PUB socket, and a ROUTER socket for replay if the configuration asks for it.

    `publish` and `close` may be called from one thread at a time; `close` twice.
    """

    def __init__(self, config: KVEventsConfig) -> None:
        """Open the sockets and start the thread.

        Raises:
            InvalidConfigError: pyzmq is not installed, or an endpoint cannot be opened.
        """
        try:
            import zmq
        except ModuleNotFoundError:
            raise missing("pyzmq", "kv-events", "kv_events_config.publisher='zmq'") from None
        self._config = config
        self._queue: deque[tuple[int, float, KVEventBatch]] = deque()
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._next = 0
        self._overflowed = False
        self._closing = threading.Event()
        self._bell, self._listener = socket.socketpair()
        for end in (self._bell, self._listener):
            end.setblocking(False)
        self._context: zmq.Context[Any] = zmq.Context()
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._publisher = self._open(zmq.PUB, "endpoint")
            if config.replay_endpoint is not None:
                self._replay = self._open(zmq.ROUTER, "replay_endpoint")
        except BaseException:
            self._context.destroy(linger=0)
            self._bell.close()
            self._listener.close()
            raise
        self._thread = threading.Thread(target=self._run, name="specrs-kv-events", daemon=True)
        self._thread.start()

    @property
    def num_published(self) -> int:
        """Number of batches that were passed to `publish`, which is also the number of the next one."""
        return self._next

    def publish(self, batch: KVEventBatch) -> None:
        """Queue a batch. If the queue is full, the batch is dropped, and subscribers see a gap in the numbers."""
        number, self._next = self._next, self._next + 1
        if len(self._queue) >= self._config.max_queue_size:
            if not self._overflowed:
                logger.warning("KV events are made faster than they are sent; some are dropped")
            self._overflowed = True
            return
        self._queue.append((number, time.time(), batch))
        self._ring()

    def close(self) -> None:
        """Send the queued batches, and end the thread."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._ring()
        self._thread.join(CLOSE_TIMEOUT)
        self._bell.close()

    def _open(self, kind: int, field: str) -> zmq.Socket[bytes]:
        import zmq

        endpoint = getattr(self._config, field)
        opened = self._context.socket(kind)
        opened.set_hwm(self._config.hwm)
        opened.linger = LINGER_MS
        binds = kind == zmq.ROUTER or "*" in endpoint or "::" in endpoint or not endpoint.startswith("tcp://")
        try:
            if binds:
                opened.bind(endpoint)
            else:
                opened.connect(endpoint)
        except zmq.ZMQError as fault:
            reason = f"cannot be opened: {fault}"
            raise invalid(InvalidConfigError, f"kv_events_config.{field}", endpoint, reason) from None
        return opened

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # enough is there to wake the thread
            self._bell.send(b"\0")

    def _run(self) -> None:
        import zmq

        poller = zmq.Poller()
        poller.register(self._listener, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                closing = self._closing.is_set()
                if self._listener.fileno() in ready:
                    with contextlib.suppress(BlockingIOError):
                        self._listener.recv(4096)
                self._send()
                if self._replay is not None and self._replay in ready:
                    self._send_again(self._replay)
                if closing:
                    return
        except Exception:
            logger.exception("KV events are no longer published")
        finally:
            self._listener.close()
            self._context.destroy(linger=LINGER_MS)

    def _send(self) -> None:
        topic = self._config.topic.encode()
        while self._queue:
            number, made, batch = self._queue.popleft()
            message = (number.to_bytes(8, "big"), batch.msgpack(made))
            self._publisher.send_multipart((topic, *message))
            self._sent.append(message)

    def _send_again(self, replay: zmq.Socket[bytes]) -> None:
        """Answer one replay request. It consists of an empty frame and the number of the first payload that is
        wanted."""
        client, *rest = replay.recv_multipart()
        if len(rest) != 2 or rest[0] or len(rest[1]) != 8:
            logger.warning("a request for KV events is not an empty frame and 8 bytes; it is not answered")
            return
        for number, payload in tuple(self._sent):
            if number >= rest[1]:
                replay.send_multipart((client, b"", number, payload))
        replay.send_multipart((client, b"", END_OF_REPLAY, b""))
