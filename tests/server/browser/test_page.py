"""The page of `--ui` in a real browser: who wrote what, what was rejected, keyboard, narrow screens, dark and light."""

import re
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from server.browser.conftest import FLAGS, Chat, OpenPage, Sent, open_page
from server.harness import MAIN, serving

PROMPT = "class Stack:"
ITERATIONS = """() => [...[...document.querySelectorAll("article .text")].pop().children].map((span) =>
    [...span.children].map((part) => [part.className, part.textContent]))"""
COLOURS = """(name) => {
    const style = getComputedStyle(document.querySelector(".key ." + name));
    return [style.color, style.backgroundColor];
}"""


def iterations(sent: Sent) -> list[tuple[dict[str, Any] | None, list[str]]]:
    """What each iteration drafted and the tokens that it wrote, as the answer says; the first token is the prompt's."""
    tokens = sent.joined("token_strs")
    found: list[tuple[dict[str, Any] | None, list[str]]] = []
    at = 0
    for draft in sent.joined("drafts"):
        found += [(None, [token]) for token in tokens[at : draft["start"]]]
        at = draft["start"] + draft["num_accepted_draft_tokens"] + 1
        found.append((draft, tokens[draft["start"] : at]))
    return found + [(None, [token]) for token in tokens[at:]]


def shown(string: str) -> str:
    return string.replace("\n", "↵").replace("\t", "⇥")


def test_tokens_have_the_colour_of_who_wrote_them(chat: Chat) -> None:
    sent = chat.send(PROMPT)
    expected = []
    for draft, tokens in iterations(sent):
        accepted = 0 if draft is None else draft["num_accepted_draft_tokens"]
        expected.append([["draft" if i < accepted else "target", token] for i, token in enumerate(tokens)])
    seen = chat.page.evaluate(ITERATIONS)
    assert seen == expected
    parts = [part for iteration in seen for part in iteration]
    assert "".join(text for _, text in parts) == sent.text
    figures = sent.figures
    assert sum(name == "draft" for name, _ in parts) == figures["num_accepted_draft_tokens"] > 10
    colours = {name: chat.page.evaluate(COLOURS, name)[1] for name in ("draft", "target", "rejected")}
    assert len({*colours.values(), "rgba(0, 0, 0, 0)"}) == 4
    for name in ("draft", "target"):
        part = chat.page.locator(f"article .{name}").first
        assert part.evaluate("(part) => getComputedStyle(part).backgroundColor") == colours[name]

    assert chat.value("Tokens") == str(len(sent.joined("token_strs")))
    assert chat.value("Acceptance length") == f"{figures['mean_acceptance_length']:.2f}"
    assert chat.value("Mean K") == f"{figures['num_draft_tokens'] / figures['num_spec_steps']:.2f}"
    for i in range(1, 6):
        share = sum(figures["acceptance_histogram"][i:]) / figures["num_spec_steps"]
        assert abs(float(chat.value(f"Position {i}").removesuffix(" %")) - 100 * share) <= 0.5
    expect(chat.page.locator("#kv")).to_have_text(re.compile(r"^\d+\.\d %$"))
    expect(chat.page.locator("#running")).to_have_text("0")


def test_rejected_drafts_are_there_on_hover_and_by_keyboard(chat: Chat) -> None:
    told = iterations(chat.send(PROMPT))
    spans, tip = chat.page.locator("article .iteration"), chat.page.locator("#tip")

    def check(index: int) -> None:
        draft, tokens = told[index]
        if draft is None:
            expect(tip).to_contain_text("Nothing was drafted")
            return
        rejected, accepted = draft["rejected_token_strs"], draft["num_accepted_draft_tokens"]
        expect(tip).to_contain_text(
            f"{draft['num_draft_tokens']} drafted, {accepted} accepted, {len(rejected)} rejected"
        )
        for name, strings in (("draft", tokens[:accepted]), ("rejected", rejected), ("target", tokens[accepted:])):
            assert tip.locator(f".{name}").all_text_contents() == [shown(string) for string in strings]
        box = tip.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 1280
        assert box["y"] >= 0
        assert box["y"] + box["height"] <= 800

    seen = 0
    for index, (draft, tokens) in enumerate(told):
        if draft is not None and draft["rejected_token_ids"] and tokens[0].strip() and seen < 4:
            spans.nth(index).locator("span").first.hover()
            check(index)
            seen += 1
            chat.picture(f"hover-{seen}")
    assert seen == 4
    chat.page.get_by_label("Message").hover()
    expect(tip).to_be_hidden()

    expect(chat.page.get_by_label("Message")).to_be_focused()
    chat.page.keyboard.press("Shift+Tab")
    for index in range(4):
        expect(spans.nth(index)).to_be_focused()
        expect(spans.nth(index)).to_have_attribute("aria-describedby", "tip")
        check(index)
        chat.page.keyboard.press("ArrowRight")
    chat.page.keyboard.press("ArrowLeft")
    expect(spans.nth(3)).to_be_focused()
    chat.page.keyboard.press("Escape")
    expect(tip).to_be_hidden()


def test_a_conversation_goes_on_until_a_new_one(chat: Chat) -> None:
    chat.page.get_by_label("Most tokens").fill("24")
    first = chat.send(PROMPT)
    second = chat.send("def pop(self):")
    said = [("user", PROMPT), ("assistant", first.text), ("user", "def pop(self):")]
    assert [(message["role"], message["content"]) for message in second.body["messages"]] == said
    assert chat.page.locator("article h2").all_text_contents() == ["user", "assistant"] * 2
    chat.page.get_by_role("button", name="New").click()
    assert chat.page.locator("article").count() == 0
    assert len(chat.send(PROMPT).body["messages"]) == 1


def test_sliders_are_what_the_next_request_asks_for(chat: Chat) -> None:
    chat.page.get_by_label("Most tokens").fill("32")
    assert (chat.page.locator("#k").get_attribute("max"), chat.page.locator("#k").input_value()) == ("5", "5")
    chat.slide("Draft tokens", 2)
    chat.slide("Temperature", 0.7)
    sent = chat.send(PROMPT)
    asked = {name: sent.body[name] for name in ("num_speculative_tokens", "temperature", "max_tokens")}
    assert asked == {"num_speculative_tokens": 2, "temperature": 0.7, "max_tokens": 32}
    assert {draft["num_draft_tokens"] for draft in sent.joined("drafts")} <= {1, 2}
    assert [chat.page.locator(f"#{name}-shown").inner_text() for name in ("k", "temperature")] == ["2", "0.7"]
    chat.page.locator("#k").press("Home")
    sent = chat.send(PROMPT)
    assert (sent.body["num_speculative_tokens"], sent.joined("drafts")) == (0, [])
    names = {name for iteration in chat.page.evaluate(ITERATIONS) for name, _ in iteration}
    assert names == {"target"}


SLOW = """
import time
from specrs.engine.engine import Engine
step = Engine.step
def slow_step(engine):
    time.sleep(0.02)  # 900 tokens take seconds, as they do of a larger model
    return step(engine)
Engine.step = slow_step
"""


def test_escape_stops_an_answer(browser: Browser) -> None:
    with serving(*FLAGS, code=SLOW + MAIN) as server, open_page(browser, server) as chat:
        expect(chat.page.locator("#k")).to_have_value("5")
        chat.page.get_by_label("Most tokens").fill("900")
        chat.page.get_by_label("Message").fill(PROMPT)
        chat.page.keyboard.press("Enter")
        chat.page.locator("article .iteration").nth(2).wait_for()
        chat.page.keyboard.press("Escape")
        expect(chat.page.get_by_role("button", name="Stop")).to_be_disabled()
        server.wait_until_idle()
        assert server.metrics()["vllm:generation_tokens_total"] < 900
        chat.page.get_by_label("Most tokens").fill("4")
        assert chat.send("def pop(self):").body["messages"][1]["role"] == "assistant"


def test_a_fault_is_shown_and_not_said_again(chat: Chat) -> None:
    chat.page.get_by_label("Most tokens").fill("99999")
    chat.expected_errors = 1  # the console tells of the answer 400
    with chat.page.expect_response("**/v1/chat/completions"):
        chat.page.get_by_label("Message").fill("one")
        chat.page.keyboard.press("Enter")
    expect(chat.page.locator("article .error, article + .error")).to_contain_text("max_tokens=99999")
    chat.page.get_by_label("Most tokens").fill("4")
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
        expect(chat.page.get_by_label("Message")).to_be_focused()
        expect(chat.page.locator("#running")).to_have_text("0")
        assert chat.send(PROMPT).text
        chat.expected_errors = 2  # the console tells of the two answers 401, and of no more


def test_a_narrow_screen(open_chat: OpenPage) -> None:
    chat = open_chat(viewport={"width": 360, "height": 640}, has_touch=True)
    chat.send(PROMPT)
    fits = "document.documentElement.scrollWidth <= innerWidth && document.documentElement.scrollHeight <= innerHeight"
    assert chat.page.evaluate(fits)
    for name in ("Send", "Stop", "New"):
        expect(chat.page.get_by_role("button", name=name)).to_be_in_viewport(ratio=1)
    expect(chat.page.get_by_label("Message")).to_be_in_viewport(ratio=1)
    expect(chat.page.locator("article .iteration").last).to_be_in_viewport()
    text = chat.page.locator("#chat").bounding_box()
    assert text is not None
    assert text["height"] > 200
    chat.page.locator("article .iteration").last.tap()
    expect(chat.page.locator("#tip")).to_be_in_viewport(ratio=1)
    chat.picture("narrow")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(open_chat: OpenPage, scheme: str) -> None:
    """Text on each colour has the contrast that WCAG 2.2 asks for (AA, 1.4.3)."""
    chat = open_chat(color_scheme=scheme)
    told = iterations(chat.send(PROMPT))

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for name in ("draft", "target", "rejected"):
        dark, light = sorted(map(luminance, chat.page.evaluate(COLOURS, name)))
        assert (light + 0.05) / (dark + 0.05) >= 4.5, name
    background = chat.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (luminance(background) < 0.1) == (scheme == "dark")
    most = max(
        range(len(told)), key=lambda i: (told[i][0] or {"rejected_token_ids": []})["rejected_token_ids"].__len__()
    )
    chat.page.locator("article .iteration").nth(most).locator("span").first.hover()
    chat.picture(scheme)


def test_its_policy_refuses_what_is_not_its_own(chat: Chat) -> None:
    """And what watches over the other tests sees it."""
    chat.page.evaluate("""() => {
        const script = document.createElement("script");
        script.textContent = "window.ran = true";
        document.body.append(script);
        const image = document.createElement("img");
        image.src = "https://example.org/x.png";
        document.body.append(image);
    }""")
    # evaluated at once: the policy refuses to evaluate a text later, as waiting for a condition does
    chat.page.evaluate("async () => { while (violations.length < 2) await new Promise(requestAnimationFrame); }")
    assert sorted(chat.page.evaluate("violations.splice(0)")) == ["img-src", "script-src-elem"]
    assert chat.page.evaluate("window.ran") is None
    chat.expected_errors = 2


@pytest.mark.parametrize(
    ("tokens", "text", "ended", "groups", "left"),
    [
        (["a", " b"], "a b", False, [["a"], [" b"]], ""),
        (["▁a", "b"], "▁ab", False, [["▁a"], ["b"]], ""),
        ([" a", "b"], "ab", False, [["a"], ["b"]], ""),  # a decoder that drops the first blank
        (["a", "b", "c"], "a", False, [["a"]], ""),  # a stop string may begin at b
        (["a", "end"], "a", False, [["a"]], ""),
        (["a", "<eos>"], "a", True, [["a"]], ""),
        (["\ufffd", "\ufffd", "!"], "é!", False, [["é"], ["!"]], ""),
        (["\ufffd", "\ufffd"], "é", False, [], "é"),
        (["\ufffd", "\ufffd"], "é", True, [["é"]], ""),
        (["x", "\ufffd", "\ufffd"], "x", False, [["x"]], ""),
        (["<think>", "a"], "a", False, [["a"]], ""),
    ],
)
def test_characters_of_several_tokens(
    chat: Chat, tokens: list[str], text: str, ended: bool, groups: list[list[str]], left: str
) -> None:
    placed = chat.page.evaluate(
        "([strings, text, ended]) => place(strings.map((string) => ({ string })), text, ended)", [tokens, text, ended]
    )
    assert [[group["text"]] for group in placed["groups"]] == groups
    assert placed["text"] == left
