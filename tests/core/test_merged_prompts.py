"""Prompts next to decoding requests, cut to what a GPU's verification passes have room for: each chunk fits into a
captured graph, and by the roofline's times of an H200 the throughput rises."""

from __future__ import annotations

import pytest
from closed_loop import simulate
from specrs.backends.cuda.shapes import FUSED_ROWS, MERGED_CHUNKS, Buckets, MergedShape, Shape


@pytest.mark.parametrize(
    ("concurrency", "k", "gain"), [(8, 0, 1.01), (16, 0, 1.02), (32, 0, 1.0), (4, 5, 0.98), (8, 5, 0.98)]
)
def test_cut_prompts_raise_the_throughput(concurrency: int, k: int, gain: float) -> None:
    without, cut = (simulate(concurrency, k, rooms=rooms, spread=60) for rooms in (False, True))
    assert cut.tokens_per_s >= 0.995 * gain * without.tokens_per_s, f"{cut} after {without}"
    assert cut.merged >= without.merged
    assert cut.ttft_ms < without.ttft_ms + 4 * 35, "a prompt is spread over four steps at most"


def check_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each choice of a graph fail if a step with a room for its chunks has none, or one with too few rows."""
    merged = Buckets.merged

    def checked(self: Buckets, whole: Shape, count: int, rows: int, chunks: int) -> MergedShape | None:
        found = merged(self, whole, count, rows, chunks)
        rooms = {(drafts, seqs): tokens for drafts, seqs, tokens in self.merged_rooms()}
        room = rooms.get((whole.max_k, whole.batch))
        if room is not None and rows <= room + 1 and chunks <= MERGED_CHUNKS:
            assert found is not None, f"{rows} rows of {chunks} chunks next to {whole}"
            assert found.rows <= FUSED_ROWS
        assert found is None or found.chunk_rows >= rows, f"{found} drops the last of {rows} rows"
        return found

    monkeypatch.setattr(Buckets, "merged", checked)


@pytest.mark.parametrize(("concurrency", "k"), [(3, 0), (16, 0), (40, 0), (2, 5), (7, 5)])
def test_every_chunk_that_is_cut_fits(concurrency: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler's table against the choice of graphs: a step with a room for its chunks has a graph for them. A
    table that is off by one row is found."""
    check_graphs(monkeypatch)
    assert simulate(concurrency, k, rooms=True, spread=100).merged > concurrency
    with pytest.raises(AssertionError, match=r"rows of \d chunks next to"):
        simulate(concurrency, k, rooms=True, spread=100, shift=1)


@pytest.mark.parametrize(("concurrency", "k"), [(16, 0), (40, 2)])
def test_a_bucket_that_drops_the_last_chunk_row_is_seen(
    concurrency: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a graph with one row too few for its chunks is found, in narrow and in wide passes."""
    merged = Buckets.merged
    monkeypatch.setattr(
        Buckets, "merged", lambda self, whole, count, rows, chunks: merged(self, whole, count, rows - 1, chunks)
    )
    check_graphs(monkeypatch)
    with pytest.raises(AssertionError, match="drops the last of"):
        simulate(concurrency, k, rooms=True, spread=100, shift=1)
