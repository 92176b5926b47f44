"""Converts bodies of Anthropic's Messages API to chats. Renders no template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from specrs.errors import InvalidRequestError, invalid_request
from specrs.server.anthropic.protocol import CountTokensRequest, MessagesToolChoice
from specrs.server.dispositions import warn
from specrs.server.input_items import unread_warnings
from specrs.server.limits import MAX_MESSAGES
from specrs.server.message_fields import without_marks
from specrs.server.protocol import DRAW_FIELDS, ChatCompletionRequest

ATTRIBUTION = "x-anthropic-billing-header:"
"""Beginning of the line in which Claude Code names its version and a checksum of the request. It differs in every
request, so no prompt that begins with it would be found in the prefix cache."""
REMINDER = "<system-reminder>\n{}\n</system-reminder>"
"""Form of a `system` message after the first message: text of the user in these tags. Many chat templates show no
`system` message at such a place. Moving its text to the first message would change the beginning of the prompt in every
turn, so that no turn would find the earlier turns in the prefix cache."""
ERROR_MARK = "Error: "
"""Beginning of the text of a `tool_result` with `is_error`. Chat templates have no other place for it."""

_SAME = (
    *DRAW_FIELDS,
    *("model", "max_tokens", "stream", "cache_salt", "structured_outputs", "priority", "request_id"),
)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_BLOCK_KEYS: dict[str, tuple[str, ...]] = {
    "text": ("type", "text", "citations"),
    "thinking": ("type", "thinking", "signature"),
    "redacted_thinking": ("type", "data"),
    "tool_use": ("type", "id", "name", "input", "caller"),
    "tool_result": ("type", "tool_use_id", "content", "is_error"),
    "mid_conv_system": ("type", "content"),
}
"""For each type of block, the keys that this server reads or that answers of this API have."""
_ALLOWED = {
    "user": ("text", "tool_result", "mid_conv_system"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
"""Types of blocks that messages of each role may have."""
_LEFT_OUT = frozenset(
    {
        "advisor_tool_result",
        "bash_code_execution_tool_result",
        "code_execution_tool_result",
        "mcp_tool_result",
        "mcp_tool_use",
        "server_tool_use",
        "text_editor_code_execution_tool_result",
        "tool_addition",
        "tool_reference",
        "tool_removal",
        "tool_search_tool_result",
        "web_fetch_tool_result",
        "web_search_tool_result",
    }
)
"""Types of blocks that are left out, with a warning. Tools of Anthropic's servers make most of them, and clients send
them back from an earlier answer. The others change which tools are offered; here all tools always are."""

Block = dict[str, Any]


def as_chat(body: CountTokensRequest) -> tuple[ChatCompletionRequest, list[str]]:
    """Return the chat that `body` asks for, and for each of its messages the field of `body` that it comes from.

    Raises `InvalidRequestError` for blocks that are malformed or not text.
    """
    conversation = _Conversation()
    conversation.add_system(body.system)
    for i, message in enumerate(body.messages):
        conversation.add(f"messages[{i}]", message)
    if not any(place.startswith("messages") for place in conversation.places):
        raise InvalidRequestError("messages: have no block that the model can read; add a text")
    conversation.warn()
    fields: dict[str, Any] = {name: getattr(body, name, None) for name in _SAME}
    fields["messages"] = conversation.messages
    fields["stop"] = getattr(body, "stop_sequences", None)
    if conversation.ends_with_prefill():
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    fields |= _tools(body)
    variables: dict[str, Any] = {}
    if body.thinking is not None:
        thinks = body.thinking.type != "disabled"
        # families differ in the name of the variable, and a template ignores a name that it does not read
        variables = dict.fromkeys(("enable_thinking", "thinking"), thinks)
        fields["include_reasoning"] = thinks
    fields["chat_template_kwargs"] = {**variables, **(body.chat_template_kwargs or {})} or None
    fields |= _output(body)
    return ChatCompletionRequest.model_validate(fields), conversation.places


def _tools(body: CountTokensRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if body.tools:
        functions = [
            {"name": tool.name, "description": tool.description, "parameters": tool.input_schema} for tool in body.tools
        ]
        fields["tools"] = [{"type": "function", "function": function} for function in functions]
    choice = body.tool_choice
    if choice is not None:
        fields["tool_choice"] = _choice(choice, has_tools=bool(body.tools))
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields


def _choice(choice: MessagesToolChoice, *, has_tools: bool) -> Any:
    """Return the `tool_choice` of a chat request."""
    if choice.type == "any" and not has_tools:
        raise invalid_request("tool_choice.type", "any", "needs a tool that the client runs; add one to tools")
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise InvalidRequestError("tool_choice.name: is missing; type=tool needs it")
    return {"type": "function", "function": {"name": choice.name}}


def _output(body: CountTokensRequest) -> dict[str, Any]:
    """Return the fields of a chat request about its reasoning effort and the format of its text."""
    config, wanted = body.output_config, body.output_format
    if config is not None and config.format is not None:
        if wanted is not None:
            raise InvalidRequestError("output_format: is there next to output_config.format; leave it out")
        wanted = config.format
    schema = None if wanted is None else {"type": "json_schema", "json_schema": {"schema": wanted.schema_}}
    return {"reasoning_effort": None if config is None else config.effort, "response_format": schema}


@dataclass
class _Conversation:
    """Messages of a chat that is being made, each with the field that it comes from."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    _left_out: set[str] = field(default_factory=set)
    _unread: list[tuple[str, str, tuple[str, ...]]] = field(default_factory=list)

    def add_system(self, system: str | list[Block] | None) -> None:
        """Add the field `system`, without the line of Claude Code that differs in every request."""
        blocks: list[Any] = [{"type": "text", "text": system}] if isinstance(system, str) else system or []
        for i, block in enumerate(blocks):
            at = f"system[{i}]"
            if self._type(at, "system", block) == "text":
                text = _string(at, block, "text")
                if text.startswith(ATTRIBUTION):
                    text = text.partition("\n")[2]
                if text:
                    self._add_text("system", "system", text)

    def add(self, at: str, message: dict[str, Any]) -> None:
        """Add a message, the field `at`. A message in the role of the one before it continues that message."""
        role = message.get("role")
        if not isinstance(role, str) or role not in _ALLOWED:
            raise invalid_request(f"{at}.role", role, f"must be one of {', '.join(_ALLOWED)}")
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list):
            raise invalid_request(f"{at}.content", content, "must be a string or a list of blocks")
        self._unread += [(at, key, ("role", "content")) for key in _unread(message, ("role", "content"))]
        # instructions after the conversation has begun
        late = role == "system" and any(one["role"] != "system" for one in self.messages)
        speaker, form = ("user", REMINDER) if late else (role, "{}")
        if role == "assistant":
            self._last("assistant", at)
        for j, block in enumerate(blocks):
            place = f"{at}.content[{j}]"
            kind = self._type(place, role, block)
            if kind == "tool_result":
                self._add_result(place, block)
            elif kind == "tool_use":
                self._last(role, at).setdefault("tool_calls", []).append(_call(place, block))
            elif kind == "thinking":
                self._add_thinking(self._last(role, at), _string(place, block, "thinking"))
            elif kind == "mid_conv_system":
                self._add_text("user", place, REMINDER.format(self._text(place, block)))
            elif kind == "text":
                text = form.format(_string(place, block, "text"))
                self._add_text(speaker, at if isinstance(content, str) else place, text)
        if len(self.messages) > MAX_MESSAGES:
            raise InvalidRequestError(f"messages: make more than {MAX_MESSAGES} messages of a chat; send fewer")

    def warn(self) -> None:
        """Warn the client of keys that nothing reads, and of blocks that were left out."""
        if self._left_out:
            kinds = ", ".join(sorted(self._left_out))
            warn(f"messages: blocks of type {kinds} are left out; this server has no such tools")
        for warning in unread_warnings(self._unread):
            warn(warning)

    def ends_with_prefill(self) -> bool:
        """Return True if the last message is the assistant's, so that the answer continues it. Raises
        `InvalidRequestError` if it cannot be continued."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            return False
        last = self.messages[-1]
        if last.get("tool_calls"):
            raise InvalidRequestError("messages: end with a tool_use block; add a message with its tool_result")
        if not last["content"]:
            raise InvalidRequestError("messages: end with an assistant's message without text; add a user's message")
        return True

    def _last(self, role: str, at: str) -> dict[str, Any]:
        """Return the last message if it has this role, otherwise a new one."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": []})
            self.places.append(at)
        return self.messages[-1]

    def _add_text(self, role: str, at: str, text: str) -> None:
        self._last(role, at)["content"].append({"type": "text", "text": text})

    def _add_thinking(self, message: dict[str, Any], text: str) -> None:
        before = message.get("reasoning")
        message["reasoning"] = text if before is None else f"{before}\n{text}"

    def _add_result(self, at: str, block: Block) -> None:
        is_error = block.get("is_error")
        if is_error is not None and not isinstance(is_error, bool):
            raise invalid_request(f"{at}.is_error", is_error, "must be true or false")
        text = f"{ERROR_MARK if is_error else ''}{self._text(at, block)}"
        self.messages.append({"role": "tool", "tool_call_id": _string(at, block, "tool_use_id"), "content": text})
        self.places.append(at)

    def _text(self, at: str, block: Block) -> str:
        """Return the text of the field `content` of a block, which may be a text or blocks of text."""
        content = block.get("content")
        if content is None or isinstance(content, str):
            return content or ""
        if not isinstance(content, list):
            raise invalid_request(f"{at}.content", content, "must be a string or a list of text blocks")
        places = [(f"{at}.content[{i}]", part) for i, part in enumerate(content)]
        return "\n".join(
            _string(place, part, "text") for place, part in places if self._type(place, "system", part) == "text"
        )

    def _type(self, at: str, role: str, block: Any) -> str:
        """Return the type of a block that a message of `role` may have. An empty type is a block to leave out."""
        if not isinstance(block, dict):
            raise invalid_request(at, block, "must be a block, an object with a type")
        kind = block.get("type")
        if isinstance(kind, str) and kind in _LEFT_OUT:
            self._left_out.add(kind)
            return ""
        if kind in ("image", "document"):
            raise invalid_request(
                f"{at}.type", kind, f"not implemented; this server reads text alone, so leave the {kind} out"
            )
        if kind not in _ALLOWED[role]:
            raise invalid_request(f"{at}.type", kind, f"not implemented; allowed: {', '.join(_ALLOWED[role])}")
        assert isinstance(kind, str)
        rest = without_marks("system" if at.startswith("system") else "messages", block)
        self._unread += [(at, key, _BLOCK_KEYS[kind]) for key in _unread(rest, _BLOCK_KEYS[kind])]
        return kind


def _unread(given: dict[str, Any], known: tuple[str, ...]) -> Iterator[str]:
    """Yield the keys of a message or block that are not empty and not `known`."""
    yield from (key for key, value in given.items() if value and key not in known)


def _string(at: str, block: Block, key: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise invalid_request(f"{at}.{key}", value, "must be a string")
    return value


def _call(at: str, block: Block) -> dict[str, Any]:
    """Return a `tool_use` block as a call of a chat's message."""
    given = block.get("input")
    if not isinstance(given, dict):
        raise invalid_request(f"{at}.input", given, "must be an object")
    function = {"name": _string(at, block, "name"), "arguments": json.dumps(given, ensure_ascii=False)}
    return {"id": _string(at, block, "id"), "type": "function", "function": function}
