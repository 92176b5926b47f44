"""Paths of requests, and the API that a path belongs to."""

from __future__ import annotations

from starlette.types import Scope

MESSAGES = "/v1/messages"
"""Path of Anthropic's Messages API. All paths below it belong to that API, too."""


def route_path(scope: Scope) -> str:
    """Return the path of an HTTP request without the prefix of a proxy (`--root-path`)."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def is_anthropic(path: str) -> bool:
    """Return True if `path` belongs to Anthropic's API, whose errors and headers differ from OpenAI's."""
    return path == MESSAGES or path.startswith(MESSAGES + "/")
