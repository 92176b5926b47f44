"""Turns a request body into prompts and `SamplingParams`. Starts nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specrs.errors import InvalidRequestError, invalid_request
from specrs.inputs import Prompt
from specrs.options import options_of
from specrs.sampling import RequestOutputKind, SamplingParams
from specrs.server.constraints import content_constraint
from specrs.server.limits import MAX_COMPLETIONS, MAX_PROMPTS
from specrs.server.protocol import ChatCompletionRequest, CompletionRequest, SamplingBody
from specrs.server.tools import CHAT_FIELDS, ToolUse
from specrs.structured.params import StructuredOutputsParams
from specrs.tokenizer import Tokenizer
from specrs.tokenizer.fill_in_middle import middle_ends, middle_prompt

_SAME = [
    name
    for name in options_of(SamplingParams)
    if name in SamplingBody.model_fields and name not in ("structured_outputs", "spaces_between_special_tokens")
]
"""Fields of a request body that are passed to `SamplingParams` under the same name. `structured_outputs` is left out
because other fields set it, too, and `spaces_between_special_tokens` because only one value is allowed."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Sampling parameters that a request body asks for.

    `silent`: `max_tokens` is 0. The engine generates one token because it must, and the token is not sent.
    `stops_in_content`: stop strings end the content of messages. The engine cannot check them, because it does not know
    what is content.
    """

    params: SamplingParams
    silent: bool = False
    stops_in_content: bool = False

    @property
    def engine_params(self) -> SamplingParams:
        """Sampling parameters for the engine. Stop strings that only end the content are left out."""
        return self.params.without("stop") if self.stops_in_content else self.params


def completion_params(body: CompletionRequest, defaults: Mapping[str, Any], tokenizer: Tokenizer | None) -> Asked:
    """Return the sampling parameters of a completion request. `defaults` are the checkpoint's recommended parameters.
    With `suffix`, the tokenizer's marks of a prompt's parts also end the text.

    Raises `InvalidRequestError` if a field is out of range or fields contradict each other.
    """
    fields = _sampling_fields(body, defaults, content_constraint(body, CHAT_FIELDS).grammar)
    fields["max_tokens"] = 16 if body.max_tokens is None else max(1, body.max_tokens)
    if body.suffix:
        if body.echo:
            raise invalid_request("suffix", body.suffix, "not allowed with echo=true; leave one of them out")
        ends = [] if tokenizer is None else middle_ends(tokenizer)
        fields["stop_token_ids"] = list(dict.fromkeys([*(fields.get("stop_token_ids") or ()), *ends]))
    if body.logprobs is not None:
        fields["logprobs"] = body.logprobs
        if body.echo:
            fields.setdefault("prompt_logprobs", body.logprobs)
    silent = body.max_tokens == 0
    if silent:
        fields.pop("min_tokens", None)
    return Asked(SamplingParams(**fields), silent)


def chat_params(
    body: ChatCompletionRequest, defaults: Mapping[str, Any], tools: ToolUse, grammar: StructuredOutputsParams | None
) -> Asked:
    """Return the sampling parameters of a chat whose text `grammar` constrains. If the request sets no number of
    tokens, the text may fill the context.

    `defaults` are the checkpoint's recommended parameters. Raises `InvalidRequestError` if a field is out of range or
    fields contradict each other.
    """
    fields = _sampling_fields(body, defaults, grammar)
    if tools.keeps_special_tokens:
        fields["skip_special_tokens"] = False
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise invalid_request(
            "max_tokens", body.max_tokens, f"must equal max_completion_tokens={body.max_completion_tokens}, or be null"
        )
    fields["max_tokens"] = body.max_completion_tokens or body.max_tokens
    if body.prediction is not None:
        fields["prediction"] = body.prediction.text
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs:
        raise invalid_request("top_logprobs", body.top_logprobs, "needs logprobs=true")
    return Asked(SamplingParams(**fields))


def _sampling_fields(
    body: SamplingBody, defaults: Mapping[str, Any], grammar: StructuredOutputsParams | None
) -> dict[str, Any]:
    given = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    given["structured_outputs"] = grammar
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options: allowed only with stream=true")
    return {**defaults, **given, "output_kind": RequestOutputKind.DELTA}


def split_prompts(given: Any, n: int) -> list[str | list[int]]:
    """Return the prompts of a completion request. `given` is text, token ids, or a list of texts or lists of ids; null
    is an empty text.

    Raises `InvalidRequestError` if `given` has another form or is empty, and for too many prompts or completions
    (prompts times `n`).
    """
    prompts: list[Any]
    if given is None or isinstance(given, str):
        prompts = [given or ""]
    elif isinstance(given, list) and given:
        kinds = {*map(type, given)}
        prompts = [given] if kinds == {int} else given
        if kinds not in ({int}, {str}) and not (kinds == {list} and all({*map(type, ids)} == {int} for ids in given)):
            raise _no_prompt(given)
    else:
        raise _no_prompt(given)
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequestError(f"prompt: {len(prompts)} prompts; must be at most {MAX_PROMPTS}")
    if len(prompts) * n > MAX_COMPLETIONS:
        raise InvalidRequestError(
            f"n={n}: {len(prompts)} prompts make {len(prompts) * n} completions; must be at most {MAX_COMPLETIONS}"
        )
    return prompts


def _no_prompt(given: object) -> InvalidRequestError:
    return invalid_request(
        "prompt", given, "must be a string, a list of strings, a list of token ids, or a list of such lists; none empty"
    )


def read_middle(tokenizer: Tokenizer | None, text: Any, suffix: str, *, salt: str, max_tokens: int) -> Prompt:
    """Return the prompt that asks for the text between `text` and `suffix`. `salt` separates its cached blocks. May
    take long, so it must not run on an event loop.

    Raises `InvalidRequestError` unless the tokenizer has tokens for such prompts, for a prompt of token ids, and for
    texts that are far longer than `max_tokens`.
    """
    if tokenizer is None or not isinstance(text, str):
        raise invalid_request("suffix", suffix, "needs a tokenizer and a prompt that is text; leave it out")
    return Prompt(middle_prompt(tokenizer, text, suffix, max_tokens), None, salt)


def read_text(tokenizer: Tokenizer | None, text: str, *, special: bool, salt: str, max_tokens: int) -> Prompt:
    """Tokenize `text` to a prompt. With `special`, add the tokens that the checkpoint puts around a sequence. `salt`
    separates its cached blocks. May take long, so it must not run on an event loop.

    Raises `InvalidRequestError` without a tokenizer, and for text that is far longer than `max_tokens`.
    """
    if tokenizer is None:
        raise invalid_request("prompt", text, "text needs a tokenizer; with skip_tokenizer_init send token ids")
    return Prompt(tokenizer.encode(text, add_special_tokens=special, max_tokens=max_tokens), text, salt)
