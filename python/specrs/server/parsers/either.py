"""Parser for texts that are either tool calls or a response format's JSON. The beginning of the text decides."""

from __future__ import annotations

from collections.abc import Sequence

from specrs.server.parsers.base import Content, ToolParser


class CallsOrContent(ToolParser):
    """Reader of a text that a grammar constrains to tool calls or to the response format.

    A call mark inside the content's strings begins no call. A call that was cut off before its name is dropped, because
    its marks are no content.
    """

    def __init__(self, parser: ToolParser, openings: Sequence[tuple[str, ...]]) -> None:
        """Start to read. `parser` reads calls. `openings` are the sequences of terminals that calls begin with, with
        white space between them."""
        super().__init__()
        self._parser = parser
        self._openings = openings
        self._is_calls: bool | None = None

    def _step(self, *, final: bool) -> bool:
        if self._is_calls is None:
            begun = [_begins(self._buffer, opening) for opening in self._openings]
            if True not in begun and None in begun and not final:
                return False
            self._is_calls = True in begun
        text, self._buffer = self._buffer, ""
        if self._is_calls:
            events = self._parser.feed(text) + (self._parser.finish() if final else [])
            self._events += [event for event in events if not isinstance(event, Content)]
        elif text:
            self._events.append(Content(text))
        return False


def _begins(text: str, opening: tuple[str, ...]) -> bool | None:
    """Return whether `text` begins with `opening`. None if that depends on text to come."""
    for terminal in opening:
        text = text.lstrip()
        if not text.startswith(terminal):
            return None if terminal.startswith(text) else False
        text = text[len(terminal) :]
    return True
