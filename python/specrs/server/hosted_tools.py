"""Tools that OpenAI's or Anthropic's servers run or define themselves. This server has none of them: it leaves them out
with a warning."""

from __future__ import annotations

import re
from typing import Any

from pydantic import ValidatorFunctionWrapHandler
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
"""Types of tools that the server does not run: all but `function`. `custom` is among them, because its input is free
text that no parser here reads."""
_ANTHROPIC_TOOL = re.compile(r"[a-z_]+_20\d{6}|mcp_toolset|tool_search_tool_(regex|bm25)")
"""Types of tools that Anthropic defines. All but a few end with a date, as in `web_search_20250305`."""


def is_hosted(tool: object) -> bool:
    """Return True if a tool, or a choice of a tool, has a type that the server does not run."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and (kind in HOSTED_TOOLS or _ANTHROPIC_TOOL.fullmatch(kind) is not None)


class RunnableTools(list[Any]):
    """The `tools` of a body that the server can offer to the model.

    `places`: the index that each tool had in the body. `left_out`: the types of the tools that were left out.
    """

    def __init__(self, tools: list[Any]) -> None:
        """Take `tools` of a body, functions and hosted tools, and keep only the functions."""
        super().__init__(tool for tool in tools if not is_hosted(tool))
        self.places = [i for i, tool in enumerate(tools) if not is_hosted(tool)]
        self.left_out = [str(tool["type"]) for tool in tools if is_hosted(tool)]


def tool_or_hosted(tool: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Validate one of the `tools` of a body. A tool that the server does not run is returned as it is."""
    return tool if is_hosted(tool) else validate(tool)


def runnable_tools(tools: list[Any] | None) -> RunnableTools | None:
    """Return the `tools` of a body without those that the server does not run. Each tool left out gives a warning."""
    if tools is None:
        return None
    for i, tool in enumerate(tools):
        if is_hosted(tool):
            warn(f"tools[{i}].type={tool['type']!r}: left out; this server runs no such tool")
    return RunnableTools(tools)


def left_out(tools: list[Any] | None) -> list[str]:
    """Return the types of the tools that `runnable_tools` left out of the `tools` of a body."""
    return tools.left_out if isinstance(tools, RunnableTools) else []


def runnable_choice(choice: Any) -> Any:
    """Return the `tool_choice` of a body. Raises `PydanticCustomError` if it demands a tool that the server does not
    run."""
    if is_hosted(choice):
        raise PydanticCustomError("not_implemented", "this server runs no such tool; name a function of tools")
    return choice
