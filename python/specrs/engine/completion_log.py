"""A log of the tokens, text and log probabilities of one completion, and outputs that are views of it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from specrs.outputs import CompletionOutput, Draft, Logprob


@dataclass(frozen=True, slots=True)
class Mark:
    """Position in a completion's log: how many tokens, pieces of text, characters and drafts come before it."""

    tokens: int = 0
    pieces: int = 0
    characters: int = 0
    drafts: int = 0


class CompletionLog:
    """Tokens, text, log probabilities and drafts of one completion. Each list only grows at its end.

    One thread appends. Others may read up to a `Mark` at the same time.
    """

    def __init__(self, *, logprobs: bool, drafts: bool) -> None:
        """Start an empty log. Without `logprobs` or `drafts`, that field is None in the completion's outputs."""
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] | None = [] if logprobs else None
        self.drafts: list[Draft] | None = [] if drafts else None
        self.cumulative_logprob = 0.0
        self.num_characters = 0
        self._pieces: list[str] = []
        self._joined = (0, "")  # number of pieces, and their text

    def add_text(self, piece: str) -> None:
        """Append a piece of text."""
        if piece:
            self._pieces.append(piece)
            self.num_characters += len(piece)

    def mark(self) -> Mark:
        """Return the current end of the log."""
        drafts = 0 if self.drafts is None else len(self.drafts)
        return Mark(len(self.token_ids), len(self._pieces), self.num_characters, drafts)

    def text(self, start: Mark, end: Mark) -> str:
        """Return the text from `start` to `end`."""
        if start.characters:
            return "".join(self._pieces[start.pieces : end.pieces])
        # a reader that wants all text of each output pays for one copy, not for a join of all pieces
        count, text = self._joined
        if count < end.pieces:
            text += "".join(self._pieces[count : end.pieces])
            self._joined = end.pieces, text
        return text[: end.characters]


class LoggedCompletion(CompletionOutput):
    """A `CompletionOutput` that reads a `CompletionLog`. Each field is made when it is first read.

    Copies and pickles are plain `CompletionOutput`s.
    """

    _log: CompletionLog
    _start: Mark
    _end: Mark
    _cumulative: bool

    @classmethod
    def view(cls, log: CompletionLog, start: Mark, end: Mark, *, cumulative: bool, **ending: Any) -> LoggedCompletion:
        """Return an output for the part of `log` from `start` to `end`.

        Args:
            log: log of the completion.
            start: end of the previous output.
            end: end of this output.
            cumulative: True if all fields but `delta` begin at the start of the completion.
            ending: values of `index`, `cumulative_logprob`, `finish_reason` and `stop_reason`.
        """
        made = cls.__new__(cls)
        made.__dict__.update(ending, _log=log, _start=start, _end=end, _cumulative=cumulative)
        return made

    @cached_property
    def text(self) -> str:  # type: ignore[override]
        return self._log.text(self._begin, self._end)

    @cached_property
    def delta(self) -> str:  # type: ignore[override]
        return self._log.text(self._start, self._end)

    @cached_property
    def token_ids(self) -> list[int]:  # type: ignore[override]
        return self._log.token_ids[self._begin.tokens : self._end.tokens]

    @cached_property
    def logprobs(self) -> list[dict[int, Logprob]] | None:  # type: ignore[override]
        found = self._log.logprobs
        return None if found is None else found[self._begin.tokens : self._end.tokens]

    @cached_property
    def drafts(self) -> list[Draft] | None:  # type: ignore[override]
        found = self._log.drafts
        return None if found is None else found[self._begin.drafts : self._end.drafts]

    @property
    def _begin(self) -> Mark:
        return Mark() if self._cumulative else self._start

    def extend_back(self, earlier: CompletionOutput) -> None:
        if not isinstance(earlier, LoggedCompletion):
            raise TypeError("an output of another completion")
        self._start = earlier._start
        for name in ("text", "delta", "token_ids", "logprobs", "drafts"):
            self.__dict__.pop(name, None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CompletionOutput) and self._plain() == _plain(other)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, ({field.name: getattr(self, field.name) for field in fields(self)},)

    def _plain(self) -> CompletionOutput:
        return CompletionOutput(**{field.name: getattr(self, field.name) for field in fields(self)})


def _plain(output: CompletionOutput) -> CompletionOutput:
    return output._plain() if isinstance(output, LoggedCompletion) else output


def _rebuilt(values: dict[str, Any]) -> CompletionOutput:
    return CompletionOutput(**values)
