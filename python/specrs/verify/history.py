"""What a row has seen: token counts for penalties and the last tokens for bad words, drafts included. Changes no
logits.

Row i of a verification gives the distribution of position n + i, so its history is the committed tokens and d_1..d_i,
as if those drafts had been written one by one; a drafting pass that draws d_{i+1} has the same history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

OUTSIDE = -2
"""Stands in a context for positions before the first token; equals no id and no padding."""


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Occurrences by row and token: R rows of state, or N flat rows selected from it. 5 bytes a row and token."""

    output: Tensor  # [R, V] int32, times each token occurs in the output
    prompt: Tensor  # [R, V] bool, whether it occurs in the prompt

    @classmethod
    def allocate(cls, num_rows: int, vocab_size: int, *, device: torch.device | None = None) -> TokenCounts:
        """Rows that have seen nothing."""
        return cls(
            output=torch.zeros((num_rows, vocab_size), dtype=torch.int32, device=device),
            prompt=torch.zeros((num_rows, vocab_size), dtype=torch.bool, device=device),
        )

    def load(self, row: int, prompt: Tensor, output: Tensor) -> None:
        """Replace a row by what `prompt` and `output` (1-D int64) hold, on admission and after a preemption.
        Mutates."""
        self.prompt[row].zero_().index_fill_(0, prompt, True)
        self.output[row].zero_().index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def add(self, rows: Tensor, tokens: Tensor, emitted: Tensor) -> None:
        """Count the first `emitted` `[B]` of `tokens` `[B, C]`, ids of the vocabulary, in the rows `rows` `[B]`.
        Mutates."""
        column = torch.arange(tokens.shape[1], device=tokens.device)
        valid = (column < emitted[:, None]).to(torch.int32)
        flat = (rows[:, None] * self.output.shape[1] + tokens).flatten()
        self.output.view(-1).scatter_add_(0, flat, valid.flatten())

    def select(self, rows: Tensor, drafts: Tensor | None = None, num_counted: Tensor | None = None) -> TokenCounts:
        """Flat rows: state rows `rows` `[N]`, with the first `num_counted` `[N]` of `drafts` `[N, K]` counted in each.

        In verification `num_counted` is the row's offset i; drafts behind it are ignored but must be ids of the
        vocabulary.
        """
        output = self.output.index_select(0, rows)
        if drafts is not None and num_counted is not None:
            column = torch.arange(drafts.shape[1], device=drafts.device)
            output.scatter_add_(1, drafts, (column < num_counted[:, None]).to(torch.int32))
        return TokenCounts(output=output, prompt=self.prompt.index_select(0, rows))


def count_tokens(history: Tensor, positions: Tensor, prompt_len: Tensor, vocab_size: int) -> TokenCounts:
    """Counts of the tokens before each flat row's position; derived anew, so nothing has to be kept in step with it.

    Args:
        history: tokens of each flat row's request, `[N, M]` int64, drafts behind the committed ones; M reaches the
            largest position. What lies from a row's position on is ignored, but must be ids of the vocabulary.
        positions: the position whose distribution the flat row gives, `[N]` int64.
        prompt_len: `[N]` int64; tokens before it count as prompt.
    """
    column = torch.arange(history.shape[1], device=history.device)
    before, in_prompt = column < positions[:, None], column < prompt_len[:, None]

    def count(mask: Tensor) -> Tensor:
        zeros = torch.zeros((history.shape[0], vocab_size), dtype=torch.int32, device=history.device)
        return zeros.scatter_add_(1, history, mask.to(torch.int32))

    return TokenCounts(output=count(before & ~in_prompt), prompt=count(before & in_prompt) > 0)


def context_rows(tokens: Tensor, rows: Tensor, positions: Tensor, length: int) -> Tensor:
    """The `length` tokens before each flat row's position, `[N, length]` int64, `OUTSIDE` before the first.

    Args:
        tokens: row state `[R, M]` int64; committed tokens and, behind them, this iteration's drafts.
        rows: state row of each flat row, `[N]` int64.
        positions: the position whose distribution the flat row gives, `[N]` int64 (n + i in verification).
    """
    index = positions[:, None] + torch.arange(-length, 0, device=positions.device)
    return torch.where(index >= 0, tokens[rows[:, None], index.clamp(min=0)], OUTSIDE)


def pack_bad_words(words: Sequence[Sequence[int]], num_words: int, length: int) -> Tensor:
    """Token sequences as `[num_words, length]` int64, right-aligned, -1 where unused.

    Every word must have 1 to `length` ids and there may be at most `num_words`; a ValueError says which does not fit.
    """
    if len(words) > num_words:
        raise ValueError(f"bad_words: {len(words)} sequences, allowed are at most {num_words}")
    packed = torch.full((num_words, length), -1, dtype=torch.int64)
    for i, word in enumerate(words):
        if not 1 <= len(word) <= length:
            raise ValueError(f"bad_words[{i}]: {len(word)} tokens, allowed are 1 to {length}")
        packed[i, length - len(word) :] = torch.tensor(list(word), dtype=torch.int64)
    return packed
