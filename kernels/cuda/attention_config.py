"""Divides the work of one attention among programs, by the sizes of a batch and the limits of a device. Times
nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from specrs.kernels.cuda.device import DeviceLimits

MAX_VERIFY_ROWS = 17
"""Maximum number of rows per request of a verification: K = 16 drafts and one more. Longer chunks split long contexts
alone, in passes whose total number of rows is known."""
ANY_LENGTH = 128
"""Number of rows of a chunk from which on its attention is divided like that of any longer one, because a tile has no
more rows."""
_MAX_SPLITS = 64
_WIDE_SHARED = 160 * 1024
"""Bytes of shared memory from which on attention with few rows takes 128 positions per step (docs/decisions/cuda.md has
the times)."""
_SHORT = 4096
"""Maximum number of positions for which a wide tile prefetches only one block of 128. A second block costs 2 us at the
start and saves a quarter at 32k positions."""
_BLOCKS_PER_SPLIT = ((1, 16), (2, 4))
"""For each number of splits that the tiles leave room for, the number of consecutive blocks that a split takes at a
time. A context with no more blocks is not split. A longer one has more splits than programs run at once, so it does not
delay a kernel."""
_CHUNK_RUN = 4
"""Number of consecutive blocks that a split of a chunk's context takes at a time. A context with no more blocks is not
split, so short prompts add in one order in passes of every shape."""
_WAVES = 8
"""Number of programs launched per multiprocessor for long contexts, if tiles leave hardly any multiprocessor free."""
_MAX_LONG_SPLITS = 16
"""Maximum number of splits if only long contexts have them. The last program adds them a few lines at a time."""
_SHARED_LINES = 1 << 18
"""Maximum number of lines of partial results if only long contexts are split: 128 MiB for heads of 128 features."""
_LAST = 8
"""Maximum number of lines (heads times rows) of a tile for which the last program combines the splits. With more, one
program reads 16 splits too slowly."""
_FUSED = 4
"""Number of lines (heads times rows) of the splits that the last program adds at a time. More than four spill registers
when there are 16 splits."""


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Division of one attention into tiles and splits. All fields but `num_warps` and `num_stages` decide the order of
    its sums."""

    rows: int
    """Number of rows of a tile."""
    block_m: int
    """Number of lines (rows times heads) of a tile, padded."""
    block_n: int
    """Number of positions per step."""
    splits: int
    num_warps: int
    num_stages: int
    blocks_per_split: int = 1
    """Number of consecutive blocks that a split takes at a time."""

    @classmethod
    def choose(
        cls,
        *,
        batch: int,
        max_q_len: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtypes: tuple[torch.dtype, torch.dtype],
        limits: DeviceLimits,
        span: int,
    ) -> AttentionConfig:
        """Return the configuration for a batch of requests with at most `max_q_len` rows each, which attend at most
        `span` positions: a window, or the maximum of a request. `dtypes` are those of queries and of K and V.

        There is a split for each multiprocessor that the tiles leave free, but at most one per block of a span. The
        contexts do not matter, so a captured graph serves all of them. If tiles leave hardly any multiprocessor free,
        only long contexts are split (`blocks_per_split`).

        The contexts of more than `MAX_VERIFY_ROWS` rows are not split: see `of_chunks`.
        """
        (dtype, cache_dtype), group = dtypes, num_heads // num_kv_heads
        long = max_q_len > MAX_VERIFY_ROWS
        if not limits.capability or dtype == torch.float32:  # fp32 has no tensor cores: operands live in registers
            widest, block_n = 16, 16
        else:
            widest = ANY_LENGTH if long and head_dim <= 128 else 64
            block_n = 64 if head_dim <= 128 else 32
            if head_dim > 256:  # more positions spill registers
                widest, block_n = 64 if limits.shared_memory >= _WIDE_SHARED else 32, 16
        rows = max(1, min(max_q_len, widest // group))
        block_m = max(16, 1 << (rows * group - 1).bit_length())
        if block_m <= 64 and block_n == 64 and not long and limits.shared_memory >= _WIDE_SHARED:
            block_n = 128
        tiles = batch * num_kv_heads * -(-max_q_len // rows)
        splits = 1 if long else max(1, min(_MAX_SPLITS, limits.num_sms // tiles))
        blocks = -(-(span + rows - 1) // block_n) + 1
        blocks_per_split = 1 if long else dict(_BLOCKS_PER_SPLIT).get(splits, 1)
        further = min(max(2, _WAVES * limits.num_sms // tiles), _SHARED_LINES // (tiles * block_m))
        further = min(further, _MAX_LONG_SPLITS, -(-blocks // blocks_per_split))
        if blocks_per_split > 1 and further > splits:
            splits = further
        else:
            splits, blocks_per_split = min(splits, blocks), 1
        wide = block_m * block_d(head_dim) >= 128 * 128 or (head_dim > 128 and block_m > 16) or head_dim > 256
        # Blocks of K and V on their way. The compiler takes two stages for each, because their addresses are loaded
        # too, and where warp groups multiply it keeps one more. Wider tiles have no registers for many, and each stage
        # unrolls a loop's start once more, which costs a short context more than the loop.
        step = 2 * block_n * block_d(head_dim) * cache_dtype.itemsize
        # The one more is of numbers, also where those on their way are codes.
        multiplied = 2 * block_n * block_d(head_dim) * dtype.itemsize if block_m >= 64 else 0
        fixed = block_m * block_d(head_dim) * dtype.itemsize + 8192 + multiplied
        short = span <= _SHORT and block_n == 128 and block_m >= 64
        most = 1 if wide or short else 2 if block_m >= 64 or block_n == 128 else 3
        ahead = min(most, (limits.shared_memory - fixed) // step)
        return cls(rows, block_m, block_n, splits, 8 if wide else 4, 2 * max(1, ahead) + 1, blocks_per_split)

    def of_chunks(
        self, total_rows: int, *, batch: int, max_q_len: int, num_kv_heads: int, limits: DeviceLimits, span: int
    ) -> AttentionConfig:
        """Return the configuration for a pass over chunks that have `total_rows` rows in all, which is known when the
        pass is captured. The other arguments are those of `choose`.

        Contexts of more than `_CHUNK_RUN` blocks are split so that tiles with rows fill the device once. With at most
        `MAX_VERIFY_ROWS` rows nothing changes.
        """
        if max_q_len <= MAX_VERIFY_ROWS:
            return self
        tiles = batch * num_kv_heads * -(-max_q_len // self.rows)
        # Most tiles of a grid for chunks of any lengths have no rows.
        live = min(tiles, num_kv_heads * (-(-total_rows // self.rows) + batch - 1))
        blocks = -(-(span + self.rows - 1) // self.block_n) + 1
        splits = min(limits.num_sms // live, _SHARED_LINES // (tiles * self.block_m), _MAX_LONG_SPLITS)
        splits = min(splits, -(-blocks // _CHUNK_RUN))
        return replace(self, splits=splits, blocks_per_split=_CHUNK_RUN) if splits > 1 else self

    def fused_lines(self, group: int) -> int:
        """Return the number of lines of a tile that the last program combines at a time. 0: there is nothing to
        combine, or another kernel does it.

        If only long contexts are split, the last program always combines. A kernel for all tiles would take longer than
        the 4 us that this takes among hundreds of tiles.
        """
        lines = 1 << (self.rows * group - 1).bit_length()
        last = self.blocks_per_split > 1 or (self.splits > 1 and lines <= _LAST)
        return min(lines, _FUSED) if last else 0

    def scratch_sizes(self, *, batch: int, max_q_len: int, num_kv_heads: int, head_dim: int) -> tuple[int, int, int]:
        """Return the numbers of elements of `partial_out`, `partial_stat` (both fp32) and `counters` (int32)."""
        if self.splits == 1:
            return 0, 0, 0
        tiles = batch * num_kv_heads * -(-max_q_len // self.rows)
        lines = tiles * self.splits * self.block_m
        return lines * block_d(head_dim), 2 * lines, tiles


def block_d(head_dim: int) -> int:
    """Return the number of features of a head, padded to a size that a product takes."""
    return max(16, 1 << (head_dim - 1).bit_length())
