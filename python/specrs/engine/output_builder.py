"""From running requests to the outputs that users read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from specrs.engine.completion_log import CompletionLog, LoggedCompletion, Mark
from specrs.engine.text_window import TextWindow
from specrs.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from specrs.sampling import RequestOutputKind

if TYPE_CHECKING:
    from specrs.engine.request import Request
    from specrs.errors import SpecrsError
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
    """Makes outputs of a prompt's requests as they run. An output costs what is new since the one before it."""

    def __init__(self, requests: Sequence[Request], texts: TokenTexts | None) -> None:
        """`requests` are the completions of a prompt in their order, at least one; without `texts`, ids stay ids."""
        params = requests[0].params
        self._kind = params.output_kind
        self._requests = list(requests)
        self._texts = texts if params.detokenize else None
        self._completions = [_Completion(request, self._kind) for request in requests]
        self._prompt_logprobs: list[dict[int, Logprob] | None] = []

    @property
    def is_due(self) -> bool:
        """Whether an output is to be built now: with `FINAL_ONLY`, not before all requests have ended."""
        return self._kind is not RequestOutputKind.FINAL_ONLY or all(request.finished for request in self._requests)

    def build(self) -> RequestOutput:
        """The requests as they are now. Mutates: what it has is not new the next time."""
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
        )

    def fail(self, error: SpecrsError) -> RequestOutput:
        """The end of all requests because of `error`, an engine's that cannot be asked for what is new."""
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
        """Take in what is reported of the prompt so far: as a whole it would hold the engine for 20 us a token."""
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
    """One request, what was read of it so far, and how far it was told."""

    def __init__(self, request: Request, kind: RequestOutputKind) -> None:
        params = request.params
        self._request = request
        self._cumulative = kind is not RequestOutputKind.DELTA
        self._log = CompletionLog(logprobs=params.logprobs is not None, drafts=params.return_drafts)
        self._told = Mark()
        self._window: TextWindow | None = None
        self._is_whole = False  # the end of the text has been read

    def output(self, index: int, dictionary: Callable[[TokenLogprob], dict[int, Logprob]]) -> CompletionOutput:
        """An output with what is new of the request. Mutates: it is not new the next time."""
        request, log = self._request, self._log
        new = request.output.token_ids(len(log.token_ids))
        log.token_ids += new
        log.add_text(self._new_text(new))
        if log.logprobs is not None:
            for entry in (request.logprobs or [])[len(log.logprobs) :]:
                log.logprobs.append(dictionary(entry))
                log.cumulative_logprob += entry.logprob
        if log.drafts is not None:
            log.drafts += (request.drafts or [])[len(log.drafts) :]
        reason = request.finish_reason
        return self._view(index, None if reason is None else reason.value, request.stop_reason)

    def failed(self, index: int) -> CompletionOutput:
        """An output without news that has ended because of an error."""
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

    def _new_text(self, token_ids: Sequence[int]) -> str:
        """Return the text that the new tokens `token_ids` add and that no later token can change.

        To read the text of an unfinished request copies all of it, so its new tokens are decoded once more instead.
        """
        request, params = self._request, self._request.params
        if request.decoder is None:
            return ""
        if request.finished:
            if self._is_whole:  # other completions of the prompt go on
                return ""
            self._is_whole = True
            return request.stable_text[self._log.num_characters :]
        if self._window is None:
            self._window = TextWindow(
                request.decoder,
                request.prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                # with the stop string in the output, nothing of it is taken back
                stop=() if params.include_stop_str_in_output else params.stop_strings,
            )
        return "".join(map(self._window.add, token_ids))
