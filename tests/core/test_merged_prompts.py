"""Prompts next to decoding requests, cut to what a GPU's verification passes have room for: each chunk fits into a
captured graph, and by the roofline's times of an H200 the throughput rises."""

from __future__ import annotations

import pytest
from closed_loop import simulate
from specrs.backends.cuda.shapes import FUSED_ROWS, MERGED_CHUNKS, Buckets


@pytest.mark.parametrize(
    ("concurrency", "k", "gain"), [(8, 0, 1.01), (16, 0, 1.02), (32, 0, 1.0), (4, 5, 0.98), (8, 5, 0.98)]
)
def test_cut_prompts_raise_the_throughput(concurrency: int, k: int, gain: float) -> None:
    without, cut = (simulate(concurrency, k, rooms=rooms, spread=60) for rooms in (False, True))
    assert cut.tokens_per_s >= 0.995 * gain * without.tokens_per_s, f"{cut} after {without}"
    assert cut.merged >= without.merged
    assert cut.ttft_ms < without.ttft_ms + 4 * 35, "a prompt is spread over four steps at most"


@pytest.mark.parametrize(("concurrency", "k"), [(3, 0), (16, 0), (40, 0), (2, 5), (7, 5)])
def test_every_chunk_that_is_cut_fits(concurrency: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler's table against the choice of graphs: a step with a room for its chunks has a graph for them. A
    table that is off by one row is found."""
    merged = Buckets.merged

    def checked(self: Buckets, whole: object, count: int, rows: int, chunks: int) -> object:
        found = merged(self, whole, count, rows, chunks)  # type: ignore[arg-type]
        rooms = {(drafts, seqs): tokens for drafts, seqs, tokens in self.merged_rooms()}
        room = rooms.get((whole.max_k, whole.batch))  # type: ignore[attr-defined]
        if room is not None and rows <= room + 1 and chunks <= MERGED_CHUNKS:
            assert found is not None, f"{rows} rows of {chunks} chunks next to {whole}"
            assert found.rows <= FUSED_ROWS
        return found

    monkeypatch.setattr(Buckets, "merged", checked)
    assert simulate(concurrency, k, rooms=True, spread=100).merged > concurrency
    with pytest.raises(AssertionError, match=r"rows of \d chunks next to"):
        simulate(concurrency, k, rooms=True, spread=100, shift=1)
