"""From running requests to what users read of them: snapshots, with what is new since the one before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specrs.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput

if TYPE_CHECKING:
    from specrs.engine.request import Request
    from specrs.outputs import TokenLogprob
    from specrs.tokenizer import Tokenizer


class TokenTexts(dict[int, str]):
    """The text of each token by itself, special ones included, decoded when it is first asked for.

    Bytes that are no character by themselves are replacement characters, as in vLLM.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str:
        one, two = (self._tokenizer.decode([token_id] * count, skip_special_tokens=False) for count in (1, 2))
        # some decoders drop the blank before the first token, but not before the second
        text = two.removeprefix(one)
        self[token_id] = text if len(one) + len(text) == len(two) else one
        return self[token_id]

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that a token stands for, which may be a part of a character."""
        text = self[token_id]
        # what is no text by itself only the vocabulary knows
        return self._tokenizer.bytes_in_vocabulary(token_id) if "\ufffd" in text else text.encode()


def metrics(requests: Sequence[Request]) -> RequestMetrics:
    """The figures of the requests that complete one prompt, at least one."""
    books = [request.acceptance for request in requests]
    scheduled = [request.scheduled_time for request in requests if request.scheduled_time is not None]
    started = [request.first_token_time for request in requests if request.first_token_time is not None]
    ended = [request.finish_time for request in requests if request.finish_time is not None]
    return RequestMetrics(
        draft_tokens=sum(book.draft_tokens for book in books),
        acceptance_histogram=[sum(counts) for counts in zip(*(book.histogram for book in books), strict=True)],
        synthetic_acceptance=requests[0].synthetic,
        num_cached_tokens=sum(request.num_cached_tokens or 0 for request in requests),
        num_generated_tokens=sum(request.num_output_tokens for request in requests),
        arrival_time=requests[0].arrival_time,
        scheduled_time=min(scheduled, default=None),
        first_token_time=min(started, default=None),
        finish_time=max(ended) if len(ended) == len(requests) else None,
    )


class OutputBuilder:
    """Outputs of a prompt's requests as they run: each `build` is a snapshot, with what is new since the one before."""

    def __init__(self, requests: Sequence[Request], texts: TokenTexts | None) -> None:
        """`requests` are the completions of a prompt in their order, at least one; without `texts`, ids stay ids."""
        self._requests = list(requests)
        self._texts = texts if requests[0].params.detokenize else None
        self._sent = [0] * len(requests)  # characters
        # a snapshot costs what is new, not all there is
        self._logprobs: list[list[dict[int, Logprob]]] = [[] for _ in requests]
        self._prompt_logprobs: list[dict[int, Logprob] | None] = []

    def build(self) -> RequestOutput:
        """The requests as they are now. Mutates: what it has is not new the next time."""
        first = self._requests[0]
        return RequestOutput(
            request_id=str(first.request_id),
            prompt=first.prompt,
            prompt_token_ids=first.prompt_token_ids,
            prompt_logprobs=self._prompt(first),
            outputs=[self._completion(index, request) for index, request in enumerate(self._requests)],
            finished=all(request.finished for request in self._requests),
            metrics=metrics(self._requests),
            error=next((request.error for request in self._requests if request.error is not None), None),
        )

    def take_prompt(self) -> None:
        """Take in what is reported of the prompt so far: as a whole it would hold the engine for 20 us a token."""
        entries, known = self._requests[0].prompt_logprobs, self._prompt_logprobs
        if entries is not None and len(entries) > len(known):
            known += [None if entry is None else self._dictionary(entry) for entry in entries[len(known) :]]

    def _completion(self, index: int, request: Request) -> CompletionOutput:
        text, known = request.stable_text, self._logprobs[index]
        delta, self._sent[index] = text[self._sent[index] :], len(text)
        logprobs = cumulative = None
        if request.logprobs is not None:
            known += [self._dictionary(entry) for entry in request.logprobs[len(known) :]]
            logprobs = known.copy()
            cumulative = sum(entry.logprob for entry in request.logprobs)
        return CompletionOutput(
            index=index,
            text=text,
            delta=delta,
            token_ids=list(request.output_token_ids),
            drafts=None if request.drafts is None else request.drafts.copy(),
            cumulative_logprob=cumulative,
            logprobs=logprobs,
            finish_reason=None if request.finish_reason is None else request.finish_reason.value,
            stop_reason=request.stop_reason,
        )

    def _prompt(self, request: Request) -> list[dict[int, Logprob] | None] | None:
        entries = request.prompt_logprobs
        # a prompt comes as a whole: chunks of it are no result
        if entries is None or len(entries) < len(request.prompt_token_ids):
            return None
        self.take_prompt()
        return self._prompt_logprobs.copy()

    def _dictionary(self, entry: TokenLogprob) -> dict[int, Logprob]:
        found = {entry.token_id: Logprob(entry.logprob, entry.rank, self._text(entry.token_id))}
        for rank, (token_id, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), start=1):
            found.setdefault(token_id, Logprob(logprob, rank, self._text(token_id)))
        return found

    def _text(self, token_id: int) -> str | None:
        return None if self._texts is None else self._texts[token_id]
