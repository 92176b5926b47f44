"""State of a running request in the reference, a pass over its tokens, and its iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specrs.core import LOGPROBS_NONE
from specrs.models.inputs import PassInputs
from specrs.reference.sampling import Request


@dataclass(slots=True)
class Row:
    """A running request. With n = `len(tokens)`:

    [0, n - 1)                  the target's KV is valid
    [draft_start, draft_len)    the drafter's KV is valid; the drafter attends to no earlier position
    [hidden_start, n - 1)       `hidden` has the target's hidden states, which a draft head will read
    """

    request: Request
    tokens: list[int]
    """Committed tokens: the prompt and the output."""
    limit: int
    """Maximum number of tokens of the row."""
    min_len: int
    """First position at which a stop id ends the row."""
    stop_ids: list[int]
    tables: Tensor
    """`[G, max_blocks]` int64, the row's blocks in each KV group."""
    index: int = 0
    """Number of the row, under which layers with states keep its states."""
    draft_len: int = 0
    active: bool = True
    """False once the request has ended."""
    draft_start: int = 0
    hidden_start: int = 0
    hidden: list[Tensor] = field(default_factory=list)
    """Hidden states of the target, `[L, hidden]` for each position from `hidden_start` on."""


def pass_inputs(
    row: Row,
    tokens: Sequence[int],
    positions: Sequence[int],
    block_size: int,
    *,
    drafts: bool = False,
    prompts: bool = False,
) -> PassInputs:
    """Return the inputs of a pass that feeds `tokens` of `row` at `positions` and writes their KV.

    Args:
        drafts: True for a drafter's pass. Its KV is in the first KV group, and begins at `draft_start`.
        prompts: True if the tokens are a prompt or catch-up chunk.
    """
    tables, at = row.tables[:1] if drafts else row.tables, torch.tensor(positions)
    slots = tables[:, at // block_size] * block_size + at % block_size
    return PassInputs(
        input_ids=torch.tensor(tokens),
        positions=at,
        slots=slots[0],
        q_start=torch.tensor([0, len(positions)]),
        block_table=tables[:1],
        max_q_len=len(positions),
        max_context=max(positions) + 1,
        k_start=torch.tensor([row.draft_start]) if drafts and row.draft_start else None,
        group_slots=slots[1:] if len(tables) > 1 else None,
        group_tables=tables[1:, None] if len(tables) > 1 else None,
        prompts=prompts,
        state_rows=(row.index,),
    )


class Grammar:
    """Tokens that a request's grammar allows after each draft of an iteration."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        """`matcher` is a `specrs.structured.matcher.GrammarMatcher`; drafts advance it until `finish`."""
        self.matcher, self.vocab_size, self.num_accepted = matcher, vocab_size, 0
        self.allowed = [self._mask()]
        """`[V]` bool by the number of drafts before. After a draft that is not allowed, no row is used."""

    def _mask(self) -> Tensor:
        words = np.zeros(-(-self.vocab_size // 32), np.int32)
        self.matcher.fill_mask(words)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        return torch.from_numpy(bits[: self.vocab_size].astype(bool))

    def advance(self, draft: int) -> None:
        """Advance the grammar by the next draft."""
        is_reached = self.num_accepted == len(self.allowed) - 1 and self.matcher.accept(draft)
        self.num_accepted += is_reached
        self.allowed.append(self._mask() if is_reached else torch.ones(self.vocab_size, dtype=torch.bool))

    def finish(self) -> None:
        """Roll the drafts back, so that only settled tokens stay accepted."""
        self.matcher.rollback(self.num_accepted)


@dataclass(slots=True)
class Iteration:
    """An iteration of one row. The end of a prompt counts as an iteration without drafts."""

    index: int
    """Index of the row's sequence in the step's results."""
    row: Row
    n: int
    """Number of tokens of the row at the start of the iteration."""
    grammar: Grammar | None
    by_passes: bool = False
    """True if passes draw the drafts. Otherwise the drafts are in the record, and are point masses."""
    drafts: list[int] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)
    """Distribution `[V]` that each draft was drawn from. Empty for point masses and under the rule `coupled`."""
    flags: int = 0

    def adjust(self, logits: Tensor, i: int) -> Tensor:
        """Apply masks, biases and penalties of the request to the logits `[V]` for position n + i."""
        row = self.row
        is_early = "min_tokens" in row.request.steps and self.n + i < row.min_len
        return row.request.adjust(
            logits,
            context=row.tokens[: self.n] + self.drafts[:i],
            forbidden_stops=row.stop_ids if is_early else [],
            grammar=None if self.grammar is None else self.grammar.allowed[i],
        )

    def without_forced(self, logits: Tensor) -> Tensor:
        """Return the target's logits `[k + 1, V]`, with zeros in rows where the grammar allows only the next draft: an
        engine does not compute them. `logits` itself without a grammar, or if log probabilities are reported."""
        if self.grammar is None or self.row.request.logprobs != LOGPROBS_NONE:
            return logits
        pairs = zip(self.grammar.allowed, self.drafts, strict=False)
        forced = [bool(mask[draft]) and int(mask.sum()) == 1 for mask, draft in pairs]
        return torch.where(torch.tensor([*forced, False])[:, None], 0.0, logits)

    def add(self, draft: int) -> None:
        """Append the next draft, and advance the grammar over it."""
        self.drafts.append(draft)
        if self.grammar is not None:
            self.grammar.advance(draft)
