"""Parsers of tool calls that a request demands. `constraints` has the grammars for such texts.

With `tool_choice` "required", the text is a list of `{"name", "parameters"}`. With a named function, it is only that
function's arguments.
"""

from __future__ import annotations

from specrs.server.parsers.base import ToolParser
from specrs.server.parsers.json_calls import JSONCallParser


class RequiredParser(JSONCallParser):
    """Parser of a list of calls. Text that does not follow the format, which no grammar allows, becomes content."""

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
    """Parser for a call of one named function. The whole text is its arguments."""

    def _step(self, *, final: bool) -> bool:
        if not self._called:
            (name,) = self._functions
            self._call(name)
        self._argue(self._buffer)
        self._buffer = ""
        return False
