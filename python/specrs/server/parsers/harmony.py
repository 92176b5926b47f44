"""Parsers of gpt-oss' format, in which a completion is a list of messages with channels.

`<|channel|>analysis<|message|>` begins reasoning, `final` an answer, and `commentary to=functions.NAME` a call. A
message ends with `<|end|>`, `<|call|>` or `<|return|>`, and `<|start|>assistant` begins the next one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from specrs.server.parsers.base import Function, Run, ToolParser, first_characters, run_until, split_at
from specrs.server.parsers.reasoning import ReasoningParser

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ENDS = (END, CALL, RETURN)
_MARKS = (START, CHANNEL, *ENDS)
"""Marks that end the body of a message, or the text outside of messages."""
_FIRST = first_characters(_MARKS)
_KINDS = {"outside": "text", "body": "body"}
"""Kind of the part that text without marks belongs to, by the state of `Messages`."""
_TO = "to="
_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*(?P<channel>\w+)")
_FUNCTION = re.compile(r"\bto=functions\.(?P<name>[^\s<]+)")


@dataclass(slots=True)
class Part:
    """Part of a completion: `kind` is "text" outside of messages, "header", "body" or "end". `text` has the marks."""

    kind: str
    text: str


class Messages:
    """Splitter of a completion into the parts of its messages. The texts of all parts together are the text that was
    read, except for a header that is incomplete when the text ends."""

    def __init__(self) -> None:
        """Start before the first message. Its `<|start|>assistant` is in the prompt."""
        self._state = "begin"
        self._buffer = ""
        self._header: list[str] = []  # what was read of a header

    def feed(self, text: str, *, final: bool) -> list[Part]:
        """Read `text` and return the parts that are complete, and the available piece of a body. `final`: no more text
        follows."""
        self._buffer += text
        parts: list[Part] = []
        while self._step(parts, final=final):
            continue
        return [part for part in parts if part.text]

    @property
    def kind(self) -> str | None:
        """Kind of the part that the next text belongs to up to a mark. None if that depends on the text."""
        if self._buffer:
            return None
        return _KINDS.get(self._state)

    def _step(self, parts: list[Part], *, final: bool) -> bool:
        """Split off a part. Return False if that needs more text."""
        if self._state == "begin":
            rest = self._buffer.lstrip()
            if not final and _TO.startswith(rest):
                return False
            self._state = "outside"
            if rest.startswith(_TO):
                parts.append(Part("text", self._buffer[: len(self._buffer) - len(rest)]))
                self._buffer, self._state = rest, "header"
            return True
        if self._state == "header":
            return self._read_header(parts, final=final)
        text, marker, self._buffer = split_at(self._buffer, *_MARKS, final=final)
        parts.append(Part("text" if self._state == "outside" else "body", text))
        if marker in ENDS:
            parts.append(Part("end", marker))
            self._state = "outside"
        elif marker is not None:
            self._header, self._state = [marker], "header"
        return marker is not None

    def _read_header(self, parts: list[Part], *, final: bool) -> bool:
        is_marked = self._header[:1] in ([START], [CHANNEL])
        others = (START, *ENDS) if is_marked else (START, *ENDS, "\n")
        text, marker, self._buffer = split_at(self._buffer, MESSAGE, *others, final=final)
        self._header.append(text)
        if marker is None and not final:
            return False
        header, self._header = "".join(self._header), []
        if marker == MESSAGE:
            parts.append(Part("header", header + MESSAGE))
            self._state = "body"
            return True
        if marker is not None or not is_marked:  # no header
            parts.append(Part("text", header))
        self._buffer, self._state = (marker or "") + self._buffer, "outside"
        return True


def channel_of(header: str) -> str:
    """Return the channel of a message with `header`; "final" if it has none."""
    found = _CHANNEL.search(header)
    return "final" if found is None else found["channel"]


def function_of(header: str) -> str | None:
    """Return the function that a message with `header` calls; None if it calls none."""
    found = _FUNCTION.search(header)
    return None if found is None else found["name"]


class HarmonyParser(ToolParser):
    """Parser of calls and content. Arguments stream as they are generated. Messages that call no function are content,
    without their marks."""

    def __init__(self, functions: Sequence[Function] = ()) -> None:
        """Start before the first message. `functions` are those that the request offers. If there are none, any name
        counts as a function."""
        super().__init__(functions)
        self._messages = Messages()
        self._kind = "content"  # of the message: "content", "call", or "raw" for a call of what is not offered
        self._begun = False  # the call has arguments

    def _step(self, *, final: bool) -> bool:
        for part in self._messages.feed(self._take_all(), final=final):
            if part.kind == "header":
                self._read_header(part.text)
            elif part.kind == "end":
                if self._kind == "raw":
                    self._say(part.text)
                self._end()
            elif self._kind == "call" and part.kind == "body":
                piece = part.text if self._begun else part.text.lstrip()
                self._begun = self._begun or bool(piece)
                self._argue(piece)
            else:
                self._say(part.text)
        if final:
            self._end()
        return False

    def _find_run(self) -> Run | None:
        kind = self._messages.kind
        if kind == "body" and self._kind == "call":
            return run_until("arguments", *_MARKS) if self._begun else None
        return None if kind is None else run_until("content", *_MARKS)

    def _read_header(self, header: str) -> None:
        self._end()
        name = function_of(header)
        if name is None:
            self._kind = "content"
        elif self._offers(name):
            self._kind, self._begun = "call", False
            self._call(name)
        else:
            self._kind = "raw"
            self._say(header)

    def _end(self) -> None:
        if self._kind == "call" and not self._begun:
            self._argue("{}")
        self._kind = "content"


class HarmonyContent(HarmonyParser):
    """Parser for completions that may call nothing. Calls become content."""

    def _offers(self, name: str) -> bool:
        return False


class HarmonyReasoning(ReasoningParser):
    """Splitter of a completion into reasoning and the rest. Reasoning is the messages of the channel `analysis`,
    without their marks. The rest is all other messages with their marks, which `HarmonyParser` reads."""

    def __init__(self) -> None:
        """Start before the first message."""
        self._messages = Messages()
        self._reasons = False
        self._read = 0
        self._reasoned = 0
        self._answered = False

    @property
    def length(self) -> int | None:
        """Number of characters before the first message that is no reasoning; None while there is none."""
        return self._reasoned if self._answered else None

    @property
    def over(self) -> bool:
        """False: further messages of the channel `analysis` may follow an answer."""
        return False

    def feed(self, text: str, *, final: bool) -> tuple[str, str]:
        """Read `text` and return the reasoning and the answer that it adds. `final` says that no more text follows."""
        if not final and self._messages.kind == "body" and _FIRST.search(text) is None:
            self._read += len(text)
            if not self._answered:
                self._reasoned = self._read
            return (text, "") if self._reasons else ("", text)
        reasoning, answer = [], []
        for part in self._messages.feed(text, final=final):
            if part.kind == "header":
                self._reasons = channel_of(part.text) == "analysis" and function_of(part.text) is None
            elif part.kind == "text":
                self._reasons = False
            if self._reasons:
                if part.kind == "body":
                    reasoning.append(part.text)
                elif part.kind == "end":
                    self._reasons = False
            else:
                answer.append(part.text)
                self._answered = True
            self._read += len(part.text)
            if not self._answered:
                self._reasoned = self._read
        return "".join(reasoning), "".join(answer)
