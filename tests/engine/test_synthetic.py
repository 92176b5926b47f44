"""Synthetic acceptance: the given rates come out position by position, and every output is marked as synthetic."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrs import LLM, SamplingParams
from specrs.reference.sampling import accept_at_rates

RATES = (0.8, 0.6, 0.3, 0.3)


def test_rates_by_position() -> None:
    count = 20_000
    accepted = np.array([accept_at_rates(RATES, seed, 7) for seed in range(count)])
    for i, rate in enumerate(RATES):
        sigma = (rate * (1 - rate) / count) ** 0.5
        assert abs(float((accepted > i).mean()) - rate) < 4.5 * sigma


@given(st.integers(0, 4), st.integers(-(2**63), 2**63 - 1))
def test_rates_of_zero_and_one(k: int, seed: int) -> None:
    assert accept_at_rates([1.0] * k, seed, 7) == k
    assert accept_at_rates([0.0] * k, seed, 7) == 0
    assert accept_at_rates([1.0, 1.0, 0.0, 0.0][:k], seed, 7) == min(k, 2)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_engine(temperature: float) -> None:
    speculative = {
        "num_speculative_tokens": 4,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": RATES,
    }
    with pytest.warns(UserWarning, match="for timing only; the text is not the target's"):
        llm = LLM(speculative_config=speculative, max_num_seqs=8, max_model_len=400)
    params = SamplingParams(max_tokens=300, ignore_eos=True, temperature=temperature, seed=1)
    outputs = llm.generate([f"{i} is a number" for i in range(8)], params, use_tqdm=False)
    stats = llm.stats()
    assert stats.synthetic_acceptance
    assert all(output.metrics.synthetic_acceptance for output in outputs)
    assert stats.drafts > 500
    for rate, share in zip(RATES, stats.per_position, strict=True):
        assert abs(share - rate) < 4.5 * (rate * (1 - rate) / stats.drafts) ** 0.5
