"""Parser of tool calls of Llama 3.1 and later: `{"name": ..., "parameters": {...}}`, with `;` between several.

Calls are the whole text, or follow `<|python_tag|>`.
"""

from __future__ import annotations

from specrs.server.parsers.json_calls import JSONCallParser

TAG = "<|python_tag|>"


class Llama3JSONParser(JSONCallParser):
    """Parser of calls at the beginning of a text or after the tag. Text before the tag and after the last call is
    content."""

    _expects = True  # a call may begin here
    _tag = ""  # what led to it
    _separator = ""

    def _step(self, *, final: bool) -> bool:
        if self._reader is not None:
            return self._read_on(final=final)
        if self._expects:
            return self._begin(final=final)
        text, marker = self._take_until(TAG, final=final)
        self._say(text)
        if marker is not None:
            self._expects, self._tag = True, TAG
        return marker is not None

    def _begin(self, *, final: bool) -> bool:
        text = self._buffer.lstrip()
        if text.startswith("{"):
            self._tag += self._separator + self._buffer[: len(self._buffer) - len(text)]
            self._buffer, self._separator = text, ""
            self._begin_call()
            return True
        if self._tag and text.startswith(TAG):  # written twice
            size = len(self._buffer) - len(text) + len(TAG)
            self._tag, self._buffer = self._tag + self._buffer[:size], self._buffer[size:]
            return True
        if self._called and not self._separator and not self._tag:
            self._drop_braces()
            text = self._buffer.lstrip()
            if text.startswith(";"):
                self._buffer, self._separator = text[1:], ";"
                return True
        if not final and (not text or TAG.startswith(text)):
            return False
        self._say(self._tag + self._separator)  # what follows is text, and may have the tag in it
        self._expects, self._tag, self._separator = False, "", ""
        return True

    def _read_on(self, *, final: bool) -> bool:
        assert self._reader is not None
        if not self._read_call(final=final):
            return False
        announced = self._reader.announced
        raw = self._give_up()
        if not announced:
            self._say(self._tag + raw)
            self._expects = False
        self._tag = ""
        return True
