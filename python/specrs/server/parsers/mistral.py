"""Parser of tool calls of Mistral models: `[TOOL_CALLS]` with a list of objects, or `[TOOL_CALLS]` with a name and its
arguments for each call.

The second form may have `[CALL_ID]...` and `[ARGS]` between the name and the arguments.
"""

from __future__ import annotations

from specrs.server.parsers.json_calls import JSONCallParser

TAG, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralParser(JSONCallParser):
    """Parser of a text with calls after tags. A tag that is written twice counts once."""

    text_marks = (TAG,)
    _opening = ""  # the tag, and what of a list is before the call that is read

    def _in_text(self, *, final: bool) -> bool:
        text, marker = self._take_content(final=final)
        self._say(text)
        if marker is not None:
            self._state = "tag"
        return marker is not None

    def _in_tag(self, *, final: bool) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(TAG):
            self._buffer = text[len(TAG) :]
            return True
        if not final and TAG.startswith(text):
            return False
        if text.startswith(("[", "{")):
            rest = text.removeprefix("[")
            self._opening = TAG + self._buffer[: len(self._buffer) - len(rest)]
            self._buffer, self._state = rest, "list"
            return True
        self._state = "name"
        return True

    def _in_name(self, *, final: bool) -> bool:
        gathered = self._gather("{", final=final)
        if gathered is None:
            return False
        text, brace = gathered
        self._buffer = text + (brace or "") + self._buffer
        name = text.partition(ARGS)[0].partition(CALL_ID)[0].strip()
        if brace is None or len(name.split()) != 1 or not self._offers(name):
            self._say(TAG)
            self._state = "text"
            return True
        self._call(name)
        self._buffer, self._state = self._buffer[len(text) :], "arguments"
        self._begin_arguments()
        return True

    def _in_list(self, *, final: bool) -> bool:
        self._skip_space()
        if not self._buffer:
            return False
        first = self._buffer[0]
        if first == "{":
            self._begin_call()
            self._state = "call"
        elif first in ",}":  # a brace too many is passed over
            self._buffer = self._buffer[1:]
        else:
            if first == "]":
                self._buffer = self._buffer[1:]
            self._state = "text"
        return True

    def _in_call(self, *, final: bool) -> bool:
        assert self._reader is not None
        if not self._read_call(final=final):
            return False
        announced, raw = self._reader.announced, self._give_up()
        if not announced:
            self._say(self._opening + raw)
        self._opening, self._state = "", "list" if announced else "text"
        return True

    def _in_arguments(self, *, final: bool) -> bool:
        if not self._read_object():
            return False
        self._state = "text"
        return True
