"""Draft models with another tokenizer, compared as text (`use_heterogeneous_vocab` under `coupled`).

The text is that of K = 0, and drafts are those of a plain script.
"""

import random
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_json, make_checkpoint
from hf_reference import generate_all, load
from hypothesis import given
from hypothesis import strategies as st
from specrs.backends.cpu.callable_model import CallableModel
from specrs.backends.ring import Header, RingSlot
from specrs.backends.weights import Weights
from specrs.core import DRAFTER_DEVICE, CostModel, SpeculationPlanner
from specrs.drafters.cpu import CpuDrafter
from specrs.drafters.other_tokenizer.text import Bridge
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.engine.weights import load_weights
from sweep import sweep
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from engine.faulty_drafter import BrokenError, Faulty
from engine.harness import LONGEST, Bank, config, greedy_jobs, native_bank, poison, request, run, run_greedy
from engine.test_equivalence import engine_settings
from engine.test_sampling import SAMPLED, sampled, vanilla_text

WORDS = ["def", "return", "value", "for", "in", "range", "é", "数", "print", "the", "cat", "sat", "\n", "  "]
LOADED: dict[str, Weights] = {}
"""Loaded weights by dtype."""


def write_tokenizer(folder: Path, size: int, seed: int) -> Backend:
    """Write a byte-level BPE tokenizer trained on a text of its own. Every byte is among its tokens."""
    rng = random.Random(seed)
    lines = [" ".join(rng.choices(WORDS[seed % 3 :], k=12)) for _ in range(60)]
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(lines, trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(folder)
    return backend


def teach(folder: Path, texts: list[list[int]], steps: int = 60) -> None:
    """Train the checkpoint on `texts`, so that it generates similar text."""
    model = load(folder, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
    length = max(map(len, texts))
    ids = torch.tensor([text + [0] * (length - len(text)) for text in texts])
    labels = ids.masked_fill(torch.arange(length) >= torch.tensor([[len(text)] for text in texts]), -100)
    for _ in range(steps):
        loss = model(ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def text_bank(tmp_path_factory: pytest.TempPathFactory) -> Bank:
    """A target and a draft with different tokenizers, trained on the same sentences."""
    folder = tmp_path_factory.mktemp("text")
    rng = random.Random(5)
    sentences = [" ".join(rng.choices(WORDS, k=18)) for _ in range(10)]
    backends = {}
    for name, size, seed in (("target", 300, 1), ("draft", 280, 2)):
        shape = {"vocab": 304, "hidden": 64, "layers": 2, "kv_heads": 2, "head_dim": 32}
        make_checkpoint(folder / name, "qwen3", seed=seed, tie=False, **shape)
        backends[name] = write_tokenizer(folder / name, size, seed)
        edit_json(folder / name / "generation_config.json", eos_token_id=0)
        edit_json(folder / name / "config.json", eos_token_id=0)
        teach(folder / name, [backends[name].encode(sentence).ids for sentence in sentences])
        edit_json(folder / name / "generation_config.json", eos_token_id=0)
    model = load(folder / "target")
    prompts = [backends["target"].encode(sentence).ids[: rng.randint(1, 20)] for sentence in sentences]
    prompts += [prompts[0], [*prompts[1], *prompts[2]], backends["target"].encode("数").ids[:2], [299, 303, 5]]
    return Bank(folder / "target", {"draft": folder / "draft"}, prompts, generate_all(model, prompts, LONGEST), [0])


@pytest.fixture(scope="module")
def banks(text_bank: Bank) -> dict[str, Bank]:
    """Banks by dtype: torch computes in float64, native passes in float32."""
    return {"float64": text_bank, "float32": native_bank(text_bank, "float32")}


def make_engine(bank: Bank, k: int, method: str = "draft_model", **fields: Any) -> Engine:
    draft = bank.drafts["draft"]
    if method != "draft_model":
        fields["max_steps_in_flight"] = 1
    speculative = {
        "method": method,
        "model": str(draft),
        "num_speculative_tokens": k,
        "use_heterogeneous_vocab": True,
        "rejection_sample_method": "coupled",
    }
    made = replace(config(bank.target, draft, k=k, dtype=bank.dtype, **fields), speculative_config=speculative)
    if bank.dtype not in LOADED:
        LOADED[bank.dtype] = load_weights(made)
    engine = build_engine(made, LOADED[bank.dtype])
    assert engine.runner.is_native == (bank.dtype == "float32")
    assert isinstance(engine.drafter, CpuDrafter)
    assert engine.drafter.bridge is not None
    return engine


@sweep(12)
@given(data=st.data())
def test_greedy_text(banks: dict[str, Bank], data: st.DataObject) -> None:
    bank = banks[data.draw(st.sampled_from(sorted(banks)), label="dtype")]
    fields = data.draw(engine_settings(), label="engine")
    k = data.draw(st.integers(1, 8), label="engine K")
    engine = make_engine(bank, k, **fields)
    poison(engine)
    run_greedy(engine, bank, data.draw(greedy_jobs(bank, k), label="requests"), k)


@sweep(12)
@given(data=st.data())
def test_coupled_text_is_a_function_of_the_seed(banks: dict[str, Bank], data: st.DataObject) -> None:
    text_bank = banks[data.draw(st.sampled_from(sorted(banks)), label="dtype")]
    fields = data.draw(engine_settings(), label="engine")
    k = data.draw(st.integers(1, 8), label="engine K")
    method = data.draw(st.sampled_from(["draft_model", "suffix,draft_model"]), label="method")
    engine = make_engine(text_bank, k, method, **fields)
    poison(engine)
    choice = st.tuples(st.integers(0, len(text_bank.prompts) - 1), st.integers(0, len(SAMPLED) - 1), st.integers(0, 3))
    jobs = []
    for i, (prompt, which, seed) in enumerate(data.draw(st.lists(choice, min_size=1, max_size=6), label="requests")):
        job = sampled(i, text_bank.prompts[prompt], seed, None, k, **SAMPLED[which])
        engine.add_request(job)
        ids = tuple(text_bank.prompts[prompt])
        jobs.append((job, vanilla_text(text_bank.target, ids, which, seed, i % 3 == 0, text_bank.dtype)))
    run(engine)
    for job, expected in jobs:
        assert job.output_token_ids == expected


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_counts_are_those_of_a_plain_script(dtype: str, banks: dict[str, Bank]) -> None:
    """Check counts against a plain script by transformers: tokenize the text for the draft, draft K tokens, decode
    them, compare."""
    text_bank = banks[dtype]
    k, draft = 4, load(text_bank.drafts["draft"])
    ours, theirs = (
        Backend.from_file(str(folder / "tokenizer.json")) for folder in (text_bank.target, text_bank.drafts["draft"])
    )
    engine, drafts, accepted = make_engine(text_bank, k), 0, 0
    for i in range(6):
        prompt, text = text_bank.prompts[i], text_bank.continuations[i]
        engine.add_request(request(i, prompt, k=None, max_tokens=LONGEST, engine_k=k, ignore_eos=True))
        run(engine)
        done = 1
        while done < LONGEST:
            most, said = min(k, LONGEST - done - 1), ours.decode(prompt + text[:done], skip_special_tokens=False)
            fed = theirs.encode(said, add_special_tokens=False).ids
            proposed: list[int] = []
            if most and fed and not said.endswith("\ufffd"):
                new: list[int] = []
                for _ in range(most):
                    with torch.inference_mode():
                        new.append(int(draft(torch.tensor([fed + new])).logits[0, -1].argmax()))
                written = new[: new.index(0)] if 0 in new else new
                more = theirs.decode(fed + written, skip_special_tokens=False)
                before = theirs.decode(fed, skip_special_tokens=False)
                assert more.startswith(before)
                tail = (prompt + text[:done])[-16:]
                again = ours.encode(ours.decode(tail, skip_special_tokens=False) + more[len(before) :].rstrip("\ufffd"))
                alone = ours.encode(more[len(before) :].rstrip("\ufffd")).ids
                proposed = again.ids[len(tail) :] if again.ids[: len(tail)] == tail else alone
                proposed = (proposed + [0] * (0 in new))[:most]
            truth = text[done:]
            m = next((j for j, token in enumerate(proposed) if token != truth[j]), len(proposed))
            drafts, accepted, done = drafts + bool(proposed), accepted + m, done + m + 1
    assert (engine.stats().drafts, engine.stats().accepted_tokens) == (drafts, accepted)
    assert accepted > drafts / 4 > 10


def test_texts_are_read_up_to_their_end(text_bank: Bank) -> None:
    """Check that drafts are read up to the draft's end token: the text before it in the target's tokens, then the
    target's end token. An incomplete character is left out."""
    bridge = make_engine(text_bank, 3).drafter.bridge
    ours, theirs = bridge.target.backend, bridge.draft.backend
    before, after = "the cat sat in", " range for 数 value"
    tokens, own, written = ours.encode(before).ids, theirs.encode(before).ids, theirs.encode(before + after).ids
    drafted = written[len(own) :]
    assert theirs.decode(own + drafted) == before + after
    assert bridge.own_ids(tokens) == own
    found = bridge.target_ids(tokens, own, drafted)
    assert ours.decode(found) == after
    assert bridge.target_ids(tokens, own, [*drafted, 0, 7]) == [*found, 0]
    assert bridge.target_ids(tokens, own, [0]) == [0]
    assert bridge.target_ids(tokens, own, []) == []
    first_byte = "æ"  # of a character of three, as byte-level tokens spell it
    assert bridge.target_ids(tokens, own, [*drafted, theirs.get_vocab()[first_byte]]) == found
    assert bridge.own_ids([*tokens, ours.get_vocab()[first_byte]]) == []


def watch_feeding(engine: Engine, patch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets, for each step, how many tokens the draft model is fed, in its own tokenization."""
    fed: list[int] = []
    forward, execute = CallableModel.forward, engine.runner.execute

    def executed(slot: RingSlot, header: Header) -> None:
        fed.append(0)
        execute(slot, header)

    def counted(own: CallableModel, inputs: dict[str, Any], *args: Any) -> Any:
        fed[-1] += len(inputs["input_ids"]) * (own._model is engine.drafter.model)
        return forward(own, inputs, *args)

    patch.setattr(engine.runner, "execute", executed)
    patch.setattr(CallableModel, "forward", counted)
    return fed


def test_a_long_text_is_fed_piece_by_piece(text_bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a long text is fed to the drafter in pieces: no step feeds more than its budget for prompts allows.
    Other requests draft meanwhile."""
    k, budget = 3, 16
    engine = make_engine(text_bank, k, max_num_batched_tokens=budget, max_steps_in_flight=1)
    poison(engine)
    fed, meanwhile = watch_feeding(engine, monkeypatch), 0
    prompts = text_bank.prompts[10][:9], list(chain(*text_bank.prompts[:8]))[:75]
    short, long = (
        request(i, prompt, k=None, max_tokens=LONGEST, engine_k=k, ignore_eos=True) for i, prompt in enumerate(prompts)
    )
    engine.add_request(short)
    for _ in range(4):
        engine.step()
    engine.add_request(long)
    while not long.acceptance.drafts and engine.has_unfinished():
        before = short.acceptance.drafts
        engine.step()
        meanwhile += bool(long.output_token_ids) * (short.acceptance.drafts - before)
    run(engine)
    plain = make_engine(text_bank, k)
    alone = [
        request(i, prompt, k=0, max_tokens=LONGEST, engine_k=k, ignore_eos=True) for i, prompt in enumerate(prompts)
    ]
    for job in alone:
        plain.add_request(job)
    run(plain)
    assert [job.output_token_ids for job in (short, long)] == [job.output_token_ids for job in alone]
    backends = (
        Backend.from_file(str(path / "tokenizer.json")) for path in (text_bank.target, text_bank.drafts["draft"])
    )
    said = next(backends).decode(prompts[1], skip_special_tokens=False)
    assert max(fed) <= budget + 16 + 2 * (k - 1) < len(next(backends).encode(said).ids)
    assert long.acceptance.drafts > 0
    assert meanwhile > 0


def test_kv_of_another_salt_is_not_gone_on_from(text_bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(text_bank, 3, max_num_seqs=1)
    poison(engine)
    fed, first = watch_feeding(engine, monkeypatch), []
    for i, salt in enumerate(("one", "one", "two", "two", "one")):
        job = request(i, text_bank.prompts[0], k=None, max_tokens=6, engine_k=3, ignore_eos=True)
        job.cache_salt = salt
        engine.add_request(job)
        fed.clear()
        run(engine)
        assert job.output_token_ids == text_bank.continuations[0][:6]
        first.append(next(tokens for tokens in fed if tokens))
    assert first[0] == first[2] == first[4] > 10
    assert max(first[1], first[3]) < 8


@pytest.mark.parametrize("method", ["draft_model", "suffix,draft_model"])
def test_one_that_writes_nothing_is_asked_no_more(
    text_bank: Bank, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a drafter that proposes nothing is no longer asked, if K is planned: a step in which it returns
    nothing counts as one whose first draft was rejected."""
    k, asked = 3, []
    costs = CostModel.lines([1, 8], [0.3, 0.3], [1.1, 1.5], [1.0, 1.4])
    monkeypatch.setattr(Bridge, "target_ids", lambda *texts: [])
    engine = make_engine(text_bank, k, method, max_steps_in_flight=1)
    engine.planner = SpeculationPlanner(
        max_num_seqs=engine.config.max_num_seqs, num_speculative_tokens=k, costs=costs, catch_up_ms=0.0
    )
    learn = engine._learn

    def learned(slot: RingSlot, ms: float) -> None:
        count = slot.header().num_decode
        if count:
            ks, kinds = (slot.record_arrays[name][:count] for name in ("seq_k", "seq_drafter"))
            asked.extend(((ks > 0) & (kinds == DRAFTER_DEVICE)).tolist())
            ms = costs.ms(count, int(ks.max()))
        learn(slot, ms)

    monkeypatch.setattr(engine, "_learn", learned)
    for i in range(16):
        engine.add_request(request(i, text_bank.prompts[i % 10], k=None, max_tokens=40, engine_k=k, ignore_eos=True))
    run(engine)
    assert engine.scheduler.acceptance_of(DRAFTER_DEVICE).drafts == 0
    assert any(asked[:20])
    assert sum(asked[len(asked) // 2 :]) < len(asked) / 20


@pytest.mark.parametrize("where", ["passes", "own_ids", "target_ids"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_one_that_raises_costs_its_drafts(
    dtype: str, where: str, banks: dict[str, Bank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a drafter that raises, in a pass or while texts are converted, costs its drafts: texts stay, and later
    steps draft."""
    bank, calls, broken = banks[dtype], [0], {1, 2, 9, 30}
    if where == "passes":
        faulty = Faulty(broken.__contains__, monkeypatch)
    else:
        method = getattr(Bridge, where)

        def call(*args: Any) -> Any:
            calls[0] += 1
            if calls[0] in broken:
                raise BrokenError(calls[0])
            return method(*args)

        monkeypatch.setattr(Bridge, where, call)
    engine = make_engine(bank, 3)
    poison(engine)
    run_greedy(engine, bank, [(i, None, LONGEST, 2) for i in range(8)], 3)
    stats = engine.stats()
    assert sum(stats.draft_errors.values()) == len(broken)
    assert where != "passes" or faulty.raised == len(broken)
    assert stats.accepted_tokens > 40
