"""Checks items in the `input` of a Responses request. Finds keys that the server does not read, and items of tools that
it does not run."""

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
"""Types of items that hosted tools make, that is, tools other than functions. Clients send them back from an earlier
answer of OpenAI's."""
_MAX_UNREAD = 20
"""Maximum number of ignored keys of one body that warnings name."""
_OF_ALL = ("type", "id", "status", *sorted(CACHE_MARKS))
_ITEM_KEYS: dict[str, tuple[str, ...]] = {
    "message": (*_OF_ALL, "role", "content", "phase"),
    "function_call": (*_OF_ALL, "call_id", "name", "arguments", "parsed_arguments", "namespace", "caller"),
    "function_call_output": (*_OF_ALL, "call_id", "output", "caller"),
    "reasoning": (*_OF_ALL, "summary", "content", "encrypted_content"),
}
"""For each type of item, the keys that this server reads or that OpenAI's answers have."""
_PART_KEYS = ("type", "text", "refusal", "annotations", "logprobs", "parsed", *sorted(CACHE_MARKS))


def item_type(item: dict[str, Any]) -> Any:
    """Return the type of an item as the client sent it. An item without a type is a message."""
    return item.get("type") or "message"


def is_hosted_item(item: dict[str, Any]) -> bool:
    """Return True if the item comes from a tool that the server does not run."""
    kind = item_type(item)
    return isinstance(kind, str) and kind in HOSTED_ITEMS


def item_warnings(items: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a warning for the types of items that are left out, and one for each of the first ignored keys.

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
    """Yield (path, key, known keys of the item's type) for each key that the server ignores."""
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
