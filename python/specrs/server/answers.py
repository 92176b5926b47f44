"""What OpenAI's two endpoints answer with: choices and chunks of completions, choices and chunks of chats.

Turns outputs into dictionaries. Generates nothing and sends nothing.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specrs.core import TokenDecoder
from specrs.outputs import CompletionOutput, Draft, RequestOutput
from specrs.server.logprobs import TokenBytes, TokenText, chat_logprobs, completion_logprobs, prompt_logprobs
from specrs.server.messages import MessageReader
from specrs.server.params import Asked
from specrs.server.protocol import SamplingBody
from specrs.server.stopped_completion import StoppedCompletion
from specrs.server.token_pieces import TextOffsets, TokenPieces
from specrs.server.usage import tokens_of


@dataclass(frozen=True, slots=True)
class _Told:
    """What was told of a completion: tokens, drafts, and that it ended."""

    tokens: int = 0
    drafts: int = 0
    ended: bool = False


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One request being answered: its head, and how far each completion has been told."""

    model: str
    body: SamplingBody
    asked: Asked
    token_text: TokenText
    prompt_texts: Sequence[str] = ()
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    _told: dict[tuple[int, int], _Told] = field(default_factory=dict)  # by prompt and completion

    operation_name = ""
    """`gen_ai.operation.name` of its spans."""
    object_name = ""
    chunk_name = ""
    id_prefix = ""

    def head(self, *, chunk: bool) -> dict[str, Any]:
        """The fields that every answer and every chunk begins with."""
        return {
            "id": f"{self.id_prefix}-{self.request_id}",
            "object": self.chunk_name if chunk else self.object_name,
            "created": self.created,
            "model": self.model,
        }

    def read(self, index: int, output: RequestOutput, finish: Callable[[int, int], None]) -> RequestOutput:
        """What of an output of prompt `index` counts. Called with each output in turn, before `choices` or `chunks`.

        `finish(index, completion)` ends a completion in the engine.
        """
        return output

    def prompt_fields(self, outputs: Mapping[int, RequestOutput]) -> dict[str, Any]:
        """Fields of the prompts that vLLM has beside `choices`: of an answer, and of the first chunk of a stream."""
        return {}

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens that are reasoning, of all that was told so far; None where no token can be."""
        return None

    def choices(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """The finished completions of prompt `index`."""
        raise NotImplementedError

    def chunks(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """What is new of each completion of prompt `index`, a choice each; those without news are left out."""
        raise NotImplementedError

    def _choice_index(self, index: int, completion: CompletionOutput) -> int:
        return index * self.asked.params.n + completion.index

    def _is_news(self, index: int, completion: CompletionOutput, ids: Sequence[int]) -> bool:
        """Whether there is more to tell of a completion than was told, of which `ids` are all tokens."""
        told = self._told.get((index, completion.index))
        if told is None:
            return bool(ids or completion.finish_reason)
        return len(ids) > told.tokens or (completion.finish_reason is not None and not told.ended)

    def _tell(self, index: int, completion: CompletionOutput, ids: Sequence[int]) -> None:
        ended = completion.finish_reason is not None
        self._told[index, completion.index] = _Told(len(ids), len(completion.drafts or ()), ended)

    def _ending(self, completion: CompletionOutput) -> dict[str, Any]:
        return {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}

    def _tokens(self, completion: CompletionOutput, ids: Sequence[int], told: _Told | None) -> dict[str, Any]:
        """Fields that tell of `ids` and of the drafts among them as tokens, where the body asks for any. `told` is what
        was told of the completion before, None for nothing."""
        body, fields = self.body, dict[str, Any]()
        if body.return_token_ids:
            fields["token_ids"] = list(ids)
        if body.return_token_strs:
            fields["token_strs"] = [self.token_text(token_id) for token_id in ids]
        if body.return_drafts and completion.drafts is not None:
            new = completion.drafts[told.drafts if told is not None else 0 :]
            fields["drafts"] = [self._draft(draft) for draft in new]
        return fields

    def _draft(self, draft: Draft) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "start": draft.start,
            "num_draft_tokens": draft.num_drafted,
            "num_accepted_draft_tokens": draft.num_accepted,
            "rejected_token_ids": draft.rejected_token_ids,
        }
        if self.body.return_token_strs:
            fields["rejected_token_strs"] = [self.token_text(token_id) for token_id in draft.rejected_token_ids]
        return fields


@dataclass(frozen=True, kw_only=True)
class CompletionAnswer(Answer):
    """`POST /v1/completions`. `decoder`: the tokenizer's; None for no text.

    `prompt_offsets`: where the tokens of each prompt begin in its text, for those that are told with the completion.
    """

    echo: bool = False
    decoder: TokenDecoder | None = None
    prompt_offsets: Sequence[Sequence[int]] = ()
    _offsets: dict[tuple[int, int], TextOffsets] = field(default_factory=dict)  # by prompt and completion

    operation_name = object_name = chunk_name = "text_completion"
    id_prefix = "cmpl"

    def choices(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        choices = []
        for completion in output.outputs:
            text, ids = self._told_of(completion)
            choice = {
                "index": self._choice_index(index, completion),
                "text": (self.prompt_texts[index] if self.echo else "") + text,
                "logprobs": self._logprobs(index, output, completion, ids, first=True, start=0),
                **self._ending(completion),
            }
            choices.append(choice | self._extras(output, completion, ids, None))
        return choices

    def chunks(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        choices = []
        for completion in output.outputs:
            ids = self._told_of(completion)[1]
            if not self._is_news(index, completion, ids):
                continue
            before = self._told.get((index, completion.index))
            first, told = before is None, before or _Told()
            text = "" if self.asked.silent else completion.delta
            if first and self.echo:
                text = self.prompt_texts[index] + text
            new = ids[told.tokens :]
            logprobs = self._logprobs(index, output, completion, new, first=first, start=told.tokens)
            self._tell(index, completion, ids)
            choice = {
                "index": self._choice_index(index, completion),
                "text": text,
                "logprobs": logprobs,
                **self._ending(completion),
            }
            choices.append(choice | self._extras(output, completion, new, before))
        return choices

    def _told_of(self, completion: CompletionOutput) -> tuple[str, list[int]]:
        return ("", []) if self.asked.silent else (completion.text, completion.token_ids)

    def _ending(self, completion: CompletionOutput) -> dict[str, Any]:
        if self.asked.silent and completion.finish_reason in ("stop", "length"):
            return {"finish_reason": "length", "stop_reason": None}
        return super()._ending(completion)

    def _logprobs(
        self,
        index: int,
        output: RequestOutput,
        completion: CompletionOutput,
        ids: Sequence[int],
        *,
        first: bool,
        start: int,
    ) -> dict[str, Any] | None:
        if completion.logprobs is None:
            return None
        entries: list[Mapping[int, Any] | None] = list(completion.logprobs[start : start + len(ids)])
        offsets = self._offsets_of(index, output, completion)[start : start + len(ids)]
        if first and self.echo and output.prompt_logprobs is not None:
            ids = [*output.prompt_token_ids, *ids]
            entries = [*output.prompt_logprobs, *entries]
            offsets = [*self.prompt_offsets[index], *offsets]
        return completion_logprobs(ids, entries, self.token_text, offsets, top=bool(self.asked.params.logprobs))

    def _offsets_of(self, index: int, output: RequestOutput, completion: CompletionOutput) -> list[int]:
        """Where the tokens of a completion begin in the text of its choice."""
        key = index, completion.index
        if key not in self._offsets:
            skip = self.asked.params.skip_special_tokens
            pieces = TokenPieces(self.decoder, output.prompt_token_ids, skip_special_tokens=skip)
            self._offsets[key] = TextOffsets(pieces, len(self.prompt_texts[index]) if self.echo else 0)
        return self._offsets[key].of(completion.token_ids)

    def _extras(
        self, output: RequestOutput, completion: CompletionOutput, ids: Sequence[int], told: _Told | None
    ) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if told is None and completion.index == 0 and output.prompt_logprobs is not None and not self.echo:
            extras["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if self.body.return_token_ids:
            extras["prompt_token_ids"] = output.prompt_token_ids if told is None else None
        return extras | self._tokens(completion, ids, told)


@dataclass(frozen=True, kw_only=True)
class ChatAnswer(Answer):
    """`POST /v1/chat/completions`. `new_reader` makes what reads a completion whose text is more than content.

    `decode` gives the text of token ids as completions have it.
    """

    decode: Callable[[Sequence[int]], str]
    token_bytes: TokenBytes
    new_reader: Callable[[], MessageReader] | None = None
    decoder: TokenDecoder | None = None
    _readers: dict[tuple[int, int], MessageReader] = field(default_factory=dict)  # of streams
    _reasoning_tokens: dict[tuple[int, int], int] = field(default_factory=dict)
    _reasoned: set[tuple[int, int]] = field(default_factory=set)  # completions whose reasoning has ended
    _stopped: dict[tuple[int, int], StoppedCompletion] = field(default_factory=dict)  # where content has stop strings

    operation_name = "chat"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def read(self, index: int, output: RequestOutput, finish: Callable[[int, int], None]) -> RequestOutput:
        """The output up to the stop strings in its contents."""
        if not self.asked.stops_in_content:
            return output
        return replace(output, outputs=[self._read(index, output, one, finish) for one in output.outputs])

    def _read(
        self, index: int, output: RequestOutput, completion: CompletionOutput, finish: Callable[[int, int], None]
    ) -> CompletionOutput:
        key, params = (index, completion.index), self.asked.params
        if key not in self._stopped:
            assert self.new_reader is not None
            pieces = TokenPieces(self.decoder, output.prompt_token_ids, skip_special_tokens=params.skip_special_tokens)
            self._stopped[key] = StoppedCompletion(self.new_reader, pieces, params)
            self._readers[key] = self._stopped[key].reader
        stopped = self._stopped[key]
        before = stopped.stopped
        read = stopped.read(completion)
        if stopped.stopped and not before and completion.finish_reason is None:
            finish(index, completion.index)
        return read

    def prompt_fields(self, outputs: Mapping[int, RequestOutput]) -> dict[str, Any]:
        (output,) = outputs.values()
        return {"prompt_token_ids": output.prompt_token_ids} if self.body.return_token_ids else {}

    @property
    def reasoning_tokens(self) -> int:
        return sum(self._reasoning_tokens.values())

    def _count_reasoning(self, key: tuple[int, int], reader: MessageReader, token_ids: Sequence[int]) -> None:
        if key in self._reasoned:
            return
        length = reader.reasoning_length
        if length is None:
            self._reasoning_tokens[key] = len(token_ids)
        else:
            self._reasoning_tokens[key] = tokens_of(length, token_ids, self.decode)
            self._reasoned.add(key)

    def choices(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        choices = []
        for completion in output.outputs:
            ending = self._ending(completion)
            message: dict[str, Any] = {"content": completion.text, "refusal": None}
            if self.new_reader is not None:
                reader = self._readers.get((index, completion.index)) or self.new_reader()
                read = self.asked.stops_in_content
                message = reader.take_message() if read else reader.message(completion.text)
                self._count_reasoning((index, completion.index), reader, completion.token_ids)
                ending["finish_reason"] = reader.finish_reason(completion.finish_reason)
            choice = {
                "index": self._choice_index(index, completion),
                "message": {"role": "assistant", **message},
                "logprobs": self._logprobs(completion, 0),
                **ending,
            }
            choices.append(choice | self._tokens(completion, completion.token_ids, None))
        return choices

    def chunks(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        choices = []
        for completion in output.outputs:
            ids = completion.token_ids
            if not self._is_news(index, completion, ids):
                continue
            key = index, completion.index
            told = self._told.get(key)
            start = told.tokens if told is not None else 0
            self._tell(index, completion, ids)
            ending = self._ending(completion)
            delta: dict[str, Any] = {"content": completion.delta}
            if self.new_reader is not None:
                if key not in self._readers:
                    self._readers[key] = self.new_reader()
                reader = self._readers[key]
                final, read = completion.finish_reason is not None, self.asked.stops_in_content
                delta = reader.take() if read else reader.delta(completion.delta, final=final)
                self._count_reasoning(key, reader, ids)
                ending["finish_reason"] = reader.finish_reason(completion.finish_reason)
            choice = {
                "index": self._choice_index(index, completion),
                "delta": {**({"role": "assistant"} if told is None else {}), **delta},
                "logprobs": self._logprobs(completion, start),
                **ending,
            }
            choices.append(choice | self._tokens(completion, ids[start:], told))
        return choices

    def _logprobs(self, completion: CompletionOutput, start: int) -> dict[str, Any] | None:
        if completion.logprobs is None:
            return None
        ids, entries = completion.token_ids[start:], completion.logprobs[start:]
        return chat_logprobs(ids, entries, self.token_text, self.token_bytes, self.asked.params.logprobs or 0)
