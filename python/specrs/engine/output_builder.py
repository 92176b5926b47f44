"""Builds the outputs that users read from running requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from specrs.engine.completion_log import CompletionLog, LoggedCompletion, Mark
from specrs.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from specrs.sampling import RequestOutputKind

if TYPE_CHECKING:
    from specrs.engine.request import Request
    from specrs.errors import SpecrsError
    from specrs.outputs import TokenLogprob
    from specrs.tokenizer import Tokenizer


class TokenTexts(dict[int, str]):
    """Texts of single tokens, special tokens included. Each is decoded when it is first needed.

    Bytes that are no character by themselves become replacement characters, as in vLLM.
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
        """Return the bytes of a token, which may be a part of a character."""
        text = self[token_id]
        # what is no text by itself only the vocabulary knows
        return self._tokenizer.bytes_in_vocabulary(token_id) if "\ufffd" in text else text.encode()


def metrics(requests: Sequence[Request]) -> RequestMetrics:
    """Return the metrics of the requests that complete one prompt. There must be at least one."""
    statistics = [request.acceptance for request in requests]
    scheduled = [request.scheduled_time for request in requests if request.scheduled_time is not None]
    started = [request.first_token_time for request in requests if request.first_token_time is not None]
    ended = [request.finish_time for request in requests if request.finish_time is not None]
    return RequestMetrics(
        draft_tokens=sum(one.draft_tokens for one in statistics),
        acceptance_histogram=[sum(counts) for counts in zip(*(one.histogram for one in statistics), strict=True)],
        synthetic_acceptance=requests[0].synthetic,
        num_cached_tokens=sum(request.num_cached_tokens or 0 for request in requests),
        num_predicted_tokens=requests[0].num_predicted_tokens if requests[0].prediction_token_ids else None,
        num_accepted_predicted_tokens=requests[0].num_accepted_predicted_tokens,
        num_generated_tokens=sum(request.num_output_tokens for request in requests),
        arrival_time=requests[0].arrival_time,
        scheduled_time=min(scheduled, default=None),
        first_token_time=min(started, default=None),
        finish_time=max(ended) if len(ended) == len(requests) else None,
    )


class OutputBuilder:
    """Builder of outputs for the completions of one prompt. The cost of an output depends only on what is new since the
    previous one."""

    def __init__(self, requests: Sequence[Request], texts: TokenTexts | None) -> None:
        """Prepare outputs. `requests` are the completions of a prompt in order, at least one. Without `texts`, tokens
        have no text."""
        params = requests[0].params
        self._kind = params.output_kind
        self._requests = list(requests)
        self._texts = texts if params.detokenize else None
        self._completions = [_Completion(request, self._kind) for request in requests]
        self._prompt_logprobs: list[dict[int, Logprob] | None] = []

    @property
    def is_due(self) -> bool:
        """True if an output may be built now. With `FINAL_ONLY`, that is after all requests have ended."""
        return self._kind is not RequestOutputKind.FINAL_ONLY or all(request.finished for request in self._requests)

    def build(self) -> RequestOutput:
        """Return an output of all requests up to now. Mutates: the next output begins here."""
        first = self._requests[0]
        return RequestOutput(
            request_id=str(first.request_id),
            prompt=first.prompt,
            prompt_token_ids=first.prompt_token_ids,
            prompt_logprobs=self._prompt(first),
            outputs=[completion.output(index, self._dictionary) for index, completion in enumerate(self._completions)],
            finished=all(request.finished for request in self._requests),
            metrics=metrics(self._requests),
            error=next((request.error for request in self._requests if request.error is not None), None),
            pooled=first.pooled,
        )

    def fail(self, error: SpecrsError) -> RequestOutput:
        """Return the last output of all requests, which `error` has ended. It has no new tokens, because the engine
        cannot be asked for them."""
        first = self._requests[0]
        return RequestOutput(
            request_id=str(first.request_id),
            prompt=first.prompt,
            prompt_token_ids=first.prompt_token_ids,
            outputs=[completion.failed(index) for index, completion in enumerate(self._completions)],
            finished=True,
            metrics=RequestMetrics(),
            error=error,
        )

    def take_prompt(self) -> None:
        """Read the prompt log probabilities that are reported so far. Reading them all at the end would block the
        engine for 20 us per token."""
        entries, known = self._requests[0].prompt_logprobs, self._prompt_logprobs
        if entries is not None and len(entries) > len(known):
            known += [None if entry is None else self._dictionary(entry) for entry in entries[len(known) :]]

    def _prompt(self, request: Request) -> list[dict[int, Logprob] | None] | None:
        entries = request.prompt_logprobs
        # a prompt comes as a whole: chunks of it are no result
        if entries is None or len(entries) < len(request.prompt_token_ids):
            return None
        self.take_prompt()
        return self._prompt_logprobs

    def _dictionary(self, entry: TokenLogprob) -> dict[int, Logprob]:
        found = {entry.token_id: Logprob(entry.logprob, entry.rank, self._text(entry.token_id))}
        for rank, (token_id, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), start=1):
            found.setdefault(token_id, Logprob(logprob, rank, self._text(token_id)))
        return found

    def _text(self, token_id: int) -> str | None:
        return None if self._texts is None else self._texts[token_id]


class _Completion:
    """One request, the part of its output that was read so far, and how much of it was delivered."""

    def __init__(self, request: Request, kind: RequestOutputKind) -> None:
        params = request.params
        self._request = request
        self._cumulative = kind is not RequestOutputKind.DELTA
        self._log = CompletionLog(logprobs=params.logprobs is not None, drafts=params.return_drafts)
        self._told = Mark()
        self._end = 0  # of the text that was read, in bytes

    def output(self, index: int, dictionary: Callable[[TokenLogprob], dict[int, Logprob]]) -> CompletionOutput:
        """Return an output with what the request got since the previous call. Mutates: the next output begins here.
        `dictionary` converts log probabilities."""
        request, log = self._request, self._log
        log.token_ids += request.output_token_ids[len(log.token_ids) :]
        text, self._end = request.output.stable_text_from(self._end)
        log.add_text(text)
        if log.logprobs is not None:
            for entry in (request.logprobs or [])[len(log.logprobs) :]:
                log.logprobs.append(dictionary(entry))
                log.cumulative_logprob += entry.logprob
        if log.drafts is not None:
            log.drafts += (request.drafts or [])[len(log.drafts) :]
        reason = request.finish_reason
        return self._view(index, None if reason is None else reason.value, request.stop_reason)

    def failed(self, index: int) -> CompletionOutput:
        """Return an output without new tokens, which says that an error has ended the request."""
        return self._view(index, "error", None)

    def _view(self, index: int, finish_reason: str | None, stop_reason: int | str | None) -> CompletionOutput:
        start, self._told = self._told, self._log.mark()
        return LoggedCompletion.view(
            self._log,
            start,
            self._told,
            cumulative=self._cumulative,
            index=index,
            cumulative_logprob=None if self._log.logprobs is None else self._log.cumulative_logprob,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )
