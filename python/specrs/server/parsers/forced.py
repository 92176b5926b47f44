"""Parsers of calls that a request demands; `constraints` has the grammars that hold the text to them.

`tool_choice` "required": a list of `{"name", "parameters"}`. A named one: its arguments, and nothing else.
"""

from __future__ import annotations

from specrs.server.parsers.base import ToolParser
from specrs.server.parsers.json_calls import JSONCallParser


class RequiredParser(JSONCallParser):
    """The list. Text that leaves it, which no grammar allows, becomes content."""

    _left = False

    def _step(self, *, final: bool) -> bool:
        if self._reader is not None:
            if not self._read_call(final=False):
                return False
            self._left = not self._reader.announced
            self._say(self._give_up())
            return True
        if not self._left:
            self._buffer = self._buffer.lstrip("[], \t\r\n")
            if self._buffer.startswith("{"):
                self._begin_call()
                return True
            self._left = bool(self._buffer)
        self._say(self._buffer)
        self._buffer = ""
        return False


class NamedParser(ToolParser):
    """All text is the arguments of the one function."""

    def _step(self, *, final: bool) -> bool:
        if not self._called:
            (name,) = self._functions
            self._call(name)
        self._argue(self._buffer)
        self._buffer = ""
        return False
