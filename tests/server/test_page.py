"""The chat page as served, and streams that report who wrote each token. `make test-browser` runs the page."""

import base64
import hashlib
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import pytest
from specrs.server.app import build_app
from specrs.server.context import Shared
from specrs.server.options import ServerOptions
from specrs.server.page import page
from specrs.server.run import one_model
from starlette.routing import Route

from .conftest import K
from .harness import Server, serving


@pytest.fixture(scope="module")
def paged() -> Iterator[Server]:
    with serving("--ui", "--api-key", "secret", "--max-model-len", "512", "--disable-uvicorn-access-log") as server:
        yield server


def test_the_page_loads_nothing_and_runs_only_its_own(paged: Server) -> None:
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
    assert paged.get("/v1/models").status == 401


LOADS = r"https?:/|[\"'(]//[a-z]|\bsrc\s*=|\bhref=|url\(|@import|\bimport\b|\bon[a-z]+=|style="
"""Patterns of content that loads something, or runs something other than the page's own script."""
MARKUP = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|setHTML|srcdoc|\beval\b|new Function"
"""Patterns of code that makes markup or code from text."""


def test_one_file_makes_no_markup_from_text() -> None:
    assert not re.findall(f"{LOADS}|{MARKUP}", page())


class Controls(HTMLParser):
    """Reads the page's controls: their attributes, and the texts of labels and buttons."""

    def __init__(self) -> None:
        super().__init__()
        self.controls: list[dict[str, str]] = []
        self.labels: dict[str, str] = {}
        self._label: str | None = None
        self._button: dict[str, str] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag == "label":
            self._label = values["for"]
            self.labels[self._label] = ""
        if tag in ("button", "input", "select", "textarea"):
            self.controls.append(values)
            if tag == "button":
                self._button = values | {"text": ""}
                self.controls[-1] = self._button

    def handle_endtag(self, tag: str) -> None:
        if tag == "label":
            self._label = None
        if tag == "button":
            self._button = None

    def handle_data(self, data: str) -> None:
        if self._label is not None:
            self.labels[self._label] += data.strip()
        if self._button is not None:
            self._button["text"] += data.strip()


def test_every_control_has_a_label_and_a_tooltip() -> None:
    reader = Controls()
    reader.feed(page())
    assert len(reader.controls) > 25
    for control in reader.controls:
        named = control.get("text") or control.get("aria-label") or reader.labels.get(control.get("id", ""))
        assert named, control
        assert control["data-tip"].endswith((".", ").")), control
        assert max(len(sentence.split()) for sentence in re.split(r"[.:;] ", control["data-tip"])) <= 25, control


@pytest.mark.parametrize(
    ("host", "ui", "served"),
    [
        ("127.0.0.1", None, True),
        ("localhost", None, True),
        ("::1", None, True),
        ("0.0.0.0", None, False),
        ("10.0.0.7", None, False),
        ("example.org", None, False),
        ("0.0.0.0", True, True),
        ("127.0.0.1", False, False),
    ],
)
def test_the_page_is_on_where_only_this_machine_can_reach_it(host: str, ui: bool | None, served: bool) -> None:
    assert ServerOptions(host=host, ui=ui).serves_page == served


def test_a_server_without_the_page_has_no_route_for_it() -> None:
    context: Any = SimpleNamespace(model_names=["m"], adapters={}, metrics=None, profiler=None, shared=Shared())
    for context.shared.ui in (True, False):
        app = build_app(one_model(context), context.shared)
        paths = {route.path for route in app.routes if isinstance(route, Route)}
        assert ("/" in paths) == context.shared.ui


def test_a_server_on_a_loopback_address_has_the_page(server: Server) -> None:
    assert server.get("/").status == 200
    server.wait_for_line(r"Chat on http://127\.0\.0\.1:\d+/$")


ASKED = {
    "max_tokens": 60,
    "temperature": 0,
    "return_token_ids": True,
    "return_token_strs": True,
    "return_drafts": True,
    "per_request_spec_decode_metrics": "continuous",
}
"""Request fields with which chunks report who wrote each token."""


def joined(chunks: list[Any], field: str) -> list[Any]:
    """Return a list that the chunks of a stream send piece by piece."""
    return [item for chunk in chunks for choice in chunk["choices"] for item in choice[field]]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_chunks_say_what_was_drafted(server: Server, path: str) -> None:
    """Check that the chunks of a stream report each iteration once, with the tokens that it emitted, and that all
    chunks together report the same as an answer without streaming."""
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


def test_drafts_are_reported_of_each_completion_and_only_where_they_are_asked_for(server: Server) -> None:
    body = {"prompt": "def add(a, b):", "n": 2, "max_tokens": 24, "temperature": 1.0, "seed": 3}
    answer = server.complete(**body, return_drafts=True, per_request_spec_decode_metrics="summary")
    counted = sum(len(choice["drafts"]) for choice in answer["choices"])
    assert counted == answer["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
    assert all("rejected_token_strs" not in draft for choice in answer["choices"] for draft in choice["drafts"])
    assert all("drafts" not in choice for choice in server.complete(**body)["choices"])
    assert server.complete(**body, return_drafts=True, num_speculative_tokens=0)["choices"][0]["drafts"] == []
