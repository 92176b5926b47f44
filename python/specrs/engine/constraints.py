"""Detects requests whose constraints exclude every token. Masks no logits."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specrs.errors import InvalidRequestError, invalid_request, short
from specrs.sampling import SamplingParams

if TYPE_CHECKING:
    from specrs.structured.matcher import GrammarMatcher

ALLOWED, BAD_WORDS, MIN_TOKENS, STRUCTURED = "allowed_token_ids", "bad_words", "min_tokens", "structured_outputs"
"""Fields of `SamplingParams` that exclude tokens."""


def reject_exclusive(
    params: SamplingParams,
    stop_ids: Sequence[int],
    bad_words_token_ids: Sequence[Sequence[int]],
    matcher: GrammarMatcher | None,
    vocab_size: int,
) -> None:
    """Raise an error for a request that can never generate a token. Changes nothing.

    Checks the constraints on the first token: allowed ids, bad words of one token, stop ids before `min_tokens`, and
    the first mask of the grammar. If the grammar allows only stop ids, `min_tokens` has no effect.

    Args:
        stop_ids: stop ids of the request, eos ids included.
        bad_words_token_ids: `params.bad_words` as token sequences.
        matcher: matcher of `params.structured_outputs` at its start.
        vocab_size: number of token ids.

    Raises:
        InvalidRequestError: no token is allowed. Names a smallest set of constraints that excludes every token.
    """
    excluded: dict[str, NDArray[np.bool_]] = {}
    words = [word[0] for word in bad_words_token_ids if len(word) == 1]
    if params.allowed_token_ids is not None:
        excluded[ALLOWED] = ~_marked(params.allowed_token_ids, vocab_size)
    if words:
        excluded[BAD_WORDS] = _marked(words, vocab_size)
    if not excluded:
        return  # stop ids alone, or a grammar alone, always leave a token
    stops = _marked(stop_ids, vocab_size)
    if matcher is not None:
        excluded[STRUCTURED] = ~_first_mask(matcher, vocab_size)
    if params.min_tokens > 0 and not (matcher is not None and (excluded[STRUCTURED] | stops).all()):
        excluded[MIN_TOKENS] = stops
    if not np.logical_or.reduce(list(excluded.values())).all():
        return
    for size in range(1, len(excluded) + 1):
        for names in itertools.combinations(excluded, size):
            if np.logical_or.reduce([excluded[name] for name in names]).all():
                raise _refusal(params, names, "no token is allowed at the start")


def no_token_allowed(
    params: SamplingParams, stop_ids: Sequence[int], position: int, num_output_tokens: int
) -> InvalidRequestError:
    """Return the error for a request whose constraints exclude every token at `position`, after `num_output_tokens`
    tokens.

    `stop_ids` are the stop ids of the request, eos ids included.
    """
    in_force = {
        ALLOWED: params.allowed_token_ids is not None,
        BAD_WORDS: bool(params.bad_words),
        STRUCTURED: params.structured_outputs is not None,
        MIN_TOKENS: num_output_tokens < params.min_tokens and len(stop_ids) > 0,
    }
    names = [name for name, is_given in in_force.items() if is_given]
    return _refusal(
        params, names, f"no token is allowed at position {position}, after {num_output_tokens} output tokens"
    )


def _refusal(params: SamplingParams, names: Sequence[str], what: str) -> InvalidRequestError:
    """Return the error that names the constraints `names` with their values, and says `what` is wrong."""
    first, *others = names
    given = " and ".join(f"{name}={short(getattr(params, name))}" for name in others)
    excluded = f"{what}: with {given} it excludes every token" if others else f"{what}: it excludes every token"
    return invalid_request(first, getattr(params, first), f"{excluded}; allow more tokens, or leave one of them out")


def _marked(ids: Iterable[int], vocab_size: int) -> NDArray[np.bool_]:
    """Return an array `[vocab_size]` that is True at `ids`."""
    marked = np.zeros(vocab_size, dtype=np.bool_)
    marked[[token for token in ids if token < vocab_size]] = True
    return marked


def _first_mask(matcher: GrammarMatcher, vocab_size: int) -> NDArray[np.bool_]:
    """Return an array `[vocab_size]` that is True for the tokens that the grammar allows next."""
    words = np.zeros(-(-vocab_size // 32), dtype=np.int32)
    matcher.fill_mask(words)
    return np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size].astype(np.bool_)
