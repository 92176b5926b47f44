"""Limits on what one connection or one request may cost the server. Only the values: other modules enforce them."""

from __future__ import annotations

from dataclasses import dataclass

from specrs.errors import InvalidConfigError
from specrs.options import Integer, Number, check_options, option

MAX_PROMPTS = 1024
"""Maximum number of prompts of one request, as in vLLM."""
MAX_COMPLETIONS = 4096
"""Maximum number of completions of one request: prompts times `n`."""
MAX_MESSAGES = 4096
MAX_REQUEST_ID_LENGTH = 128
MAX_PROMPT_LOGPROBS = 2**18
"""Maximum number of prompt log probabilities over all prompts of one request. Each takes about 400 bytes until the
answer is sent."""
MAX_VALUES = 1_000_000
"""Maximum number of JSON values in one body. The parser blocks the interpreter: 5 million numbers in 16 MB stopped
every other stream for a second."""
MAX_TOOLS = 128
"""Maximum number of tools of one request, as in OpenAI's API."""
MAX_FUNCTION_NAME_LENGTH = 256
SEND_BUFFER = 128 * 1024
"""Maximum number of bytes that the operating system buffers for a client that does not read. The process itself buffers
another 64 KiB."""
LARGE_BODY = 64 * 1024
"""Number of bytes above which a body is parsed in a thread, so that the event loop goes on."""


_SECONDS = Number(0.0, open_low=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class HTTPLimits:
    """Limits of one connection, in bytes and seconds. Raises `InvalidConfigError` for a wrong value; the message names
    the flag of `serve`."""

    max_body_size: int = option(16 << 20, Integer(1024, units=True), "bytes of a request's body", commands=("serve",))
    max_header_size: int = option(
        32 << 10, Integer(1024, units=True), "bytes of a request's header", commands=("serve",)
    )
    max_connections: int = option(
        1024,
        Integer(1),
        "maximum connections at once",
        commands=("serve",),
        details="One more takes the place of the connection that has been silent longest. That one gets 503, or the "
        "new one if none is silent.",
    )
    header_timeout: float = option(
        10.0,
        _SECONDS,
        "seconds for a header, from the first byte of a request or from the connection",
        flag_name="http-header-timeout",
        commands=("serve",),
    )
    body_timeout: float = option(
        60.0, _SECONDS, "seconds for a body", flag_name="http-body-timeout", commands=("serve",)
    )
    write_timeout: float = option(
        30.0,
        _SECONDS,
        "seconds that a client may leave the send buffer full",
        flag_name="http-write-timeout",
        commands=("serve",),
        details="The buffer has 128 KiB in the system and 64 KiB in the process. A client that takes longer is cut "
        "off.",
    )
    keep_alive_timeout: float = option(
        5.0,
        _SECONDS,
        "seconds that a connection may idle",
        flag_name="http-keep-alive-timeout",
        commands=("serve",),
    )

    def __post_init__(self) -> None:
        check_options(self, InvalidConfigError, by_flag=True)
