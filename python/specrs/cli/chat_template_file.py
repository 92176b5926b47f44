"""Reads `--chat-template` of `chat` and `serve`: a Jinja template, or the file that contains it. Renders nothing."""

from __future__ import annotations

import re
from pathlib import Path

from specrs.errors import invalid_config


def read_chat_template(given: str | None) -> str | None:
    """Return the text of a template. `given` is the template itself or a file; None gives None.

    Raises `InvalidConfigError` for a file that cannot be read, and for text that is no Jinja template.
    """
    if given is None:
        return given
    try:
        text = given if "{" in given else Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as fault:
        raise invalid_config("--chat-template", given, f"must be a file, or a Jinja template: {fault}") from None
    import jinja2

    try:  # transformers has a tag that marks what an assistant wrote, and changes nothing
        plain = re.sub(r"{%-?\s*(?:end)?generation\s*-?%}", "", text)
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
    except jinja2.TemplateSyntaxError as fault:
        raise invalid_config("--chat-template", given, f"is no Jinja template: {fault.message}") from None
    return text
