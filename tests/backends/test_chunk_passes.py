"""Passes over prompt chunks padded to the shapes of graphs: they give the CPU runner's tokens, and read nothing of an
earlier pass.

As in `test_cuda_runner`, kernels are run by Triton's interpreter, and a replay runs what it would replay.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specrs.backends.cuda.chunk_buffers import ChunkBuffers
from specrs.backends.cuda.runner import CudaRunner
from specrs.backends.cuda.shapes import Buckets, ChunkShape
from specrs.engine.engine import Engine
from specrs.models.inputs import PassInputs

from .cuda_engines import generate, give_graphs
from .test_cuda_drafters import Bench, bench  # noqa: F401 (a fixture)
from .test_cuda_runner import GREEDY, Pair, pair  # noqa: F401 (a fixture)


def chunk_shapes(replayed: list[Any], kind: str) -> list[ChunkShape]:
    return [key[1] for key in replayed if isinstance(key, tuple) and key[0] == kind]


def texts(engine: Engine, num_tokens: int = 4) -> list[list[int]]:
    return [request.output_token_ids for request in generate(engine, [GREEDY] * 3, num_tokens)]


@pytest.mark.parametrize("batched", [12, 40])
def test_replayed_chunks_write_the_tokens_of_the_cpu(
    pair: Pair,  # noqa: F811
    batched: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine, theirs = (pair.engine(gpu=gpu, monkeypatch=monkeypatch, max_num_batched_tokens=batched) for gpu in (1, 0))
    graphs = give_graphs(mine)
    assert texts(mine) == texts(theirs)
    assert chunk_shapes(graphs.replayed, "catch up")
    assert (ChunkShape(12, 1) if batched == 12 else ChunkShape(16, 3)) in chunk_shapes(graphs.replayed, "prompts")
    ours, cpus = mine.runner.drafter, theirs.runner.drafter
    assert ours is not None
    assert cpus is not None
    assert ours.num_passes >= cpus.num_passes > 0


@pytest.mark.parametrize("kind", ["other vocabulary", "fitted head"])
def test_of_other_drafters(
    bench: Bench,  # noqa: F811
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check other drafters. A head's catch-up has hidden states as input and no graph; its pass over prompt chunks has
    one."""
    mine, theirs = (bench.engine(kind, "rejection", gpu=gpu, monkeypatch=monkeypatch) for gpu in (True, False))
    graphs = give_graphs(mine)
    assert texts(mine) == texts(theirs)
    assert mine.stats() == theirs.stats()
    assert chunk_shapes(graphs.replayed, "prompts")
    assert bool(chunk_shapes(graphs.replayed, "catch up")) == (kind != "fitted head")
    if kind == "fitted head":
        assert sum(mine.stats().acceptance_histogram[1:]) > 0, "what it drafts shows which hidden states it has read"


def test_without_graphs_one_attention_serves_chunks_of_all_lengths(
    pair: Pair,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = pair.engine(gpu=True, monkeypatch=monkeypatch)
    runner, lengths = engine.runner, set()
    assert isinstance(runner, CudaRunner)
    fill = ChunkBuffers.fill

    def watched(self: ChunkBuffers, given: PassInputs, shape: ChunkShape) -> PassInputs:
        made = fill(self, given, shape)
        lengths.add(made.max_q_len)
        return made

    monkeypatch.setattr(ChunkBuffers, "fill", watched)
    texts(engine, 2)
    assert lengths == {12}, "the one shape of passes of at most 12 rows"


def test_a_grid_is_as_long_as_the_longest_chunk() -> None:
    """Check the grid of attention: without a graph, 40 chunks of 10 rows have programs for 10 rows each; a graph has
    some for all its rows."""
    buffers = ChunkBuffers.allocate(400, 40, 3, 2, 41, torch.device("cpu"))
    given = inputs([10] * 40)
    made = buffers.fill(given, ChunkShape(400, 40, captured=False))
    assert (made.max_q_len, made.captured, made.prompts) == (10, False, True)
    made = buffers.fill(given, ChunkShape(400, 40))
    assert (made.max_q_len, made.captured, made.prompts) == (400, True, True)


chunks = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@settings(max_examples=50, deadline=None)
@given(before=chunks, now=chunks)
def test_what_is_padded_feeds_nothing(before: list[int], now: list[int]) -> None:
    buffers, buckets = (
        ChunkBuffers.allocate(40, 5, 3, 2, 41, torch.device("cpu")),
        Buckets([1], 0, max_chunk_rows=40, max_chunks=5),
    )
    buffers.fill(inputs(before), shape_of(buckets, before))
    given, shape = inputs(now), shape_of(buckets, now)
    made = buffers.fill(given, shape)
    rows = sum(now)
    assert (made.max_context, buffers.inputs(shape, windowed=False).max_context) == (rows, 41)
    assert made.input_ids.shape == (shape.rows,)
    assert made.q_start.shape == (shape.seqs + 1,)
    for name in ("input_ids", "positions", "slots"):
        assert getattr(made, name)[:rows].equal(getattr(given, name))
    assert made.group_slots is not None
    assert given.group_slots is not None
    assert made.group_slots[:, :rows].equal(given.group_slots)
    assert made.group_slots[:, rows:].eq(-1).all()
    assert made.group_tables is not None
    assert made.group_tables[:, : len(now)].equal(given.block_table[None] + 9)
    assert made.positions[rows:].eq(-1).all()
    assert made.slots[rows:].eq(-1).all()
    assert made.input_ids[rows:].eq(0).all()
    assert made.q_start[: len(now) + 1].equal(given.q_start)
    assert made.q_start[len(now) :].eq(rows).all()
    assert made.block_table[: len(now)].equal(given.block_table)


@settings(max_examples=20, deadline=None)
@given(now=chunks, data=st.data())
def test_the_last_rows_of_prompts_that_end_feed_nothing(now: list[int], data: st.DataObject) -> None:
    """Check that the last row of a prompt that ends is not fed in the chunk pass. It is among the rows of verification,
    and no two rows of a pass may have the same slot."""
    ends = data.draw(st.lists(st.integers(0, 1), min_size=len(now), max_size=len(now)))
    buffers = ChunkBuffers.allocate(40, 5, 3, 2, 41, torch.device("cpu"))
    given, last = inputs(now), torch.tensor(now).cumsum(0) - 1
    made = buffers.fill(given, ChunkShape(40, 5))
    buffers.mask_ends(last, torch.tensor(ends))
    ended = last[torch.tensor(ends) != 0]
    assert given.group_slots is not None
    for own, before in ((made.positions, given.positions), (made.slots, given.slots)):
        expected = before.index_fill(0, ended, -1)
        assert own[: sum(now)].equal(expected)
    assert buffers.group_slots[0, : sum(now)].equal(given.group_slots[0].index_fill(0, ended, -1))


def inputs(lengths: list[int]) -> PassInputs:
    rows = sum(lengths)
    return PassInputs(
        input_ids=torch.arange(1, rows + 1),
        positions=torch.arange(rows),
        slots=torch.arange(rows) + 7,
        q_start=torch.tensor([0, *lengths]).cumsum(0),
        block_table=torch.arange(3 * len(lengths)).view(-1, 3),
        max_q_len=max(lengths),
        max_context=rows,
        group_slots=torch.arange(rows)[None] + 70,
        group_tables=torch.arange(3 * len(lengths)).view(1, -1, 3) + 9,
    )


def shape_of(buckets: Buckets, lengths: list[int]) -> ChunkShape:
    shape = buckets.chunks(sum(lengths), len(lengths))
    assert shape is not None
    return shape


def test_shapes_of_chunks() -> None:
    buckets = Buckets([1, 2], 3, max_chunk_rows=100, max_chunks=4)
    assert buckets.chunks(1, 1) == ChunkShape(16, 1)
    assert buckets.chunks(17, 2) == ChunkShape(32, 4)
    assert buckets.chunks(65, 2) == ChunkShape(96, 4)
    assert buckets.chunks(100, 4) == ChunkShape(100, 4)
    assert buckets.chunks(101, 1) is None
    assert buckets.chunks(5, 5) is None
    assert list(buckets.chunk_shapes())[:2] == [ChunkShape(100, 4), ChunkShape(100, 1)]
    assert not list(Buckets([1], 0).chunk_shapes())
