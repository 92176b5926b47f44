"""The sampling ops on fake CUDA tensors: what a trace of the iteration functions does, without a GPU."""

from __future__ import annotations

import pytest
import torch
from specrs.core import PURPOSE_DRAFT
from specrs.kernels.cuda import rules
from specrs.kernels.cuda.argmax import argmax
from specrs.kernels.cuda.draw import draw
from specrs.kernels.cuda.philox import fill_noise
from specrs.kernels.cuda.sampling_cut import sampling_cut
from specrs.kernels.cuda.sampling_scratch import SamplingScratch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

B, K, N, V = 3, 4, 15, 151_936


def ints(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="cuda")


def floats(*shape: int) -> Tensor:
    return torch.empty(shape, device="cuda")


def doubles(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float64, device="cuda")


def test_every_op_traces() -> None:
    with FakeTensorMode():
        scratch = SamplingScratch.allocate(N, B, V, torch.device("cuda"))
        logits, values, seeds = floats(N, V), floats(9, 8), ints(9)
        argmax(logits, ints(N), floats(N), scratch)
        sampling_cut(logits, ints(N), values, floats(N), doubles(N), floats(N), scratch, coarse=True)
        draw(logits, ints(N), values, floats(N), seeds, ints(N), PURPOSE_DRAFT, ints(N), scratch)
        fill_noise(ints(N), ints(N), 0, logits, True)
        entries = ints(B + 1), ints(B, K), ints(B)
        out = ints(B), ints(B, K + 1)
        rules.verify_greedy(ints(N), *entries, *out)
        rules.verify_synthetic(ints(N), *entries, floats(K), seeds, ints(B), ints(B), *out)
        rules.verify_coupled(logits, ints(N), values, floats(N), seeds, ints(N), *entries, *out, scratch)
        slab = floats(K, B, V), floats(K, B), doubles(K, B)
        tail = ints(B), ints(B), values, seeds, *out, scratch
        rules.verify_rejection(logits, floats(N), doubles(N), *slab, *entries, *tail)


def test_a_wrong_tensor_is_named() -> None:
    with FakeTensorMode():
        scratch = SamplingScratch.allocate(N, B, V, torch.device("cuda"))
        logits, values = floats(N, V), floats(9, 8)
        with pytest.raises(ValueError, match=r"out_lse: torch.float32 \(15,\), must be torch.float64 \(15,\)"):
            sampling_cut(logits, ints(N), values, floats(N), floats(N), floats(N), scratch, coarse=False)
        with pytest.raises(ValueError, match=r"emitted: torch.int64 \(3, 4\), must be torch.int64 \(3, 5\)"):
            rules.verify_greedy(ints(N), ints(B + 1), ints(B, K), ints(B), ints(B), ints(B, K))
        cut, lse = floats(K, B + 1)[:, :B], doubles(K, B)
        with pytest.raises(ValueError, match="draft_lse: strides"):
            rules.verify_rejection(
                logits,
                floats(N),
                doubles(N),
                floats(K, B, V),
                cut,
                lse,
                ints(B + 1),
                ints(B, K),
                ints(B),
                ints(B),
                ints(B),
                values,
                ints(9),
                ints(B),
                ints(B, K + 1),
                scratch,
            )
