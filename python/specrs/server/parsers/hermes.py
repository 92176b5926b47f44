"""Parser of tool calls of Hermes 2 Pro, Qwen2.5 and Qwen3: `<tool_call>{"name": ..., "arguments":
{...}}</tool_call>`."""

from __future__ import annotations

from specrs.server.parsers.json_calls import JSONCallParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(JSONCallParser):
    """Parser of a text with calls between tags.

    A call without its closing tag ends where its JSON object ends. A tag that is written twice counts once. An object
    with one brace too few or too many is read as if it had the right number.
    """

    text_marks = (OPEN, CLOSE)
    _opening = ""  # the opening tag or tags before the call that is read

    def _in_text(self, *, final: bool) -> bool:
        text, marker = self._take_content(final=final)
        self._say(text if marker != CLOSE or self._called else text + CLOSE)
        if marker == OPEN:
            self._opening, self._state = OPEN, "open"
        return marker is not None

    def _in_open(self, *, final: bool) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(OPEN):
            size = len(self._buffer) - len(text) + len(OPEN)
            self._opening, self._buffer = self._opening + self._buffer[:size], self._buffer[size:]
            return True
        if not final and OPEN.startswith(text):
            return False
        self._begin_call()
        self._state = "call"
        return True

    def _in_call(self, *, final: bool) -> bool:
        assert self._reader is not None
        if not self._read_call(final=final):
            return False
        announced, raw = self._reader.announced, self._give_up()
        if not announced:
            self._say(self._opening + raw)
        self._opening, self._state = "", "close" if announced else "text"
        return True

    def _in_close(self, *, final: bool) -> bool:
        self._drop_braces()
        if not self._skip_marker(CLOSE, final=final):
            return False
        self._state = "text"
        return True
