"""What rows 0 to m decide does not depend on the rows after them, which plain decoding does not reach."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specrs.core import RequestSampling
from specrs.runner.cuda.samplers import CoreSampler, TorchSampler, VerifyEntries
from specrs.verify.params import SamplingRows, Steps

PARAMS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 5, "min_p": 0.05, "top_p": 0.95},
]
K, VOCAB = 4, 11


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
@pytest.mark.parametrize("make", [CoreSampler, TorchSampler])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    which=st.lists(st.integers(0, len(PARAMS) - 1), min_size=1, max_size=4),
    waste=st.sampled_from([torch.nan, torch.inf, -torch.inf]),
    whole=st.booleans(),
    noise=st.sampled_from([0.0, 0.7, 3.0]),
    seed=st.integers(0, 2**31),
)
def test_rules(
    make: type[CoreSampler | TorchSampler],
    rule: str,
    which: list[int],
    waste: float,
    whole: bool,
    noise: float,
    seed: int,
) -> None:
    """`whole`: nothing else is in such a row; else one number is."""
    generator = torch.Generator().manual_seed(seed)
    rows, steps, batch = SamplingRows.allocate(len(which)), Steps(), len(which)
    for i, w in enumerate(which):
        steps = steps | rows.write(i, RequestSampling(**PARAMS[w]))  # type: ignore[arg-type]
    seeds, of = torch.randint(0, 2**60, (batch,), generator=generator), torch.arange(batch)
    sampler = make(rows, seeds, VOCAB)
    entry = of.repeat_interleave(K + 1)
    n = torch.randint(1, 2**33, (batch,), generator=generator)
    logits = torch.randn(batch * (K + 1), VOCAB, generator=generator) * 2
    own = logits.view(batch, K + 1, VOCAB)[:, :K] + noise * torch.randn(batch, K, VOCAB, generator=generator)
    q = None if rule == "coupled" else torch.zeros(batch, K, VOCAB)
    drafts = torch.stack([sampler.draft(own[:, i], of, n + i, steps, q, i)[1] for i in range(K)], dim=1)
    entries = VerifyEntries(of, entry, torch.arange(0, len(entry) + 1, K + 1), n, torch.full((batch,), K))
    accepted, tokens, _ = sampler.verify(logits, entries, drafts, steps, q)

    column = torch.arange(K + 1)
    wasted = (column > accepted[:, None]).view(-1)
    broken = logits.clone()
    if whole:
        broken[wasted] = waste
    else:
        broken[wasted, 3] = waste
    # What a draft was drawn from behind the first that is rejected is as little to be seen.
    broken_q = None if q is None else q.masked_fill((column[:K] > accepted[:, None])[:, :, None], torch.nan)
    again, told, top = sampler.verify(broken, entries, drafts, steps, broken_q)
    assert again.equal(accepted)
    emitted = column <= accepted[:, None]
    assert told[emitted].equal(tokens[emitted])
    assert top[~wasted].isfinite().all()
