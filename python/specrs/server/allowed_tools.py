"""Turns a chat whose `tool_choice` allows only some tools into a chat that has only those tools."""

from __future__ import annotations

from typing import Any

from specrs.errors import invalid_request
from specrs.server.hosted_tools import is_hosted, left_out
from specrs.server.protocol import AllowedToolChoice, ChatCompletionRequest


def narrowed(body: ChatCompletionRequest) -> ChatCompletionRequest:
    """Return a copy of `body` that has only the allowed tools, with the mode of its `tool_choice`. Prompt and parser
    then know no other tools. Returns `body` itself if its `tool_choice` has another form.

    Raises `InvalidRequestError` if an allowed tool is not in `tools`.
    """
    choice = body.tool_choice
    if not isinstance(choice, AllowedToolChoice):
        return body
    offered = {tool.function.name: tool for tool in body.tools or []}
    names = []
    for i, tool in enumerate(choice.allowed_tools.tools):
        if is_hosted(tool) and tool["type"] in left_out(body.tools):
            continue
        name = _name(tool)
        if name not in offered:
            raise invalid_request(f"tool_choice.allowed_tools.tools[{i}]", tool, "must be a function of tools")
        names.append(name)
    if choice.allowed_tools.mode == "required" and not names:
        raise invalid_request(
            "tool_choice.allowed_tools.tools", choice.allowed_tools.tools, "mode=required needs a function of tools"
        )
    tools = [tool for name, tool in offered.items() if name in names]
    return body.model_copy(update={"tools": tools, "tool_choice": choice.allowed_tools.mode})


def _name(tool: dict[str, Any]) -> str | None:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) and tool.get("type") == "function" else None
