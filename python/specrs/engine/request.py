"""A request with its prompt, parameters, and output, which the core stores. Schedules nothing and holds no tensors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specrs.core import (
    FINISH_ABORT,
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_STOP,
    FLAG_NO_TOKEN_ALLOWED,
    AcceptanceTracker,
    Output,
    RequestSampling,
    TokenDecoder,
)
from specrs.engine.constraints import no_token_allowed
from specrs.errors import EngineError, SpecrsError
from specrs.outputs import Draft, TokenLogprob
from specrs.sampling import CORE_NUMBERS, RequestBounds, SamplingParams

if TYPE_CHECKING:
    from specrs.models.lora import LoRAAdapter
    from specrs.structured.grammar import Grammar
    from specrs.structured.matcher import GrammarMatcher


class FinishReason(StrEnum):
    """Reason why a request ended: one of the strings that OpenAI-compatible clients know, or `error`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


_REASONS = {
    FINISH_STOP: FinishReason.STOP,
    FINISH_LENGTH: FinishReason.LENGTH,
    FINISH_ABORT: FinishReason.ABORT,
    FINISH_ERROR: FinishReason.ERROR,
}
_CODES = {reason: code for code, reason in _REASONS.items()}


class Request:
    """A request from its creation to its end. Each settled step adds to its `output`, which the core stores. Properties
    read from it on demand."""

    def __init__(
        self,
        request_id: int,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        decoder: TokenDecoder | None = None,
        num_speculative_tokens: int = 0,
        priority: int = 0,
        cache_salt: str = "",
        seed: int = 0,
        bad_words_token_ids: Sequence[Sequence[int]] = (),
        prediction_token_ids: Sequence[int] = (),
        grammar: Grammar | None = None,
        lora: LoRAAdapter | None = None,
        bounds: RequestBounds | None = None,
        pooling: bool = False,
    ) -> None:
        """Create a request that no engine has seen yet.

        Args:
            decoder: the tokenizer's decoder; None for no text.
            num_speculative_tokens: the engine's K, the size of the acceptance histogram.
            seed: 64-bit seed. The request's random numbers depend only on it and on the position.
            bad_words_token_ids: `params.bad_words` as token sequences.
            prediction_token_ids: `params.prediction` as token ids.
            grammar: `params.structured_outputs`, compiled.
            lora: LoRA adapter of the request; None: the base model.
            bounds: result of `validate_request`; None: the engine will check the request.
            pooling: no token is drawn. The request ends with its prompt, and has its result in `pooled`.
        """
        self.request_id = request_id
        self.prompt = prompt
        self.decoder = decoder
        self.prompt_token_ids = list(prompt_token_ids)
        self.params = params
        self.priority = priority
        self.caller: int | None = None  # whom its rows count for, where others are asked for with it
        self.cache_salt = cache_salt
        self.seed = seed
        self.bad_words_token_ids = bad_words_token_ids
        self.prediction_token_ids = prediction_token_ids
        self.num_predicted_tokens = 0  # drafted from the prediction
        self.num_accepted_predicted_tokens = 0
        self.grammar = grammar
        self.lora = lora
        self.bounds = bounds
        self.pooling = pooling
        self.pooled: NDArray[np.float32] | None = None
        """With `pooling`, and once the prompt is computed: the final hidden state `[hidden]` of its last token. With
        `params.allowed_token_ids`, that token's logits of these ids, in ascending order of the ids."""
        self.matcher: GrammarMatcher | None = None  # made on admission, when the stop ids are known
        self.logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self.prompt_logprobs: list[TokenLogprob | None] | None = None if params.prompt_logprobs is None else [None]
        self.num_cached_tokens: int | None = None  # not yet admitted
        self.synthetic = False  # acceptance is made up: set by the engine that takes the request
        self.stop_token_ids: tuple[int, ...] = ()
        self.eos_token_ids: frozenset[int] = frozenset()
        self.arrival_time = time.monotonic()
        self.scheduled_time: float | None = None  # when it first got a row
        self.output = Output(
            request_id,
            self.prompt_token_ids,
            num_speculative_tokens=num_speculative_tokens,
            decoder=decoder,
            skip_special_tokens=params.skip_special_tokens,
            stop=list(params.stop_strings),
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            keep_drafts=params.return_drafts,
        )
        self._token_ids: list[int] = []  # of the output, as far as they were asked for
        self._drafts: list[Draft] | None = [] if params.return_drafts else None  # likewise
        self._error: SpecrsError | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Reason why the request ended; None while it runs or waits."""
        code = self.output.finish_reason
        if self.pooling and code == FINISH_LENGTH:
            return FinishReason.STOP
        return None if code is None else _REASONS[code]

    @property
    def finished(self) -> bool:
        """True if the request has ended, for whatever reason."""
        return self.output.finish_reason is not None

    @property
    def finish_time(self) -> float | None:
        """Time at which the request ended, by time.monotonic; None while it runs or waits."""
        return self.output.finish_time

    @property
    def first_token_time(self) -> float | None:
        """Time of the request's first token, by time.monotonic; None if there is none yet."""
        return self.output.first_token_time

    @property
    def stop_reason(self) -> int | str | None:
        """Stop string or stop token id that ended the request; None for an eos token and for all other endings."""
        stop = self.output.stop
        if stop is not None:
            return self.params.stop_strings[stop]
        if self.output.finish_reason != FINISH_STOP:
            return None
        last = self.output_token_ids[-1]
        return None if last in self.eos_token_ids else last

    @property
    def error(self) -> SpecrsError | None:
        """Error that ended the request, if its `finish_reason` is `error`; otherwise None."""
        if self._error is None and (told := self.output.error) is not None:
            if self.output.error_flags & FLAG_NO_TOKEN_ALLOWED:
                made = self.num_output_tokens
                position = len(self.prompt_token_ids) + made
                self._error = no_token_allowed(self.params, self.stop_token_ids, position, made)
            else:
                self._error = EngineError(told)
        return self._error

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens so far, 0 with `pooling`. Does not build `output_token_ids`."""
        return 0 if self.pooling else self.output.num_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """Output tokens so far, none with `pooling`. Every call returns the same list, which grows."""
        known = self._token_ids
        if self.pooling:
            return known
        known += self.output.token_ids(len(known))
        return known

    @property
    def drafts(self) -> list[Draft] | None:
        """Drafts so far, an entry for each iteration that drafted. Every call returns the same list, which grows. None
        unless `return_drafts` is set."""
        known = self._drafts
        if known is not None:
            known += [Draft(*entry) for entry in self.output.drafts(len(known)) or ()]
        return known

    @property
    def text(self) -> str:
        """Text of the output so far, without a stop string that ended it; empty without a decoder."""
        return self.output.text

    @property
    def stable_text(self) -> str:
        """The part of `text` that no further token can change: what a stream may send."""
        return self.output.stable_text

    @property
    def acceptance(self) -> AcceptanceTracker:
        """A copy of the request's acceptance statistics."""
        return self.output.acceptance()

    def sampling(self) -> RequestSampling:
        """Return the request's sampling parameters in the form that the scheduler puts into records."""
        params, allowed = self.params, self.params.allowed_token_ids
        return RequestSampling(
            seed=self.seed,
            **{name: getattr(params, name) for name in CORE_NUMBERS},
            allowed_token_ids=None if allowed is None else np.fromiter(allowed, dtype=np.int64, count=len(allowed)),
            logit_bias={int(token): bias for token, bias in (params.logit_bias or {}).items()},
            bad_words_token_ids=self.bad_words_token_ids,
            has_extras=self.grammar is not None,
            pooling=self.pooling,
        )

    def append(self, token_ids: list[int], *, ended_by_token: bool) -> bool:
        """Append new tokens. Return True if a stop string among them ended the text; tokens after it are dropped.

        With `ended_by_token` the last one is a stop token. It counts as an output token, but has text only with
        `include_stop_str_in_output`. Steps deliver through `specrs.core.Outputs` instead.
        """
        return self.output.append(token_ids, ended_by_token=ended_by_token, now=time.monotonic())[1]

    def finish(self, reason: FinishReason, error: SpecrsError | None = None) -> None:
        """End the request. Its text also ends, unless an error is the reason. The first reason counts, but an error
        replaces any other."""
        if not self.finished or (reason is FinishReason.ERROR and self.finish_reason is not FinishReason.ERROR):
            self._error = error
            self.output.finish(_CODES[reason], now=time.monotonic())
