"""Parser of tool calls of Llama 3.1 and later: `{"name": ..., "parameters": {...}}`, with `;` between several.

Calls are the whole text, or follow `<|python_tag|>`.
"""

from __future__ import annotations

from specrs.server.parsers.json_calls import JSONCallParser

TAG = "<|python_tag|>"


class Llama3JSONParser(JSONCallParser):
    """Parser of calls at the beginning of a text or after the tag. Text before the tag and after the last call is
    content."""

    text_marks = (TAG,)
    _state = "begin"  # a call may begin here
    _tag = ""  # the tag or tags before it
    _separator = ""

    def _in_text(self, *, final: bool) -> bool:
        text, marker = self._take_content(final=final)
        self._say(text)
        if marker is not None:
            self._state, self._tag = "begin", TAG
        return marker is not None

    def _in_begin(self, *, final: bool) -> bool:
        text = self._buffer.lstrip()
        if text.startswith("{"):
            self._tag += self._separator + self._buffer[: len(self._buffer) - len(text)]
            self._buffer, self._separator = text, ""
            self._begin_call()
            self._state = "call"
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
        self._state, self._tag, self._separator = "text", "", ""
        return True

    def _in_call(self, *, final: bool) -> bool:
        assert self._reader is not None
        if not self._read_call(final=final):
            return False
        announced, raw = self._reader.announced, self._give_up()
        if not announced:
            self._say(self._tag + raw)
        self._tag, self._state = "", "begin" if announced else "text"
        return True
