"""Whether tensors have changed, judged by their bytes. Asks no version counter: writes through `.data` raise none.

The hash of words w_i of 64 bits is sum r_i (w_i xor (w_i >> 32)) mod 2^64, with random r_i that no write can know of
(multilinear hashing, Carter and Wegman 1979). Folding the upper half onto the lower makes a lone flipped sign count in
the lower bits, too, so that two different contents agree with a probability of at most 2^-32. Every byte is read.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Iterable

import torch
from torch import Tensor

_PIECE = {"cpu": 2**16}
"""Words of one sum: on a CPU 512 KiB, so that what is written in between stays in a core's cache."""
_LARGE_PIECE = 2**20
"""On other devices, where every step is a launch."""
_SEED = secrets.randbits(63)


def fingerprint(tensors: Iterable[Tensor]) -> tuple[object, ...]:
    """Dtype, shape, device and hash of every tensor; equal for equal contents. Mutates nothing."""
    kinds, hashes = [], []
    for tensor in tensors:
        kinds.append((tensor.dtype, tuple(tensor.shape), tensor.device))
        hashes.append(_hash(_words(tensor.detach())))
    # One wait for the device.
    return *kinds, *(torch.stack(hashes).tolist() if hashes else ())


def _words(tensor: Tensor) -> Tensor:
    """The bytes as `[n]` int64, filled up with zeros."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    missing = -flat.numel() % 8
    if missing or flat.storage_offset() % 8:
        flat = torch.cat((flat, flat.new_zeros(missing)))
    return flat.view(torch.int64)


def _hash(words: Tensor) -> Tensor:
    """One int64 of `[n]` int64: sums of pieces, then of those sums, until there is one."""
    size = _PIECE.get(words.device.type, _LARGE_PIECE)
    scratch = words.new_empty(min(size, words.numel()))
    level = 0
    while level == 0 or words.numel() > 1:
        random = _random(level, size, words.device)
        sums = words.new_zeros(max(1, -(-words.numel() // size)))
        for i, piece in enumerate(torch.split(words, size)):
            folded = torch.bitwise_right_shift(piece, 32, out=scratch[: piece.numel()]).bitwise_xor_(piece)
            torch.sum(folded.mul_(random[: piece.numel()]), 0, out=sums[i])
        words = sums
        level += 1
    return words[0]


@functools.cache
def _random(level: int, size: int, device: torch.device) -> Tensor:
    """`[size]` int64, any value, the same in every call of this process."""
    generator = torch.Generator().manual_seed((_SEED + level) % 2**63)
    halves = torch.randint(-(2**31), 2**31, (2, size), generator=generator)
    return ((halves[0] << 32) ^ halves[1]).to(device)
