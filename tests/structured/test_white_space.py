"""White space in JSON is bounded: no text of a grammar has a longer run than the default's or the request's limit."""

import re
from typing import Any

import pytest
from specrs.errors import InvalidRequestError
from specrs.structured import StructuredOutputsParams, compile_grammar
from specrs.structured.composed import ComposedGrammar, SchemaPart
from specrs.tokenizer import Tokenizer

from .schemas import make_schema
from .walks import EOS, VOCAB_SIZE, random_text

DEFAULT = r" |\n{1,2}[ \t]{0,20}"
"""Pattern of the default limit, which is that of llama.cpp's JSON grammars."""
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def runs(text: str) -> list[str]:
    """Return the runs of white space outside JSON strings."""
    return re.findall(r"\s+", STRING.sub('""', text))


def texts(params: StructuredOutputsParams, tokenizer: Tokenizer, count: int, **bias: float) -> list[str]:
    """Return random texts of a grammar that write white space, where allowed, 9 times of 10."""
    grammar = compile_grammar(params, tokenizer, VOCAB_SIZE)
    bias = {"close": 0.9, "blanks": 0.9} | bias
    walks = [random_text(grammar.matcher([EOS]), tokenizer, seed, **bias) for seed in range(count)]
    return [tokenizer.decode(tokens, skip_special_tokens=False) for tokens in walks]


def test_texts_of_one_schema_end_with_their_last_bracket(tokenizer: Tokenizer) -> None:
    for text in texts(StructuredOutputsParams(json={"type": "array", "maxItems": 1}), tokenizer, 10, blanks=0.6):
        assert text == text.strip()


def check(found: list[str], pattern: str) -> int:
    """Check that every run matches `pattern`, and none begins a text. Return the length of the longest."""
    longest = 0
    for text in found:
        assert text == text.lstrip()
        for run in runs(text):
            assert re.fullmatch(pattern, run), (run, text)
            longest = max(longest, len(run))
    return longest


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_no_schema_has_longer_runs(tokenizer: Tokenizer, first: int) -> None:
    found = []
    for seed in range(first, first + 20):
        found += texts(StructuredOutputsParams(json=make_schema(seed)), tokenizer, 3)
    assert check(found, DEFAULT) > 15


ANY = {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "integer", "maximum": 9}}}


@pytest.mark.parametrize("fields", [{"json_object": True}, {"json": ANY}, {"json": {"type": "array"}}])
def test_no_open_schema_has_longer_runs(tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    assert check(texts(StructuredOutputsParams(**fields), tokenizer, 10, blanks=0.6), DEFAULT) > 5


@pytest.mark.parametrize("pattern", [" ?", r"[ \n]{0,3}", r"[\x20/&&[^/]]{1,2}", "(?:\n|\t){2}"])
def test_a_pattern_of_the_request_replaces_the_bound(tokenizer: Tokenizer, pattern: str) -> None:
    parts = tuple(SchemaPart(f"tools[{seed}]", f'{{"type": "array", "maxItems": {seed}}}') for seed in (1, 2))
    lark = 'start: "<a>" schema_0 "<b>" | schema_1 (";" schema_1)*'
    composed = ComposedGrammar(lark=lark, parts=parts, whitespace_pattern=pattern)
    for params in (StructuredOutputsParams(json=ANY, whitespace_pattern=pattern), composed):
        found = texts(params, tokenizer, 10, blanks=0.6)
        assert check(found, pattern.replace("/&&[^/]", "")) >= 1


@pytest.mark.parametrize("pattern", ["a+", r"\s*", "(?: |x)", "[^a]?", r" |\n{1,2}/", r"\v"])
def test_a_pattern_of_other_characters_is_rejected(tokenizer: Tokenizer, pattern: str) -> None:
    composed = ComposedGrammar(lark="start: schema_0", parts=(SchemaPart("tools", "{}"),), whitespace_pattern=pattern)
    for params in (StructuredOutputsParams(json=ANY, whitespace_pattern=pattern), composed):
        with pytest.raises(InvalidRequestError, match=r"^structured_outputs\.whitespace_pattern=.*JSON's white space"):
            compile_grammar(params, tokenizer, VOCAB_SIZE)


def test_rules_around_schemas_have_the_same_bound(tokenizer: Tokenizer) -> None:
    lark = 'start: call+ | schema_0\ncall: "<call>" schema_1 "</call>"'
    parts = (SchemaPart("response_format", '{"type": "object"}'), SchemaPart("tools[0]", '{"type": "array"}'))
    found = texts(ComposedGrammar(lark=lark, parts=parts), tokenizer, 30, blanks=0.6)
    assert check(found, DEFAULT) > 5
    assert any(re.search(r"<call>\s", text) for text in found)
    both = ComposedGrammar(lark=lark.replace("call+", "call call"), parts=parts)
    assert any(re.search(r"</call>\s+<call>", text) for text in texts(both, tokenizer, 30, blanks=0.6))
    compact = ComposedGrammar(lark=lark, parts=parts, disable_any_whitespace=True)
    assert not any(map(runs, texts(compact, tokenizer, 10)))
