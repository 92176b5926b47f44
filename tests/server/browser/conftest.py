"""Chromium, driven headless, and servers with the page. Holds no tests.

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
from playwright.sync_api import Browser, Page, expect, sync_playwright

from server.harness import Server, serving

TIMEOUT_MS = 30_000
CHROMIUM = os.environ["CHROMIUM"]
SCREENSHOTS = os.environ.get("SCREENSHOTS")
FLAGS = ("--ui", "--max-model-len", "1024", "--disable-uvicorn-access-log")
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
def shared() -> Iterator[Server]:
    with serving(*FLAGS) as server:
        yield server


@dataclass
class Chat:
    """The page in a window of its own. `expected_errors`: what the console may say beside nothing."""

    page: Page
    server: Server
    expected_errors: int = 0
    errors: list[str] = field(default_factory=list)

    def send(self, text: str) -> "Sent":
        """Types a message, sends it by Enter, and waits for the end of its answer."""
        self.page.get_by_label("Message").fill(text)
        with self.page.expect_response("**/v1/chat/completions") as response:
            self.page.keyboard.press("Enter")
        expect(self.page.get_by_role("button", name="Stop")).to_be_disabled()
        chunks = [json.loads(line[6:]) for line in response.value.text().splitlines() if line.startswith("data: {")]
        return Sent(response.value.request.post_data_json, chunks)

    def slide(self, label: str, value: float) -> None:
        """Moves a slider."""
        self.page.get_by_label(label).fill(f"{value:g}")

    def value(self, name: str) -> str:
        """What stands beside a term of the panel; the first of two with one name is the answer's."""
        return self.page.locator(f'dt:text-is("{name}") + dd').first.inner_text()

    def picture(self, name: str) -> None:
        """Keeps a picture of the window, where one is asked for."""
        if SCREENSHOTS:
            self.page.screenshot(path=Path(SCREENSHOTS) / f"{name}.png")


@dataclass
class Sent:
    """A request of the page, and the chunks of its answer."""

    body: dict[str, Any]
    chunks: list[dict[str, Any]]

    def joined(self, name: str) -> list[Any]:
        """A list that the chunks bring piece by piece."""
        return [item for chunk in self.chunks for choice in chunk["choices"] for item in choice[name]]

    @property
    def text(self) -> str:
        return "".join(choice["delta"]["content"] for chunk in self.chunks for choice in chunk["choices"])

    @property
    def figures(self) -> dict[str, Any]:
        """The acceptance of the whole answer."""
        figures: dict[str, Any] = self.chunks[-1]["metrics"]["speculative_decoding"]
        return figures


@contextmanager
def open_page(browser: Browser, server: Server, **settings: Any) -> Iterator[Chat]:
    """The page in a new window; afterwards nothing was refused by its policy and the console is as expected."""
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
    """Opens the page with a browser's settings, such as `color_scheme`; it is ready when the server has told its K."""
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
    """The page, ready."""
    return open_chat()
