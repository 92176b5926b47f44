"""Quantized weights: codes of 8 or 4 bits and their scales, in the layout that GPU kernels read. Needs no Triton. The
products here are slow, because they dequantize the weight each time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from specrs.kernels.coding import LEAST_GROUP, Coding
from torch import Tensor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
"""Value of each e2m1 code."""
OUT, IN = 0, 1
"""Dimensions along which `QuantizedWeight.shard` can slice a weight: outputs and inputs."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantized matrix `[out, in]` of codes times scales. Every code without its scale is exact in 16 bits."""

    codes: Tensor
    """int16 `[out, in * bits / 16]`, words of C = 16 / bits codes. Each unit of U inputs takes U / C words; word i has
    the codes of inputs i, U / C + i, ... from its lowest bits on. e4m3, e2m1 and INT8 codes are stored as they are,
    INT4 codes as 0 to 15."""
    scales: Tensor
    """fp32 `[ceil(out / outputs), ceil(in / group)]`. Zero points are stored in the four lowest bits, which scales that
    were 16-bit numbers do not need. Scales of MXFP4 are bytes: s means 2^(s - 127). With minima they are int32 `[out,
    in / block * words]`, see `Coding.minima`."""
    coding: Coding
    bias: Tensor | None = None
    fp8_rows: bool = False
    """True for FP8 weights whose products round each row to e4m3 first, by groups of inputs: see `fp8_rows`."""
    fp8_wide_rows: bool = False
    """True for FP8 weights of a draft. Products of many rows round each row as with `fp8_rows` if the device multiplies
    FP8 numbers. Other products round none."""

    @classmethod
    def of(cls, values: Tensor, scales: Tensor, coding: Coding, bias: Tensor | None = None) -> QuantizedWeight:
        """Pack `values` `[out, in]` uint8, one code each. The coding must have a unit for `in`."""
        (out, size), bits = values.shape, coding.bits
        unit = coding.unit(size)
        assert unit is not None, f"{size} inputs in groups of {coding.group}"
        parts = values.reshape(out, size // unit, 16 // bits, -1).to(torch.int16).unbind(2)
        words = parts[0]
        for j, part in enumerate(parts[1:], 1):
            words = words | part << bits * j
        scales = scales if coding.kind == "mxfp4" or coding.minima else scales.float()
        return cls(words.reshape(out, -1), scales.contiguous(), coding, bias)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the weight: (out, in)."""
        return self.codes.shape[0], self.codes.shape[1] * 16 // self.coding.bits

    @property
    def num_bytes(self) -> int:
        """Number of bytes of codes, scales and bias."""
        return self.codes.nbytes + self.scales.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def product(self, x: Tensor) -> Tensor:
        """Return `x W^T + b` for `x` `[N, in]`: `[N, out]` of x's dtype, with the weight dequantized to that dtype.
        With `fp8_rows`, x is rounded to e4m3 first."""
        y = self.multiplied(x) @ self.dequantized().to(x.dtype).t()
        return y if self.bias is None else y + self.bias

    def multiplied(self, x: Tensor) -> Tensor:
        """Return the rows `[N, in]` that are multiplied with the weight: x, or with `fp8_rows` x rounded to e4m3, in
        x's dtype."""
        if not self.fp8_rows:
            return x
        codes, scales = fp8_rows(x, self.coding.group)
        spread = scales.repeat_interleave(self.coding.group, 1)[:, : x.shape[1]]
        return (codes.double() * spread).to(x.dtype)

    def dequantized(self) -> Tensor:
        """Return codes times scales, less minima, `[out, in]` float64, which holds them exactly."""
        words, values = self.scales, self._values()
        if self.coding.minima:
            numbers = values.view(torch.int8).double() if self.coding.kind == "int8" else values.double()
            scales, minima = _scales_and_minima(words, self.coding)
            return numbers * self._spread(scales) - self._spread(minima)
        if self.coding.kind == "fp8":
            numbers = values.view(torch.float8_e4m3fn).double()
        elif self.coding.kind == "int8":
            numbers = values.view(torch.int8).double()
        elif self.coding.kind == "mxfp4":
            numbers = E2M1.to(values.device)[values.long()]
            words = torch.ldexp(torch.ones_like(words, dtype=torch.float64), words.int() - 127)
        else:
            zero = torch.full_like(words, 8, dtype=torch.int32)
            if self.coding.zeros:
                bits = words.view(torch.int32)
                words, zero = (bits & -16).view(torch.float32), bits & 15
            numbers = values.double() - self._spread(zero)
        return numbers * self._spread(words)

    def shard(self, dim: int, rank: int, world: int, parts: Sequence[int] | None = None) -> QuantizedWeight:
        """Return the part of rank `rank` of `world`, as a copy.

        Args:
            dim: `OUT` splits outputs: products of the shards, side by side, are those of the whole weight, and each has
                its part of the bias. `IN` splits inputs, between groups: each shard multiplies its part of x, and the
                products add up; rank 0 has the bias. If scales span several outputs, they are repeated along `OUT`.
            parts: numbers of features of the projections that are fused in dimension `dim` (q, k and v, for example).
                Each is split by itself; together they fill the dimension. None: it is one projection.

        Raises ValueError for a part that `world` does not divide, and for a shard that no kernel reads.
        """
        size, coding = self.shape[1], self.coding
        if dim == OUT:
            codes, bias = _cut(self.codes, self.bias, OUT, rank, world, parts)
            scales = _cut(self._by_output(self.scales), None, OUT, rank, world, parts)[0]
            return replace(self, codes=codes, scales=scales, coding=coding._replace(outputs=1), bias=bias)
        sizes = [size] if parts is None else list(parts)
        whole = coding.group >= size
        least = LEAST_GROUP if whole else coding.block
        uneven = [part for part in sizes if part % (least * world)]
        if uneven:
            raise ValueError(f"parts={sizes}: {uneven[0]} features are not world={world} shards of whole {least}")
        values, bias = _cut(self._values(), self.bias, IN, rank, world, sizes)
        if whole:
            coding = coding._replace(group=values.shape[1])
        if coding.unit(values.shape[1]) is None:
            raise ValueError(f"parts={sizes}: no kernel reads {values.shape[1]} inputs in groups of {coding.group}")
        if whole:
            made = QuantizedWeight.of(values, self.scales.clone(), coding, bias)
        else:
            words = [part // coding.block * coding.words for part in sizes]
            scales = _cut(self.scales, None, IN, rank, world, words)[0]
            made = QuantizedWeight.of(values, scales, coding, bias)
        return replace(made, fp8_rows=self.fp8_rows, fp8_wide_rows=self.fp8_wide_rows)

    def split(self, count: int, biases: Tensor | None = None) -> tuple[QuantizedWeight, ...]:
        """Return `count` weights with equal numbers of outputs, over the same memory. Scales must not span two of them.
        `biases` `[count, out / count]` are theirs; None: they have none."""
        codes, scales = self.codes.chunk(count), self.scales.chunk(count)
        assert all(len(part) == len(codes[0]) for part in codes), f"{len(self.codes)} outputs in {count} weights"
        assert len(scales[0]) * self.coding.outputs == len(codes[0]), "a scale spans two weights"
        own = [None] * count if biases is None else list(biases)
        return tuple(
            replace(self, codes=code, scales=scale, bias=bias)
            for code, scale, bias in zip(codes, scales, own, strict=True)
        )

    def to(self, device: torch.device) -> QuantizedWeight:
        """Return the weight with all its tensors on `device`."""
        bias = None if self.bias is None else self.bias.to(device)
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device), bias=bias)

    def with_zeros(self) -> QuantizedWeight | None:
        """Return an INT4 weight whose scales hold zero points. None if the scales need all their bits, or if the codes
        are others."""
        if self.coding.zeros:
            return self
        if self.coding.kind != "int4" or self.coding.minima:
            return None
        bits = self.scales.view(torch.int32)
        if bool((bits & 15).any()):
            return None
        return replace(self, scales=(bits | 8).view(torch.float32), coding=self.coding._replace(zeros=True))

    def by_output(self) -> QuantizedWeight:
        """Return the weight with one scale per output and group instead of one per several outputs."""
        return replace(self, scales=self._by_output(self.scales), coding=self.coding._replace(outputs=1))

    def _values(self) -> Tensor:
        """Return the codes, `[out, in]` uint8."""
        (out, size), bits = self.shape, self.coding.bits
        unit = self.coding.unit(size)
        assert unit is not None
        words = self.codes.view(out, size // unit, -1)
        parts = [words >> bits * j & (1 << bits) - 1 for j in range(16 // bits)]
        return torch.stack(parts, dim=2).view(out, size).to(torch.uint8)

    def _by_output(self, words: Tensor) -> Tensor:
        return words.repeat_interleave(self.coding.outputs, 0)[: self.shape[0]]

    def _spread(self, words: Tensor) -> Tensor:
        return self._by_output(words).repeat_interleave(self.coding.group, 1)[:, : self.shape[1]]


def fp8_rows(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return rows `[N, K]` as e4m3 codes of the same shape, and their scales `[N, ceil(K / group)]` in fp32 or x's
    dtype. A scale is the smallest power of two, at least 2^-100, with which the largest number of its group is at most
    448.

    Numbers are rounded to the nearest code, ties to the even one. Numbers that are not finite become NaN. 16 bits of
    bf16 hold a code times its scale exactly.
    """
    rows, size = x.shape
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = torch.where(wide.isinf(), math.nan, wide)
    grouped = torch.nn.functional.pad(wide, (0, -size % group)).view(rows, -(-size // group), group)
    part, exponent = torch.frexp(grouped.abs().nan_to_num(0).amax(2))
    # 448 is 0.875 * 2^9.
    power = torch.where(part > 0.875, exponent - 8, exponent - 9).clamp(min=-100)
    scales = torch.ldexp(torch.ones_like(part), torch.where(part > 0, power, -100))
    codes = (grouped / scales.unsqueeze(2)).to(torch.float8_e4m3fn)
    return codes.view(rows, -1)[:, :size], scales


def fuse(parts: Sequence[QuantizedWeight], bias: Tensor | None = None) -> QuantizedWeight | None:
    """Return projections that share an input as one weight, stacked along outputs. Zero points and scales are converted
    to a common coding if they can be. None if the codings still differ."""
    if any(part.coding.zeros for part in parts):
        converted = [part.with_zeros() for part in parts]
        parts = [part for part in converted if part is not None]
        if len(parts) < len(converted):
            return None
    first = parts[0].coding
    if any(part.coding.outputs != first.outputs or part.shape[0] % first.outputs for part in parts[:-1]) or (
        parts[-1].coding.outputs != first.outputs
    ):
        parts = [part.by_output() for part in parts]
        first = parts[0].coding
    if any(part.coding != first for part in parts):
        return None
    return QuantizedWeight(
        torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts]), first, bias
    )


def _scales_and_minima(words: Tensor, coding: Coding) -> tuple[Tensor, Tensor]:
    """Return the scales and the minima in int32 words `[out, in / block * words]`, each `[out, groups]` float64."""
    out, blocks = words.shape[0], words.shape[1] // coding.words
    of = words.reshape(out, blocks, coding.words)
    halves = of[..., :1].contiguous().view(torch.float16).double()
    if coding.minima == "pairs":
        return halves[..., 0], halves[..., 1]
    factors = of[..., 1:].contiguous().view(torch.int8).view(out, blocks, -1, 2).double()
    made = halves[..., None, :] * factors
    return made[..., 0].reshape(out, -1), made[..., 1].reshape(out, -1)


def _cut(
    weight: Tensor, bias: Tensor | None, dim: int, rank: int, world: int, parts: Sequence[int] | None
) -> tuple[Tensor, Tensor | None]:
    """Return rank `rank`'s part of weight and bias as copies. Arguments are those of `QuantizedWeight.shard`. Raises
    ValueError for a part that `world` does not divide."""
    sizes = [weight.shape[dim]] if parts is None else list(parts)
    if sum(sizes) != weight.shape[dim]:
        raise ValueError(f"parts={sizes}: must add up to {weight.shape[dim]}, dimension {dim} of the weight")
    uneven = [size for size in sizes if size % world]
    if uneven:
        raise ValueError(f"parts={sizes}: {uneven[0]} features cannot be split into world={world} equal shards")

    def part_of(tensor: Tensor, along: int) -> Tensor:
        return torch.cat([part.chunk(world, along)[rank] for part in torch.split(tensor, sizes, along)], along)

    if dim == IN:
        return part_of(weight, IN), bias if rank == 0 else None
    return part_of(weight, OUT), None if bias is None else part_of(bias, 0)
