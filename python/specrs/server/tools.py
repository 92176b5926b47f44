"""Tools and reasoning of a chat: checks what the request asks for, turns it into a schema, and chooses the parsers of
the text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from specrs.errors import InvalidRequestError, invalid_config, invalid_request, short
from specrs.server.hosted_tools import left_out
from specrs.server.messages import MessageReader
from specrs.server.parsers.base import Function, ToolParser
from specrs.server.parsers.either import CallsOrContent
from specrs.server.parsers.forced import NamedParser, RequiredParser
from specrs.server.parsers.table import (
    AUTO,
    TOOL_PARSERS,
    begins_with_reasoning,
    content_parser,
    needs_special_tokens,
    new_call_id,
    new_reasoning_parser,
    parser_shown_by,
)
from specrs.server.protocol import AllowedToolChoice, ChatCompletionRequest, NamedToolChoice, Tool

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ToolSettings:
    """Server flags about tools: vLLM's `--enable-auto-tool-choice`, `--tool-call-parser`, `--reasoning-parser` and
    `--exclude-tools-when-tool-choice-none`."""

    auto_choice: bool = False
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    exclude_when_none: bool = False

    def chosen_for(self, template: str | None) -> ToolSettings:
        """Return settings with the tool parser that the chat template shows, if it is to be chosen automatically.

        Raises `InvalidConfigError` if tool_choice auto is to be served and `template` shows no known form of calls.
        """
        if self.tool_parser != AUTO:
            return self
        shown = None if template is None else parser_shown_by(template)
        if self.auto_choice and shown is None:
            names = ", ".join(TOOL_PARSERS)
            raise invalid_config(
                "--tool-call-parser", AUTO, f"the chat template shows no known form of calls; choose one of {names}"
            )
        return replace(self, tool_parser=shown)


@dataclass(frozen=True, slots=True)
class FieldNames:
    """Names of request fields in errors. A response is served as a chat, but its body has other fields.

    `json_schema` is the field with the schema and its labels, `schema` the field with the schema itself. In
    `parameters`, `{}` stands for a tool's name.
    """

    response_format: str = "response_format"
    json_schema: str = "response_format.json_schema"
    schema: str = "response_format.json_schema.schema"
    parameters: str = "tools[{}].function.parameters"
    chosen_name: str = "tool_choice.function.name"
    renamed: Mapping[str, str] = field(default_factory=dict)
    """For fields of the engine and of chats, the names that the client sent."""
    messages: Sequence[str] = ()
    """For each message of the chat, the field that the client sent it in. Empty if the client sent a chat."""

    def sent(self, text: str) -> str:
        """Return an error or warning that begins with a field's name, with the name that the client sent."""
        at = _MESSAGE.match(text)
        if at is not None and self.messages:
            place = self.messages[int(at["index"])]
            # what is not in a list was sent as a text, which has no role
            return place + (text[at.end("index") + 1 :] if place.endswith("]") else text[at.end() :])
        for name, sent in self.renamed.items():
            rest = text.removeprefix(name)
            if rest != text and rest[:1] in ("=", ":", ".", "["):
                return sent + rest
        return text

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Context in which errors of requests are raised with the field names that the client sent."""
        try:
            yield
        except InvalidRequestError as fault:
            raise type(fault)(self.sent(str(fault))) from fault


_MESSAGE = re.compile(r"messages\[(?P<index>\d+)\](\['role'\]='[^']*')?")

CHAT_FIELDS = FieldNames(renamed={"logprobs": "top_logprobs", "prompt": "messages"})
RESPONSE_FIELDS = FieldNames(
    *("text.format", "text.format.schema", "text.format.schema", "tools[{}].parameters", "tool_choice.name"),
    {
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "prompt": "input",
        "reasoning_effort": "reasoning.effort",
        "tool_choice.allowed_tools": "tool_choice",
        "verbosity": "text.verbosity",
    },
)
MESSAGES_FIELDS = FieldNames(
    *("output_config.format", "output_config.format.schema", "output_config.format.schema"),
    *("tools[{}].input_schema", "tool_choice.name"),
    {"prompt": "messages", "reasoning_effort": "output_config.effort", "stop": "stop_sequences"},
)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Use of tools that one chat asks for. `choice` is "none", "auto", "required" or "named"; `functions` are those
    that may be called. `calls_before` is the number of calls in the conversation."""

    choice: str
    functions: tuple[Function, ...]
    parallel: bool
    settings: ToolSettings
    include_reasoning: bool
    calls_before: int = 0

    @property
    def keeps_special_tokens(self) -> bool:
        """True if the marks of a call or of reasoning may be special tokens, which the text must then include."""
        return self.choice == "auto" or (self.choice == "none" and needs_special_tokens(self.settings.reasoning_parser))

    def reader(
        self, prompt: str, *, constrained: bool, openings: Sequence[tuple[str, ...]] | None = None
    ) -> Callable[[], MessageReader] | None:
        """Return a function that makes a reader for a completion of `prompt`. None if all of its text is content.

        `constrained` says that a grammar constrains the text; it then has reasoning only after an explicit mark.
        `openings`: what calls begin with if the text is either calls or content; None: calls may stand anywhere.
        """
        name = self.settings.reasoning_parser
        if name is None and self.choice == "none":
            return None
        opened = name is not None and not constrained and begins_with_reasoning(name, prompt)

        def make() -> MessageReader:
            forced, parser = self.choice in ("required", "named"), self._parser()
            return MessageReader(
                None if name is None or forced else new_reasoning_parser(name, opened=opened),
                parser if parser is None or openings is None else CallsOrContent(parser, openings),
                parallel=self.parallel,
                include_reasoning=self.include_reasoning,
                named=self.choice == "named",
                new_call_id=lambda called, index: new_call_id(
                    self.settings.tool_parser, called, self.calls_before + index
                ),
            )

        return make

    def _parser(self) -> ToolParser | None:
        if self.choice == "none":
            return content_parser(self.settings.reasoning_parser)
        if self.choice == "required":
            return RequiredParser(self.functions)
        if self.choice == "named":
            return NamedParser(self.functions)
        return TOOL_PARSERS[str(self.settings.tool_parser)](self.functions)


def read_tools(body: ChatCompletionRequest, settings: ToolSettings, fields: FieldNames = CHAT_FIELDS) -> ToolUse:
    """Return what `body` asks of tools; `body` is what `narrowed` returned. Raises `InvalidRequestError` if it
    contradicts itself or the server's flags."""
    tools = body.tools or []
    functions = [
        # arguments are an object, also where the schema does not say so
        Function(
            tool.function.name,
            {"type": "object", **(tool.function.parameters or _NO_PARAMETERS)},
            fields.parameters.format(repr(tool.function.name)),
        )
        for tool in tools
    ]
    names = [function.name for function in functions]
    for name in names:
        if names.count(name) > 1:
            raise invalid_request("tools", name, "two functions have this name; give each its own")
    choice = body.tool_choice
    assert not isinstance(choice, AllowedToolChoice), "the body is narrowed first"
    if isinstance(choice, NamedToolChoice):
        functions = [function for function in functions if function.name == choice.function.name]
        if not functions:
            raise invalid_request(fields.chosen_name, choice.function.name, "must be a function of tools")
        kind = "named"
    else:
        kind = ("auto" if tools else "none") if choice is None else choice
        if kind == "required" and not tools:
            hosted = left_out(body.tools)
            needs = f"needs a function in tools; this server runs none of the tools that were sent: {short(hosted)}"
            raise invalid_request("tool_choice", kind, needs if hosted else "needs a function in tools")
        if kind == "auto" and not tools:
            kind = "none"
    if kind == "auto" and not (settings.auto_choice and settings.tool_parser):
        raise invalid_request(
            "tool_choice",
            "auto",
            "needs a server with --enable-auto-tool-choice; here it must be none, required or a named function",
        )
    return ToolUse(
        kind,
        tuple(functions),
        body.parallel_tool_calls is not False,
        settings,
        body.include_reasoning is not False,
        sum(len(calls) for message in body.messages if isinstance(calls := message.get("tool_calls"), list)),
    )


def template_tools(tools: list[Tool] | None) -> list[dict[str, Any]] | None:
    """Return `tools` in the form that chat templates read; None if there are none."""
    return [tool.model_dump(exclude_none=True) for tool in tools] if tools else None
