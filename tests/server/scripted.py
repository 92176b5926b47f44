"""A server's endpoints in this process, with an engine without a model whose outputs are scripts. Holds no tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llm.scripted import EOS, ScriptedEngine
from specrs.async_llm import AsyncLLM
from specrs.chat_template import Rendered
from specrs.engine.request import FinishReason, Request
from specrs.outputs import TokenLogprob
from specrs.server.anthropic.endpoints import messages
from specrs.server.anthropic.protocol import MessagesRequest
from specrs.server.context import Context
from specrs.server.endpoints import chat_completions, completions
from specrs.server.generation import Generation
from specrs.server.metrics import Metrics
from specrs.server.protocol import ChatCompletionRequest, CompletionRequest
from specrs.server.responses import responses
from specrs.server.responses_protocol import ResponsesRequest
from specrs.server.tools import ToolSettings
from specrs.tokenizer import Tokenizer


class Script(ScriptedEngine):
    """Engine that gives every request the tokens of one of `texts`, in turn, and then EOS. `ended_by_caller` has the
    reasons of requests that were aborted."""

    def __init__(self, tokenizer: Tokenizer, *texts: str | Sequence[int]) -> None:
        super().__init__()
        self.ids = [
            [*(tokenizer.encode(text, add_special_tokens=False) if isinstance(text, str) else text), EOS]
            for text in texts
        ]
        self.limits = type(self.limits)(
            max_model_len=4096, vocab_size=tokenizer.vocab_size, num_speculative_tokens=4, eos_token_ids=(EOS,)
        )
        self.script = lambda request: self.ids[self.seen.index(request) % len(self.ids)]
        self.ended_by_caller: list[FinishReason] = []

    def abort(self, request_id: int, reason: FinishReason = FinishReason.ABORT) -> None:
        super().abort(request_id, reason)
        self.ended_by_caller.append(reason)

    def _advance(self, request: Request) -> None:
        super()._advance(request)
        for token in request.output_token_ids[len(request.logprobs or ()) :] if request.logprobs is not None else ():
            # the likeliest other token is the next id, a little less likely
            request.logprobs.append(TokenLogprob(token, -0.5, 1, [token, token + 1], [-0.5, -1.5]))
        entries = request.prompt_logprobs
        if entries is not None and len(entries) == 1:
            entries += [TokenLogprob(token, -1.0, 1, [token], [-1.0]) for token in request.prompt_token_ids[1:]]


class LastMessage:
    """A chat template that outputs the text of the last message."""

    async def render(self, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> Rendered:
        return Rendered(str(messages[-1]["content"]))


@dataclass
class Said:
    """Answer of an endpoint: the JSON body, or the events of a stream without `[DONE]`."""

    answer: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    metrics: str = ""


ENDPOINTS: dict[str, Any] = {
    "completions": (CompletionRequest, completions),
    "chat": (ChatCompletionRequest, chat_completions),
    "responses": (ResponsesRequest, responses),
    "messages": (MessagesRequest, messages),
}


def ask(
    engine: Script, tokenizer: Tokenizer, endpoint: str, body: dict[str, Any], tools: ToolSettings | None = None
) -> Said:
    """Send `body` to an endpoint of a server of its own around `engine`."""

    async def main() -> Said:
        llm = AsyncLLM.from_engine(engine, tokenizer)  # type: ignore[arg-type]
        try:
            metrics = Metrics(llm, "m")
            context = Context(
                llm=llm,
                model_names=["m"],
                metrics=metrics,
                templates=LastMessage(),  # type: ignore[arg-type]
                tools=tools or ToolSettings(),
            )
            model, answer = ENDPOINTS[endpoint]
            found = await answer(context, model.model_validate(body))
            said = Said()
            if isinstance(found, Generation):
                with found:
                    data = b"".join([event async for event in found.events()])
                lines = [line.removeprefix("data: ") for line in data.decode().splitlines() if line.startswith("data")]
                said.events = [json.loads(line) for line in lines if line != "[DONE]"]
            else:
                said.answer = found
            said.metrics = (await metrics.render()).decode()
            return said
        finally:
            llm.shutdown()

    return asyncio.run(main())
