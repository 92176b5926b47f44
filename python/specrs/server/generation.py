"""Runs what a request asks for in the engine, and answers as a whole or as a stream. Knows no endpoint."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

from specrs.async_llm import OutputStream
from specrs.errors import SpecrsError
from specrs.inputs import Prompt
from specrs.lora_request import LoRARequest
from specrs.outputs import RequestOutput
from specrs.server.answers import Answer
from specrs.server.context import Context
from specrs.server.encoding import encode, encode_in_parts
from specrs.server.errors import APIError, api_error, unavailable
from specrs.server.metrics import RequestRecorder
from specrs.server.tracing import RequestTrace
from specrs.server.usage import speculation, usage

logger = logging.getLogger("specrs")

DONE = b"data: [DONE]\n\n"

News = list[tuple[int, RequestOutput]]
"""New outputs of a request, each with the index of its prompt."""


class Generation:
    """One request while the engine runs it. Close it, or use it as a context manager."""

    def __init__(self, context: Context, answer: Answer) -> None:
        self._llm = context.llm
        self._answer = answer
        self._metrics = context.metrics
        self._tracing = context.shared.tracing
        self._num_prompts = 0
        self._recorders: list[RequestRecorder | RequestTrace] = []
        self._report = context.report_speculation
        self._last: dict[int, RequestOutput] = {}  # by prompt
        self._begun = False
        self._stream: OutputStream | None = None
        asked = answer.body.per_request_spec_decode_metrics
        if asked is not None:
            self._report = asked != "none"

    async def start(self, prompts: Sequence[Prompt], lora_request: LoRARequest | None) -> None:
        """Queue the prompts, for the base model or an adapter. Raises `InvalidRequestError` if one is wrong; then none
        runs."""
        recorders: list[RequestRecorder | RequestTrace] = [
            self._metrics.request(len(prompts), self._answer.asked.engine_params.n)
        ]
        if self._tracing is not None:
            recorders.append(self._tracing.request(self._answer, len(prompts)))

        def observe(index: int, output: RequestOutput) -> None:
            for recorder in recorders:
                recorder.observe(index, output)

        self._stream = await self._llm.submit(
            prompts,
            self._answer.asked.engine_params,
            lora_request=lora_request,
            priority=self._answer.body.priority or 0,
            observer=observe,
        )
        self._recorders = recorders
        self._num_prompts = len(prompts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all completions that still run."""
        if self._stream is not None:
            self._stream.close()
        for recorder in self._recorders:
            recorder.close()

    async def whole(self) -> dict[str, Any]:
        """Wait until all completions have ended, and return the answer. Raises `APIError` if one failed."""
        assert self._stream is not None
        while news := await self._stream.get():
            for index, output in news:
                self._answer.read(index, output, self._stream.finish)
                if index in self._last:
                    output.extend_back(self._last[index])
                self._last[index] = output
        self._last = {index: self._answer.cut(index, output) for index, output in self._last.items()}
        for output in self._last.values():
            fault = _fault(output)
            if fault is not None:
                raise fault
        if self._answer.body.tells_prompts:
            # a second for a quarter of a million log probabilities, in which other streams go on
            assembled: dict[str, Any] = await self._llm.in_thread(self._assemble)
            return assembled
        return self._assemble()

    def _assemble(self) -> dict[str, Any]:
        answer = self._answer.head(chunk=False) | self._answer.prompt_fields(self._last)
        answer["choices"] = [
            choice for index, output in sorted(self._last.items()) for choice in self._answer.choices(index, output)
        ]
        answer["usage"] = self._usage()
        return self._with_metrics(answer)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield server-sent events: for each completion a chunk per iteration that brought it tokens, then `[DONE]`.

        A failure is sent as an event. Chunks that are ready at the same time are yielded together.
        """
        tells_prompts, last_usage = self._answer.body.tells_prompts, self._last_usage
        try:
            async for news in self._news():
                if tells_prompts:
                    # some 40 ms for the log probabilities of 2,000 positions, in which other streams go on
                    events = await self._llm.in_thread(partial(self._events, news, encode_in_parts))
                else:
                    events = self._events(news, encode)
                if events:
                    yield events
            if last_usage:
                head = self._answer.head(chunk=True)
                yield _event(encode(self._with_metrics({**head, "choices": [], "usage": self._usage()})))
        except Exception as fault:
            if not isinstance(fault, (APIError, SpecrsError)):
                logger.exception("a stream failed")
            yield _event(encode(api_error(fault).body))
        yield DONE

    async def choices(self) -> AsyncIterator[list[dict[str, Any]]]:
        """Yield the choices of new chunks, one list per iteration of the engine. Raises `APIError` if a completion
        failed."""
        async for news in self._news():
            yield self._choices(news)

    def _choices(self, news: News) -> list[dict[str, Any]]:
        found = []
        for index, output in news:
            fault = _fault(output)
            if fault is not None:
                raise fault
            found += self._answer.chunks(index, output)
        return found

    def _events(self, news: News, encode: Callable[[Any], bytes]) -> bytes:
        """Return the server-sent events of one iteration as one piece of bytes."""
        options = self._answer.body.stream_options
        head, chunks = self._answer.head(chunk=True), []
        for choice in self._choices(news):
            chunk = {**head, "choices": [choice]}
            if not self._begun:
                chunk |= self._answer.prompt_fields(self._last)
                self._begun = True
            if options is not None and options.continuous_usage_stats:
                chunk["usage"] = self._usage()
            elif self._last_usage:
                chunk["usage"] = None
            if self._answer.body.per_request_spec_decode_metrics == "continuous":
                self._with_metrics(chunk)
            chunks.append(chunk)
        if self._ended and chunks and not self._last_usage:
            self._with_metrics(chunks[-1])
        return b"".join(_event(encode(chunk)) for chunk in chunks)

    @property
    def _last_usage(self) -> bool:
        """True if the stream ends with a chunk that holds the usage."""
        options = self._answer.body.stream_options
        return options is not None and bool(options.include_usage)

    @property
    def _ended(self) -> bool:
        return len(self._last) == self._num_prompts and all(output.finished for output in self._last.values())

    async def _news(self) -> AsyncIterator[News]:
        assert self._stream is not None
        while news := await self._stream.get():
            news = [(index, self._answer.read(index, output, self._stream.finish)) for index, output in news]
            self._last.update(news)
            yield news

    def _usage(self) -> dict[str, Any]:
        answer = self._answer
        return usage(self._last.values(), completion_tokens=answer.num_tokens, reasoning_tokens=answer.reasoning_tokens)

    def _with_metrics(self, answer: dict[str, Any]) -> dict[str, Any]:
        if self._report:
            answer["metrics"] = speculation(self._last.values(), self._llm.limits.num_speculative_tokens)
        return answer


def _fault(output: RequestOutput) -> APIError | None:
    if output.error is not None:
        return api_error(output.error)
    if any(completion.finish_reason == "abort" for completion in output.outputs):
        return unavailable("The server is shutting down.")
    return None


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
