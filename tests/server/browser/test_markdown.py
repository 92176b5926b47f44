"""Markdown if colours are off: what is formatted, what stays text, and that nothing in it runs or loads."""

import json

import pytest
from playwright.sync_api import expect

from server.browser.conftest import PROMPT, Chat

DOCUMENT = """# Stacks

A **stack** has `push` and *pop*; see ~~queues~~ [the page](https://example.org/a?b=1).

1. one
2. two

   more of two
   - inner **bold**
3. three

> quoted
> > twice

| name | cost |
| --- | ---: |
| `a|b` | 3 |
| c \\| d | 4 |

```python
def f(x):

    return "<b>" * x  # **not bold**
```

---
snake_case_name and 2 * 3 * 4, a \\*star\\*.
"""
HTML = """(text) => { const into = document.createElement("div");
    new Markdown(into).append(text);
    return into.innerHTML; }"""
PIECES = """(text) => { const into = document.createElement("div"), view = new Markdown(into);
    for (const sign of text) view.append(sign);
    return into.innerHTML; }"""


def test_the_document_is_formatted(chat: Chat) -> None:
    html = chat.page.evaluate(HTML, DOCUMENT)
    for part in (
        "<h3>Stacks</h3>",
        "<p>A <strong>stack</strong> has <code>push</code> and <em>pop</em>; see <del>queues</del> <a ",
        '<ol start="1"><li><p>one</p></li><li><p>two</p><p>more of two</p><ul><li><p>inner '
        "<strong>bold</strong></p></li></ul></li><li><p>three</p></li></ol>",
        "<blockquote><p>quoted</p><blockquote><p>twice</p></blockquote></blockquote>",
        "<thead><tr><th>name</th><th>cost</th></tr></thead>",
        "<td>c | d</td><td>4</td>",
        '<pre><code>def f(x):\n\n    return "&lt;b&gt;" * x  # **not bold**</code></pre><hr>',
        "<p>snake_case_name and 2 * 3 * 4, a *star*.</p>",
    ):
        assert part in html, html


def test_a_text_that_grows_ends_as_the_whole_text(chat: Chat) -> None:
    """Check that a text rendered while it grows has the same final markup as the whole text rendered at once, for every
    prefix, and that finished parts are never rendered again."""
    assert chat.page.evaluate(PIECES, DOCUMENT) == chat.page.evaluate(HTML, DOCUMENT)


def test_the_page_switches_between_colours_and_markdown(chat: Chat) -> None:
    chat.say({"content": DOCUMENT, "token_strs": [DOCUMENT]})
    expect(chat.page.locator("article .text").last).to_have_text(DOCUMENT, use_inner_text=False)
    chat.page.get_by_label("Colours").uncheck()
    expect(chat.page.locator(".markdown h3")).to_have_text("Stacks")
    chat.picture("markdown")
    chat.page.get_by_label("Colours").check()
    assert chat.page.locator("article .text").last.text_content() == DOCUMENT
    chat.page.get_by_label("Colours").uncheck()
    chat.page.reload()
    expect(chat.page.locator(".markdown h3")).to_have_text("Stacks")


def test_an_answer_is_formatted_as_it_comes(chat: Chat) -> None:
    chat.page.get_by_label("Colours").uncheck()
    sent = chat.send(PROMPT)
    html = chat.page.locator("article .markdown").last.inner_html()
    assert html == chat.page.evaluate(HTML, sent.text)


HOSTILE = [
    "<script>window.ran = 1</script><img src=x onerror=window.ran=1><iframe srcdoc='<script>parent.ran=1</script>'>",
    "[a](javascript:window.ran=1) [b](data:text/html,x) [c](/v1/models) [d](vbscript:x) [e](JAVASCRIPT:window.ran=1)",
    "![i](https://example.org/x.png) <svg onload=window.ran=1> &lt;b&gt; <a href='javascript:window.ran=1'>x</a>",
    "| <img src=x onerror=window.ran=1> | b |\n| --- | --- |\n| <script>window.ran=1</script> | d |",
    "```html\n<script>window.ran=1</script>\n```\n# <img src=x onerror=window.ran=1>",
]


@pytest.mark.parametrize("colours", [True, False])
def test_markup_of_a_model_stays_text(chat: Chat, colours: bool) -> None:
    chat.page.get_by_label("Colours").set_checked(colours)
    for text in HOSTILE:
        chat.say({"reasoning": text, "content": text, "token_strs": [text, text]})
    assert chat.page.locator(":is(article, #tip) :is(script, img, iframe, svg, object, style)").count() == 0
    links = chat.page.locator("article a").evaluate_all("(links) => links.map((link) => link.getAttribute('href'))")
    assert set(links) == (set() if colours else {"https://example.org/x.png"})
    assert chat.page.evaluate("window.ran") is None
    said = "".join(chat.page.locator("article .run").all_text_contents())
    assert said.count("<img src=x onerror=window.ran=1>") == 6


def test_any_text_is_formatted_in_time(chat: Chat) -> None:
    """Check that any text is formatted in bounded time: deep nesting, marks that never close, random marks."""
    long = [
        mark * 20_000
        for mark in ("*", "_", "`", "[", "](", "> ", "- ", "|", "~", "* a ", "** a", "`` ` ", "1. ", "\\", "#", "a_")
    ]
    assert all(chat.page.evaluate(HTML, text) for text in long)
    assert len(chat.page.evaluate(HTML, "\n".join("  " * i + "- x" for i in range(200)))) > 600
    random_texts = """(marks) => {
        let state = 7;
        const next = (n) => (state = (state * 48271) % 2147483647) % n;
        for (let i = 0; i < 400; i++) {
            const text = Array.from({ length: 60 }, () => marks[next(marks.length)]).join("");
            const whole = document.createElement("div"), bare = (html) => html.replace(/[^a-z]/g, "");
            new Markdown(whole).append(text);
            const words = bare(text), kept = bare(whole.textContent);
            let at = 0;
            for (const sign of kept) { at = words.indexOf(sign, at) + 1; if (!at) return text; }
            if (whole.querySelector(":not(p, h3, h4, h5, h6, ul, ol, li, pre, code, em, strong, del, blockquote, hr)" +
                ":not(div, table, thead, tbody, tr, th, td, a)")) return text;
        }
        return null;
    }"""
    marks = [
        "a",
        "b ",
        "c\n",
        "\n\n",
        "*",
        "**",
        "_",
        "`",
        "```\n",
        "> ",
        "- ",
        "1. ",
        "| ",
        "|---|---|\n",
        "# ",
        "[",
        "](https:x)",
        "<i>",
        "  ",
        "\\",
        "~~",
    ]
    assert json.dumps(chat.page.evaluate(random_texts, marks)) == "null"
