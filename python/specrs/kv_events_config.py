"""What an engine tells of its prefix cache, and where: `KVEventsConfig`, under vLLM's names, checked. Opens nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specrs.errors import (
    InvalidConfigError,
    check_bool,
    check_choice,
    check_int,
    check_text,
    invalid,
    rejects_unknown_arguments,
    unknown_key,
)

PUBLISHERS = ("null", "zmq")
TRANSPORTS = ("tcp://", "ipc://", "inproc://")


@rejects_unknown_arguments(InvalidConfigError)
@dataclass(frozen=True, kw_only=True)
class KVEventsConfig:
    """KV events as vLLM publishes them. Immutable and checked at construction; `from_mapping` reads vLLM's dictionary.

    `enable_kv_cache_events`: off by default. `publisher`: `zmq`, or `null`, which makes events and drops them; None is
    `zmq` where events are on.
    `endpoint`: of the ZeroMQ PUB socket. As with vLLM it is bound where it has a `*` or `::` or is `ipc://` or
    `inproc://`, and connected to elsewhere. `tcp://*:5557`, the default, listens on every interface.
    `replay_endpoint`: of a ROUTER socket that sends again what a subscriber has missed; None is no such socket.
    `buffer_steps`: payloads that are kept for it. `hwm`: payloads that ZeroMQ queues for a subscriber that is slow;
    those beyond are dropped, which it sees by their numbers. `max_queue_size`: likewise between engine and publisher.
    `topic`: the first frame of each message, which subscribers choose by.

    Raises `InvalidConfigError` naming field, value and what is allowed.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    def __post_init__(self) -> None:
        error, place = InvalidConfigError, "kv_events_config."
        check_bool(error, place + "enable_kv_cache_events", self.enable_kv_cache_events)
        if self.publisher is not None:
            check_choice(error, place + "publisher", self.publisher, PUBLISHERS)
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            if value is None and name == "replay_endpoint":
                continue
            check_text(error, place + name, value)
            if not value.startswith(TRANSPORTS):
                raise invalid(error, place + name, value, f"must begin with one of {', '.join(TRANSPORTS)}")
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            check_int(error, place + name, getattr(self, name), 1, 2**31 - 1)
        if not isinstance(self.topic, str):
            raise invalid(error, place + "topic", self.topic, "must be a string")

    @property
    def publishes(self) -> bool:
        """Whether events leave the process."""
        return self.enable_kv_cache_events and self.publisher in (None, "zmq")

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> KVEventsConfig:
        """Read the dictionary of `kv_events_config` or `--kv-events-config`. Raises `InvalidConfigError`."""
        known = {field.name for field in dataclasses.fields(cls)}
        for key in given:
            if key not in known:
                raise unknown_key(InvalidConfigError, "kv_events_config", key, known)
        return cls(**given)
