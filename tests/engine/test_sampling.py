"""Sampling through the engine: `coupled` text depends on the seed alone, `rejection` keeps the distribution."""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from hf_reference import generate, load
from hypothesis import given
from hypothesis import strategies as st
from specrs.core import InvalidRequestError
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.engine.request import Request
from specrs.sampling import SamplingParams
from sweep import some, sweep

from engine.harness import LONGEST, VOCAB, Bank, config, make_engine, poison, run

SAMPLED = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.3, "top_k": 12, "repetition_penalty": 1.3},
    {"temperature": 0.8, "presence_penalty": 0.7, "frequency_penalty": 0.4, "logit_bias": {3: 4.0, 17: -100.0}},
    {"temperature": 0.9, "allowed_token_ids": list(range(5, 200, 3)), "min_tokens": 9},
    {"temperature": 0.0, "repetition_penalty": 1.2},
]
BAD_WORDS = [[40], [8, 34], [1, 2, 3]]


def sampled(request_id: int, prompt: list[int], seed: int, k: int | None, engine_k: int, **params: object) -> Request:
    """Return a request that makes no text, with sampling parameters `params`. If `request_id` is a multiple of 3, its
    bad words are `BAD_WORDS`."""
    defaults = {"max_tokens": LONGEST, "detokenize": False, "num_speculative_tokens": k}
    return Request(
        request_id,
        prompt,
        SamplingParams(**(defaults | params)),
        num_speculative_tokens=engine_k,
        seed=seed,
        bad_words_token_ids=BAD_WORDS if request_id % 3 == 0 else (),
    )


def with_rule(engine: Engine, rule: str) -> Engine:
    engine.runner.rule = rule
    return engine


@functools.cache
def vanilla_text(
    target: Path, prompt: tuple[int, ...], which: int, seed: int, bad_words: bool, dtype: str, **fields: object
) -> list[int]:
    """Return the tokens of a request with parameters `SAMPLED[which]` that runs alone under `coupled`, without a draft
    model."""
    engine = with_rule(make_engine(target, None, k=0, dtype=dtype, max_num_batched_tokens=512, **fields), "coupled")
    job = sampled(0 if bad_words else 1, list(prompt), seed, None, 0, **SAMPLED[which])
    engine.add_request(job)
    run(engine)
    return job.output_token_ids


@pytest.mark.parametrize("family", ["qwen_bank", "native_qwen_bank", "native_llama_bank"])
@sweep(30)
@given(data=st.data())
def test_coupled_text_is_a_function_of_the_seed(
    family: str, data: st.DataObject, request_bank: dict[str, Bank]
) -> None:
    bank = request_bank[family]
    engine_k = data.draw(st.integers(1, 16), label="engine K")
    draft = data.draw(st.sampled_from(["close", "small", "equal"]), label="draft")
    block_size = data.draw(st.sampled_from([8, 16, 32]), label="block size")
    blocks = -(-128 // block_size)
    engine = make_engine(
        bank.target,
        bank.drafts[draft],
        k=engine_k,
        dtype=bank.dtype,
        block_size=block_size,
        max_num_batched_tokens=data.draw(st.sampled_from([7, 64, 512]), label="budget"),
        enable_prefix_caching=data.draw(st.booleans(), label="prefix caching"),
        max_num_seqs=data.draw(st.sampled_from([1, 3, 8]), label="rows"),
        max_steps_in_flight=data.draw(st.sampled_from([1, 2]), label="depth"),
        num_gpu_blocks_override=data.draw(st.sampled_from([blocks, blocks + 2, 8 * blocks]), label="blocks"),
    )
    with_rule(engine, "coupled")
    poison(engine)
    choice = st.tuples(
        st.integers(0, len(bank.prompts) - 1),
        st.integers(0, len(SAMPLED) - 1),
        st.integers(0, 3),  # seed
        st.one_of(st.none(), st.integers(0, engine_k)),  # K
    )
    jobs = []
    for i, (prompt, which, seed, k) in enumerate(data.draw(st.lists(choice, min_size=1, max_size=8), label="requests")):
        job = sampled(i, bank.prompts[prompt], seed, k, engine_k, **SAMPLED[which])
        engine.add_request(job)
        jobs.append((job, vanilla_text(bank.target, tuple(bank.prompts[prompt]), which, seed, i % 3 == 0, bank.dtype)))
    run(engine)
    for job, expected in jobs:
        assert job.output_token_ids == expected


def test_coupled_text_in_fp32_by_torch(qwen_bank: Bank) -> None:
    differing, eager = 0, {"dtype": "float32", "enforce_eager": True}
    for draft in ("close", "small"):
        engine = with_rule(make_engine(qwen_bank.target, qwen_bank.drafts[draft], k=5, **eager), "coupled")
        jobs = []
        for i, prompt in enumerate(qwen_bank.prompts):
            job = sampled(i, prompt, i, 5, 5, **SAMPLED[i % len(SAMPLED)])
            engine.add_request(job)
            jobs.append(job)
        run(engine)
        for i, job in enumerate(jobs):
            which = i % len(SAMPLED)
            text = vanilla_text(qwen_bank.target, tuple(job.prompt_token_ids), which, i, i % 3 == 0, **eager)
            differing += job.output_token_ids != text
    assert differing <= 1, "near-ties flip in fp32, but about once in a hundred texts"


GREEDY = [
    ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
    ({"logit_bias": {3: 4.0, 17: -6.0}}, {"sequence_bias": [[[3], 4.0], [[17], -6.0]]}),
    ({"allowed_token_ids": list(range(5, 200))}, {"suppress_tokens": [*range(5), *range(200, VOCAB)]}),
    ({"min_tokens": 20}, {"min_new_tokens": 20}),
    ({"bad_words": True}, {"bad_words_ids": BAD_WORDS}),
    ({"top_k": 3, "top_p": 0.5, "min_p": 0.3}, {}),
]


@pytest.mark.parametrize(("ours", "theirs"), GREEDY, ids=lambda value: next(iter(value), "filters"))
def test_each_parameter_alone_is_transformers_own(
    qwen_bank: Bank, ours: dict[str, object], theirs: dict[str, object]
) -> None:
    bank, model = qwen_bank, load(qwen_bank.target)
    params = {"temperature": 0.0, "max_tokens": 30} | {key: v for key, v in ours.items() if key != "bad_words"}
    for prompt in bank.prompts[2:8]:
        expected = generate(model, prompt, 30, eos=bank.eos, **theirs)
        for k in (0, 5):
            engine = make_engine(bank.target, bank.drafts["close"], k=5)
            job = sampled(0 if "bad_words" in ours else 1, prompt, 0, k, 5, **params)
            engine.add_request(job)
            run(engine)
            assert job.output_token_ids == expected


@pytest.mark.parametrize("params", [{"presence_penalty": 1.1}, {"frequency_penalty": 0.6}])
def test_penalties_that_transformers_lacks_are_those_of_a_loop(qwen_bank: Bank, params: dict[str, float]) -> None:
    bank, model = qwen_bank, load(qwen_bank.target)
    prompt = bank.prompts[4]
    expected: list[int] = []
    for _ in range(30):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + expected])).logits[0, -1].double().numpy().copy()
        for token in set(expected):
            logits[token] -= params.get("presence_penalty", 0.0)
            logits[token] -= params.get("frequency_penalty", 0.0) * expected.count(token)
        expected.append(int(logits.argmax()))
    for k in (0, 5):
        engine = make_engine(bank.target, bank.drafts["close"], k=5)
        job = sampled(1, prompt, 0, k, 5, temperature=0.0, max_tokens=30, ignore_eos=True, **params)
        engine.add_request(job)
        run(engine)
        assert job.output_token_ids == expected


@pytest.fixture(scope="module")
def small_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and an unrelated draft over 16 tokens."""
    folder = tmp_path_factory.mktemp("sixteen")
    shape = {"vocab": 16, "hidden": 32, "layers": 1, "kv_heads": 1, "head_dim": 16, "initializer_range": 0.4}
    return (
        make_checkpoint(folder / "target", seed=5, **shape),
        make_checkpoint(folder / "draft", seed=6, **shape),
    )


def joint_distribution(target: Path, prompt: list[int], temperature: float) -> np.ndarray:
    """Return p(t1, t2, t3) after `prompt`, `[16, 16, 16]`, by enumeration with transformers."""
    model = load(target)
    pairs = torch.cartesian_prod(torch.arange(16), torch.arange(16))
    contexts = torch.cat((torch.tensor(prompt).expand(256, -1), pairs), dim=1)
    with torch.inference_mode():
        p = (model(contexts).logits.double() / temperature).softmax(dim=-1)
    n = len(prompt)
    first, second, third = p[0, n - 1], p[::16, n], p[:, n + 1]
    return (first[:, None, None] * second[:, :, None] * third.view(16, 16, 16)).numpy()


def z_score(counts: np.ndarray, expected: np.ndarray) -> float:
    """Return the chi-square statistic in standard deviations from its degrees of freedom. Cells under 5 expected draws
    are one cell."""
    counts, expected = counts.ravel(), expected.ravel()
    small = expected < 5
    counts = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(counts) - 1
    return (chi2 - freedom) / (2 * freedom) ** 0.5


TWO_TOKENS = {"max_num_seqs": 1000, "max_num_batched_tokens": 8192, "max_model_len": 16, "block_size": 8}
"""Settings of an engine for `check_two_token_draws`."""


def check_two_token_draws(engine: Engine, target: Path, k: int, draws: int, least_acceptance: float = 0.1) -> None:
    """Sample the first three tokens `draws` times with an engine over 16 ids. Check the distributions of tokens 1 and 2
    and of tokens 2 and 3 against the target's exact ones, and that the acceptance rate lies between `least_acceptance`
    and 0.9."""
    prompt, temperature = [3, 1, 4, 1, 5], 0.9
    asked = {"temperature": temperature, "max_tokens": 5, "ignore_eos": True, "detokenize": False}
    params = SamplingParams(num_speculative_tokens=k, **asked)
    jobs = [Request(i, prompt, params, num_speculative_tokens=k, seed=i) for i in range(draws)]
    for job in jobs:
        engine.add_request(job)
    run(engine)
    texts = np.array([job.output_token_ids for job in jobs])
    p = joint_distribution(target, prompt, temperature)
    rate = engine.stats().acceptance_rate
    assert least_acceptance < rate < 0.9, "both acceptance and rejection must be exercised"
    for cells, expected in (
        (texts[:, :2], p.sum(axis=2)),
        (texts[:, 1:3], p.sum(axis=0)),
    ):
        counts = np.zeros((16, 16))
        np.add.at(counts, tuple(cells.T), 1)
        z = z_score(counts, draws * expected)
        assert abs(z) < 4.5, f"K={k}: z = {z:.1f}"


@pytest.mark.parametrize(("rule", "k", "dtype"), some(3, ["rejection", "coupled"], [1, 3], ["float64", "float32"]))
def test_two_token_draws_are_the_targets_own(
    small_vocabulary: tuple[Path, Path], rule: str, k: int, dtype: str
) -> None:
    target, draft = small_vocabulary
    engine = with_rule(build_engine(config(target, draft, k=k, dtype=dtype, **TWO_TOKENS)), rule)
    # Both dtypes share the acceptance and the sampling; in float64 torch computes the passes, at four times the cost.
    check_two_token_draws(engine, target, k, 20_000 if dtype == "float32" else 6_000)


def test_logprobs_are_those_of_vanilla_decoding(qwen_bank: Bank) -> None:
    bank, model = qwen_bank, load(qwen_bank.target)
    prompt = bank.prompts[4]
    for k in (0, 5):
        engine = make_engine(bank.target, bank.drafts["close"], k=5, max_num_batched_tokens=7)
        job = sampled(1, prompt, 7, k, 5, temperature=0.8, top_k=20, logprobs=3, prompt_logprobs=2, max_tokens=20)
        engine.add_request(job)
        run(engine)
        text = torch.tensor([prompt + job.output_token_ids])
        with torch.inference_mode():
            expected = model(text).logits[0].double().log_softmax(dim=-1)
        assert job.prompt_logprobs is not None
        assert job.logprobs is not None
        assert job.prompt_logprobs[0] is None
        told = [*job.prompt_logprobs[1:], *job.logprobs]
        assert len(told) == text.shape[1] - 1
        for position, entry in enumerate(told):
            row = expected[position]
            assert entry.token_id == text[0, position + 1]
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-5)
            assert entry.rank == int((row > row[entry.token_id]).sum()) + 1
            count = 2 if position < len(prompt) - 1 else 3
            assert entry.top_ids == row.topk(count).indices.tolist()


def test_a_request_without_an_allowed_token_fails_alone(either: Bank) -> None:
    engine = make_engine(either.target, either.drafts["close"], k=3, dtype=either.dtype)
    with pytest.raises(InvalidRequestError, match="no token is allowed at the start"):
        engine.add_request(sampled(3, either.prompts[4], 0, None, 3, allowed_token_ids=[40]))  # and 40 is a bad word
    params = SamplingParams(temperature=0.8, max_tokens=LONGEST, detokenize=False, allowed_token_ids=[8])
    bad = Request(2, either.prompts[4], params, num_speculative_tokens=3, seed=0, bad_words_token_ids=[[8, 8]])
    good = sampled(1, either.prompts[5], 0, None, 3, temperature=0.0, ignore_eos=True)
    engine.add_request(bad)
    engine.add_request(good)
    run(engine)
    assert bad.finish_reason == "error"
    assert "no token is allowed" in str(bad.error)
    assert good.output_token_ids == either.continuations[5]


def test_rejection_text_depends_on_no_neighbour(either: Bank) -> None:
    base = {"temperature": 0.8, "max_tokens": 20}
    texts = []
    # A budget for every chunk at once and no shared prefixes: where a chunk waits, K and with it the draws differ.
    fields = {"max_num_batched_tokens": 512, "enable_prefix_caching": False}
    for together in (False, True):
        engine = make_engine(either.target, either.drafts["close"], k=4, dtype=either.dtype, **fields)
        jobs = [sampled(i, either.prompts[i], i, 4, 4, **(SAMPLED[i % len(SAMPLED)] | base)) for i in range(6)]
        for job in jobs:
            engine.add_request(job)
            if not together:
                run(engine)
        run(engine)
        texts.append([job.output_token_ids for job in jobs])
    assert texts[0] == texts[1]


def test_without_drafts_every_rule_writes_the_same_text(either: Bank) -> None:
    texts = []
    for draft, rule in ((None, "rejection"), ("close", "rejection"), ("close", "coupled")):
        engine = with_rule(
            make_engine(
                either.target,
                draft and either.drafts[draft],
                k=4 if draft else 0,
                dtype=either.dtype,
            ),
            rule,
        )
        jobs = [sampled(i, either.prompts[i], i, 0, 4, temperature=0.9) for i in range(6)]
        for job in jobs:
            engine.add_request(job)
        run(engine)
        texts.append([job.output_token_ids for job in jobs])
    assert texts[0] == texts[1] == texts[2]
