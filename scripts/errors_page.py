"""Prints docs/errors.md: the error classes with their HTTP status, and the exit codes. See `make generate`."""

from __future__ import annotations

from collections.abc import Iterator

from cli_page import EXIT_CODES
from specrs import core, errors
from specrs.config import EngineConfig
from specrs.errors import InvalidConfigError, RankLostError, SpecrsError
from specrs.sampling import SamplingParams
from specrs.server.errors import RETRY_AFTER_SECONDS, APIError, api_error

HEAD = """# Errors

This page is generated from the error classes: run `make generate` after a change.

For anybody who handles an error of specrs, in a program, a client or a script.

## Messages

A message about a value outside its range has the form `field=value: must be ...`. Others have the form
`field=value: what is wrong; what to do instead`. Long values are shortened. Examples:

"""
EXAMPLES = ("SamplingParams(temperature=-1)", "SamplingParams(max_token=5)", "LLM(dtype='fp16')")
"""Python that fails before a model is read."""
NAMES = {"SamplingParams": SamplingParams, "LLM": EngineConfig.from_kwargs}
EXIT_HEAD = """## Exit codes

A command that fails writes one line to standard error: its name, `error:` and the message.

| code | meaning |
| --- | --- |"""
CLASS_HEAD = """## Classes

If you catch a class, you also catch the classes that derive from it. The status is that of the HTTP answer. Classes
without a status are raised while the engine starts. These classes are in `specrs.errors`:

| class | bases | status | meaning |
| --- | --- | --- | --- |"""
CORE_HEAD = """
These are in `specrs.core`, for programs that use the parts of specrs:

| class | bases | meaning |
| --- | --- | --- |"""
HTTP_HEAD = """
## HTTP

An answer that is an error has the body `{"error": {"message", "type", "param", "code"}}`. `code` is the status, and
`param` names the field, or is null. A stream that has begun carries the same object as its last event before `[DONE]`.

On `/v1/messages` and the paths below it the body is `{"type": "error", "error": {"type", "message"}, "request_id"}`.
The last column has its type. `request_id` is null if the request was rejected before its body was read. A stream that
has begun carries the object as its last event, `error`. A header that cannot be read has no path, so its error has the
first form.

| status | type | cause | type on `/v1/messages` |
| --- | --- | --- | --- |"""
CAUSES = {
    400: "A field of the body is wrong, or the header is not one of HTTP/1.1.",
    401: "The API key is missing or wrong.",
    404: "No such path, a model that is not served, or a response that is not stored.",
    405: "The path has other methods, which the header `Allow` lists.",
    408: "Header or body took too long.",
    413: "The body is too long, has too many values, or continues a conversation that is too long.",
    415: "The Content-Type is not application/json. With curl, add `-H 'Content-Type: application/json'`.",
    431: "The header is too long.",
    500: "The engine ended this request because of a fault. Other requests go on.",
    503: "The queue is full, there are too many connections, the server drains, there is no memory for one of several "
    "models, or the engine has stopped. "
    f"`Retry-After: {RETRY_AFTER_SECONDS}` is set unless the engine has stopped.",
}
"""Why the server answers with a status."""


def page() -> str:
    """Return the text of the page."""
    return "\n".join(lines()) + "\n"


def lines() -> Iterator[str]:
    """Yield the lines of the page."""
    yield HEAD + "| code | message |\n| --- | --- |"
    yield from (f"| `{code}` | `{message(code)}` |" for code in EXAMPLES)
    yield f"\n{EXIT_HEAD}"
    yield from (f"| {code} | {meaning[0].upper()}{meaning[1:]}. |" for code, meaning in sorted(EXIT_CODES.items()))
    yield f"\n{CLASS_HEAD}"
    for name in classes(errors):
        kind = getattr(errors, name)
        yield f"| `{name}` | {bases(kind)} | {status(kind)} | {meaning(kind)} |"
    yield CORE_HEAD
    for name in classes(core):
        if not hasattr(errors, name):
            kind = getattr(core, name)
            yield f"| `{name}` | {bases(kind)} | {meaning(kind)} |"
    yield HTTP_HEAD
    for code, cause in CAUSES.items():
        error = APIError(code, "")
        kinds = [body["error"]["type"] for body in (error.body, error.anthropic_body("-"))]
        yield f"| {code} | `{kinds[0]}` | {cause} | `{kinds[1]}` |"


def message(code: str) -> str:
    """Return the message of the error that `code` raises."""
    try:
        eval(code, dict(NAMES))
    except SpecrsError as fault:
        return str(fault)
    raise AssertionError("the example raises no error")


def classes(module: object) -> list[str]:
    """Return the names of the error classes that `module` exports, bases before what derives from them."""
    kinds = [getattr(module, name) for name in module.__all__]  # type: ignore[attr-defined]
    return [kind.__name__ for kind in sorted(filter(is_error, kinds), key=path)]


def is_error(value: object) -> bool:
    """Return whether `value` is a class of errors of specrs."""
    return isinstance(value, type) and issubclass(value, SpecrsError)


def path(kind: type) -> list[str]:
    """Return the names from `SpecrsError` down to `kind`, along the first bases."""
    return [*(path(kind.__bases__[0]) if kind is not SpecrsError else []), kind.__name__]


def bases(kind: type) -> str:
    """Return the bases of a class, as a cell."""
    return ", ".join(f"`{base.__name__}`" for base in kind.__bases__)


def status(kind: type[SpecrsError]) -> str:
    """Return the status of the answer to a request that ends with an error of this class, as a cell."""
    if issubclass(kind, InvalidConfigError):
        return ""
    fault = RankLostError(1, 2, "ended") if issubclass(kind, RankLostError) else kind("")
    return str(int(api_error(fault).status))


def meaning(kind: type) -> str:
    """Return the first line of a class's docstring."""
    return (kind.__doc__ or "").splitlines()[0]


if __name__ == "__main__":
    print(page(), end="")
