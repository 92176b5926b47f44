"""Items in the `input` of a response: keys that nothing reads, and items of tools that the server does not run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specrs.errors import did_you_mean, short
from specrs.server.message_fields import CACHE_MARKS

HOSTED_ITEMS = frozenset(
    {
        "apply_patch_call",
        "apply_patch_call_output",
        "code_interpreter_call",
        "computer_call",
        "computer_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "file_search_call",
        "image_generation_call",
        "local_shell_call",
        "local_shell_call_output",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "program",
        "program_output",
        "shell_call",
        "shell_call_output",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    }
)
"""Types of items that tools other than functions make. A client sends them back from an earlier answer of OpenAI's."""
_MAX_UNREAD = 20
"""Unread keys of one body that are told."""
_OF_ALL = ("type", "id", "status", *sorted(CACHE_MARKS))
_ITEM_KEYS: dict[str, tuple[str, ...]] = {
    "message": (*_OF_ALL, "role", "content", "phase"),
    "function_call": (*_OF_ALL, "call_id", "name", "arguments", "parsed_arguments", "namespace", "caller"),
    "function_call_output": (*_OF_ALL, "call_id", "output", "caller"),
    "reasoning": (*_OF_ALL, "summary", "content", "encrypted_content"),
}
"""Type of an item -> keys that are read here, or that an answer of OpenAI's has."""
_PART_KEYS = ("type", "text", "refusal", "annotations", "logprobs", "parsed", *sorted(CACHE_MARKS))


def item_type(item: dict[str, Any]) -> Any:
    """The type of an item, as it was sent. An item without one is a message."""
    return item.get("type") or "message"


def is_hosted_item(item: dict[str, Any]) -> bool:
    """True if a tool that the server does not run made the item."""
    kind = item_type(item)
    return isinstance(kind, str) and kind in HOSTED_ITEMS


def item_warnings(items: list[dict[str, Any]]) -> Iterator[str]:
    """A warning for the types of items that are left out, and one for each of the first keys that nothing reads.

    The items are valid otherwise. Keys with empty values give no warning.
    """
    hosted = sorted({str(item["type"]) for item in items if is_hosted_item(item)})
    if hosted:
        yield f"input: items of type {', '.join(hosted)} are left out; this server runs no such tools"
    for count, (place, key, known) in enumerate(_unread(items)):
        if count == _MAX_UNREAD:
            return
        # long names are no typing errors, and take long to compare
        meant = did_you_mean(key, known) if len(key) <= 40 else ""
        yield f"{place}[{short(key)}]: has no effect; nothing reads it{meant}"


def _unread(items: list[dict[str, Any]]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Place, key and known keys for each key that nothing reads."""
    for i, item in enumerate(items):
        if is_hosted_item(item):
            continue
        known = _ITEM_KEYS[item_type(item)]
        yield from ((f"input[{i}]", key, known) for key, value in item.items() if value and key not in known)
        for name in ("content", "output"):
            parts = item.get(name)
            for j, part in enumerate(parts if name in known and isinstance(parts, list) else ()):
                place = f"input[{i}][{name!r}][{j}]"
                yield from ((place, key, _PART_KEYS) for key, value in part.items() if value and key not in _PART_KEYS)
