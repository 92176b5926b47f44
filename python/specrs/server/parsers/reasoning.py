"""Separates the reasoning that a model writes between `<think>` and `</think>` from its answer, as the text arrives."""

from __future__ import annotations

from specrs.server.parsers.base import split_at

OPEN, CLOSE = "<think>", "</think>"


class ReasoningParser:
    """Splitter of one completion into reasoning and answer. The result does not depend on how the text is cut into
    pieces."""

    def __init__(self, *, opened: bool) -> None:
        """Start a completion. With `opened`, it begins with reasoning although its text has no `<think>`, because the
        prompt has it."""
        self._opened = opened
        self._state = "begin"
        self._buffer = ""
        self._read = 0  # characters
        self._reasoned = 0  # of them, to the end of the reasoning

    @property
    def length(self) -> int | None:
        """Number of characters from the start of the text to the end of the reasoning, marks included; None while it
        goes on."""
        return self._reasoned if self._state == "answer" else None

    def feed(self, text: str, *, final: bool) -> tuple[str, str]:
        """Read `text` and return the reasoning and the answer that it adds. `final` says that no more text follows."""
        self._buffer += text
        self._read += len(text)
        if self._state == "begin":
            stripped = self._buffer.lstrip()
            if stripped.startswith(OPEN):
                self._buffer, self._state = stripped[len(OPEN) :], "reasoning"
            elif final or not OPEN.startswith(stripped):
                self._state = "reasoning" if self._opened else "answer"
            else:
                return "", ""
        reasoning = ""
        if self._state == "reasoning":
            reasoning, marker, self._buffer = split_at(self._buffer, CLOSE, final=final)
            if marker is None:
                return reasoning, ""
            self._state, self._reasoned = "answer", self._read - len(self._buffer)
        answer, self._buffer = self._buffer, ""
        return reasoning, answer


def begins_with_reasoning(parser: str, prompt: str) -> bool:
    """Return True if a completion of `prompt` begins inside of reasoning, for models of the reasoning parser `parser`.

    Templates that open the reasoning themselves end with `<think>`. DeepSeek-R1 reasons after other prompts, too,
    unless the prompt ends its reasoning.
    """
    end = prompt.rstrip()
    return end.endswith(OPEN) or (parser == "deepseek_r1" and not end.endswith(CLOSE))
