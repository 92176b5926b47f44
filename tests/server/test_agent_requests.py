"""Requests in the forms of coding agents are served, and their second turn finds the first in the prefix cache."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from .agent_requests import AGENTS, AgentRequest
from .harness import Answer, Server, serving
from .test_tools import SETTINGS

TEMPLATE = (
    "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.reasoning_content or '' }}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}\n"
    "{% endfor %}"
)


@pytest.fixture(scope="module")
def served() -> Iterator[Server]:
    with serving(
        *(*SETTINGS, "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"),
        *("--chat-template", TEMPLATE, "--served-model-name", "claude-sonnet-4-5"),
    ) as server:
        yield server


def sent(server: Server, request: AgentRequest, **fields: Any) -> Answer:
    answer = server.post(request.path, {**request.body, **fields}, **request.headers)
    assert answer.status == 200, answer.body
    return answer


def prompt_tokens(answer: dict[str, Any]) -> tuple[int, int]:
    """Return the number of tokens of a prompt, and how many of them came from the cache."""
    usage = answer["usage"]
    if "cache_read_input_tokens" in usage:
        return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["cache_read_input_tokens"]
    details = usage.get("input_tokens_details") or usage["prompt_tokens_details"]
    return usage.get("input_tokens") or usage["prompt_tokens"], details["cached_tokens"]


@pytest.mark.parametrize("agent", AGENTS)
def test_both_turns_are_served(served: Server, agent: str) -> None:
    for request in AGENTS[agent]:
        answer = sent(served, request)
        assert answer.headers["content-type"].startswith("text/event-stream")
        told = answer.headers.get("x-warning", "")
        for name in request.warnings:
            assert name in told
        assert bool(told) == bool(request.warnings), told
        events = [json.loads(line[6:]) for line in answer.body.splitlines() if line.startswith(b"data: {")]
        assert events
        assert not any("error" in event for event in events if event.get("error") is not None)


@pytest.mark.parametrize("agent", AGENTS)
def test_a_second_turn_finds_the_first_in_the_cache(served: Server, agent: str) -> None:
    limit = "max_output_tokens" if agent == "codex" else "max_tokens"
    plain = {"stream": False, "cache_salt": agent, limit: 1}
    if "stream_options" in AGENTS[agent][0].body:
        plain["stream_options"] = None
    (first, nothing), (_, cached) = (prompt_tokens(sent(served, turn, **plain).json) for turn in AGENTS[agent])
    assert nothing == 0
    # all whole blocks of 16 tokens, but for the last of them, which the end of the first turn may share
    assert cached >= first - 32
