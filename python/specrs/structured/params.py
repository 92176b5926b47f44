"""Demands that a request may make on its text's structure, under vLLM's names. Checks types and lengths; compiles
nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specrs.errors import (
    InvalidRequestError,
    UnsupportedRequestError,
    check_bool,
    check_text,
    invalid,
    rejects_unknown_arguments,
    unknown_key,
)

MAX_SPECIFICATION_LENGTH = 1_000_000
"""Maximum number of characters of a schema, regex or grammar, or of all choices together."""
MAX_CHOICES = 20_000

_FIELD = "structured_outputs"
_KINDS = ("json", "regex", "choice", "grammar", "json_object")


@rejects_unknown_arguments(InvalidRequestError)
@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Structure that the text of a request must have. Exactly one of the first five fields is set. Immutable, checked
    at construction.

    `json`: a JSON schema, as a dictionary or as text. `uniqueItems`, `propertyNames` and unknown `format`s are ignored,
    with a warning in the log and, by the server, in `X-Warning`; other keywords that cannot be enforced are rejected.
    `regex`: an expression in Rust's syntax (no look-around, no back-references) that the whole text matches. `choice`:
    strings, one of which is the text. `grammar`: a context-free grammar in llguidance's dialect of Lark, or in GBNF
    (llama.cpp's EBNF), which are distinguished by their syntax. `json_object`: any JSON object.

    For `json` and `json_object`: `disable_any_whitespace` writes JSON without any white space. `whitespace_pattern` is
    a regex for the white space between two parts of the JSON; the default allows one blank, or one or two line ends
    with at most 20 blanks or tabs. With `disable_additional_properties`, objects whose schema lists properties allow
    only those, unless the schema itself says otherwise.

    Raises `InvalidRequestError` for a wrong value, with field, value and what is allowed; `UnsupportedRequestError` for
    `structural_tag`, which vLLM has and specrs has not.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        error = InvalidRequestError
        if self.structural_tag is not None:
            raise invalid(
                UnsupportedRequestError,
                f"{_FIELD}.structural_tag",
                self.structural_tag,
                f"not implemented; allowed: None, or one of {', '.join(_KINDS)}",
            )
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            check_bool(error, f"{_FIELD}.{name}", getattr(self, name))
        if self.json_object is not None:
            check_bool(error, f"{_FIELD}.json_object", self.json_object)
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise error(
                f"{_FIELD}: {' and '.join(given) or 'nothing'} given; exactly one of {', '.join(_KINDS)} is allowed"
            )
        kind = given[0]
        if kind == "choice":
            object.__setattr__(self, "choice", _choices(self.choice))
        elif kind == "json":
            object.__setattr__(self, "json", _schema(self.json))
        elif kind != "json_object":
            _check_length(kind, check_text(error, f"{_FIELD}.{kind}", getattr(self, kind)))
        self._check_white_space(kind)

    @property
    def kind(self) -> str:
        """Name of the field that says what the text must be: json, regex, choice, grammar or json_object."""
        return next(name for name in _KINDS if getattr(self, name) not in (None, False))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> StructuredOutputsParams:
        """Build the parameters from `values`, a part of a request's body. Raises `InvalidRequestError` for an unknown
        key or a wrong value."""
        for name in values:
            if name not in cls.__dataclass_fields__:
                raise unknown_key(InvalidRequestError, _FIELD, name, cls.__dataclass_fields__)
        return cls(**values)

    def specification(self) -> str:
        """Everything that a compiler needs, as JSON. Equal parameters have equal specifications."""
        values = {name: getattr(self, name) for name in (self.kind, *_OPTIONS)}
        return json.dumps(values, sort_keys=True)

    def refusal(self, why: str, field: str | None = None) -> InvalidRequestError:
        """Return the error for `field` of these parameters, to raise or to end a request with; None: for `kind`."""
        name = field or self.kind
        return invalid(InvalidRequestError, f"{_FIELD}.{name}", getattr(self, name), why)

    def _check_white_space(self, kind: str) -> None:
        if kind not in ("json", "json_object"):
            for name in _OPTIONS:
                if getattr(self, name):
                    raise invalid(
                        InvalidRequestError,
                        f"{_FIELD}.{name}",
                        getattr(self, name),
                        f"is for json and json_object; with {kind} leave it at its default",
                    )
        if self.whitespace_pattern is not None:
            check_text(InvalidRequestError, f"{_FIELD}.whitespace_pattern", self.whitespace_pattern)
            _check_length("whitespace_pattern", self.whitespace_pattern)
            if self.disable_any_whitespace:
                raise invalid(
                    InvalidRequestError,
                    f"{_FIELD}.whitespace_pattern",
                    self.whitespace_pattern,
                    "must be None with disable_any_whitespace=True",
                )


_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")


def _choices(value: object) -> tuple[str, ...]:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise invalid(InvalidRequestError, f"{_FIELD}.choice", value, "must be a list of strings")
    if not 1 <= len(value) <= MAX_CHOICES:
        raise InvalidRequestError(f"{_FIELD}.choice: {len(value)} strings; must be from 1 to {MAX_CHOICES}")
    choices = tuple(check_text(InvalidRequestError, f"{_FIELD}.choice[{i}]", item) for i, item in enumerate(value))
    for i, item in enumerate(choices):
        _check_unicode(f"choice[{i}]", item)
    if sum(map(len, choices)) > MAX_SPECIFICATION_LENGTH:
        raise InvalidRequestError(
            f"{_FIELD}.choice: {sum(map(len, choices))} characters; must be at most {MAX_SPECIFICATION_LENGTH} in all"
        )
    return choices


def _schema(value: object) -> str:
    """Return a schema as text, so that later changes of a dictionary do not change the request."""
    if isinstance(value, Mapping):
        try:
            value = json.dumps(dict(value), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as fault:
            raise invalid(
                InvalidRequestError, f"{_FIELD}.json", value, f"must be a JSON schema, but is no JSON: {fault}"
            ) from None
    text = check_text(InvalidRequestError, f"{_FIELD}.json", value, also=", or a dictionary: a JSON schema")
    _check_length("json", text)
    return text


def _check_length(name: str, text: str) -> None:
    if len(text) > MAX_SPECIFICATION_LENGTH:
        raise InvalidRequestError(
            f"{_FIELD}.{name}: {len(text)} characters; must be at most {MAX_SPECIFICATION_LENGTH}"
        )
    _check_unicode(name, text)


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as fault:
        raise InvalidRequestError(
            f"{_FIELD}.{name}: a lone surrogate at {fault.start} is no character; use text that can be written as UTF-8"
        ) from None
