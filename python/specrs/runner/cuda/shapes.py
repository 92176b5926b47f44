"""The shapes that launches are padded to, so that a handful of graphs serves all of them. Captures nothing."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class Tail(StrEnum):
    """What follows the LM head of a pass."""

    GREEDY = "greedy"  # argmax behind it; no logits are kept
    SAMPLED = "sampled"  # cut and draw, greedy rows among them as point masses
    LOGITS = "logits"  # logits only: masks, penalties, grammars or log probabilities come between


@dataclass(frozen=True, slots=True)
class Shape:
    """A decode iteration of at most `batch` entries, `max_k` drafts each and `rows` flat rows of verification."""

    batch: int
    max_k: int
    rows: int
    tail: Tail
    passes: int | None = None
    """Draft passes; None: one for each draft."""

    @property
    def depth(self) -> int:
        """Draft passes; fewer than `max_k` where the record has the drafts of some entries."""
        return self.max_k if self.passes is None else self.passes


@dataclass(frozen=True, slots=True)
class MergedShape:
    """A decode iteration whose verification has chunks of prompts behind its rows. Their ends are entries of K = 0."""

    decode: Shape
    """The iteration without them, which draft passes and the cut of its attention are of."""
    entries: int
    """Entries that decode, and chunks."""
    chunk_shape: ChunkShape

    @property
    def chunk_rows(self) -> int:
        """Behind those of verification."""
        return self.chunk_shape.rows

    @property
    def verify(self) -> Shape:
        """All entries, and a row of verification for each chunk."""
        more = self.entries - self.decode.batch
        return replace(self.decode, batch=self.entries, rows=self.decode.rows + more)

    @property
    def rows(self) -> int:
        """Of the target's pass."""
        return self.verify.rows + self.chunk_rows


MERGED_ROWS = (32, 64)
"""Rows of a pass with chunks behind verification. Up to 64 its products are those of verification alone, so that no
other text changes; wider ones would be cuBLAS's."""
_LEAST_CHUNK_ROWS = 8
CHUNK_ROWS = (16, 32, 64, 128, 256)
"""Rows of captured passes over chunks. Longer ones take the GPU longer than their kernels take the host."""
CHUNK_SEQS = (1, 8)
"""Chunks of such passes."""


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """A pass over at most `seqs` chunks of prompts or of catching up, `rows` rows in all."""

    rows: int
    seqs: int
    captured: bool = True
    """False: of exactly these numbers, op by op."""


def batch_buckets(max_num_seqs: int, sizes: Sequence[int] | None = None) -> list[int]:
    """Batch sizes that graphs are captured for, ascending: powers of two, and from 16 on the middles between them.

    `sizes` replaces them (those above `max_num_seqs` are dropped); launches beyond the largest run eagerly.
    """
    if sizes is not None:
        return sorted({size for size in sizes if size <= max_num_seqs})
    powers = [1 << i for i in range(max_num_seqs.bit_length())]
    default = powers + [3 * power // 2 for power in powers if power >= 16]
    return sorted({size for size in default if size < max_num_seqs} | {max_num_seqs})


class Buckets:
    """Which shapes there are, and which one a launch takes."""

    def __init__(
        self,
        batches: Sequence[int],
        num_speculative_tokens: int,
        *,
        every_k: bool = False,
        has_passes: bool = True,
        mixes: bool = False,
        in_parallel: bool = False,
        max_chunk_rows: int = 0,
        max_chunks: int = 0,
        merges: int = 0,
    ) -> None:
        """`every_k`: launches of any uniform K are to be expected, not just of 0 and the engine's. `has_passes`: drafts
        are made by passes on the device. `mixes`: of some entries they are, of others the record has them.
        `in_parallel`: one pass makes all. `max_chunk_rows`, `max_chunks`: the most of a pass over chunks; 0: none is
        captured. `merges`: the most chunks that verification has behind its rows."""
        self.has_passes = has_passes
        self.in_parallel = in_parallel
        self.batches = list(batches)
        self.max_k = num_speculative_tokens
        self.whole_ks = list(range(self.max_k, -1, -1)) if every_k else list(dict.fromkeys((self.max_k, 0)))
        # Launches whose drafts are all in the record, as many as texts propose.
        self.host_ks = list(range(self.max_k, 0, -1)) if mixes else []
        # Rows an entry on average: mixed launches, where some draft nothing, take the next larger number.
        width = num_speculative_tokens + 1
        self.chunk_rows = sorted({min(rows, max_chunk_rows) for rows in CHUNK_ROWS if max_chunk_rows})
        self.chunk_seqs = sorted({min(seqs, max_chunks) for seqs in CHUNK_SEQS if max_chunks})
        self.merged_seqs = min(merges, max_chunks)
        self._merged = list(self._merged_shapes(max_chunks, max_chunk_rows)) if self.merged_seqs else []
        self.widths = sorted({1 << i for i in range(width.bit_length()) if 1 << i < width} | {width})

    def batch(self, count: int) -> int | None:
        """The smallest bucket of at least `count` entries; None: beyond all of them."""
        return _at_least(self.batches, count)

    def whole(self, planned: Sequence[int], tail: Tail, depth: int | None = None) -> Shape | None:
        """The whole-iteration graph for entries with these K, descending; None where chained passes are due.

        Whole graphs exist for `whole_ks`, and without passes for `host_ks`. A launch that would leave more than half of
        its verification rows masked runs chained, where rows and passes are cut to what is needed. `depth`: passes that
        it needs; None: one for each draft, where drafts are made by passes.
        """
        batch, k = self.batch(len(planned)), planned[0]
        passes = self._passes(k, depth)
        captured = self.host_ks if self.has_passes and passes == 0 else self.whole_ks
        if batch is None or tail is Tail.LOGITS or k not in captured or passes:
            return None
        rows = batch * (k + 1)
        if k and 2 * (sum(planned) + len(planned)) < len(planned) * (k + 1):
            return None
        return Shape(batch, k, rows, tail, passes)

    def _passes(self, k: int, depth: int | None) -> int | None:
        """`Shape.passes` of a launch that needs `depth` passes."""
        if not self.has_passes:
            return 0
        return None if depth == k else depth

    def chained(self, planned: Sequence[int], tail: Tail, depth: int | None = None) -> Shape | None:
        """The padded shape of a launch that runs pass by pass; None: beyond the buckets."""
        batch = self.batch(len(planned))
        if batch is None:
            return None
        width = _at_least([w * batch for w in self.widths], sum(planned) + len(planned))
        assert width is not None, "no entry has more rows than the widest"
        return Shape(batch, planned[0], width, tail, self._passes(planned[0], depth))

    def exact(self, planned: Sequence[int], tail: Tail, depth: int | None = None) -> Shape:
        """The shape of a launch without padding, for eager execution."""
        rows = sum(planned) + len(planned)
        return Shape(len(planned), planned[0], rows, tail, self._passes(planned[0], depth))

    def merged(self, whole: Shape, count: int, rows: int, chunks: int) -> MergedShape | None:
        """`whole` of `count` entries with `chunks` chunks of `rows` rows in all behind its verification; None: they
        have a pass of their own."""
        fitting = (s for s in self._merged if s.decode == whole and s.chunk_rows >= rows)
        # `entries` is that of the bucket and some more, or all that there may be.
        return next((s for s in fitting if count + chunks <= s.entries and chunks <= self.merged_seqs), None)

    def merged_shapes(self) -> Iterator[MergedShape]:
        """Every whole graph with chunks, largest first."""
        yield from sorted(self._merged, key=lambda shape: -shape.rows)

    def _merged_shapes(self, max_num_seqs: int, max_rows: int) -> Iterator[MergedShape]:
        for batch in self.batches:
            for k in dict.fromkeys((self.max_k, 0)):
                for tail in (Tail.SAMPLED, Tail.GREEDY):
                    alone = Shape(batch, k, batch * (k + 1), tail, self._passes(k, None))
                    none = ChunkShape(0, self.merged_seqs)
                    behind = MergedShape(alone, min(batch + self.merged_seqs, max_num_seqs), none)
                    for total in MERGED_ROWS:
                        rows = min(total - behind.rows, max_rows)
                        if rows >= _LEAST_CHUNK_ROWS:
                            yield replace(behind, chunk_shape=replace(none, rows=rows))

    def chunks(self, rows: int, seqs: int) -> ChunkShape | None:
        """The smallest captured pass over `seqs` chunks of `rows` rows in all; None: beyond all of them."""
        most, count = _at_least(self.chunk_rows, rows), _at_least(self.chunk_seqs, seqs)
        return None if most is None or count is None else ChunkShape(most, count)

    def chunk_shapes(self) -> Iterator[ChunkShape]:
        """Every captured pass over chunks, largest first."""
        for rows in reversed(self.chunk_rows):
            for seqs in reversed(self.chunk_seqs):
                yield ChunkShape(rows, seqs)

    def whole_shapes(self) -> Iterator[Shape]:
        """Every whole graph, largest first."""
        for batch in reversed(self.batches):
            of_passes = [(k, self._passes(k, None)) for k in self.whole_ks]
            for k, passes in sorted(of_passes + [(k, 0) for k in self.host_ks], key=lambda kind: -kind[0]):
                for tail in (Tail.SAMPLED, Tail.GREEDY):
                    yield Shape(batch, k, batch * (k + 1), tail, passes)

    def draft_passes(self) -> Iterator[tuple[int, int, Tail]]:
        """`(batch, pass, tail)` of every chained draft pass, largest first."""
        for batch in reversed(self.batches if self.has_passes else []):
            for i in range(1, (min(1, self.max_k) if self.in_parallel else self.max_k) + 1):
                for tail in Tail:
                    yield batch, i, tail

    def verify_passes(self) -> Iterator[tuple[int, int, bool]]:
        """`(batch, rows, greedy)` of every chained verification, largest first."""
        for batch in reversed(self.batches):
            for width in reversed(self.widths):
                for greedy in (False, True):
                    yield batch, batch * width, greedy


def _at_least(sizes: Sequence[int], count: int) -> int | None:
    at = bisect_left(sizes, count)
    return sizes[at] if at < len(sizes) else None
