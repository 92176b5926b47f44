"""Text of an engine on ranks: that of one process, token for token, in float64, whatever drafts and samples."""

import threading
from typing import Any

import pytest
from engine.harness import Bank, assert_idle, greedy_jobs, make_bank, run_greedy
from engine.harness import config as engine_config
from engine.test_equivalence import engine_settings
from hypothesis import given
from hypothesis import strategies as st
from specrs import LLM, SamplingParams
from specrs.config import EngineConfig
from specrs.drafters.base import Proposed
from specrs.drafters.draft_model import DraftModel
from specrs.errors import EngineDeadError
from specrs.tokenizer import Tokenizer
from sweep import sweep

from parallel.harness import engine_on_threads

PROMPTS = ["class Point:\n    def __init__(self, x, y):\n        self.x", "import os\n\n\ndef "]
DRAFTERS: dict[str, dict[str, Any]] = {
    "a draft model": {"num_speculative_tokens": 4},
    "a draft model in parts": {"num_speculative_tokens": 4, "draft_tensor_parallel_size": 2},
    "a draft model by shared noise": {"num_speculative_tokens": 3, "rejection_sample_method": "coupled"},
    "a head": {"method": "eagle3", "num_speculative_tokens": 3},
    "a head in parts": {"method": "eagle3", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 2},
    "the text": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2},
    "two drafters": {
        "method": "suffix,draft_model",
        "num_speculative_tokens": 4,
        "rejection_sample_method": "coupled",
    },
}
SAMPLED = [
    SamplingParams(temperature=0.0, max_tokens=16, logprobs=2),
    SamplingParams(temperature=1.0, seed=1, max_tokens=12, n=2),
    SamplingParams(temperature=0.8, seed=2, max_tokens=12, top_p=0.9, top_k=30, min_p=0.01, repetition_penalty=1.1),
]
GRAMMAR = SamplingParams(temperature=0.7, seed=3, max_tokens=12, structured_outputs={"regex": r"[a-f]{4,9}\n"})


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Bank:
    """Qwen3 whose heads two ranks divide; its small draft has one KV head, which both hold."""
    return make_bank(tmp_path_factory.mktemp("ranks"), kv_heads=2)


@sweep(18)
@given(data=st.data())
def test_greedy_text(data: st.DataObject, bank: Bank) -> None:
    settings = data.draw(engine_settings(), label="engine")
    k = data.draw(st.integers(1, 6), label="engine K")
    draft = data.draw(st.sampled_from(["close", "small", "equal"]), label="draft")
    config = engine_config(bank.target, bank.drafts[draft], k=k, tensor_parallel_size=2, **settings)
    degree = data.draw(st.sampled_from([1, 2]), label="the draft's degree")
    assert config.speculative_config is not None
    object.__setattr__(config.speculative_config, "draft_tensor_parallel_size", degree)
    with engine_on_threads(config) as engine:
        run_greedy(engine, bank, data.draw(greedy_jobs(bank, k), label="requests"), k)
        assert_idle(engine)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_text_is_that_of_one_process(drafter: str, tokenizer: Tokenizer) -> None:
    settings = {"dtype": "float64", "max_model_len": 128, "device": "cpu"}
    speculative = DRAFTERS[drafter]
    whole = LLM(speculative_config=speculative | {"draft_tensor_parallel_size": 1}, **settings)
    config = EngineConfig.from_kwargs(speculative_config=speculative, tensor_parallel_size=2, **settings)
    with engine_on_threads(config) as engine:
        split = LLM.from_engine(engine, tokenizer)
        for params in [*SAMPLED, GRAMMAR] if drafter == "a draft model in parts" else SAMPLED:
            made, expected = (llm.generate(PROMPTS, params, use_tqdm=False) for llm in (split, whole))
            for one, other in zip(made, expected, strict=True):
                assert [c.token_ids for c in one.outputs] == [c.token_ids for c in other.outputs]
        ran, expected = split.stats(), whole.stats()
        # Of two drafters the one that is worth more drafts, by times that are measured.
        assert drafter == "two drafters" or ran.acceptance_histogram == expected.acceptance_histogram
        assert ran.num_cached_tokens == expected.num_cached_tokens > 0
        assert ran.accepted_tokens > 0


def test_four_ranks(bank: Bank) -> None:
    """More of them than KV heads."""
    config = engine_config(bank.target, bank.drafts["close"], k=3, tensor_parallel_size=4)
    with engine_on_threads(config) as engine:
        run_greedy(engine, bank, [(i, None, 20, 1) for i in range(6)], 3)


def test_a_drafter_that_fails_ends_the_engine(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere the launch would go on without its drafts, and ranks would no longer agree."""
    config = engine_config(bank.target, bank.drafts["close"], k=3, tensor_parallel_size=2, distributed_timeout=1.0)
    propose = DraftModel.propose

    def fail(*args: Any, **named: Any) -> Proposed:
        if threading.current_thread() is threading.main_thread():
            raise RuntimeError("broken on purpose")
        return propose(*args, **named)

    monkeypatch.setattr(DraftModel, "propose", fail)
    with engine_on_threads(config, exit_code=1) as engine:
        with pytest.raises(EngineDeadError, match=r"rank 0 of 2 failed: RuntimeError\('broken on purpose'\)"):
            run_greedy(engine, bank, [(0, None, 20, 1)], 3)
        assert not engine.requests
