"""Decisions of rows 0 to m do not depend on later rows, which plain decoding does not reach."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samplers import SAMPLERS, RowSampler

PARAMS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 5, "min_p": 0.05, "top_p": 0.95},
]
K, VOCAB = 4, 11


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
@pytest.mark.parametrize("make", SAMPLERS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    which=st.lists(st.integers(0, len(PARAMS) - 1), min_size=1, max_size=4),
    waste=st.sampled_from([torch.nan, torch.inf, -torch.inf]),
    whole=st.booleans(),
    noise=st.sampled_from([0.0, 0.7, 3.0]),
    seed=st.integers(0, 2**31),
)
def test_rules(
    make: type[RowSampler],
    rule: str,
    which: list[int],
    waste: float,
    whole: bool,
    noise: float,
    seed: int,
) -> None:
    """Check both rules with values such as NaN in later rows. `whole`: all values of such a row; otherwise one
    value."""
    generator = torch.Generator().manual_seed(seed)
    batch = len(which)
    seeds = torch.randint(0, 2**60, (batch,), generator=generator)
    sampler = make([PARAMS[w] for w in which], seeds, VOCAB)  # type: ignore[call-arg]
    n = torch.randint(1, 2**33, (batch,), generator=generator)
    logits = torch.randn(batch * (K + 1), VOCAB, generator=generator) * 2
    own = logits.view(batch, K + 1, VOCAB)[:, :K] + noise * torch.randn(batch, K, VOCAB, generator=generator)
    drawn = [sampler.draft(own[:, i], n + i, rule) for i in range(K)]
    drafts, q = torch.stack([tokens for tokens, _ in drawn], dim=1), torch.stack([probs for _, probs in drawn], dim=1)
    given = torch.arange(0, len(logits) + 1, K + 1), n, drafts, torch.full((batch,), K)
    accepted, tokens = sampler.verify(logits, *given, q if rule == "rejection" else None)

    column = torch.arange(K + 1)
    wasted = (column > accepted[:, None]).view(-1)
    broken = logits.clone()
    if whole:
        broken[wasted] = waste
    else:
        broken[wasted, 3] = waste
    # What a draft was drawn from after the first that is rejected is as little to be seen.
    broken_q = q.masked_fill((column[:K] > accepted[:, None])[:, :, None], torch.nan)
    again, told = sampler.verify(broken, *given, broken_q if rule == "rejection" else None)
    assert again.equal(accepted)
    emitted = column <= accepted[:, None]
    assert told[emitted].equal(tokens[emitted])
