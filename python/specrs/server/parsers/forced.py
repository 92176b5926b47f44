"""Parsers of tool calls that a request demands. `constraints` has the grammars for such texts.

With `tool_choice` "required", the text is a list of `{"name", "parameters"}`. With a named function, it is only that
function's arguments.
"""

from __future__ import annotations

from specrs.server.parsers.base import Run, ToolParser, run_until
from specrs.server.parsers.json_calls import JSONCallParser


class RequiredParser(JSONCallParser):
    """Parser of a list of calls. Text that does not follow the format, which no grammar allows, becomes content."""

    _state = "list"

    def _in_list(self, *, final: bool) -> bool:
        self._buffer = self._buffer.lstrip("[], \t\r\n")
        if not self._buffer:
            return False
        self._state = "text"
        if self._buffer.startswith("{"):
            self._begin_call()
            self._state = "call"
        return True

    def _in_call(self, *, final: bool) -> bool:
        assert self._reader is not None
        if not self._read_call(final=False):
            return False
        self._state = "list" if self._reader.announced else "text"
        self._say(self._give_up())
        return True

    def _in_text(self, *, final: bool) -> bool:
        self._say(self._take_all())
        return False


class NamedParser(ToolParser):
    """Parser for a call of one named function. The whole text is its arguments."""

    _state = "arguments"

    def _in_arguments(self, *, final: bool) -> bool:
        if not self._called:
            (name,) = self._functions
            self._call(name)
        self._argue(self._take_all())
        return False

    def _find_run(self) -> Run | None:
        return run_until("arguments")
