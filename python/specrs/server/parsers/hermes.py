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

    _opening = ""  # the opening tag or tags before the call that is read
    _closing = False

    def _step(self, *, final: bool) -> bool:
        if self._closing:
            return self._close(final=final)
        if self._reader is not None:
            return self._read_on(final=final)
        if self._opening:
            return self._begin(final=final)
        text, marker = self._take_until(OPEN, CLOSE, final=final)
        self._say(text if marker != CLOSE or self._called else text + CLOSE)
        if marker == OPEN:
            self._opening = OPEN
        return marker is not None

    def _begin(self, *, final: bool) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(OPEN):
            size = len(self._buffer) - len(text) + len(OPEN)
            self._opening, self._buffer = self._opening + self._buffer[:size], self._buffer[size:]
            return True
        if not final and OPEN.startswith(text):
            return False
        self._begin_call()
        return True

    def _read_on(self, *, final: bool) -> bool:
        assert self._reader is not None
        if not self._read_call(final=final):
            return False
        self._closing = self._reader.announced
        raw = self._give_up()
        if not self._closing:
            self._say(self._opening + raw)
        self._opening = ""
        return True

    def _close(self, *, final: bool) -> bool:
        self._drop_braces()
        if not self._skip_marker(CLOSE, final=final):
            return False
        self._closing = False
        return True
