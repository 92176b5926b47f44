"""Causal attention of flat rows over paged K and V in plain torch: the CPU path, and the Triton kernel's reference.

Builds no block tables and no slots. Whatever depends only on lengths is the same in every layer, so it is computed once
per pass (`plan_attention`). A layer then costs one write, and one gather and one attention per group of requests.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from specrs.kernels._scalars import scalar
from specrs.kernels.kv_codes import FRACTIONS, encode
from specrs.kernels.kv_scales import UNSCALED, KVScales
from torch import Tensor

_LONG = 32
"""Number of rows above which a request is attended by itself. In a group, a prefill chunk would pad the other decode
rows to its size."""
_WASTE = 2**18
"""Maximum bytes of K and V per layer that a group may gather in vain. Gathering more takes longer than another group,
which takes about 30 us."""


@dataclass(frozen=True, slots=True)
class Visibility:
    """Restriction on the positions that rows attend to. Without a restriction, a row attends to all positions up to its
    own."""

    reach: int
    """Distance, in positions, from which on earlier positions are hidden: no row attends to one that is this many or
    more before its own."""
    sees: Callable[[Tensor, Tensor], Tensor]
    """Function of row positions and column positions, both int64, broadcast against each other. Returns bool: whether
    the row attends to the column."""


def window(size: int) -> Visibility:
    """Return a restriction to the last `size` positions, including a row's own (Beltagy et al. 2020, section 3.1)."""
    return Visibility(size, lambda row, column: column > row - size)


def chunk(size: int) -> Visibility:
    """Return a restriction to the positions of a row's own chunk. Chunks have `size` positions, and the first begins at
    position 0."""
    return Visibility(size, lambda row, column: column >= row - row % size)


@dataclass(frozen=True, slots=True)
class Group:
    """Requests attended in one call: G requests, padded to R rows and C columns."""

    rows: Tensor | None
    """[G * R] row of q for each (request, row); padding repeats the request's first row. None: all rows of q in
    order."""
    num_requests: int
    num_rows: int
    blocks: Tensor
    """[G * 2 * kv_heads * blocks] indices into a cache layer seen as `[(num_blocks + 1) * 2 * kv_heads, ...]`."""
    gathered: Tensor
    """[G * 2 * kv_heads * blocks, block_size * D] buffer that each layer gathers its K and V into."""
    k: Tensor
    """[G, kv_heads, C, D] view of `gathered`."""
    v: Tensor
    """[G, kv_heads, C, D] view of `gathered`."""
    stale: Tensor | None
    """Indices into `gathered`, seen as `[positions, D]`, of the positions outside of their request's context. None:
    there are none."""
    mask: Tensor | None
    """Additive mask that broadcasts to `[G, heads or kv_heads, rows, C]`. None: every row sees every column, or the
    mask is causal."""
    is_causal: bool
    keep_heads: bool
    """True if q stays `[G, heads, R, D]`. False: the g heads that share a KV head become rows, `[G, kv_heads, R * g,
    D]`."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Index tensors and buffers of one pass, which every layer uses in turn."""

    write: Tensor
    """[N, 2 * kv_heads] indices into a cache layer seen as `[positions, head_dim]`; slot -1 lands in the last block."""
    groups: tuple[Group, ...]
    restore: Tensor | None
    """[N] row of the concatenated group outputs (and one zero row after them) for each row of q. None: they are in
    order."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes and dtypes that are the same in every pass of a model over a cache."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    """Dtype of queries."""
    cache_dtype: torch.dtype | None = None
    """Dtype of K and V in the cache, which are converted to `dtype` when they are read. None: `dtype`."""

    @property
    def row_bytes(self) -> int:
        """Number of bytes of K and V of one position."""
        return 2 * self.num_kv_heads * self.head_dim * (self.cache_dtype or self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class _Request:
    index: int
    start: int
    num_rows: int
    context: int
    first: int = 0
    """First position that the request's rows may attend to."""


def plan_attention(
    positions: Tensor,
    slots: Tensor,
    q_start: Tensor,
    block_table: Tensor,
    shape: AttentionShape,
    k_start: Tensor | None = None,
    visibility: Visibility | None = None,
) -> AttentionPlan:
    """Compute the index tensors of one pass. Arguments are those of PassInputs; their values are read on the host.

    `k_start` `[B]`: first position that a request's rows attend to, at most their own; None: 0 for all. `visibility`:
    restriction on the positions up to a row's own; None: rows attend to all.

    Requests are grouped by what padding them to a common shape would cost. Requests without a row at position >= 0 are
    left out.
    """
    requests = _live_requests(positions, q_start, block_table.shape[1] * shape.block_size, k_start, visibility)
    packs = _group(requests, shape.row_bytes)
    make = _GroupMaker(positions, block_table, shape, visibility)
    num_rows = positions.shape[0]
    in_order = len(packs) == 1 and _covers(packs[0], num_rows)
    return AttentionPlan(
        write=_write_index(slots, shape.num_kv_heads, shape.block_size),
        groups=tuple(make(pack, all_rows=in_order) for pack in packs),
        restore=None if in_order else _restore(packs, num_rows, positions.device),
    )


def write_kv(kv: Tensor, cache: Tensor, plan: AttentionPlan, scales: KVScales = UNSCALED) -> None:
    """Write the K and V of a pass into a cache layer, which is mutated.

    `kv` `[N, 2 * kv_heads, D]` has the K heads of each row, then its V heads. They are rounded to the cache's dtype;
    for codes, they are divided by their `scales` first (see `kv_codes`). `cache` is `[num_blocks + 1, 2, kv_heads,
    block_size, D]` contiguous. Rows with slot -1 write into the last block, in no particular order.
    """
    if cache.dtype in FRACTIONS:
        codes = [encode(part, scale, cache.dtype) for part, scale in zip(kv.chunk(2, dim=1), scales, strict=True)]
        # torch has index_put_ and index_fill_ of bytes, not of these types
        kv, cache = torch.cat(codes, dim=1).view(torch.uint8), cache.view(torch.uint8)
    elif kv.dtype != cache.dtype:
        kv = kv.to(cache.dtype)
    cache.view(-1, cache.shape[-1]).index_put_((plan.write,), kv)


def paged_attention(
    q: Tensor,
    cache: Tensor,
    plan: AttentionPlan,
    scale: float,
    *,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    kv_scales: KVScales = UNSCALED,
) -> Tensor:
    """Return `softmax(scale q K^T + M) V` for every row and head of `q`, `[N, heads * D]` of q's dtype.

    Row i of a request attends its positions k_start..positions[i] (see `plan_attention`; 0 where there is none), M is 0
    there and -inf elsewhere; query head h uses KV head
    `h // (heads / kv_heads)` (Vaswani et al. 2017, eq. 1; Ainslie et al. 2023). `q` is `[N, heads, D]`, `cache` as in
    `write_kv` and not mutated. Sums are accumulated in fp32 (float64 for float64). Rows at position -1 give zeros.

    `softcap` c: scores s are c tanh(s / c) before M is added. `sinks` `[heads]`: a score more for every row, of no
    position and with a value of zero (OpenAI 2025, gpt-oss). Either takes scores in memory, `[heads, rows, C]`.
    `kv_scales`: of a cache of codes; K's multiplies the scores, V's the output.

    No position outside a request's own context is multiplied with anything, so that NaN left there by earlier owners
    stays there: K and V past the context are cut off or replaced by zeros before the products.
    """
    attend = _attend if sinks is None and softcap is None else partial(_attend_scores, sinks=sinks, softcap=softcap)
    codes = cache.dtype in FRACTIONS
    if codes:
        scale = scale * kv_scales.k
    outputs = [attend(q, cache, group, scale) for group in plan.groups]
    if codes and kv_scales.v != 1:
        outputs = [out.mul_(kv_scales.v) for out in outputs]
    if plan.restore is None:
        return outputs[0]
    width = q.shape[1] * q.shape[2]
    return torch.cat([*outputs, q.new_zeros(1, width)]).index_select(0, plan.restore)


def _attend(q: Tensor, cache: Tensor, group: Group, scale: float) -> Tensor:
    """Return the attention of one group, `[G * R, heads * D]`."""
    heads, dim = q.shape[1], q.shape[2]
    g, r = group.num_requests, group.num_rows
    q, k, v = _gather(q, cache, group)
    kv_heads = k.shape[1]
    if group.keep_heads:
        x = F.scaled_dot_product_attention(
            q.view(g, r, heads, dim).transpose(1, 2),
            k,
            v,
            attn_mask=group.mask,
            is_causal=group.is_causal,
            scale=scale,
            enable_gqa=heads != kv_heads,
        )
        return x.transpose(1, 2).reshape(g * r, heads * dim)
    if r == 1:
        x = F.scaled_dot_product_attention(q.view(g, kv_heads, -1, dim), k, v, attn_mask=group.mask, scale=scale)
        return x.reshape(g, heads * dim)
    shape = (g, r, kv_heads, heads // kv_heads, dim)
    packed = q.view(shape).transpose(1, 2).reshape(g, kv_heads, -1, dim)
    x = F.scaled_dot_product_attention(packed, k, v, attn_mask=group.mask, scale=scale)
    return x.view(g, kv_heads, r, -1, dim).transpose(1, 2).reshape(g * r, heads * dim)


def _attend_scores(
    q: Tensor, cache: Tensor, group: Group, scale: float, *, sinks: Tensor | None, softcap: float | None
) -> Tensor:
    """Return attention `[G * R, heads * D]` of one group with sinks or a soft cap, which `scaled_dot_product_attention`
    does not compute."""
    heads, dim = q.shape[1], q.shape[2]
    g, r = group.num_requests, group.num_rows
    rows, k, v = _gather(q, cache, group)
    kv_heads, columns = k.shape[1], k.shape[2]
    share = heads // kv_heads
    rows = rows.view(g, r, kv_heads, share, dim).permute(0, 2, 1, 3, 4)
    scores = torch.matmul(rows.reshape(g, kv_heads, r * share, dim), k.transpose(2, 3)).mul_(scale)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores = scores.view(g, kv_heads, r, share, columns)
    if group.is_causal:
        ahead = torch.ones(r, columns, dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(ahead.unsqueeze(1), -torch.inf)
    elif group.mask is not None:
        scores.add_(group.mask.view(g, 1, r, -1, columns))
    if sinks is not None:
        extra = sinks.to(scores.dtype).view(1, kv_heads, 1, share, 1).expand(g, -1, r, -1, -1)
        scores = torch.cat((scores, extra), dim=-1)
    # Masked rows see nothing, which is to give zeros.
    shares = torch._safe_softmax(scores, -1, torch.promote_types(scores.dtype, torch.float32)).to(q.dtype)
    x = torch.matmul(shares[..., :columns].reshape(g, kv_heads, r * share, columns), v)
    return x.view(g, kv_heads, r, share, dim).transpose(1, 2).reshape(g * r, heads * dim)


def _gather(q: Tensor, cache: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Fill the group's buffer from the cache. Return the group's rows of q, and its K and V in q's dtype."""
    torch.index_select(cache.view(-1, group.gathered.shape[1]), 0, group.blocks, out=group.gathered)
    if group.stale is not None:
        gathered = group.gathered.view(torch.uint8) if cache.dtype in FRACTIONS else group.gathered
        gathered.view(-1, q.shape[2]).index_fill_(0, group.stale, 0)
    k, v = group.k, group.v
    if k.dtype != q.dtype:
        k, v = k.to(q.dtype), v.to(q.dtype)
    return q if group.rows is None else q.index_select(0, group.rows), k, v


def _live_requests(
    positions: Tensor,
    q_start: Tensor,
    capacity: int,
    k_start: Tensor | None = None,
    visibility: Visibility | None = None,
) -> list[_Request]:
    """Return the requests with a row at position >= 0. A position that the block table does not reach is reduced to the
    last one that it reaches."""
    values, starts = positions.tolist(), q_start.tolist()
    firsts = [0] * len(starts) if k_start is None else k_start.tolist()
    requests = []
    for index in range(len(starts) - 1):
        start, end = starts[index], starts[index + 1]
        last = max(values[start:end], default=-1)
        if last >= 0:
            context, first = min(last + 1, capacity), firsts[index]
            if visibility is not None:
                lowest = min(value for value in values[start:end] if value >= 0)
                first = max(first, lowest + 1 - visibility.reach)
            requests.append(_Request(index, start, end - start, context, min(first, context - 1)))
    return requests


def _group(requests: Sequence[_Request], row_bytes: int) -> list[list[_Request]]:
    """Split requests into groups with little padding: in a group, numbers of rows differ by at most a factor of 2, and
    padding of columns takes at most `_WASTE` bytes."""
    groups: list[list[_Request]] = []
    by_rows: dict[int, list[_Request]] = {}
    for request in requests:
        if request.num_rows > _LONG:
            groups.append([request])
        else:
            by_rows.setdefault((request.num_rows - 1).bit_length(), []).append(request)
    for similar in by_rows.values():
        if len(similar) == 1:
            groups.append(similar)
            continue
        similar.sort(key=lambda request: request.context, reverse=True)
        first, waste = 0, 0
        for i, request in enumerate(similar):
            waste += (similar[first].context - request.context) * row_bytes
            if waste > _WASTE:
                groups.append(similar[first:i])
                first, waste = i, 0
        groups.append(similar[first:])
    for group in groups:
        group.sort(key=lambda request: request.index)
    return groups


def _covers(group: Sequence[_Request], num_rows: int) -> bool:
    """Return True if all requests of the group have the same number of rows, and together all `num_rows` rows of q."""
    width = group[0].num_rows
    return len(group) * width == num_rows and all(request.num_rows == width for request in group)


def _restore(groups: Sequence[Sequence[_Request]], num_rows: int, device: torch.device) -> Tensor:
    total = sum(len(group) * max(request.num_rows for request in group) for group in groups)
    restore = [total] * num_rows
    offset = 0
    for group in groups:
        width = max(request.num_rows for request in group)
        for request in group:
            restore[request.start : request.start + request.num_rows] = range(offset, offset + request.num_rows)
            offset += width
    return torch.tensor(restore, dtype=torch.int64, device=device)


@lru_cache(maxsize=64)
def _multiples(count: int, step: int, device: torch.device) -> Tensor:
    """Return the tensor 0, step, .. (count - 1) step. Cached, because there is one for each head layout."""
    return torch.arange(0, count * step, step, device=device)


def _write_index(slots: Tensor, num_kv_heads: int, block_size: int) -> Tensor:
    """Return the index into the cache of each (slot, K or V, head). Slot -1 is in block -1, which as an index means the
    last block: scratch."""
    heads = 2 * num_kv_heads
    blocks = torch.div(slots, scalar(block_size, torch.int64, slots.device), rounding_mode="floor")
    first = torch.add(slots, blocks, alpha=(heads - 1) * block_size)
    return first.unsqueeze(1) + _multiples(heads, block_size, slots.device)


@dataclass(frozen=True, slots=True)
class _GroupMaker:
    """Builder of a pass's groups, with what all of them share."""

    positions: Tensor
    block_table: Tensor
    shape: AttentionShape
    visibility: Visibility | None = None

    def __call__(self, requests: Sequence[_Request], *, all_rows: bool) -> Group:
        width = max(request.num_rows for request in requests)
        context = max(request.context for request in requests)
        num_blocks = -(-context // self.shape.block_size)
        alone = len(requests) == 1
        first = requests[0].first if alone else 0
        columns = context - first if alone else num_blocks * self.shape.block_size
        rows = None if all_rows else self._rows(requests, width)
        positions = self.positions if rows is None else self.positions.index_select(0, rows)
        keep_heads = width > _LONG
        is_causal = keep_heads and columns == width and positions.tolist() == list(range(first, context))
        is_causal = is_causal and (self.visibility is None or self.visibility.reach >= width)
        needs_mask = not is_causal and (not alone or width > 1 or self.visibility is not None)
        skipped = first // self.shape.block_size
        blocks, stale = self._blocks(requests, num_blocks, skipped)
        gathered, kv = self._gathered(blocks, len(requests))
        kv = kv.narrow(3, first - skipped * self.shape.block_size, columns)
        starts = None
        if not alone and any(request.first for request in requests):
            starts = torch.tensor([request.first for request in requests], device=positions.device)
        return Group(
            rows=rows,
            num_requests=len(requests),
            num_rows=width,
            blocks=blocks,
            gathered=gathered,
            k=kv.select(1, 0),
            v=kv.select(1, 1),
            stale=stale,
            mask=self._mask(positions.view(-1, width), (first, columns), keep_heads, starts) if needs_mask else None,
            is_causal=is_causal,
            keep_heads=keep_heads,
        )

    def _gathered(self, blocks: Tensor, num_requests: int) -> tuple[Tensor, Tensor]:
        """Return a buffer for the blocks `blocks`, and a view `[G, 2, kv_heads, columns, D]` of it."""
        tile = self.shape.block_size * self.shape.head_dim
        dtype = self.shape.cache_dtype or self.shape.dtype
        gathered = torch.empty(blocks.shape[0], tile, dtype=dtype, device=blocks.device)
        return gathered, gathered.view(num_requests, 2, self.shape.num_kv_heads, -1, self.shape.head_dim)

    def _rows(self, requests: Sequence[_Request], width: int) -> Tensor:
        rows: list[int] = []
        for request in requests:
            rows += range(request.start, request.start + request.num_rows)
            rows += [request.start] * (width - request.num_rows)
        return torch.tensor(rows, dtype=torch.int64, device=self.positions.device)

    def _blocks(self, requests: Sequence[_Request], num_blocks: int, skipped: int = 0) -> tuple[Tensor, Tensor | None]:
        """Return the indices of the requests' blocks, and the positions in them that are outside of their request's
        context. A single request may leave out its first `skipped` blocks."""
        heads = 2 * self.shape.num_kv_heads
        offsets = _multiples(heads, 1, self.block_table.device).view(-1, 1)
        if len(requests) == 1:
            row = self.block_table.narrow(0, requests[0].index, 1).narrow(1, skipped, num_blocks - skipped)
            return torch.add(offsets, row, alpha=heads).view(-1), None
        device = self.block_table.device
        contexts = torch.tensor([request.context for request in requests], device=device).view(-1, 1)
        starts = torch.tensor([request.first for request in requests], device=device).view(-1, 1)
        table = self.block_table[:, :num_blocks]
        if len(requests) != table.shape[0]:
            table = table[[request.index for request in requests]]
        columns = torch.arange(num_blocks * self.shape.block_size, device=device)
        # Entries past the context may be anything; block 0 always exists, and what it brings is zeroed as stale.
        table = torch.where(columns[:: self.shape.block_size] < contexts, table, 0)
        blocks = torch.add(offsets, table.unsqueeze(1), alpha=heads).view(-1)
        unseen = (columns >= contexts) | (columns < starts)
        stale = unseen.unsqueeze(1).expand(-1, heads, -1).reshape(-1).nonzero().view(-1)
        return blocks, stale if stale.shape[0] else None

    def _mask(self, positions: Tensor, columns: tuple[int, int], keep_heads: bool, starts: Tensor | None) -> Tensor:
        """Return a mask that is 0 where a row may attend and -inf elsewhere: `[G, 1, R, C]`, or `[G, 1, R * heads /
        kv_heads, C]`. `columns` are the position of the first column, and the number of columns."""
        device = positions.device
        last = positions.unsqueeze(-1)
        if not keep_heads:
            last = last.expand(-1, -1, self.shape.num_heads // self.shape.num_kv_heads).reshape(
                positions.shape[0], -1, 1
            )
        column = torch.arange(columns[0], sum(columns), device=device)
        hidden = column > last
        if self.visibility is not None:
            hidden = hidden | ~self.visibility.sees(last, column)
        if starts is not None:
            hidden = hidden | (column < starts.view(-1, 1, 1))
        return self._additive(hidden.unsqueeze(1))

    def _additive(self, hidden: Tensor) -> Tensor:
        device = hidden.device
        return torch.where(hidden, scalar(-torch.inf, self.shape.dtype, device), scalar(0, self.shape.dtype, device))
