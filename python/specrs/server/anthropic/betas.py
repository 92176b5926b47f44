"""Checks the header `anthropic-beta`. No beta changes what this server does: features are always on or not there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from specrs.errors import short

KNOWN_BETAS = frozenset(
    {
        "afk-mode",
        "claude-code",
        "context-1m",
        "context-management",
        "dangerous-tool-use",
        "effort",
        "extended-cache-ttl",
        "fine-grained-tool-streaming",
        "interleaved-thinking",
        "max-tokens-3-5-sonnet",
        "mid-conversation-system",
        "mid-conversation-tool-changes",
        "model-context-window-exceeded",
        "oauth",
        "output-128k",
        "per-turn-control",
        "prompt-caching",
        "prompt-caching-scope",
        "structured-outputs",
        "thinking-display-updates",
        "thinking-token-count",
        "token-counting",
        "token-efficient-tools",
        "tools",
    }
)
"""Betas, without their dates, that are served, or that cannot change an answer of this server. A field that one of them
adds has its own warning if it has no effect."""
_MAX_NAMED = 20
"""Maximum number of betas of one request that warnings name."""


def beta_warnings(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[str]:
    """Yield a warning for each beta in the request's headers that this server does not know."""
    given = b",".join(value for name, value in headers if name == b"anthropic-beta").decode("latin-1")
    names = dict.fromkeys(name.strip() for name in given.split(",") if name.strip())
    unknown = [name for name in names if _without_date(name) not in KNOWN_BETAS]
    for name in unknown[:_MAX_NAMED]:
        yield f"anthropic-beta={short(name)}: has no effect; this server does not know it"


def _without_date(beta: str) -> str:
    """Return the name of a beta without the date at its end, as in `effort-2025-11-24` or `claude-code-20250219`."""
    return beta.rstrip("-0123456789")
