"""Compiling grammars: reasons of rejections, limits of time and memory, and that one request's grammar delays no
other."""

import gc
import weakref
from concurrent.futures import Future
from typing import Any

import pytest
from specrs.errors import EngineError, InvalidRequestError
from specrs.pair import TARGET
from specrs.structured import StructuredOutputsParams, compile_grammar, compiler, submit_grammar
from specrs.structured.compiler import compiler_of
from specrs.structured.schemas import close_objects
from specrs.tokenizer import Tokenizer

from .walks import EOS, VOCAB_SIZE, allowed

HOSTILE = {
    "allOf": [{"anyOf": [{"const": i}, {"type": "string", "pattern": f"a{{{i}}}"}]} for i in range(1, 25)],
}
"""Schema with 2^24 combinations: 80 s and 5 GB, beyond what the library's own limits check."""


@pytest.fixture
def own() -> Tokenizer:
    """A tokenizer that no other test uses, so that it has its own grammar compiler."""
    return Tokenizer(str(TARGET))


def compile_with(tokenizer: Tokenizer, **fields: Any) -> None:
    compile_grammar(StructuredOutputsParams(**fields), tokenizer, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": "(a"}, r"^structured_outputs\.regex='\(a': cannot be compiled: unclosed group$"),
        ({"regex": "(?=a)b"}, r"^structured_outputs\.regex='\(\?=a\)b': .*look-around"),
        ({"regex": r"(a)\1"}, r"^structured_outputs\.regex=.*backreferences are not supported$"),
        ({"regex": r"[^\s\S]"}, r"^structured_outputs\.regex=.*: no text matches$"),
        ({"regex": "(" * 100_000}, r"^structured_outputs\.regex=.*: cannot be compiled: "),
        ({"regex": "(" * 100_000 + "a" + ")" * 100_000}, r"^structured_outputs\.regex=.*: cannot be compiled: "),
        ({"json": "{"}, r"^structured_outputs\.json='\{': cannot be compiled: is no JSON"),
        ({"json": "[]"}, r"^structured_outputs\.json='\[\]': .*a schema is an object, true or false$"),
        ({"json": {"type": "foo"}}, r"^structured_outputs\.json=.*Invalid type: foo$"),
        ({"json": {"not": {}}}, r'^structured_outputs\.json=.*Unimplemented keys: \["not"\]$'),
        ({"json": {"minimum": 5, "maximum": 3, "type": "integer"}}, r"^structured_outputs\.json=.*Unsatisfiable"),
        ({"json": {"$ref": "http://127.0.0.1:9/a"}}, r"^structured_outputs\.json=.*does not fetch"),
        ({"json": {"$ref": "file:///etc/passwd"}}, r"^structured_outputs\.json=.*does not fetch"),
        ({"json": '{"properties":{"a":' * 20_000}, r"^structured_outputs\.json=.*: cannot be compiled: "),
        ({"json": '{"items":' * 500 + "{}" + "}" * 500}, r"^structured_outputs\.json=.*: cannot be compiled: "),
        ({"grammar": "start: foo"}, r'^structured_outputs\.grammar=.*unknown name: "foo"$'),
        ({"grammar": "root ::= x"}, r"^structured_outputs\.grammar=.*Rule 'x' not found"),
        ({"grammar": "start: a\na: b\nb: a"}, r"^structured_outputs\.grammar=.*: no text matches$"),
        ({"grammar": "root ::= " + "(" * 20_000}, r"^structured_outputs\.grammar=.*: cannot be compiled: "),
        # more than the library follows from the first token on
        (
            {"grammar": "start: " + " | ".join(f'"a{i}"' for i in range(3000))},
            r"^structured_outputs\.grammar=.*: .*items",
        ),
        ({"json": "{}", "whitespace_pattern": "("}, r"^structured_outputs\.whitespace_pattern='\(': .*unclosed group$"),
    ],
)
def test_refusals_name_the_field_and_the_reason(tokenizer: Tokenizer, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        compile_with(tokenizer, **fields)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    compile_with(tokenizer, regex="a")


def test_a_hostile_schema_holds_up_nobody_and_is_ended(own: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "COMPILE_TIMEOUT", 3600.0)
    hostile = submit_grammar(StructuredOutputsParams(json=HOSTILE), own, VOCAB_SIZE)
    # this thread goes on, and other grammars find another worker
    assert compile_grammar(StructuredOutputsParams(regex="a|b"), own, VOCAB_SIZE).matcher([EOS]).num_accepted == 0
    assert not hostile.done()
    compiler_of(own, VOCAB_SIZE).close()
    with pytest.raises(EngineError, match=r"^structured_outputs: the tokenizer is gone"):
        hostile.result()


def test_the_time_limit(own: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_with(own, regex="a")
    monkeypatch.setattr(compiler, "COMPILE_TIMEOUT", 0.5)
    with pytest.raises(InvalidRequestError, match=r"^structured_outputs\.json=.*: takes more than 0\.5 s to compile"):
        compile_with(own, json=HOSTILE)
    assert not compiler_of(own, VOCAB_SIZE)._idle  # one that was killed is not asked again
    monkeypatch.setattr(compiler, "COMPILE_TIMEOUT", 60.0)
    compile_with(own, regex="b")
    compiler_of(own, VOCAB_SIZE).close()


def test_the_memory_limit(own: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "COMPILE_TIMEOUT", 60.0)
    monkeypatch.setattr(compiler, "MEMORY_LIMIT", 2**28)
    with pytest.raises(
        InvalidRequestError, match=r"^structured_outputs\.json=.*: takes more than 0\.25 GiB to compile"
    ):
        compile_with(own, json=HOSTILE)
    compile_with(own, regex="b")
    compiler_of(own, VOCAB_SIZE).close()


def test_a_grammar_is_compiled_once(own: Tokenizer) -> None:
    shared = compiler_of(own, VOCAB_SIZE)
    first: Future[Any] = shared.submit(StructuredOutputsParams(json={"type": "null"}))
    assert first.result() is shared.submit(StructuredOutputsParams(json='{"type": "null"}')).result()
    assert shared.submit(StructuredOutputsParams(json="true")).result() is not first.result()
    # matchers of one grammar are their own
    grammar = compile_grammar(StructuredOutputsParams(regex="a+"), own, VOCAB_SIZE)
    one, other = grammar.matcher([EOS]), grammar.matcher([EOS])
    assert one.accept(own.encode("a")[0])
    assert EOS in allowed(one)
    assert EOS not in allowed(other)
    shared.close()


def test_workers_end_with_their_tokenizer(own: Tokenizer) -> None:
    tokenizer = Tokenizer(str(TARGET))
    compile_with(tokenizer, regex="a")
    (process,) = compiler_of(tokenizer, VOCAB_SIZE)._idle
    assert process.alive
    gone = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert gone() is None
    assert not process.alive


def test_objects_are_closed_where_schemas_stand_and_nowhere_else() -> None:
    inner = {"properties": {"a": {}}}
    schema = {
        "properties": {"properties": dict(inner), "items": {"items": dict(inner)}},
        "anyOf": [dict(inner), {"properties": {}, "additionalProperties": True}],
        "$defs": {"properties": dict(inner)},
        "enum": [dict(inner)],
        "const": dict(inner),
    }
    closed = inner | {"additionalProperties": False}
    assert close_objects(schema) == {
        "properties": {"properties": closed, "items": {"items": closed}},
        "anyOf": [closed, {"properties": {}, "additionalProperties": True}],
        "$defs": {"properties": closed},
        "enum": [inner],
        "const": inner,
        "additionalProperties": False,
    }


def test_a_worker_whose_program_is_gone_ends_by_itself(own: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "COMPILE_TIMEOUT", 0.1)
    compile_with(own, regex="a")
    monkeypatch.setattr(compiler, "COMPILE_TIMEOUT", 3600.0)  # it is not killed from here
    with pytest.raises(InvalidRequestError, match=r"to compile; use a simpler one$"):
        compile_with(own, json=HOSTILE)
    compiler_of(own, VOCAB_SIZE).close()
