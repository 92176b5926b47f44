"""Reads a chat completion token by token, and finds the token at which a stop string in its content ends it.

If a chat's text may hold more than content, the engine does not check its stop strings, because it cannot tell what is
content.
"""

from __future__ import annotations

from collections.abc import Callable

from specrs.engine.text_window import TextWindow
from specrs.outputs import CompletionOutput
from specrs.sampling import SamplingParams
from specrs.server.content_stops import ContentStops
from specrs.server.messages import MessageReader


class StoppedCompletion:
    """A running completion, read by `reader` token by token until a stop string ends its content."""

    def __init__(self, new_reader: Callable[[], MessageReader], window: TextWindow, params: SamplingParams) -> None:
        """Start before the first token.

        Args:
            new_reader: makes a reader of a message.
            window: text window after the prompt of the completion.
            params: the request's parameters; `stop`, `min_tokens` and `include_stop_str_in_output` are used.
        """
        self.reader = new_reader()
        self.reader.stops = self._stops = ContentStops(params.stop_strings, include=params.include_stop_str_in_output)
        self._new_reader = new_reader
        self._window = window
        self._min_tokens = params.min_tokens
        self._texts: list[str] = []  # of each token
        self._unread = ""
        self._ended = False
        self._num_tokens: int | None = None  # up to the stop string

    @property
    def stopped(self) -> bool:
        """True if a stop string has ended the completion."""
        return self._num_tokens is not None

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far, up to the stop string."""
        return len(self._texts) if self._num_tokens is None else self._num_tokens

    def read(self, new: CompletionOutput) -> CompletionOutput:
        """Read the new tokens of the completion, and return the part before its end. Mutates the reader."""
        before, final = len(self._texts), new.finish_reason is not None
        self._unread += new.delta
        for i, token_id in enumerate(new.token_ids, start=1):
            if self.stopped:
                break
            self._read_token(token_id, final=final and i == len(new.token_ids))
        if final and not self.stopped and not self._ended:
            self._feed(self._unread, final=True)
            self._check()
        return self._cut(new, max(0, self.num_tokens - before)) if self.stopped else new

    def cut(self, whole: CompletionOutput) -> CompletionOutput:
        """Return the part up to the stop string of `whole`, the whole completion, all of which was read."""
        return whole if self._num_tokens is None else self._cut(whole, self._num_tokens)

    def _read_token(self, token_id: int, *, final: bool) -> None:
        count = len(self._window.add(token_id))
        # a stop token has no text, and what ends within a character has its text at the end
        text, self._unread = (self._unread, "") if final else (self._unread[:count], self._unread[count:])
        self._texts.append(text)
        self._stops.active = len(self._texts) > self._min_tokens
        self._feed(text, final=final)
        self._check()

    def _feed(self, text: str, *, final: bool) -> None:
        self.reader.feed(text, final=final)
        self._ended = final

    def _check(self) -> None:
        if self._stops.found is None:
            return
        # parsers hold text back, so that the stop string may have been complete some tokens earlier
        count, wanted = len(self._texts), self._stops.content
        while count - 1 > self._min_tokens and self._content("".join(self._texts[: count - 1]), wanted) == wanted:
            count -= 1
        self._num_tokens = count

    def _content(self, text: str, wanted: str) -> str:
        """Return the content that `text` would have if it ended here, cut to the length of `wanted`."""
        content = self._new_reader().message(text).get("content") or ""
        return content[: len(wanted)]

    def _cut(self, completion: CompletionOutput, count: int) -> CompletionOutput:
        """Return the first `count` tokens of an output, ended by the stop string."""
        return CompletionOutput(
            index=completion.index,
            text=completion.text,
            delta=completion.delta,
            cumulative_logprob=completion.cumulative_logprob,
            token_ids=completion.token_ids[:count],
            logprobs=None if completion.logprobs is None else completion.logprobs[:count],
            drafts=None
            if completion.drafts is None
            else [draft for draft in completion.drafts if draft.start < self.num_tokens],
            finish_reason="stop",
            stop_reason=self._stops.found,
        )
