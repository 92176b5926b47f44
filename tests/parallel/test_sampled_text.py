"""Text of random requests on two ranks: that of one process, token for token, in float64, for every family.

The test draws the family, the drafter and its degree, the engine's settings and every parameter of every request. One
process with the same settings is the reference. The rule is `coupled`, because text by `rejection` depends on which
requests draft when.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import FAMILIES, edit_json, make_checkpoint, make_eagle3, perturb_checkpoint
from engine.harness import VOCAB, assert_idle, build, make_prompts
from engine.test_equivalence import engine_settings
from hypothesis import given
from hypothesis import strategies as st
from specrs import LLM, CompletionOutput, RequestOutput, SamplingParams
from specrs.config import EngineConfig
from specrs.engine.tokenizer import load_tokenizer
from specrs.engine.weights import load_weights
from sweep import sweep
from verify.test_processing import requests as processing

from parallel.harness import engine_on_threads

LONGEST = 20
PROMPTS = make_prompts()
LOGPROB_TOLERANCE = 1e-4
"""Tolerance of log probabilities: norms round to fp32, so the order of sums can move a logit by more than float64
rounding; penalties multiply the difference."""
IN_PARTS = {"draft_tensor_parallel_size": 2}
DRAFTERS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a draft model": {"method": "draft_model", "model": "draft"},
    "a draft model in parts": {"method": "draft_model", "model": "draft"} | IN_PARTS,
    "parallel drafting": {"method": "draft_model", "model": "parallel", "parallel_drafting": True},
    "parallel drafting in parts": {"method": "draft_model", "model": "parallel", "parallel_drafting": True} | IN_PARTS,
    "a head": {"method": "eagle3", "model": "head"},
    "a head in parts": {"method": "eagle3", "model": "head"} | IN_PARTS,
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix": {"method": "suffix"},
}
ON_HOST = ("ngram", "suffix")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that returns the folder of a family's target or drafter, made when first drawn."""
    root = tmp_path_factory.mktemp("families")

    def made(family: str) -> Path:
        folder = root / family
        if not folder.exists():
            target = make_checkpoint(
                folder / "target", family, hidden=48, intermediate=48, kv_heads=2, head_dim=12, layers=3, vocab=VOCAB
            )
            perturb_checkpoint(target, folder / "draft", noise=0.1, seed=2)
            perturb_checkpoint(target, folder / "parallel", noise=0.1, seed=3)
            edit_json(folder / "parallel" / "config.json", mask_token_id=VOCAB - 1)
            make_eagle3(folder / "head", target, layer_ids=[1, 2], vocab=60)
        return folder

    return made


@st.composite
def sampling_params(draw: st.DrawFn, k: int) -> SamplingParams:
    """Draw every parameter that changes tokens, or what is reported about them."""
    fields = asdict(draw(processing()))
    fields["logit_bias"] = dict(fields["logit_bias"])
    fields["bad_words"] = draw(st.lists(st.sampled_from(["a", "e", "th", " in"]), max_size=2))
    if draw(st.integers(0, 3)) == 0:
        # None of the others may leave a grammar without a token.
        fields |= {"allowed_token_ids": None, "bad_words": None, "min_tokens": 0}
        fields["structured_outputs"] = draw(
            st.sampled_from([{"regex": r"[a-f]{2,9}"}, {"choice": ["one", "two"]}, {"json": {"type": "boolean"}}])
        )
    return SamplingParams(
        **fields,
        seed=draw(st.one_of(st.none(), st.integers(0, 2**63 - 1))),
        n=draw(st.sampled_from([1, 1, 2])),
        max_tokens=draw(st.integers(6, LONGEST)),
        logprobs=draw(st.sampled_from([None, 0, 3])),
        prompt_logprobs=draw(st.sampled_from([None, None, 2])),
        stop=draw(st.sampled_from([None, "e", ["a", "or"]])),
        ignore_eos=draw(st.booleans()),
        num_speculative_tokens=draw(st.one_of(st.none(), st.integers(0, k))) if k else None,
    )


def check_completion(made: CompletionOutput, expected: CompletionOutput) -> None:
    for field in ("token_ids", "text", "finish_reason", "stop_reason"):
        assert getattr(made, field) == getattr(expected, field), field
    check_logprobs(made.logprobs, expected.logprobs)


def check_logprobs(made: Any, expected: Any) -> None:
    assert (made is None) == (expected is None)
    for one, other in zip(made or [], expected or [], strict=True):
        assert (one is None) == (other is None)
        if other is not None:
            assert list(one) == list(other)
            for token in other:
                assert one[token].rank == other[token].rank
                assert one[token].logprob == pytest.approx(other[token].logprob, abs=LOGPROB_TOLERANCE)


def check(made: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for one, other in zip(made, expected, strict=True):
        check_logprobs(one.prompt_logprobs, other.prompt_logprobs)
        for completion, reference in zip(one.outputs, other.outputs, strict=True):
            check_completion(completion, reference)


@sweep(36)
@given(data=st.data())
def test_text_of_any_request(data: st.DataObject, checkpoint: Callable[[str], Path]) -> None:
    family = data.draw(st.sampled_from(sorted(FAMILIES)), label="family")
    folder = checkpoint(family)
    drafter = data.draw(st.sampled_from(sorted(DRAFTERS)), label="drafter")
    k = data.draw(st.integers(1, 6), label="K") if DRAFTERS[drafter] else 0
    speculative = DRAFTERS[drafter] | {
        "num_speculative_tokens": k,
        "rejection_sample_method": "coupled",
    }
    if "model" in speculative:
        speculative["model"] = str(folder / speculative["model"])
    fields = data.draw(engine_settings(), label="engine")
    if drafter in ON_HOST:
        fields["max_steps_in_flight"] = 1  # what drafts from the text needs every token settled
    config = EngineConfig.from_kwargs(
        model=str(folder / "target"),
        speculative_config=speculative if k else None,
        tensor_parallel_size=2,
        dtype="float64",
        device="cpu",
        max_model_len=128,
        **fields,
    )
    jobs = data.draw(
        st.lists(st.tuples(st.integers(0, len(PROMPTS) - 1), sampling_params(k)), min_size=1, max_size=6),
        label="requests",
    )
    prompts, params = [{"prompt_token_ids": PROMPTS[which]} for which, _ in jobs], [asked for _, asked in jobs]
    alone = replace(
        config,
        tensor_parallel_size=1,
        speculative_config=config.speculative_config
        and replace(config.speculative_config, draft_tensor_parallel_size=1),
    )
    engine, tokenizer = build(alone, load_weights(alone)), load_tokenizer(alone)
    whole = LLM.from_engine(engine, tokenizer)
    expected = whole.generate(prompts, params, use_tqdm=False)
    with engine_on_threads(replace(config, num_gpu_blocks_override=engine.config.num_gpu_blocks_override)) as ranks:
        split = LLM.from_engine(ranks, tokenizer)
        check(split.generate(prompts, params, use_tqdm=False), expected)
        assert_idle(ranks)
