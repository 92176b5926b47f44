"""History of a row: token counts for penalties, and the last tokens for bad words, drafts included. Changes no logits.

Row i of a verification gives the distribution of position n + i. Its history is the committed tokens and d_1..d_i, as
if those drafts had been written one by one. A drafting pass that draws d_{i+1} has the same history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

OUTSIDE = -2
"""Id in a context for positions before the first token. It equals no token id and no padding."""


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Number of times each token occurs in the output, and whether it occurs in the prompt. A flat row is one row
    of the verification pass, `[N]` for all requests."""

    output: Tensor  # [N, V] int32, times each token occurs in the output
    prompt: Tensor  # [N, V] bool, whether it occurs in the prompt


def count_tokens(history: Tensor, positions: Tensor, prompt_len: Tensor, vocab_size: int) -> TokenCounts:
    """Count the tokens before each flat row's position. The counts are computed anew each time, so nothing has to be
    updated.

    Args:
        history: tokens of each flat row's request, `[N, M]` int64, drafts after the committed ones. M reaches the
            largest position. Tokens from a row's position on are ignored, but must be ids of the vocabulary.
        positions: position whose distribution the flat row gives, `[N]` int64.
        prompt_len: `[N]` int64; tokens before it count as prompt.
    """
    column = torch.arange(history.shape[1], device=history.device)
    before, in_prompt = column < positions[:, None], column < prompt_len[:, None]

    def count(mask: Tensor) -> Tensor:
        zeros = torch.zeros((history.shape[0], vocab_size), dtype=torch.int32, device=history.device)
        return zeros.scatter_add_(1, history, mask.to(torch.int32))

    return TokenCounts(output=count(before & ~in_prompt), prompt=count(before & in_prompt) > 0)


def context_rows(tokens: Tensor, rows: Tensor, positions: Tensor, length: int) -> Tensor:
    """Return the `length` tokens before each flat row's position, `[N, length]` int64, with `OUTSIDE` before the first
    token.

    Args:
        tokens: row state `[R, M]` int64; committed tokens and, after them, this iteration's drafts.
        rows: state row of each flat row, `[N]` int64.
        positions: position whose distribution the flat row gives, `[N]` int64 (n + i in verification).
    """
    index = positions[:, None] + torch.arange(-length, 0, device=positions.device)
    return torch.where(index >= 0, tokens[rows[:, None], index.clamp(min=0)], OUTSIDE)


def pack_bad_words(words: Sequence[Sequence[int]], num_words: int, length: int) -> Tensor:
    """Return token sequences as `[num_words, length]` int64, right-aligned, -1 where unused.

    Raises ValueError if there are more than `num_words` sequences, or if one has not 1 to `length` ids.
    """
    if len(words) > num_words:
        raise ValueError(f"bad_words: {len(words)} sequences; must be at most {num_words}")
    packed = torch.full((num_words, length), -1, dtype=torch.int64)
    for i, word in enumerate(words):
        if not 1 <= len(word) <= length:
            raise ValueError(f"bad_words[{i}]: {len(word)} tokens; must be from 1 to {length}")
        packed[i, length - len(word) :] = torch.tensor(list(word), dtype=torch.int64)
    return packed
