"""A conversation with an engine: its messages, and answers that are streamed and stored. Uses no terminal."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

from specrs.errors import InvalidRequestError
from specrs.llm import LLM
from specrs.outputs import RequestOutput
from specrs.sampling import SamplingParams


class Conversation:
    """A conversation: its turns so far, its system prompt, and whether drafting is on. One answer at a time."""

    def __init__(self, llm: LLM, params: Mapping[str, Any], template: str | None, system: str | None) -> None:
        """`params` are fields of `SamplingParams`. `template` replaces the checkpoint's chat template."""
        self.llm = llm
        self.params = params
        self.template = template
        self.system = system
        self.speculation = self.can_speculate
        self.messages: list[dict[str, str]] = []
        """Turns of `user` and `assistant` in order, without the system prompt."""
        self.last: RequestOutput | None = None
        """Last output of the latest answer; None before its first token."""

    @property
    def can_speculate(self) -> bool:
        """True if the engine has a drafter."""
        return self.llm.engine.config.speculative_config is not None

    def answer(self, text: str) -> Generator[str, None, None]:
        """Answer a user's turn. Yields the new text of the answer.

        Both turns are stored when the answer ends or the iterator is closed. If the answer has no text, neither is
        stored.

        Raises `InvalidRequestError` if the conversation does not fit into the context, or if there is no chat template.
        """
        self.last = None
        turns = [*self.messages, {"role": "user", "content": text}]
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        params = SamplingParams(**self.params, num_speculative_tokens=None if self.speculation else 0)
        said = ""
        stream = self.llm.stream({"prompt_token_ids": self._ids([*system, *turns])}, params)
        try:
            for output in stream:
                self.last = output
                said = output.outputs[0].text
                yield output.outputs[0].delta
        finally:
            stream.close()  # type: ignore[attr-defined]  # it is a generator
            if said:
                self.messages = [*turns, {"role": "assistant", "content": said}]

    def reset(self) -> None:
        """Remove all turns from the conversation. The system prompt stays."""
        self.messages = []

    def _ids(self, messages: list[dict[str, str]]) -> list[int]:
        tokenizer = self.llm.tokenizer
        if tokenizer is None:
            raise InvalidRequestError("messages: a chat needs a tokenizer; give one with --tokenizer")
        text = tokenizer.render_chat(messages, chat_template=self.template)
        # the template writes the special tokens itself
        return tokenizer.encode(text, add_special_tokens=False, max_tokens=self.llm.engine.limits.max_model_len)
