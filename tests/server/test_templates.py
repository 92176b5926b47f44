"""Chat templates rendered in another process: the same text as in this one, a time limit, a sandbox, and processes that
end."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from specrs.errors import InvalidRequestError
from specrs.pair import TARGET
from specrs.server import templates
from specrs.server.templates import TemplateRenderer
from specrs.tokenizer import Tokenizer

from .harness import alive

MESSAGES = [{"role": "user", "content": "hé 🎉"}, {"role": "assistant", "content": "b"}]
TEMPLATE = """{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}
{% endfor %}{% if endless is defined %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}
{% endif %}{{ ''.__class__.__mro__ if escape is defined }}{{ raise_exception('no') if refuse is defined }}
{{ (eos_token * 999999999) | length if large is defined }}{% if add_generation_prompt %}> {% endif %}"""


@contextmanager
def rendering(chat_template: str | None = TEMPLATE) -> Iterator[TemplateRenderer]:
    renderer = TemplateRenderer(Tokenizer(str(TARGET)), chat_template)
    try:
        yield renderer
    finally:
        renderer.close()


def options(**variables: Any) -> dict[str, Any]:
    return {"add_generation_prompt": True, "continue_final_message": False, "chat_template_kwargs": variables}


def pids(renderer: TemplateRenderer) -> list[int]:
    return [child._process.pid for child in renderer._all]


def test_the_text_is_the_tokenizers() -> None:
    tokenizer = Tokenizer(str(TARGET))
    for template in (None, TEMPLATE):
        with rendering(template) as renderer:
            text = asyncio.run(renderer.render(MESSAGES, options())).text
            running = pids(renderer)
        assert text == tokenizer.render_chat(MESSAGES, chat_template=template)
        assert running
        assert not any(alive(pid) for pid in running)


def test_what_a_template_may_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(renderer: TemplateRenderer) -> None:
        good = await renderer.render(MESSAGES, options())
        for variable, says in (
            ("escape", "unsafe"),
            ("refuse", "refused them: no"),
            ("tokenize", "it cannot be overridden; leave it out"),
        ):
            with pytest.raises(InvalidRequestError, match=says):
                await renderer.render(MESSAGES, options(**{variable: True}))
        monkeypatch.setattr(templates, "RENDER_TIMEOUT", 0.5)
        before = pids(renderer)
        # one that takes for ever is ended; meanwhile others are rendered
        endless = asyncio.ensure_future(renderer.render(MESSAGES, options(endless=True)))
        with pytest.raises(InvalidRequestError, match="took more than"):
            await endless
        monkeypatch.setattr(templates, "RENDER_TIMEOUT", 60.0)
        assert await renderer.render(MESSAGES, options()) == good
        assert len(pids(renderer)) <= templates.MAX_WORKERS
        assert set(before) != set(pids(renderer))

    with rendering() as renderer:
        asyncio.run(main(renderer))


def test_a_template_that_fills_the_memory() -> None:
    async def main(renderer: TemplateRenderer) -> None:
        with pytest.raises(
            InvalidRequestError, match=r"^messages: the chat template (took too much memory|refused them: MemoryError)"
        ):
            await renderer.render(MESSAGES, options(large=True))

    with rendering() as renderer:
        asyncio.run(main(renderer))


def test_closing_ends_a_render_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "RENDER_TIMEOUT", 600.0)

    async def main(renderer: TemplateRenderer) -> None:
        await renderer.render(MESSAGES, options())
        endless = asyncio.ensure_future(renderer.render(MESSAGES, options(endless=True)))
        while renderer._idle.qsize() == len(pids(renderer)):
            await asyncio.sleep(0)
        running = pids(renderer)
        renderer.close()
        with pytest.raises(InvalidRequestError):
            await endless
        assert not any(alive(pid) for pid in running)

    with rendering() as renderer:
        asyncio.run(main(renderer))
