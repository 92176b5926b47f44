"""Prompts next to requests that decode: the engine reports how long steps took, here by a simulated clock."""

from types import SimpleNamespace

import pytest
from specrs.backends.ring import Header, RingSlot
from specrs.engine.request import Request
from specrs.sampling import SamplingParams

from engine.scripted_runner import VOCAB, ScriptedRunner, make_engine, told

BOUND = 100.0
DECODE, TOKEN, REPORTED = 10.0, 0.5, 2.0
"""Milliseconds of a step that decodes, of a prompt's token, and of reporting a token's log probabilities."""


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.ms = 0.0

    def perf_counter(self) -> float:
        return self.ms / 1e3

    monotonic = perf_counter


class TimedRunner(ScriptedRunner):
    """Runner whose passes advance the clock, one step after the other, as a device does while the host goes on."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.free_at = 0.0
        self.ends: dict[int, float] = {}  # by step

    def execute(self, slot: RingSlot, header: Header) -> None:
        super().execute(slot, header)
        ms = DECODE * (header.num_decode > 0) + TOKEN * header.num_prefill_tokens
        self.free_at = max(self.free_at, self.clock.ms) + ms
        self.ends[header.step_id] = self.free_at

    def wait(self, slot: RingSlot) -> None:
        self.clock.ms = max(self.clock.ms, self.ends[slot.header().step_id])


def chunks_beside_a_stream(
    monkeypatch: pytest.MonkeyPatch, depth: int, bound: float, *, reported: float = 0.0, **params: int
) -> list[int]:
    """Return the prompt tokens of each step in which one request decodes while another's prompt of 2,000 tokens is
    computed. `reported`: milliseconds of reporting a step, for each of its prompt tokens."""
    clock = Clock()
    monkeypatch.setattr("specrs.engine.engine.time", SimpleNamespace(**{n: getattr(clock, n) for n in dir(clock)}))
    engine = make_engine(
        depth,
        num_blocks=2048,
        max_model_len=4096,
        max_num_batched_tokens=1024,
        max_prefill_stall_ms=bound,
        runner=TimedRunner(clock),
    )
    chunks: list[int] = []

    def watch(slot: RingSlot, header: Header, ms: float) -> None:
        if header.num_decode and header.num_prefill_tokens:
            chunks.append(header.num_prefill_tokens)

    report = engine._report

    def slow_report(slot: RingSlot, *, whole: bool, accept: bool = True) -> list[Request]:
        clock.ms += reported * slot.header().num_prefill_tokens
        return report(slot, whole=whole, accept=accept)

    monkeypatch.setattr(engine, "_report", slow_report)
    engine.watch = watch
    greedy = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True, detokenize=False)
    stream = Request(0, [5, 6, 7], greedy)
    engine.add_request(stream)
    while not stream.output_token_ids:
        engine.step()
    prompt = [i % VOCAB for i in range(2000)]
    long = Request(1, prompt, greedy.replace(max_tokens=5, **params))
    engine.add_request(long)
    while not long.finished:
        engine.step()
    assert not stream.finished
    if not params:
        assert long.output_token_ids == told(long)
    assert sum(chunks) == 2000
    return chunks


@pytest.mark.parametrize("depth", [1, 2])
def test_what_steps_took_bounds_prompts_next_to_a_stream(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    chunks = chunks_beside_a_stream(monkeypatch, depth, BOUND)
    assert all(TOKEN * chunk <= 1.3 * BOUND for chunk in chunks), chunks
    assert len(chunks) <= 2 * 2000 * TOKEN / BOUND, chunks
    assert chunks_beside_a_stream(monkeypatch, depth, 0.0)[0] > 900


def test_what_is_reported_of_a_prompt_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = chunks_beside_a_stream(monkeypatch, 1, BOUND, reported=REPORTED, prompt_logprobs=1)
    assert all((TOKEN + REPORTED) * chunk <= 1.3 * BOUND for chunk in chunks), chunks
    assert len(chunks) <= 2 * 2000 * (TOKEN + REPORTED) / BOUND, chunks
