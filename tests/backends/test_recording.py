"""Check that a recorded step is all that a runner needs: written to a file and replayed on a new runner, it gives the
same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine.harness import Bank, make_bank, make_engine, poison, weights
from specrs.backends.recording import Recording
from specrs.config import EngineConfig
from specrs.core import SAMPLING_STEPS
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.engine.request import Request
from specrs.errors import EngineError
from specrs.sampling import SamplingParams

K = 3

PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, top_p=0.9, top_k=20, seed=1),
    SamplingParams(temperature=0.8, min_p=0.05, seed=2, presence_penalty=0.5, repetition_penalty=1.2),
    SamplingParams(temperature=0.0, logit_bias={7: 3.0, 8: -3.0}, frequency_penalty=0.3),
    SamplingParams(temperature=1.0, seed=4, allowed_token_ids=list(range(3, 90))),
    SamplingParams(temperature=0.7, seed=5, stop_token_ids=list(range(40, 70)), min_tokens=4),
    SamplingParams(temperature=0.0, num_speculative_tokens=1),
    SamplingParams(temperature=0.0, max_tokens=2),
]


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Bank:
    return make_bank(tmp_path_factory.mktemp("bank"))


def fresh(bank: Bank, method: str, rule: str, depth: int) -> Engine:
    """Make an engine with few blocks, so that requests are preempted, and small steps, so that prompts have several
    chunks."""
    speculative: dict[str, Any] = {"num_speculative_tokens": K, "rejection_sample_method": rule}
    if method == "ngram":
        speculative |= {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    else:
        speculative |= {"model": str(bank.drafts["close"])}
    fields: dict[str, Any] = {
        "num_gpu_blocks_override": 14,
        "num_reserved_decode_tokens": 0,
        "max_num_seqs": 5,
        "max_num_batched_tokens": 24,
        "block_size": 8,
        "max_steps_in_flight": depth,
        "max_model_len": 104,
    }
    draft = None if method == "ngram" else bank.drafts["close"]
    settings = EngineConfig(model=str(bank.target), speculative_config=speculative, dtype="float64", **fields)
    return build_engine(settings, weights(bank.target, draft, "float64"))


def serve(engine: Engine, bank: Bank) -> tuple[Recording, list[Request]]:
    """Run requests of every kind to their ends and record the steps."""
    engine.watch = recording = Recording.of(engine.scheduler, engine.num_speculative_tokens)
    requests = [
        Request(i, bank.prompts[(3 * i) % 20], own.replace(**least(own)), num_speculative_tokens=K, seed=50 + i)
        for i, own in enumerate(PARAMS)
    ]
    for request in requests:
        engine.add_request(request)
    while engine.has_unfinished():
        engine.step()
    return recording, requests


def least(own: SamplingParams) -> dict[str, Any]:
    """Return replacements for sampling parameters in `own`: no detokenization, and so many tokens that requests are
    preempted."""
    return {"detokenize": False, "max_tokens": own.max_tokens if own.max_tokens == 2 else 34}


@pytest.mark.parametrize(
    ("method", "rule", "depth"),
    [("draft_model", "rejection", 1), ("draft_model", "coupled", 2), ("ngram", "rejection", 1)],
)
def test_a_replay_reports_the_same(bank: Bank, tmp_path: Path, method: str, rule: str, depth: int) -> None:
    engine = fresh(bank, method, rule, depth)
    recording, requests = serve(engine, bank)
    assert engine.scheduler.num_preemptions > 0
    recording.save(tmp_path / "steps.npz")
    loaded = Recording.load(tmp_path / "steps.npz")

    other = fresh(bank, method, rule, depth)
    poison(other)
    replayed = loaded.replay(other.runner, other.scheduler)
    assert other.scheduler.num_steps == 0
    assert replayed.sequences() == recording.sequences()
    emitted = sum(sequence.counts["num_emitted"] for sequence in replayed.sequences())
    assert emitted >= sum(len(request.output_token_ids) for request in requests) > 100
    assert any(sequence.counts["num_accepted"] for sequence in replayed.sequences())


def test_a_replay_shows_what_differs(bank: Bank) -> None:
    recording, _ = serve(fresh(bank, "draft_model", "rejection", 1), bank)
    offset, _ = recording.layouts["record"]["admit_seed"]
    first = next(i for i, record in enumerate(recording.records) if record[offset + 1])
    recording.records[first][offset + 1] ^= 1 << 20
    other = fresh(bank, "draft_model", "rejection", 1)
    assert recording.replay(other.runner, other.scheduler).sequences() != recording.sequences()


def test_steps_with_extras_are_rejected(bank: Bank) -> None:
    engine = fresh(bank, "draft_model", "rejection", 1)
    engine.watch = recording = Recording.of(engine.scheduler, K)
    request = Request(
        0,
        bank.prompts[0],
        SamplingParams(temperature=0.0, max_tokens=3, detokenize=False),
        num_speculative_tokens=K,
    )
    engine.add_request(request)
    while engine.has_unfinished():
        engine.step()
    steps, _ = recording.layouts["record"]["admit_steps"]
    recording.records[0][steps] |= 1 << SAMPLING_STEPS.index("extras")
    other = fresh(bank, "draft_model", "rejection", 1)
    with pytest.raises(EngineError, match="request 0: the step needs its extras"):
        recording.replay(other.runner, other.scheduler)


def test_other_settings_are_rejected(bank: Bank) -> None:
    engine = fresh(bank, "draft_model", "rejection", 1)
    recording = Recording.of(engine.scheduler, K)
    other = make_engine(bank.target, None, k=0, max_num_seqs=3)
    with pytest.raises(EngineError, match=r"record\.\w+=.*the recording has"):
        recording.replay(other.runner, other.scheduler)
    del recording.layouts["header"]["used_len"]
    with pytest.raises(EngineError, match=r"header\.used_len=.*the recording has None"):
        recording.replay(engine.runner, engine.scheduler)


def test_a_file_of_something_else_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "other.npz"
    np.savez(path, numbers=np.arange(3))
    with pytest.raises(EngineError, match=r"path=.*other\.npz.*not a recording"):
        Recording.load(path)
    path.write_text("no archive")
    with pytest.raises(EngineError, match="not a recording"):
        Recording.load(path)
