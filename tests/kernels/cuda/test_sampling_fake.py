"""The sampling ops on fake CUDA tensors, as in a trace of the iteration functions, without a GPU."""

from __future__ import annotations

import pytest
import torch
from specrs.core import PURPOSE_DRAFT
from specrs.kernels.cuda import rules
from specrs.kernels.cuda.accept import AtRates
from specrs.kernels.cuda.argmax import argmax
from specrs.kernels.cuda.draw import draw
from specrs.kernels.cuda.philox import fill_noise
from specrs.kernels.cuda.sampling_cut import sampling_cut
from specrs.kernels.cuda.sampling_scratch import SamplingScratch
from specrs.kernels.cuda.sampling_structs import Accepted, Cut, Distribution, Drafted, RowParams
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
        params = RowParams(values, seeds)
        sampling_cut(logits, ints(N), values, Cut(floats(N), doubles(N), floats(N)), scratch, coarse=True)
        draw(logits, ints(N), params, floats(N), ints(N), PURPOSE_DRAFT, ints(N), scratch)
        fill_noise(ints(N), ints(N), 0, logits, True)
        drafted, out = Drafted(ints(B + 1), ints(B, K), ints(B)), Accepted(ints(B), ints(B, K + 1))
        rules.verify_greedy(ints(N), drafted, out)
        rules.verify_synthetic(ints(N), drafted, AtRates(floats(K), seeds, ints(B), ints(B)), out)
        rules.verify_coupled(logits, ints(N), params, floats(N), ints(N), drafted, out, scratch)
        p, q = Distribution(logits, floats(N), doubles(N)), Distribution(floats(K, B, V), floats(K, B), doubles(K, B))
        rules.verify_rejection(p, q, drafted, ints(B), ints(B), params, out, scratch)


def test_a_wrong_tensor_is_named() -> None:
    with FakeTensorMode():
        scratch = SamplingScratch.allocate(N, B, V, torch.device("cuda"))
        logits, values = floats(N, V), floats(9, 8)
        with pytest.raises(ValueError, match=r"^lse: torch.float32 \(15,\), must be torch.float64 \(15,\)"):
            sampling_cut(logits, ints(N), values, Cut(floats(N), floats(N), floats(N)), scratch, coarse=False)
        with pytest.raises(ValueError, match=r"emitted: torch.int64 \(3, 4\), must be torch.int64 \(3, 5\)"):
            rules.verify_greedy(ints(N), Drafted(ints(B + 1), ints(B, K), ints(B)), Accepted(ints(B), ints(B, K)))
        cut, lse = floats(K, B + 1)[:, :B], doubles(K, B)
        with pytest.raises(ValueError, match="draft_lse: strides"):
            rules.verify_rejection(
                Distribution(logits, floats(N), doubles(N)),
                Distribution(floats(K, B, V), cut, lse),
                Drafted(ints(B + 1), ints(B, K), ints(B)),
                ints(B),
                ints(B),
                RowParams(values, ints(9)),
                Accepted(ints(B), ints(B, K + 1)),
                scratch,
            )
