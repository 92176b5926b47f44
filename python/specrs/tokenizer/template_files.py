"""Finds the chat templates of a folder, and chooses one for a conversation. Renders none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specrs.errors import CheckpointError, invalid_request
from specrs.models.checkpoint import read_json
from specrs.models.errors import malformed
from specrs.tokenizer.parts import ChatTemplate


def read_chat_template(folder: Path, settings: Mapping[str, Any]) -> ChatTemplate:
    """Return the chat template of a folder, several by their names, or None.

    chat_template.jinja and additional_chat_templates/*.jinja count first, then `chat_template` of `settings`, the
    content of tokenizer_config.json, then chat_template.json, which multimodal checkpoints have.

    Raises `CheckpointError` for files that cannot be read, and for a template that is no string.
    """
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    found = {name: _text(path) for name, path in files.items() if path.is_file()}
    if found:
        return found["default"] if list(found) == ["default"] else found
    template, source = settings.get("chat_template"), folder / "tokenizer_config.json"
    if template is None and (folder / "chat_template.json").is_file():
        source = folder / "chat_template.json"
        template = read_json(source).get("chat_template")
    if isinstance(template, list) and all(isinstance(item, Mapping) for item in template):
        template = {item.get("name"): item.get("template") for item in template}
    texts = [*template, *template.values()] if isinstance(template, dict) else [template]
    if template is not None and not all(isinstance(text, str) for text in texts):
        allowed = "a string, or a list of objects with a name and a template"
        raise malformed("chat_template", template, allowed, file=str(source))
    return template


def choose_template(templates: ChatTemplate, chosen: str | None, *, has_tools: bool) -> str | None:
    """Return the template for a conversation: `chosen`, which is a template or the name of one, or else the
    checkpoint's.

    Of several templates, `tool_use` is for conversations with tools, and `default` for all others. None if there is no
    template. Raises `InvalidRequestError` if there are several and none is the default.
    """
    if not isinstance(templates, dict):
        return templates if chosen is None else chosen
    if chosen is not None:
        return templates.get(chosen, chosen)
    name = "tool_use" if has_tools and "tool_use" in templates else "default"
    if templates and name not in templates:
        names = ", ".join(map(repr, sorted(templates)))
        raise invalid_request("chat_template", None, f"the tokenizer has several and no default; name one of {names}")
    return templates.get(name)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as fault:
        raise CheckpointError(f"{path}: could not be read: {fault}") from fault
