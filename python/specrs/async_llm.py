"""`AsyncLLM` runs an engine in its own thread, for programs with an event loop. The loop never waits for compute."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from specrs.config import EngineConfig
from specrs.engine.intake import Intake, take_grammar
from specrs.engine.load import load_engine
from specrs.engine.loop import EngineLoop, Group, Updates
from specrs.engine_options import STREAMING_PREFILL_STALL_MS
from specrs.errors import EngineDeadError, InvalidRequestError, QueueFullError, check_int, invalid_request
from specrs.inputs import Prompt, PromptType
from specrs.lora_request import LoRARequest
from specrs.outputs import EmbeddingRequestOutput, EngineStats, RequestOutput, ScoringRequestOutput
from specrs.pooling import Pooling, PoolingParams, pooled_of, read_pairs, read_params
from specrs.sampling import SamplingParams
from specrs.tokenizer import Tokenizer

if TYPE_CHECKING:
    from specrs.engine.engine import Engine
    from specrs.structured.grammar import Grammar

TOKENIZER_THREADS = 2
"""Number of threads that tokenize prompts. The tokenizer releases the interpreter while it works."""

ResultT = TypeVar("ResultT")
Observer = Callable[[int, RequestOutput], None]


class OutputStream:
    """Outputs of the prompts of one `submit`. Belongs to the event loop in which it was made.

    Outputs that a slow reader has not taken are merged into one per prompt, so the stream holds no more than the text.
    """

    def __init__(self, llm: AsyncLLM, count: int, completions: int, observer: Observer | None) -> None:
        self._llm = llm
        self._event_loop = asyncio.get_running_loop()
        self._observer = observer
        self._pending: dict[int, RequestOutput] = {}
        self._news = asyncio.Event()
        self._left = count  # prompts that have not ended
        self._completions = completions  # of each prompt
        self._closed = False
        self._group: Group | None = None

    async def get(self) -> list[tuple[int, RequestOutput]]:
        """Wait until some prompt has new tokens or has ended. Return a pair (index of the prompt, output) for each such
        prompt.

        `[]` if all prompts have ended and everything was delivered. If an error ended a prompt, its output has `error`
        set; nothing is raised.
        """
        if not self._pending and self._left:
            self._news.clear()
            await self._news.wait()
        news, self._pending = self._pending, {}
        return sorted(news.items())

    def finish(self, index: int, completion: int) -> None:
        """End one completion of prompt `index` as if it had stopped by itself. Its last output is still delivered."""
        if self._group is not None:
            self._llm._loop.finish(self._group, index, completion)

    def close(self) -> None:
        """End all completions that still run. Their blocks are freed when the steps in flight have settled. May be
        called twice."""
        if self._closed:
            return
        self._closed = True
        self._llm._forget(self._left * self._completions)
        # The group knows its stream: without this they would be a cycle, and collections would walk some ten objects
        # for each token whose log probabilities were reported, while all streams wait.
        group, self._group = self._group, None
        if self._left:
            self._left = 0
            self._news.set()
            if group is not None:
                self._llm._loop.abort(group)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _put(self, index: int, output: RequestOutput) -> None:
        if self._closed:
            return
        if output.finished:
            self._left -= 1
            self._llm._forget(self._completions)
        if self._observer is not None:
            self._observer(index, output)
        earlier = self._pending.get(index)
        if earlier is not None:
            output.extend_back(earlier)
        self._pending[index] = output
        self._news.set()


class AsyncLLM:
    """A target model, its drafter, and the engine that runs them in its own thread.

    ```python
    llm = AsyncLLM(model="...", speculative_config={"model": "...", "num_speculative_tokens": 5})
    async for output in llm.generate("def add(a, b):", SamplingParams(max_tokens=64)):
        print(output.outputs[0].delta, end="")
    llm.shutdown()
    ```

    Many calls may run at once, in one event loop or several. If one fails, the others go on.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        """Load `model` with the fields of `EngineConfig`, as `LLM` does. Blocks while weights load.

        `max_prefill_stall_ms` defaults to 75 here.

        Raises `InvalidConfigError` for a wrong setting, `UnsupportedConfigError` for a value that is not implemented,
        `CheckpointError` and `TokenizerMismatchError` for wrong files.
        """
        config = EngineConfig.from_kwargs(model=model, **settings)
        if config.max_prefill_stall_ms is None:
            config = replace(config, max_prefill_stall_ms=STREAMING_PREFILL_STALL_MS)
        self._take(*load_engine(config))

    @classmethod
    def from_engine(cls, engine: Engine, tokenizer: Tokenizer | None = None) -> AsyncLLM:
        """Return an `AsyncLLM` that uses an existing engine. From then on, only the thread of the `AsyncLLM` may use
        the engine."""
        llm = cls.__new__(cls)
        llm._take(engine, tokenizer)
        return llm

    def _take(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        engine.use_tokenizer(tokenizer)
        self.config = engine.config
        self.limits = engine.limits
        self.tokenizer = tokenizer
        self.max_num_queued_reqs: int | None = None
        """Maximum number of completions that wait or run at once, under vLLM's name. None: no limit."""
        self.on_dead: Callable[[], None] | None = None
        """Function that is called in the engine's thread if the engine breaks."""
        self._engine = engine
        self._intake = Intake(tokenizer, engine.limits, engine.config.seed, engine.loras)
        self.pooling = Pooling(engine.config, tokenizer, engine.limits.max_model_len)
        """Prompts and results of embeddings and scores."""
        self._readers = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="specrs-tokenizer")
        self._num_unfinished = 0
        self._counting = threading.Lock()  # event loops in several threads may count
        self._loop = EngineLoop(engine, self._deliver, self._dead)
        self._loop.start()

    @property
    def dtype(self) -> str:
        """Name of the dtype in which the target computes, which `dtype="auto"` stands for."""
        return self._engine.dtype

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Complete one prompt. Yields an output each time tokens arrive; the last one has `finished` set.

        `sampling_params.output_kind` says whether an output holds all tokens and text so far (the default) or only what
        is new since the previous output. `outputs[i].delta` is the new text in both cases. A reader that is slower than
        the engine gets fewer, larger outputs. Closing the iterator or cancelling its task ends the requests.

        Raises `InvalidRequestError` for bad input. If the engine ends the request with an error, that error is raised.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise invalid_request("sampling_params", params, "must be a SamplingParams or None")
        async with await self.submit([prompt], params, lora_request=lora_request, priority=priority) as stream:
            while news := await stream.get():
                for _, output in news:
                    yield output
                    if output.error is not None:
                        raise output.error

    async def embed(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> EmbeddingRequestOutput:
        """Embed one prompt, as `LLM.embed` does. Raises `InvalidRequestError` for bad input. If the engine ends the
        request with an error, that error is raised."""
        params = read_params(pooling_params)
        asked = await self.in_thread(lambda: self.pooling.embed_params(params, self.hidden_size))
        outputs = await self.pool([prompt], asked, lora_request=lora_request, priority=priority)
        return self.pooling.embeddings(outputs, params)[0]

    async def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        instruction: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Score pairs of texts, as `LLM.score` does. Raises `InvalidRequestError` for bad input. If the engine ends a
        request with an error, that error is raised."""
        pairs = await self.in_thread(lambda: self.pooling.pairs(*read_pairs(data_1, data_2), instruction))
        return pairs.outputs(await self.pool(pairs.prompts, pairs.params, lora_request=lora_request, priority=priority))

    async def pool(
        self,
        prompts: Sequence[PromptType | Prompt],
        params: SamplingParams,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        observer: Observer | None = None,
    ) -> list[RequestOutput]:
        """Run prompts as requests with pooling. Return their outputs, with `pooled` set, in the order of `prompts`.

        `params` come from `specrs.pooling`. Raises like `submit`, and the first error that ends a request.
        """
        submitted = self.submit(
            prompts, params, lora_request=lora_request, priority=priority, observer=observer, pooling=True
        )
        outputs: dict[int, RequestOutput] = {}
        async with await submitted as stream:
            while news := await stream.get():
                for index, output in news:
                    outputs[index] = output
                    pooled_of(output)
        return [output for _, output in sorted(outputs.items())]

    @property
    def hidden_size(self) -> int:
        """Number of features of the target's final hidden states, which are the dimensions of an embedding."""
        return self._engine.hidden_size

    async def submit(
        self,
        prompts: Sequence[PromptType | Prompt],
        params: SamplingParams,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        observer: Observer | None = None,
        pooling: bool = False,
    ) -> OutputStream:
        """Submit prompts for completion, and return a stream of their outputs. Close it, or use it as a context
        manager.

        A prompt has a form that `LLM.generate` accepts, or is a `Prompt`. `observer` is called in the event loop with
        the index of a prompt and its output, once per step of the engine, however slowly the stream is read. With
        `pooling`, the requests draw no token: see `RequestOutput.pooled`.

        Raises `InvalidRequestError` if a prompt is bad, and then starts none; `QueueFullError` if more than
        `max_num_queued_reqs` completions would wait or run; `EngineDeadError` if the engine is broken or shut down.
        """
        check_int(InvalidRequestError, "priority", priority, -(2**63), 2**63 - 1)
        if self._loop.error is not None:
            raise self._loop.error
        self._count(len(prompts) * params.n)
        stream = OutputStream(self, len(prompts), params.n, observer)
        compiled: Future[Grammar] | None = None
        try:
            numbers = [self._intake.next_prompt() for _ in prompts]
            compiled = self._intake.submit_grammar(params)
            requests = await self.in_thread(
                lambda: [
                    self._intake.requests(number, self._read(prompt), params, priority, lora_request, pooling=pooling)
                    for number, prompt in zip(numbers, prompts, strict=True)
                ]
            )
            if compiled is not None:
                waiting = asyncio.wrap_future(compiled)
                # what it fails with is raised below; a request that is cut off leaves it, and asyncio would log it
                waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
                await asyncio.wait([waiting])
                del waiting
                for completions in requests:
                    take_grammar(completions, compiled)
            stream._group = Group(requests, self._intake.texts, stream)
            await asyncio.wrap_future(self._loop.add(stream._group))
        except BaseException:
            compiled = None  # it knows its fault, whose traceback knows this frame: a cycle
            stream.close()
            raise
        return stream

    def add_lora(self, lora_request: LoRARequest) -> None:
        """Load an adapter, so that its first request does not wait for that. Blocks.

        Raises `InvalidRequestError` if the request contradicts a known adapter, `CheckpointError` if the adapter cannot
        be read.
        """
        self._intake.lora(lora_request)

    def take_turns(self, turns: AbstractContextManager[object]) -> None:
        """Share `turns`, a lock, with other engines, so that only one of them runs a step at a time. Must be called
        before the first request."""
        self._loop.turns = turns

    async def in_thread(self, function: Callable[[], ResultT]) -> ResultT:
        """Run `function`, which may take long, in the thread pool that reads prompts."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, function)

    async def in_engine(self, function: Callable[[], ResultT]) -> ResultT:
        """Run `function` in the engine's thread, between two steps. Raises `EngineDeadError` if the engine is broken or
        shut down."""
        return await asyncio.wrap_future(self._loop.call(function))

    async def stats(self) -> EngineStats:
        """Return the statistics of all requests since the start. Raises `EngineDeadError` if the engine is broken or
        shut down."""
        return await self.in_engine(self._engine.stats)

    @property
    def device(self) -> str:
        """Device that holds the target's weights, as torch names it."""
        return self._engine.weights.device

    def token_text(self, token_id: int) -> str:
        """Return the text of a single token. Raises `InvalidRequestError` without a tokenizer."""
        if self._intake.texts is None:
            raise invalid_request("token_id", token_id, "has no text with skip_tokenizer_init=True")
        return self._intake.texts[token_id]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, which may be a part of a character. Raises `InvalidRequestError` without a
        tokenizer."""
        self.token_text(token_id)
        assert self._intake.texts is not None
        return self._intake.texts.bytes_of(token_id)

    @property
    def num_unfinished(self) -> int:
        """Number of completions that wait or run, including those whose prompts are still being tokenized."""
        return self._num_unfinished

    @property
    def error(self) -> EngineDeadError | None:
        """Error that broke or ended the engine; None while it runs."""
        return self._loop.error

    def shutdown(self, timeout: float | None = None) -> bool:
        """Abort all requests and end the engine's thread. Return True if the thread has ended within `timeout` seconds;
        None waits forever.

        Blocks. Streams still get the outputs made before. May be called again.
        """
        self._loop.stop()
        self._loop.join(timeout)
        self._readers.shutdown(wait=False, cancel_futures=True)
        return not self._loop.is_alive()

    def _read(self, prompt: PromptType | Prompt) -> Prompt:
        return prompt if isinstance(prompt, Prompt) else self._intake.read(prompt)

    def _count(self, more: int) -> None:
        """Add `more` to the number of completions that wait or run. Raises `QueueFullError` if more than
        `max_num_queued_reqs` would wait or run."""
        with self._counting:
            most, now = self.max_num_queued_reqs, self._num_unfinished
            if most is not None and now + more > most:
                raise QueueFullError(
                    f"{now} requests wait and run, {more} more are asked for; must be at most {most} in all"
                )
            self._num_unfinished = now + more

    def _forget(self, completions: int) -> None:
        with self._counting:
            self._num_unfinished -= completions

    def _deliver(self, updates: Updates) -> None:
        """Hand outputs to the event loops that wait for them, waking each loop once. Called in the engine's thread."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[OutputStream, int, RequestOutput]]] = {}
        for group, index, output in updates:
            stream: OutputStream = group.owner
            by_loop.setdefault(stream._event_loop, []).append((stream, index, output))
        for event_loop, news in by_loop.items():
            try:
                event_loop.call_soon_threadsafe(_put_all, news)
            except RuntimeError:  # it was closed, and its streams are not read any more
                for stream, _, _ in news:
                    stream.close()

    def _dead(self) -> None:
        if self.on_dead is not None:
            self.on_dead()


def _put_all(news: Sequence[tuple[OutputStream, int, RequestOutput]]) -> None:
    for stream, index, output in news:
        stream._put(index, output)
