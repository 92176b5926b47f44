"""Runs the chat page in a headless Chromium against a server. Holds no tests.

`make test-browser` runs what is here, in an environment that has playwright; SCREENSHOTS=folder keeps pictures.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from lora.adapters import Spec, write_adapter
from playwright.sync_api import Browser, Locator, Page, Request, expect, sync_playwright
from specrs.pair import TARGET

from server.harness import Server, serving

TIMEOUT_MS = 30_000
CHROMIUM = os.environ["CHROMIUM"]
SCREENSHOTS = os.environ.get("SCREENSHOTS")
FLAGS = ("--max-model-len", "1024", "--disable-uvicorn-access-log", "--spec-tokens", "5")
PROMPT = "class Stack:"
ANSWERS = "**/v1/chat/completions"
REPORT_VIOLATIONS = """
    window.violations = [];
    addEventListener("securitypolicyviolation", (event) => violations.push(event.violatedDirective));
"""


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=TIMEOUT_MS)
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=CHROMIUM) as browser:
        yield browser


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the bundled pair with an adapter, `tuned`. The page is on because the host is a loopback address."""
    adapter = write_adapter(tmp_path_factory.mktemp("adapters") / "tuned", Path(TARGET), Spec(("q_proj", "v_proj")))
    with serving(*FLAGS, "--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"tuned={adapter}") as server:
        yield server


@dataclass
class Sent:
    """A request of the page, and the chunks of its answer."""

    body: dict[str, Any]
    chunks: list[dict[str, Any]]

    def joined(self, name: str) -> list[Any]:
        """Return the elements of a list that the chunks send piece by piece."""
        return [item for chunk in self.chunks for choice in chunk["choices"] for item in choice[name]]

    @property
    def text(self) -> str:
        return "".join(choice["delta"]["content"] for chunk in self.chunks for choice in chunk["choices"])

    @property
    def figures(self) -> dict[str, Any]:
        """Return the acceptance of the whole answer."""
        figures: dict[str, Any] = self.chunks[-1]["metrics"]["speculative_decoding"]
        return figures

    def iterations(self) -> list[tuple[list[str], list[str], list[str]]]:
        """Return the accepted, rejected and target tokens of each iteration, as the answer reports them."""
        tokens, found, at = self.joined("token_strs"), [], 0
        for draft in self.joined("drafts"):
            start, end = draft["start"], draft["start"] + draft["num_accepted_draft_tokens"]
            found += [([], [], [token]) for token in tokens[at:start]]
            found.append((tokens[start:end], draft["rejected_token_strs"], tokens[end : end + 1]))
            at = end + 1
        return found + [([], [], [token]) for token in tokens[at:]]


@dataclass
class Chat:
    """The chat page in a browser window. `expected_errors`: number of errors and warnings that the console must have at
    the end."""

    page: Page
    server: Server
    expected_errors: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def message(self) -> Locator:
        return self.page.get_by_role("textbox", name="Message")

    def button(self, name: str) -> Locator:
        return self.page.get_by_role("button", name=name, exact=True)

    def ask(self, act: Callable[[], Any]) -> list[Sent]:
        """Do `act`, wait for the end of the answers that it starts, and return them."""
        finished: list[Request] = []

        def listen(request: Request) -> None:
            if request.url.endswith(ANSWERS[2:]):
                finished.append(request)

        self.page.on("requestfinished", listen)
        with self.page.expect_event("requestfinished", lambda request: request.url.endswith(ANSWERS[2:])):
            act()
        expect(self.button("Stop")).to_be_disabled()
        self.page.remove_listener("requestfinished", listen)
        found = []
        for request in finished:
            response = request.response()
            assert response is not None
            lines = [line for line in response.text().splitlines() if line.startswith("data: {")]
            found.append(Sent(request.post_data_json, [json.loads(line[6:]) for line in lines]))
        return found

    def send(self, text: str) -> Sent:
        """Type a message and send it with Enter. Returns the answer."""
        self.message.fill(text)
        (sent,) = self.ask(lambda: self.page.keyboard.press("Enter"))
        return sent

    def script(self, *deltas: dict[str, Any]) -> None:
        """Answer the page's requests with these deltas from now on, instead of the server."""
        choices = [{"delta": delta, "token_strs": delta.get("token_strs", []), "drafts": []} for delta in deltas]
        events = [f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices]
        body = "".join([*events, "data: [DONE]\n\n"])
        self.page.route(ANSWERS, lambda route: route.fulfill(content_type="text/event-stream", body=body))

    def say(self, *deltas: dict[str, Any]) -> None:
        """Make the page show an answer of these deltas."""
        self.script(*deltas)
        answers = self.page.locator(".retry")
        self.message.fill("say it")
        before = answers.count()
        self.page.keyboard.press("Enter")
        expect(answers).to_have_count(before + 1)

    def slide(self, label: str, value: float) -> None:
        """Move a slider."""
        self.page.get_by_label(label).fill(f"{value:g}")

    def value(self, name: str) -> str:
        """Return the figure next to a term of the panel."""
        return self.page.locator(f'dt:has(:text-is("{name}")) + dd').inner_text()

    def picture(self, name: str) -> None:
        """Save a picture of the window if SCREENSHOTS names a folder."""
        if SCREENSHOTS:
            self.page.screenshot(path=Path(SCREENSHOTS) / f"{name}.png")


@contextmanager
def open_page(browser: Browser, server: Server, **settings: Any) -> Iterator[Chat]:
    """Open the page in a new window. At the end, check that its security policy has blocked nothing and that the
    console is as expected."""
    with browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **settings}) as context:
        page = context.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        chat = Chat(page, server)
        page.on("pageerror", lambda error: chat.errors.append(str(error)))
        page.on("console", lambda said: chat.errors.append(said.text) if said.type in ("error", "warning") else None)
        page.add_init_script(REPORT_VIOLATIONS)
        page.goto(f"http://127.0.0.1:{server.port}/")
        yield chat
        assert page.evaluate("violations") == []
        assert len(chat.errors) == chat.expected_errors, chat.errors


OpenPage = Callable[..., Chat]


@pytest.fixture
def open_chat(browser: Browser, shared: Server) -> Iterator[OpenPage]:
    """A function that opens the page with browser settings, such as `color_scheme`, and waits until the page knows the
    server's K."""
    opened = []

    def opening(**settings: Any) -> Chat:
        opened.append(open_page(browser, shared, **settings))
        chat = opened[-1].__enter__()
        expect(chat.page.locator("#k")).to_have_value("5")
        return chat

    yield opening
    for page in opened:
        page.__exit__(None, None, None)
    shared.wait_until_idle()


@pytest.fixture
def chat(open_chat: OpenPage) -> Chat:
    """The chat page, ready for a message."""
    return open_chat()
