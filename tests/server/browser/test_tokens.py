"""Authors of tokens (draft or target): colours, tooltips of iterations, the timeline, the figures, and drawing that
only appends."""

import re

import pytest
from playwright.sync_api import expect

from server.browser.conftest import PROMPT, Chat

ITERATIONS = """() => {
    const found = [];
    for (const span of document.querySelectorAll("article:last-of-type .text .iteration")) {
        if (!span.classList.contains("more")) found.push([]);
        for (const part of span.childElementCount ? span.children : [span]) {
            const writer = [...part.classList].at(-1), before = found.at(-1).at(-1);
            if (before && before[0] === writer) before[1] += part.textContent;
            else found.at(-1).push([writer, part.textContent]);
        }
    }
    return found;
}"""
TIMELINE_STEPS = """() => [...document.querySelectorAll(".step")].map((step) =>
    ["--a", "--r"].map((name) => Number(step.style.getPropertyValue(name))))"""
BACKGROUND = "(part) => getComputedStyle(part).backgroundColor"
COUNT_REMOVED = """() => {
    window.changes = { added: 0, removed: 0 };
    const kept = ".text, .text *, .timeline, .timeline *";
    new MutationObserver((records) => records.filter((record) => record.target.matches(kept)).forEach((record) => {
        changes.added += record.addedNodes.length;
        changes.removed += record.removedNodes.length;
    })).observe(document.getElementById("chat"), { childList: true, subtree: true });
}"""
NODES = """() => {
    const walker = document.createTreeWalker(document.getElementById("chat"), NodeFilter.SHOW_ALL,
        (node) => (node.parentElement.matches(".text, .text *, .timeline, .timeline *") ? 1 : 3));
    let count = 0;
    while (walker.nextNode()) count += 1;
    return count;
}"""


def shown(string: str) -> str:
    return string.replace("\n", "↵").replace("\t", "⇥")


def test_tokens_have_the_colour_of_who_wrote_them(chat: Chat) -> None:
    sent = chat.send(PROMPT)
    expected = []
    for accepted, _, target in sent.iterations():
        parts = [["draft", "".join(accepted)], ["target", "".join(target)]]
        expected.append([part for part in parts if part[1]])
    seen = chat.page.evaluate(ITERATIONS)
    assert seen == expected
    assert "".join(text for iteration in seen for _, text in iteration) == sent.text
    assert sum(len(accepted) for accepted, _, _ in sent.iterations()) == sent.figures["num_accepted_draft_tokens"] > 10
    colours = {name: chat.page.locator(f"aside .key .{name}").evaluate(BACKGROUND) for name in ("draft", "target")}
    rejected = chat.page.locator("aside .key .rejected").evaluate(BACKGROUND)
    assert len({*colours.values(), rejected, "rgba(0, 0, 0, 0)"}) == 4
    for name, colour in colours.items():
        assert chat.page.locator(f"article .{name}").first.evaluate(BACKGROUND) == colour


def test_figures_are_those_of_the_answer(chat: Chat) -> None:
    sent = chat.send(PROMPT)
    figures = sent.figures
    assert chat.value("Tokens") == str(len(sent.joined("token_strs")))
    assert chat.value("Acceptance length") == f"{figures['mean_acceptance_length']:.2f}"
    assert chat.value("Mean K") == f"{figures['num_draft_tokens'] / figures['num_spec_steps']:.2f}"
    assert re.fullmatch(r"\d+\.\d\d s", chat.value("First token"))
    for i in range(1, 6):
        share = sum(figures["acceptance_histogram"][i:]) / figures["num_spec_steps"]
        assert abs(float(chat.value(f"Position {i}").removesuffix(" %")) - 100 * share) <= 0.5
    expect(chat.page.locator("#kv")).to_have_text(re.compile(r"^\d+\.\d %$"))
    expect(chat.page.locator("#running")).to_have_text("0")


def test_the_timeline_has_a_step_for_each_iteration(chat: Chat) -> None:
    sent = chat.send(PROMPT)
    iterations, figures = sent.iterations(), sent.figures
    drafted = {draft["start"]: draft["num_accepted_draft_tokens"] for draft in sent.joined("drafts")}
    counts = [(len(accepted), len(rejected)) for accepted, rejected, _ in iterations]
    assert [tuple(step) for step in chat.page.evaluate(TIMELINE_STEPS)] == counts
    assert sum(accepted for accepted, _ in counts) == sum(drafted.values())
    said = f"{len(iterations)} iterations: {figures['num_draft_tokens']} tokens drafted, "
    said += f"{figures['num_accepted_draft_tokens']} accepted"
    expect(chat.page.locator(".caption")).to_contain_text(said)
    expect(chat.page.get_by_role("img")).to_have_attribute("aria-label", re.compile(f"^Timeline of {said}"))
    step, span = chat.page.locator(".step").nth(7), chat.page.locator("article .iteration:not(.more)").nth(7)
    step.hover()
    expect(chat.page.locator("#tip")).to_contain_text(f"{sum(counts[7])} drafted, {counts[7][0]} accepted")
    step.click()
    expect(span).to_be_focused()


def test_rejected_drafts_are_there_on_hover_and_by_keyboard(chat: Chat) -> None:
    iterations = chat.send(PROMPT).iterations()
    spans, tip = chat.page.locator("article .iteration:not(.more)"), chat.page.locator("#tip")

    def check(index: int) -> None:
        accepted, rejected, target = iterations[index]
        drafted = len(accepted) + len(rejected)
        if not drafted:
            expect(tip).to_contain_text("Nothing was drafted")
            return
        expect(tip).to_contain_text(f"{drafted} drafted, {len(accepted)} accepted, {len(rejected)} rejected")
        for name, strings in (("draft", accepted), ("rejected", rejected), ("target", target)):
            assert tip.locator(f".{name}").all_text_contents() == [shown(string) for string in strings]
        expect(tip).to_be_in_viewport(ratio=1)

    seen = 0
    for index, (accepted, rejected, _) in enumerate(iterations):
        if rejected and "".join(accepted).strip() and seen < 3:
            spans.nth(index).locator("span").first.hover()
            check(index)
            seen += 1
            chat.picture(f"hover-{seen}")
    assert seen == 3
    chat.page.get_by_role("heading", name="specrs").hover()
    expect(tip).to_be_hidden()

    spans.first.focus()
    for index in range(12):
        expect(spans.nth(index)).to_be_focused()
        expect(spans.nth(index)).to_have_attribute("aria-describedby", "tip")
        check(index)
        chat.page.keyboard.press("ArrowRight")
    lines = "(span) => [...span.parentElement.parentElement.children].indexOf(span.parentElement)"
    assert len({span.evaluate(lines) for span in spans.all()[:12]}) > 1
    chat.page.keyboard.press("ArrowLeft")
    expect(spans.nth(11)).to_be_focused()
    chat.page.keyboard.press("Escape")
    expect(tip).to_be_hidden()


def test_an_answer_is_appended_and_never_made_again(chat: Chat) -> None:
    chat.page.evaluate(COUNT_REMOVED)
    sent = chat.send(PROMPT)
    changes = chat.page.evaluate("changes")
    assert changes["removed"] == 0
    nodes = chat.page.evaluate(NODES)
    assert nodes / 2 < changes["added"] <= nodes
    assert len(sent.joined("token_strs")) > 100


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
