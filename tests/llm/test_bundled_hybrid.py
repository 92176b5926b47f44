"""The bundled hybrid: its MTP head drafts by default, changes no text, and is accepted as often as a plain script
says."""

from functools import cache
from typing import Any

import pytest
from eagle3_reference import speculate
from hf_reference import Statistics, load
from hybrid_reference import float64
from mtp_reference import Script
from specrs import LLM, SamplingParams
from specrs.pair import HYBRID
from specrs.pair.prompts import PROMPTS

GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, seed=7, max_tokens=48, ignore_eos=True)
NEW_TOKENS = 24


def texts(**fields: Any) -> tuple[list[list[int]], LLM]:
    """Return the ids generated for eight prompts, each greedy and with a seed, and the engine."""
    llm = LLM(str(HYBRID), max_model_len=512, threads=1, **fields)
    outputs = llm.generate([p for p in PROMPTS[:8] for _ in range(2)], [GREEDY, SEEDED] * 8, use_tqdm=False)
    llm.engine.scheduler.check_integrity()
    return [list(output.outputs[0].token_ids) for output in outputs], llm


@cache
def plain(dtype: str) -> list[list[int]]:
    return texts(dtype=dtype)[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("k", [0, 1, 2, 3, 4, "auto"])
def test_text_is_that_without_drafts(k: int | str, dtype: str) -> None:
    drafts = {"num_speculative_tokens": k, "rejection_sample_method": "coupled"}
    found, llm = texts(speculative_config=drafts, dtype=dtype)
    assert found == plain(dtype)
    assert list(llm.stats().drafters) == ["mtp"]


@pytest.mark.parametrize(("k", "floor"), [(1, 1.6), (2, 2.1), (4, 2.8)])
def test_acceptance_length(k: int, floor: float) -> None:
    """Check the acceptance length against floors well below the measured values of greedy texts."""
    llm = LLM(str(HYBRID), max_model_len=512, threads=1, speculative_config={"num_speculative_tokens": k})
    llm.generate(list(PROMPTS[:16]), GREEDY, use_tqdm=False)
    assert llm.stats().acceptance_length > floor


def test_acceptance_counts_equal_a_plain_transformers_script() -> None:
    k, statistics = 3, Statistics()
    llm = LLM(str(HYBRID), dtype="float64", max_model_len=512, speculative_config={"num_speculative_tokens": k})
    with float64():
        params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
        outputs = llm.generate(list(PROMPTS[:3]), params, use_tqdm=False)
        target = load(HYBRID)
        script: Any = Script(target)
        for output in outputs:
            said = speculate(target, script, output.prompt_token_ids, NEW_TOKENS, k, [0], statistics)
            assert output.outputs[0].token_ids == said.tokens
    stats = llm.stats()
    found = (stats.drafts, stats.draft_tokens, stats.accepted_tokens, stats.accepted_per_position)
    known = (statistics.drafts, statistics.draft_tokens, statistics.accepted_tokens, statistics.per_position)
    assert found == known
