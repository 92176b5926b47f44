"""The main Python interface: prompts in, texts out, with one engine in this process. Not thread-safe."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

from specrs.config import EngineConfig
from specrs.engine.intake import Intake, take_grammar
from specrs.engine.load import load_engine
from specrs.engine.output_builder import OutputBuilder
from specrs.errors import (
    EngineError,
    InvalidRequestError,
    SpecrsError,
    UnknownRequestError,
    check_int,
    invalid_request,
)
from specrs.inputs import Prompt, PromptType, is_one_prompt, prompt_text
from specrs.lora_request import LoRARequest
from specrs.outputs import EmbeddingRequestOutput, EngineStats, RequestOutput, ScoringRequestOutput
from specrs.pooling import Pooling, PoolingParams, read_pairs, read_params
from specrs.sampling import SamplingParams
from specrs.tokenizer import Tokenizer

if TYPE_CHECKING:
    from specrs.engine.engine import Engine
    from specrs.engine.request import Request
    from specrs.structured.grammar import Grammar

logger = logging.getLogger("specrs")

Message = Mapping[str, Any]
ItemT = TypeVar("ItemT")
_REFRESH_SECONDS = 0.2


class TemplateOptions(TypedDict, total=False):
    """Options of `LLM.chat` for the chat template. `chat_template` replaces the checkpoint's; `chat_template_kwargs`
    are variables that the template reads."""

    chat_template: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None


class LLM:
    """A target model, its drafter, and the engine that runs them.

    ```python
    llm = LLM(model="...", speculative_config={"model": "...", "num_speculative_tokens": 5})
    outputs = llm.generate(["def add(a, b):"], SamplingParams(temperature=0.0, max_tokens=64))
    ```
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        """Load `model` (a folder or a hub id; None is the bundled target). `settings` are the fields of `EngineConfig`.

        The other arguments of vLLM's `LLM` are accepted at values that change nothing.

        Raises `InvalidConfigError` (a `ValueError`) for a wrong value, with field, value and what is allowed;
        `UnsupportedConfigError` for a value that is not implemented; `CheckpointError` and `TokenizerMismatchError` for
        wrong files.
        """
        config = EngineConfig.from_kwargs(model=model, **settings)
        self._take(*load_engine(config))

    @classmethod
    def from_engine(cls, engine: Engine, tokenizer: Tokenizer | None = None) -> LLM:
        """Return an `LLM` that uses an existing engine. Without a tokenizer, prompts must be token ids and output texts
        are empty."""
        llm = cls.__new__(cls)
        llm._take(engine, tokenizer)
        return llm

    def _take(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        engine.use_tokenizer(tokenizer)
        self.engine = engine
        self.tokenizer = tokenizer
        self._intake = Intake(tokenizer, engine.limits, engine.config.seed, engine.loras)
        self._pooling = Pooling(engine.config, tokenizer, engine.limits.max_model_len)

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or several. Return one output per prompt, in the order of `prompts`.

        A bad request in a list fails alone: its outputs have `finish_reason` "error", `error` is the cause, and a
        warning is logged. If a single prompt is bad, its error is raised instead, `InvalidRequestError` for bad input.
        An exception or interrupt ends all requests of this call; the engine stays usable.

        With `n` completions of a prompt, `outputs[i]` of its output is completion i. Every completion has its own seed
        (`specrs.sampling.derive_seed`). The same calls to a fresh engine with the same seed give the same texts.

        Args:
            prompts: a prompt or a list of prompts. A prompt is a string, a list of ids, `{"prompt": ...}`, or
                `{"prompt_token_ids": [...]}`.
            sampling_params: one for all prompts, or one for each. None is `SamplingParams()`: random, at temperature 1.
            use_tqdm: True shows a progress bar. A function is called to make the bar.
            lora_request: the LoRA adapter of all prompts, or one for each. None is the base model. An adapter's files
                are read at its first request.
            priority: the priority of each prompt. Lower numbers run first.
        """
        lone = is_one_prompt(prompts)
        items: Sequence[Any] = [prompts] if lone else list(prompts)
        return self._complete(items, self._intake.read, sampling_params, lora_request, priority, use_tqdm, lone)

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Embed one prompt or several, of the forms that `generate` takes. Return one output per prompt, in the order
        of `prompts`.

        An embedding is the final hidden state of the prompt's last token, by default scaled to length 1. The tokenizer
        adds the special tokens that an embedding model ends texts with.

        Raises `InvalidRequestError` if a prompt or parameter is wrong, and then embeds none.
        """
        params = read_params(pooling_params)
        asked = self._pooling.embed_params(params, self.engine.hidden_size)
        items: Sequence[Any] = [prompts] if is_one_prompt(prompts) else list(prompts)
        outputs = self._complete(items, self._intake.read, asked, lora_request, None, use_tqdm, True, pooling=True)
        return self._pooling.embeddings(outputs, params)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | None = None,
        instruction: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Score pairs of texts: one with one, one with each of several, or several with as many.

        With an embedding model the score is the cosine of the two embeddings. Any other model is asked whether the
        document, in `data_2`, answers the query in `data_1`; the score is the probability of "yes" against "no".
        `instruction` tells such a model what the query is for.

        Raises `InvalidRequestError` if a text is wrong, and then scores none.
        """
        pairs = self._pooling.pairs(*read_pairs(data_1, data_2), instruction)
        outputs = self._complete(
            pairs.prompts, lambda prompt: prompt, pairs.params, lora_request, None, use_tqdm, True, pooling=True
        )
        return pairs.outputs(outputs)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | None = None,
        **template: Unpack[TemplateOptions],
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several. A chat template turns each conversation into a
        prompt, which is completed as by `generate`.

        A message is `{"role": ..., "content": ...}`.
        """
        if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
            raise invalid_request("messages", messages, "must be a list of messages, or a list of such lists")
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise InvalidRequestError(
                "messages: a chat needs a tokenizer; with skip_tokenizer_init=True pass token ids"
            )
        lone = any(isinstance(item, Mapping) for item in messages)

        def read(conversation: Sequence[Message]) -> Prompt:
            text = tokenizer.render_chat(conversation, **template)
            # the template writes the special tokens itself
            return Prompt(
                tokenizer.encode(text, add_special_tokens=False, max_tokens=self.engine.limits.max_model_len), text
            )

        items: Sequence[Any] = [messages] if lone else messages
        return self._complete(items, read, sampling_params, lora_request, None, use_tqdm, lone)

    def stream(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[RequestOutput]:
        """Complete one prompt. Yields an output each time tokens arrive; the last one has `finished` set.

        `outputs[i].text` is the text of completion i so far that no further token can change, and `delta` is the text
        added since the previous output. With `RequestOutputKind.DELTA` an output holds only what is new. With `n`
        completions, each output has all of them.

        Raises at the call for a bad request. Closing the iterator ends the requests. Other calls may run in between.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise invalid_request("sampling_params", params, "must be a SamplingParams or None")
        number = self._intake.next_prompt()
        requests = self._intake.requests(number, self._intake.read(prompt), params, lora_request=lora_request)
        compiled = self._intake.submit_grammar(params)
        if compiled is not None:
            while not compiled.done() and self.engine.has_unfinished():
                self._step(compiling=True)  # other streams need not wait for it
            take_grammar(requests, compiled)
        return self._stream(requests)

    def stats(self) -> EngineStats:
        """Return the statistics of all requests since the start or the last `reset_stats`."""
        return self.engine.stats()

    def reset_stats(self) -> None:
        """Set all statistics to zero."""
        self.engine.reset_stats()

    def get_tokenizer(self) -> Tokenizer | None:
        """Return the engine's tokenizer; None with `skip_tokenizer_init`."""
        return self.tokenizer

    def _complete(
        self,
        items: Sequence[ItemT],
        read: Callable[[ItemT], Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
        priority: Sequence[int] | None,
        use_tqdm: bool | Callable[..., Any],
        lone: bool,
        *,
        pooling: bool = False,
    ) -> list[RequestOutput]:
        params = _one_each(sampling_params, len(items))
        priorities = _priorities(priority, len(items))
        loras = _loras(lora_request, len(items))
        outputs: dict[int, RequestOutput] = {}  # by index: rejected before they ran
        groups: dict[int, list[Request]] = {}  # by index: the completions of each prompt
        compiling: dict[int, Future[Grammar]] = {}  # by index: what a group waits for
        try:
            for i, item in enumerate(items):
                prompt, number = None, self._intake.next_prompt()
                try:
                    prompt = read(item)
                    groups[i] = self._intake.requests(
                        number, prompt, params[i], priorities[i], loras[i], pooling=pooling
                    )
                    compiled = self._intake.submit_grammar(params[i])
                    if compiled is None:
                        self._add(groups[i])
                    else:
                        compiling[i] = compiled
                except SpecrsError as error:
                    self._abort(groups.pop(i, []))
                    if lone:
                        raise
                    text, ids = (prompt_text(item), []) if prompt is None else (prompt.text, prompt.token_ids)
                    outputs[i] = RequestOutput.from_error(self._intake.next_request_id(), text, ids, error, params[i].n)
            self._run(groups, compiling, use_tqdm)
        finally:
            self._abort(itertools.chain.from_iterable(groups.values()))
            self.engine.settle_idle()
        for i, requests in groups.items():
            outputs[i] = OutputBuilder(requests, self._intake.texts).build()
        for i, output in sorted(outputs.items()):
            if output.error is not None:
                if lone:
                    raise output.error
                logger.warning("prompt %d failed: %s", i, output.error)
        return [outputs[i] for i in range(len(items))]

    def _run(
        self,
        groups: Mapping[int, Sequence[Request]],
        compiling: dict[int, Future[Grammar]],
        use_tqdm: bool | Callable[..., Any],
    ) -> None:
        """Run steps until the requests of every group have ended. Requests of other calls advance too. Removes finished
        grammars from `compiling`."""
        group_of = {request.request_id: i for i, group in groups.items() for request in group}
        left = {i: len(group) for i, group in groups.items()}
        requests = [request for group in groups.values() for request in group]
        bar = _progress_bar(use_tqdm, len(groups))
        started = refreshed = time.monotonic()
        try:
            while group_of:
                touched = self._add_compiled(groups, compiling)
                if self.engine.has_unfinished() or not (touched or compiling):
                    touched += self._step(compiling=bool(compiling))
                elif not touched:
                    wait(compiling.values(), return_when=FIRST_COMPLETED)
                ended = 0
                for request in touched:
                    if request.finished and request.request_id in group_of:
                        group = group_of.pop(request.request_id)
                        left[group] -= 1
                        ended += left[group] == 0
                if bar is not None:
                    if ended:
                        bar.update(ended)
                    now = time.monotonic()
                    if now - refreshed >= _REFRESH_SECONDS or not group_of:
                        refreshed = now
                        bar.set_postfix_str(_progress(requests, now - started))
        finally:
            if bar is not None:
                bar.close()

    def _add_compiled(
        self, groups: Mapping[int, Sequence[Request]], compiling: dict[int, Future[Grammar]]
    ) -> list[Request]:
        """Add the groups whose grammars are compiled to the engine. Return the requests that have ended instead because
        their grammar was rejected."""
        ended: list[Request] = []
        for i in [i for i, compiled in compiling.items() if compiled.done()]:
            try:
                take_grammar(groups[i], compiling.pop(i))
                self._add(groups[i])
            except SpecrsError as error:
                self._abort(groups[i], error)
                ended += groups[i]
        return ended

    def _add(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.engine.add_request(request)

    def _step(self, *, compiling: bool = False) -> list[Request]:
        """Run one step and return the requests that it touched. `compiling` says that some requests still wait for
        their grammars, so the engine may have nothing to run. A step may touch no request: it can settle work planned
        for requests that have ended since."""
        touched = self.engine.step()
        if not touched and not compiling and not self.engine.has_unfinished():
            raise EngineError("the engine is idle, but requests have not ended")
        return touched

    def _stream(self, requests: Sequence[Request]) -> Iterator[RequestOutput]:
        builder = OutputBuilder(requests, self._intake.texts)
        try:
            self._add(requests)
            told = (0, 0)
            while True:
                # other calls may have stepped the engine since the last output
                while (now := _counts(requests)) == told:
                    self._step()
                told = now
                if not builder.is_due:
                    continue
                output = builder.build()
                yield output
                if output.finished:  # the requests may have ended since, with more to tell
                    break
        finally:
            self._abort(requests)
            self.engine.settle_idle()
        if output.error is not None:
            raise output.error

    def _abort(self, requests: Iterable[Request], error: SpecrsError | None = None) -> None:
        """End the requests that have not ended yet. With `error`, they end with that error."""
        for request in requests:
            if not request.finished:
                if error is not None:
                    from specrs.engine.request import FinishReason

                    request.finish(FinishReason.ERROR, error)
                with contextlib.suppress(UnknownRequestError):  # the fault may have come before it was added
                    self.engine.abort(request.request_id)


def _one_each(sampling_params: object, count: int) -> list[SamplingParams]:
    params = SamplingParams() if sampling_params is None else sampling_params
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(item, SamplingParams) for item in params):
        raise invalid_request("sampling_params", params, "must be a SamplingParams, a list of them, or None")
    if len(params) != count:
        raise InvalidRequestError(
            f"sampling_params: {len(params)} for {count} prompts; must be one for all, or one each"
        )
    return list(params)


def _loras(lora_request: object, count: int) -> list[LoRARequest | None]:
    if lora_request is None or isinstance(lora_request, LoRARequest):
        return [lora_request] * count
    if not isinstance(lora_request, Sequence) or not all(
        item is None or isinstance(item, LoRARequest) for item in lora_request
    ):
        raise invalid_request("lora_request", lora_request, "must be a LoRARequest, a list of them and None, or None")
    if len(lora_request) != count:
        raise InvalidRequestError(
            f"lora_request: {len(lora_request)} for {count} prompts; must be one for all, or one each"
        )
    return list(lora_request)


def _priorities(priority: object, count: int) -> list[int]:
    if priority is None:
        return [0] * count
    if not isinstance(priority, Sequence) or isinstance(priority, (str, bytes)):
        raise invalid_request("priority", priority, "must be a list of integers, or None")
    if len(priority) != count:
        raise InvalidRequestError(f"priority: {len(priority)} for {count} prompts; give one each")
    return [
        check_int(InvalidRequestError, f"priority[{i}]", item, -(2**63), 2**63 - 1) for i, item in enumerate(priority)
    ]


def _counts(requests: Sequence[Request]) -> tuple[int, int]:
    """Return the number of output tokens so far, and the number of requests that have ended."""
    return sum(request.num_output_tokens for request in requests), sum(request.finished for request in requests)


def _progress_bar(use_tqdm: bool | Callable[..., Any], total: int) -> Any:
    if not use_tqdm or total == 0:
        return None
    if use_tqdm is True:
        from tqdm.auto import tqdm as make
    else:
        make = use_tqdm
    return make(total=total, desc="Processed prompts", dynamic_ncols=True)


def _progress(requests: Sequence[Request], seconds: float) -> str:
    tokens = sum(request.num_output_tokens for request in requests)
    text = f"{tokens / max(seconds, 1e-9):.1f} tok/s"
    statistics = [request.acceptance for request in requests]
    drafts = sum(one.drafts for one in statistics)
    if drafts:
        accepted = sum(one.accepted_tokens for one in statistics)
        text += f", acceptance length {1 + accepted / drafts:.2f}"
    return text
