"""Exports of the page: a conversation as JSON, and an answer as an image."""

import json

from PIL import Image
from playwright.sync_api import Download

from server.browser.conftest import PROMPT, Chat


def saved(chat: Chat, name: str) -> Download:
    with chat.page.expect_download() as download:
        chat.button(name).last.click()
    return download.value


def test_json_has_every_iteration(chat: Chat) -> None:
    chat.page.get_by_label("Max tokens").fill("48")
    chat.message.fill(PROMPT)
    drafted, without = chat.ask(chat.button("Compare").click)
    download = saved(chat, "JSON")
    assert download.suggested_filename == "specrs-chat.json"
    whole = json.loads(download.path().read_text(encoding="utf-8"))
    assert whole["format"] == "specrs-chat-1"
    user, assistant = whole["messages"]
    assert user == {"role": "user", "content": PROMPT}
    for run, sent in zip(assistant["runs"], (without, drafted), strict=True):
        assert run["content"] == sent.text
        assert run["request"]["num_speculative_tokens"] == sent.body["num_speculative_tokens"]
        assert run["speculation"] == sent.figures
        found = [(one["accepted"], one["rejected"], one["target"]) for one in run["iterations"]]
        assert found == sent.iterations()
        times = [one["ms"] for one in run["iterations"]]
        assert times == sorted(times)
        assert times[-1] <= 1000 * run["seconds"]


def test_a_picture_shows_the_coloured_text_and_the_timeline(chat: Chat) -> None:
    chat.page.get_by_label("Max tokens").fill("48")
    chat.send(PROMPT)
    download = saved(chat, "PNG")
    assert download.suggested_filename == "specrs-answer.png"
    with Image.open(download.path()) as picture:
        assert (picture.format, picture.width) == ("PNG", 2000)
        assert picture.height > 400
        colours = {colour[:3]: count for count, colour in picture.convert("RGB").getcolors(maxcolors=1 << 20) or []}
    for name in ("draft", "target", "draft-step", "target-step", "rejected-step"):
        style = f"getComputedStyle(document.documentElement).getPropertyValue('--{name}').trim().slice(1)"
        assert colours.get(tuple(bytes.fromhex(chat.page.evaluate(style))), 0) > 200, name
