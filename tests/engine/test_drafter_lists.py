"""Suffix decoding and lists of drafters through the engine: the text is that of K = 0 under every rule, for any
drafts."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrs.backends.ring import Header, RingSlot
from specrs.backends.weights import Weights
from specrs.config import EngineConfig
from specrs.core import DRAFTER_DEVICE, DRAFTERS
from specrs.engine import build
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.engine.request import Request
from specrs.sampling import SamplingParams
from specrs.speculative_config import DEFAULT_MAX_SPECULATIVE_TOKENS
from sweep import some, sweep

from engine import harness
from engine.conftest import FAMILIES
from engine.harness import Bank, greedy_jobs, poison, run, run_greedy, weights

MAX_MODEL_LEN = 128
DRAFT = "close"
METHODS = ("suffix", "ngram,suffix", "suffix,draft_model", "ngram,draft_model", "ngram,suffix,draft_model")


def make_engine(bank: Bank, method: str, *, k: int | str, **fields: object) -> Engine:
    """Make an engine on cached weights. torch computes in float64."""
    speculative: dict[str, object] = {"method": method, "num_speculative_tokens": k}
    speculative["rejection_sample_method"] = fields.pop("rule", "rejection")
    with_model, depth = "draft_model" in method, fields.pop("depth", 24)
    if "ngram" in method:
        speculative |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    if "suffix" in method:
        speculative["suffix_decoding_max_tree_depth"] = depth
    draft = bank.drafts[DRAFT] if with_model else None
    loaded = weights(bank.target, draft, bank.dtype)
    if with_model:
        speculative["model"] = str(draft)
    defaults: dict[str, object] = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    config = EngineConfig(
        model=str(bank.target), speculative_config=speculative, dtype=bank.dtype, **(defaults | fields)
    )
    return build_engine(config, Weights(loaded.target, loaded.drafter if with_model else None))


def count_drafters(engine: Engine) -> list[set[int]]:
    """Return a list that gets, for each step, the drafters of its sequences."""
    seen: list[set[int]] = []

    def watch(slot: RingSlot, header: Header, ms: float) -> None:
        record, count = slot.record_arrays, header.num_decode
        pairs = zip(record["seq_drafter"][:count], record["seq_k"][:count], strict=True)
        seen.append({int(drafter) for drafter, k in pairs if k})

    engine.watch = watch
    return seen


@pytest.mark.parametrize(("family", "method"), some(3, FAMILIES, METHODS))
@sweep(10)
@given(data=st.data())
def test_greedy_text(method: str, family: str, data: st.DataObject, request: pytest.FixtureRequest) -> None:
    """Check greedy texts against the bank's, with other requests in the batch, preemptions and prefix hits."""
    bank: Bank = request.getfixturevalue(family)
    engine_k = data.draw(st.integers(0, 8), label="engine K")
    blocks_of_one = MAX_MODEL_LEN // 16
    engine = make_engine(
        bank,
        method,
        k=engine_k,
        depth=data.draw(st.sampled_from([2, 5, 24]), label="max_tree_depth"),
        max_num_batched_tokens=data.draw(st.sampled_from([7, 64, 512])),
        enable_prefix_caching=data.draw(st.booleans()),
        max_num_seqs=data.draw(st.sampled_from([1, 3, 8])),
        num_gpu_blocks_override=data.draw(st.sampled_from([blocks_of_one, 2 * blocks_of_one, 8 * blocks_of_one])),
    )
    poison(engine)
    run_greedy(engine, bank, data.draw(greedy_jobs(bank, engine_k), label="requests"), engine_k)
    engine.scheduler.check_integrity()


SAMPLED = [
    {"temperature": 1.0},
    {"temperature": 0.3, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.8, "top_k": 3, "repetition_penalty": 1.3},
    {"temperature": 0.8, "presence_penalty": 0.7, "logit_bias": {3: 6.0, 17: 6.0, 40: 6.0}},
    {"temperature": 0.9, "allowed_token_ids": [5, 9, 14], "min_tokens": 9},
    {"temperature": 0.0, "repetition_penalty": 1.2},
]


def sampled(bank: Bank, method: str, k: int, rule: str) -> tuple[list[list[int]], set[int]]:
    """Return the text of each prompt, sampled with the entries of `SAMPLED` in turn, and the drafters that shared a
    step with another one."""
    engine = make_engine(bank, method, k=k, rule=rule)
    seen, jobs = count_drafters(engine), []
    for i, prompt in enumerate(bank.prompts[:12]):
        params = SamplingParams(max_tokens=30, detokenize=False, ignore_eos=True, **SAMPLED[i % len(SAMPLED)])  # type: ignore[arg-type]
        jobs.append(Request(i, list(prompt), params, num_speculative_tokens=k, seed=900 + i))
        engine.add_request(jobs[-1])
    run(engine)
    mixed = set(itertools.chain.from_iterable(drafters for drafters in seen if len(drafters) > 1))
    return [job.output_token_ids for job in jobs], mixed


@pytest.mark.parametrize(("family", "method"), some(3, FAMILIES, METHODS))
def test_coupled_text_is_that_of_k_0(family: str, method: str, request: pytest.FixtureRequest) -> None:
    bank: Bank = request.getfixturevalue(family)
    vanilla, _ = sampled(bank, method, 0, "coupled")
    drafted, mixed = sampled(bank, method, 4, "coupled")
    assert drafted == vanilla
    if "draft_model" in method:
        assert DRAFTER_DEVICE in mixed
        assert mixed - {DRAFTER_DEVICE}


@pytest.mark.parametrize("method", ["suffix", "ngram,suffix"])
def test_point_masses_draw_the_text_of_k_0_under_rejection(method: str, request: pytest.FixtureRequest) -> None:
    for family in FAMILIES:
        bank: Bank = request.getfixturevalue(family)
        assert sampled(bank, method, 4, "rejection")[0] == sampled(bank, method, 0, "coupled")[0]


def test_auto_chooses_drafter_and_k(qwen_bank: Bank) -> None:
    """Check K = `auto` with a list of drafters: measuring step costs at the start counts no drafts, texts equal those
    of K = 0, and the drafters' statistics add up to the engine's."""
    engine = make_engine(qwen_bank, "ngram,suffix,draft_model", k="auto", max_num_seqs=4)
    assert engine.planner is not None
    assert engine.stats().drafts == 0
    k = engine.num_speculative_tokens
    jobs = [
        harness.request(i, qwen_bank.prompts[i], k=None, max_tokens=40, engine_k=k, ignore_eos=True) for i in range(8)
    ]
    for job in jobs:
        engine.add_request(job)
    run(engine)
    assert [job.output_token_ids for job in jobs] == [text[:40] for text in qwen_bank.continuations[:8]]
    statistics, scheduler = engine.stats(), engine.scheduler
    parts = [scheduler.acceptance_of(drafter) for drafter in range(len(DRAFTERS))]
    assert sum(part.drafts for part in parts) == statistics.drafts
    assert sum(part.accepted_tokens for part in parts) == statistics.accepted_tokens


@pytest.mark.parametrize("method", ["draft_model", "suffix", "suffix,draft_model"])
def test_auto_knows_what_every_kind_of_draft_costs(
    method: str, qwen_bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that `auto` measures the costs of every kind of draft. With a draft model alone, too, because predictions
    and grammars draft next to it."""
    told: list[tuple[float, list[float], float]] = []

    class Told:
        def set_draft_costs(self, passes: float, rows: list[float], catch_up: float) -> None:
            told.append((passes, rows, catch_up))

    measure = build._measure
    monkeypatch.setattr(build, "_measure", lambda blueprint, _, *parts: measure(blueprint, Told(), *parts))
    make_engine(qwen_bank, method, k="auto", max_steps_in_flight=1)
    [(passes, rows, catch_up)] = told
    assert len(rows) == DEFAULT_MAX_SPECULATIVE_TOKENS
    assert all(cost >= 0.0 for cost in (passes, catch_up, *rows))
    if method == "suffix":
        assert (passes, catch_up) == (0.0, 0.0)


def test_outputs_of_others_are_drafted_from(qwen_bank: Bank) -> None:
    """Check that outputs of other requests are drafted from: when a request is repeated, nearly all of its output is
    drafted."""
    engine = make_engine(qwen_bank, "suffix", k=8)
    counts = []
    for i in range(2):
        job = harness.request(i, qwen_bank.prompts[4], k=None, max_tokens=40, engine_k=8, ignore_eos=True)
        engine.add_request(job)
        run(engine)
        assert job.output_token_ids == qwen_bank.continuations[4][:40]
        counts.append(job.acceptance.accepted_tokens)
    assert counts[1] > max(counts[0], 20)
