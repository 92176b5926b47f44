"""Outputs of a stream: each output kind holds what it promises, and an output costs only what is new. Work is counted,
not timed."""

import copy
import pickle
import random
import statistics
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrs import CompletionOutput, RequestOutput, RequestOutputKind, SamplingParams
from specrs.engine.output_builder import OutputBuilder, TokenTexts
from specrs.engine.request import FinishReason, Request
from specrs.outputs import Draft, TokenLogprob
from specrs.tokenizer import Tokenizer

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


class Stream:
    """A request that gets tokens by hand, and the outputs made from it."""

    def __init__(self, tokenizer: Tokenizer, **params: Any) -> None:
        params = {"logprobs": 1, "max_tokens": None} | params
        prompt = tokenizer.encode("a")
        self.request = Request(0, prompt, SamplingParams(**params), decoder=tokenizer.decoder)
        self.builder = OutputBuilder([self.request], TokenTexts(tokenizer))

    def take(self, ids: list[int]) -> None:
        """Add new tokens, each with its log probabilities."""
        before = self.request.num_output_tokens
        if self.request.append(ids, ended_by_token=False):
            self.request.finish(FinishReason.STOP)
        if self.request.logprobs is not None:
            new = self.request.output_token_ids[before:]
            self.request.logprobs += [TokenLogprob(token, -0.5, 1, [token], [-0.5]) for token in new]

    def output(self) -> CompletionOutput:
        """Return the output as of now."""
        return self.builder.build().outputs[0]


def joined(parts: list[CompletionOutput]) -> tuple[str, list[int], list[Any]]:
    """Join text, tokens and log probabilities of outputs that follow one another."""
    return (
        "".join(part.text for part in parts),
        [token for part in parts for token in part.token_ids],
        [entry for part in parts for entry in part.logprobs or ()],
    )


@given(st.lists(st.lists(st.integers(1, 500), max_size=4), max_size=12), st.data())
def test_deltas_make_the_whole(tokenizer: Tokenizer, steps: list[list[int]], data: st.DataObject) -> None:
    """Check that deltas make up the whole, however outputs are merged and whenever they are read."""
    include = data.draw(st.booleans())
    stop = data.draw(st.sampled_from([None, ["th", "e"], [" "]]))
    streams = {
        kind: Stream(tokenizer, output_kind=kind, stop=stop, include_stop_str_in_output=include)
        for kind in (CUMULATIVE, DELTA)
    }
    made: dict[RequestOutputKind, list[CompletionOutput]] = {kind: [] for kind in streams}
    for i, ids in enumerate([*steps, []]):
        merged = data.draw(st.booleans())
        for kind, stream in streams.items():
            if not stream.request.finished:
                stream.take(ids)
            if i == len(steps):
                stream.request.finish(FinishReason.ABORT)
            output = stream.output()
            if merged and made[kind]:
                assert made[kind][-1].delta is not None  # what was read before is read anew
                output.extend_back(made[kind].pop())
            made[kind].append(output)
    request, last = streams[CUMULATIVE].request, made[CUMULATIVE][-1]
    whole = (request.text, request.output_token_ids, last.logprobs)
    assert joined(made[DELTA]) == whole == joined([last])
    assert "".join(output.delta for output in made[CUMULATIVE]) == request.text
    assert [output.delta for output in made[DELTA]] == [output.text for output in made[DELTA]]
    for before, after in zip(made[CUMULATIVE], made[CUMULATIVE][1:], strict=False):
        assert after.text == before.text + after.delta
        assert after.token_ids[: len(before.token_ids)] == before.token_ids
    assert last.cumulative_logprob == -0.5 * len(last.logprobs or ())


def test_an_output_keeps_what_it_was(tokenizer: Tokenizer) -> None:
    """Check that an output keeps its value if it is read after the stream has gone on. A copy and an unpickled output
    are equal to it, and of the type `CompletionOutput`."""
    stream = Stream(tokenizer)
    stream.take([300, 301])
    first = stream.output()
    stream.take([302])
    second = stream.output()
    assert (first.token_ids, second.token_ids) == ([300, 301], [300, 301, 302])
    assert second.text == tokenizer.decode([300, 301, 302]) == first.text + second.delta
    assert len(first.logprobs or ()) == 2
    for other in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert type(other) is CompletionOutput
        assert other == first
        assert first == other
        assert other != second


def test_final_only_is_due_at_the_end(tokenizer: Tokenizer) -> None:
    stream = Stream(tokenizer, output_kind=FINAL_ONLY)
    stream.take([300, 301])
    assert not stream.builder.is_due
    stream.request.finish(FinishReason.LENGTH)
    assert stream.builder.is_due
    assert stream.output().token_ids == [300, 301]


def test_a_broken_engine_leaves_what_was_made(tokenizer: Tokenizer) -> None:
    """Check that a broken engine loses no finished output, even if the last output is merged with one before it."""
    stream = Stream(tokenizer, output_kind=DELTA)
    stream.take([300, 301])
    before: RequestOutput = stream.builder.build()
    last = stream.builder.fail(RuntimeError("gone"))  # type: ignore[arg-type]
    last.extend_back(before)
    assert last.finished
    assert (last.outputs[0].token_ids, last.outputs[0].finish_reason) == ([300, 301], "error")


def bytes_of_steps(step: Callable[[], object], count: int) -> list[int]:
    """Return the maximum number of bytes that one of `count` steps holds at a time."""
    found = []
    tracemalloc.start()
    try:
        for _ in range(count):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            step()
            found.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    return found


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA])
@pytest.mark.parametrize("stop", [None, ["a stop string that never comes"]])
def test_an_output_costs_what_is_new(tokenizer: Tokenizer, kind: RequestOutputKind, stop: list[str] | None) -> None:
    """Check that the last outputs of a stream of 2,000 tokens allocate no more than the first, so nothing old is
    copied."""
    chance = random.Random(0)
    stream = Stream(tokenizer, output_kind=kind, stop=stop, return_drafts=True)

    def step() -> object:
        stream.take([chance.randrange(1, 2000)])
        output = stream.output()
        return output.delta, kind is DELTA and (output.text, output.token_ids, output.logprobs, output.drafts)

    found = bytes_of_steps(step, 2000)
    assert statistics.median(found[-300:]) <= 1.1 * statistics.median(found[100:400])


def test_drafts_are_reported_once(tokenizer: Tokenizer) -> None:
    stream = Stream(tokenizer, output_kind=DELTA, return_drafts=True)
    drafts = stream.request._drafts
    assert drafts is not None
    drafts.append(Draft(0, 1, [7]))
    stream.take([300, 301])
    assert [draft.start for draft in stream.output().drafts or ()] == [0]
    assert stream.output().drafts == []
