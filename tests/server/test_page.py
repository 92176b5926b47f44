"""The page of `--ui` as it is served, and streams that say who wrote each token. `make test-browser` runs the page."""

import base64
import hashlib
import re
from collections.abc import Iterator
from typing import Any

import pytest

from .conftest import K
from .harness import Server, serving


@pytest.fixture(scope="module")
def paged() -> Iterator[Server]:
    with serving("--ui", "--api-key", "secret", "--max-model-len", "512", "--disable-uvicorn-access-log") as server:
        yield server


def test_the_page_loads_nothing_and_runs_only_its_own(paged: Server, server: Server) -> None:
    answer = paged.get("/")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/html")
    html = answer.body.decode()
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    expected = dict.fromkeys(("default-src", "base-uri", "form-action", "frame-ancestors"), "'none'")
    expected["connect-src"] = "'self'"
    for tag in ("script", "style"):
        (inner,) = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        expected[f"{tag}-src"] = f"'sha256-{digest}'"
    assert policy == expected
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert not re.findall(r"https?:|//[a-z]|\bsrc=|\bhref=|@import|innerHTML|\bon[a-z]+=|style=", html)
    assert paged.get("/v1/models").status == 401
    assert server.get("/").status == 404


ASKED = {
    "max_tokens": 60,
    "temperature": 0,
    "return_token_ids": True,
    "return_token_strs": True,
    "return_drafts": True,
    "per_request_spec_decode_metrics": "continuous",
}
"""What a page needs to say who wrote each token."""


def joined(chunks: list[Any], field: str) -> list[Any]:
    """A list that the chunks of a stream bring piece by piece."""
    return [item for chunk in chunks for choice in chunk["choices"] for item in choice[field]]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_chunks_say_what_was_drafted(server: Server, path: str) -> None:
    """Each iteration once, with the tokens that it wrote; added up, what the answer as a whole says."""
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "class Stack:"}]}
    if path == "/v1/completions":
        prompt = {"prompt": "class Stack:"}
    chunks = server.stream(path, **prompt, **ASKED)
    told = 0
    before = [0] * (K + 1)
    for chunk in chunks:
        (choice,) = chunk["choices"]
        grown = [draft["num_accepted_draft_tokens"] for draft in choice["drafts"]]
        after = chunk["metrics"]["speculative_decoding"]["acceptance_histogram"]
        assert [grown.count(m) for m in range(K + 1)] == [a - b for a, b in zip(after, before, strict=True)]
        for draft in choice["drafts"]:
            assert told <= draft["start"] <= told + len(choice["token_ids"])
            assert draft["num_draft_tokens"] == draft["num_accepted_draft_tokens"] + len(draft["rejected_token_ids"])
        told, before = told + len(choice["token_ids"]), after
    assert told == 60
    drafts, ids = joined(chunks, "drafts"), joined(chunks, "token_ids")
    assert len(drafts) > 3
    assert [draft["start"] for draft in drafts] == sorted({draft["start"] for draft in drafts})
    rejected = 0
    for draft in drafts:
        texts = server.post("/detokenize", {"tokens": draft["rejected_token_ids"]}).json["prompt"]
        assert "".join(draft["rejected_token_strs"]) == texts
        if draft["rejected_token_ids"]:
            rejected += 1
            assert draft["rejected_token_ids"][0] != ids[draft["start"] + draft["num_accepted_draft_tokens"]]
    assert rejected > 3
    answer = server.post(path, {**prompt, **ASKED}).json["choices"][0]
    assert (answer["drafts"], answer["token_ids"]) == (drafts, ids)
    assert answer["token_strs"] == joined(chunks, "token_strs")


def test_drafts_are_told_of_each_completion_and_only_where_they_are_asked_for(server: Server) -> None:
    body = {"prompt": "def add(a, b):", "n": 2, "max_tokens": 24, "temperature": 1.0, "seed": 3}
    answer = server.complete(**body, return_drafts=True, per_request_spec_decode_metrics="summary")
    counted = sum(len(choice["drafts"]) for choice in answer["choices"])
    assert counted == answer["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
    assert all("rejected_token_strs" not in draft for choice in answer["choices"] for draft in choice["drafts"])
    assert all("drafts" not in choice for choice in server.complete(**body)["choices"])
    assert server.complete(**body, return_drafts=True, num_speculative_tokens=0)["choices"][0]["drafts"] == []
