"""Text under adapters: that of transformers on merged weights, whatever K, drafter, batch, prefixes and preemption."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint, make_eagle3, perturb_checkpoint
from engine import harness
from engine.harness import VOCAB, poison, run
from engine.test_equivalence import engine_settings
from engine.test_ngram import make_engine as make_ngram_engine
from engine.test_sampling import SAMPLED, sampled, with_rule
from hf_reference import generate_all, load
from hypothesis import given
from hypothesis import strategies as st
from specrs import LoRARequest
from specrs.backends.recording import Recording
from specrs.engine.engine import Engine
from specrs.engine.request import Request
from specrs.errors import EngineError
from sweep import sweep

from .adapters import Spec, merge, write_adapter

LONGEST = 24
SPECS = [
    Spec(("q_proj", "v_proj"), rank=4, alpha=8),
    Spec(("k_proj", "up_proj", "down_proj"), rank=2, alpha=5, use_rslora=True),
    Spec(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), rank=8, alpha=6),
]


@dataclass(frozen=True)
class Adapted:
    """A target with adapters, prompts, and their texts by the target and by each merged model."""

    target: Path
    drafts: dict[str, Path]
    adapters: list[Path]
    merged: list[Path]
    """Folders of the target, then of the target with each adapter merged."""
    prompts: list[list[int]]
    continuations: list[list[list[int]]]

    def request(self, adapter: int) -> LoRARequest:
        """Return the LoRA request of an adapter, counted from 1."""
        return LoRARequest(f"adapter {adapter}", adapter, str(self.adapters[adapter - 1]))


@pytest.fixture(scope="session")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    folder = tmp_path_factory.mktemp("adapted")
    target = make_checkpoint(folder / "target", seed=1, vocab=VOCAB, hidden=64, head_dim=16, layers=3)
    drafts = {
        "close": perturb_checkpoint(target, folder / "close", noise=0.1, seed=2),
        "head": make_eagle3(folder / "head", target, seed=4, vocab=100, layer_ids=[1, 2]),
    }
    adapters = [write_adapter(folder / f"{i}", target, spec, seed=i) for i, spec in enumerate(SPECS, 1)]
    merged = [target, *(merge(target, path, folder / f"merged {path.name}") for path in adapters)]
    prompts = harness.make_prompts()[2:9]
    continuations = [generate_all(load(model), prompts, LONGEST) for model in merged]
    assert len({str(texts) for texts in continuations}) == len(merged)
    return Adapted(target, drafts, adapters, merged, prompts, continuations)


def make_engine(adapted: Adapted, drafter: str, k: int, **fields: Any) -> Engine:
    fields |= {"enable_lora": True}
    if drafter == "ngram":
        return make_ngram_engine(adapted.target, k=k, **(fields | {"max_steps_in_flight": 1}))
    method = "eagle3" if drafter == "head" else "draft_model"
    return harness.make_engine(adapted.target, adapted.drafts[drafter], k=k, method=method, **fields)


def submit(engine: Engine, job: Request, adapted: Adapted, adapter: int, steps: int) -> None:
    assert engine.loras is not None
    job.lora = engine.loras.load(adapted.request(adapter)) if adapter else None
    engine.add_request(job)
    for _ in range(steps):
        engine.step()
        running = {r.lora for r in engine.requests.values() if r.lora is not None and is_running(engine, r)}
        assert len(running) <= engine.config.max_loras


def is_running(engine: Engine, job: Request) -> bool:
    return engine.scheduler.request(job.request_id).state != "waiting"


JOBS = st.lists(
    st.tuples(
        st.integers(0, 6),  # prompt
        st.integers(0, len(SPECS)),  # adapter, 0 for none
        st.one_of(st.none(), st.integers(0, 5)),  # K
        st.integers(1, LONGEST),  # tokens
        st.integers(0, 4),  # steps before the next
    ),
    min_size=2,
    max_size=8,
)
SETTINGS = st.tuples(
    engine_settings(), st.integers(1, 3), st.integers(3, 4), st.sampled_from(["close", "head", "ngram"]), JOBS
)


@sweep(45)
@given(drawn=SETTINGS, k=st.integers(0, 5))
def test_greedy_text(adapted: Adapted, drawn: Any, k: int) -> None:
    fields, max_loras, max_cpu_loras, drafter, jobs = drawn
    engine = make_engine(adapted, drafter, k, max_loras=max_loras, max_cpu_loras=max_cpu_loras, **fields)
    if drafter != "ngram":
        poison(engine)
    made = []
    for i, (prompt, adapter, own_k, max_tokens, steps) in enumerate(jobs):
        own_k = None if own_k is None else min(own_k, k)
        job = harness.request(i, adapted.prompts[prompt], k=own_k, max_tokens=max_tokens, engine_k=k, ignore_eos=True)
        submit(engine, job, adapted, adapter, steps)
        made.append(job)
    run(engine)
    for (prompt, adapter, _, max_tokens, _), job in zip(jobs, made, strict=True):
        assert job.output_token_ids == adapted.continuations[adapter][prompt][:max_tokens], f"adapter {adapter}"


@functools.cache
def alone(model: Path, prompt: tuple[int, ...], which: int) -> list[int]:
    """Return the text of a sampled request on this model, when it runs alone and without drafts."""
    engine = with_rule(harness.make_engine(model, None, k=0, max_num_batched_tokens=512), "coupled")
    job = sampled(1, list(prompt), 11, None, 0, **SAMPLED[which])
    engine.add_request(job)
    run(engine)
    return job.output_token_ids


@sweep(15)
@given(jobs=JOBS, which=st.integers(0, 2), drafter=st.sampled_from(["close", "head"]), depth=st.sampled_from([1, 2]))
def test_sampled_text(adapted: Adapted, jobs: Any, which: int, drafter: str, depth: int) -> None:
    engine = with_rule(make_engine(adapted, drafter, 4, max_loras=2, max_steps_in_flight=depth), "coupled")
    made = []
    for i, (prompt, adapter, k, _, steps) in enumerate(jobs):
        job = sampled(3 * i + 1, adapted.prompts[prompt], 11, None if k is None else min(k, 4), 4, **SAMPLED[which])
        submit(engine, job, adapted, adapter, steps)
        made.append(job)
    run(engine)
    for (prompt, adapter, *_), job in zip(jobs, made, strict=True):
        assert job.output_token_ids == alone(adapted.merged[adapter], tuple(adapted.prompts[prompt]), which)


def test_a_recording_needs_its_adapters(adapted: Adapted) -> None:
    engines = [make_engine(adapted, "close", 3, max_cpu_loras=3) for _ in range(2)]
    recording = Recording.of(engines[0].scheduler, 3)
    engines[0].watch = recording
    for i in range(3):
        job = harness.request(i, adapted.prompts[i], k=3, max_tokens=9, engine_k=3, ignore_eos=True)
        submit(engines[0], job, adapted, i, 0)
    run(engines[0])
    again = engines[1]
    assert again.loras is not None
    kept = [again.loras.load(adapted.request(i)) for i in (1, 2)]
    assert recording.replay(again.runner, again.scheduler).sequences() == recording.sequences()
    assert len(kept) == 2
    base = harness.make_engine(adapted.target, adapted.drafts["close"], k=3)
    with pytest.raises(EngineError, match="needs a LoRA adapter"):
        recording.replay(base.runner, base.scheduler)
