"""Tools of OpenAI's API that its servers run themselves. This server runs none: it leaves them out, with a warning."""

from __future__ import annotations

from typing import Any

from pydantic_core import PydanticCustomError

from specrs.server.dispositions import warn

HOSTED_TOOLS = frozenset(
    {
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use",
        "computer_use_preview",
        "custom",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "namespace",
        "programmatic_tool_calling",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)
"""Types of tools other than `function`. `custom` is among them: its input is a text that nothing here parses."""


def is_hosted(tool: object) -> bool:
    """Whether a tool, or the choice of one, is of a type that the server does not run."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and kind in HOSTED_TOOLS


def runnable_tools(tools: Any) -> Any:
    """The `tools` of a body without those that the server does not run; each of them gives a warning."""
    if not isinstance(tools, list):
        return tools
    for i, tool in enumerate(tools):
        if is_hosted(tool):
            warn(f"tools[{i}].type={tool['type']!r}: left out; this server runs no such tool")
    return [tool for tool in tools if not is_hosted(tool)]


def runnable_choice(choice: Any) -> Any:
    """The `tool_choice` of a body. Raises `PydanticCustomError` if it demands a tool that the server does not run."""
    if is_hosted(choice):
        raise PydanticCustomError("not_implemented", "this server runs no such tool; name a function of tools")
    return choice
