"""Turns prompts and parameters into requests for an engine. Does not add them to the engine, and does not wait for
grammars.

All functions may be called from any thread: their counters change atomically.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from specrs.engine.output_builder import TokenTexts
from specrs.engine.request import Request
from specrs.errors import UnsupportedRequestError, invalid_request
from specrs.inputs import Prompt, PromptType, read_prompt
from specrs.lora_request import LoRARequest
from specrs.sampling import RequestLimits, SamplingParams, derive_seed, tokenize_bad_words, validate_request
from specrs.tokenizer import Tokenizer

if TYPE_CHECKING:
    from specrs.engine.loras import LoRAStore
    from specrs.models.lora import LoRAAdapter
    from specrs.structured.grammar import Grammar


class Intake:
    """Factory of requests. Numbers prompts and requests, and gives each request its seed, decoder and bad words."""

    def __init__(
        self, tokenizer: Tokenizer | None, limits: RequestLimits, seed: int, loras: LoRAStore | None = None
    ) -> None:
        """Start counting at 0. `seed` and `loras` are the engine's. Without a tokenizer, prompts must be token ids, and
        texts are empty."""
        self.tokenizer = tokenizer
        self.texts = None if tokenizer is None else TokenTexts(tokenizer)
        self._limits = limits
        self._loras = loras
        self._engine_seed = seed
        self._ids = itertools.count()
        self._prompts = itertools.count()

    def next_request_id(self) -> int:
        """Return a new request id."""
        return next(self._ids)

    def next_prompt(self) -> int:
        """Return the number of the next prompt. Seeds are derived from it if the request sets none."""
        return next(self._prompts)

    def read(self, prompt: PromptType) -> Prompt:
        """Tokenize a prompt. Raises `InvalidRequestError` if it has no known form, or if its text is far longer than
        the context."""
        return read_prompt(prompt, self.tokenizer, self._limits.max_model_len)

    def lora(self, request: LoRARequest | None) -> LoRAAdapter | None:
        """Return the LoRA adapter of a request; None for the base model. May read files, so it must not run on an event
        loop.

        Raises `InvalidRequestError` if LoRA is off or the request contradicts a known adapter, `CheckpointError` if the
        adapter cannot be read.
        """
        if request is None:
            return None
        if not isinstance(request, LoRARequest):
            raise invalid_request("lora_request", request, "must be a LoRARequest or None")
        if self._loras is None:
            raise invalid_request("lora_request", request.lora_name, "needs enable_lora=True; allowed: None")
        return self._loras.load(request)

    def requests(
        self,
        number: int,
        prompt: Prompt,
        params: SamplingParams,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        *,
        pooling: bool = False,
    ) -> list[Request]:
        """Return the n completions of prompt `number` as checked requests, with their adapter and without a grammar.
        With `pooling`, they draw no token: see `Request.pooled`. Only the first completion keeps `prompt_logprobs`.

        Raises `InvalidRequestError` for values beyond the engine's limits, and for an adapter that may not be used;
        `CheckpointError` if an adapter cannot be read.
        """
        tokenizer, limits = self.tokenizer, self._limits
        if not limits.has_lm_head and not (pooling and params.allowed_token_ids is None):
            raise UnsupportedRequestError(
                "model: its checkpoint has no LM head, so it only embeds; use a checkpoint with lm_head.weight"
            )
        bounds = validate_request(prompt.token_ids, params, limits)
        if tokenizer is None:
            for field, value in (
                ("stop", params.stop_strings),
                ("bad_words", params.bad_words),
                ("structured_outputs", params.structured_outputs),
                ("prediction", params.prediction if isinstance(params.prediction, str) else None),
            ):
                if value:
                    raise invalid_request(
                        field, value, "needs a tokenizer; with skip_tokenizer_init=True allowed: None"
                    )
        bad_words: tuple[tuple[int, ...], ...] = ()
        if tokenizer is not None and params.bad_words:
            encode = partial(tokenizer.encode, add_special_tokens=False)
            bad_words = tokenize_bad_words(params.bad_words, encode, limits.vocab_size)
        prediction = self._prediction(params)
        requests, lora = [], self.lora(lora_request)
        for i in range(params.n):
            request = Request(
                self.next_request_id(),
                prompt.token_ids,
                params,
                prompt=prompt.text,
                decoder=tokenizer.decoder if tokenizer is not None and params.detokenize else None,
                num_speculative_tokens=limits.num_speculative_tokens,
                priority=priority,
                cache_salt=prompt.cache_salt,
                seed=self._seed(params.seed, number, i),
                bad_words_token_ids=bad_words,
                prediction_token_ids=prediction,
                lora=lora,
                bounds=bounds,
                pooling=pooling,
            )
            requests.append(request)
            # log probabilities of the prompt are reported once, and costs a request its cached prefix
            params = params.without("prompt_logprobs")
        return requests

    def submit_grammar(self, params: SamplingParams) -> Future[Grammar] | None:
        """Start to compile the grammar of `structured_outputs`, without waiting. None if there is none."""
        if params.structured_outputs is None or self.tokenizer is None:
            return None
        from specrs.structured.grammar import submit_grammar

        return submit_grammar(params.structured_outputs, self.tokenizer, self._limits.vocab_size)

    def _prediction(self, params: SamplingParams) -> Sequence[int]:
        """Return the ids of the predicted text, as many as the context holds.

        Raises `InvalidRequestError` for ids outside the vocabulary, and for text that is far longer than the context.
        """
        given, most = params.prediction, self._limits.max_model_len
        if isinstance(given, str):
            assert self.tokenizer is not None
            return self.tokenizer.encode(given, add_special_tokens=False, max_tokens=most, field="prediction")[:most]
        ids = given or ()
        wrong = next((i for i, token in enumerate(ids) if token >= self._limits.vocab_size), None)
        if wrong is not None:
            raise invalid_request(
                f"prediction[{wrong}]", ids[wrong], f"must be below {self._limits.vocab_size}, the model's vocabulary"
            )
        return ids[:most]

    def _seed(self, given: int | None, number: int, completion: int) -> int:
        if given is None:
            return derive_seed(self._engine_seed, number, completion)
        return derive_seed(given, completion) if completion else given


def take_grammar(requests: Iterable[Request], compiled: Future[Grammar]) -> None:
    """Wait for a compiled grammar and give it to its requests. Raises the error of a failed compilation."""
    try:
        grammar = compiled.result()
    finally:
        del compiled  # it knows its fault, whose traceback knows this frame: a cycle, which only a collection frees
    for request in requests:
        request.grammar = grammar
