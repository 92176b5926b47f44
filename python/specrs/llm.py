"""The front door: prompts in, texts out, on one engine in this process. Not for several threads at once."""

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
from specrs.outputs import EngineStats, RequestOutput
from specrs.sampling import SamplingParams
from specrs.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from specrs.engine.engine import Engine
    from specrs.engine.request import Request
    from specrs.structured.grammar import Grammar

logger = logging.getLogger("specrs")

Message = Mapping[str, Any]
ItemT = TypeVar("ItemT")
_REFRESH_SECONDS = 0.2


class TemplateOptions(TypedDict, total=False):
    """What `LLM.chat` tells a chat template. `chat_template` stands in for the checkpoint's, `chat_template_kwargs` are
    the template's own variables."""

    chat_template: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None


class LLM:
    """A target model, its draft, and the engine that runs them.

    ```python
    llm = LLM(model="...", speculative_config={"model": "...", "num_speculative_tokens": 5})
    outputs = llm.generate(["def add(a, b):"], SamplingParams(temperature=0.0, max_tokens=64))
    ```
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        """Load `model` (a folder or a hub id; None is the bundled target). `settings` are the fields of `EngineConfig`.

        The other arguments of vLLM's `LLM` are accepted at values that change nothing.

        Raises `InvalidConfigError` (a `ValueError`) naming field, value and what is allowed; `UnsupportedConfigError`
        for a value that is not implemented; `CheckpointError` and `TokenizerMismatchError` for what the files hold.
        """
        config = EngineConfig.from_kwargs(model=model, **settings)
        # first, because it is quick and may refuse; weights may take minutes
        tokenizer = load_tokenizer(config)
        from specrs.engine.build import build_engine

        self._take(build_engine(config), tokenizer)

    @classmethod
    def from_engine(cls, engine: Engine, tokenizer: Tokenizer | None = None) -> LLM:
        """An `LLM` around an engine that exists. Without a tokenizer, prompts are ids and texts are empty."""
        llm = cls.__new__(cls)
        llm._take(engine, tokenizer)
        return llm

    def _take(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        engine.use_tokenizer(tokenizer)
        self.engine = engine
        self.tokenizer = tokenizer
        self._intake = Intake(tokenizer, engine.limits, engine.config.seed, engine.loras)

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; outputs in their order.

        A prompt is a string, `{"prompt": ...}`, `{"prompt_token_ids": [...]}` or a list of ids. `sampling_params` is
        one for all or one each, None is `SamplingParams()`: random, at temperature 1. `lora_request` is the LoRA
        adapter of all or of each, None is the base model; it is read when it is first asked for. `priority` is one
        each, the lowest first. `use_tqdm` shows a progress bar, or makes one.

        With `n` completions of a prompt, `outputs[i]` of its output is completion i. Every completion has its own seed
        (`specrs.sampling.derive_seed`): the same calls to a fresh engine with the same seed give the same texts.

        A bad request in a list fails alone: its outputs have `finish_reason` "error", `error` says why, and a warning
        is logged. A lone prompt raises instead, `InvalidRequestError` for bad input. An exception or interrupt ends all
        requests of this call; the engine stays usable.
        """
        lone = is_one_prompt(prompts)
        items: Sequence[Any] = [prompts] if lone else list(prompts)
        return self._complete(items, self._intake.read, sampling_params, lora_request, priority, use_tqdm, lone)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | None = None,
        **template: Unpack[TemplateOptions],
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several; as `generate`, through a chat template.

        A message is `{"role": ..., "content": ...}`.
        """
        if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
            raise invalid_request("messages", messages, "must be a list of messages, or a list of such lists")
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise InvalidRequestError(
                "messages: a chat needs a tokenizer; with skip_tokenizer_init=True allowed are token ids"
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
        """Complete one prompt; an output each time tokens arrive, the last one with `finished`.

        `outputs[i].text` is all text of completion i so far that no further token can change, and `delta` what it
        gained; with `RequestOutputKind.DELTA` an output holds only what is new. With `n` completions, each output has
        all of them. Raises at once for a bad request. Closing the
        iterator ends the requests; other calls may run in between.
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
        """Figures of all requests since the start or the last `reset_stats`."""
        return self.engine.stats()

    def reset_stats(self) -> None:
        """Start counting anew."""
        self.engine.reset_stats()

    def get_tokenizer(self) -> Tokenizer | None:
        """The engine's tokenizer; None with `skip_tokenizer_init`."""
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
    ) -> list[RequestOutput]:
        params = _one_each(sampling_params, len(items))
        priorities = _priorities(priority, len(items))
        loras = _loras(lora_request, len(items))
        outputs: dict[int, RequestOutput] = {}  # by index: refused before they ran
        groups: dict[int, list[Request]] = {}  # by index: the completions of each prompt
        compiling: dict[int, Future[Grammar]] = {}  # by index: what a group waits for
        try:
            for i, item in enumerate(items):
                prompt, number = None, self._intake.next_prompt()
                try:
                    prompt = read(item)
                    groups[i] = self._intake.requests(number, prompt, params[i], priorities[i], loras[i])
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
        """Step until the requests of every group have ended; those of others advance with them. Empties `compiling`."""
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
        """Add the groups whose grammars are there; the requests that have ended instead, because theirs was refused."""
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
        """`compiling`: some wait for their grammars, so that the engine may run out: a step that settles a launch
        planned ahead for requests that have ended since touches none."""
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
        """End the requests that have not ended; with an error, because of it."""
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
            f"sampling_params: {len(params)} for {count} prompts; allowed are one for all, or one each"
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
            f"lora_request: {len(lora_request)} for {count} prompts; allowed are one for all, or one each"
        )
    return list(lora_request)


def _priorities(priority: object, count: int) -> list[int]:
    if priority is None:
        return [0] * count
    if not isinstance(priority, Sequence) or isinstance(priority, (str, bytes)):
        raise invalid_request("priority", priority, "must be a list of integers, or None")
    if len(priority) != count:
        raise InvalidRequestError(f"priority: {len(priority)} for {count} prompts; allowed is one each")
    return [
        check_int(InvalidRequestError, f"priority[{i}]", item, -(2**63), 2**63 - 1) for i, item in enumerate(priority)
    ]


def _counts(requests: Sequence[Request]) -> tuple[int, int]:
    """Output tokens so far, and requests that have ended."""
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
    books = [request.acceptance for request in requests]
    drafts = sum(book.drafts for book in books)
    if drafts:
        accepted = sum(book.accepted_tokens for book in books)
        text += f", acceptance length {1 + accepted / drafts:.2f}"
    return text
