"""The page on any screen: narrow, light, dark, by keyboard, without motion; tooltips for all controls; its security
policy."""

import re

import pytest
from playwright.sync_api import expect

from server.browser.conftest import PROMPT, Chat, OpenPage

FITS = "document.documentElement.scrollWidth <= innerWidth && document.documentElement.scrollHeight <= innerHeight"
COLOURS = """(name) => {
    const style = getComputedStyle(document.querySelector("aside .key ." + name));
    return [style.color, style.backgroundColor];
}"""
FOCUS = "document.activeElement.id || document.activeElement.className || document.activeElement.textContent"


@pytest.mark.parametrize("width", [320, 360, 768])
def test_a_narrow_screen(open_chat: OpenPage, width: int) -> None:
    chat = open_chat(viewport={"width": width, "height": 640}, has_touch=True)
    assert chat.page.evaluate(FITS)
    chat.picture(f"narrow-{width}-empty")
    chat.send(PROMPT)
    assert chat.page.evaluate(FITS)
    for name in ("Send", "Compare", "Stop", "New", "History", "JSON", "Settings"):
        expect(chat.button(name)).to_be_in_viewport(ratio=1)
    for name in ("prompt", "model", "colours"):
        expect(chat.page.locator(f"#{name}")).to_be_in_viewport(ratio=1)
    expect(chat.page.locator("article .iteration").last).to_be_in_viewport()
    text = chat.page.locator("#main").bounding_box()
    assert text is not None
    assert text["height"] > 300
    chat.page.locator("article .iteration").last.tap()
    expect(chat.page.locator("#tip")).to_be_in_viewport(ratio=1)
    expect(chat.page.locator("#panel")).to_be_hidden()
    chat.button("Settings").click()
    expect(chat.page.get_by_label("Temperature")).to_be_visible()
    assert chat.page.evaluate(FITS)
    chat.picture(f"narrow-{width}-settings")
    chat.page.keyboard.press("Escape")
    expect(chat.page.locator("#panel")).to_be_hidden()
    chat.page.get_by_label("Message").fill(PROMPT)
    chat.ask(chat.button("Compare").click)
    assert chat.page.evaluate(FITS)
    expect(chat.page.locator(".verdict")).to_contain_text("same text: yes")
    chat.picture(f"narrow-{width}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(open_chat: OpenPage, scheme: str) -> None:
    """Check the contrast that WCAG 2.2 asks for, of text (AA, 1.4.3) and of the timeline's steps (1.4.11)."""
    chat = open_chat(color_scheme=scheme)
    chat.picture(f"{scheme}-empty")
    chat.send(PROMPT)

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(*colours: str) -> float:
        dark, light = sorted(map(luminance, colours))
        return (light + 0.05) / (dark + 0.05)

    def variable(name: str) -> str:
        text = chat.page.evaluate(f"getComputedStyle(document.documentElement).getPropertyValue('--{name}').trim()")
        digits = text[1:] if len(text) == 7 else "".join(2 * sign for sign in text[1:])
        return ", ".join(str(part) for part in bytes.fromhex(digits))

    for name in ("draft", "target", "rejected"):
        assert contrast(*chat.page.evaluate(COLOURS, name)) >= 4.5, name
        assert contrast(variable(f"{name}-step"), variable("bg")) >= 3, name
    for name in ("soft", "fault", "fg"):
        assert min(contrast(variable(name), variable(back)) for back in ("bg", "raised")) >= 4.5, name
    background = chat.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (luminance(background) < 0.1) == (scheme == "dark")
    chat.page.locator("article .iteration").nth(12).hover()
    chat.picture(scheme)


def test_focus_goes_from_the_header_to_the_panel(chat: Chat) -> None:
    chat.page.get_by_label("Max tokens").fill("8")
    chat.send(PROMPT)
    chat.page.get_by_label("Model").focus()
    seen = []
    for _ in range(18):
        seen.append(chat.page.evaluate(FOCUS))
        chat.page.keyboard.press("Tab")
    order = ["model", "colours", "new", "history-open", "export-json", "Copy", "iteration", "Copy", "retry", "PNG"]
    order += ["prompt", "send", "compare", "k", "temperature", "top-p", "max-tokens", "system"]
    assert [name.split()[0] for name in seen] == order


def test_every_control_explains_itself(chat: Chat) -> None:
    """Check that each visible control has a tooltip, by pointer and, except for text fields, by keyboard."""
    chat.page.get_by_label("Max tokens").fill("8")
    chat.send(PROMPT)
    tip = chat.page.locator("#tip")
    controls = chat.page.locator(":is(button, input, select, textarea):visible")
    assert controls.count() > 25
    for control in controls.all():
        text = control.get_attribute("data-tip")
        assert text
        if control.is_enabled():
            control.scroll_into_view_if_needed()
            chat.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
            control.hover()  # after the scroll's own event, which hides what is shown
            expect(tip).to_have_text(text)
            expect(tip).to_be_in_viewport(ratio=1)
    chat.page.mouse.move(0, 0)
    chat.page.get_by_label("System prompt").focus()
    chat.page.keyboard.press("Tab")
    expect(tip).to_contain_text("A token is a word")
    expect(chat.button("Tokens")).to_have_attribute("aria-describedby", "tip")
    chat.page.keyboard.press("Escape")
    expect(tip).to_be_hidden()
    chat.button("Acceptance length").click()
    expect(tip).to_contain_text("accepted drafts and one token of the model")


@pytest.mark.parametrize(("motion", "moving"), [("reduce", 0), ("no-preference", 1)])
def test_motion_is_reduced_where_it_is_asked_for(open_chat: OpenPage, motion: str, moving: int) -> None:
    chat = open_chat(reduced_motion=motion)
    count = """() => { const run = newRun("x", {}), view = new RunView(run, false); at("chat").append(view.element);
        view.draw(false, false, 1);
        return document.getAnimations().filter((one) => one.animationName === "pulse").length; }"""
    assert chat.page.evaluate(count) == moving


def test_its_policy_refuses_what_is_not_its_own(chat: Chat) -> None:
    """Check that the page's security policy blocks foreign content, and that the check which ends every test here
    notices it."""
    chat.page.evaluate("""() => {
        const script = document.createElement("script");
        script.textContent = "window.ran = true";
        document.body.append(script);
        const image = document.createElement("img");
        image.src = "https://example.org/x.png";
        document.body.append(image);
    }""")
    # evaluated immediately: the policy refuses to evaluate a text later, as waiting for a condition does
    chat.page.evaluate("async () => { while (violations.length < 2) await new Promise(requestAnimationFrame); }")
    assert sorted(chat.page.evaluate("violations.splice(0)")) == ["img-src", "script-src-elem"]
    assert chat.page.evaluate("window.ran") is None
    chat.expected_errors = 2
