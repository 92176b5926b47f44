"""The bundled pair: acceptance counts equal those of a plain transformers script."""

import pytest
import torch
from hf_reference import Statistics, count_acceptance, load
from specrs import LLM, SamplingParams
from specrs.pair import DRAFT, TARGET
from specrs.pair.prompts import PROMPTS
from sweep import stride

NEW_TOKENS = 32


@pytest.fixture(scope="module")
def pair() -> tuple[object, object]:
    return load(TARGET), load(DRAFT)


@pytest.mark.parametrize("k", [1, 3, 5, 7][:: stride(3)])
def test_acceptance_counts_equal_a_plain_transformers_script(pair: tuple[object, object], k: int) -> None:
    llm = LLM(speculative_config={"num_speculative_tokens": k}, dtype="float64", max_model_len=512, max_num_seqs=4)
    outputs = llm.generate(list(PROMPTS[:5]), SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS), use_tqdm=False)
    statistics = Statistics()
    for output in outputs:
        expected = count_acceptance(*pair, output.prompt_token_ids, NEW_TOKENS, k, [0], statistics)
        assert output.outputs[0].token_ids == expected
    stats = llm.stats()
    assert (stats.drafts, stats.draft_tokens, stats.accepted_tokens) == (
        statistics.drafts,
        statistics.draft_tokens,
        statistics.accepted_tokens,
    )
    assert stats.accepted_per_position == statistics.per_position
    assert stats.acceptance_length == 1 + statistics.accepted_tokens / statistics.drafts
    assert torch.get_default_dtype() is torch.float32
