"""From prompts and parameters to requests that no engine has seen yet. Adds none, and waits for no grammar.

Its methods may be called from any thread: what they count, they count in one step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from specrs.engine.output_builder import TokenTexts
from specrs.engine.request import Request
from specrs.errors import invalid_request
from specrs.inputs import Prompt, PromptType, read_prompt
from specrs.lora_request import LoRARequest
from specrs.sampling import RequestLimits, SamplingParams, derive_seed, tokenize_bad_words, validate_request
from specrs.tokenizer import Tokenizer

if TYPE_CHECKING:
    from specrs.engine.loras import LoRAStore
    from specrs.models.lora import LoRAAdapter
    from specrs.structured.grammar import Grammar


class Intake:
    """Numbers prompts and requests, and gives each request its seed, its decoder and its bad words."""

    def __init__(
        self, tokenizer: Tokenizer | None, limits: RequestLimits, seed: int, loras: LoRAStore | None = None
    ) -> None:
        """`seed` and `loras` are the engine's. Without a tokenizer, prompts are ids and texts are empty."""
        self.tokenizer = tokenizer
        self.texts = None if tokenizer is None else TokenTexts(tokenizer)
        self._limits = limits
        self._loras = loras
        self._engine_seed = seed
        self._ids = itertools.count()
        self._prompts = itertools.count()

    def next_request_id(self) -> int:
        """An id that no other request has."""
        return next(self._ids)

    def next_prompt(self) -> int:
        """The number of a prompt, which its seeds are derived from where it has none."""
        return next(self._prompts)

    def read(self, prompt: PromptType) -> Prompt:
        """The ids of one prompt. Raises `InvalidRequestError` as `read_prompt` does."""
        return read_prompt(prompt, self.tokenizer, self._limits.max_model_len)

    def lora(self, request: LoRARequest | None) -> LoRAAdapter | None:
        """The adapter that a request asks for, read where it is not in memory: not for an event loop. Raises
        `InvalidRequestError` and `CheckpointError` as `LoRAStore.load`."""
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
    ) -> list[Request]:
        """The n completions of prompt `number`, checked, without a grammar, with their adapter.

        Raises `InvalidRequestError` for what the engine's limits do not allow, and as `lora`.
        """
        tokenizer, limits = self.tokenizer, self._limits
        bounds = validate_request(prompt.token_ids, params, limits)
        if tokenizer is None:
            for field, value in (
                ("stop", params.stop_strings),
                ("bad_words", params.bad_words),
                ("structured_outputs", params.structured_outputs),
            ):
                if value:
                    raise invalid_request(
                        field, value, "needs a tokenizer; with skip_tokenizer_init=True allowed: None"
                    )
        bad_words: tuple[tuple[int, ...], ...] = ()
        if tokenizer is not None and params.bad_words:
            encode = partial(tokenizer.encode, add_special_tokens=False)
            bad_words = tokenize_bad_words(params.bad_words, encode, limits.vocab_size)
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
                lora=lora,
                bounds=bounds,
            )
            requests.append(request)
            # what the prompt's tokens are worth is told once, and costs a request its cached prefix
            params = params.without("prompt_logprobs")
        return requests

    def submit_grammar(self, params: SamplingParams) -> Future[Grammar] | None:
        """Begin to compile what `structured_outputs` asks for, beside this thread; None where it asks for nothing."""
        if params.structured_outputs is None or self.tokenizer is None:
            return None
        from specrs.structured.grammar import submit_grammar

        return submit_grammar(params.structured_outputs, self.tokenizer, self._limits.vocab_size)

    def _seed(self, given: int | None, number: int, completion: int) -> int:
        if given is None:
            return derive_seed(self._engine_seed, number, completion)
        return derive_seed(given, completion) if completion else given


def take_grammar(requests: Iterable[Request], compiled: Future[Grammar]) -> None:
    """Give a compiled grammar to its requests. Raises what made it fail; waits where it is not there yet."""
    try:
        grammar = compiled.result()
    finally:
        del compiled  # it knows its fault, whose traceback knows this frame: a cycle, which only a collection frees
    for request in requests:
        request.grammar = grammar
