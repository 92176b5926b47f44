"""Prompts next to decoding requests, cut to what a GPU's verification passes have room for: each chunk fits into a
captured graph, and by the roofline's times of an H200 the throughput rises."""

from __future__ import annotations

import pytest
from closed_loop import simulate
from specrs.backends.cuda.shapes import MERGED_CHUNKS, Buckets, MergedShape, Shape


@pytest.mark.parametrize(
    ("concurrency", "k", "gain"),
    [
        (8, 0, 1.02),
        (16, 0, 1.05),
        (32, 0, 1.08),
        (64, 0, 1.1),
        (4, 5, 1.01),
        (8, 5, 1.02),
        (16, 3, 1.06),
        (64, 2, 1.08),
    ],
)
def test_prompts_that_ride_raise_the_throughput(concurrency: int, k: int, gain: float) -> None:
    """Compare an engine whose prompts have passes of their own, one whose scheduler cuts none, and one that cuts
    them."""
    alone, uncut, cut = (
        simulate(concurrency, k, rooms=rooms, merges=merges, spread=60, output_spread=100)
        for rooms, merges in ((False, False), (False, True), (True, True))
    )
    assert cut.tokens_per_s > gain * alone.tokens_per_s, f"{cut} after {alone}"
    assert cut.tokens_per_s > 0.99 * uncut.tokens_per_s, f"{cut} after {uncut}"
    assert cut.alone < 0.02 * cut.merged
    assert cut.ttft_ms < alone.ttft_ms + 2 * 35, "a usual prompt takes two steps at most, and waits for one"


@pytest.mark.parametrize("concurrency", [64, 256])
def test_short_prompts_do_not_wait_for_rooms(concurrency: int) -> None:
    """Check that more requests a step than ride in a pass do not wait longer than their own pass costs them: prompts
    and outputs of 20 tokens."""
    uncut, cut = (
        simulate(concurrency, 0, rooms=rooms, prompt=20, output=20, spread=8, output_spread=10)
        for rooms in (False, True)
    )
    assert cut.tokens_per_s > uncut.tokens_per_s
    assert cut.ttft_ms < uncut.ttft_ms + 2 * 35


def check_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each choice of a graph fail if a step with a room for its chunks has none, or one with too few rows."""
    merged = Buckets.merged

    def checked(self: Buckets, whole: Shape, count: int, rows: int, chunks: int) -> MergedShape | None:
        found = merged(self, whole, count, rows, chunks)
        rooms = [(seqs, tokens) for drafts, seqs, tokens in self.merged_rooms() if drafts == whole.max_k]
        seqs = next((seqs for seqs, _ in rooms if seqs >= count), None)
        room = max((tokens for own, tokens in rooms if own == seqs), default=0)
        if room and rows <= room + 1 and chunks <= MERGED_CHUNKS:
            assert found is not None, f"{rows} rows of {chunks} chunks next to {whole}"
        assert found is None or found.chunk_rows >= rows, f"{found} drops the last of {rows} rows"
        return found

    monkeypatch.setattr(Buckets, "merged", checked)


@pytest.mark.parametrize(("concurrency", "k"), [(3, 0), (16, 0), (40, 0), (2, 5), (7, 5)])
def test_every_chunk_that_is_cut_fits(concurrency: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler's table against the choice of graphs: a step with a room for its chunks has a graph for them, and
    chunks that fill a room fill a graph. A table that is off by one row is found."""
    check_graphs(monkeypatch)
    merged, filled = Buckets.merged, list[bool]()

    def counted(self: Buckets, whole: Shape, count: int, rows: int, chunks: int) -> MergedShape | None:
        found = merged(self, whole, count, rows, chunks)
        filled.append(found is not None and found.chunk_rows == rows)
        return found

    monkeypatch.setattr(Buckets, "merged", counted)
    assert simulate(concurrency, k, rooms=True, spread=100).merged > concurrency
    assert sum(filled) > 0.2 * len(filled), f"{sum(filled)} of {len(filled)}"
    filled.clear()
    simulate(concurrency, k, rooms=True, spread=100, shift=1)
    assert sum(filled) < 0.05 * len(filled), f"{sum(filled)} of {len(filled)}"


@pytest.mark.parametrize(("concurrency", "k"), [(16, 0), (40, 2)])
def test_a_bucket_that_drops_the_last_chunk_row_is_seen(
    concurrency: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a graph with one row too few for its chunks is found."""
    merged = Buckets.merged
    monkeypatch.setattr(
        Buckets, "merged", lambda self, whole, count, rows, chunks: merged(self, whole, count, rows - 1, chunks)
    )
    check_graphs(monkeypatch)
    with pytest.raises(AssertionError, match="drops the last of"):
        simulate(concurrency, k, rooms=True, spread=100, shift=1)
