"""Vocabulary split over ranks: their exchanges for embeddings, logits and argmaxes. Computes no product.

It writes into persistent buffers, allocates nothing and never waits on the host, so passes with it can be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specrs.parallel.ranks import Ranks


@dataclass(frozen=True, slots=True)
class EmbeddingParts:
    """Look-up in an embedding that is split over ranks by ids. Every rank holds equally many consecutive ids, in the
    order of ranks."""

    ranks: Ranks
    count: int
    """Number of ids per rank."""
    own: Tensor
    """[max_rows] int64, ids relative to this rank's first id."""
    held: Tensor
    """[max_rows] int64, `own` clamped to the ids that this rank has."""
    elsewhere: Tensor
    """[max_rows] bool, true if another rank has the id."""

    @classmethod
    def allocate(cls, ranks: Ranks, embedding: Tensor, max_rows: int) -> EmbeddingParts:
        """Return buffers for passes of at most `max_rows` rows. `embedding` is this rank's part."""
        own = torch.zeros(max_rows, dtype=torch.int64, device=embedding.device)
        elsewhere = torch.zeros(max_rows, dtype=torch.bool, device=embedding.device)
        return cls(ranks, len(embedding), own, torch.zeros_like(own), elsewhere)

    def embed(self, ids: Tensor, out: Tensor, write: Callable[[Tensor, Tensor], None]) -> None:
        """Write the embedding of `ids` `[N]` into `out` `[N, hidden]`.

        `write(ids, out)` looks up this rank's part; its ids are relative to the rank's first id.
        """
        rows, part = len(ids), self.ranks.exchanges.part(out)
        own, held, elsewhere = self.own[:rows], self.held[:rows], self.elsewhere[:rows]
        torch.sub(ids, self.ranks.rank * self.count, out=own)
        torch.clamp(own, 0, self.count - 1, out=held)
        torch.ne(own, held, out=elsewhere)
        write(held, part)
        part.masked_fill_(elsewhere[:, None], 0)  # only one rank adds a row that is not zero, so the sum is exact
        self.ranks.exchanges.sum(out)


@dataclass(frozen=True, slots=True)
class LogitsParts:
    """Logits split by columns: every rank has the same number, in order of ranks. Columns after the last id are
    zero."""

    ranks: Ranks
    vocab_size: int
    count: int
    """Number of ids per rank."""
    part: Tensor
    """[rows, count] fp32, this rank's logits. `rows` is the number of rows that are exchanged at once."""
    parts: Tensor
    """[size, rows, count] fp32, the logits of all ranks."""
    best: Tensor
    """[2 * most] int64: this rank's best id of each of at most `most` rows, then their logits, stored as fp32."""
    bests: Tensor
    """[size * 2 * most] int64, `best` of all ranks."""
    worse: Tensor
    """[most] bool, true for rows in which a rank's best logit is not the largest."""

    @classmethod
    def allocate(cls, ranks: Ranks, lm_head: Tensor, vocab_size: int, rows: int, most: int) -> LogitsParts:
        """Return buffers for logits of `rows` rows at once and argmaxes of at most `most` rows. `lm_head` is this
        rank's part."""
        device, count = lm_head.device, len(lm_head)

        def buffer(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            ranks,
            vocab_size,
            count,
            part=buffer(rows, count, dtype=torch.float32),
            parts=buffer(ranks.size, rows, count, dtype=torch.float32),
            best=buffer(2 * most, dtype=torch.int64),
            bests=buffer(ranks.size * 2 * most, dtype=torch.int64),
            worse=buffer(most, dtype=torch.bool),
        )

    @property
    def tensors(self) -> list[Tensor]:
        """Return all buffers as a list."""
        return [self.part, self.parts, self.best, self.bests, self.worse]

    def write_logits(self, hidden: Tensor, out: Tensor, write: Callable[[Tensor, Tensor], None]) -> None:
        """Write the logits of `hidden` `[N, hidden]` for the first ids into `out` `[N, ids]`.

        `write(hidden, part)` writes this rank's logits.
        """
        step = len(self.part)
        for begin in range(0, len(hidden), step):
            rows = min(step, len(hidden) - begin)
            part, target = self.part[:rows], out[begin : begin + rows]
            parts = self.parts.view(-1)[: self.ranks.size * part.numel()].view(self.ranks.size, rows, self.count)
            write(hidden[begin : begin + rows], part)
            self.ranks.exchanges.gather(part, parts)
            for rank, found in enumerate(parts.unbind(0)):
                columns = target[:, rank * self.count : (rank + 1) * self.count]
                if columns.shape[1]:
                    columns.copy_(found[:, : columns.shape[1]])

    def write_argmax(
        self, ids: Tensor, top: Tensor, num_ids: int | None, write: Callable[[int, tuple[Tensor, Tensor]], None]
    ) -> None:
        """Write the most probable of the first `num_ids` ids (None: of all) into `ids` `[L]` int64, and its logit into
        `top` `[L]` fp32. The lowest id wins a tie, whichever rank has it. The logit is NaN if a rank's is.

        `write(held, best)` writes this rank's best among its first `held` ids.
        """
        rows, size, first = len(ids), self.ranks.size, self.ranks.rank * self.count
        best = self.best[: 2 * rows].view(2, rows)
        own_ids, own_top = best[0], best[1].view(torch.float32)[:rows]
        held = min(self.count, (self.vocab_size if num_ids is None else num_ids) - first)
        if held > 0:
            write(held, (own_ids, own_top))
        else:  # the last ranks may have only rows of zeros
            own_ids.zero_()
            own_top.fill_(-torch.inf)
        own_ids.add_(first)
        bests = self.bests[: size * 2 * rows].view(size, 2, rows)
        self.ranks.exchanges.gather(best, bests)
        tops, worse = bests[:, 1].view(torch.float32)[:, :rows], self.worse[:rows]
        top.copy_(tops[0])
        for other in tops[1:].unbind(0):
            torch.maximum(top, other, out=top)
        ids.fill_(self.vocab_size - 1)
        for rank in range(size):
            found = bests[rank, 0]
            torch.ne(tops[rank], top, out=worse)
            found.masked_fill_(worse, self.vocab_size - 1)
            torch.minimum(ids, found, out=ids)
