"""Synthetic acceptance: the given rates come out position by position, and every output says what it is."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specrs import LLM, SamplingParams
from specrs.verify.synthetic import accept_at_rates

RATES = (0.8, 0.6, 0.3, 0.3)


def test_rates_by_position() -> None:
    count = 200_000
    uniforms = torch.rand(count, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    accepted = accept_at_rates(torch.tensor(RATES, dtype=torch.float64), uniforms, torch.full((count,), 4))
    for i, rate in enumerate(RATES):
        sigma = (rate * (1 - rate) / count) ** 0.5
        assert abs(float((accepted > i).double().mean()) - rate) < 4.5 * sigma


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_rates_of_zero_and_one(drafts: list[int]) -> None:
    uniforms, k = torch.full((len(drafts), 4), 0.999), torch.tensor(drafts)
    assert accept_at_rates(torch.ones(4), uniforms, k).equal(k)
    assert (accept_at_rates(torch.zeros(4), uniforms * 1e-3, k) == 0).all()
    assert accept_at_rates(torch.tensor([1.0, 1.0, 0.0, 0.0]), uniforms, k).equal(k.clamp(max=2))


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
