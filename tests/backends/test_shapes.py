"""The graph that a step takes: large enough, captured, and not mostly padding."""

import contextlib
import gc
import itertools
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specrs.backends.cuda import graphs
from specrs.backends.cuda.shapes import (
    MERGED_CHUNKS,
    MERGED_ROWS,
    TILED_MERGED_ROWS,
    Buckets,
    LogitsMode,
    Shape,
    batch_buckets,
)


@st.composite
def steps(draw: st.DrawFn) -> tuple[Buckets, list[int], LogitsMode]:
    """Draw an engine's graph sizes, the K of a step's sequences in descending order, and the logits mode."""
    max_k = draw(st.integers(0, 16))
    max_num_seqs = draw(st.integers(1, 300))
    buckets = Buckets(batch_buckets(max_num_seqs), max_k, every_k=draw(st.booleans()))
    any_k = st.integers(0, max_k)
    same, few_draft = st.just(draw(any_k)), st.sampled_from([0, 0, 0, draw(any_k)])
    planned = draw(
        st.lists(draw(st.sampled_from([any_k, same, few_draft])), min_size=1, max_size=min(max_num_seqs, 40))
    )
    return buckets, sorted(planned, reverse=True), draw(st.sampled_from(LogitsMode))


@given(steps())
def test_a_whole_graph_is_captured_and_holds_the_step(step: tuple[Buckets, list[int], LogitsMode]) -> None:
    buckets, planned, logits_mode = step
    shape = buckets.whole(planned, logits_mode)
    count, k, rows = len(planned), planned[0], sum(planned) + len(planned)
    if logits_mode is LogitsMode.LOGITS:
        assert shape is None
    elif set(planned) <= {0} or set(planned) == {buckets.max_k} or (buckets.whole_ks[1:-1] and len(set(planned)) == 1):
        assert shape is not None, "all draft the same"
    if shape is not None:
        assert shape in set(buckets.whole_shapes())
        assert (shape.max_k, shape.logits_mode, shape.rows) == (k, logits_mode, shape.batch * (k + 1))
        assert shape.batch >= count
        assert 2 * rows >= count * (k + 1), "mostly masked rows"


@given(steps())
def test_chained_passes_are_captured_and_hold_the_step(step: tuple[Buckets, list[int], LogitsMode]) -> None:
    buckets, planned, logits_mode = step
    shape = buckets.chained(planned, logits_mode)
    assert shape is not None
    count, rows = len(planned), sum(planned) + len(planned)
    assert shape.batch >= count
    assert shape.rows >= rows
    assert (shape.max_k, shape.logits_mode) == (planned[0], logits_mode)
    assert (shape.batch, shape.rows, logits_mode is LogitsMode.GREEDY) in set(buckets.verify_passes())
    passes = set(buckets.draft_passes())
    for i in range(1, shape.max_k + 1):
        assert (buckets.chained_batch(sum(k >= i for k in planned)), i, logits_mode) in passes
    assert buckets.exact(planned, logits_mode) == Shape(count, planned[0], rows, logits_mode)


@given(st.integers(1, 2000))
def test_batches_end_at_the_most_and_waste_less_than_half(max_num_seqs: int) -> None:
    sizes = batch_buckets(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, max_num_seqs)
    assert all(b <= 2 * a for a, b in itertools.pairwise(sizes))


def test_captures_go_from_the_largest_down() -> None:
    every = Buckets([1, 4], 2, every_k=True)
    assert [(s.batch, s.max_k) for s in every.whole_shapes() if s.logits_mode is LogitsMode.GREEDY] == [
        (4, 2), (4, 1), (4, 0), (1, 2), (1, 1), (1, 0)
    ]  # fmt: skip
    assert not list(Buckets([1], 3, has_passes=False).draft_passes())
    assert {s.max_k for s in Buckets([1], 3).whole_shapes()} == {0, 3}
    assert {s.max_k for s in Buckets([1], 0).whole_shapes()} == {0}


@given(
    batch=st.integers(1, 12),
    k=st.sampled_from([0, 5]),
    rows=st.integers(1, 70),
    chunks=st.integers(1, 6),
    max_num_seqs=st.sampled_from([1, 5, 256]),
)
def test_chunks_after_verification(batch: int, k: int, rows: int, chunks: int, max_num_seqs: int) -> None:
    batches = batch_buckets(max_num_seqs)
    buckets = Buckets(batches, 5, max_chunk_rows=512, max_chunks=max_num_seqs, merges=4)
    whole = buckets.whole([k] * batch, LogitsMode.GREEDY) if batch + chunks <= max_num_seqs else None
    if whole is None or rows < chunks:
        return
    shape = buckets.merged(whole, batch, rows, chunks)
    if shape is None:
        # A pass has at least 160 rows more than the verification of its batch, which is padded once more.
        assert chunks > 4 or rows > 156 or max_num_seqs < 256
        return
    assert shape in set(buckets.merged_shapes())
    coarse = min(size for size in buckets.chained_batches if size >= batch)
    assert shape.decode.batch >= whole.batch
    assert shape.rows <= coarse * (k + 1) + 4 + max(rows, 160) + 32, "no more padding than one size"
    assert batch + chunks <= shape.num_seqs <= max_num_seqs
    assert shape.chunk_rows >= rows
    assert shape.verify.rows >= batch * (k + 1) + chunks


@given(batch=st.integers(1, 256), k=st.integers(0, 5), rows=st.integers(1, 400), chunks=st.integers(1, 4))
def test_with_auto_chunks_ride_along_at_every_k(batch: int, k: int, rows: int, chunks: int) -> None:
    """Check that with `auto` prompt chunks join verification passes at every K: a usual prompt fits (up to 768 rows in
    all), a longer one runs in passes of its own."""
    buckets = AUTO
    whole = buckets.whole([k] * batch, LogitsMode.SAMPLED)
    assert whole is not None
    if batch + chunks > 256 or rows < chunks:
        return
    shape = buckets.merged(whole, batch, rows, chunks)
    if shape is not None:
        assert (shape.decode.max_k, shape.decode.logits_mode, shape.decode.passes) == (k, LogitsMode.SAMPLED, None)
        assert shape.chunk_rows >= rows
        assert batch + chunks <= shape.num_seqs
        assert shape.rows in MERGED_ROWS.totals
    else:
        coarse = min(size for size in buckets.chained_batches if size >= batch)
        assert rows > 156 or coarse * (k + 1) + 160 > 768 or batch + chunks > coarse


def test_weights_that_are_read_by_tiles_have_passes_of_whole_tiles() -> None:
    """Check that passes with prompt chunks end at 256 rows, from where weights would be dequantized."""
    sizes: dict[str, Any] = {"max_chunk_rows": 8192, "max_chunks": 256, "merges": 4}
    buckets = Buckets(batch_buckets(256), 2, merged_rows=TILED_MERGED_ROWS, **sizes)
    assert {shape.rows for shape in buckets.merged_shapes()} == {64, 128, 192, 256}
    rooms = [(seqs, tokens) for drafts, seqs, tokens in buckets.merged_rooms() if drafts == 0]
    assert [room for room in rooms if room[0] in (16, 64, 192, 256)] == [
        (16, 44),
        (16, 108),
        (64, 60),
        (64, 124),
        (192, 60),
    ]


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 4, 5, 9, 17])
def test_each_graph_with_chunks_serves_a_step(max_num_seqs: int) -> None:
    """Check small engines, where a batch of all requests leaves no row for a prompt."""
    buckets = Buckets(batch_buckets(max_num_seqs), 5, max_chunk_rows=512, max_chunks=max_num_seqs, merges=4)
    every, found = set(buckets.merged_shapes()), set()
    for shape, count in itertools.product(every, range(1, max_num_seqs)):
        whole = buckets.whole([shape.decode.max_k] * count, shape.decode.logits_mode)
        assert whole is not None
        found.add(buckets.merged(whole, count, shape.chunk_rows, 1))
    assert every == found - {None}
    assert bool(every) == (max_num_seqs > 1)


AUTO = Buckets(batch_buckets(256), 5, every_k=True, max_chunk_rows=8192, max_chunks=256, merges=4)


@pytest.mark.parametrize(("every_k", "counts"), [(False, (92, 92, 78, 195)), (True, (276, 276, 78, 195))])
def test_graphs_are_few(every_k: bool, counts: tuple[int, ...]) -> None:
    """Check the number of captured graphs, which docs/gpu.md states with their memory."""
    buckets = Buckets(batch_buckets(256), 5, every_k=every_k, max_chunk_rows=8192, max_chunks=256, merges=4)
    kinds = buckets.whole_shapes(), buckets.merged_shapes(), buckets.verify_passes(), buckets.draft_passes()
    assert tuple(len(list(kind)) for kind in kinds) == counts
    assert len(buckets.batches) == 23
    assert not list(Buckets(batch_buckets(256), 5, max_chunk_rows=8192, max_chunks=256).merged_shapes())


def test_rooms_that_are_documented() -> None:
    """Check the numbers of prompt tokens next to one request at K = 5 and to 64 at K = 0, which docs/gpu.md states."""
    rooms = AUTO.merged_rooms()
    assert [tokens for k, seqs, tokens in rooms if (k, seqs) == (5, 1)] == [54, 182]
    assert [tokens for k, seqs, tokens in rooms if (k, seqs) == (0, 64)] == [60, 156]


@pytest.mark.parametrize("logits_mode", LogitsMode)
def test_beyond_the_captured_sizes_there_is_no_graph(logits_mode: LogitsMode) -> None:
    buckets = Buckets(batch_buckets(8, (1, 2, 16)), 3)
    assert buckets.batches == [1, 2]
    assert buckets.whole([3, 3, 3], logits_mode) is None
    assert buckets.chained([3, 3, 3], logits_mode) is None


@pytest.mark.parametrize("every_k", [False, True])
def test_no_graph_is_captured_twice(every_k: bool) -> None:
    buckets = Buckets(batch_buckets(256), 5, every_k=every_k, max_chunk_rows=2048, max_chunks=256, merges=MERGED_CHUNKS)
    for shapes in (
        buckets.whole_shapes(),
        buckets.merged_shapes(),
        buckets.verify_passes(),
        buckets.draft_passes(),
        buckets.chunk_shapes(),
    ):
        found = list(shapes)
        assert len(set(found)) == len(found)


def test_nothing_is_collected_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the garbage collector does not run during a capture: a finaliser that frees device memory would make
    the capture invalid. It runs in eager runs before."""
    for name in ("graph_pool_handle", "Stream", "CUDAGraph", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    capturing = False

    @contextlib.contextmanager
    def capture(*_: object, **__: object) -> Iterator[None]:
        nonlocal capturing
        assert not gc.isenabled(), "a capture begins"
        capturing = True
        yield
        capturing = False
        assert not gc.isenabled(), "a capture ends"

    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: contextlib.nullcontext())
    runs: list[tuple[bool, bool]] = []
    assert gc.isenabled()
    made = graphs.Graphs(torch.device("cpu"))
    made.capture("a", lambda: runs.append((capturing, gc.isenabled())))
    assert runs == [(False, True)] * graphs.WARM_UPS + [(True, False)]
    assert gc.isenabled()
