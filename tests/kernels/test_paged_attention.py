"""Paged attention against a loop over rows, heads and positions in float64."""

import math
import random
from dataclasses import dataclass

import pytest
import torch
from specrs.kernels import paged_attention as kernel
from specrs.kernels.kv_codes import FRACTIONS
from specrs.kernels.kv_scales import UNSCALED, KVScales
from torch import Tensor

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}
NAN = float("nan")


@dataclass
class Batch:
    """A pass over B requests; `rows[b]` are the positions fed for request b, -1 if masked."""

    rows: list[list[int]]
    heads: int
    kv_heads: int
    dim: int
    block_size: int
    num_blocks: int
    dtype: torch.dtype
    q: Tensor  # [N, heads, D]
    kv: Tensor  # [N, 2 * kv_heads, D]
    cache: Tensor  # [num_blocks + 1, 2, kv_heads, block_size, D]
    table: Tensor  # [B, max_blocks]
    positions: Tensor
    slots: Tensor
    q_start: Tensor

    def plan(self) -> kernel.AttentionPlan:
        return kernel.plan_attention(
            self.positions,
            self.slots,
            self.q_start,
            self.table,
            self.shape,
        )

    @property
    def shape(self) -> kernel.AttentionShape:
        dtypes = self.dtype, self.cache.dtype
        return kernel.AttentionShape(self.heads, self.kv_heads, self.dim, self.block_size, *dtypes)

    def run(self) -> Tensor:
        plan = self.plan()
        kernel.write_kv(self.kv, self.cache, plan)
        return kernel.paged_attention(self.q, self.cache, plan, self.dim**-0.5)


def make_batch(
    rows: list[list[int]],
    *,
    seed: int = 0,
    heads: int = 6,
    kv_heads: int = 3,
    dim: int = 20,
    block_size: int = 4,
    dtype: torch.dtype = torch.float64,
    extra_rows: int = 0,
    max_blocks: int | None = None,
) -> Batch:
    """Make a batch with scattered blocks, and NaN where a request has nothing: after its context, in free blocks, in
    scratch."""
    generator = torch.Generator().manual_seed(seed)
    contexts = [max(positions, default=-1) + 1 for positions in rows]
    needed = [-(-context // block_size) for context in contexts]
    num_blocks = sum(needed) + 3
    order = torch.randperm(num_blocks, generator=generator)
    width = max([*needed, 1]) + 2 if max_blocks is None else max_blocks
    table = torch.full((len(rows), width), 10**6)  # entries past the context must not be looked at
    cache = torch.full((num_blocks + 1, 2, kv_heads, block_size, dim), NAN, dtype=dtype)
    used = 0
    for b, context in enumerate(contexts):
        blocks = order[used : used + needed[b]]
        used += needed[b]
        table[b, : min(needed[b], width)] = blocks[:width]
        fed = set(rows[b])
        for position in range(context):
            if position not in fed:
                values = torch.randn(2, kv_heads, dim, generator=generator)
                cache[blocks[position // block_size], :, :, position % block_size] = values.to(dtype)
    flat = [position for positions in rows for position in positions] + [-1] * extra_rows
    owner = [b for b, positions in enumerate(rows) for _ in positions] + [0] * extra_rows
    slots = [
        int(table[b, p // block_size]) * block_size + p % block_size if 0 <= p < width * block_size else -1
        for b, p in zip(owner, flat, strict=True)
    ]
    starts = [0]
    for positions in rows:
        starts.append(starts[-1] + len(positions))
    return Batch(
        rows=rows,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        block_size=block_size,
        num_blocks=num_blocks,
        dtype=dtype,
        q=torch.randn(len(flat), heads, dim, generator=generator).to(dtype),
        kv=torch.randn(len(flat), 2 * kv_heads, dim, generator=generator).to(dtype),
        cache=cache,
        table=table,
        positions=torch.tensor(flat, dtype=torch.int64),
        slots=torch.tensor(slots, dtype=torch.int64),
        q_start=torch.tensor(starts),
    )


def reference(batch: Batch, before: Tensor, *, skip: int | None = None) -> dict[int, Tensor]:
    """Return the output `[heads * D]` of every row at position >= 0 in float64, without the rows of request `skip`.
    `before` is the cache before the pass."""
    cache = before.double().clone()
    for row, slot in enumerate(batch.slots.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, batch.block_size)
            cache[block, :, :, offset] = batch.kv[row].double().view(2, batch.kv_heads, batch.dim)
    outputs: dict[int, Tensor] = {}
    row = 0
    for b, positions in enumerate(batch.rows):
        for position in positions:
            if position >= 0 and b != skip:
                outputs[row] = torch.cat([one_head(batch, cache, b, row, position, h) for h in range(batch.heads)])
            row += 1
    return outputs


def one_head(batch: Batch, cache: Tensor, b: int, row: int, position: int, head: int) -> Tensor:
    kv_head = head // (batch.heads // batch.kv_heads)
    query = batch.q[row, head].double()
    scores, values = [], []
    for p in range(position + 1):
        key, value = cache[batch.table[b, p // batch.block_size], :, kv_head, p % batch.block_size]
        scores.append(sum(x * y for x, y in zip(query.tolist(), key.tolist(), strict=True)) / math.sqrt(batch.dim))
        values.append(value)
    highest = max(scores)
    weights = [math.exp(score - highest) for score in scores]
    return sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)


def check(batch: Batch) -> Tensor:
    """Run the pass; compare it with the reference; masked rows must give zeros."""
    before = batch.cache.clone()
    out = batch.run()
    assert out.shape == (batch.q.shape[0], batch.heads * batch.dim)
    assert out.dtype == batch.dtype
    assert out.isfinite().all()
    expected = reference(batch, before)
    tolerance = TOLERANCE[batch.dtype]
    for row, value in expected.items():
        torch.testing.assert_close(out[row].double(), value, rtol=tolerance, atol=tolerance)
    masked = [row for row in range(out.shape[0]) if row not in expected]
    assert not out[masked].any()
    return out


def span(start: int, end: int) -> list[int]:
    return list(range(start, end))


CASES = {
    "one row": [[9]],
    "first token": [[0]],
    "verify": [span(10, 16)],
    "decode batch": [[9], [10], [3], [0]],
    "verify batch": [span(5, 9), span(0, 4), span(20, 24)],
    "mixed K": [span(5, 11), [7], span(2, 5), [30]],
    "whole prompt": [span(0, 40)],
    "short prompt": [span(0, 7)],
    "chunk": [span(24, 61)],
    "chunks next to decode": [span(0, 45), [12], span(3, 40), [8], span(4, 9)],
    "masked tail": [[5, 6, -1, -1], [9, 10, 11, 12]],
    "masked head": [[-1, 0], [7, 8]],
    "masked request": [[4], [-1], [9]],
    "masked requests only": [[-1, -1], [-1]],
    "masked long chunk": [[*span(0, 34), -1, -1]],
    "masked chunk as wide as its context": [[*span(5, 45), *[-1] * 5]],
    "near a common width": [span(3, 9), span(0, 5), span(8, 15)],
    "empty request": [[3], [], [4]],
    "far apart": [[2], [70], [71], [3]],
}


@pytest.mark.parametrize("rows", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_matches_loop(rows: list[list[int]], block_size: int) -> None:
    check(make_batch(rows, block_size=block_size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["one row", "verify", "mixed K", "chunks next to decode"])
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    check(make_batch(CASES[name], dtype=dtype, dim=16))


@pytest.mark.parametrize("name", ["one row", "verify", "chunk", "chunks next to decode", "whole prompt"])
def test_a_cache_of_fewer_bits(name: str) -> None:
    """Check fp32 rows over bf16 K and V: these are rounded when they are written, and nothing else is."""
    batch = make_batch(CASES[name], dtype=torch.float32, dim=16)
    batch.cache = batch.cache.bfloat16()
    rounded = batch.kv.bfloat16()
    assert not torch.equal(rounded.float(), batch.kv)
    batch.kv, unrounded = rounded.float(), batch.kv
    expected = check(batch)
    batch.kv = unrounded
    assert torch.equal(batch.run(), expected)


@pytest.mark.parametrize("name", ["one row", "decode batch", "mixed K", "chunks next to decode", "masked tail"])
@pytest.mark.parametrize("codes", FRACTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scales", [UNSCALED, KVScales(0.03, 0.4)])
def test_a_quantized_cache(name: str, codes: torch.dtype, dtype: torch.dtype, scales: KVScales) -> None:
    """Check a quantized cache against a loop over the dequantized numbers. Unwritten positions hold NaN; one row is too
    large for a code."""
    batch = make_batch(CASES[name], dtype=dtype, dim=16)
    most, of_kv = torch.finfo(codes).max, torch.tensor(scales, dtype=torch.float64).view(2, 1, 1, 1)
    stored = (batch.cache.double() / of_kv).to(codes)
    batch.kv[0, :, 3] = 1e5
    of_heads = of_kv.view(2).repeat_interleave(batch.kv_heads).view(-1, 1)
    rounded = (batch.kv.double() / of_heads).float().clamp(-most, most).to(codes).double() * of_heads
    before, batch.cache = stored.double() * of_kv, stored
    plan = batch.plan()
    kernel.write_kv(batch.kv, batch.cache, plan, scales)
    out = kernel.paged_attention(batch.q, batch.cache, plan, batch.dim**-0.5, kv_scales=scales)
    assert out.dtype == dtype
    assert out.isfinite().all()
    batch.kv = rounded
    tolerance = TOLERANCE[dtype] * (1 if dtype == torch.float64 else 4)
    for row, value in reference(batch, before).items():
        torch.testing.assert_close(out[row].double(), value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("codes", FRACTIONS)
def test_nan_stays_nan_as_a_code(codes: torch.dtype) -> None:
    batch = make_batch([[9], [4]], dtype=torch.float32)
    batch.cache = batch.cache.to(codes)
    batch.kv[1] = NAN
    out = batch.run()
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(1, 1, 2), (4, 4, 6), (8, 1, 12), (9, 3, 48)])
def test_head_layouts(heads: int, kv_heads: int, dim: int) -> None:
    rows = [span(0, 33), [6], span(2, 6), span(8, 12)]
    check(make_batch(rows, heads=heads, kv_heads=kv_heads, dim=dim))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("waste", "long"), [(0, 32), (2**40, 32), (2**11, 3)])
def test_every_grouping_gives_the_same(monkeypatch: pytest.MonkeyPatch, seed: int, waste: int, long: int) -> None:
    monkeypatch.setattr(kernel, "_WASTE", waste)
    monkeypatch.setattr(kernel, "_LONG", long)
    rng = random.Random(seed)
    rows = []
    for _ in range(rng.randint(2, 6)):
        start, count = rng.choice([0, rng.randint(0, 25)]), rng.choice([0, 1, 1, 2, 5, 9])
        masked = rng.choice([0, 0, rng.randint(0, count)])
        rows.append(span(start, start + count - masked) + [-1] * masked)
    check(make_batch(rows, seed=seed, block_size=rng.choice([2, 5, 8]), extra_rows=rng.choice([0, 2])))


def test_groups_waste_little() -> None:
    rows = [[30], [5000], span(10, 16), [31], [4990], span(0, 100), [4000]]
    batch = make_batch(rows, block_size=16, heads=2, kv_heads=1, dim=64, dtype=torch.float32)
    shapes = sorted((g.num_requests, g.num_rows, g.k.shape[2]) for g in batch.plan().groups)
    # One row: those of 5,000 positions together, that of 4,000 too (0.5 MiB wasted would be too much), the short ones.
    assert shapes == [(1, 1, 4001), (1, 6, 16), (1, 100, 100), (2, 1, 32), (2, 1, 5008)]


def test_equal_decode_rows_need_no_rearranging() -> None:
    plan = make_batch([span(5, 9), span(6, 10)]).plan()
    assert plan.restore is None
    assert [group.rows for group in plan.groups] == [None]


def test_masked_rows_disturb_nobody() -> None:
    rows = [span(5, 9), [7], span(0, 3)]
    alone = check(make_batch(rows, seed=3))
    batch = make_batch(rows, seed=3)
    # The same pass with masked rows between, which bring NaN and infinity as K, V and queries of their own.
    keep = [0, 1, 2, 3, 6, 7, 8, 9]
    wide = make_batch([[*rows[0], -1, -1], rows[1], rows[2], [-1]], seed=3)
    wide.q[keep], wide.kv[keep] = batch.q, batch.kv
    masked = [4, 5, 10]
    wide.kv[masked] = torch.tensor([NAN, math.inf, -math.inf], dtype=wide.dtype)[:, None, None]
    wide.cache, wide.table[:3] = batch.cache, batch.table[:, : wide.table.shape[1]]
    wide.slots[keep] = batch.slots
    out = wide.run()
    assert out.isfinite().all()
    torch.testing.assert_close(out[keep], alone, rtol=1e-12, atol=1e-12)


def test_a_request_past_its_table_hurts_only_itself() -> None:
    batch = make_batch([[9], [40], [3]], max_blocks=5, block_size=4)
    before = batch.cache.clone()
    out = batch.run()
    for row, value in reference(batch, before, skip=1).items():
        torch.testing.assert_close(out[row], value, rtol=1e-12, atol=1e-12)


def test_write_touches_its_slots_only() -> None:
    batch = make_batch([span(3, 9), [-1], [2]], block_size=4)
    batch.slots[1] = -1  # a live row without a slot: its KV is already there
    before = batch.cache.clone()
    kernel.write_kv(batch.kv, batch.cache, batch.plan())
    expected = before.clone()
    for row, slot in enumerate(batch.slots.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, batch.block_size)
            expected[block, 0, :, offset] = batch.kv[row, : batch.kv_heads]
            expected[block, 1, :, offset] = batch.kv[row, batch.kv_heads :]
    torch.testing.assert_close(batch.cache[:-1], expected[:-1], rtol=0, atol=0, equal_nan=True)


def test_attention_does_not_write() -> None:
    batch = make_batch([span(3, 9), [2], [20]])
    plan = batch.plan()
    kernel.write_kv(batch.kv, batch.cache, plan)
    before = batch.cache.clone()
    kernel.paged_attention(batch.q, batch.cache, plan, 0.5)
    torch.testing.assert_close(batch.cache, before, rtol=0, atol=0, equal_nan=True)
