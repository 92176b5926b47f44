"""`/v1/chat/completions`, `/tokenize` and `/detokenize` against `LLM.chat` and the tokenizer."""

from typing import Any

from specrs.llm import LLM
from specrs.sampling import SamplingParams

from .harness import Server, text_of

MESSAGES = [{"role": "system", "content": "Write Python."}, {"role": "user", "content": "class Stack:"}]
PATH = "/v1/chat/completions"


def test_texts_are_those_of_llm_chat(server: Server, llm: LLM) -> None:
    wanted = llm.chat(MESSAGES, SamplingParams(max_tokens=30, temperature=0), use_tqdm=False)[0]
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in MESSAGES]
    for messages in (MESSAGES, parts):
        for limit in ("max_tokens", "max_completion_tokens"):
            answer = server.chat(messages=messages, temperature=0, **{limit: 30})
            (choice,) = answer["choices"]
            assert choice["message"] == {"role": "assistant", "content": wanted.outputs[0].text, "refusal": None}
            assert choice["finish_reason"] == wanted.outputs[0].finish_reason
            assert answer["object"] == "chat.completion"
            assert answer["usage"]["prompt_tokens"] == len(wanted.prompt_token_ids)


def test_streams(server: Server, llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.9, seed=5, n=2)
    wanted = llm.chat(MESSAGES, params, use_tqdm=False)[0]
    chunks = server.stream(
        PATH, messages=MESSAGES, max_tokens=20, temperature=0.9, seed=5, n=2, stream_options={"include_usage": True}
    )
    *chunks, last = chunks
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == sum(len(output.token_ids) for output in wanted.outputs)
    for i, output in enumerate(wanted.outputs):
        assert text_of(chunks, i) == output.text
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == i]
        assert [choice["delta"].get("role") for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == [output.finish_reason]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_token_ids(server: Server, llm: LLM) -> None:
    """Check that token ids of the prompt are next to the choices, as in vLLM's chats: in an answer, and in a stream's
    first chunk."""
    wanted = llm.chat(MESSAGES, SamplingParams(max_tokens=8, temperature=0), use_tqdm=False)[0]
    body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    answer = server.chat(**body, return_token_ids=True)
    (choice,) = answer["choices"]
    assert (answer["prompt_token_ids"], choice["token_ids"]) == (wanted.prompt_token_ids, wanted.outputs[0].token_ids)
    chunks = server.stream(PATH, **body, return_token_ids=True)
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [wanted.prompt_token_ids] + [None] * (len(chunks) - 1)
    ids = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
    assert ids == wanted.outputs[0].token_ids
    assert "prompt_token_ids" not in server.chat(**body)


def test_logprobs(server: Server, llm: LLM) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0, "logprobs": True}
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=3)
    output = llm.chat(MESSAGES, params, use_tqdm=False)[0].outputs[0]
    assert output.logprobs is not None
    content = server.chat(**body, top_logprobs=3)["choices"][0]["logprobs"]["content"]
    chunks = server.stream(PATH, **body, top_logprobs=3)
    assert [item for chunk in chunks for item in chunk["choices"][0]["logprobs"]["content"]] == content
    assert "".join(item["token"] for item in content) == output.text
    for item, token_id, entry in zip(content, output.token_ids, output.logprobs, strict=True):
        assert abs(item["logprob"] - entry[token_id].logprob) < 1e-9
        assert bytes(item["bytes"]).decode() == item["token"]
        ranked = sorted((e for e in entry.values() if e.rank is not None and e.rank <= 3), key=lambda e: e.rank or 0)
        assert [top["token"] for top in item["top_logprobs"]] == [e.decoded_token for e in ranked]
    plain = server.chat(**body)["choices"][0]["logprobs"]["content"]
    assert [item["top_logprobs"] for item in plain] == [[]] * 8


def test_response_format(server: Server) -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "a b"}, "strict": True}}
    texts = [
        server.chat(messages=MESSAGES, max_tokens=20, temperature=0, response_format=wanted)["choices"][0]["message"]
        for wanted in (asked, {"type": "text"}, {"type": "json_object"})
    ]
    assert texts[0]["content"] == '"a b"'
    assert not texts[1]["content"].startswith("{")
    assert texts[2]["content"].startswith("{")


def test_without_a_limit_the_context_is_the_limit(server: Server) -> None:
    answer = server.chat(messages=MESSAGES, temperature=0, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == 512
    assert answer["choices"][0]["finish_reason"] == "length"


def test_tokenize(server: Server, llm: LLM) -> None:
    assert llm.tokenizer is not None
    text = "def naïve(x): 🎉"
    answer = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json
    ids = llm.tokenizer.encode(text)
    assert answer["tokens"] == ids
    assert answer["count"] == len(ids)
    assert answer["max_model_len"] == 512
    assert answer["token_strs"] == [llm.tokenizer.backend.id_to_token(i) for i in ids]
    assert server.post("/detokenize", {"tokens": ids}).json == {"prompt": text}
    chat = server.post("/tokenize", {"messages": MESSAGES}).json
    assert chat["tokens"] == llm.tokenizer.encode(llm.tokenizer.render_chat(MESSAGES), add_special_tokens=False)
    assert chat["token_strs"] is None
