"""Finds out what a chat template shows, by rendering short conversations with marked texts. Changes no message."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]

_MARK = "qzxmark"
"""Text that probes insert and that `shows` looks for. It has only lower-case letters."""
_OTHER_ROLE = "qzxrole"
_OBJECT = {"key": _MARK}
_TEXT = json.dumps(_OBJECT)
_CUT_OFF = _TEXT[:-1]
"""Arguments of a call that ended too early. Quoted as a JSON string they would look different."""
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string", "description": "A key."}}},
    },
}
OTHER_TOOL = {"type": "function", "function": {**_TOOL["function"], "name": _MARK}}
"""Tool with a name that no request has."""
_USER: Message = {"role": "user", "content": "Hello"}


class Traits:
    """Properties of one chat template. Each is determined once, at its first use.

    If the template rejects a probe, the probe counts as not shown.
    """

    def __init__(
        self,
        render: Callable[[list[Message], list[dict[str, Any]] | None], str],
        variables: Callable[[], frozenset[str]],
        words: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        """Prepare to probe a template. `render` returns the text of messages and tools, `variables` the names that the
        template reads, and `words` all names and strings of its code.

        All three may raise any exception.
        """
        self._render = render
        self._variables = variables
        self._words = words

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names of the variables that the template reads; empty for a template that cannot be parsed."""
        try:
            return self._variables()
        except Exception:  # the error is reported when the conversation itself is rendered
            return frozenset()

    @cached_property
    def words(self) -> frozenset[str]:
        """Names and strings of the template's code; empty for a template that cannot be parsed."""
        try:
            return self._words()
        except Exception:  # the error is reported when the conversation itself is rendered
            return frozenset()

    @cached_property
    def system(self) -> str:
        """Treatment of a first message with the role `system` by the template: "shown", "dropped", or "raises"."""
        text = self._first("system")
        if text is None:
            # a template that also fails without the message tells its own error
            return "shown" if self._show([_USER]) is None else "raises"
        return "shown" if shows(text, _MARK) else "dropped"

    @cached_property
    def developer(self) -> bool:
        """True if the template has a form of its own for the role `developer`.

        A template that writes any role as it is given does not know `developer`: a made-up role gives the same text.
        """
        return self._has_form("developer", first=True)

    @property
    def takes_instructions(self) -> bool:
        """True if the template raises no error for a first message with the role `system`, or has a form for
        `developer`."""
        return self.system != "raises" or self.developer

    def knows_role(self, role: str) -> bool:
        """True if the template has a form of its own for a role, as the first message or the second."""
        return self._has_form(role, first=True) or self._has_form(role, first=False)

    @cached_property
    def tools(self) -> bool:
        """True if a short conversation shows a tool's name. A template that does not may show tools in other
        conversations, or with variables that a probe does not have."""
        return shows(self._show([_USER], [OTHER_TOOL]), _MARK)

    @cached_property
    def empty_content(self) -> Message:
        """Content field for a message that has only calls: `""`, None, or no such field.

        It is the first of these with which the template shows the call, and `""` where none does.
        """
        empty, null, missing = {"content": ""}, {"content": None}, dict[str, Any]()
        for content in (empty, null, missing):
            if any(shows(self._call(arguments, content), _MARK) for arguments in (_OBJECT, _TEXT)):
                return content
        return empty

    @cached_property
    def object_arguments(self) -> bool:
        """True if arguments of calls are shown as objects. Some templates take them as JSON text alone. Also True if
        the template shows neither form."""
        shown = shows(self._call(_OBJECT, self.empty_content), _MARK)
        return shown or not shows(self._call(_TEXT, self.empty_content), _TEXT)

    @cached_property
    def text_arguments(self) -> bool:
        """True if arguments that are text are shown letter by letter, JSON or not."""
        return shows(self._call(_CUT_OFF, self.empty_content), _CUT_OFF)

    def _first(self, role: str) -> str | None:
        return self._show([{"role": role, "content": _MARK}, _USER])

    def _second(self, role: str) -> str | None:
        return self._show([_USER, {"role": role, "content": _MARK}])

    def _has_form(self, role: str, *, first: bool) -> bool:
        """Return True if a message with this role is shown, and differently from one with a made-up role."""
        show = self._first if first else self._second
        text = show(role)
        if text is None or not shows(text, _MARK):
            return False
        other = show(_OTHER_ROLE)
        return other is None or other.casefold().replace(_OTHER_ROLE, role.casefold()) != text.casefold()

    def _call(self, arguments: object, content: Message) -> str | None:
        call = {"id": "probe0001", "type": "function", "function": {"name": "probe", "arguments": arguments}}
        calling: Message = {"role": "assistant", **content, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "probe0001", "name": "probe", "content": "Done"}
        return self._show([_USER, calling, result], [_TOOL])

    def _show(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> str | None:
        """Render messages. Return the text, or None if the template fails."""
        try:
            return self._render(messages, tools)
        except Exception:  # a template is a program, and raises what it likes
            return None


def shows(text: str | None, part: str) -> bool:
    """Return True if `text` contains `part` in upper or lower case. A template may change the case of what it shows."""
    return text is not None and part.casefold() in text.casefold()
