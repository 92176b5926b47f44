"""Separates the reasoning that a model writes before its answer from the answer, as the text arrives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from specrs.server.parsers.base import first_characters, split_at


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """Marks of one reasoning format. `opens` may begin a text with reasoning, `closes` end it.

    `label`: text after the opening mark that is no reasoning. `ends_before`: marks that end the reasoning and belong to
    the answer. `always`: a text begins with reasoning unless the prompt ends it, whether or not it has a mark.
    `special`: tokenizers have the marks as special tokens, which the text must then include.
    """

    opens: tuple[str, ...] = ("<think>",)
    closes: tuple[str, ...] = ("</think>",)
    label: str = ""
    ends_before: tuple[str, ...] = ()
    always: bool = False
    special: bool = False

    def begin_after(self, prompt: str) -> bool:
        """Return True if a completion of `prompt` begins inside of reasoning, without an opening mark.

        Templates that open the reasoning themselves end with the mark.
        """
        end = prompt.rstrip()
        if end.endswith(self.closes):
            return False
        return self.always or end.removesuffix(self.label.rstrip()).endswith(self.opens)


THINK = ReasoningMarks()
MARKS = {
    "deepseek_r1": ReasoningMarks(always=True),
    "deepseek_v3": THINK,
    "gemma4": ReasoningMarks(("<|channel>",), ("<channel|>",), label="thought\n", special=True),
    "glm45": THINK,
    "granite": ReasoningMarks(
        ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
    ),
    "kimi_k2": ReasoningMarks(ends_before=("<|tool_calls_section_begin|>",), always=True),
    "minimax_m2": ReasoningMarks(always=True),
    "mistral": ReasoningMarks(("[THINK]",), ("[/THINK]",), special=True),
    "qwen3": THINK,
    "step3": ReasoningMarks(always=True),
}
"""Formats of reasoning between marks, under the names of vLLM's `--reasoning-parser`."""


class ReasoningParser(ABC):
    """Splitter of one completion into reasoning and answer. The result does not depend on the pieces in which the text
    arrives."""

    @property
    @abstractmethod
    def length(self) -> int | None:
        """Number of characters from the start of the text to the end of the reasoning, marks included; None while it
        goes on."""

    @property
    @abstractmethod
    def over(self) -> bool:
        """True if all text to come belongs to the answer and need not be fed."""

    @abstractmethod
    def feed(self, text: str, *, final: bool) -> tuple[str, str]:
        """Read `text` and return the reasoning and the answer that it adds. `final` says that no more text follows."""


class MarkedReasoning(ReasoningParser):
    """Splitter of one completion whose reasoning stands between marks."""

    def __init__(self, marks: ReasoningMarks = THINK, *, opened: bool) -> None:
        """Start a completion. With `opened`, it begins with reasoning although its text has no opening mark, because
        the prompt has it."""
        self._marks = marks
        self._ends = (*marks.closes, *marks.ends_before)
        self._deciding = first_characters(self._ends)
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

    @property
    def over(self) -> bool:
        """True if all text to come belongs to the answer and need not be fed."""
        return self._state == "answer"

    def feed(self, text: str, *, final: bool) -> tuple[str, str]:
        """Read `text` and return the reasoning and the answer that it adds. `final` says that no more text follows."""
        if self._state == "answer":
            return "", text
        self._read += len(text)
        if self._state == "reasoning" and not self._buffer and self._deciding.search(text) is None:
            return text, ""
        self._buffer += text
        if self._state == "begin" and not self._begin(final=final):
            return "", ""
        if self._state == "label":
            if not final and len(self._buffer) < len(self._marks.label) and self._marks.label.startswith(self._buffer):
                return "", ""
            self._buffer, self._state = self._buffer.removeprefix(self._marks.label), "reasoning"
        reasoning = ""
        if self._state == "reasoning":
            reasoning, marker, self._buffer = split_at(self._buffer, *self._ends, final=final)
            if marker is None:
                return reasoning, ""
            if marker in self._marks.ends_before:
                self._buffer = marker + self._buffer
            self._state, self._reasoned = "answer", self._read - len(self._buffer)
        answer, self._buffer = self._buffer, ""
        return reasoning, answer

    def _begin(self, *, final: bool) -> bool:
        """Choose the state after the beginning of the text. Return False if that needs more text."""
        stripped = self._buffer.lstrip()
        mark = next((mark for mark in self._marks.opens if stripped.startswith(mark)), None)
        if mark is not None:
            self._buffer, self._state = stripped[len(mark) :], "label"
        elif final or not any(mark.startswith(stripped) for mark in self._marks.opens):
            self._state = "reasoning" if self._opened else "answer"
        else:
            return False
        return True
