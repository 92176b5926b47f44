"""Every field of a request reaches the engine; every default of a checkpoint applies if a request does not set the
field."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import tokenizer_files
from specrs.config import EngineConfig
from specrs.errors import CheckpointError
from specrs.sampling import SamplingParams
from specrs.server.constraints import chat_constraint
from specrs.server.defaults import checkpoint_defaults
from specrs.server.params import Asked, chat_params, completion_params
from specrs.server.protocol import ChatCompletionRequest, CompletionRequest, SamplingBody
from specrs.server.responses_protocol import ResponsesRequest, as_chat
from specrs.server.tools import CHAT_FIELDS, ToolSettings, read_tools
from specrs.tokenizer import Tokenizer

from .scripted import Script, ask

MESSAGES = [{"role": "user", "content": "a b"}]
VALUES: dict[str, Any] = {
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.1,
    "seed": 5,
    "stop": ["x"],
    "stop_token_ids": [9],
    "ignore_eos": True,
    "min_tokens": 2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "repetition_penalty": 1.2,
    "logit_bias": {"5": 1.0},
    "allowed_token_ids": [5, 6],
    "bad_words": ["x"],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "structured_outputs": {"regex": "a"},
    "prompt_logprobs": 1,
    "num_speculative_tokens": 2,
    "return_drafts": True,
}
DEFAULTS = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05}


def completion(defaults: dict[str, Any] | None = None, **body: Any) -> Asked:
    return completion_params(CompletionRequest.model_validate({"prompt": "a", **body}), defaults or {}, None)


def chat(defaults: dict[str, Any] | None = None, **body: Any) -> Asked:
    return asked(ChatCompletionRequest.model_validate({"messages": MESSAGES, **body}), defaults)


def response(defaults: dict[str, Any] | None = None, **body: Any) -> Asked:
    return asked(as_chat(ResponsesRequest.model_validate({"input": "a", **body})), defaults)


def asked(body: ChatCompletionRequest, defaults: dict[str, Any] | None) -> Asked:
    tools = read_tools(body, ToolSettings())
    return chat_params(body, defaults or {}, tools, chat_constraint(body, tools, CHAT_FIELDS, None).grammar)


def differing(params: SamplingParams, plain: SamplingParams) -> dict[str, Any]:
    """Return the fields in which `params` differs from `plain`."""
    names = [field.name for field in fields(SamplingParams)]
    return {name: getattr(params, name) for name in names if getattr(params, name) != getattr(plain, name)}


@pytest.mark.parametrize("read", [completion, chat, response])
def test_each_sampling_field_is_handed_on_and_changes_no_other(read: Any) -> None:
    names = {field.name for field in fields(SamplingParams)}
    # at the one value that changes nothing
    assert set(VALUES) == set(SamplingBody.model_fields) & names - {"spaces_between_special_tokens"}
    body = ResponsesRequest if read is response else CompletionRequest
    plain = read().params
    for name, value in VALUES.items():
        if name in body.model_fields:
            wanted = SamplingParams(**{name: value, "max_tokens": plain.max_tokens})
            assert differing(read(**{name: value}).params, plain) == {name: getattr(wanted, name)}, name


def test_lengths_and_log_probabilities() -> None:
    assert completion().params.max_tokens == 16
    assert completion(max_tokens=3).params.max_tokens == 3
    assert completion(max_tokens=0).params.max_tokens == 1
    assert completion(max_tokens=0).silent
    assert not completion(max_tokens=1).silent
    assert completion(logprobs=0).params.logprobs == 0
    assert completion(logprobs=2).params.prompt_logprobs is None
    assert completion(logprobs=2, echo=True).params.prompt_logprobs == 2
    assert completion(logprobs=2, echo=True, prompt_logprobs=3).params.prompt_logprobs == 3
    assert chat().params.max_tokens is None
    assert chat(max_tokens=3).params.max_tokens == 3
    assert chat(max_completion_tokens=4).params.max_tokens == 4
    assert response(max_output_tokens=5).params.max_tokens == 5
    assert chat().params.logprobs is None
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).params.logprobs == 3


def test_what_a_request_says_holds_before_the_checkpoint() -> None:
    for read in (completion, chat, response):
        params = read(DEFAULTS).params
        assert {name: getattr(params, name) for name in DEFAULTS} == DEFAULTS
        for name, default in DEFAULTS.items():
            if read is response and name == "repetition_penalty":
                continue
            given = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}[name]
            params = read(DEFAULTS, **{name: given}).params
            assert getattr(params, name) == given != default
            assert {other: getattr(params, other) for other in DEFAULTS if other != name} == {
                other: value for other, value in DEFAULTS.items() if other != name
            }
            assert getattr(read(DEFAULTS, **{name: None}).params, name) == default


def recommended(folder: Path, content: Any) -> dict[str, Any]:
    """Return the defaults of a checkpoint whose generation_config.json has `content`."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "generation_config.json").write_text(json.dumps(content))
    return checkpoint_defaults(EngineConfig.from_kwargs(model=str(folder)))


def test_defaults_of_a_checkpoint(tmp_path: Path) -> None:
    assert recommended(tmp_path, {**DEFAULTS, "eos_token_id": 0, "max_new_tokens": 7}) == DEFAULTS
    for name, value in DEFAULTS.items():
        assert recommended(tmp_path, {name: value}) == {name: value}
        assert recommended(tmp_path, {name: None}) == {}
    assert recommended(tmp_path, {"temperature": 1.0, "top_k": 5}) == {"top_k": 5}
    for wrong in ({"temperature": -1}, {"top_p": "x"}, []):
        with pytest.raises(CheckpointError, match=r"generation_config\.json"):
            recommended(tmp_path, wrong)
    (tmp_path / "generation_config.json").unlink()
    assert checkpoint_defaults(EngineConfig.from_kwargs(model=str(tmp_path))) == {}


BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "a b"},
    "chat": {"messages": MESSAGES},
    "responses": {"input": "a b"},
}


@pytest.mark.parametrize("endpoint", BODIES)
def test_priority_and_salt_reach_the_request(tokenizer: Tokenizer, endpoint: str) -> None:
    for given, wanted in (({}, (0, "")), ({"priority": -3, "cache_salt": "mine"}, (-3, "mine"))):
        engine = Script(tokenizer, "b")
        ask(engine, tokenizer, endpoint, {**BODIES[endpoint], **given})
        (request,) = engine.seen
        assert (request.priority, request.cache_salt) == wanted
    if endpoint == "completions":
        engine = Script(tokenizer, "b")
        ask(engine, tokenizer, endpoint, {"prompt": [[5, 6], [7]], "cache_salt": "mine"})
        assert [request.cache_salt for request in engine.seen] == ["mine", "mine"]


def test_special_tokens_before_a_prompt(tmp_path: Path) -> None:
    """Check special tokens before a prompt. A completion's prompt gets a BOS token by default. A chat template writes
    its own, and a second one is added only if the request asks for it."""
    tokenizer = Tokenizer(str(tokenizer_files.with_bos(tmp_path / "t")))
    ids = tokenizer.encode("a b", add_special_tokens=False)
    for endpoint, default in (("chat", ids), ("responses", ids), ("completions", [0, *ids])):
        for special, wanted in ((None, default), (False, ids), (True, [0, *ids])):
            if endpoint == "responses" and special is not None:
                continue
            engine = Script(tokenizer, "b")
            given = {} if special is None else {"add_special_tokens": special}
            ask(engine, tokenizer, endpoint, {**BODIES[endpoint], **given})
            assert engine.seen[0].prompt_token_ids == wanted, (endpoint, special)


def test_names_of_requests(tokenizer: Tokenizer) -> None:
    for endpoint, prefix in (("completions", "cmpl-"), ("chat", "chatcmpl-"), ("responses", "resp_")):
        said = ask(Script(tokenizer, "b"), tokenizer, endpoint, {**BODIES[endpoint], "request_id": "mine"})
        assert said.answer["id"] == prefix + "mine"


def test_a_template_may_be_given_special_tokens(tokenizer: Tokenizer) -> None:
    """Check that variables of a request take precedence over the tokenizer's special tokens of the same name."""
    options: dict[str, Any] = {"chat_template": "{{ eos_token }}|{{ mine }}"}
    assert tokenizer.render_chat(MESSAGES, **options) == "<|endoftext|>|"
    given = {"eos_token": "<end>", "mine": "x"}
    assert tokenizer.render_chat(MESSAGES, **options, chat_template_kwargs=given) == "<end>|x"
