"""Child process that compiles grammars as a trial, one after another, until its input ends. Decodes nothing.

llguidance's own limits do not cover every schema: `allOf` over 24 `anyOf` of two takes 80 s and 5 GB, in a thread that
nothing can end. So each grammar is compiled here first. `compiler` kills the process when the time is up, and the
process limits its own memory and priority. It is run by path and loads no torch.

It reads and writes JSON lines. The first line is `{"tokenizer", "vocab_size", "end", "memory", "seconds"}`, its answer
`{}`. Each further line is a specification (`StructuredOutputsParams.specification`). Its answer is `{"grammar": text
for LLMatcher, "ignored": [[field, keywords]]}` or `{"error": reason, "field": name}`. If `field` is missing or null,
the error is about the whole specification.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any, BinaryIO

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from specrs.processes.limits import alarm, restrain
from specrs.structured.schemas import close_objects, drop_ignored, locate

LIMITS: dict[str, Any] = {
    # an ambiguous grammar costs its request 0.1 s a token at most, not 1 s: every request of a step waits for it
    "step_max_items": 10_000,
    "verbose_errors": False,  # else an error carries the whole grammar
}
"""Fields of `LLParserLimits` that are changed. The others keep the library's defaults."""


WHITE_SPACE = r" |\n{1,2}[ \t]{0,20}"
"""White space between two parts of JSON, if the request does not say: one blank, or line ends with an indent.

llama.cpp's JSON grammars have the same bound. A model may otherwise write white space until `max_tokens`.
"""
MAX_PLACE = 200
"""Maximum number of characters of a keyword's place in a schema that an error shows."""
_OBJECT = '{"type": "object"}'


class Refused(ValueError):
    """Exception that says what is wrong with a specification. `field`: the part or option that it is about; None for
    the whole."""

    def __init__(self, why: str, field: str | None = None) -> None:
        super().__init__(why)
        self.field = field


def make_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Return a matcher at its start; in its error state if `grammar` is invalid."""
    return LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS))


def build_grammar(specification: dict[str, Any], schemas: list[tuple[str | None, Any]]) -> tuple[str, list[list[Any]]]:
    """Return the text for `LLMatcher`, and the fields whose schemas have keywords that the grammar ignores, with these
    keywords.

    Appends (field, parsed schema as it is compiled) to `schemas`; the field is None if there is only one schema. Raises
    `Refused`, `ValueError` or `RecursionError` for faults that show before the compilation.
    """
    if "lark" in specification:
        return _composed(specification, schemas)
    for kind in ("json", "json_object"):
        if kind in specification:
            text = _OBJECT if kind == "json_object" else specification[kind]
            schema, ignored = _read_schema(specification, text, specification["disable_additional_properties"])
            schemas.append((None, schema))
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
            return grammar, [["structured_outputs.json", ignored]] if ignored else []
    if "regex" in specification:
        return LLMatcher.grammar_from_regex(specification["regex"]), []
    if "choice" in specification:
        # a terminal, one automaton of the lexer's: as a rule, each choice is an item of the parser's first row
        choices = " | ".join(map(json.dumps, specification["choice"]))
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}"), []
    return grammar_from("grammar", specification["grammar"]), []


def reason(message: str) -> str:
    """Return one line of the library's message: the regex parser's own if there is one, else the first."""
    if message.startswith("oneOf constraints are not supported"):
        return "oneOf needs alternatives that exclude each other; use anyOf"
    lines = [line.strip() for line in message.splitlines()] or [""]
    parsers = [line for line in lines if line.startswith("error: ")]
    line = parsers[0].removeprefix("error: ") if parsers else lines[0]
    return line if len(line) <= 200 else line[:200] + " ..."


def trial(tokenizer: LLTokenizer, specification: dict[str, Any]) -> dict[str, Any]:
    """Compile a specification, compute the first mask and accept a token of it. Return the answer to send.

    The mask detects a grammar that matches nothing. The token detects a grammar that starts with more than the library
    can follow.
    """
    schemas: list[tuple[str | None, Any]] = []
    sources: dict[str | None, Any] = {}
    try:
        grammar, ignored = build_grammar(specification, schemas)
        for field, text, closed in specification.get("sources", ()):
            sources[field] = _read_schema(specification, text, closed)[0]
    except RecursionError:
        return {"error": "nests too deep"}
    except Refused as fault:
        return {"error": str(fault), "field": fault.field}
    except ValueError as fault:
        return {"error": reason(str(fault))}
    white_space = specification["whitespace_pattern"]
    if white_space is not None:
        # on its own first: inside a schema the library's message does not say that it is this
        matcher = make_matcher(tokenizer, LLMatcher.grammar_from_regex(white_space))
        if matcher.is_error():
            return {"error": reason(matcher.get_error()), "field": "whitespace_pattern"}
        # a text of the pattern that is no white space
        other = f"start: OTHER\nOTHER: /{_in_slashes(white_space)}/ & ~/[ \\t\\n\\r]*/"
        if _fault(tokenizer, LLMatcher.grammar_from_lark(other)) is None:
            why = "it matches more than JSON's white space; use a pattern of blanks, \\t, \\n and \\r"
            return {"error": why, "field": "whitespace_pattern"}
    for field in specification.get("checked", ()):
        of_source = _schema_fault(tokenizer, sources[field])
        if of_source is not None:
            return {"error": of_source, "field": field}
    error = _fault(tokenizer, grammar)
    if error is None:
        return {"grammar": grammar, "ignored": ignored}
    for field, schema in [*schemas, *sources.items()]:
        of_schema = _schema_fault(tokenizer, schema)
        if of_schema is not None:
            of_source = _schema_fault(tokenizer, sources[field]) if field in sources else None
            return {"error": of_source or of_schema, "field": field}
    # the fault is in the rules around the schemas
    return {"error": error, "field": next(iter(sources)) if len(sources) == 1 else None}


def _fault(tokenizer: LLTokenizer, grammar: str) -> str | None:
    """Return the reason why a grammar cannot be used; None if it can."""
    matcher = make_matcher(tokenizer, grammar)
    if not matcher.is_error():
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if mask:
            matcher.try_consume_tokens([(mask & -mask).bit_length() - 1])
    if matcher.is_error():
        no_text = matcher.get_error().startswith("NoExtensionBias")
        return "no text matches" if no_text else reason(matcher.get_error())
    warnings = matcher.get_grammar_warnings()
    return reason(warnings[0]) if warnings else None


def _schema_fault(tokenizer: LLTokenizer, schema: Any) -> str | None:
    """Return the reason why a schema cannot be used, with the keyword's place in it; None if it can."""

    def fault(candidate: Any) -> str | None:
        return _fault(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(candidate)))

    error = fault(schema)
    if error is None:
        return None
    place = locate(schema, lambda candidate: fault(candidate) is not None)
    if len(place) > MAX_PLACE:
        place = "..." + place[-MAX_PLACE:]
    return f"{place}: {error}" if place else error


def _read_schema(specification: dict[str, Any], schema: str, closed: bool) -> tuple[Any, list[str]]:
    """Return the parsed schema with the library's options in it, and the keywords that were removed from it.

    Raises `ValueError` if the text is no schema.
    """
    try:
        parsed = json.loads(schema)
    except ValueError as fault:
        raise ValueError(f"is no JSON: {fault}") from None
    if not isinstance(parsed, (dict, bool)):
        raise ValueError("a schema is an object, true or false")
    if parsed is False:
        raise ValueError("no text matches")
    if parsed is True:
        parsed = {}
    ignored = drop_ignored(parsed)
    if closed:
        close_objects(parsed)
    options = parsed.get("x-guidance")
    white_space = _white_space(specification)
    parsed["x-guidance"] = (options if isinstance(options, dict) else {}) | (
        {"whitespace_flexible": False} if white_space is None else {"whitespace_pattern": white_space}
    )
    return parsed, ignored


def _white_space(specification: dict[str, Any]) -> str | None:
    """Return the regex for the white space between two parts of JSON; None if there is none."""
    if specification["disable_any_whitespace"]:
        return None
    return WHITE_SPACE if specification["whitespace_pattern"] is None else specification["whitespace_pattern"]


def _composed(specification: dict[str, Any], schemas: list[tuple[str | None, Any]]) -> tuple[str, list[list[Any]]]:
    lines, told = [specification["lark"]], []
    white_space = _white_space(specification)
    if white_space is not None:
        # the same for the rules around the schemas: the library then tells schemas and rules apart by all of the text
        lines += ['%llguidance {"ignore_once": true}', f"%ignore /{_in_slashes(white_space)}/"]
    for i, (field, text, closed) in enumerate(specification["parts"]):
        try:
            schema, ignored = _read_schema(specification, text, closed)
        except RecursionError:
            raise Refused("nests too deep", field) from None
        except ValueError as fault:
            raise Refused(str(fault), field) from None
        schemas.append((field, schema))
        lines.append(f"schema_{i}: %json {json.dumps(schema)}")
        if ignored:
            told.append([field, ignored])
    return LLMatcher.grammar_from_lark("\n".join(lines)), told


def _in_slashes(pattern: str) -> str:
    """Return a regex in the form that Lark has between slashes."""
    escapes = {"/": r"\/", "\n": r"\n", "\r": r"\r"}
    return re.sub(r"\\.|[/\n\r]", lambda match: escapes.get(match[0], match[0]), pattern, flags=re.DOTALL)


def serve(source: BinaryIO, target: BinaryIO) -> None:
    """Answer each line of `source`, a request in JSON, with a line on `target`."""
    tokenizer, seconds = None, 0.0
    for line in source:
        message = json.loads(line)
        if tokenizer is None:
            restrain(message["memory"])
            seconds = message["seconds"]
            tokenizer = LLTokenizer(message["tokenizer"], n_vocab=message["vocab_size"], eos_token=[message["end"]])
            answer: dict[str, Any] = {}
        else:
            with alarm(seconds):
                answer = trial(tokenizer, message)
        target.write(json.dumps(answer).encode() + b"\n")
        target.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
