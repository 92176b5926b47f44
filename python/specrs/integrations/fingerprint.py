"""Detects whether tensors have changed, by hashing their bytes. Version counters are not used, because writes through
`.data` do not raise them.

The hash of 64-bit words w_i is sum r_i (w_i xor (w_i >> 32)) mod 2^64, with random r_i that no write can know
(multilinear hashing, Carter and Wegman 1979). The upper half is folded onto the lower, so that a single flipped sign
also changes the lower bits. Two different contents agree with a probability of at most 2^-32. Every byte is read.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Iterable

import torch
from torch import Tensor

_PIECE = {"cpu": 2**16}
"""Number of words per partial sum, by kind of device. On a CPU a sum takes 512 KiB, so that partial results stay in a
core's cache."""
_LARGE_PIECE = 2**20
"""Number of words per partial sum on devices that are not in `_PIECE`, where every operation is a kernel launch."""
_SEED = secrets.randbits(63)


def fingerprint(tensors: Iterable[Tensor]) -> tuple[object, ...]:
    """Return dtype, shape, device and hash of every tensor. Equal contents give equal results. Mutates nothing."""
    kinds, hashes = [], []
    for tensor in tensors:
        kinds.append((tensor.dtype, tuple(tensor.shape), tensor.device))
        hashes.append(_hash(_words(tensor.detach())))
    # One wait for the device.
    return *kinds, *(torch.stack(hashes).tolist() if hashes else ())


def _words(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor as `[n]` int64, padded with zeros."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    missing = -flat.numel() % 8
    if missing or flat.storage_offset() % 8:
        flat = torch.cat((flat, flat.new_zeros(missing)))
    return flat.view(torch.int64)


def _hash(words: Tensor) -> Tensor:
    """Return the hash of `[n]` int64: sums pieces, and then those sums, until one number is left."""
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
    """Return `[size]` random int64, the same in every call of this process for the same `level` and `size`."""
    generator = torch.Generator().manual_seed((_SEED + level) % 2**63)
    halves = torch.randint(-(2**31), 2**31, (2, size), generator=generator)
    return ((halves[0] << 32) ^ halves[1]).to(device)
