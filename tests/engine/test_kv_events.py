"""An engine reports its prefix cache as KV events if asked to. `make test-kv-events` tests their transport."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
from checkpoints import make_checkpoint
from specrs import LLM, SamplingParams
from specrs.backends.cpu.runner import CpuRunner
from specrs.config import EngineConfig
from specrs.core import BlockRemoved, BlockStored, KVEventBatch
from specrs.engine import build
from specrs.engine.build import build_engine
from specrs.errors import InvalidConfigError, UnsupportedConfigError

from engine.harness import assert_idle

PARAMS = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, detokenize=False)
NOT_SENT = {"enable_kv_cache_events": True, "publisher": "null"}


@pytest.mark.parametrize("k", [0, 3])
def test_every_step_tells_what_it_cached(k: int) -> None:
    speculative = {"num_speculative_tokens": k} if k else None
    config = EngineConfig(
        kv_events_config=NOT_SENT,  # type: ignore[arg-type]
        speculative_config=speculative,  # type: ignore[arg-type]
        block_size=4,
        num_gpu_blocks_override=16,
        max_model_len=48,
        max_steps_in_flight=2,
        num_reserved_decode_tokens=0,
    )
    engine = build_engine(config)
    assert engine.publish is None
    batches: list[KVEventBatch] = []
    engine.publish = batches.append
    llm = LLM.from_engine(engine)

    def text_of(prompt: list[int]) -> list[int]:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], PARAMS, use_tqdm=False)
        return prompt + list(output.outputs[0].token_ids)

    prompt = list(range(11, 21))
    text = text_of(prompt)
    stored = [event for batch in batches for event in batch.events()]
    assert all(isinstance(event, BlockStored) for event in stored)
    told = [token for event in stored if isinstance(event, BlockStored) for token in event.token_ids.tolist()]
    # the last token has no KV
    assert told == text[: (len(text) - 1) // 4 * 4]
    assert len(batches) > 1
    num_batches = len(batches)
    assert text_of(prompt) == text
    assert len(batches) == num_batches, "all of it was cached"
    for first in range(100, 200, 10):
        text_of(list(range(first, first + 10)))
    assert any(isinstance(event, BlockRemoved) for batch in batches for event in batch.events())
    assert_idle(engine)


def test_nothing_is_reported_unless_enabled() -> None:
    engine = build_engine(EngineConfig(kv_events_config={}, max_model_len=64))  # type: ignore[arg-type]
    assert engine.publish is None
    LLM.from_engine(engine).generate([{"prompt_token_ids": list(range(11, 50))}], PARAMS, use_tqdm=False)
    assert engine.scheduler.take_kv_event_batch() is None


def test_zmq_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(
        InvalidConfigError, match=r"publisher='zmq': needs pyzmq; install it: pip install 'specrs\[kv-events\]'"
    ):
        LLM(kv_events_config={"enable_kv_cache_events": True}, max_model_len=64)


def test_kv_groups_are_rejected(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m", "gemma3_text", seed=1, layers=6, sliding_window_pattern=3)
    settings = {"model": str(folder), "block_size": 4, "dtype": "float64", "skip_tokenizer_init": True}
    settings |= {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    with pytest.raises(UnsupportedConfigError, match=r"enable_kv_cache_events=True: .* several KV groups"):
        LLM(**settings, kv_events_config=NOT_SENT)
    LLM(**settings, kv_events_config={})


def test_an_engine_that_cannot_be_built_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    class Publisher:
        def __init__(self, config: object) -> None:
            self.publish = ended.append

        def close(self) -> None:
            ended.append("publisher")

    def fail(parts: object) -> None:
        raise RuntimeError("no engine")

    close = CpuRunner.close
    monkeypatch.setattr(build, "KVEventPublisher", Publisher)
    monkeypatch.setattr(build, "Engine", fail)
    monkeypatch.setattr(CpuRunner, "close", lambda runner: (ended.append("runner"), close(runner))[1])
    config = EngineConfig(
        kv_events_config={"enable_kv_cache_events": True, "publisher": "zmq"},  # type: ignore[arg-type]
        max_model_len=64,
        threads=1,
    )
    monkeypatch.setitem(sys.modules, "zmq", ModuleType("zmq"))
    with pytest.raises(RuntimeError, match="no engine"):
        build_engine(config)
    assert ended == ["publisher", "runner"]
