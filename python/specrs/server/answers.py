"""Bodies of OpenAI's two endpoints, made from engine outputs: choices of whole answers, and chunks of streams.

Turns outputs into dictionaries. Generates nothing and sends nothing.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specrs.core import TokenDecoder
from specrs.engine.text_window import TextWindow
from specrs.outputs import CompletionOutput, Draft, RequestOutput
from specrs.server.logprobs import TokenBytes, TokenText, chat_logprobs, completion_logprobs, prompt_logprobs
from specrs.server.messages import MessageReader, Piece
from specrs.server.params import Asked
from specrs.server.protocol import SamplingBody
from specrs.server.stopped_completion import StoppedCompletion
from specrs.server.text_offsets import TextOffsets
from specrs.server.usage import tokens_of


@dataclass(frozen=True, kw_only=True)
class Answer:
    """State of one request that is being answered: its fields, and how far each completion has been sent.

    In a stream, each output holds what is new (`RequestOutputKind.DELTA`). In a whole answer, the one output holds
    everything.
    """

    model: str
    body: SamplingBody
    asked: Asked
    token_text: TokenText
    prompt_texts: Sequence[str] = ()
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    _num_tokens: dict[tuple[int, int], int] = field(default_factory=dict)  # that count, by prompt and completion
    _sent: dict[tuple[int, int], bool] = field(default_factory=dict)  # by prompt and completion: whether to its end

    operation_name = ""
    """Value of `gen_ai.operation.name` in the request's trace spans."""
    object_name = ""
    chunk_name = ""
    id_prefix = ""

    def head(self, *, chunk: bool) -> dict[str, Any]:
        """Return the fields that every answer (or, with `chunk`, every chunk of a stream) begins with."""
        return {
            "id": f"{self.id_prefix}-{self.request_id}",
            "object": self.chunk_name if chunk else self.object_name,
            "created": self.created,
            "model": self.model,
        }

    def read(self, index: int, output: RequestOutput, finish: Callable[[int, int], None]) -> RequestOutput:
        """Count the new tokens of prompt `index` in `output`, and return the part of `output` to send. Called with each
        output in turn.

        `finish(index, completion)` ends a completion in the engine.
        """
        if not self.asked.silent:
            for completion in output.outputs:
                key = index, completion.index
                self._num_tokens[key] = self._num_tokens.get(key, 0) + len(completion.token_ids)
        return output

    def cut(self, index: int, output: RequestOutput) -> RequestOutput:
        """Return the part to send of `output`, the whole output of prompt `index` after all of it was read."""
        return output

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all completions so far, as reported in the usage."""
        return sum(self._num_tokens.values())

    def prompt_fields(self, outputs: Mapping[int, RequestOutput]) -> dict[str, Any]:
        """Return vLLM's extra fields about the prompts, which stand next to `choices` in an answer and in a stream's
        first chunk. `outputs` are by prompt index."""
        return {}

    @property
    def reasoning_tokens(self) -> int | None:
        """Number of reasoning tokens among all tokens sent so far. None if the endpoint has no reasoning."""
        return None

    def choices(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Return a choice for each finished completion of prompt `index`."""
        raise NotImplementedError

    def chunks(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Return a choice for each completion of prompt `index` that has something new to send."""
        raise NotImplementedError

    def _choice_index(self, index: int, completion: CompletionOutput) -> int:
        return index * self.asked.params.n + completion.index

    def _is_news(self, index: int, completion: CompletionOutput, ids: Sequence[int]) -> bool:
        """Return True if a completion has something to send: new tokens `ids`, or an end that was not sent yet."""
        ended = completion.finish_reason is not None and not self._sent.get((index, completion.index))
        return bool(ids) or ended

    def _send(self, index: int, completion: CompletionOutput) -> bool:
        """Record that the news of a completion are sent. Return True if nothing of it was sent before."""
        key = index, completion.index
        first = key not in self._sent
        self._sent[key] = completion.finish_reason is not None
        return first

    def _ending(self, completion: CompletionOutput) -> dict[str, Any]:
        return {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}

    def _tokens(self, completion: CompletionOutput, ids: Sequence[int]) -> dict[str, Any]:
        """Return the fields that the body asked for of the tokens `ids` and of a completion's drafts. Empty if it asked
        for none."""
        body, fields = self.body, dict[str, Any]()
        if body.return_token_ids:
            fields["token_ids"] = list(ids)
        if body.return_token_strs:
            fields["token_strs"] = [self.token_text(token_id) for token_id in ids]
        if body.return_drafts and completion.drafts is not None:
            fields["drafts"] = [self._draft(draft) for draft in completion.drafts]
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
    """Answer of `POST /v1/completions`. `decoder` is the tokenizer's decoder; None if texts are empty.

    `prompt_offsets`: for each prompt, where its tokens begin in its text. Used if the prompt is returned too (`echo`).
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
                "logprobs": self._logprobs(index, output, completion, ids, first=True),
                **self._ending(completion),
            }
            choices.append(choice | self._extras(output, completion, ids, first=True))
        return choices

    def chunks(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        choices = []
        for completion in output.outputs:
            text, ids = self._told_of(completion)
            if not self._is_news(index, completion, ids):
                continue
            first = self._send(index, completion)
            choice = {
                "index": self._choice_index(index, completion),
                "text": (self.prompt_texts[index] if first and self.echo else "") + text,
                "logprobs": self._logprobs(index, output, completion, ids, first=first),
                **self._ending(completion),
            }
            choices.append(choice | self._extras(output, completion, ids, first=first))
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
    ) -> dict[str, Any] | None:
        if completion.logprobs is None:
            return None
        entries: list[Mapping[int, Any] | None] = list(completion.logprobs[: len(ids)])
        offsets = self._offsets_of(index, output, completion, ids)
        if first and self.echo and output.prompt_logprobs is not None:
            ids = [*output.prompt_token_ids, *ids]
            entries = [*output.prompt_logprobs, *entries]
            offsets = [*self.prompt_offsets[index], *offsets]
        return completion_logprobs(ids, entries, self.token_text, offsets, top=bool(self.asked.params.logprobs))

    def _offsets_of(
        self, index: int, output: RequestOutput, completion: CompletionOutput, ids: Sequence[int]
    ) -> list[int]:
        """Return where the new tokens `ids` of a completion begin in the text of its choice, in characters."""
        key = index, completion.index
        if key not in self._offsets:
            skip = self.asked.params.skip_special_tokens
            window = TextWindow(self.decoder, output.prompt_token_ids, skip_special_tokens=skip)
            self._offsets[key] = TextOffsets(window, len(self.prompt_texts[index]) if self.echo else 0)
        return self._offsets[key].add(ids)

    def _extras(
        self, output: RequestOutput, completion: CompletionOutput, ids: Sequence[int], *, first: bool
    ) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if first and completion.index == 0 and output.prompt_logprobs is not None and not self.echo:
            extras["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if self.body.return_token_ids:
            extras["prompt_token_ids"] = output.prompt_token_ids if first else None
        return extras | self._tokens(completion, ids)


@dataclass(frozen=True, kw_only=True)
class ChatAnswer(Answer):
    """Answer of `POST /v1/chat/completions`. `new_reader` makes a reader for a completion whose text may hold reasoning
    or tool calls. None: all text is content.

    `decode` returns the text of token ids, as it stands in completions.
    """

    decode: Callable[[Sequence[int]], str]
    token_bytes: TokenBytes
    new_reader: Callable[[], MessageReader] | None = None
    decoder: TokenDecoder | None = None
    in_pieces: bool = False
    """True: choices have a list of `Piece` objects, `pieces`, in the order in which the model wrote them. False: they
    have a `message` or a `delta`, which have no order of content and calls."""
    _readers: dict[tuple[int, int], MessageReader] = field(default_factory=dict)  # of streams
    _reasoning_tokens: dict[tuple[int, int], int] = field(default_factory=dict)
    _reasoning: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # tokens while it may go on
    _stopped: dict[tuple[int, int], StoppedCompletion] = field(default_factory=dict)  # where content has stop strings

    operation_name = "chat"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def read(self, index: int, output: RequestOutput, finish: Callable[[int, int], None]) -> RequestOutput:
        if not self.asked.stops_in_content:
            return super().read(index, output, finish)
        return replace(output, outputs=[self._read(index, output, one, finish) for one in output.outputs])

    def cut(self, index: int, output: RequestOutput) -> RequestOutput:
        if not self.asked.stops_in_content:
            return output
        return replace(output, outputs=[self._stopped[index, one.index].cut(one) for one in output.outputs])

    def _read(
        self, index: int, output: RequestOutput, completion: CompletionOutput, finish: Callable[[int, int], None]
    ) -> CompletionOutput:
        """Return the completion up to a stop string in its content. Ends the completion in the engine if it has just
        stopped."""
        key, params = (index, completion.index), self.asked.params
        if key not in self._stopped:
            assert self.new_reader is not None
            window = TextWindow(self.decoder, output.prompt_token_ids, skip_special_tokens=params.skip_special_tokens)
            self._stopped[key] = StoppedCompletion(self.new_reader, window, params)
            self._readers[key] = self._stopped[key].reader
        stopped = self._stopped[key]
        before = stopped.stopped
        read = stopped.read(completion)
        self._num_tokens[key] = stopped.num_tokens
        if stopped.stopped and not before and completion.finish_reason is None:
            finish(index, completion.index)
        return read

    def prompt_fields(self, outputs: Mapping[int, RequestOutput]) -> dict[str, Any]:
        (output,) = outputs.values()
        return {"prompt_token_ids": output.prompt_token_ids} if self.body.return_token_ids else {}

    @property
    def reasoning_tokens(self) -> int:
        return sum(self._reasoning_tokens.values())

    def _count_reasoning(self, key: tuple[int, int], reader: MessageReader, new_ids: Sequence[int]) -> None:
        if key in self._reasoning_tokens and key not in self._reasoning:
            return
        token_ids = self._reasoning.setdefault(key, [])
        token_ids += new_ids
        length = reader.reasoning_length
        if length is None:
            self._reasoning_tokens[key] = len(token_ids)
        else:
            self._reasoning_tokens[key] = tokens_of(length, token_ids, self.decode)
            del self._reasoning[key]

    def choices(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        choices = []
        for completion in output.outputs:
            ending = self._ending(completion)
            told: dict[str, Any] = {"message": {"role": "assistant", "content": completion.text, "refusal": None}}
            if self.in_pieces:
                told = {"pieces": [Piece("content", completion.text)]}
            if self.new_reader is not None:
                reader = self._readers.get((index, completion.index)) or self.new_reader()
                if not self.asked.stops_in_content:
                    reader.feed(completion.text, final=True)
                if self.in_pieces:
                    told = {"pieces": reader.take_pieces()}
                else:
                    told = {"message": {"role": "assistant", **reader.take_message()}}
                self._count_reasoning((index, completion.index), reader, completion.token_ids)
                ending["finish_reason"] = reader.finish_reason(completion.finish_reason)
            choice = {
                "index": self._choice_index(index, completion),
                **told,
                "logprobs": self._logprobs(completion),
                **ending,
            }
            choices.append(choice | self._tokens(completion, completion.token_ids))
        return choices

    def chunks(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        choices = []
        for completion in output.outputs:
            ids = completion.token_ids
            if not self._is_news(index, completion, ids):
                continue
            key = index, completion.index
            first = self._send(index, completion)
            ending = self._ending(completion)
            role = {"role": "assistant"} if first else {}
            told: dict[str, Any] = {"delta": {**role, "content": completion.delta}}
            if self.in_pieces:
                told = {"pieces": [Piece("content", completion.delta)]}
            if self.new_reader is not None:
                if key not in self._readers:
                    self._readers[key] = self.new_reader()
                reader = self._readers[key]
                if not self.asked.stops_in_content:
                    reader.feed(completion.delta, final=completion.finish_reason is not None)
                told = {"pieces": reader.take_pieces()} if self.in_pieces else {"delta": {**role, **reader.take()}}
                self._count_reasoning(key, reader, ids)
                ending["finish_reason"] = reader.finish_reason(completion.finish_reason)
            choice = {
                "index": self._choice_index(index, completion),
                **told,
                "logprobs": self._logprobs(completion),
                **ending,
            }
            choices.append(choice | self._tokens(completion, ids))
        return choices

    def _logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        if completion.logprobs is None:
            return None
        ids, top = completion.token_ids, self.asked.params.logprobs or 0
        return chat_logprobs(ids, completion.logprobs, self.token_text, self.token_bytes, top)
