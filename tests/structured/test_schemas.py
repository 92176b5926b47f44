"""JSON schemas: every text that masks allow parses and validates."""

import json

import jsonschema
import pytest
from specrs.structured import StructuredOutputsParams, compile_grammar
from specrs.tokenizer import Tokenizer

from .schemas import make_schema
from .walks import EOS, VOCAB_SIZE, random_text

CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_random_texts_of_generated_schemas_validate(tokenizer: Tokenizer, first: int) -> None:
    for seed in range(first, first + 20):
        schema = make_schema(seed)
        jsonschema.Draft202012Validator.check_schema(schema)
        params = StructuredOutputsParams(json=schema, disable_any_whitespace=seed % 2 == 0)
        grammar = compile_grammar(params, tokenizer, VOCAB_SIZE)
        for walk in range(3):
            # with free white space a text is bounded only by the bias
            text = tokenizer.decode(random_text(grammar.matcher([EOS]), tokenizer, walk, close=0.2 + 0.3 * walk))
            jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator, format_checker=CHECKER)
            assert not params.disable_any_whitespace or text == _compact(text)


def _compact(text: str) -> str:
    """Return the text without white space outside strings."""
    parts, inside, escaped = [], False, False
    for character in text:
        if inside or not character.isspace():
            parts.append(character)
        if inside and not escaped and character == "\\":
            escaped = True
            continue
        if character == '"' and not escaped:
            inside = not inside
        escaped = False
    return "".join(parts)


def test_the_generator_covers_what_it_should() -> None:
    text = json.dumps([make_schema(seed) for seed in range(200)])
    for keyword in ("anyOf", "enum", "const", "pattern", "format", "prefixItems", "$ref", "required", "multipleOf"):
        assert text.count(f'"{keyword}"') >= 15, keyword


def test_any_json_object(tokenizer: Tokenizer) -> None:
    params = StructuredOutputsParams(json_object=True, disable_any_whitespace=True)
    grammar = compile_grammar(params, tokenizer, VOCAB_SIZE)
    texts = [tokenizer.decode(random_text(grammar.matcher([EOS]), tokenizer, seed, close=0.8)) for seed in range(20)]
    assert all(isinstance(json.loads(text), dict) for text in texts)
    assert any(json.loads(text) for text in texts)


def test_white_space_and_further_properties_are_the_request_s_to_say(tokenizer: Tokenizer) -> None:
    # a property of the name "properties" is a name, no keyword
    schema = {"type": "object", "properties": {"properties": {"type": "object", "properties": {"a": {"const": 1}}}}}

    def takes(text: str, **options: object) -> bool:
        grammar = compile_grammar(StructuredOutputsParams(json=schema, **options), tokenizer, VOCAB_SIZE)
        matcher = grammar.matcher([EOS])
        return all(matcher.accept(i) for i in [*tokenizer.encode(text), EOS])

    assert takes('{"properties": {"a": 1, "b": 2}, "c": 3}')
    assert takes('{\n "properties":{}}')
    assert not takes('{"properties":{"b":2}}', disable_additional_properties=True)
    assert not takes('{"c":2}', disable_additional_properties=True)
    assert takes('{"properties":{"a":1}}', disable_additional_properties=True, disable_any_whitespace=True)
    assert not takes('{"properties": {}}', disable_any_whitespace=True)
    assert takes('{"properties": {}}', whitespace_pattern=" ?")
    assert not takes('{"properties":  {}}', whitespace_pattern=" ?")
