"""Shapes to which steps are padded, so that few CUDA graphs serve all of them. Captures nothing."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise


class LogitsMode(StrEnum):
    """Work after the LM head of a pass: argmax, sampling, or logits alone for later processing."""

    GREEDY = "greedy"  # argmax; logits are not stored
    SAMPLED = "sampled"  # filter and draw; greedy rows are point masses
    LOGITS = "logits"  # logits only: masks, penalties, grammars or log probabilities come before sampling


@dataclass(frozen=True, slots=True)
class Shape:
    """A decode iteration of at most `batch` sequences, with up to `max_k` drafts each and `rows` flat rows of
    verification."""

    batch: int
    max_k: int
    rows: int
    logits_mode: LogitsMode
    passes: int | None = None
    """Number of draft passes. None: one per draft."""

    @property
    def depth(self) -> int:
        """Number of draft passes. Less than `max_k` if the record has the drafts of some sequences."""
        return self.max_k if self.passes is None else self.passes


@dataclass(frozen=True, slots=True)
class MergedShape:
    """A decode iteration whose verification pass also has prompt chunks, after its own rows. Ends of prompts are
    sequences with K = 0."""

    decode: Shape
    """The iteration without prompt chunks. It fixes the draft passes and how attention is split."""
    num_seqs: int
    """Number of sequences: decoding ones plus prompt chunks."""
    chunk_shape: ChunkShape
    """Shape of the prompt chunks."""

    @property
    def chunk_rows(self) -> int:
        """Number of rows of prompt chunks."""
        return self.chunk_shape.rows

    @property
    def verify(self) -> Shape:
        """The iteration with one more row of verification for each chunk."""
        more = self.num_seqs - self.decode.batch
        return replace(self.decode, batch=self.num_seqs, rows=self.decode.rows + more)

    @property
    def rows(self) -> int:
        """Number of rows of the target's pass."""
        return self.verify.rows + self.chunk_rows


@dataclass(frozen=True, slots=True)
class MergedRows:
    """Numbers of rows of verification passes with prompt chunks."""

    totals: Sequence[int]
    """Numbers of rows in all, ascending, one of which each pass has."""
    more: Sequence[int]
    """Numbers of rows that passes have at least more than their verification, ascending. They include the last rows of
    prompts that end."""


MERGED_ROWS = MergedRows((64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768), (48, 160))
"""For a target whose weights are read once in a pass, with room for a part of a prompt and for a usual one."""
TILED_MERGED_ROWS = MergedRows((64, 128, 192, 256), (24, 88))
"""For a target whose weights are read once for every 64 rows. More than 256 rows would dequantize them."""
_LEAST_CHUNK_ROWS = 8
"""Least number of rows that a merged shape must leave for chunks."""
MERGED_CHUNKS = 4
"""Largest number of prompt chunks in a verification pass."""
MERGED_STEPS = 4
"""Maximum number of steps over which prompts are spread so that their chunks fit into verification passes. More steps
save little, and delay a prompt's first token."""
CHUNK_ROWS = (16, 32, 64, 96, 128, 160, 192, 256)
"""Numbers of rows of captured passes over chunks. In longer passes the GPU takes longer than the host, so a graph gains
nothing."""
CHUNK_SEQS = (1, 8)
"""Numbers of prompt chunks for which passes are captured; others are padded to the next one."""
MAX_CAPTURED_ROWS = max(CHUNK_ROWS[-1], MERGED_ROWS.totals[-1])
"""Largest number of rows of chunks in a captured pass."""


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """A pass over at most `seqs` prompt chunks or catch-up chunks, with at most `rows` rows in total."""

    rows: int
    seqs: int
    captured: bool = True
    """False: the pass is not padded, and runs op by op."""


def batch_buckets(max_num_seqs: int, sizes: Sequence[int] | None = None) -> list[int]:
    """Return the batch sizes for which whole iterations are captured, ascending: 1, 2, 4, then steps of 8 to 64, of 16
    to 256, and from there on those of `coarse_buckets`.

    `sizes` replaces them; sizes above `max_num_seqs` are dropped. Steps beyond the largest size run eagerly.
    """
    if sizes is not None:
        return sorted({size for size in sizes if size <= max_num_seqs})
    fine = {1, 2, 4, *range(8, 64, 8), *range(64, 257, 16)}
    return sorted({size for size in fine if size < max_num_seqs} | set(coarse_buckets(max_num_seqs)))


def coarse_buckets(max_num_seqs: int) -> list[int]:
    """Return powers of two below `max_num_seqs`, from 16 on the values halfway between, and `max_num_seqs`,
    ascending."""
    powers = [1 << i for i in range(max_num_seqs.bit_length())]
    default = powers + [3 * power // 2 for power in powers if power >= 16]
    return sorted({size for size in default if size < max_num_seqs} | {max_num_seqs})


class Buckets:
    """The shapes of an engine, and the choice of a shape for each step."""

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
        merged_rows: MergedRows = MERGED_ROWS,
    ) -> None:
        """
        Args:
            batches: batch sizes, ascending.
            num_speculative_tokens: the engine's K.
            every_k: capture each uniform K, not only 0 and the engine's.
            has_passes: passes on the device make drafts.
            mixes: in one step, the host may draft for some sequences (in the record), and passes for others.
            in_parallel: one pass makes all drafts.
            max_chunk_rows: largest number of rows of a pass over chunks. 0: none is captured.
            max_chunks: largest number of chunks of such a pass.
            merges: largest number of prompt chunks in a verification pass.
            merged_rows: numbers of rows of such passes.
        """
        self.has_passes = has_passes
        self.in_parallel = in_parallel
        self.batches = list(batches)
        self.max_k = num_speculative_tokens
        self.whole_ks = list(range(self.max_k, -1, -1)) if every_k else list(dict.fromkeys((self.max_k, 0)))
        # For steps whose drafts are all in the record. Texts decide how many.
        self.host_ks = list(range(self.max_k, 0, -1)) if mixes else []
        # Few steps run pass by pass, and each draft pass has graphs of its own, so half as many sizes do.
        fine = bool(self.batches) and self.batches == batch_buckets(self.batches[-1])
        self.chained_batches = coarse_buckets(self.batches[-1]) if fine else self.batches
        self.chunk_rows = sorted({min(rows, max_chunk_rows) for rows in CHUNK_ROWS if max_chunk_rows})
        self.chunk_seqs = sorted({min(seqs, max_chunks) for seqs in CHUNK_SEQS if max_chunks})
        self.merged_seqs, self.merged_rows = min(merges, max_chunks), merged_rows
        self._mixes = mixes and has_passes
        self._merged: dict[tuple[int, LogitsMode, int | None], list[MergedShape]] = defaultdict(list)
        if self.merged_seqs:
            for merged in self._merged_shapes(max_chunks, max_chunk_rows):
                self._merged[_kind(merged.decode)].append(merged)
        # Average rows per sequence. Steps in which some sequences draft less take the next larger number.
        self.widths = _widths(num_speculative_tokens + 1)

    def batch(self, count: int) -> int | None:
        """Return the smallest batch size of at least `count`; None if all are smaller."""
        return _at_least(self.batches, count)

    def chained_batch(self, count: int) -> int | None:
        """Return the smallest batch size of single passes of at least `count`; None if all are smaller."""
        return _at_least(self.chained_batches, count)

    def whole(self, planned: Sequence[int], logits_mode: LogitsMode, depth: int | None = None) -> Shape | None:
        """Return the shape of the whole-iteration graph for sequences with `planned` drafts, descending; None: run
        chained passes.

        Whole graphs exist for each K in `whole_ks`, and without draft passes in `host_ks`. A step that would leave more
        than half of its verification rows masked runs chained, because that needs fewer rows and passes. `depth` is the
        number of draft passes that the step needs; None: one per draft if the device makes drafts.
        """
        batch, k = self.batch(len(planned)), planned[0]
        passes = self._passes(k, depth)
        captured = self.host_ks if self.has_passes and passes == 0 else self.whole_ks
        if batch is None or logits_mode is LogitsMode.LOGITS or k not in captured or passes:
            return None
        rows = batch * (k + 1)
        if k and 2 * (sum(planned) + len(planned)) < len(planned) * (k + 1):
            return None
        return Shape(batch, k, rows, logits_mode, passes)

    def _passes(self, k: int, depth: int | None) -> int | None:
        """Return `Shape.passes` of a step with k drafts that needs `depth` passes."""
        if not self.has_passes:
            return 0
        return None if depth == k else depth

    def chained(self, planned: Sequence[int], logits_mode: LogitsMode, depth: int | None = None) -> Shape | None:
        """Return the padded shape of a step that runs pass by pass; None if its batch is larger than all sizes."""
        batch = self.chained_batch(len(planned))
        if batch is None:
            return None
        width = _at_least([w * batch for w in self.widths], sum(planned) + len(planned))
        assert width is not None, "no sequence has more rows than the widest"
        return Shape(batch, planned[0], width, logits_mode, self._passes(planned[0], depth))

    def exact(self, planned: Sequence[int], logits_mode: LogitsMode, depth: int | None = None) -> Shape:
        """Return the shape of a step without padding, for eager execution."""
        rows = sum(planned) + len(planned)
        return Shape(len(planned), planned[0], rows, logits_mode, self._passes(planned[0], depth))

    def merged(self, whole: Shape, count: int, rows: int, chunks: int) -> MergedShape | None:
        """Return the shape of `whole`, for `count` sequences, with `chunks` prompt chunks of `rows` rows in total in
        its verification pass. None: they do not fit and need their own pass.

        The shape may have a larger batch.
        """
        if chunks > self.merged_seqs:
            return None
        # A shape has room for its batch and some chunks, but for no more than max_num_seqs sequences.
        room = (s for s in self._merged[_kind(whole)] if s.chunk_rows >= rows and count + chunks <= s.num_seqs)
        fitting = (s for s in room if s.decode.batch >= whole.batch)
        return min(fitting, key=lambda shape: (shape.rows, shape.decode.batch), default=None)

    def merged_shapes(self) -> Iterator[MergedShape]:
        """Yield every whole graph with prompt chunks, largest first."""
        every = (shape for shapes in self._merged.values() for shape in shapes)
        yield from sorted(every, key=lambda shape: (-shape.rows, -shape.decode.batch))

    def merged_rooms(self) -> list[tuple[int, int, int]]:
        """Return `(drafts, sequences, tokens)`, ascending: numbers of prompt tokens for which there are verification
        passes of so many sequences with so many drafts each.

        Where the record may have the drafts of some sequences, only steps without drafts have rooms, because steps
        that mix both kinds run pass by pass.
        """
        shapes = (s for s in self.merged_shapes() if not (self._mixes and s.decode.max_k))
        return sorted({(s.decode.max_k, s.decode.batch, s.chunk_rows) for s in shapes})

    def _merged_shapes(self, max_num_seqs: int, max_rows: int) -> Iterator[MergedShape]:
        """Yield the whole graphs with prompt chunks."""
        for smaller, batch in pairwise([0, *self.chained_batches]):
            seqs = min(batch + self.merged_seqs, max_num_seqs)
            if smaller + 1 == seqs:
                continue  # steps that are padded to this batch have all requests, and no prompt
            for k in self.whole_ks:
                rows = batch * (k + 1)
                totals = (_at_least(self.merged_rows.totals, rows + more) for more in self.merged_rows.more)
                rooms = {min(total - rows - (seqs - batch), max_rows) for total in totals if total is not None}
                for logits_mode in (LogitsMode.SAMPLED, LogitsMode.GREEDY):
                    alone = Shape(batch, k, rows, logits_mode, self._passes(k, None))
                    for room in sorted(room for room in rooms if room >= _LEAST_CHUNK_ROWS):
                        yield MergedShape(alone, seqs, ChunkShape(room, self.merged_seqs))

    def chunks(self, rows: int, seqs: int) -> ChunkShape | None:
        """Return the smallest captured pass over `seqs` chunks of `rows` rows in total; None if all are smaller."""
        most, count = _at_least(self.chunk_rows, rows), _at_least(self.chunk_seqs, seqs)
        return None if most is None or count is None else ChunkShape(most, count)

    def chunk_shapes(self) -> Iterator[ChunkShape]:
        """Yield every captured pass over chunks, largest first."""
        for rows in reversed(self.chunk_rows):
            for seqs in reversed(self.chunk_seqs):
                yield ChunkShape(rows, seqs)

    def whole_shapes(self) -> Iterator[Shape]:
        """Yield the shape of every graph of a whole iteration, largest first."""
        for batch in reversed(self.batches):
            of_passes = [(k, self._passes(k, None)) for k in self.whole_ks]
            for k, passes in sorted(of_passes + [(k, 0) for k in self.host_ks], key=lambda kind: -kind[0]):
                for logits_mode in (LogitsMode.SAMPLED, LogitsMode.GREEDY):
                    yield Shape(batch, k, batch * (k + 1), logits_mode, passes)

    def draft_passes(self) -> Iterator[tuple[int, int, LogitsMode]]:
        """Yield `(batch, pass, logits_mode)` of every chained draft pass, largest first."""
        for batch in reversed(self.chained_batches if self.has_passes else []):
            for i in range(1, (min(1, self.max_k) if self.in_parallel else self.max_k) + 1):
                for logits_mode in LogitsMode:
                    yield batch, i, logits_mode

    def verify_passes(self) -> Iterator[tuple[int, int, bool]]:
        """Yield `(batch, rows, greedy)` of every chained verification pass, largest first."""
        for batch in reversed(self.chained_batches):
            for width in reversed(self.widths):
                for greedy in (False, True):
                    yield batch, batch * width, greedy


def _kind(shape: Shape) -> tuple[int, LogitsMode, int | None]:
    """Return the part of a shape that a merged shape of a larger batch must have, too."""
    return shape.max_k, shape.logits_mode, shape.passes


def _widths(most: int) -> list[int]:
    """Return 1 and `most`, and between them halves of `most` down to 3, ascending."""
    found = {1, most}
    while most > 3:
        most = (most + 1) // 2
        found.add(most)
    return sorted(found)


def _at_least(sizes: Sequence[int], count: int) -> int | None:
    at = bisect_left(sizes, count)
    return sizes[at] if at < len(sizes) else None
