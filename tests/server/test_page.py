"""The page of `--ui`: what it is served with, and that its stream says who wrote each token."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator

import pytest

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
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for tag in ("script", "style"):
        (inner,) = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert not re.findall(r"https?:|//[a-z]|\bsrc=|\bhref=|@import|innerHTML|\bon[a-z]+=|style=", html)
    assert paged.get("/v1/models").status == 401
    assert server.get("/").status == 404


def test_chunks_say_who_wrote_their_tokens(paged: Server) -> None:
    """An iteration that accepted m drafts brings m + 1 tokens; the last may be cut."""
    body = {
        "messages": [{"role": "user", "content": "class Stack:"}],
        "stream": True,
        "max_tokens": 60,
        "temperature": 0,
        "per_request_spec_decode_metrics": "continuous",
        "return_token_strs": True,
    }
    raw = paged.post("/v1/chat/completions", body, Authorization="Bearer secret").body.decode()
    chunks = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    before: list[int] = [0] * 6
    counted, said, written = 0, "", ""
    for chunk in chunks:
        after = chunk["metrics"]["speculative_decoding"]["acceptance_histogram"]
        grown = [a - b for a, b in zip(after, before, strict=True)]
        for choice in chunk["choices"]:
            tokens = len(choice["token_strs"])
            counted += tokens
            said += choice["delta"]["content"]
            written += "".join(choice["token_strs"])
            if sum(grown) and choice["finish_reason"] is None:
                assert tokens == sum((m + 1) * count for m, count in enumerate(grown))
        before = after
    assert counted == 60
    assert sum(before) > 3
    assert written == said
