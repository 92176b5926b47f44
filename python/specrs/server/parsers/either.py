"""Parser for texts that are either tool calls or a response format's JSON. The beginning of the text decides."""

from __future__ import annotations

from collections.abc import Sequence

from specrs.server.parsers.base import Content, Run, ToolParser


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
        self._state = "begin"

    def _in_begin(self, *, final: bool) -> bool:
        begun = [_begins(self._buffer, opening) for opening in self._openings]
        if True not in begun and None in begun and not final:
            return False
        self._state = "calls" if True in begun else "text"
        return True

    def _in_calls(self, *, final: bool) -> bool:
        events = self._parser.feed(self._take_all()) + (self._parser.finish() if final else [])
        self._events += [event for event in events if not isinstance(event, Content)]
        return False

    def _in_text(self, *, final: bool) -> bool:
        if self._buffer:
            self._events.append(Content(self._take_all()))
        return False

    def _find_run(self) -> Run | None:
        return None  # white space is content immediately, because no call follows it


def _begins(text: str, opening: tuple[str, ...]) -> bool | None:
    """Return whether `text` begins with `opening`. None if that depends on text to come."""
    for terminal in opening:
        text = text.lstrip()
        if not text.startswith(terminal):
            return None if terminal.startswith(text) else False
        text = text[len(terminal) :]
    return True
