"""Parser of tool calls of GLM-4.5 and later: `<tool_call>name`, then `<arg_key>key</arg_key>` and
`<arg_value>value</arg_value>` for each argument, and `</tool_call>`."""

from __future__ import annotations

import re

from specrs.server.parsers.tagged_calls import TaggedCallParser, Tags

_NAME = re.compile(r"\s*(?P<name>[^\s<]+)\s*(?=<arg_key>|</tool_call>)")
_BEGINNING = re.compile(r"\s*[^\s<]*\s*(?P<tag><[^<>\s]*)?")
"""A text that may become a name and the tag after it."""


class GLM45Parser(TaggedCallParser):
    """Parser of text and calls. Each argument is reported once it is complete. The name ends at the first argument or
    at the end of the call."""

    tags = Tags(
        opens=(),
        closes=(),
        function="<tool_call>",
        end_name="",
        end_function="</tool_call>",
        key="<arg_key>",
        end_key="</arg_key>",
        value="<arg_value>",
        end_value="</arg_value>",
    )

    def _in_name(self, *, final: bool) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(self.tags.function):  # written twice
            size = len(self._buffer) - len(text) + len(self.tags.function)
            self._opening, self._buffer = self._opening + self._buffer[:size], self._buffer[size:]
            return True
        found = _NAME.match(self._buffer)
        if found is None and not final and self._may_be_name():
            return False
        self._begin("" if found is None else found["name"], self._buffer[0 if found is None else found.end() :])
        return True

    def _may_be_name(self) -> bool:
        found = _BEGINNING.fullmatch(self._buffer)
        follows = (self.tags.key, self.tags.end_function, self.tags.function)
        return found is not None and any(tag.startswith(found["tag"] or "") for tag in follows)
