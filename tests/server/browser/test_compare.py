"""The Compare button: the same prompt without and with drafts, two clocks, and whether the texts are equal."""

import pytest
from playwright.sync_api import Browser, expect

from server.browser.conftest import FLAGS, PROMPT, Chat, open_page
from server.harness import MAIN, serving


def test_compare_runs_a_prompt_without_and_with_drafts(chat: Chat) -> None:
    chat.page.get_by_label("Max tokens").fill("48")
    chat.message.fill(PROMPT)
    drafted, without = chat.ask(chat.button("Compare").click)
    assert (without.body["num_speculative_tokens"], drafted.body["num_speculative_tokens"]) == (0, 5)
    assert without.joined("drafts") == []
    assert len(drafted.joined("drafts")) > 3
    differ = {name for name in without.body if without.body[name] != drafted.body.get(name)}
    assert differ == {"num_speculative_tokens", "cache_salt"}  # no run finds the other's prefix
    runs = chat.page.locator(".run")  # with drafts runs first, so that no drafter has seen the other answer
    assert runs.locator("h3").all_text_contents() == ["Without drafts", "With drafts"]
    assert runs.locator("details + .text").all_text_contents() == [without.text, drafted.text]
    seconds = chat.page.evaluate("chat.messages.at(-1).runs.map((run) => run.seconds)")
    for clock, took in zip(runs.locator(".clock").all_text_contents(), seconds, strict=True):
        assert clock.startswith(f"{took:.2f} s · 48 tokens · ")
    speed = seconds[0] / seconds[1]
    expect(chat.page.locator(".verdict")).to_have_text(f"With drafts: {speed:.2f}\u00d7 the speed · same text: yes")
    chat.picture("compare")
    follow = chat.send("def pop(self):")
    assert [message["content"] for message in follow.body["messages"]] == [PROMPT, drafted.text, "def pop(self):"]


@pytest.mark.parametrize(
    ("other", "verdict"), [("one two", "same text: yes"), ("one ten", "same text: no (from character 6 on)")]
)
def test_texts_are_compared_to_the_character(chat: Chat, other: str, verdict: str) -> None:
    texts = iter([other, "one two"])
    event = 'data: {{"choices": [{{"delta": {{"content": "{0}"}}, "token_strs": ["{0}"], "drafts": []}}]}}\n\n'
    chat.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body=event.format(next(texts))),
    )
    chat.message.fill("say it")
    chat.page.keyboard.press("Control+Enter")
    expect(chat.page.locator(".verdict")).to_contain_text(verdict)


def test_k_0_compares_with_the_servers_own_k(chat: Chat) -> None:
    chat.page.get_by_label("Max tokens").fill("8")
    chat.page.get_by_label("Draft tokens").select_option("0")
    chat.message.fill(PROMPT)
    drafted, without = chat.ask(lambda: chat.page.keyboard.press("Control+Enter"))
    assert without.body["num_speculative_tokens"] == 0
    assert "num_speculative_tokens" not in drafted.body


def test_without_a_drafter_there_is_nothing_to_compare(browser: Browser) -> None:
    code = "from specrs.cli import serve; serve.BUNDLED_DRAFTS = 0\n" + MAIN
    flags = [flag for flag in FLAGS if flag not in ("--spec-tokens", "5")]
    with serving(*flags, code=code) as server, open_page(browser, server) as chat:
        expect(chat.page.locator("#running")).to_have_text("0")
        expect(chat.button("Compare")).to_be_disabled()
        chat.page.get_by_label("Max tokens").fill("4")
        chat.message.fill(PROMPT)
        (sent,) = chat.ask(lambda: chat.page.keyboard.press("Control+Enter"))
        assert sent.text
