r"""Makes docs/page.png and docs/page.gif: a real model's answer, compared at the speed of this machine. Holds no tests.

Start a server that has answered nothing yet, so that no drafter knows the answer. Leave a core to the browser, or the
recording has few frames, and stop everything else on the machine:

    specrs serve "$(scripts/real_model)" --served-model-name SmolLM2-135M-Instruct --spec-method suffix \
        --spec-tokens 8 --threads 1
    CHROMIUM=$(command -v chromium) .venv-clients/browser/bin/python tests/server/browser/record.py 8000 docs
"""

from __future__ import annotations

import base64
import io
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, sync_playwright

PICTURE = {"width": 1280, "height": 960}
RECORDING = {"width": 960, "height": 720}
BACKS = ("bg", "raised", "draft", "target", "rejected", "bar")
INKS = ("fg", "soft", "draft-step", "target-step", "rejected-step")
"""Colours of the page's style: BACKS are backgrounds of text, INKS are drawn on them."""
MIN_FRAME_MS = 120
LAST_FRAME_MS = 4000


def record(page: Page) -> list[tuple[float, bytes]]:
    """Compare the first example's answers on the page. Return frames as PNG with their times in seconds."""
    frames: list[tuple[float, bytes]] = []
    session = page.context.new_cdp_session(page)

    def take(event: dict[str, Any]) -> None:
        frames.append((event["metadata"]["timestamp"], base64.b64decode(event["data"])))
        session.send("Page.screencastFrameAck", {"sessionId": event["sessionId"]})

    page.get_by_label("Max tokens").fill("320")
    page.locator("#examples button").first.click()
    page.mouse.move(0, 0)
    session.on("Page.screencastFrame", take)
    session.send("Page.startScreencast", {"format": "png", "everyNthFrame": 2})
    page.wait_for_timeout(800)
    page.keyboard.press("Control+Enter")
    page.locator(".verdict:visible").wait_for()
    page.wait_for_timeout(800)
    session.send("Page.stopScreencast")
    frames.append((frames[-1][0] + 0.2, page.screenshot()))  # it shows the verdict, even if the browser lagged behind
    return frames


def palette_of(page: Page) -> Image.Image:
    """Return an image with the page's colours as its palette, and the shades of its text's edges."""
    script = "(name) => getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim().slice(1)"
    found = {name: page.evaluate(script, name) for name in (*BACKS, *INKS, "line")}
    rgb = {
        name: bytes.fromhex(text if len(text) == 6 else "".join(2 * sign for sign in text))
        for name, text in found.items()
    }
    colours = [*rgb.values()]
    for back in BACKS:
        for ink in INKS[:2] if back != "bg" else (*INKS, "bar"):
            colours += [
                bytes(round(a + (b - a) * share / 4) for a, b in zip(rgb[back], rgb[ink], strict=True))
                for share in (1, 2, 3)
            ]
    image = Image.new("P", (1, 1))
    image.putpalette(b"".join(colours))
    return image


def write_gif(frames: list[tuple[float, bytes]], palette: Image.Image, path: Path) -> None:
    """Write frames as an animation that keeps their times. Frames that come too fast are left out."""
    kept: list[tuple[float, bytes]] = []
    for at, data in frames:
        if not kept or 1000 * (at - kept[-1][0]) >= MIN_FRAME_MS:
            kept.append((at, data))
    kept[-1] = frames[-1]
    times = [round(1000 * (after - before)) for (before, _), (after, _) in pairwise(kept)]
    size = (RECORDING["width"], RECORDING["height"])
    images = [Image.open(io.BytesIO(data)).convert("RGB").resize(size, Image.Resampling.LANCZOS) for _, data in kept]
    first, *rest = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    first.save(path, save_all=True, append_images=rest, duration=[*times, LAST_FRAME_MS], loop=0, optimize=True)


def main(port: str, folder: str) -> None:
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=os.environ["CHROMIUM"]) as browser:
        page = browser.new_page(viewport=PICTURE, color_scheme="light")
        page.set_default_timeout(600_000)
        page.goto(f"http://127.0.0.1:{port}/")
        page.locator("#k:enabled").wait_for(state="attached")
        palette = palette_of(page)
        frames = record(page)
        page.evaluate("document.querySelectorAll('.body').forEach((body) => { body.scrollTop = 440; })")
        page.evaluate("document.getElementById('main').scrollTop = 0")
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        most = """[...document.querySelectorAll('.run:last-child .iteration:not(.more)')].findIndex((span) => {
            const { rejected } = iterationOf.get(span), box = span.getBoundingClientRect();
            return rejected.length && numAccepted(iterationOf.get(span)) > 1 && box.top > 480 && box.top < 620;
        })"""
        page.locator(".run").last.locator(".iteration:not(.more)").nth(page.evaluate(most)).hover()
        page.screenshot(path=Path(folder) / "page.png")
        print(page.locator(".verdict").inner_text(), *page.locator(".clock").all_text_contents(), sep="\n")
    write_gif(frames, palette, Path(folder) / "page.gif")


if __name__ == "__main__":
    main(*sys.argv[1:])
