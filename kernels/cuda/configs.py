"""Tile shapes of products by (GPU, shape): a committed table, and defaults for shapes that it lacks. Times nothing.

Timing at the start of an engine would let restarts and ranks differ in the order of their sums. So `specrs tune` makes
the table once, and every process reads the same. It may be empty: the defaults follow from the device's limits.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from specrs.kernels.coding import Coding
from specrs.kernels.cuda.device import DeviceLimits

_SMALL = 2**26
"""Size of a small weight in bytes, which takes 15 us at 4 TB/s: half of the multiprocessors read it in about the same
time as all of them."""
_WIDE = 2**16
"""Number of output features from which on tiles of 128 lose nothing at the end, as in LM heads: 3 % faster for 16 rows,
8 % for 64."""
_IN_FLIGHT = 144 * 1024
"""Bytes of all pipeline stages of a program. This is more than hides the memory's latency, so that a tile's end and the
next one's start overlap."""
_TENSOR_TILES = 4
"""Largest number of sums in a step. Eight of 64 rows are more than the tensor memory of compute capability 10.x."""
TABLE = Path(__file__).with_name("configs.json")


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """Division of one product into tiles and programs. `block_n`, `block_k` and `programs` decide the order of its
    sums."""

    block_n: int
    """Number of output features of a tile; if the product has two sides, of each of them."""
    block_k: int
    """Number of input features per step."""
    programs: int
    """Number of programs that share the work, at most one per step. Ignored in grouped products, which have one per
    tile."""
    num_warps: int
    num_stages: int
    prefetch: int = 0
    """Number of steps, a power of two, whose weights a program brings into the L2 cache while the previous kernel
    ends."""

    def as_list(self) -> list[int]:
        """Return the fields in order, as custom ops take them."""
        return list(dataclasses.astuple(self))


@dataclass(frozen=True, slots=True)
class LinearShape:
    """Key under which a configuration is looked up."""

    n: int
    """Number of output features; for a product with two sides, half of the rows of its weight."""
    k: int
    dtype: torch.dtype
    """Dtype of the rows, and of the weight if it is dense."""
    gated: bool = False
    coding: Coding | None = None
    """Coding of the weight; None if it is dense."""
    head_dim: int = 0
    """Number of features of a head, whose halves are the two sides of a tile; 0: the output is not heads."""
    experts: tuple[int, int] | None = None
    """(number of experts of a grouped product, number that each row chooses); None if the product is not grouped. `n`
    and `k` are those of one expert."""

    @property
    def sides(self) -> int:
        """Number of rows of the weight per output feature: 2 for gates and values, and for the halves of heads;
        otherwise 1."""
        return 2 if self.gated or self.head_dim else 1

    @property
    def key(self) -> str:
        """Key in the table: `n4096-k2048-bfloat16`, then `-gated` if gated, `-heads128` for heads, `-fp8-128` or
        `-int4-32-blocks` for a coding and `-8of128` for experts."""
        heads = f"-heads{self.head_dim}" if self.head_dim else ""
        coding = "" if self.coding is None else f"-{self.coding.kind}-{self.coding.group}"
        coding += f"-{self.coding.minima}" if self.coding is not None and self.coding.minima else ""
        experts = "" if self.experts is None else f"-{self.experts[1]}of{self.experts[0]}"
        kind = f"{str(self.dtype).removeprefix('torch.')}{'-gated' * self.gated}"
        return f"n{self.n}-k{self.k}-{kind}{heads}{coding}{experts}"

    @property
    def bits(self) -> int:
        """Number of bits of a weight."""
        return 8 * self.dtype.itemsize if self.coding is None else self.coding.bits

    @property
    def least_k(self) -> int:
        """Minimum number of inputs per step: the number of inputs whose codes are stored together."""
        return 16 if self.coding is None else self.coding.unit(self.k) or 16

    def stage_bytes(self, block_n: int, block_k: int, block_m: int) -> int:
        """Return the bytes of shared memory of one pipeline stage: the tiles of weight and rows that it loads."""
        return self.sides * block_n * block_k * self.bits // 8 + block_m * block_k * self.dtype.itemsize

    def bound(self, block_n: int, block_k: int) -> int:
        """Return the number of steps of the whole product, which is the maximum number of programs."""
        return -(-self.n // block_n) * -(-self.k // block_k)


def linear_config(shape: LinearShape, block_m: int, limits: DeviceLimits) -> LinearConfig:
    """Return the table's configuration for `shape` on this GPU, or the default. With `block_m` rows it may have fewer
    stages, to fit into shared memory."""
    entry = load_table().get(limits.name, {}).get(shape.key)
    return fit(entry or default_config(shape, limits), shape, block_m, limits)


def default_config(shape: LinearShape, limits: DeviceLimits) -> LinearConfig:
    """Return a safe configuration for a GPU that was not tuned for. The rules were measured on an H200
    (docs/decisions/cuda.md)."""
    if shape.experts is not None:
        # They have few steps, and tiles are more than multiprocessors, several of which each runs at a time: more than
        # four stages leave no room for them (down of Qwen3-30B-A3B for six rows 36 us with four, 42 with eight).
        alone = default_config(dataclasses.replace(shape, experts=None), limits)
        return dataclasses.replace(alone, num_stages=min(4, alone.num_stages))
    if not limits.capability:  # the interpreter: small tiles, so that small shapes have several
        block_n, block_k = shape.head_dim // 2 or 16, max(32, shape.least_k)
        return LinearConfig(block_n, block_k, min(limits.num_sms, shape.bound(block_n, block_k)), 4, 1)
    if shape.dtype == torch.float32:  # no tensor cores: operands live in registers
        block_n, block_k = 32, max(32, shape.least_k)
        return LinearConfig(block_n, block_k, min(limits.num_sms, shape.bound(block_n, block_k)), 4, 9, prefetch=2)
    return _dense_config(shape, limits) if shape.coding is None else _quantized_config(shape, limits)


def _dense_config(shape: LinearShape, limits: DeviceLimits) -> LinearConfig:
    """Return the default configuration for 16-bit weights, whose products only the memory limits.

    About 32 KiB in flight per multiprocessor cover the latency of a GPU's memory at 4 TB/s. The memory reads rows of
    256 bytes best; if fewer than three stages of them fit, rows are half as long. One program per multiprocessor is
    never slower than two. Partial sums cost 2 us, and more if more programs share a tile. So if the weight is small and
    its tiles occupy a third of the multiprocessors, each program has a whole tile, and half a tile if there are fewer
    tiles.
    """
    block_n, block_k = shape.head_dim // 2 or 64, 128
    if limits.shared_memory // 2 < 3 * shape.stage_bytes(block_n, block_k, 16):
        block_k = 64
    elif shape.n >= _WIDE and not shape.head_dim:
        block_n = 128
    programs, tiles = min(limits.num_sms, shape.bound(block_n, block_k)), -(-shape.n // block_n)
    small = shape.sides * shape.n * shape.k * shape.dtype.itemsize <= _SMALL
    if small and tiles <= limits.num_sms <= 3 * tiles:
        programs = tiles
    elif 3 * tiles < limits.num_sms or (not small and 0.9 * limits.num_sms <= 2 * tiles <= limits.num_sms):
        programs = min(2 * tiles, programs)
    stages = round(_IN_FLIGHT / shape.stage_bytes(block_n, block_k, 16))
    return LinearConfig(block_n, block_k, programs, 4, max(3, min(9, stages)), prefetch=2)


def _quantized_config(shape: LinearShape, limits: DeviceLimits) -> LinearConfig:
    """Return the default configuration for quantized weights, each code of which becomes a number before it is
    multiplied.

    The latency of a step limits such products, not the memory, so several programs take turns on a multiprocessor: two
    for codes of 8 bits, four with half the inputs for codes of 4 bits. Gate and up of Qwen3-32B take 72 us in FP8
    instead of 98 us with one program, and 64 us in INT4 instead of 115 us.
    """
    per_sm, block_k = (2, 256) if shape.bits == 8 else (4, 128)
    while block_k > shape.least_k and limits.shared_memory < per_sm * (
        2 * shape.stage_bytes(64, block_k, 16) + _extra_bytes(shape, block_k, 16)
    ):
        block_k //= 2
    block_n = 64
    if 100 <= limits.capability < 120:
        while block_k > shape.least_k and _tensor_tiles(shape, block_k) > _TENSOR_TILES:
            block_k //= 2
        # Tiles of fewer outputs do not use tensor memory.
        block_n = 64 if _tensor_tiles(shape, block_k) <= _TENSOR_TILES else 32
    programs = min(per_sm * limits.num_sms, shape.bound(block_n, block_k))
    return LinearConfig(block_n, block_k, programs, 4, 3, prefetch=2)


def _tensor_tiles(shape: LinearShape, block_k: int) -> int:
    """Return the number of sums with a scale or a minimum of their own in a step of a quantized weight. Each has a tile
    in the tensor memory of compute capability 10.x."""
    assert shape.coding is not None
    group = min(shape.coding.group, shape.least_k)
    sums = shape.sides + bool(shape.coding.minima)
    return shape.sides if shape.coding.group >= shape.k else sums * block_k // group


def fit(config: LinearConfig, shape: LinearShape, block_m: int, limits: DeviceLimits) -> LinearConfig:
    """Return `config` with as many of its stages as fit into shared memory, at least two, and with 8 warps for 64 rows
    or more. `config` itself if kernels are interpreted."""
    if not limits.capability:
        return config
    per_sm = max(1, -(-config.programs // limits.num_sms))
    extra = _extra_bytes(shape, config.block_k, block_m)
    stage = shape.stage_bytes(config.block_n, config.block_k, block_m)
    room = (
        limits.shared_memory // per_sm if per_sm * (2 * stage + extra) <= limits.shared_memory else limits.shared_memory
    )
    # Codes leave their stage for registers immediately: there is one buffer less than stages.
    buffers = (room - extra) // stage + (shape.coding is not None)
    stages = max(2, min(config.num_stages, buffers))
    # The squares of 64 rows, next to their sums, need more registers than four warps have.
    return dataclasses.replace(config, num_stages=stages, num_warps=8 if block_m >= 64 else config.num_warps)


def _extra_bytes(shape: LinearShape, block_k: int, block_m: int) -> int:
    """Return the bytes of shared memory in addition to the stages: the rows once more if a norm rewrites them, and what
    the epilogue transposes."""
    return block_m * block_k * shape.dtype.itemsize + 1024


@cache
def load_table(path: Path = TABLE) -> Mapping[str, Mapping[str, LinearConfig]]:
    """Load the table: `{GPU name: {shape key: configuration}}`. Checks nothing: `backends.cuda.product_table` does,
    before an engine's first product."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return {
        gpu: {key: LinearConfig(**fields) for key, fields in shapes.items()}
        for gpu, shapes in content.get("products", {}).items()
    }
