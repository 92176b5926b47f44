"""Logprobs against float64 softmax and a sort with lowest ids first."""

from __future__ import annotations

import math
from typing import cast

import numpy as np
import pytest
import torch
from specrs.verify.logprobs import LogprobsMode, logprob_values, token_logprobs
from specrs.verify.processing import filter_logits

from verify.reference import Request, softmax
from verify.rows import sampling_rows, union


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_ranks_and_order(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(30)
    logits = (torch.randint(-8, 8, (40, 51), generator=g) / 2).to(dtype)  # many ties
    tokens = torch.randint(0, 51, (40,), generator=g)
    got = token_logprobs(logprob_values("raw_logprobs", logits, -logits), tokens, 12)
    for i in range(40):
        exact = np.log(softmax(logits[i].numpy().astype(np.float64)))
        order = sorted(range(51), key=lambda token: (-logits[i, token].item(), token))
        assert got.top_ids[i].tolist() == order[:12]
        assert got.rank[i] == order.index(int(tokens[i])) + 1
        np.testing.assert_allclose(got.value[i].item(), exact[tokens[i]], rtol=1e-6)
        np.testing.assert_allclose(got.top_values[i].numpy(), exact[order[:12]], rtol=1e-6)
    assert got.value.dtype == got.top_values.dtype == torch.float32


def test_modes_say_which_distribution() -> None:
    raw = torch.tensor([[1.0, 3.0, 2.0, 0.0], [1.0, 3.0, 2.0, 0.0]])
    rows, steps = sampling_rows([Request(temperature=0.5, top_k=2), Request(temperature=0.0)])
    processed = filter_logits(raw, rows, union(steps))
    values = {
        mode: logprob_values(cast("LogprobsMode", mode), raw, processed) for mode in ("raw_logprobs", "raw_logits")
    }
    torch.testing.assert_close(values["raw_logprobs"], raw.log_softmax(dim=-1))
    assert values["raw_logits"] is raw
    assert logprob_values("processed_logits", raw, processed)[0].tolist() == [-math.inf, 6.0, 4.0, -math.inf]
    of_greedy = logprob_values("processed_logprobs", raw, processed)[1]
    torch.testing.assert_close(of_greedy, raw[1].log_softmax(dim=-1))
    sampled = token_logprobs(logprob_values("processed_logprobs", raw, processed), torch.tensor([2, 1]), 3)
    torch.testing.assert_close(sampled.value[0], torch.tensor(-math.log1p(math.exp(2.0))))
    assert sampled.rank.tolist() == [2, 1]
    assert sampled.top_ids[0].tolist() == [1, 2, 0]
    assert sampled.top_values[0, 2] == -math.inf


def test_no_top_tokens() -> None:
    got = token_logprobs(torch.zeros((2, 5)), torch.tensor([0, 4]), 0)
    assert got.top_ids.shape == (2, 0)
    assert got.rank.tolist() == [1, 5]


def test_unknown_modes_are_rejected() -> None:
    with pytest.raises(
        ValueError, match=r"logprobs_mode='cooked': must be one of raw_logprobs, processed_logprobs, raw_logits"
    ):
        logprob_values(cast("LogprobsMode", "cooked"), torch.zeros(1, 2), torch.zeros(1, 2))
