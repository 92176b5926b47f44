"""Memory through which the sampling kernels pass results, and the division of a row into tiles. Launches nothing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

BLOCK = 1024
"""Number of tokens that a program handles at a time. A tile is a multiple of it."""
CELLS = 2048
"""Number of cells of a search step's histogram."""
SEARCH_STEPS = 8
"""Number of search steps of `sampling_cut` with every filter."""
STEP_WORDS = 6
_PROGRAMS = 1024
LARGEST_TILE = 16_384
"""Maximum number of tokens of a tile. One row that samples among many that are greedy is then still shared by ten
programs at a vocabulary of 151,936, and no program has much more to do than the others."""
COUNTED_SEQUENCES = 32
"""Maximum number of sequences whose tokens are counted at the same time, for penalties. Their counts take 19 MB at a
vocabulary of 151,936."""


@dataclass(frozen=True, slots=True)
class SamplingScratch:
    """Scratch of the sampling ops, for one stream. Before an op it may contain anything, also NaN. Only `ids` is read
    by a later op, the next one; all other contents are used within one op."""

    tile_value: Tensor  # [rows, 2, T] fp32, best value of each tile; T = ceil(V / 1024)
    tile_id: Tensor  # [rows, 2, T] int32, its token
    tile_sum: Tensor  # [rows, T] int64, fixed-point weights of each tile
    cells: Tensor  # [3, rows, 2048] int64, histograms of three search steps in turn
    steps: Tensor  # [rows, 9, 6] int64, what each search step starts from
    ids: Tensor  # [rows] int64, each row's argmax after `sampling_cut`, its draw after `verify_coupled`
    counts: Tensor  # [at most 32 sequences, V] int32, how often each token occurs, for penalties

    @classmethod
    def allocate(cls, max_rows: int, max_seqs: int, vocab_size: int, device: torch.device) -> SamplingScratch:
        """Allocate scratch for at most `max_rows` flat rows and `max_seqs` sequences. At a vocabulary of 151,936
        it takes 51 kB per row, and 608 kB for each of up to 32 sequences."""
        rows, tiles = max(max_rows, max_seqs), triton.cdiv(vocab_size, BLOCK)

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            tile_value=empty(rows, 2, tiles, dtype=torch.float32),
            tile_id=empty(rows, 2, tiles, dtype=torch.int32),
            tile_sum=empty(rows, tiles, dtype=torch.int64),
            cells=empty(3, rows, CELLS, dtype=torch.int64),
            steps=empty(rows, SEARCH_STEPS + 1, STEP_WORDS, dtype=torch.int64),
            ids=empty(rows, dtype=torch.int64),
            counts=empty(min(max_seqs, COUNTED_SEQUENCES), vocab_size, dtype=torch.int32),
        )

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all buffers."""
        return sum(getattr(self, field.name).nbytes for field in dataclasses.fields(self))


def tile_of(num_rows: int, vocab_size: int) -> int:
    """Return the number of tokens of a tile, a power of two times 1,024 and at most `LARGEST_TILE`. It is 1,024 as long
    as that makes at most about 1,024 programs, which fill a GPU with one row as with six. With more rows it is larger,
    so that a program's fixed cost pays off."""
    tile = BLOCK
    while num_rows * triton.cdiv(vocab_size, tile) > _PROGRAMS and tile < min(vocab_size, LARGEST_TILE):
        tile *= 2
    return tile


def expect(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ValueError, which names the argument, if `tensor` has another shape or dtype. Used by the fake
    implementations of ops."""
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)}, must be {dtype} {tuple(shape)}")
