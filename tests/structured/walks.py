"""Draws random texts from a grammar's masks, and reads masks. Holds no tests."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
from numpy.typing import NDArray
from specrs.structured import GrammarMatcher
from specrs.tokenizer import Tokenizer

VOCAB_SIZE = 2048
NUM_WORDS = VOCAB_SIZE // 32
EOS = 0


def mask_of(matcher: GrammarMatcher, num_words: int = NUM_WORDS) -> NDArray[np.int32]:
    """Return the present mask. The words begin as garbage, so that unwritten ones would show."""
    words = np.full(num_words, 0x5A5A5A5A, dtype=np.int32)
    matcher.fill_mask(words)
    return words


def allowed_ids(words: NDArray[np.int32]) -> list[int]:
    """Return the ids whose bit is set, ascending."""
    return [int(i) for i in np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))]


def allowed(matcher: GrammarMatcher) -> list[int]:
    """Return the token ids that the matcher's mask allows in its present state."""
    return allowed_ids(mask_of(matcher))


@cache
def blank_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that are only white space."""
    texts = (tokenizer.decode([i], skip_special_tokens=False) for i in range(VOCAB_SIZE))
    return frozenset(i for i, text in enumerate(texts) if text and text.isspace())


@cache
def closers(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that begin by closing something."""
    return frozenset(i for i in range(VOCAB_SIZE) if tokenizer.decode([i], skip_special_tokens=False)[:1] in '"]},')


def random_text(
    matcher: GrammarMatcher,
    tokenizer: Tokenizer,
    seed: int,
    *,
    close: float = 0.5,
    blanks: float = 0.0,
    limit: int = 400,
) -> list[int]:
    """Return the tokens of one complete random text, without its stop id. Fails beyond `limit` tokens.

    Each token is drawn uniformly from the allowed ones. But with probability `close` one is taken that ends the text or
    closes something, and with `blanks` one of white space, where any may come.
    """
    rng, tokens = random.Random(seed), []
    while True:
        ids = allowed(matcher)
        assert ids, "nothing may follow"
        white = [i for i in ids if i in blank_tokens(tokenizer)] if rng.random() < blanks else []
        ends = [] if white else [i for i in ids if i in matcher.stop_ids]
        if ends and (len(ends) == len(ids) or rng.random() < close):
            assert matcher.accept(ends[0])
            return tokens
        ids = [i for i in ids if i not in matcher.stop_ids]
        ending = [i for i in ids if i in closers(tokenizer)]
        token = rng.choice(white or (ending if ending and rng.random() < close else ids))
        assert matcher.accept(token), f"the mask allows {token}, the matcher does not"
        tokens.append(token)
        assert len(tokens) < limit, tokenizer.decode(tokens)
