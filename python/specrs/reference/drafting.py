"""Drafting in the reference engine by passes of a model: a draft model token by token or in parallel, or a head that
reads hidden states of the target.

Draft i, from 1 on, stands at position n + i - 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from specrs.core import UNKNOWN_BELOW
from specrs.models.base import TorchModel
from specrs.models.kv_cache import KVCache
from specrs.reference.rows import Row, pass_inputs

Choose = Callable[[Tensor], int]
"""Function that draws a draft: it takes the draft's logits `[V]` over the target's ids and returns the token id."""


class Drafter(Protocol):
    """Drafter of the reference engine. It has its own KV cache, which its methods write. A method that changes `row`
    says so."""

    max_model_len: int
    """Maximum number of positions that the drafter can hold for a row."""
    hidden_layers: Sequence[int]
    """Layers of the target whose input hidden states the drafter reads, numbered as by `TorchDecoder.forward`. Empty
    for a draft model."""
    num_kept: int
    """Maximum number of positions per row whose hidden states are kept for the drafter."""

    def begin_step(self) -> None:
        """Run the drafter's passes that the previous step deferred to this step."""

    def catch_up(
        self, row: Row, start: int, length: int, positions: Sequence[int], k_start: int, states: Tensor | None
    ) -> None:
        """Feed committed tokens at `positions`, which lie in [start, start + length). Mutates `row.draft_start`.

        Args:
            k_start: first position whose KV exists, for a draft model with sliding windows.
            states: `[N, L, hidden]`, the target's hidden states at positions from `start` on; None without a prompt
                chunk.
        """

    def is_ready(self, row: Row) -> bool:
        """Return True if the row's draft KV ends close enough to the row's end to draft."""

    def draft(self, row: Row, k: int, choose: Choose) -> None:
        """Draw `k` >= 1 drafts for `row`, with one call of `choose` for each. Mutates `row.draft_start`."""

    def draft_len_after(self, n: int, k: int, grown: int) -> int:
        """Return the position where valid draft KV ends after an iteration. The iteration made `k` >= 1 drafts and grew
        the row from `n` to `grown` tokens."""


class ModelDrafter:
    """A draft model. With a mask token it drafts in one pass (PARD: An et al. 2025), otherwise by a pass for each."""

    hidden_layers: Sequence[int] = ()
    num_kept = 0

    def __init__(
        self,
        model: TorchModel,
        kv_cache: KVCache,
        vocab_size: int,
        max_model_len: int,
        *,
        max_draft_lag: int = 2,
        mask_token_id: int | None = None,
    ) -> None:
        """`vocab_size` is the target's. Ids that the draft model does not have are fed as its last id, and never
        drafted."""
        self.model, self.kv_cache, self.vocab_size = model, kv_cache, vocab_size
        self.max_model_len, self.max_draft_lag, self.mask_token_id = max_model_len, max_draft_lag, mask_token_id

    def begin_step(self) -> None:
        """Do nothing. A draft model defers no passes to the next step."""

    def catch_up(
        self, row: Row, start: int, length: int, positions: Sequence[int], k_start: int, states: Tensor | None
    ) -> None:
        """Run a pass over the committed tokens at `positions`, if there are any. Sets `row.draft_start` to
        `k_start`."""
        row.draft_start = k_start
        if positions:
            self.feed(row, [row.tokens[position] for position in positions], positions, prompts=True)

    def is_ready(self, row: Row) -> bool:
        """Return True if the draft model's KV ends at most `max_draft_lag` positions before the row's end."""
        return row.draft_len >= len(row.tokens) - self.max_draft_lag

    def feed(self, row: Row, tokens: Sequence[int], positions: Sequence[int], *, prompts: bool = False) -> Tensor:
        """Run a pass of the draft model over `tokens` at `positions`. Return its logits `[len(tokens), V]` over the
        target's ids; ids that the draft model lacks get -inf."""
        known = [min(token, self.model.vocab_size - 1) for token in tokens]
        inputs = pass_inputs(row, known, positions, self.kv_cache.block_size, drafts=True, prompts=prompts)
        logits = self.model.compute_logits(self.model.forward(inputs, self.kv_cache).final)[:, : self.vocab_size]
        return torch.nn.functional.pad(logits, (0, self.vocab_size - logits.shape[1]), value=-torch.inf)

    def draft(self, row: Row, k: int, choose: Choose) -> None:
        """Draw `k` >= 1 drafts for `row`, with one call of `choose` for each.

        The first pass feeds the tokens from `row.draft_len` on, which have no draft KV yet; it always feeds the row's
        last token. Each later pass feeds the draft drawn before it. With a mask token there is only one pass: it also
        feeds k - 1 masks, whose logits give the other drafts.
        """
        n = len(row.tokens)
        positions = [*range(row.draft_len, n - 1), n - 1]
        tokens = [row.tokens[position] for position in positions]
        if self.mask_token_id is not None:
            masks = [self.mask_token_id] * (k - 1)
            for logits in self.feed(row, tokens + masks, [*positions, *range(n, n + k - 1)])[-k:]:
                choose(logits)
            return
        token = choose(self.feed(row, tokens, positions)[-1])
        for i in range(2, k + 1):
            token = choose(self.feed(row, [token], [n + i - 2])[-1])

    def draft_len_after(self, n: int, k: int, grown: int) -> int:
        """Return the position where valid draft KV ends after an iteration. The iteration made `k` >= 1 drafts and grew
        the row from `n` to `grown` tokens.

        Neither the last draft nor the last token was fed, so they have no KV. With a mask token the result is `n`: the
        pass has written KV of mask tokens from there on, not of drafts.
        """
        return n if self.mask_token_id is not None else min(grown, n + k) - 1


class HiddenStateDrafter:
    """An EAGLE-3 head (Li et al. 2025) or an MTP head. Position p is fed the target's hidden state of p and the token
    at p + 1."""

    def __init__(
        self, head: Any, kv_cache: KVCache, vocab_size: int, max_model_len: int, *, max_draft_lag: int
    ) -> None:
        """`head` has the members of `Eagle3Head` or `MtpHead`; `vocab_size` is the target's. The target's hidden states
        are kept for at most `max_draft_lag - 1` positions of each row. If a step adds more than fit, the earlier ones
        are dropped."""
        self.head, self.kv_cache, self.vocab_size, self.max_model_len = head, kv_cache, vocab_size, max_model_len
        self.hidden_layers: Sequence[int] = head.aux_layer_ids
        self.num_kept = max_draft_lag - 1
        self._left: list[tuple[Row, list[int], Sequence[int], Tensor]] = []

    def begin_step(self) -> None:
        """Feed the tokens of prompt chunks that the previous step kept for the head. They were deferred so that no
        first token waits for the head."""
        for row, tokens, positions, states in self._left:
            self.feed(row, tokens, positions, self.head.fuse(states), prompts=True)
        self._left = []

    def catch_up(
        self, row: Row, start: int, length: int, positions: Sequence[int], k_start: int, states: Tensor | None
    ) -> None:
        """Keep the target's hidden states `states` for a pass of the head at `positions` in the next step. Mutates
        `row.draft_start`. An empty chunk (`length` 0) restarts the head's KV at position 0."""
        if length == 0:
            row.draft_start = 0
        else:
            self.begin(row, start)
        if positions and states is not None:
            tokens = [row.tokens[position + 1] for position in positions]
            kept = states[[position - start for position in positions]]
            self._left.append((replace(row, tables=row.tables.clone()), tokens, positions, kept))

    def is_ready(self, row: Row) -> bool:
        """Return True. The head can always draft: if KV before the kept hidden states is missing, its KV starts anew
        there."""
        return True

    def begin(self, row: Row, first: int) -> None:
        """Let the row's draft KV begin at position `first` if KV before that position is missing. Mutates
        `row.draft_start`."""
        if row.draft_len < first:
            row.draft_start = first

    def feed(
        self, row: Row, tokens: Sequence[int], positions: Sequence[int], hidden: Tensor, *, prompts: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Run a pass of the head over `tokens` at `positions`, with their states `hidden` `[len(tokens), H]`. Return
        the logits `[V]` of the last row, and its state `[1, H]` for the next pass."""
        inputs = pass_inputs(row, tokens, positions, self.kv_cache.block_size, drafts=True, prompts=prompts)
        recurrent, final = self.head.forward(inputs, hidden, self.kv_cache, inputs.k_start)
        own = self.head.compute_logits(final[-1:])[0]
        return over_target_ids(own, self.head.target_ids, self.vocab_size), recurrent[-1:]

    def draft(self, row: Row, k: int, choose: Choose) -> None:
        """Draw `k` >= 1 drafts for `row`, with one call of `choose` for each. Mutates `row.draft_start`.

        The first pass feeds the row's kept hidden states that have no draft KV yet. Each later pass feeds the previous
        pass's output and the draft drawn from it.
        """
        n = len(row.tokens)
        self.begin(row, row.hidden_start)
        first = max(row.draft_len, row.hidden_start)
        hidden = self.head.fuse(torch.stack(row.hidden[first - row.hidden_start :]))
        logits, left = self.feed(row, row.tokens[first + 1 :], range(first, n - 1), hidden)
        token = choose(logits)
        for i in range(2, k + 1):
            logits, left = self.feed(row, [token], [n + i - 3], left)
            token = choose(logits)

    def draft_len_after(self, n: int, k: int, grown: int) -> int:
        """Return where valid KV of the head ends: n - 1. Drafts' KV does not count, because it comes from no true
        hidden states."""
        return n - 1


def over_target_ids(own: Tensor, target_ids: Tensor, vocab_size: int) -> Tensor:
    """Spread a head's logits `[D]` over the target's `vocab_size` ids. Ids that the head does not draft get a value far
    below all others."""
    logits = torch.full((vocab_size,), float(own.min()) - UNKNOWN_BELOW, dtype=own.dtype)
    logits[target_ids] = own
    return logits
