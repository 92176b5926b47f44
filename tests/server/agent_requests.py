"""Requests in the forms that coding agents send: path, headers and two turns of a conversation. Holds no tests.

The texts are short and written for these tests. Forms and field names are those of the agents.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

READ = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {"file_path": {"type": "string"}, "limit": {"type": "number"}},
    "required": ["file_path"],
    "additionalProperties": False,
}
SHELL = {
    "type": "object",
    "properties": {"command": {"type": "array", "items": {"type": "string"}}, "timeout_ms": {"type": "number"}},
    "required": ["command"],
    "additionalProperties": False,
}
EPHEMERAL = {"type": "ephemeral"}


@dataclass(frozen=True)
class AgentRequest:
    """One request of an agent. `warnings`: beginnings of the answer's warnings, in order."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def claude_code(number: int, *messages: dict[str, Any]) -> AgentRequest:
    """Return the request of turn `number` of Claude Code. The first block of `system` differs in each request."""
    return AgentRequest(
        "/v1/messages?beta=true",
        {
            "model": "claude-sonnet-4-5",
            "max_tokens": 32000,
            "stream": True,
            "system": [
                {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.{number}; cch={number:05x};"},
                {"type": "text", "text": "You are an agent for code.", "cache_control": EPHEMERAL},
                {"type": "text", "text": "Use the tools.", "cache_control": {**EPHEMERAL, "ttl": "1h"}},
            ],
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "<system-reminder>\nToday is Monday.\n</system-reminder>"},
                        {"type": "text", "text": "What is in a.py?", "cache_control": EPHEMERAL},
                    ],
                },
                *messages,
            ],
            "tools": [
                {"name": "Read", "description": "Reads a file.", "input_schema": READ},
                {"name": "Bash", "input_schema": SHELL, "cache_control": EPHEMERAL},
                {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
            ],
            "thinking": {"type": "enabled", "budget_tokens": 31999},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "metadata": {"user_id": "user_1_account__session_2"},
        },
        {
            "anthropic-version": "2023-06-01",
            "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
            "x-app": "cli",
        },
        (
            "tools[2].type='web_search_20250305'",
            "tools[1].cache_control",
            "thinking.budget_tokens",
            "context_management",
            "metadata",
            "system: cache_control",
            "messages: cache_control",
        ),
    )


CLAUDE_CODE = (
    claude_code(1),
    claude_code(
        2,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I read it.", "signature": "c2ln"},
                {"type": "text", "text": "I read it first."},
                {"type": "tool_use", "id": "toolu_01", "name": "Read", "input": {"file_path": "/a.py"}},
                {"type": "tool_use", "id": "toolu_02", "name": "Bash", "input": {"command": ["ls"]}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"tool_use_id": "toolu_01", "type": "tool_result", "content": "x = 1"},
                {
                    "tool_use_id": "toolu_02",
                    "type": "tool_result",
                    "content": [{"type": "text", "text": "no such command"}],
                    "is_error": True,
                    "cache_control": EPHEMERAL,
                },
                {"type": "text", "text": "<system-reminder>\nGo on.\n</system-reminder>"},
            ],
        },
    ),
)


def later_claude_code(number: int, *messages: dict[str, Any]) -> AgentRequest:
    """Return the request of turn `number` of a later Claude Code, which also instructs the model between the messages
    of its user."""
    older = claude_code(number)
    instructed = [
        {"role": "user", "content": [{"type": "text", "text": "What is in a.py?"}]},
        {"role": "system", "content": [{"type": "text", "text": "# Environment\nLinux", "cache_control": EPHEMERAL}]},
    ]
    body = {
        **older.body,
        "max_tokens": 128000,
        "messages": [*instructed, *messages],
        "tools": [{"name": "Read", "description": "Reads a file.", "input_schema": READ}],
        "thinking": {"type": "adaptive", "display": "omitted"},
        "output_config": {"effort": "high"},
        "safeguards": [{"type": "dangerous_tool_use", "classifier_context": {"v": 1}}],
    }
    betas = (
        "claude-code-20250219,interleaved-thinking-2025-05-14,thinking-token-count-2026-05-13,"
        "context-management-2025-06-27,prompt-caching-scope-2026-01-05,mid-conversation-system-2026-04-07,"
        "per-turn-control-2026-07-01,mid-conversation-tool-changes-2026-07-01,effort-2025-11-24,"
        "dangerous-tool-use-2026-09-03,afk-mode-2026-01-31"
    )
    warnings = (
        "thinking.display",
        "context_management",
        "metadata",
        "safeguards",
        "system: cache_control",
        "messages: cache_control",
        "output_config.effort='high': the chat template does not read it",
    )
    return AgentRequest(older.path, body, {**older.headers, "anthropic-beta": betas}, warnings)


LATER_CLAUDE_CODE = (
    later_claude_code(1),
    later_claude_code(
        2,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "call_1", "name": "Read", "input": {}}]},
        {
            "role": "user",
            "content": [{"tool_use_id": "call_1", "type": "tool_result", "content": "x = 1", "is_error": False}],
        },
        {"role": "system", "content": "9000 tokens left"},
    ),
)

CODEX_BODY: dict[str, Any] = {
    "model": "claude-sonnet-4-5",
    "instructions": "You are an agent for code.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Use the shell."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is in a.py?"}]},
    ],
    "tools": [
        {"type": "function", "name": "shell", "description": "Runs it.", "strict": False, "parameters": SHELL},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "session-1",
}
CODEX_RESULT = [
    {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
    {"type": "function_call", "name": "shell", "arguments": '{"command":["cat","a.py"]}', "call_id": "call_1"},
    {"type": "function_call_output", "call_id": "call_1", "output": "x = 1"},
]
CODEX_WARNINGS = ("tools[1].type='custom'", "reasoning.summary", "prompt_cache_key", "include", "reasoning.effort")
CODEX = (
    AgentRequest("/v1/responses", CODEX_BODY, warnings=CODEX_WARNINGS),
    AgentRequest(
        "/v1/responses",
        {**CODEX_BODY, "input": [*CODEX_BODY["input"], *CODEX_RESULT]},
        {"session_id": "session-1"},
        CODEX_WARNINGS,
    ),
)

OPENCODE_BODY: dict[str, Any] = {
    "model": "claude-sonnet-4-5",
    "max_tokens": 24,
    "temperature": 0.55,
    "top_p": 1,
    "messages": [
        {"role": "system", "content": "You are an agent for code."},
        {"role": "user", "content": "What is in a.py?"},
    ],
    "tools": [{"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": READ}}],
    "tool_choice": "auto",
    "stream": True,
    "stream_options": {"include_usage": True},
}
OPENCODE_RESULT = [
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": '{"file_path":"a.py"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "x = 1"},
]
OPENCODE = (
    AgentRequest("/v1/chat/completions", OPENCODE_BODY),
    AgentRequest("/v1/chat/completions", {**OPENCODE_BODY, "messages": [*OPENCODE_BODY["messages"], *OPENCODE_RESULT]}),
)

CLINE_BODY: dict[str, Any] = {
    "model": "claude-sonnet-4-5",
    "temperature": 0,
    "max_tokens": 24,
    "messages": [
        {"role": "system", "content": "Write <read_file><path>...</path></read_file> to read a file."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<task>\nWhat is in a.py?\n</task>"},
                {"type": "text", "text": "<environment_details>\na.py\n</environment_details>"},
            ],
        },
    ],
    "stream": True,
    "stream_options": {"include_usage": True},
}
CLINE_RESULT = [
    {"role": "assistant", "content": "<read_file>\n<path>a.py</path>\n</read_file>"},
    {
        "role": "user",
        "content": [{"type": "text", "text": "[read_file for 'a.py'] Result:"}, {"type": "text", "text": "x"}],
    },
]
CLINE = (
    AgentRequest("/v1/chat/completions", CLINE_BODY),
    AgentRequest("/v1/chat/completions", {**CLINE_BODY, "messages": [*CLINE_BODY["messages"], *CLINE_RESULT]}),
)

AIDER_BODY: dict[str, Any] = {
    "model": "claude-sonnet-4-5",
    "messages": [
        {"role": "system", "content": "Answer with edit blocks."},
        {"role": "user", "content": "I have added these files:\n\na.py\n```\nx = 1\n```"},
        {"role": "assistant", "content": "Ok."},
        {"role": "user", "content": "Set x to 2."},
    ],
    "temperature": 0,
    "max_tokens": 24,
    "stream": True,
}
AIDER_RESULT = [{"role": "assistant", "content": "a.py\n```\nx = 2\n```"}, {"role": "user", "content": "Now 3."}]
AIDER = (
    AgentRequest("/v1/chat/completions", AIDER_BODY),
    AgentRequest("/v1/chat/completions", {**AIDER_BODY, "messages": [*AIDER_BODY["messages"], *AIDER_RESULT]}),
)

AGENTS: dict[str, tuple[AgentRequest, ...]] = {
    "claude_code": CLAUDE_CODE,
    "later_claude_code": LATER_CLAUDE_CODE,
    "codex": CODEX,
    "opencode": OPENCODE,
    "cline": CLINE,
    "aider": AIDER,
}
