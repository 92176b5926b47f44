"""EAGLE-3 heads in engines: the text is that without drafts, and drafts and counts are those of a plain script."""

import contextlib
import dataclasses
import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint, make_eagle3
from eagle3_reference import Head, drafts_of, read, speculate
from hf_reference import Statistics, load
from hypothesis import given
from hypothesis import strategies as st
from specrs.backends.cpu.callable_model import CallableHead, CallableModel
from specrs.backends.ring import Header, RingSlot
from specrs.config import EngineConfig
from specrs.core import NotRunningError, UnknownRequestError
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.engine.request import Request
from specrs.engine.weights import load_weights
from specrs.errors import InvalidConfigError, UnsupportedConfigError
from sweep import some, sweep

from engine import harness
from engine.harness import LONGEST, VOCAB, Bank, make_engine, poison, request, run
from engine.logits import LOGITS, alone, logits_of, with_logits
from engine.test_equivalence import engine_settings
from engine.test_sampling import SAMPLED, TWO_TOKENS, check_two_token_draws, sampled, vanilla_text


def head_engine(bank: Bank, head: str, *, k: int, **fields: Any) -> Engine:
    settings = {"dtype": bank.dtype, "method": "eagle3"} | fields
    return make_engine(bank.target, bank.drafts[head], k=k, **settings)


@dataclass
class Drafts:
    """Records what an engine drafts: for each step and row, where its head's context began, and the drafts."""

    engine: Engine
    rounds: dict[int, list[tuple[int, int, list[int]]]] = field(default_factory=dict)

    def watch(self, patch: pytest.MonkeyPatch) -> "Drafts":
        """Start to record."""
        request_of: dict[int, int] = {}
        execute = self.engine.runner.execute

        def executed(slot: RingSlot, header: Header) -> None:
            record = slot.record_arrays
            admitted = (record[name][: header.num_admitted].tolist() for name in ("admit_row", "admit_request_id"))
            request_of.update(zip(*admitted, strict=True))
            execute(slot, header)
            decode, state = slice(0, header.num_decode), self.engine.runner.state
            rows, counts = record["seq_row"][decode].tolist(), {}
            for name in ("num_emitted", "num_accepted", "num_drafted"):
                counts[name] = slot.results_arrays[name][decode].tolist()
            for row, tokens, emitted, accepted, drafted in zip(
                rows, slot.tokens.tolist(), *counts.values(), strict=False
            ):
                if drafted:
                    drafts = tokens[:accepted] + tokens[accepted + 1 : drafted + 1]
                    said = (int(state.draft_start[row]), int(state.num_tokens[row]) - emitted, drafts)
                    self.rounds.setdefault(request_of[row], []).append(said)

        patch.setattr(self.engine.runner, "execute", executed)
        return self

    def check(self, target: Any, head: Head, jobs: list[Request]) -> None:
        """Check that each draft is what the script drafts from the same context. For greedy requests only."""
        for job in jobs:
            tokens = job.prompt_token_ids + job.output_token_ids
            with torch.inference_mode():
                _, entries = read(target, tokens, head.layer_ids)
                for start, n, drafts in self.rounds.get(job.request_id, []):
                    before = [x[: n - 1] for x in entries]
                    assert drafts_of(head, before, tokens[:n], len(drafts), start) == drafts, (job.request_id, start, n)

    def starts(self, request_id: int) -> set[int]:
        return {start for start, _, _ in self.rounds[request_id]}


@functools.cache
def script(folder: Path, target: Path) -> tuple[Any, Head]:
    model = load(target)
    return model, Head(folder, model)


@pytest.mark.parametrize("head", ["random", "fitted", "all ids"])
@pytest.mark.parametrize("k", [1, 5])
def test_drafts_and_counts_are_the_scripts(head_bank: Bank, head: str, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check drafts and counts against the script: prompts in several chunks, several requests at a time, every head
    from position 0."""
    target, reference = script(head_bank.drafts[head], head_bank.target)
    engine = head_engine(head_bank, head, k=k, max_num_batched_tokens=24, block_size=8, enable_prefix_caching=False)
    poison(engine)
    drafts, statistics, jobs, per_position = Drafts(engine).watch(monkeypatch), Statistics(), [], [0] * k
    for i in range(5):
        jobs.append(request(i, head_bank.prompts[i], k=None, max_tokens=20, engine_k=k, ignore_eos=True))
        engine.add_request(jobs[-1])
    run(engine)
    for job in jobs:
        said = speculate(target, reference, job.prompt_token_ids, 20, k, [], statistics)
        assert job.output_token_ids == said.tokens
        assert drafts.rounds[job.request_id] == [(0, entry.n, entry.drafts) for entry in said.rounds if entry.drafts]
        for position in range(k):
            per_position[position] += job.acceptance.accepted_per_position[position]
    stats = engine.stats()
    assert (stats.drafts, stats.draft_tokens) == (statistics.drafts, statistics.draft_tokens)
    assert (stats.accepted_tokens, per_position) == (statistics.accepted_tokens, statistics.per_position[:k])
    if head == "fitted":
        assert stats.accepted_tokens > stats.drafts / 10


@sweep(24)
@given(data=st.data())
def test_greedy_text_and_drafts(head_bank: Bank, data: st.DataObject) -> None:
    """Check that greedy text equals that of K = 0, and that drafts are the expected drafts of the head, whatever its
    context length is."""
    fields = data.draw(engine_settings(), label="engine")
    engine_k = data.draw(st.integers(0, 8), label="engine K")
    head = data.draw(st.sampled_from(sorted(head_bank.drafts)), label="head")
    context = data.draw(st.sampled_from([None, None, 40]), label="head's context")
    engine = head_engine(head_bank, head, k=engine_k, draft_max_model_len=context, **fields)
    if engine_k:
        poison(engine)
    jobs = data.draw(
        st.lists(
            st.tuples(
                st.integers(0, len(head_bank.prompts) - 1),
                st.one_of(st.none(), st.integers(0, engine_k)),
                st.integers(1, LONGEST),
                st.integers(0, 5),  # steps before the next arrives
                st.booleans(),  # whether its head is told to start anew
            ),
            min_size=1,
            max_size=8,
        ),
        label="requests",
    )
    with pytest.MonkeyPatch.context() as patch:
        drafts, requests = Drafts(engine), []
        if engine_k:
            drafts.watch(patch)
        for i, (prompt, k, max_tokens, wait, anew) in enumerate(jobs):
            job = request(i, head_bank.prompts[prompt], k=k, max_tokens=max_tokens, engine_k=engine_k, ignore_eos=True)
            engine.add_request(job)
            requests.append((job, head_bank.expected(prompt, max_tokens, ignore_eos=True)))
            for _ in range(wait):
                engine.step()
            if anew:
                with contextlib.suppress(NotRunningError, UnknownRequestError):
                    engine.scheduler.rebuild_draft(i)
        run(engine)
        for job, expected in requests:
            assert job.output_token_ids == expected
        drafts.check(*script(head_bank.drafts[head], head_bank.target), [job for job, _ in requests])
    assert engine.stats().drafts == sum(job.acceptance.drafts for job, _ in requests)


def test_a_prefix_hit_brings_the_heads_context(head_bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a prefix hit brings the head's context, wherever the prompts part: inside a block, at its end, or
    after the whole prompt."""
    base = head_bank.prompts[5]
    asked = [[*base[:40], 1, 2, 3], [*base[:32], 7, 8, 9], [*base[:32], 9, 8, 7], [*base[:44], 5], base, base]
    target, reference = script(head_bank.drafts["fitted"], head_bank.target)
    engine = head_engine(head_bank, "fitted", k=4, block_size=8, max_num_batched_tokens=512)
    poison(engine)
    drafts, jobs = Drafts(engine).watch(monkeypatch), []
    for i, prompt in enumerate([base, *asked]):
        jobs.append(request(i, prompt, k=None, max_tokens=12, engine_k=4, ignore_eos=True))
        engine.add_request(jobs[-1])
        run(engine)
    drafts.check(target, reference, jobs)
    assert [drafts.starts(job.request_id) for job in jobs] == [{0}] * len(jobs)
    # Prompts that part at the end of a block compute it again, with their own token after it.
    assert [job.num_cached_tokens for job in jobs] == [0, 32, 24, 24, 40, 56, 56]


def test_a_head_that_has_missed_too_much_starts_anew(head_bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a head that has missed too much starts anew. What a request without drafts computes has no KV of the
    head, so the head begins after it."""
    base = head_bank.prompts[5]
    target, reference = script(head_bank.drafts["fitted"], head_bank.target)
    engine = head_engine(head_bank, "fitted", k=3, block_size=8)
    poison(engine)
    drafts = Drafts(engine).watch(monkeypatch)
    jobs = [
        request(i, [*base[:50], i], k=k, max_tokens=30, engine_k=3, ignore_eos=True) for i, k in enumerate((0, 3, 3))
    ]
    for job in jobs:
        engine.add_request(job)
        run(engine)
    assert drafts.starts(1) == drafts.starts(2) == {48}
    drafts.check(target, reference, jobs)
    assert engine.stats().draft_passes > 0


def test_a_batch_at_k_0_does_no_draft_work(head_bank: Bank) -> None:
    engine = head_engine(head_bank, "fitted", k=4)
    for i in range(4):
        engine.add_request(request(i, head_bank.prompts[i], k=0, max_tokens=9, engine_k=4))
    run(engine)
    assert (engine.stats().draft_passes, engine.stats().drafts) == (0, 0)


def test_no_first_token_waits_for_the_head(head_bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[str] = []
    for name, kind in (("head", CallableHead), ("target", CallableModel)):
        forward = kind.forward

        def noted(own: Any, *args: Any, name: str = name, forward: Any = forward) -> Any:
            passes.append(name)
            return forward(own, *args)

        monkeypatch.setattr(kind, "forward", noted)
    engine = head_engine(head_bank, "fitted", k=4, max_num_batched_tokens=512)
    job = request(0, head_bank.prompts[5], k=4, max_tokens=9, engine_k=4, ignore_eos=True)
    engine.add_request(job)
    engine.step()
    assert len(job.output_token_ids) == 1
    assert passes == ["target"]
    engine.step()
    assert passes == ["target", "head", *["head"] * 4, "target"], "after the prompt, and its own"


def test_no_first_token_waits_for_a_native_head(head_bank: Bank) -> None:
    engine = head_engine(head_bank, "fitted", k=4, dtype="float32", max_num_batched_tokens=512)
    job = request(0, head_bank.prompts[5], k=4, max_tokens=9, engine_k=4, ignore_eos=True)
    engine.add_request(job)
    engine.step()
    assert (len(job.output_token_ids), engine.stats().draft_passes) == (1, 0)
    engine.step()
    assert engine.stats().draft_passes == 1 + 4, "after the prompt, and its own"


@pytest.mark.parametrize("method", ["eagle3", "ngram,eagle3"])
@sweep(15)
@given(data=st.data())
def test_drafts_change_no_bit(method: str, head_bank: Bank, data: st.DataObject) -> None:
    """Check that drafts change no result: tokens and logits equal those of K = 0, bit for bit."""
    fields = data.draw(engine_settings(), label="engine")
    if method != "eagle3":  # drafters on the host want the last step settled
        fields["max_steps_in_flight"] = 1
    engine_k = data.draw(st.integers(1, 8), label="engine K")
    head = data.draw(st.sampled_from(sorted(head_bank.drafts)), label="head")
    dtype = data.draw(st.sampled_from(["float32", "bfloat16"]), label="dtype")
    choice = st.tuples(st.integers(0, len(head_bank.prompts) - 1), st.integers(0, engine_k), st.booleans())
    asked = data.draw(st.lists(choice, min_size=1, max_size=6), label="requests")
    engine = head_engine(head_bank, head, k=engine_k, dtype=dtype, method=method, **(fields | LOGITS))
    assert engine.runner.is_native
    poison(engine)
    jobs = []
    for i, (prompt, k, logits) in enumerate(asked):
        ids = head_bank.prompts[prompt]
        plain = request(i, ids, k=k, max_tokens=24, engine_k=engine_k, ignore_eos=True)
        jobs.append(with_logits(i, ids, k, engine_k, 24) if logits else plain)
        engine.add_request(jobs[-1])
    run(engine)
    for job, (prompt, _, logits) in zip(jobs, asked, strict=True):
        expected = alone(head_bank.target, tuple(head_bank.prompts[prompt]), dtype)
        assert job.output_token_ids == expected.argmax(axis=1).tolist()
        assert not logits or np.array_equal(logits_of(job).view(np.int32), expected.view(np.int32))


@sweep(12)
@given(data=st.data())
def test_coupled_text_is_a_function_of_the_seed(head_bank: Bank, data: st.DataObject) -> None:
    fields = data.draw(engine_settings(), label="engine")
    engine_k = data.draw(st.integers(1, 8), label="engine K")
    head = data.draw(st.sampled_from(sorted(head_bank.drafts)), label="head")
    engine = head_engine(head_bank, head, k=engine_k, rule="coupled", **fields)
    poison(engine)
    choice = st.tuples(
        st.integers(0, len(head_bank.prompts) - 1),
        st.integers(0, len(SAMPLED) - 1),
        st.integers(0, 3),  # seed
        st.one_of(st.none(), st.integers(0, engine_k)),
    )
    jobs = []
    for i, (prompt, which, seed, k) in enumerate(data.draw(st.lists(choice, min_size=1, max_size=6), label="requests")):
        job = sampled(i, head_bank.prompts[prompt], seed, k, engine_k, **SAMPLED[which])
        engine.add_request(job)
        ids = tuple(head_bank.prompts[prompt])
        jobs.append((job, vanilla_text(head_bank.target, ids, which, seed, i % 3 == 0, head_bank.dtype)))
    run(engine)
    for job, expected in jobs:
        assert job.output_token_ids == expected


@pytest.fixture(scope="module")
def sixteen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target over 16 tokens, and a head that can draft 9 of them."""
    folder = tmp_path_factory.mktemp("sixteen_ids")
    shape = {"vocab": 16, "hidden": 32, "layers": 6, "kv_heads": 1, "head_dim": 16, "initializer_range": 0.4}
    target = make_checkpoint(folder / "target", seed=5, **shape)
    return target, make_eagle3(folder / "head", target, seed=3, vocab=9)


@pytest.mark.parametrize(("rule", "k", "dtype"), some(3, ["rejection", "coupled"], [1, 3], ["float64", "float32"]))
def test_two_token_draws_are_the_targets_own(sixteen: tuple[Path, Path], rule: str, k: int, dtype: str) -> None:
    """Check that pairs of drawn tokens have the target's distribution, with q over a reduced vocabulary."""
    engine = make_engine(*sixteen, k=k, dtype=dtype, method="eagle3", rule=rule, **TWO_TOKENS)
    check_two_token_draws(engine, sixteen[0], k, 8_000 if dtype == "float32" else 3_000, least_acceptance=0.02)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_request_that_allows_no_id_of_the_head(head_bank: Bank, temperature: float) -> None:
    """Check a request whose allowed ids the head cannot draft: it writes allowed ids up to its limit."""
    reduced = script(head_bank.drafts["random"], head_bank.target)[1]
    others = sorted(set(range(VOCAB)) - set(reduced.target_ids.tolist()))[:5]
    engine = head_engine(head_bank, "random", k=3)
    job = sampled(1, head_bank.prompts[4], 1, 3, 3, temperature=temperature, allowed_token_ids=others, max_tokens=15)
    engine.add_request(job)
    run(engine)
    assert len(job.output_token_ids) == 15
    assert set(job.output_token_ids) <= set(others)


def test_a_head_that_is_not_finite_drafts_no_more(head_bank: Bank) -> None:
    """Check that a request drafts no more once its head's values are not finite. A later request drafts again, and
    texts stay as they are."""
    engine = head_engine(head_bank, "fitted", k=4, block_size=8, max_num_batched_tokens=512)
    jobs = [request(i, head_bank.prompts[5], k=None, max_tokens=20, engine_k=4, ignore_eos=True) for i in range(2)]
    engine.add_request(jobs[0])
    for _ in range(3):
        engine.step()
    with torch.inference_mode():
        for tensor in engine.drafter.kv_cache.v:  # type: ignore[union-attr]
            tensor[...] = torch.nan
    run(engine)
    drafts = jobs[0].acceptance.drafts
    engine.add_request(jobs[1])
    run(engine)
    assert [job.output_token_ids for job in jobs] == [head_bank.continuations[5][:20]] * 2
    assert 0 < drafts < 6 < jobs[1].acceptance.drafts


def test_what_is_rejected(head_bank: Bank) -> None:
    target, head = str(head_bank.target), str(head_bank.drafts["fitted"])

    def made(extra: dict[str, Any], **fields: Any) -> EngineConfig:
        speculative = {"method": "eagle3", "model": head, "num_speculative_tokens": 2} | extra
        return EngineConfig(model=target, speculative_config=speculative, **fields)

    for extra, message in (
        ({"model": None}, r"speculative_config\.model=None: must be a folder or hub id of an EAGLE-3 head"),
        ({"prompt_lookup_min": 2}, r"prompt_lookup_min=2.*method='eagle3'"),
        ({"aux_hidden_state_layer_ids": [3, 1]}, r"aux_hidden_state_layer_ids=\[3, 1\].*must rise"),
        ({"aux_hidden_state_layer_ids": []}, r"aux_hidden_state_layer_ids=\[\].*list of layer ids"),
        ({"rope_theta": 0.0}, r"rope_theta=0\.0"),
        ({"method": "draft_model", "rope_theta": 1e4}, r"rope_theta=10000\.0.*method='draft_model'"),
    ):
        with pytest.raises(InvalidConfigError, match=message):
            made(extra)
    with pytest.raises(UnsupportedConfigError, match=r"quantization='int8'.*eagle3"):
        made({}, quantization="int8")
    with pytest.raises(InvalidConfigError, match="aux_hidden_state_layer_ids"):
        load_weights(made({"aux_hidden_state_layer_ids": [1, 2, 99]}))
    with pytest.raises(InvalidConfigError, match=r"speculative_config\.max_model_len"):
        build_engine(made({"max_model_len": 100_000}))


def test_a_head_that_is_mostly_wrong_is_reported_once(head_bank: Bank, caplog: pytest.LogCaptureFixture) -> None:
    engine = head_engine(head_bank, "random", k=1, dtype="float32", max_model_len=400)
    for round_ in range(2):
        for i in range(5):
            job = request(10 * round_ + i, head_bank.prompts[i], k=1, max_tokens=250, engine_k=1, ignore_eos=True)
            engine.add_request(job)
        run(engine)
    told = [record.getMessage() for record in caplog.records if "aux_hidden_state_layer_ids" in record.getMessage()]
    assert len(told) == 1
    assert "[2, 3]" in told[0]
    assert "of the first 10" in told[0]


def list_engine(bank: Bank, method: str, head: str, k: int, rule: str, **fields: Any) -> Engine:
    """Make an engine with a host drafter next to a head."""
    made = harness.config(bank.target, bank.drafts[head], k=k, method="eagle3", rule=rule, **fields)
    lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 3} if "ngram" in method else {}
    assert made.speculative_config is not None
    speculative = dataclasses.replace(made.speculative_config, method=method, **lookup)
    loaded = harness.weights(bank.target, bank.drafts[head], bank.dtype, method="eagle3")
    return build_engine(dataclasses.replace(made, speculative_config=speculative), loaded)


@pytest.mark.parametrize("method", ["suffix,eagle3", "ngram,eagle3"])
@sweep(12)
@given(data=st.data())
def test_lists_with_a_head_write_the_text_of_k_0(method: str, head_bank: Bank, data: st.DataObject) -> None:
    """Check that lists with a head write the text of K = 0: greedy under `rejection`, greedy and sampled under
    `coupled`."""
    fields = data.draw(engine_settings(), label="engine") | {"max_steps_in_flight": 1}
    engine_k = data.draw(st.integers(1, 8), label="engine K")
    rule = data.draw(st.sampled_from(["rejection", "coupled"]), label="rule")
    head = data.draw(st.sampled_from(sorted(head_bank.drafts)), label="head")
    engine = list_engine(head_bank, method, head, engine_k, rule, **fields)
    poison(engine)
    choice = st.tuples(
        st.integers(0, len(head_bank.prompts) - 1),
        st.integers(0, len(SAMPLED) - 1) if rule == "coupled" else st.none(),
        st.integers(0, 3),  # seed
        st.one_of(st.none(), st.integers(0, engine_k)),
        st.integers(0, 5),  # steps before the next arrives
    )
    jobs = []
    for i, (prompt, which, seed, k, wait) in enumerate(
        data.draw(st.lists(choice, min_size=1, max_size=6), label="requests")
    ):
        ids = head_bank.prompts[prompt]
        if which is None:
            job = request(i, ids, k=k, max_tokens=LONGEST, engine_k=engine_k)
            expected = head_bank.expected(prompt, LONGEST)
        else:
            job = sampled(i, ids, seed, k, engine_k, **SAMPLED[which])
            expected = vanilla_text(head_bank.target, tuple(ids), which, seed, i % 3 == 0, head_bank.dtype)
        engine.add_request(job)
        jobs.append((job, expected))
        for _ in range(wait):
            engine.step()
    run(engine)
    for job, expected in jobs:
        assert job.output_token_ids == expected
