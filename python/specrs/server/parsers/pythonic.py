"""Parsers of tool calls in a Python list, `[f(a=1), g(b="x")]`: those of Llama 3.2, Llama 4 and ToolACE, and of LFM2.
They execute no Python."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

from specrs.server.parsers.base import Function, Run, ToolParser

_NAMES = {"true": True, "false": False, "null": None}
_DECIDING = {"": re.compile(r"""['"()\[\]{},<]"""), "'": re.compile(r"['\\]"), '"': re.compile(r'["\\]')}
"""Characters that matter in the list, by the quote of the string in which they are; "" outside of strings."""
_RUNS = {quote: Run("kept", deciding) for quote, deciding in _DECIDING.items()}


class PythonicParser(ToolParser):
    """Parser of a text that begins with a list of calls, perhaps between marks. Each call is reported once it is
    complete. Text after the list is content."""

    start: ClassVar[str] = "<|python_start|>"
    """Mark before a list."""
    end: ClassVar[str] = "<|python_end|>"
    """Mark after a list."""
    text_marks: ClassVar[tuple[str, ...]] = (end,)
    _state = "begin"
    _begins = 0  # place of the call that is read, in `_seen`
    _depth = 0
    _quote = ""
    _escaped = False

    def __init__(self, functions: Sequence[Function] = ()) -> None:
        """Create a parser that has read nothing. `functions`: functions that the request offers. If it offers none, any
        name counts as a function."""
        super().__init__(functions)
        self._seen: list[str] = []  # of the list: all before its first call, then what follows on the last one

    def _in_begin(self, *, final: bool) -> bool:
        rest = self._buffer.lstrip()
        while rest.startswith(self.start):
            rest = rest.removeprefix(self.start).lstrip()
        if rest.startswith("["):
            self._begins = len(self._buffer) - len(rest) + 1
            self._seen, self._buffer = [self._buffer[: self._begins]], rest[1:]
            self._state = "list"
            return True
        if not final and self.start.startswith(rest):
            return False
        # Marks before what is no list are content.
        self._say(self._buffer[: len(self._buffer) - len(rest)])
        self._buffer, self._state = rest, "text"
        return True

    def _in_list(self, *, final: bool) -> bool:
        place = int(self._escaped and bool(self._buffer))
        self._escaped = self._escaped and not self._buffer
        while (found := _DECIDING[self._quote].search(self._buffer, place)) is not None:
            place = found.end()
            if found[0] == "\\":
                self._escaped = place == len(self._buffer)
                place += 1
            elif found[0] == "<":
                if self._ends_list(found.start()):
                    return True
                if not final and self.end.startswith(self._buffer[found.start() :]):
                    self._seen.append(self._buffer[: found.start()])
                    self._buffer = self._buffer[found.start() :]
                    return False
            elif self._ends_call(found[0]):
                self._seen.append(self._buffer[: found.start()])
                self._buffer = self._buffer[place:]
                self._end_call(found[0])
                return True
        self._seen.append(self._take_all())
        if final:
            self._end_call("")
        return final

    def _in_text(self, *, final: bool) -> bool:
        text, marker = self._take_content(final=final)
        if marker == self.start:
            self._say(text)
            self._buffer, self._state = marker + self._buffer, "begin"
            return True
        self._say(text if marker is None or self._called else text + self.end)
        return marker is not None

    def _find_run(self) -> Run | None:
        if self._state == "list" and not self._escaped and not self._buffer:
            return _RUNS[self._quote]
        return super()._find_run()

    def _ends_list(self, place: int) -> bool:
        """End the current call and the list if the mark after a list begins at `place` of the buffer: a bracket is
        missing. Return False if it does not."""
        if not self._buffer.startswith(self.end, place):
            return False
        self._seen.append(self._buffer[:place])
        self._buffer, self._depth = self._buffer[place + len(self.end) :], 0
        self._end_call(self.end)
        return True

    def _ends_call(self, char: str) -> bool:
        """Return True if `char` ends a call: a comma, or the closing bracket of the list."""
        if char in "'\"":
            self._quote = "" if self._quote else char
        elif char in "([{":
            self._depth += 1
        elif self._depth == 0:
            return True
        elif char != ",":
            self._depth -= 1
        return False

    def _end_call(self, char: str) -> None:
        """End the current call. `char` is the comma, bracket or mark after it; "" if the text ends without one."""
        seen = "".join(self._seen)
        text = seen[self._begins :]
        found = read_call(text if char else text.strip().removesuffix(self.end))
        if found is not None and self._offers(found[0]):
            self._call(found[0])
            self._argue(found[1])
            self._seen, self._begins = [], 0
        elif text.strip() or not self._called:
            self._say(seen + char)
            self._seen, self._state = [], "text"
        if char != ",":
            self._state = "text"


class LFM2Parser(PythonicParser):
    """Parser of lists of calls between marks, anywhere in a text. A list without the mark before it is content."""

    start, end = "<|tool_call_start|>", "<|tool_call_end|>"
    text_marks = (start, end)
    _state = "text"


def read_call(text: str) -> tuple[str, str] | None:
    """Return the name and the JSON arguments of a call whose arguments are keywords with literals. None if `text` is no
    such call."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of escapes that Python does not know
            call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, (ast.Name, ast.Attribute)):
            return None
        arguments = {keyword.arg: _literal(keyword.value) for keyword in call.keywords}
        if None in arguments:
            return None
        return ast.unparse(call.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, (str, int, float))):
        return node.value
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _literal(node.operand)
        if type(inner) in (int, float):
            return -inner
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _literal(key) for key in node.keys]
        if all(isinstance(key, str) for key in keys):
            return dict(zip(keys, map(_literal, node.values), strict=True))
    raise ValueError
