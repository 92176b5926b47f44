"""Every error has one form, names the field, and reveals nothing of the machine; no request is left running."""

import json
import re
from contextlib import closing
from typing import Any

import pytest

from .harness import Server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
X: dict[str, Any] = {"prompt": "x"}
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}

BAD: list[tuple[str, Any, str | None, str]] = [
    (COMPLETIONS, {}, "prompt", "prompt: is missing"),
    (COMPLETIONS, X | {"temperature": -1}, "temperature", "temperature=-1: "),
    (COMPLETIONS, X | {"temperature": "1"}, "temperature", "temperature='1': "),
    (COMPLETIONS, X | {"top_p": 0}, "top_p", "top_p=0: "),
    (COMPLETIONS, X | {"n": 129}, "n", "n=129: "),
    (COMPLETIONS, X | {"n": True}, "n", "n=True: "),
    (COMPLETIONS, X | {"max_tokens": 1.5}, "max_tokens", "max_tokens=1.5: "),
    (COMPLETIONS, X | {"nonsense": 1}, "nonsense", "nonsense: unknown field"),
    (COMPLETIONS, X | {"suffix": "y"}, "suffix", "suffix='y': the tokenizer has no tokens for text in the middle"),
    (COMPLETIONS, X | {"best_of": 2}, "best_of", "best_of=2: not implemented; allowed: 1"),
    (COMPLETIONS, X | {"use_beam_search": True}, "use_beam_search", "use_beam_search=True: not implemented"),
    (COMPLETIONS, X | {"no_stop_trim": True}, "no_stop_trim", "no_stop_trim=True: not implemented; allowed: False"),
    (COMPLETIONS, X | {"return_hidden_states": True}, "return_hidden_states", "return_hidden_states=True: not"),
    (COMPLETIONS, X | {"regex": "a"}, "regex", "regex='a': not implemented; allowed: None"),
    (COMPLETIONS, X | {"stop": [""]}, "stop", "stop.0='': String should have at least 1 character"),
    (COMPLETIONS, X | {"stop": ["a"] * 65}, "stop", "...]: List should have at most 64 items after validation, not 65"),
    (COMPLETIONS, X | {"stop": "a" * 1025}, "stop", "': String should have at most 1024 characters"),
    (COMPLETIONS, X | {"stop": 3}, "stop", "stop=3: Input should be a valid string or a valid array"),
    (COMPLETIONS, X | {"Stop": "a"}, "Stop", "Stop: unknown field; did you mean stop?"),
    (CHAT, HI | {"max_token": 3}, "max_token", "max_token: unknown field; did you mean max_tokens?"),
    (COMPLETIONS, X | {"logprobs": 21}, "logprobs", "logprobs=21: must be from 0 to 20"),
    (COMPLETIONS, X | {"logit_bias": {"5000": 1}}, "logit_bias", "logit_bias[5000]"),
    (COMPLETIONS, X | {"num_speculative_tokens": 6}, "num_speculative_tokens", "must be at most 5"),
    (COMPLETIONS, X | {"min_tokens": 9, "max_tokens": 8}, "min_tokens", "min_tokens=9: "),
    (COMPLETIONS, X | {"stream_options": {"include_usage": True}}, "stream_options", "allowed only with stream=true"),
    (COMPLETIONS, X | {"stream": True, "stream_options": {"x": 1}}, "stream_options", "stream_options.x: unknown"),
    (COMPLETIONS, X | {"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "structured_outputs.regex"),
    (COMPLETIONS, X | {"stream": True, "temperature": 1e9}, "temperature", "temperature"),
    (COMPLETIONS, {"prompt": ""}, "prompt", "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt", "prompt=[]: "),
    (COMPLETIONS, {"prompt": ["a", 1]}, "prompt", "prompt=['a', 1]: "),
    (COMPLETIONS, {"prompt": [1, True]}, "prompt", "prompt=[1, True]: "),
    (COMPLETIONS, {"prompt": {"a": 1}}, "prompt", "prompt={'a': 1}: "),
    (COMPLETIONS, {"prompt": [5000]}, "prompt_token_ids", "prompt_token_ids[0]=5000: "),
    (COMPLETIONS, {"prompt": ["x", [1] * 600]}, "prompt", "prompt"),
    (COMPLETIONS, {"prompt": [1] * 512}, "prompt", "512 tokens; must be at most 511"),
    (COMPLETIONS, {"prompt": ["x"] * 1025}, "prompt", "1025 prompts; must be at most 1024"),
    (COMPLETIONS, {"prompt": ["x"] * 100, "n": 100}, "n", "10000 completions"),
    (CHAT, {}, "messages", "messages: is missing"),
    (CHAT, {"messages": []}, "messages", "messages=[]: "),
    (CHAT, {"messages": [{"content": "x"}]}, "messages", "must be a dictionary with a role"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages", "must be a string or a list of text parts"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "not implemented"),
    (CHAT, HI | {"tools": [{}]}, "tools", "tools"),
    (CHAT, HI | {"tool_choice": "some"}, "tool_choice", "tool_choice='some': not implemented; allowed: 'none', 'auto'"),
    (CHAT, HI | {"logprobs": True, "top_logprobs": 50}, "top_logprobs", "top_logprobs=50: must be from 0 to 20, the"),
    (CHAT, HI | {"logprobs": True, "top_logprobs": 50}, "top_logprobs", "(--max-logprobs)"),
    (CHAT, HI | {"max_completion_tokens": 511}, "max_completion_tokens", "max_completion_tokens=511: the prompt has"),
    (CHAT, HI | {"max_tokens": 511}, "max_tokens", "max_tokens=511: the prompt has"),
    (CHAT, HI | {"top_logprobs": 2}, "top_logprobs", "needs logprobs=true"),
    (CHAT, HI | {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "must equal max_completion_tokens=4"),
    (CHAT, HI | {"chat_template": "{{ 1 }}"}, "chat_template", "not implemented; allowed: None"),
    (CHAT, HI | {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "it cannot be overridden"),
    (CHAT, HI | {"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "is missing"),
    (CHAT, HI | {"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message", "False"),
    ("/tokenize", {}, "prompt", "exactly one of prompt and messages"),
    ("/detokenize", {"tokens": [1, 2048]}, "tokens", "tokens[1]=2048: "),
    ("/detokenize", {"tokens": ["a"]}, "tokens", "tokens.0='a'"),
]


@pytest.mark.parametrize(("path", "body", "param", "says"), BAD)
def test_bad_requests(server: Server, path: str, body: dict[str, Any], param: str | None, says: str) -> None:
    answer = server.post(path, body)
    assert answer.status == 400, answer.body
    error = answer.error
    assert error["type"] == "BadRequestError"
    assert says in error["message"]
    assert len(error["message"]) < 600
    assert error["param"] == param
    told = error["message"].split("; ")
    assert len({fault.partition(": ")[0] for fault in told if "=" in fault}) == sum("=" in fault for fault in told)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "n": NaN}',
        b"\xff\xfe",
        b"[" * 9000,
    ],
)
def test_bodies_that_are_no_json_object(server: Server, body: bytes) -> None:
    answer = server.post(COMPLETIONS, body)
    assert answer.status == 400
    assert answer.error["type"] == "BadRequestError"


@pytest.mark.parametrize("text", [r"\ud800", r"\udc00", r"\ud83c x", r"\ud83c\n", r"\ud83c\ud83c"])
def test_half_of_a_surrogate_pair_is_named(server: Server, text: str) -> None:
    message = server.post(COMPLETIONS, f'{{"prompt": "{text}"}}'.encode()).error["message"]
    assert "has half of a surrogate pair" in message
    assert "curl" not in message


def test_a_large_list_of_wrong_items_is_one_short_message(server: Server) -> None:
    answer = server.post("/detokenize", {"tokens": ["a"] * 300_000})
    assert answer.status == 400
    assert len(answer.error["message"]) < 200


def test_unknown_paths_methods_and_models(server: Server) -> None:
    assert server.get("/v1/nonsense").error["type"] == "NotFoundError"
    wrong = server.get(COMPLETIONS)
    assert wrong.error["code"] == 405
    assert "POST" in wrong.headers["allow"]
    assert server.post("/health", {}).error["code"] == 405
    for path, body in ((COMPLETIONS, X), (CHAT, HI), ("/tokenize", X), ("/detokenize", {"tokens": [1]})):
        answer = server.post(path, body | {"model": "gpt-5"})
        assert answer.status == 404
        assert answer.error["param"] == "model"
        assert answer.error["type"] == "NotFoundError"
        assert "`gpt-5` does not exist; served: ['bundled']" in answer.error["message"]


def test_what_is_reported_of_the_server(server: Server) -> None:
    from importlib.metadata import version

    assert server.get("/health").body == b""
    assert server.get("/version").json == {"version": version("specrs")}
    (model,) = server.get("/v1/models").json["data"]
    assert model["id"] == "bundled"
    assert model["max_model_len"] == 512
    assert server.complete(prompt="x", max_tokens=1, model="bundled")["model"] == "bundled"
    assert server.complete(prompt="x", max_tokens=1, model="")["model"] == "bundled"
    # lm-eval carries an empty key where it has none
    assert server.get("/v1/models", Authorization="Bearer ").status == 200


def test_what_routers_ask(server: Server) -> None:
    from importlib.metadata import version

    assert server.get("/ping").status == server.post("/ping", {}).status == 200
    assert server.get("/v1/models/bundled").json == server.get("/v1/models").json["data"][0]
    unknown = server.get("/v1/models/other")
    assert (unknown.status, unknown.error["param"]) == (404, "model")
    assert server.get("/load").json == {"server_load": 0}
    information = server.get("/server_info").json
    assert information == server.get("/get_server_info").json
    assert information["version"] == version("specrs")
    assert (information["max_model_len"], information["max_num_seqs"], information["block_size"]) == (512, 16, 16)
    assert information["speculative_config"]["method"] == "draft_model"
    assert (information["tp_size"], information["dp_size"]) == (1, 1)
    assert information.items() >= server.get("/model_info").json.items()
    loads = server.get("/v1/loads?include=core,queues").json
    (idle,) = loads["loads"]
    assert (idle["num_running_reqs"], idle["num_waiting_reqs"], idle["num_used_tokens"]) == (0, 0, 0)
    assert idle["max_total_num_tokens"] == information["max_total_num_tokens"] == information["num_gpu_blocks"] * 16
    with server.streaming(prompt="x", n=2, max_tokens=400, ignore_eos=True) as events:
        next(events)
        server.wait_until("vllm:num_requests_running", 2)
        assert server.get("/load").json == {"server_load": 2}
        loads = server.get("/v1/loads").json
        assert (loads["loads"][0]["num_running_reqs"], loads["aggregate"]["total_running_reqs"]) == (2, 2)
        assert 0 < loads["loads"][0]["num_used_tokens"] < idle["max_total_num_tokens"]
        assert 0 < loads["loads"][0]["token_usage"] < 1


def test_http_2_is_rejected_at_once(server: Server) -> None:
    """Check that HTTP/2 is rejected immediately. Routers probe the port for gRPC with it."""
    with server.connect() as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")


def test_request_ids(server: Server) -> None:
    assert server.complete(prompt="x", max_tokens=1, request_id="mine-1")["id"] == "cmpl-mine-1"
    assert server.post(COMPLETIONS, X | {"request_id": "a\nb"}).status == 400
    one = {"prompt": "x", "max_tokens": 1}
    headers = {"X-Request-Id": "mine-2"}
    named = server.request("POST", COMPLETIONS, one, headers)
    assert (named.json["id"], named.headers["x-request-id"]) == ("cmpl-mine-2", "mine-2")
    both = server.request("POST", COMPLETIONS, one | {"request_id": "mine-1"}, headers)
    assert (both.json["id"], both.headers["x-request-id"]) == ("cmpl-mine-1", "mine-1")
    for headers in ({}, {"X-Request-Id": "a b"}, {"X-Request-Id": "a" * 129}):
        fresh = server.request("POST", COMPLETIONS, one, headers)
        assert fresh.json["id"] == f"cmpl-{fresh.headers['x-request-id']}"
        assert re.fullmatch("[0-9a-f]{32}", fresh.headers["x-request-id"])
    wrong = server.request("POST", COMPLETIONS, one | {"n": 0}, {"X-Request-Id": "mine-3"})
    assert (wrong.status, wrong.headers["x-request-id"]) == (400, "mine-3")


def test_texts_far_beyond_the_context_cost_little(server: Server) -> None:
    """Check that prompts of 14 and 16 million characters are rejected for their number of characters, which needs no
    tokenizing."""
    for path in (COMPLETIONS, "/tokenize"):
        for text in ("a" * 16_000_000, "a cat, " * 2_000_000):
            answer = server.post(path, {"prompt": text})
            assert (answer.status, answer.error["param"]) == (400, "prompt")
            assert "characters are more than the 512 tokens that are allowed" in answer.error["message"]


def test_a_chat_beyond_the_context_names_its_messages(server: Server) -> None:
    for path, content in ((CHAT, "a cat, " * 1000), (CHAT, "a" * 1_000_000), ("/tokenize", "a" * 1_000_000)):
        answer = server.post(path, {"messages": [{"role": "user", "content": content}]})
        assert (answer.status, answer.error["param"]) == (400, "messages")
        assert answer.error["message"].startswith("messages: ")


def test_metrics_have_vllms_names(server: Server) -> None:
    text = server.get("/metrics").body.decode()
    for name in (
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:e2e_request_latency_seconds_bucket",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:request_success_total",
        "vllm:num_preemptions_total",
        "vllm:cache_config_info",
    ):
        lines = [line for line in text.splitlines() if line.startswith(name + "{")]
        assert lines, name
        assert all('model_name="bundled"' in line for line in lines)
    assert 'block_size="16"' in text


def test_the_document_names_every_endpoint(server: Server) -> None:
    document = json.loads(server.get("/openapi.json").body)
    assert set(document["paths"]) == {
        "/v1/models",
        COMPLETIONS,
        CHAT,
        "/v1/responses/{id}",
        "/v1/responses/{id}/input_items",
        "/health",
        "/metrics",
        "/version",
        "/tokenize",
        "/detokenize",
        "/v1/embeddings",
        "/v1/rerank",
        "/v2/rerank",
        "/rerank",
        "/v1/score",
        "/score",
        "/ping",
        "/load",
        "/v1/loads",
        "/v1/models/{name}",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/model_info",
        "/server_info",
    }


def test_the_document_names_the_methods_of_each_path(server: Server) -> None:
    paths = server.get("/openapi.json").json["paths"]
    assert {"/ping", "/health", "/v1/completions"} <= set(paths)
    for path, operations in paths.items():
        answer = server.request("OPTIONS", path.replace("{name}", "bundled"))
        assert answer.status == 405
        allowed = {method.strip().lower() for method in answer.headers["allow"].split(",")} - {"head"}
        assert allowed == operations.keys() - {"parameters"}, path


def test_bodies_and_headers_that_say_two_things(server: Server) -> None:
    raw = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    )
    with closing(server.connect()) as connection:
        connection.sendall(raw)
        answer = connection.makefile("rb").read()  # to the end: the connection is not kept
    assert answer.startswith(b"HTTP/1.1 400 ")
    with closing(server.connect()) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 40_000 + b"\r\n\r\n")
        assert connection.makefile("rb").read().startswith(b"HTTP/1.1 431 ")
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    for kind, status in (("text-plain", 415), ("application/json; charset=utf-8", 200), ("", 415)):
        answer = server.request("POST", COMPLETIONS, body, {"Content-Type": kind})
        assert answer.status == status
        if status == 415:
            says = (
                f"Content-Type={kind!r}: must be application/json; with curl, add -H 'Content-Type: application/json'."
            )
            assert answer.error["message"] == says
    assert server.request("POST", "/ping", b"", {"Content-Type": "application/x-www-form-urlencoded"}).status == 200
    assert server.request("GET", "/v1/models/", headers={"Host": "elsewhere"}).status == 404


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/responses", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    ("body", "came"),
    [
        (b"", "body: is empty; "),
        (b"prompt=hi&max_tokens=4", "body='prompt=hi&max_tokens=4': is not JSON: expected value at line 1 column 1; "),
        (b"{'prompt': 'hi'}", "is not JSON: key must be a string at line 1 column 2; "),
        (b'{"prompt": ' + b"x" * 500, "is not JSON: "),
    ],
)
def test_a_body_that_is_no_json_is_told_what_to_send(server: Server, path: str, body: bytes, came: str) -> None:
    answer = server.request("POST", path, body)
    assert answer.status == 400
    message = answer.error["message"]
    assert came in message
    assert message.endswith(
        "; send a JSON object, such as {\"max_tokens\": 16}; with curl, add -H 'Content-Type: application/json'"
    )
    assert len(message) < 300


def test_more_tokens_than_the_context_has(server: Server) -> None:
    for path, fields in (
        (COMPLETIONS, {"prompt": [5] * 12, "max_tokens": 501}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 512}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 512}),
    ):
        answer = server.post(path, fields)
        assert (answer.status, answer.error["param"]) == (400, [*fields][-1])
        assert "512" in answer.error["message"]
    server.complete(prompt=[5] * 12, max_tokens=500, stop_token_ids=[*range(50)])


def test_log_probabilities_of_prompts_are_bounded_together(server: Server) -> None:
    for fields in ({"echo": True, "logprobs": 20, "max_tokens": 0}, {"prompt_logprobs": 20, "max_tokens": 1}):
        answer = server.post(COMPLETIONS, {"prompt": [[5] * 500] * 30, **fields})
        assert answer.status == 400
        assert "must be at most 262144" in answer.error["message"]


def test_a_long_name_of_a_field_does_not_come_back(server: Server) -> None:
    answer = server.post(COMPLETIONS, {"prompt": "x", "q" * 100_000: 1})
    assert answer.status == 400
    assert len(answer.body) < 1000
