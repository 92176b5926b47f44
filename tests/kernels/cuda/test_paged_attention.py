"""Paged attention, interpreted: decode, verification and prefill, split and whole, over caches full of NaN."""

import dataclasses
import functools
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specrs.kernels.cuda.attention_config import AttentionConfig
from specrs.kernels.cuda.device import ABSENT, INTERPRETER
from specrs.kernels.cuda.paged_attention import AttentionRows, MaskParams, paged_attention, paged_attention_reference
from specrs.kernels.kv_scales import UNSCALED, KVScales
from sweep import sweep
from torch import Tensor

from .tolerance import assert_near

NAN = float("nan")


@dataclass
class Pass:
    """Requests whose rows are at positions `rows[b]`. What no row may read is NaN, or an invalid block id."""

    rows: list[list[int]]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 20
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    orphans: int = 0
    starts: list[int] | None = None  # the first position that each request's rows attend
    window: int | None = None
    has_sinks: bool = False
    codes: torch.dtype | None = None  # of K and V
    kv_scales: KVScales = UNSCALED
    chunked: bool = False

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(sum(map(sum, self.rows)))
        flat = [p for rows in self.rows for p in rows] + [3] * self.orphans
        self.positions = torch.tensor(flat)
        self.q_start = torch.tensor([0, *torch.tensor([len(rows) for rows in self.rows]).cumsum(0).tolist()])
        width = self.heads * self.dim
        self.q = torch.cat((torch.randn(len(flat), width, generator=generator), torch.full((len(flat), 7), NAN)), 1)
        self.q = self.q.to(self.dtype)[:, :width]
        contexts = [max(rows, default=-1) + 1 for rows in self.rows]
        needed = [-(-context // self.block_size) for context in contexts]
        count = sum(needed) + 2
        order = torch.randperm(count, generator=generator)
        self.table = torch.full((len(self.rows), max(needed) + 3), 10**12)
        self.cache = torch.full(
            (count + 1, 2, self.kv_heads, self.block_size, self.dim), NAN, dtype=self.codes or self.dtype
        )
        used = 0
        for b, context in enumerate(contexts):
            blocks = order[used : used + needed[b]]
            used += needed[b]
            self.table[b, : needed[b]] = blocks
            first = max(0 if self.starts is None else self.starts[b], self.lowest(b))
            self.table[b, : first // self.block_size] = 10**12
            for p in range(first, context):
                values = torch.randn(2, self.kv_heads, self.dim, generator=generator)
                values = values.to(self.codes or self.dtype)
                self.cache[blocks[p // self.block_size], :, :, p % self.block_size] = values

        sinks = torch.randn(self.heads, generator=generator).to(self.dtype) if self.has_sinks else None
        self.mask_params = MaskParams(self.dim**-0.5, self.window, sinks, self.kv_scales, self.chunked)

    def lowest(self, b: int) -> int:
        """Return the first position that any row of a request attends to, by its window."""
        there = [p for p in self.rows[b] if p >= 0]
        return min(map(self.first_seen, there), default=0)

    def first_seen(self, position: int) -> int:
        """Return the first position that a row at `position` attends to, by its window."""
        if self.window is None:
            return 0
        return position // self.window * self.window if self.chunked else max(position + 1 - self.window, 0)

    @property
    def max_q_len(self) -> int:
        return max(map(len, self.rows))

    @property
    def k_start(self) -> Tensor | None:
        return None if self.starts is None else torch.tensor(self.starts)

    def run(self, config: AttentionConfig) -> Tensor:
        """Return the kernel's output. Checks that counters are zero afterwards; scratch begins as NaN."""
        sizes = config.scratch_sizes(
            batch=len(self.rows), max_q_len=self.max_q_len, num_kv_heads=self.kv_heads, head_dim=self.dim
        )
        out = torch.full((len(self.positions), self.heads * self.dim + 5), NAN, dtype=self.dtype)
        counters = torch.zeros(sizes[2], dtype=torch.int32)
        paged_attention(
            self.q,
            self.cache,
            AttentionRows(self.positions, self.q_start, self.table, self.max_q_len, self.k_start),
            out[:, : self.heads * self.dim],
            (torch.full((sizes[0],), NAN), torch.full((sizes[1],), NAN), counters),
            self.mask_params,
            list(dataclasses.astuple(config)),
            False,
        )
        assert not counters.any()
        assert out[:, self.heads * self.dim :].isnan().all()
        return out[:, : self.heads * self.dim]

    def reference(self, dtype: torch.dtype) -> Tensor:
        out = torch.empty(self.q.shape, dtype=dtype)
        where = self.positions, self.q_start, self.table
        paged_attention_reference(self.q.to(dtype), self.cache, *where, out, self.mask_params, self.k_start)
        return out

    def check(self, config: AttentionConfig) -> Tensor:
        out = self.run(config)
        exact = self.reference(torch.float64)
        owned = sum(map(len, self.rows))
        assert out[owned:].isnan().all(), "rows of no request are left as they were"
        assert_near(out[:owned], exact[:owned], self.own()[:owned])
        masked = torch.tensor([p < 0 for rows in self.rows for p in rows])
        assert not out[:owned][masked].any()
        return out

    def own(self) -> Tensor:
        """Return torch's attention in the dtype of q, row by row. Softmax weights are rounded to it before the product
        with V."""
        out = torch.zeros(self.q.shape, dtype=self.dtype)
        starts = self.q_start.tolist()
        for b in range(len(self.rows)):
            for row in range(starts[b], starts[b + 1]):
                first = 0 if self.starts is None else self.starts[b]
                first = max(first, self.first_seen(int(self.positions[row])))
                at = torch.arange(int(self.positions[row]) + 1)[first:]
                if len(at):
                    kv = self.cache[self.table[b, at // self.block_size], :, :, at % self.block_size].to(self.dtype)
                    if self.codes is not None:
                        kv = kv * torch.tensor(self.kv_scales, dtype=self.dtype)[:, None, None]
                    k, v = kv.repeat_interleave(self.heads // self.kv_heads, dim=2).unbind(1)
                    query = self.q[row].view(self.heads, 1, self.dim)
                    scores = (query @ k.permute(1, 2, 0)) * self.dim**-0.5
                    if self.mask_params.sinks is not None:
                        scores = torch.cat((scores, self.mask_params.sinks.view(-1, 1, 1)), dim=-1)
                    out[row] = (scores.softmax(-1)[..., : len(at)] @ v.transpose(0, 1)).reshape(-1)
        return out


def cut(p: Pass, rows: int, splits: int, block_n: int = 16, blocks_per_split: int = 1) -> AttentionConfig:
    lines = rows * p.heads // p.kv_heads
    return AttentionConfig(rows, max(16, 1 << (lines - 1).bit_length()), block_n, splits, 4, 1, blocks_per_split)


def span(start: int, end: int) -> list[int]:
    return list(range(start, end))


@sweep(24)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 60), st.integers(1, 6), st.integers(0, 3)).map(
            lambda t: span(t[0], t[0] + t[1]) + [-1] * t[2]
        ),
        min_size=1,
        max_size=3,
    ),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1), (5, 5)]),
    dim=st.sampled_from([2, 20, 64]),
    block_size=st.sampled_from([1, 4, 16, 32]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    cuts=st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 3, 8]), st.just(16), st.sampled_from([1, 2, 3])),
    orphans=st.integers(0, 2),
    starts=st.none() | st.lists(st.integers(0, 50), min_size=3, max_size=3),
    window=st.none() | st.integers(1, 40),
    chunked=st.booleans(),
    has_sinks=st.booleans(),
)
def test_any_batch_and_cut(
    rows: list[list[int]],
    heads: tuple[int, int],
    dim: int,
    block_size: int,
    dtype: torch.dtype,
    cuts: tuple[int, int, int, int],
    orphans: int,
    starts: list[int] | None,
    window: int | None,
    chunked: bool,
    has_sinks: bool,
) -> None:
    if starts is not None:  # rows attend themselves, at least
        starts = [min(start, *(p for p in own if p >= 0), 60) for start, own in zip(starts, rows, strict=False)]
    p = Pass(
        rows, *heads, dim, block_size, dtype, orphans, starts, window, has_sinks, chunked=chunked and window is not None
    )
    p.check(cut(p, *cuts))


@pytest.mark.parametrize("size", [1, 7, 16, 40])
@pytest.mark.parametrize("cuts", [(4, 1), (3, 3), (2, 2, 16, 2)])
def test_chunks(size: int, cuts: tuple[int, ...]) -> None:
    """Check rows of one tile in two chunks, the first and the last row of a chunk, and masked rows."""
    rows = [span(0, 9), span(size, size + 1), [*span(29, 43), -1], span(max(2 * size - 1, 0), 2 * size + 1), [-1]]
    p = Pass(rows, window=size, chunked=True)
    p.check(cut(p, *cuts))


@sweep(18)
@given(
    codes=st.sampled_from([torch.float8_e4m3fn, torch.float8_e5m2]),
    scales=st.tuples(*[st.sampled_from([1.0, 0.037, 1.7])] * 2).map(lambda pair: KVScales(*pair)),
    dim=st.sampled_from([2, 20, 64]),
    block_size=st.sampled_from([1, 4, 16]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    cuts=st.tuples(st.integers(1, 4), st.sampled_from([1, 3]), st.just(16), st.sampled_from([1, 2])),
    window=st.none() | st.integers(1, 40),
    has_sinks=st.booleans(),
)
def test_quantized_caches(
    codes: torch.dtype,
    scales: KVScales,
    dim: int,
    block_size: int,
    dtype: torch.dtype,
    cuts: tuple[int, int, int, int],
    window: int | None,
    has_sinks: bool,
) -> None:
    """Check quantized caches. Positions that no row attends to hold NaN."""
    rows = [span(30, 34), [7, -1], span(0, 3)]
    p = Pass(rows, 4, 2, dim, block_size, dtype, 0, None, window, has_sinks, codes, scales)
    p.check(cut(p, *cuts))


@pytest.mark.parametrize("heads", [(2, 2), (8, 1)])
@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_long_contexts_in_quantized_caches(codes: torch.dtype, heads: tuple[int, int]) -> None:
    """Check a long context in an FP8 cache, whose splits are scaled before they are added, next to a context of one
    split."""
    p = Pass([span(91, 97), [12]], *heads, codes=codes, kv_scales=KVScales(0.037, 1.7))
    p.check(cut(p, 6, 4, blocks_per_split=2))


chosen = functools.partial(AttentionConfig.choose, limits=INTERPRETER, span=64)
chosen_for_32b = functools.partial(
    AttentionConfig.choose,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    dtypes=(torch.bfloat16, torch.bfloat16),
    limits=ABSENT,
)


@pytest.mark.parametrize("q_len", [1, 2, 6, 17])
@pytest.mark.parametrize("dim", [64, 96, 128, 256, 512])
def test_verification_with_the_default_configuration(q_len: int, dim: int) -> None:
    p = Pass([span(40 - q_len, 40)], 8, 2, dim, 16, torch.float16)
    p.check(chosen(batch=1, max_q_len=q_len, num_heads=8, num_kv_heads=2, head_dim=dim, dtypes=(p.dtype, p.dtype)))


@pytest.mark.parametrize("heads", [(2, 2), (8, 1)])  # combined by the last program, by the second kernel
def test_more_splits_than_blocks(heads: tuple[int, int]) -> None:
    p = Pass([[0], [70], [-1], [16]], *heads)
    p.check(cut(p, 1, 8))


def test_prefill_chunks_next_to_others() -> None:
    p = Pass([span(0, 37), span(20, 41), [-1, -1], [5]])
    config = chosen(batch=4, max_q_len=37, num_heads=4, num_kv_heads=2, head_dim=20, dtypes=(p.dtype, p.dtype))
    assert config.splits == 1
    p.check(config)


def test_a_row_does_not_depend_on_the_rows_next_to_it() -> None:
    """Check bit by bit that a row does not depend on other rows: its blocks are counted from position 0, and the number
    of splits depends on sizes alone."""
    alone, together = Pass([[40]]), Pass([span(40, 46)])
    alone.q = together.q[:1]
    alone.cache, alone.table = together.cache, together.table
    assert torch.equal(alone.run(cut(alone, 6, 3))[0], together.run(cut(together, 6, 3))[0])


def test_nor_on_whether_they_have_more_splits() -> None:
    """Check that a row does not depend on other rows having more splits."""
    together = Pass([span(29, 35), span(60, 66)])
    config = cut(together, 6, 4, blocks_per_split=2)
    out = together.check(config)
    for row, position in enumerate(range(29, 35)):
        alone = Pass([[position]])
        alone.q, alone.cache, alone.table = together.q[row : row + 1], together.cache, together.table[:1]
        assert torch.equal(alone.run(config)[0], out[row])


def test_a_short_context_leaves_the_scratch_alone() -> None:
    """Check that a context of up to `blocks_per_split` blocks leaves the scratch alone: one program writes its output
    without partial results."""
    p, stored = Pass([[31], [12]], 8, 1), []
    config = cut(p, 1, 4, blocks_per_split=2)
    sizes = config.scratch_sizes(batch=2, max_q_len=1, num_kv_heads=1, head_dim=p.dim)
    scratch = (torch.full((sizes[0],), NAN), torch.zeros(sizes[1]), torch.zeros(sizes[2], dtype=torch.int32))
    out, rows = torch.empty_like(p.q), AttentionRows(p.positions, p.q_start, p.table, 1)
    paged_attention(p.q, p.cache, rows, out, scratch, p.mask_params, list(dataclasses.astuple(config)), False)
    stored = scratch[0].view(2, 4, -1).isfinite().any(-1)
    assert not stored.any()
    assert_near(out, p.reference(torch.float64), p.own())


@pytest.mark.parametrize("window", [1, 16, 17, 33])
def test_windows_of_verification_and_prefill(window: int) -> None:
    """Check windows in verification and prefill: blocks before a request's window are freed and hold NaN, rows of one
    tile have different windows, and a row alone has the same bits."""
    p = Pass([span(60, 66), span(0, 3)], window=window, has_sinks=window == 16)
    together = p.check(cut(p, 6, 3))
    alone = Pass([[65]], window=window)
    alone.q, alone.cache, alone.table, alone.mask_params = p.q[5:6], p.cache, p.table[:1], p.mask_params
    assert torch.equal(alone.run(cut(alone, 6, 3))[0], together[5])
    chunk = Pass([span(40, 71), [-1], [50]], window=window)
    chunk.check(cut(chunk, 4, 1))


def test_splits_of_windows_are_no_more_than_have_blocks() -> None:
    for window, splits in ((1, 2), (64, 2), (65, 3), (10**6, 16)):
        config = chosen_for_32b(batch=1, max_q_len=1, span=window)
        assert (config.block_n, config.splits) == (64, splits)


def test_positions_beyond_the_table_are_cut_to_it() -> None:
    p = Pass([[11]], block_size=4)
    p.table = p.table[:, :3].contiguous()
    expected = p.run(cut(p, 1, 2))
    p.positions = torch.tensor([50])
    assert torch.equal(p.run(cut(p, 1, 2)), expected)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # numpy's, under the interpreter's maximum
@pytest.mark.parametrize("codes", [None, torch.float8_e4m3fn, torch.float8_e5m2])
def test_nan_of_a_request_stays_with_it(codes: torch.dtype | None) -> None:
    p = Pass([[9], [10], [11]], codes=codes)
    clean = p.run(cut(p, 1, 3))
    p.cache[p.table[1, 0], :, :, 2] = NAN
    out = p.run(cut(p, 1, 3))
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize(
    ("batch", "splits", "blocks_per_split"),
    [(1, 16, 1), (2, 8, 1), (5, 3, 1), (8, 16, 4), (16, 8, 16), (64, 2, 16), (256, 2, 16)],
)
def test_splits_follow_the_free_multiprocessors(batch: int, splits: int, blocks_per_split: int) -> None:
    config = chosen_for_32b(batch=batch, max_q_len=6, span=10**6)
    assert (config.splits, config.blocks_per_split) == (splits, blocks_per_split)
    assert (config.rows, config.block_m) == (6, 64)


@pytest.mark.parametrize(
    ("batch", "rows", "splits"),
    [(1, 18, 8), (1, 32, 8), (1, 64, 4), (1, 96, 2), (1, 128, 2), (1, 160, 1), (1, 256, 1), (4, 60, 2), (8, 256, 1)],
)
def test_chunks_of_known_rows_fill_the_device_once(batch: int, rows: int, splits: int) -> None:
    """Check that a long context is split among the multiprocessors that other tiles leave free: the programs of split
    chunks fit on the device at once. Chunks of many rows are not split."""
    unknown = chosen_for_32b(batch=batch, max_q_len=rows, span=1 << 17)
    sizes = {"batch": batch, "max_q_len": rows, "num_kv_heads": 8, "span": 1 << 17}
    config = unknown.of_chunks(rows, limits=ABSENT, **sizes)
    assert config.splits == splits
    assert config.blocks_per_split * config.block_n == (256 if splits > 1 else config.block_n)
    live = 8 * (-(-rows // config.rows) + batch - 1)
    assert splits == 1 or 132 // 2 < live * splits <= 132
    assert (unknown.splits, unknown.rows, unknown.block_m) == (1, config.rows, config.block_m)


@pytest.mark.parametrize("window", [None, 70])
def test_a_long_chunk_in_parts(window: int | None) -> None:
    """Check a long chunk whose context is split, next to one of one split, and next to a request without rows."""
    p = Pass([span(150, 171), span(3, 22), [-1]], 4, 2, 16, 16, window=window)
    p.check(cut(p, 8, 3, blocks_per_split=4))
    alone, whole = cut(p, 8, 3, blocks_per_split=4), cut(p, 8, 1)
    assert p.run(alone)[21:40].equal(p.run(whole)[21:40]), "a short context adds in one order, whatever the splits"


@pytest.mark.parametrize("batch", [1, 4, 8, 9, 16, 32, 64])
@pytest.mark.parametrize("context", [1 << 15, 1 << 17])
def test_a_long_context_next_to_short_ones_is_cut_up(batch: int, context: int) -> None:
    """Check that a long context next to short ones is split: no program reads more than about half of it, or an eighth
    with 1 or with 8 to 16 requests."""
    config = chosen_for_32b(batch=batch, max_q_len=6, span=context)
    blocks = -(-context // config.block_n)
    most = max(Counter(block // config.blocks_per_split % config.splits for block in range(blocks)).values())
    parts = 2 if batch > 32 else 4 if batch > 16 else 8 if batch > 5 or batch < 3 else 3
    assert most <= blocks / parts + config.blocks_per_split
    # Contexts of 1,000 tokens stay whole where programs are enough without.
    assert -(-1000 // config.block_n) <= config.blocks_per_split or batch < 9


def test_scratch_is_bounded() -> None:
    """Check that scratch is bounded: no attention over fewer positions needs more than the largest one, for which it is
    allocated."""
    for batch in (1, 5, 8, 16, 64, 200, 256, 1024):
        for rows in range(1, 18):
            most: tuple[int, ...] = (0, 0, 0)
            for positions in (64, 1 << 11, 1 << 12, 1 << 15, 1 << 24):
                config = chosen_for_32b(batch=batch, max_q_len=rows, span=positions)
                sizes = config.scratch_sizes(batch=batch, max_q_len=rows, num_kv_heads=8, head_dim=128)
                assert 4 * sizes[0] <= 128 << 20
                assert all(size >= before for size, before in zip(sizes, most, strict=True))
                most = sizes
