"""Tool calls of Hermes 2 Pro, Qwen2.5 and Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` each."""

from __future__ import annotations

from specrs.server.parsers.json_calls import CallReader, JSONCallParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(JSONCallParser):
    """Text, and calls between tags. A call without its closing tag ends where its object does."""

    _closing = False

    def _step(self, *, final: bool) -> bool:
        if self._closing:
            return self._close(final=final)
        if self._reader is None:
            text, marker = self._take_until(OPEN, final=final)
            self._say(text)
            if marker is not None:
                self._reader = CallReader()
            return marker is not None
        if not self._read_call():
            if final and not self._reader.announced:
                self._say(OPEN + self._give_up())
            return False
        if self._reader.announced:
            self._reader, self._closing = None, True
        else:
            self._say(OPEN + self._give_up())
        return True

    def _close(self, *, final: bool) -> bool:
        if not self._skip_marker(CLOSE, final=final):
            return False
        self._closing = False
        return True
