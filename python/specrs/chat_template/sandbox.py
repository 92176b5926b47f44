"""jinja2 sandbox in which chat templates run. A template can neither reach Python's internals nor change its input.

Templates get the same tags, filters, globals and variables as in transformers, so that the texts are equal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_END = "END_OF_THE_FINAL_MESSAGE "
"""Text that marks where the final message ends. Its last space shows whether the template trims contents."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which a message may have its reasoning, in order of preference."""


def show(
    messages: list[dict[str, Any]],
    *,
    chat_template: str,
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render a conversation by `chat_template`, which also reads `variables`. Mutates nothing.

    With `continue_final_message`, the text ends where the content of the last message ends.

    Raises jinja2's errors for a template that is broken or that rejects the messages, whatever else its code raises,
    and ValueError if the text does not have the final message to continue.
    """
    template = compile_template(chat_template)
    conversation = [_with_reasoning(plain(message)) for message in messages]
    final = conversation[-1].get("content") if continue_final_message else None
    if continue_final_message:
        if not isinstance(final, str):
            raise ValueError("continue_final_message: the final message has no content to continue")
        if "content" not in chat_template:
            raise ValueError("continue_final_message: the chat template reads no content of a message")
        conversation[-1]["content"] = final + _END
    text = template.render(
        {
            **plain(variables or {}),
            "messages": conversation,
            "tools": plain(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
    )
    return text if final is None else _before_end(text, final)


def _before_end(text: str, final: str) -> str:
    """Return `text` up to the end mark, without trailing spaces if the template trims the content."""
    at = text.rfind(_END.strip())
    if at < 0 or final.strip() not in text:
        raise ValueError("continue_final_message: the chat template does not show all of the final message")
    return text[:at] if text.startswith(_END, at) else text[:at].rstrip()


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def plain(value: Any) -> Any:
    """Return a copy of `value` that consists of JSON's types and tuples.

    Objects have methods that a sandbox does not know. Fields of dataclasses and pydantic models become dictionaries,
    NumPy's scalars become numbers, and anything else becomes text that names its type, such as `<Image>`.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):  # classes that are derived from them, an enum for example
        if isinstance(value, kind):
            return getattr(kind, f"__{kind.__name__}__")(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [plain(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):
        return plain(dump())
    if getattr(value, "shape", None) == () and type(scalar := value.item()) in (int, float, bool, str):
        return scalar
    return f"<{type(value).__name__}>"


@lru_cache(maxsize=32)
def compile_template(text: str) -> Template:
    """Compile a template in an environment with the sandbox's rules. Raises jinja2's errors for a broken template."""
    return _environment().from_string(text)


@lru_cache(maxsize=1)
def _environment() -> Environment:
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    made.filters["tojson"] = _tojson
    made.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return made


class _Generation(Extension):
    """Extension for the block `{% generation %}`, which marks the model's own text for training. Here the block only
    shows its text."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it as an attribute of the instance

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_shown"), [], [], body).set_lineno(line)

    def _shown(self, caller: Macro) -> str:
        return caller()


class _Dict:
    """Global `dict` of templates. Python's own class would give a template more than its two constructors."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Global `namespace` of templates. It rejects names that begin with an underscore, which would reach Python's
    internals."""

    def __init__(*args: Any, **items: Any) -> None:  # no parameter `self`, so that an item may have the name
        self, *rest = args
        items = dict(*rest, **items)
        for name in items:
            _check_name(name)
        Namespace.__init__(self, items)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name that begins with an underscore: {name!r}")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Filter `tojson`. jinja2's own filter escapes characters of HTML and sorts keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
