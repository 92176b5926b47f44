"""A conversation in the browser: settings, models, retry, copy, reasoning, stop, errors and the API key."""

from playwright.sync_api import Browser, expect

from server.browser.conftest import FLAGS, PROMPT, Chat, open_page
from server.harness import MAIN, serving

SLOW = """
import time
from specrs.engine.engine import Engine
step = Engine.step
def slow_step(engine):
    time.sleep(0.02)  # 900 tokens take seconds, as they do with a larger model
    return step(engine)
Engine.step = slow_step
"""


def test_examples_fill_an_empty_screen(chat: Chat) -> None:
    chat.page.get_by_label("Max tokens").fill("4")
    examples = chat.page.locator("#examples button")
    expect(examples).to_have_count(4)
    text = examples.nth(1).text_content() or ""
    examples.nth(1).click()
    expect(chat.message).to_have_value(text)
    expect(chat.message).to_be_focused()
    (sent,) = chat.ask(lambda: chat.page.keyboard.press("Enter"))
    assert sent.body["messages"] == [{"role": "user", "content": text}]
    expect(examples.first).to_be_hidden()
    chat.button("New").click()
    expect(examples.first).to_be_visible()


def test_a_conversation_goes_on_until_a_new_one(chat: Chat) -> None:
    chat.page.get_by_label("Max tokens").fill("24")
    first = chat.send(PROMPT)
    second = chat.send("def pop(self):")
    said = [("user", PROMPT), ("assistant", first.text), ("user", "def pop(self):")]
    assert [(message["role"], message["content"]) for message in second.body["messages"]] == said
    assert chat.page.locator("article h2").all_text_contents() == ["user", "assistant"] * 2
    chat.button("New").click()
    assert chat.page.locator("article").count() == 0
    assert len(chat.send(PROMPT).body["messages"]) == 1


def test_settings_are_what_the_next_request_asks_for(chat: Chat) -> None:
    chat.page.get_by_label("Max tokens").fill("32")
    assert chat.page.locator("#k option").all_text_contents() == ["0", "1", "2", "3", "4", "5"]
    chat.page.get_by_label("Draft tokens").select_option("2")
    chat.slide("Temperature", 0.7)
    chat.slide("Top-p", 0.9)
    chat.page.get_by_label("System prompt").fill("Write Python.")
    sent = chat.send(PROMPT)
    asked = {name: sent.body[name] for name in ("num_speculative_tokens", "temperature", "top_p", "max_tokens")}
    assert asked == {"num_speculative_tokens": 2, "temperature": 0.7, "top_p": 0.9, "max_tokens": 32}
    assert sent.body["messages"][0] == {"role": "system", "content": "Write Python."}
    assert {draft["num_draft_tokens"] for draft in sent.joined("drafts")} <= {1, 2}
    assert [chat.page.locator(f"#{name}-shown").inner_text() for name in ("top-p", "temperature")] == ["0.9", "0.7"]
    chat.page.get_by_label("Draft tokens").select_option("0")
    sent = chat.send(PROMPT)
    assert (sent.body["num_speculative_tokens"], sent.joined("drafts")) == (0, [])
    expect(chat.page.locator(".caption").last).to_contain_text("nothing drafted")


def test_k_is_auto_where_the_engine_chooses(browser: Browser) -> None:
    flags = [flag for flag in FLAGS if flag != "5"]
    with serving(*flags, "auto") as server, open_page(browser, server) as chat:
        k = chat.page.get_by_label("Draft tokens")
        expect(k).to_have_value("auto")
        chat.page.get_by_label("Max tokens").fill("8")
        assert "num_speculative_tokens" not in chat.send(PROMPT).body
        k.select_option("1")
        assert chat.send(PROMPT).body["num_speculative_tokens"] == 1


def test_the_model_menu_has_adapters(chat: Chat) -> None:
    menu = chat.page.get_by_label("Model")
    assert menu.locator("option").all_text_contents() == ["bundled", "tuned (adapter of bundled)"]
    chat.page.get_by_label("Max tokens").fill("16")
    plain = chat.send(PROMPT)
    chat.button("New").click()
    menu.select_option("tuned")
    tuned = chat.send(PROMPT)
    assert [sent.chunks[0]["model"] for sent in (plain, tuned)] == ["bundled", "tuned"]
    assert plain.text != tuned.text


def test_retry_asks_again_with_the_settings_of_now(chat: Chat) -> None:
    chat.page.get_by_label("Max tokens").fill("8")
    chat.send(PROMPT)
    second = chat.send("def pop(self):")
    expect(chat.button("Retry")).to_have_count(1)
    chat.page.get_by_label("Max tokens").fill("12")
    (again,) = chat.ask(chat.button("Retry").click)
    assert again.body["messages"] == second.body["messages"]
    assert again.body["max_tokens"] == 12
    assert chat.page.locator("article h2").all_text_contents() == ["user", "assistant"] * 2


def test_copy_takes_the_text(chat: Chat) -> None:
    chat.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    chat.page.get_by_label("Max tokens").fill("24")
    sent = chat.send(PROMPT)
    for article, text in ((0, PROMPT), (1, sent.text)):
        copy = chat.page.locator("article").nth(article).locator(".tools button").first
        copy.click()
        expect(copy).to_have_text("Copied")
        assert chat.page.evaluate("navigator.clipboard.readText()") == text


def test_reasoning_is_folded(chat: Chat) -> None:
    chat.say(
        {"reasoning": "Two and ", "token_strs": ["Two", " and "]},
        {"reasoning": "two.", "content": "Four", "token_strs": ["two.", "Four"]},
    )
    chat.say({"content": "<thi"}, {"content": "nk>Three and three.</think>"}, {"content": "Six"})
    for colours in (True, False):
        chat.page.get_by_label("Colours").set_checked(colours)
        for index, (reasoning, answer) in enumerate([("Two and two.", "Four"), ("Three and three.", "Six")]):
            fold, article = chat.page.locator("details").nth(index), chat.page.locator("article:has(.run)").nth(index)
            expect(fold).not_to_have_attribute("open", "")
            expect(article.locator("details > div")).to_contain_text(reasoning)
            expect(article.locator("details > div")).not_to_contain_text(answer)
            expect(article.locator("details + div")).to_have_text(answer)
    fold.locator("summary").press("Enter")
    expect(article.locator("details > div")).to_be_visible()
    chat.say({"content": "<b> is a tag"})
    expect(chat.page.locator("details").nth(2)).to_be_hidden()


def test_escape_stops_an_answer(browser: Browser) -> None:
    with serving(*FLAGS, code=SLOW + MAIN) as server, open_page(browser, server) as chat:
        expect(chat.page.locator("#k")).to_have_value("5")
        chat.page.get_by_label("Max tokens").fill("900")
        chat.message.fill(PROMPT)
        chat.page.keyboard.press("Enter")
        chat.page.locator("article .iteration").nth(2).wait_for()
        chat.page.keyboard.press("Escape")
        expect(chat.button("Stop")).to_be_disabled()
        server.wait_until_idle()
        assert server.metrics()["vllm:generation_tokens_total"] < 900
        chat.page.get_by_label("Max tokens").fill("4")
        assert chat.send("def pop(self):").body["messages"][1]["role"] == "assistant"
        chat.page.get_by_label("Max tokens").fill("900")
        chat.message.fill(PROMPT)
        chat.page.keyboard.press("Control+Enter")
        chat.page.locator(".compared .iteration").nth(2).wait_for()
        chat.page.keyboard.press("Escape")
        expect(chat.page.locator(".verdict").last).to_contain_text("Not compared")
        server.wait_until_idle()


def test_an_error_is_shown_and_not_said_again(chat: Chat) -> None:
    chat.page.get_by_label("Max tokens").fill("99999")
    chat.expected_errors = 1  # the console reports the answer 400
    chat.message.fill("one")
    chat.page.keyboard.press("Enter")
    expect(chat.page.locator("article .error")).to_contain_text("max_tokens=99999")
    chat.page.get_by_label("Max tokens").fill("4")
    assert [message["content"] for message in chat.send("two").body["messages"]] == ["two"]


def test_the_api_key_is_asked_for(browser: Browser) -> None:
    with serving(*FLAGS, "--api-key", "secret") as server, open_page(browser, server) as chat:
        key = chat.page.get_by_label("API key")
        expect(key).to_be_focused()
        chat.page.keyboard.type("wrong")
        with chat.page.expect_response("**/server_info"):
            chat.page.keyboard.press("Enter")
        expect(chat.page.locator("#k")).to_be_disabled()
        key.fill("secret")
        chat.page.keyboard.press("Enter")
        expect(chat.page.locator("#k")).to_be_enabled()
        expect(chat.message).to_be_focused()
        expect(chat.page.locator("#running")).to_have_text("0")
        assert chat.send(PROMPT).text
        assert "secret" not in str(chat.page.evaluate("JSON.stringify(localStorage)"))
        chat.expected_errors = 2  # the console reports the two answers 401, and no more
