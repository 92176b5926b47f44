"""Handlers of the endpoints that generate or tokenize: from a parsed body to an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from specrs.errors import InvalidRequestError, invalid_request
from specrs.inputs import Prompt
from specrs.server.allowed_tools import narrowed
from specrs.server.answers import Answer, ChatAnswer, CompletionAnswer
from specrs.server.constraints import chat_constraint
from specrs.server.context import Context
from specrs.server.dispositions import warn
from specrs.server.errors import APIError
from specrs.server.generation import Generation
from specrs.server.limits import MAX_PROMPT_LOGPROBS
from specrs.server.logprobs import TokenText
from specrs.server.message_fields import read_messages
from specrs.server.params import chat_params, completion_params, read_middle, read_text, split_prompts
from specrs.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingBody,
    TokenizeRequest,
    Tool,
)
from specrs.server.text_offsets import prompt_offsets
from specrs.server.tools import CHAT_FIELDS, FieldNames, read_tools, template_tools
from specrs.tokenizer import Tokenizer

Result = dict[str, Any] | Generation


async def completions(context: Context, body: CompletionRequest) -> Result:
    """Answer `POST /v1/completions`. Returns the answer, or a generation that streams it."""
    context.check_model(body.model)
    tokenizer, longest = context.llm.tokenizer, context.llm.limits.max_model_len
    asked = completion_params(body, context.defaults, tokenizer)
    given = split_prompts(body.prompt, asked.params.n)
    salt, special = body.cache_salt or "", body.add_special_tokens is not False

    def read_one(item: str | list[int]) -> Prompt:
        if body.suffix:
            return read_middle(tokenizer, item, body.suffix, salt=salt, max_tokens=longest)
        if isinstance(item, str):
            return read_text(tokenizer, item, special=special, salt=salt, max_tokens=longest)
        return Prompt(item, None, salt)

    def read() -> tuple[list[Prompt], list[str], list[list[int]]]:
        prompts = [read_one(item) for item in given]
        # ids that are no tokens are rejected when the prompt is queued, and have no text
        texts = [_text(tokenizer, prompt, context.llm.limits.vocab_size) for prompt in prompts] if body.echo else []
        offsets = []
        if body.echo and asked.params.prompt_logprobs is not None:
            offsets = [_offsets(tokenizer, *pair) for pair in zip(prompts, texts, strict=True)]
        return prompts, texts, offsets

    prompts, texts, offsets = await context.llm.in_thread(read)
    answer = CompletionAnswer(
        model=body.model or context.model_names[0],
        body=body,
        asked=asked,
        token_text=token_text(context, body),
        prompt_texts=texts,
        prompt_offsets=offsets,
        echo=bool(body.echo),
        decoder=None if tokenizer is None else tokenizer.decoder,
        **_named(body),
    )
    return await _generate(context, answer, prompts)


async def chat_completions(context: Context, body: ChatCompletionRequest) -> Result:
    """Answer `POST /v1/chat/completions`. Returns the answer, or a generation that streams it."""
    given_as = "max_tokens" if body.max_completion_tokens is None or body.max_tokens else "max_completion_tokens"
    fields = replace(CHAT_FIELDS, renamed={**CHAT_FIELDS.renamed, "max_tokens": given_as})
    with fields.errors():
        return await _generate(context, *await prepare_chat(context, body, fields))


async def prepare_chat(
    context: Context, body: ChatCompletionRequest, fields: FieldNames = CHAT_FIELDS
) -> tuple[ChatAnswer, list[Prompt]]:
    """Return the empty answer of a chat, and its prompts. `fields` are the field names for errors. Raises
    `InvalidRequestError` if the body is wrong."""
    context.check_model(body.model)
    body = narrowed(body)
    tools = read_tools(body, context.tools, fields)
    constraint = chat_constraint(body, tools, fields, context.llm.tokenizer)
    asked = chat_params(body, context.defaults, tools, constraint.grammar)
    hidden = tools.choice == "none" and context.tools.exclude_when_none
    prompt = await chat_prompt(context, body, None if hidden else body.tools, fields)
    new_reader = tools.reader(
        prompt.text or "", constrained=constraint.grammar is not None, openings=constraint.openings
    )
    asked = replace(asked, stops_in_content=new_reader is not None and bool(asked.params.stop_strings))
    answer = ChatAnswer(
        decode=partial(_tokenizer(context).decode, skip_special_tokens=asked.params.skip_special_tokens),
        new_reader=new_reader,
        decoder=_tokenizer(context).decoder,
        model=body.model or context.model_names[0],
        body=body,
        asked=asked,
        token_text=token_text(context, body),
        token_bytes=context.llm.token_bytes,
        **_named(body),
    )
    return answer, [prompt]


async def tokenize(context: Context, body: TokenizeRequest) -> Result:
    """Answer `POST /tokenize`."""
    context.check_model(body.model)
    tokenizer = _tokenizer(context)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("prompt: exactly one of prompt and messages is allowed")
    if body.prompt is not None:
        text, special = body.prompt, body.add_special_tokens is not False
        longest = context.llm.limits.max_model_len
        ids = await context.llm.in_thread(
            lambda: tokenizer.encode(text, add_special_tokens=special, max_tokens=longest)
        )
    else:
        with CHAT_FIELDS.errors():
            ids = (await chat_prompt(context, body, body.tools)).token_ids
    texts = [tokenizer.backend.id_to_token(i) for i in ids] if body.return_token_strs else None
    return {
        "count": len(ids),
        "max_model_len": context.llm.limits.max_model_len,
        "tokens": ids,
        "token_strs": texts,
    }


async def detokenize(context: Context, body: DetokenizeRequest) -> Result:
    """Answer `POST /detokenize`."""
    context.check_model(body.model)
    tokenizer, size = _tokenizer(context), context.llm.limits.vocab_size
    for i, token in enumerate(body.tokens):
        if token >= size:
            raise InvalidRequestError(f"tokens[{i}]={token}: must be an integer from 0 to {size - 1}")
    text = await context.llm.in_thread(lambda: tokenizer.decode(body.tokens, skip_special_tokens=False))
    return {"prompt": text}


async def chat_prompt(
    context: Context,
    body: ChatCompletionRequest | TokenizeRequest,
    tools: list[Tool] | None,
    fields: FieldNames = CHAT_FIELDS,
) -> Prompt:
    """Render `messages` and `tools` with the chat template and return the prompt. `fields` are the field names in
    warnings.

    Raises `InvalidRequestError` if the template rejects the chat.
    """
    tokenizer = _tokenizer(context)
    assert context.templates is not None
    continue_final_message = bool(body.continue_final_message)
    options = {
        "add_generation_prompt": (
            not continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
        ),
        "continue_final_message": continue_final_message,
        "tools": template_tools(tools),
        "chat_template_kwargs": {**context.chat_template_kwargs, **(body.chat_template_kwargs or {})},
        "hints": _hints(body),
    }
    rendered = await context.templates.render(read_messages(body.messages or []), options)
    for warning in rendered.warnings:
        warn(fields.sent(warning))
    text = rendered.text
    # the template writes the special tokens itself, unless told otherwise
    special = bool(body.add_special_tokens)
    salt = (body.cache_salt or "") if isinstance(body, ChatCompletionRequest) else ""
    longest = context.llm.limits.max_model_len
    prompt: Prompt = await context.llm.in_thread(
        lambda: read_text(tokenizer, text, special=special, salt=salt, max_tokens=longest)
    )
    return prompt


def _hints(body: ChatCompletionRequest | TokenizeRequest) -> dict[str, str]:
    """Return the fields of a chat that its template may read as variables. A variable that the request sets itself
    takes precedence."""
    values = {name: getattr(body, name, None) for name in ("reasoning_effort", "verbosity")}
    own = body.chat_template_kwargs or {}
    return {name: value for name, value in values.items() if value is not None and name not in own}


def token_text(context: Context, body: SamplingBody) -> TokenText:
    """Return a function that writes a token id as text, in the form that the body asks for."""
    if body.return_tokens_as_token_ids or context.llm.tokenizer is None:
        return "token_id:{}".format
    return context.llm.token_text


async def _generate(context: Context, answer: Answer, prompts: Sequence[Prompt]) -> Result:
    check_size(context, answer, prompts)
    generation = Generation(context, answer)
    await generation.start(prompts, context.lora_request(answer.body.model))
    if answer.body.stream:
        return generation
    with generation:
        return await generation.whole()


def check_size(context: Context, answer: Answer, prompts: Sequence[Prompt]) -> None:
    """Raise `InvalidRequestError` if a request asks for more completions than may be queued, more tokens than fit into
    the context, or more prompt log probabilities than are allowed."""
    params, limits = answer.asked.params, context.llm.limits
    most, count = context.llm.max_num_queued_reqs, len(prompts) * params.n
    if most is not None and count > most:
        raise invalid_request("n", params.n, f"makes {count} completions, and this server takes at most {most}")
    if answer.body.gives_max_tokens and params.max_tokens is not None:
        for prompt in prompts:
            size = len(prompt.token_ids)
            if size + params.max_tokens > limits.max_model_len > size:
                raise invalid_request(
                    "max_tokens",
                    params.max_tokens,
                    f"the prompt has {size} tokens; both together may have max_model_len={limits.max_model_len}",
                )
    if params.prompt_logprobs is not None:
        told = limits.vocab_size if params.prompt_logprobs < 0 else params.prompt_logprobs + 1
        total = told * sum(len(prompt.token_ids) for prompt in prompts)
        if total > MAX_PROMPT_LOGPROBS:
            raise invalid_request(
                "logprobs" if isinstance(answer, CompletionAnswer) and answer.echo else "prompt_logprobs",
                params.prompt_logprobs,
                f"makes {total} log probabilities of the prompts; must be at most {MAX_PROMPT_LOGPROBS} in one request",
            )


def _tokenizer(context: Context) -> Tokenizer:
    if context.llm.tokenizer is None:
        raise APIError(400, "This server has no tokenizer; send token ids to /v1/completions.")
    return context.llm.tokenizer


def _text(tokenizer: Tokenizer | None, prompt: Prompt, vocab_size: int) -> str:
    if prompt.text is not None:
        return prompt.text
    if tokenizer is None or not all(0 <= token < vocab_size for token in prompt.token_ids):
        return ""
    return tokenizer.decode(prompt.token_ids, skip_special_tokens=False)


def _offsets(tokenizer: Tokenizer | None, prompt: Prompt, text: str) -> list[int]:
    """Return where each token of a prompt begins in `text`, in characters. A prompt without text has all its tokens at
    0."""
    if tokenizer is None or not text:
        return [0] * len(prompt.token_ids)
    return prompt_offsets(tokenizer, prompt.token_ids, text)


def _named(body: SamplingBody) -> dict[str, Any]:
    return {"request_id": body.request_id} if body.request_id else {}
