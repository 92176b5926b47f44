"""Reads the completion of a chat token by token, and says after which token a stop string in its content ends it.

The engine knows no content, so it gets no stop strings of chats whose text is more than content.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from specrs.outputs import CompletionOutput
from specrs.sampling import SamplingParams
from specrs.server.content_stops import ContentStops
from specrs.server.messages import MessageReader
from specrs.server.token_pieces import TokenPieces


class StoppedCompletion:
    """One completion as it runs, read by `reader` token by token until a stop string ends its content."""

    def __init__(self, new_reader: Callable[[], MessageReader], pieces: TokenPieces, params: SamplingParams) -> None:
        """`params`: with the stop strings, `min_tokens` and `include_stop_str_in_output` of the request."""
        self.reader = new_reader()
        self.reader.stops = self._stops = ContentStops(params.stop_strings, include=params.include_stop_str_in_output)
        self._new_reader = new_reader
        self._pieces = pieces
        self._min_tokens = params.min_tokens
        self._ends: list[int] = []  # characters of the text after each token
        self._ended = False
        self._num_tokens: int | None = None  # up to the stop string

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended it."""
        return self._num_tokens is not None

    def read(self, completion: CompletionOutput) -> CompletionOutput:
        """Read what is new; the completion as far as it counts. Mutates the reader."""
        final = completion.finish_reason is not None
        for i in range(len(self._ends), len(completion.token_ids)):
            if self.stopped:
                break
            last = final and i == len(completion.token_ids) - 1
            self._read_token(completion, i, final=last)
        if final and not self.stopped and not self._ended:
            self._feed(completion.text[self._ends[-1] if self._ends else 0 :], final=True)
            self._check(completion)
        return completion if self._num_tokens is None else self._cut(completion, self._num_tokens)

    def _read_token(self, completion: CompletionOutput, i: int, *, final: bool) -> None:
        start = self._ends[-1] if self._ends else 0
        end = start + len(self._pieces.add(completion.token_ids[i]))
        # a stop token has no text, and what ends within a character has its text at the end
        self._ends.append(len(completion.text) if final else min(end, len(completion.text)))
        self._stops.active = i >= self._min_tokens
        self._feed(completion.text[start : self._ends[-1]], final=final)
        self._check(completion)

    def _feed(self, text: str, *, final: bool) -> None:
        self.reader.feed(text, final=final)
        self._ended = final

    def _check(self, completion: CompletionOutput) -> None:
        if self._stops.found is None:
            return
        # parsers hold text back, so that the stop string may have been complete some tokens earlier
        count, wanted = len(self._ends), self._stops.content
        while count - 1 > self._min_tokens and self._content(completion.text[: self._ends[count - 2]]) == wanted:
            count -= 1
        self._num_tokens = count

    def _content(self, text: str) -> str:
        """The content of a text that ends here, as far as it is compared."""
        content = self._new_reader().message(text).get("content") or ""
        return content[: len(self._stops.content)]

    def _cut(self, completion: CompletionOutput, count: int) -> CompletionOutput:
        return replace(
            completion,
            token_ids=completion.token_ids[:count],
            logprobs=None if completion.logprobs is None else completion.logprobs[:count],
            drafts=None if completion.drafts is None else [one for one in completion.drafts if one.start < count],
            finish_reason="stop",
            stop_reason=self._stops.found,
        )
