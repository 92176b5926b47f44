"""Checks the keys and roles of messages, because a misspelled one changes a prompt silently. Changes no message."""

from __future__ import annotations

from specrs.chat_template.traits import Message, Traits
from specrs.errors import invalid_request, near_names, short

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that every conversation may have. Other roles need a template that knows them."""
KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content")
"""Keys of messages with a meaning here or in OpenAI's API."""
_OF_CLIENTS = frozenset(
    {
        "annotations",
        "audio",
        "function_call",
        "images",
        "parsed",
        "provider_specific_fields",
        "reasoning_details",
        "refusal",
        "thinking_blocks",
    }
)
"""Keys that clients copy from an answer into the next request. They are ignored without a warning."""


def check_message(index: int, message: Message, traits: Traits) -> list[str]:
    """Return a warning for each key of a message that nothing reads. Keys with empty values give none.

    Raises `InvalidRequestError` for a role that the template does not know, and for an unread key in a message without
    content and calls.
    """
    role = message["role"]
    if role not in ROLES and not traits.knows_role(role):
        raise invalid_request(
            f"messages[{index}]['role']", role, f"must be one of {', '.join(ROLES)}{_meant(role, ROLES)}"
        )
    warnings = []
    for key, value in message.items():
        if not value or key in KEYS or key in _OF_CLIENTS or key in traits.words:
            continue
        if message.get("content") is None and not message.get("tool_calls"):
            raise invalid_request(
                f"messages[{index}]",
                message,
                f"has the unknown key {short(key)} and no content; give it a content{_meant(key, KEYS)}",
            )
        warnings.append(f"messages[{index}][{short(key)}]: the chat template does not read it{_meant(key, KEYS)}")
    return warnings


def _meant(name: str, known: tuple[str, ...]) -> str:
    # long names are no typing errors, and take long to compare
    close = near_names(name, known, 1) if len(name) <= 40 else []
    return f"; did you mean {close[0]}?" if close else ""
