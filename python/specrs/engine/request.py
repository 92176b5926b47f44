"""One request: its prompt, its parameters, what it has produced. Schedules nothing and holds no tensors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from specrs.core import AcceptanceTracker, RequestSampling
from specrs.engine.detokenizer import IncrementalDetokenizer
from specrs.errors import SpecrsError
from specrs.outputs import TokenLogprob
from specrs.sampling import SamplingParams

if TYPE_CHECKING:
    from specrs.structured.grammar import Grammar
    from specrs.structured.matcher import GrammarMatcher


class FinishReason(StrEnum):
    """Why a request ended; the strings that OpenAI-compatible clients know, and `error`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Request:
    """A request from admission to its end. `output_token_ids` and `text` grow at every settled launch that names it."""

    def __init__(
        self,
        request_id: int,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        detokenizer: IncrementalDetokenizer | None = None,
        num_speculative_tokens: int = 0,
        priority: int = 0,
        cache_salt: str = "",
        seed: int = 0,
        bad_words_token_ids: Sequence[Sequence[int]] = (),
        grammar: Grammar | None = None,
    ) -> None:
        """A request that no engine has seen yet.

        Args:
            num_speculative_tokens: the engine's K, the size of the acceptance histogram.
            seed: 64 bits that its random numbers depend on, with the position and nothing else.
            bad_words_token_ids: `params.bad_words` as token sequences.
            grammar: `params.structured_outputs`, compiled.
        """
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = list(prompt_token_ids)
        self.params = params
        self.priority = priority
        self.cache_salt = cache_salt
        self.seed = seed
        self.bad_words_token_ids = bad_words_token_ids
        self.grammar = grammar
        self.matcher: GrammarMatcher | None = None  # made on admission, when the stop ids are known
        self.logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self.prompt_logprobs: list[TokenLogprob | None] | None = None if params.prompt_logprobs is None else [None]
        self.output_token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: SpecrsError | None = None
        self.acceptance = AcceptanceTracker(num_speculative_tokens)
        self.num_cached_tokens: int | None = None  # not yet admitted
        self.synthetic = False  # acceptance is made up: set by the engine that takes the request
        self.stop_token_ids: tuple[int, ...] = ()
        self.eos_token_ids: frozenset[int] = frozenset()
        self.arrival_time = time.monotonic()
        self.first_token_time: float | None = None
        self.finish_time: float | None = None
        self._detokenizer = detokenizer

    @property
    def finished(self) -> bool:
        """Whether the request has ended, for whatever reason."""
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        """Text of the output so far, without a stop string that ended it; empty without a detokenizer."""
        return "" if self._detokenizer is None else self._detokenizer.text

    @property
    def stable_text(self) -> str:
        """The part of `text` that no further token can change: what a stream may send."""
        return "" if self._detokenizer is None else self._detokenizer.stable_text

    def sampling(self) -> RequestSampling:
        """What it asks of sampling, for the scheduler to put into records."""
        params, allowed = self.params, self.params.allowed_token_ids
        return RequestSampling(
            seed=self.seed,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            allowed_token_ids=None if allowed is None else np.fromiter(allowed, dtype=np.int64, count=len(allowed)),
            logit_bias={int(token): bias for token, bias in (params.logit_bias or {}).items()},
            bad_words_token_ids=self.bad_words_token_ids,
            has_extras=self.grammar is not None,
        )

    def append(self, token_ids: list[int], *, ended_by_token: bool) -> bool:
        """Take newly settled tokens; true if a stop string ended the request among them (the rest is dropped).

        With `ended_by_token` the last one is a stop token: an output token, but no text unless
        `include_stop_str_in_output`.
        """
        if self.first_token_time is None and token_ids:
            self.first_token_time = time.monotonic()
        if self._detokenizer is None:
            self.output_token_ids += token_ids
            return False
        silent = 1 if ended_by_token and not self.params.include_stop_str_in_output else 0
        consumed, stop_string = self._detokenizer.update(token_ids[: len(token_ids) - silent])
        if stop_string is None:
            self.output_token_ids += token_ids
            return False
        self.output_token_ids += token_ids[:consumed]
        self.stop_reason = stop_string
        return True

    def finish(self, reason: FinishReason, error: SpecrsError | None = None) -> None:
        """End the request once; flushes the detokenizer, but not after an error. A later call changes nothing."""
        if self.finished:
            return
        if reason is FinishReason.STOP and self.stop_reason is None:
            last = self.output_token_ids[-1]
            self.stop_reason = None if last in self.eos_token_ids else last
        if self._detokenizer is not None and reason is not FinishReason.ERROR:
            self._detokenizer.finish()
        self.error = error
        self.finish_time = time.monotonic()
        self.finish_reason = reason  # the last, so that an end is whole or none
