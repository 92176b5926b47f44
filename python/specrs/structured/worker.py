"""A process that compiles grammars on trial, one after another, until its input ends. Decodes nothing.

llguidance's own limits do not cover every schema: `allOf` over 24 `anyOf` of two takes 80 s and 5 GB, in a thread that
nothing can end. So each grammar is compiled here first; `compiler` kills the process when the time is up, and this
process bounds its own memory and its priority. It runs by path and loads no torch.

A line in, a line out, each JSON: `{"tokenizer", "vocab_size", "end", "memory", "seconds"}` gives `{}`, then each
specification (`StructuredOutputsParams.specification`) gives `{"grammar": text for LLMatcher}` or `{"error": reason}`.
"""

from __future__ import annotations

import json
import sys
from typing import Any, BinaryIO

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from specrs.processes.limits import alarm, restrain

LIMITS: dict[str, Any] = {
    # an ambiguous grammar costs its request 0.1 s a token at most, not 1 s: every request of a launch waits for it
    "step_max_items": 10_000,
    "verbose_errors": False,  # else an error carries the whole grammar
}
"""Of `LLParserLimits`; the others keep the library's defaults."""


def make_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at its start, or in its error state where the grammar is none."""
    return LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS))


def build_grammar(specification: dict[str, Any]) -> str:
    """The text for `LLMatcher`.

    Raises `ValueError` with a reason, where that shows before the compilation.
    """
    for kind in ("json", "json_object"):
        if kind in specification:
            return _json_grammar(specification, '{"type": "object"}' if kind == "json_object" else specification[kind])
    if "regex" in specification:
        return LLMatcher.grammar_from_regex(specification["regex"])
    if "choice" in specification:
        # a terminal, one automaton of the lexer's: as a rule, each choice is an item of the parser's first row
        choices = " | ".join(map(json.dumps, specification["choice"]))
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
    return grammar_from("grammar", specification["grammar"])


def close_objects(schema: Any) -> Any:
    """`schema`, whose objects with `properties` allow no others where they do not say. Changed in place."""
    if isinstance(schema, list):
        for item in schema:
            close_objects(item)
    if not isinstance(schema, dict):
        return schema
    if "properties" in schema:
        schema.setdefault("additionalProperties", False)
    for key, value in schema.items():
        if key in ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"):
            # here keys are names, and one may be "properties"
            for inner in value.values() if isinstance(value, dict) else ():
                close_objects(inner)
        elif key not in ("const", "enum", "default", "examples"):
            close_objects(value)
    return schema


def reason(message: str) -> str:
    """One line out of the library's many: the regex parser's own where there is one, else the first."""
    lines = [line.strip() for line in message.splitlines()] or [""]
    parsers = [line for line in lines if line.startswith("error: ")]
    line = parsers[0].removeprefix("error: ") if parsers else lines[0]
    return line if len(line) <= 200 else line[:200] + " ..."


def trial(tokenizer: LLTokenizer, specification: dict[str, Any]) -> dict[str, str]:
    """Compile, compute the first mask, accept a token of it.

    The mask shows a grammar that matches nothing, the token one that starts with more than the library follows.
    """
    try:
        grammar = build_grammar(specification)
    except RecursionError:
        return {"error": "nests too deep"}
    except ValueError as fault:
        return {"error": reason(str(fault))}
    white_space = specification["whitespace_pattern"]
    if white_space is not None:
        # on its own first: inside a schema the library's message does not say that it is this
        matcher = make_matcher(tokenizer, LLMatcher.grammar_from_regex(white_space))
        if matcher.is_error():
            return {"error": reason(matcher.get_error()), "field": "whitespace_pattern"}
    matcher = make_matcher(tokenizer, grammar)
    if not matcher.is_error():
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if mask:
            matcher.try_consume_tokens([(mask & -mask).bit_length() - 1])
    if matcher.is_error():
        no_text = matcher.get_error().startswith("NoExtensionBias")
        return {"error": "no text matches" if no_text else reason(matcher.get_error())}
    warnings = matcher.get_grammar_warnings()
    return {"error": reason(warnings[0])} if warnings else {"grammar": grammar}


def _json_grammar(specification: dict[str, Any], schema: str) -> str:
    try:
        parsed = json.loads(schema)
    except ValueError as fault:
        raise ValueError(f"is no JSON: {fault}") from None
    if not isinstance(parsed, (dict, bool)):
        raise ValueError("a schema is an object, true or false")
    if specification["disable_additional_properties"]:
        schema = json.dumps(close_objects(parsed))
    overrides: Any = {}
    if specification["disable_any_whitespace"]:
        overrides["whitespace_flexible"] = False
    if specification["whitespace_pattern"] is not None:
        overrides["whitespace_pattern"] = specification["whitespace_pattern"]
    return LLMatcher.grammar_from_json_schema(schema, overrides=overrides or None)


def serve(source: BinaryIO, target: BinaryIO) -> None:
    """Answer each line of `source` on `target`."""
    tokenizer, seconds = None, 0.0
    for line in source:
        message = json.loads(line)
        if tokenizer is None:
            restrain(message["memory"])
            seconds = message["seconds"]
            tokenizer = LLTokenizer(message["tokenizer"], n_vocab=message["vocab_size"], eos_token=[message["end"]])
            answer: dict[str, str] = {}
        else:
            with alarm(seconds):
                answer = trial(tokenizer, message)
        target.write(json.dumps(answer).encode() + b"\n")
        target.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
