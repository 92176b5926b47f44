"""The cost of an event of a long stream depends only on its new tokens. Work is counted, not timed."""

import random
import statistics
from types import SimpleNamespace
from typing import Any, cast

import pytest
from engine.test_completion_log import Stream, bytes_of_steps
from specrs.sampling import SamplingParams
from specrs.server.answers import Answer, ChatAnswer, CompletionAnswer
from specrs.server.content_stops import ContentStops
from specrs.server.encoding import encode
from specrs.server.generation import Generation
from specrs.server.messages import MessageReader
from specrs.server.params import Asked
from specrs.server.parsers.base import Content
from specrs.server.protocol import ChatCompletionRequest, CompletionRequest
from specrs.tokenizer import Tokenizer

STOP = ["a stop string that never comes"]


def reader() -> MessageReader:
    """Make a reader of messages that are content and nothing else."""
    return MessageReader(None, None, parallel=True, include_reasoning=True, named=False, new_call_id=lambda *_: "call")


class Reasoning(MessageReader):
    """Reads messages whose reasoning never ends."""

    def __init__(self) -> None:
        super().__init__(None, None, parallel=True, include_reasoning=True, named=False, new_call_id=lambda *_: "call")

    @property
    def reasoning_length(self) -> None:
        return None


def answer(tokenizer: Tokenizer, endpoint: str, params: SamplingParams) -> Answer:
    """Return the answer to a stream with all options that chunks may have."""
    usage = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"stream": True, "stream_options": usage, "return_token_ids": True, "return_drafts": True}
    if endpoint == "completions":
        body = CompletionRequest.model_validate({"prompt": "a", **asked})
        return CompletionAnswer(
            model="m", body=body, asked=Asked(params), token_text=str, prompt_texts=["a"], decoder=tokenizer.decoder
        )
    messages = [{"role": "user", "content": "a"}]
    return ChatAnswer(
        model="m",
        body=ChatCompletionRequest.model_validate({"messages": messages, **asked}),
        asked=Asked(params, stops_in_content=endpoint == "content"),
        token_text=str,
        token_bytes=lambda token: b"a",
        decode=tokenizer.decode,
        decoder=tokenizer.decoder,
        new_reader={"chat": None, "content": reader, "reasoning": Reasoning}[endpoint],
    )


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("endpoint", ["completions", "chat", "content", "reasoning"])
def test_an_event_costs_what_is_new(tokenizer: Tokenizer, endpoint: str, logprobs: int | None) -> None:
    """Check that the last of 2,000 events allocate no more than the first, with stop strings and usage in each
    chunk."""
    from specrs import RequestOutputKind

    chance = random.Random(0)
    fields: dict[str, Any] = {"logprobs": logprobs, "stop": None if endpoint == "content" else STOP}
    stream = Stream(tokenizer, output_kind=RequestOutputKind.DELTA, return_drafts=True, **fields)
    made = answer(tokenizer, endpoint, stream.request.params.replace(stop=STOP))
    context: Any = SimpleNamespace(
        llm=SimpleNamespace(limits=SimpleNamespace(num_speculative_tokens=0)),
        metrics=None,
        shared=SimpleNamespace(tracing=None),
        report_speculation=False,
    )
    generation = Generation(context, made)
    sizes: list[int] = []

    def step() -> None:
        stream.take([chance.randrange(300, 2000)])
        read = made.read(0, stream.builder.build(), lambda index, completion: None)
        generation._last[0] = read
        sizes.append(len(generation._events([(0, read)], encode)))

    found = bytes_of_steps(step, 2000)
    assert min(sizes) > 0
    assert statistics.median(found[-300:]) <= 1.1 * statistics.median(found[100:400])
    assert made.num_tokens == 2000
    assert sum(sizes[-300:]) <= 1.1 * sum(sizes[100:400])


def test_content_stops_keep_a_window() -> None:
    """Check that a stop string in a long content is found across pieces, and that late pieces allocate no more than
    early ones."""
    stops = ContentStops(["END", "xyz"], include=False)

    def step() -> None:
        told = stops.filter([Content("abxy")], final=False)
        assert sum(len(cast(Content, event).text) for event in told) in (2, 4)

    found = bytes_of_steps(step, 2000)
    assert statistics.median(found[-300:]) <= 1.1 * statistics.median(found[100:400])
    (event,) = stops.filter([Content("z")], final=False) or [Content("")]
    assert event == Content("")
    assert stops.found == "xyz"
    assert stops.content == "abxy" * 2000 + "z"
