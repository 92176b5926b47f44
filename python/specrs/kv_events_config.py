"""`KVEventsConfig`: whether and where events about the prefix cache are published, under vLLM's names. Opens
nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specrs.errors import InvalidConfigError, SpecrsError, invalid, rejects_unknown_arguments, unknown_key
from specrs.options import Choice, Integer, Switch, Text, check_options, option, options_of

PUBLISHERS = ("null", "zmq")
TRANSPORTS = ("tcp://", "ipc://", "inproc://")


@dataclass(frozen=True)
class _Endpoint(Text):
    def check(self, error: type[SpecrsError], field: str, value: Any, also: str = "") -> str:
        text = super().check(error, field, value, also)
        if not text.startswith(TRANSPORTS):
            raise invalid(error, field, value, f"must begin with one of {', '.join(TRANSPORTS)}")
        return text


_COUNT = Integer(1, 2**31 - 1)


@rejects_unknown_arguments(InvalidConfigError)
@dataclass(frozen=True, kw_only=True)
class KVEventsConfig:
    """KV events as vLLM publishes them. Immutable and checked at construction; `from_mapping` reads vLLM's dictionary.

    docs/configuration.md lists the options. Raises `InvalidConfigError` naming field, value and what is allowed.
    """

    enable_kv_cache_events: bool = option(False, Switch(), "publish an event for each change of the prefix cache")
    publisher: str | None = option(
        None,
        Choice(PUBLISHERS),
        "where events go",
        note="null makes events and drops them",
        default_is="zmq if events are on",
    )
    endpoint: str = option(
        "tcp://*:5557",
        _Endpoint(),
        "address of the ZeroMQ PUB socket",
        details="As in vLLM, the socket binds an address with `*` or `::`, `ipc://` or `inproc://`, and connects to "
        "any other. The default listens on every interface.",
    )
    replay_endpoint: str | None = option(
        None, _Endpoint(), "address of a ROUTER socket that sends missed events again", default_is="no such socket"
    )
    buffer_steps: int = option(10_000, _COUNT, "payloads kept for the replay socket")
    hwm: int = option(
        100_000,
        _COUNT,
        "payloads that ZeroMQ queues for a slow subscriber",
        details="Those beyond are dropped. The subscriber sees by their numbers that some are missing.",
    )
    max_queue_size: int = option(100_000, _COUNT, "payloads queued between engine and publisher")
    topic: str = option(
        "", Text(empty=True), "first frame of each message, by which subscribers filter", default_is="empty"
    )

    def __post_init__(self) -> None:
        check_options(self, InvalidConfigError, "kv_events_config.")

    @property
    def publishes(self) -> bool:
        """True if events are published, so that other processes can read them."""
        return self.enable_kv_cache_events and self.publisher in (None, "zmq")

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> KVEventsConfig:
        """Build the configuration from the dictionary of `kv_events_config` or `--kv-events-config`. Raises
        `InvalidConfigError` for an unknown key or a wrong value."""
        known = options_of(cls)
        for key in given:
            if key not in known:
                raise unknown_key(InvalidConfigError, "kv_events_config", key, known)
        return cls(**given)
