"""Conversations and settings survive a reload, within limits."""

from playwright.sync_api import expect

from server.browser.conftest import PROMPT, Chat

STORED = "JSON.parse(localStorage.getItem('specrs:chats-1'))"


def test_a_reload_shows_the_same_page(chat: Chat) -> None:
    chat.page.get_by_label("Max tokens").fill("24")
    chat.slide("Temperature", 0.3)
    chat.page.get_by_label("Draft tokens").select_option("3")
    chat.page.get_by_label("System prompt").fill("Write Python.")
    sent = chat.send(PROMPT)
    before = chat.page.locator("#chat").inner_html()
    chat.page.reload()
    expect(chat.page.locator("#k")).to_have_value("3")
    assert chat.page.locator("#chat").inner_html() == before
    assert chat.page.get_by_label("Max tokens").input_value() == "24"
    assert chat.page.locator("#temperature-shown").inner_text() == "0.3"
    follow = chat.send("def pop(self):")
    assert [message["content"] for message in follow.body["messages"]] == [
        "Write Python.",
        PROMPT,
        sent.text,
        "def pop(self):",
    ]


def test_earlier_conversations_open_and_go(chat: Chat) -> None:
    chat.page.get_by_label("Max tokens").fill("4")
    for prompt in ("first", "second"):
        chat.button("New").click()
        chat.send(prompt)
    chat.button("History").click()
    assert chat.page.locator("#chats .open").all_text_contents() == ["second", "first"]
    chat.button("first").click()
    expect(chat.page.locator("article .text").first).to_have_text("first")
    expect(chat.page.locator("#history")).to_be_hidden()
    chat.button("History").click()
    chat.button("Delete second").click()
    assert chat.page.locator("#chats .open").all_text_contents() == ["first"]
    chat.page.keyboard.press("Escape")
    expect(chat.page.locator("#history")).to_be_hidden()
    chat.button("History").click()
    chat.button("Delete all").click()
    assert chat.page.evaluate(STORED) == []


def test_history_is_bounded(chat: Chat) -> None:
    """Check the limits of the history: 40 conversations and two million characters. The oldest are dropped first, then
    the iterations of the last one."""
    save = """([count, length]) => { for (let i = 0; i < count; i++) saveChat({ id: "c" + i, messages: [
        { role: "user", content: "x".repeat(length) },
        { role: "assistant", runs: [{ content: "y", iterations: [{ accepted: ["z".repeat(length)] }] }] }] }) }"""
    chat.page.evaluate(save, [50, 10])
    assert [one["id"] for one in chat.page.evaluate(STORED)] == [f"c{i}" for i in range(49, 9, -1)]
    chat.page.evaluate(save, [6, 250_000])
    assert [one["id"] for one in chat.page.evaluate(STORED)] == ["c5", "c4", "c3"]
    chat.page.evaluate(save, [1, 1_500_000])
    (only,) = chat.page.evaluate(STORED)
    assert len(only["messages"][0]["content"]) == 1_500_000
    assert only["messages"][1]["runs"][0] == {"content": "y", "iterations": []}


def test_what_is_stored_by_others_is_ignored(chat: Chat) -> None:
    for broken in ("{", "7", '[null, {"id": 1}]'):
        chat.page.evaluate("(text) => localStorage.setItem('specrs:chats-1', text)", broken)
        chat.page.reload()
        expect(chat.page.locator("#k")).to_have_value("5")
        expect(chat.page.locator("#empty")).to_be_visible()
