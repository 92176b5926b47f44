"""Philox in numpy arrays, against a second implementation in Python integers."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from specrs import core

MASK = 0xFFFFFFFF


def philox4x32(counter: list[int], key: list[int]) -> list[int]:
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * counter[0], 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * counter[2], 1 << 32)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) & MASK, (key[1] + 0xBB67AE85) & MASK]
    return counter


def words(seed: int, position: int, purpose: int, vocab: int) -> NDArray[np.uint64]:
    seed, position = seed % (1 << 64), position % (1 << 64)
    key = [seed & MASK, seed >> 32]
    rows = [philox4x32([group, position & MASK, position >> 32, purpose], key) for group in range(-(-vocab // 4))]
    return np.array(rows, np.uint64).reshape(-1)[:vocab]


def test_the_reference_knows_the_published_answers() -> None:
    assert philox4x32([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox4x32([MASK] * 4, [MASK] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    assert philox4x32(pi, [0xA4093822, 0x299F31D0]) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


SEEDS = np.array([0, 1, -1, 0x299F31D0A4093822, -(1 << 63)], np.int64)
POSITIONS = np.array([0, 5, (1 << 40) + 3, -1, 1 << 31], np.int64)


@pytest.mark.parametrize("purpose", range(4))
@pytest.mark.parametrize("vocab", [1, 6, 67])
def test_uniforms_bit_for_bit(purpose: int, vocab: int) -> None:
    out = np.full((5, vocab), np.nan, np.float32)
    core.philox_uniform(SEEDS, POSITIONS, purpose, out)
    for row, (seed, position) in enumerate(zip(SEEDS.tolist(), POSITIONS.tolist(), strict=True)):
        exact = ((words(seed, position, purpose, vocab) >> np.uint64(9)) + 0.5) / 2**23
        assert out[row].astype(np.float64).tolist() == exact.tolist()
    assert ((out > 0) & (out < 1)).all()


@pytest.mark.parametrize("purpose", range(4))
def test_gumbel_values(purpose: int) -> None:
    out = np.full((5, 67), np.nan, np.float32)
    core.philox_gumbel(SEEDS, POSITIONS, purpose, out)
    for row, (seed, position) in enumerate(zip(SEEDS.tolist(), POSITIONS.tolist(), strict=True)):
        exact = -np.log(-np.log((words(seed, position, purpose, 67) + 0.5) / 2**32))
        np.testing.assert_allclose(out[row], exact, rtol=2**-23, atol=2**-40)


def test_empty_shapes() -> None:
    core.philox_gumbel(np.zeros(0, np.int64), np.zeros(0, np.int64), 0, np.zeros((0, 5), np.float32))
    core.philox_gumbel(np.zeros(2, np.int64), np.zeros(2, np.int64), 0, np.zeros((2, 0), np.float32))


@pytest.mark.parametrize("fill", [core.philox_uniform, core.philox_gumbel])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": SEEDS[:4]}, "seeds=4 elements: must be 5"),
        ({"positions": POSITIONS[:4]}, "positions=4 elements: must be 5"),
        ({"seeds": SEEDS.astype(np.uint64)}, "seeds: dtype is uint64; must be int64"),
        ({"out": np.zeros((5, 4))}, "out: dtype is float64; must be float32"),
        ({"out": np.zeros(5, np.float32)}, r"out: shape is \[5\]; must have 2 dimension"),
        ({"out": np.zeros((4, 5), np.float32).T}, "out: strides"),
        ({"out": np.zeros((5, 8), np.float32)[:, ::2]}, "out: strides"),
    ],
)
def test_wrong_buffers(fill: Any, change: dict[str, Any], message: str) -> None:
    arguments = {"seeds": SEEDS, "positions": POSITIONS, "purpose": 0, "out": np.zeros((5, 4), np.float32)} | change
    with pytest.raises(core.InvalidBufferError, match=message):
        fill(**arguments)


@pytest.mark.parametrize("purpose", [-1, 4])
def test_unknown_purposes(purpose: int) -> None:
    with pytest.raises(core.InvalidConfigError, match=f"purpose={purpose}: "):
        core.philox_gumbel(SEEDS, POSITIONS, purpose, np.zeros((5, 4), np.float32))
