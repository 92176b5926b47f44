"""Compiled grammars: from `StructuredOutputsParams` to a `GrammarMatcher` per request. Follows no text itself.

The library is llguidance. It brings one abi3 wheel of 3 MB without dependencies (xgrammar: five, with a compiler's
runtime), starts in milliseconds because its automata grow as the text does, takes tokens back, writes masks into a
buffer of the caller's, rejects the schema keywords that it cannot enforce, and has limits for states and items.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

from specrs.errors import invalid_request
from specrs.structured.compiler import Start, compiler_of
from specrs.structured.matcher import GrammarMatcher
from specrs.structured.params import StructuredOutputsParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specrs.tokenizer import Tokenizer


class Grammar:
    """A compiled grammar at its start, for any number of requests. Immutable."""

    def __init__(self, start: Start, vocab_size: int, end_token_id: int, eos_token_id: int | None) -> None:
        self.vocab_size = vocab_size
        self._start = start
        self._end_token_id = end_token_id
        self._eos_token_id = eos_token_id

    def matcher(self, stop_ids: Sequence[int]) -> GrammarMatcher:
        """Return a matcher for one request, which any of `stop_ids` ends.

        Without stop ids (`ignore_eos`), a complete text is followed by the tokenizer's eos token until the request
        reaches its length, because some token must follow.

        Raises `InvalidRequestError` if there are no stop ids and the tokenizer has no eos token.
        """
        ids = tuple(stop_ids)
        if not ids:
            if self._eos_token_id is None:
                raise invalid_request(
                    "stop_token_ids", list(ids), "structured_outputs needs one, because the tokenizer has no eos token"
                )
            ids = (self._eos_token_id,)
        return GrammarMatcher(self._start, self.vocab_size, ids, self._end_token_id)


def submit_grammar(params: StructuredOutputsParams, tokenizer: Tokenizer, vocab_size: int) -> Future[Grammar]:
    """Start to compile a grammar without waiting. It takes at most `COMPILE_TIMEOUT` seconds once a worker is free.

    `vocab_size` is the model's, at least the tokenizer's; ids past the tokenizer's are never allowed. The future raises
    `InvalidRequestError` with the field and the library's reason, also if the time is over.
    """
    compiler = compiler_of(tokenizer, vocab_size)
    outcome: Future[Grammar] = Future()

    def finish(compiled: Future[Start]) -> None:
        # that the tokenizer is named here keeps it, and so the compiler open, until this one is done
        eos_token_id: int | None = tokenizer.eos_token_id
        if compiled.cancelled():
            outcome.cancel()
            return
        fault = compiled.exception()
        if fault is not None:
            outcome.set_exception(fault)
        else:
            outcome.set_result(Grammar(compiled.result(), vocab_size, compiler.end_token_id, eos_token_id))

    compiler.submit(params).add_done_callback(finish)
    return outcome


def compile_grammar(params: StructuredOutputsParams, tokenizer: Tokenizer, vocab_size: int) -> Grammar:
    """Compile a grammar and wait for it. Raises `InvalidRequestError` if the parameters are wrong or the time is over,
    `EngineError` if no worker starts."""
    return submit_grammar(params, tokenizer, vocab_size).result()
