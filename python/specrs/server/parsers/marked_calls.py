"""Reads tool calls between special tokens: a section of calls, and in each call a name and a JSON object of arguments.
Knows no format."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from specrs.server.parsers.json_calls import JSONCallParser


@dataclass(frozen=True, slots=True)
class Marks:
    """Marks of one format. `header` matches what stands between `call` and the arguments; its group `name` is the
    function. `after`: text that may follow the arguments."""

    section: str
    end_section: str
    call: str
    end_call: str
    header: re.Pattern[str]
    after: str = ""

    @property
    def all(self) -> tuple[str, ...]:
        """All four marks."""
        return self.section, self.call, self.end_call, self.end_section


class MarkedCallParser(JSONCallParser):
    """Parser of a text with calls that have the marks `marks`. Arguments stream as they are written.

    A call without its section is read, too. A mark that is written twice counts once, and marks that end a call may be
    missing.
    """

    marks: ClassVar[Marks]
    _opening = ""  # the marks before the header

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.text_marks = cls.marks.all

    def _in_text(self, *, final: bool) -> bool:
        text, marker = self._take_content(final=final)
        self._say(text)
        if marker in (self.marks.section, self.marks.call):
            self._opening, self._state = marker, "section" if marker == self.marks.section else "header"
        elif marker is not None and not self._called:
            self._say(marker)
        return marker is not None

    def _in_section(self, *, final: bool) -> bool:
        text = self._buffer.lstrip()
        marker = next((marker for marker in (self.marks.section, self.marks.call) if text.startswith(marker)), None)
        if marker is not None:
            size = len(self._buffer) - len(text) + len(marker)
            self._opening, self._buffer = self._opening + self._buffer[:size], self._buffer[size:]
            self._state = "section" if marker == self.marks.section else "header"
            return True
        if not final and any(marker.startswith(text) for marker in (self.marks.section, self.marks.call)):
            return False
        self._back_to_text()
        return True

    def _in_header(self, *, final: bool) -> bool:
        gathered = self._gather("{", *self.marks.all, final=final)
        if gathered is None:
            return False
        header, end = gathered
        if end == self.marks.call and not header.strip():  # written twice
            self._opening += header + end
            return True
        self._buffer = header + (end or "") + self._buffer
        found = None if end is None else self.marks.header.fullmatch(header.strip())
        if found is None or not self._offers(found["name"]):
            self._back_to_text()
            return True
        self._call(found["name"])
        self._buffer, self._opening = self._buffer[len(header) :], ""
        if end == "{":
            self._begin_arguments()
            self._state = "arguments"
        else:
            self._argue("{}")
            self._state = "after"
        return True

    def _in_arguments(self, *, final: bool) -> bool:
        if not self._read_object():
            return False
        self._state = "after"
        return True

    def _in_after(self, *, final: bool) -> bool:
        self._drop_braces()
        if self.marks.after and not self._skip_marker(self.marks.after, final=final):
            return False
        self._state = "close"
        return True

    def _in_close(self, *, final: bool) -> bool:
        self._drop_braces()
        if not self._skip_marker(self.marks.end_call, final=final):
            return False
        self._state = "text"
        return True

    def _back_to_text(self) -> None:
        """Treat the marks that were read as content, because they begin no call."""
        self._say(self._opening)
        self._opening, self._state = "", "text"
