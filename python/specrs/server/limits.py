"""What one connection or one request may cost the server. Enforced where each is named; only bounds live here."""

from __future__ import annotations

from dataclasses import dataclass

MAX_PROMPTS = 1024
"""Prompts of one request, as in vLLM."""
MAX_COMPLETIONS = 4096
"""Prompts times `n` of one request."""
MAX_MESSAGES = 4096
MAX_REQUEST_ID_LENGTH = 128
MAX_PROMPT_LOGPROBS = 2**18
"""Of all prompts of one request; each takes some 400 bytes until the answer is sent."""
MAX_VALUES = 1_000_000
"""Of one body. The parser holds the interpreter: 5 million numbers in 16 MB stopped every other stream for a second."""
MAX_TOOLS = 128
"""As in OpenAI's API."""
MAX_FUNCTION_NAME_LENGTH = 256
SEND_BUFFER = 128 * 1024
"""Bytes that the system holds for one client that has not taken them; the process itself holds another 64 KiB."""
LARGE_BODY = 64 * 1024
"""Bytes; longer bodies are parsed off the event loop."""


@dataclass(frozen=True, slots=True)
class HTTPLimits:
    """Bytes and seconds. `header_timeout`: from the first byte of a request, or from the connection, to the end of its
    header. `body_timeout`: to the end of its body. `write_timeout`: how long a client may leave the send buffer full.
    """

    max_header_size: int = 32 * 1024
    max_body_size: int = 16 * 1024 * 1024
    max_connections: int = 1024
    header_timeout: float = 10.0
    body_timeout: float = 60.0
    write_timeout: float = 30.0
    keep_alive_timeout: float = 5.0
