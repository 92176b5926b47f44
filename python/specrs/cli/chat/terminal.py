"""Input and output of a chat: a terminal with line editing, or a pipe. Knows nothing of the conversation.

Lines are edited with the standard library's `readline`: history, search, bracketed paste and completion, without
another package. Nothing that is typed is written to disk.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from specrs.errors import invalid_request

PROMPT, CONTINUED = ">>> ", "... "
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class Terminal:
    """Standard input and output. Answers go to stdout, everything else to stderr."""

    def __init__(self) -> None:
        """Set `interactive` if both input and output are a terminal. Otherwise no prompt is shown."""
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._dim = sys.stderr.isatty() and not os.environ.get("NO_COLOR")

    def complete(self, words: Sequence[str]) -> None:
        """Let the Tab key complete `words`. Does nothing without a terminal, or if Python has no readline."""
        if not self.interactive:
            return
        try:
            import readline
        except ImportError:
            return

        def matching(start: str, state: int) -> str | None:
            return [*(word for word in words if word.startswith(start)), None][state] if start else None

        readline.set_completer_delims(" ")
        readline.set_completer(matching)
        readline.parse_and_bind("tab: complete")

    def read(self) -> str | None:
        """Read one text, of several lines if all but the last end in a backslash; None at the end of the input.

        Ctrl-C drops what was typed. Raises `InvalidRequestError` for bytes that are no text.
        """
        lines: list[str] = []
        while True:
            try:
                line = self._line(CONTINUED if lines else PROMPT)
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                self.note("\nCtrl-D or /exit ends the chat.")
                lines = []
                continue
            if line is None:
                return "\n".join(lines) if lines else None
            lines.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                return "\n".join(lines)

    def _line(self, prompt: str) -> str | None:
        if self.interactive:
            try:
                return input(prompt)
            except EOFError:
                self.note("")
                return None
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise invalid_request("stdin", error.object, f"must be {error.encoding} text: {error.reason}") from None
        return line.removesuffix("\n") if line else None

    def write(self, text: str) -> None:
        """Write a part of an answer, and flush it."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Write a line to stderr that is not part of an answer, dimmed on a terminal unless `NO_COLOR` is set."""
        print(f"{_DIM}{text}{_PLAIN}" if self._dim else text, file=sys.stderr, flush=True)
