"""Every drafter and some lists on the bundled target: the text of K = 0, and statistics that add up by drafter."""

from functools import cache
from typing import Any

import pytest
from specrs import LLM, SamplingParams
from specrs.pair.prompts import PROMPTS

METHODS = (
    "draft_model",
    "eagle3",
    "ngram",
    "suffix",
    "suffix,draft_model",
    "ngram,eagle3",
    "ngram,suffix,eagle3",
)
LOOKUP = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=24),
    SamplingParams(temperature=0.9, seed=7, max_tokens=24),
)


def texts(**speculative: Any) -> tuple[list[list[int]], LLM]:
    """Return the ids generated for six prompts, each with both of `PARAMS`, and the engine."""
    llm = LLM(speculative_config=speculative or None, max_model_len=512, threads=1)
    prompts = [prompt for prompt in PROMPTS[:6] for _ in PARAMS]
    outputs = llm.generate(prompts, list(PARAMS) * 6, use_tqdm=False)
    llm.engine.scheduler.check_integrity()
    return [list(output.outputs[0].token_ids) for output in outputs], llm


@cache
def plain() -> list[list[int]]:
    return texts()[0]


@pytest.mark.parametrize("method", METHODS)
def test_text_and_statistics(method: str) -> None:
    keys = LOOKUP if "ngram" in method else {}
    found, llm = texts(method=method, num_speculative_tokens=4, rejection_sample_method="coupled", **keys)
    assert found == plain()
    stats = llm.stats()
    assert list(stats.drafters) == method.split(",")
    # each has its turn, and what is drafted is one's
    assert all(figures.drafts for figures in stats.drafters.values())
    assert sum(figures.drafts for figures in stats.drafters.values()) == stats.drafts
    assert sum(figures.accepted_tokens for figures in stats.drafters.values()) == stats.accepted_tokens > 0
    llm.reset_stats()
    assert not any(figures.drafts for figures in llm.stats().drafters.values())
