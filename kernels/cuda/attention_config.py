"""How one attention is cut up: from the numbers of a batch and the limits of a device. Times nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from specrs.kernels.cuda.device import DeviceLimits

MAX_VERIFY_ROWS = 17
"""Rows of a request up to which the context is split: K = 16 drafts and one more. Longer chunks fill the device."""
ANY_LENGTH = 128
"""Rows of a chunk from which on its attention is cut up as that of any longer one: a tile has no more."""
_MAX_SPLITS = 64
_WIDE_SHARED = 160 * 1024
"""Shared memory from which few rows take 128 positions in a step (docs/decisions/cuda.md has the times)."""
_SHORT = 4096
"""Positions up to which a wide tile keeps one block of 128 on its way: a second costs 2 us at the start and at 32k
saves a quarter."""
_TURNS = ((1, 16), (2, 4))
"""Splits that many tiles leave, and the blocks of a turn instead: contexts of one turn stay whole, longer ones are cut
further than programs run at once, so that one of them does not keep a launch waiting."""
_WAVES = 8
"""Programs of such an attention for each multiprocessor. Those of splits that a context has not read two numbers and
end, about a microsecond for each wave of them."""
_MAX_TURNS = 16
"""Splits of such an attention, which the last program adds a few lines at a time."""
_SHARED_LINES = 1 << 18
"""Lines of partial results that they may take, 128 MiB for heads of 128."""
_LAST = 8
"""Heads times rows of a tile up to which the last program combines: one program reads 16 splits of more too slowly."""
_FUSED = 4
"""Of them that it adds at a time: 16 splits of more do not stay in registers."""


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """How one attention is cut up. All fields but `num_warps` and `num_stages` decide the order of its sums."""

    rows: int
    """Rows of a tile."""
    block_m: int
    """Rows times heads of a tile, padded."""
    block_n: int
    """Positions of a step."""
    splits: int
    num_warps: int
    num_stages: int
    turn: int = 1
    """Blocks that a split takes at a time."""

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
        """The configuration for a batch of requests with at most `max_q_len` rows each, which attend at most `span`
        positions: a window, or all that a request may have. `dtypes` are those of queries and of K and V.

        Splits are as many as multiprocessors are free and at most as a span has blocks, whatever the contexts: a
        captured graph serves all of them. Where tiles leave hardly any, long contexts alone have splits (`turn`).
        """
        (dtype, cache_dtype), group = dtypes, num_heads // num_kv_heads
        long = max_q_len > MAX_VERIFY_ROWS
        if not limits.capability or dtype == torch.float32:  # fp32 has no tensor cores: operands live in registers
            widest, block_n = 16, 16
        else:
            widest = ANY_LENGTH if long and head_dim <= 128 else 64
            block_n = 64 if head_dim <= 128 else 32
        rows = max(1, min(max_q_len, widest // group))
        block_m = max(16, 1 << (rows * group - 1).bit_length())
        if block_m <= 64 and block_n == 64 and not long and limits.shared_memory >= _WIDE_SHARED:
            block_n = 128
        tiles = batch * num_kv_heads * -(-max_q_len // rows)
        splits = 1 if long else max(1, min(_MAX_SPLITS, limits.num_sms // tiles))
        blocks = -(-(span + rows - 1) // block_n) + 1
        turn = 1 if long else dict(_TURNS).get(splits, 1)
        further = min(max(2, _WAVES * limits.num_sms // tiles), _SHARED_LINES // (tiles * block_m))
        further = min(further, _MAX_TURNS, -(-blocks // turn))
        if turn > 1 and further > splits:
            splits = further
        else:
            splits, turn = min(splits, blocks), 1
        wide = block_m * block_d(head_dim) >= 128 * 128 or (head_dim > 128 and block_m > 16)
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
        return cls(rows, block_m, block_n, splits, 8 if wide else 4, 2 * max(1, ahead) + 1, turn)

    def fused_lines(self, group: int) -> int:
        """Lines of a tile that the last program combines at a time; 0 if there is nothing to combine, or another kernel
        does it. Where long contexts alone have splits a kernel for all tiles would cost more than the last program's
        4 us beside hundreds of them."""
        lines = 1 << (self.rows * group - 1).bit_length()
        last = self.turn > 1 or (self.splits > 1 and lines <= _LAST)
        return min(lines, _FUSED) if last else 0

    def scratch_sizes(self, *, batch: int, max_q_len: int, num_kv_heads: int, head_dim: int) -> tuple[int, int, int]:
        """Elements of `partial_out`, `partial_stat` (fp32) and `counters` (int32)."""
        if self.splits == 1:
            return 0, 0, 0
        tiles = batch * num_kv_heads * -(-max_q_len // self.rows)
        lines = tiles * self.splits * self.block_m
        return lines * block_d(head_dim), 2 * lines, tiles


def block_d(head_dim: int) -> int:
    """A head, padded to what a product takes."""
    return max(16, 1 << (head_dim - 1).bit_length())
