"""Splits the text of a completion into the fields of a chat message: reasoning, content and tool calls. The parsers are
in `parsers`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from specrs.server.content_stops import ContentStops
from specrs.server.parsers.base import CallStart, Content, Event, ToolParser
from specrs.server.parsers.reasoning import ReasoningParser

REASONING = ("reasoning", "reasoning_content")
"""Names of the field for a message's reasoning: vLLM's, and the older one of other servers and clients."""


@dataclass(slots=True)
class Piece:
    """Text that a completion adds to one part of its message. `call` is the tool call that begins with this piece, in
    OpenAI's format without arguments. None: the piece continues a call, the one with number `index`, or is no part of
    one."""

    kind: Literal["reasoning", "content", "call"]
    text: str
    call: dict[str, Any] | None = None
    index: int = 0


class MessageReader:
    """Reader of one completion's text, which comes in pieces."""

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        *,
        parallel: bool,
        include_reasoning: bool,
        named: bool,
        new_call_id: Callable[[str, int], str],
    ) -> None:
        """Start to read a completion. Without `parallel`, calls after the first are dropped. `named` says that the
        request demands a call of one named function. `new_call_id(name, index)` makes ids."""
        self._reasoning = reasoning
        self._tools = tools
        self._most_calls = None if parallel else 1
        self._include_reasoning = include_reasoning
        self._named = named
        self._new_call_id = new_call_id
        self._num_calls = 0
        self._new_reasoning: list[str] = []  # not taken yet
        self._new_events: list[Event] = []
        self._deciding: str | None = None  # the tool parser's `deciding_character`, once all text is answer
        self.stops: ContentStops | None = None
        """Finder of stop strings in the content. None: the engine checks stop strings."""

    def feed(self, text: str, *, final: bool) -> None:
        """Read `text`, which follows what was read before; `take` returns the result. `final` says that the completion
        has ended. After a stop string, nothing is read."""
        deciding = self._deciding
        if deciding is not None and text and deciding not in text and not text[-1].isspace() and not final:
            self._new_events.append(Content(text))  # as most tokens of most streams: no parser is called
            return
        if self.stops is not None and self.stops.found is not None:
            return
        reasoning, answer = ("", text) if self._reasoning is None else self._reasoning.feed(text, final=final)
        if reasoning:
            self._new_reasoning.append(reasoning)
        events: list[Event] = []
        if self._tools is None:
            if answer:
                events.append(Content(answer))
        elif answer or final:
            events = self._tools.feed(answer)
            if final:
                events += self._tools.finish()
            if self.stops is None and (self._reasoning is None or self._reasoning.over):
                self._deciding = self._tools.deciding_character
        self._new_events += events if self.stops is None else self.stops.filter(events, final=final)

    def take_pieces(self) -> list[Piece]:
        """Return what was read since the last call, in the order in which the model wrote it."""
        reasoning, self._new_reasoning = "".join(self._new_reasoning), []
        events, self._new_events = self._new_events, []
        pieces = [Piece("reasoning", reasoning)] if reasoning and self._include_reasoning else []
        for event in events:
            if isinstance(event, Content):
                pieces.append(Piece("content", event.text))
                continue
            call = None
            if isinstance(event, CallStart):
                function = {"name": event.name, "arguments": ""}
                call_id = self._new_call_id(event.name, self._num_calls)
                call = {"index": self._num_calls, "id": call_id, "type": "function", "function": function}
                self._num_calls += 1
            if self._most_calls is None or self._num_calls <= self._most_calls:
                text = "" if isinstance(event, CallStart) else event.text
                pieces.append(Piece("call", text, call, self._num_calls - 1))
        return pieces

    def take(self) -> dict[str, Any]:
        """Return what was read since the last call, as a delta in OpenAI's format."""
        if len(self._new_events) == 1 and not self._new_reasoning:  # as most tokens of most streams
            event = self._new_events[0]
            if isinstance(event, Content):
                self._new_events = []
                return {"content": event.text}
        delta: dict[str, Any] = {}
        content: list[str] = []
        calls: list[Piece] = []
        for piece in self.take_pieces():
            if piece.kind == "content":
                content.append(piece.text)
            elif piece.kind == "call":
                calls.append(piece)
            else:
                delta |= dict.fromkeys(REASONING, piece.text)
        if content:
            delta["content"] = "".join(content)
        if calls:
            delta["tool_calls"] = _calls(calls)
        return delta

    def message(self, text: str) -> dict[str, Any]:
        """Return the message, without its role, of a completion's whole `text`."""
        self.feed(text, final=True)
        return self.take_message()

    def take_message(self) -> dict[str, Any]:
        """Return the message, without its role, of everything that was read."""
        delta = self.take()
        message = {"content": delta.get("content"), "refusal": None}
        if message["content"] is None and "tool_calls" not in delta:
            message["content"] = ""
        if self._reasoning is not None and self._include_reasoning:
            message |= {name: delta.get(name) for name in REASONING}
        if "tool_calls" in delta:
            message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in delta["tool_calls"]]
        return message

    @property
    def reasoning_length(self) -> int | None:
        """Number of characters from the start of the text to the end of the reasoning, marks included. None while the
        reasoning goes on."""
        return 0 if self._reasoning is None else self._reasoning.length

    def finish_reason(self, reason: str | None) -> str | None:
        """Return OpenAI's finish reason for a completion whose text ended for `reason`: "tool_calls" if it stopped
        after tool calls. A call of a function that the request names ends with "stop", as in OpenAI's API."""
        return "tool_calls" if reason == "stop" and self._num_calls and not self._named else reason


def _calls(pieces: Iterable[Piece]) -> list[dict[str, Any]]:
    """Return a delta in OpenAI's format for each tool call that begins or continues in `pieces`."""
    found: dict[int, dict[str, Any]] = {}
    arguments: dict[int, list[str]] = {}
    for piece in pieces:
        found.setdefault(piece.index, piece.call or {"index": piece.index, "function": {"arguments": ""}})
        arguments.setdefault(piece.index, []).append(piece.text)
    for index, texts in arguments.items():
        found[index]["function"]["arguments"] = "".join(texts)
    return list(found.values())
