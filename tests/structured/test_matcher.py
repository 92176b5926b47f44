"""Grammar matchers: masks, rollbacks and drafts against a matcher that accepts the same tokens from scratch, and by
hand."""

import itertools
import json
import operator
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specrs.errors import InvalidRequestError, SpecrsError
from specrs.structured import (
    Grammar,
    GrammarCursor,
    GrammarMatcher,
    StructuredOutputsParams,
    compile_grammar,
    unpack_mask,
)
from specrs.structured.layout import Layout
from specrs.tokenizer import Tokenizer

from .schemas import make_schema
from .walks import EOS, NUM_WORDS, VOCAB_SIZE, allowed, allowed_ids, mask_of

PARAMS = {
    "regex": StructuredOutputsParams(regex="[ab]{1,4}(c|-[0-9]{2,})?"),
    "text": StructuredOutputsParams(regex=r"(.|\n){0,30}"),
    "choice": StructuredOutputsParams(choice=["red", "reddish", "green", "é😀"]),
    "lark": StructuredOutputsParams(grammar='start: "(" start ")" start | NAME?\nNAME: /[a-z]+/'),
    "gbnf": StructuredOutputsParams(grammar='root ::= sum\nsum ::= item ("+" item)*\nitem ::= [0-9]+ | "(" sum ")"'),
    "object": StructuredOutputsParams(json_object=True),
    "schema": StructuredOutputsParams(json=make_schema(15), disable_any_whitespace=True),
}


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> dict[str, Grammar]:
    return {name: compile_grammar(params, tokenizer, VOCAB_SIZE) for name, params in PARAMS.items()}


@pytest.fixture(scope="module")
def compiled(tokenizer: Tokenizer) -> Callable[..., Grammar]:
    return lambda **fields: compile_grammar(StructuredOutputsParams(**fields), tokenizer, VOCAB_SIZE)


def from_scratch(grammar: Grammar, tokens: list[int], stop_ids: list[int]) -> GrammarMatcher:
    matcher = grammar.matcher(stop_ids)
    for token in tokens:
        assert matcher.accept(token)
    return matcher


@pytest.mark.parametrize("name", PARAMS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_way_to_a_text_gives_its_mask(grammars: dict[str, Grammar], name: str, data: st.DataObject) -> None:
    # 5 is "&", which is text besides
    stop_ids = data.draw(st.sampled_from([[EOS], [EOS, 5], [5]]))
    matcher, tokens = grammars[name].matcher(stop_ids), []
    for _ in range(data.draw(st.integers(1, 12))):
        if tokens and data.draw(st.integers(0, 3)) == 0:
            count = data.draw(st.integers(0, len(tokens)))
            matcher.rollback(count)
            del tokens[len(tokens) - count :]
        else:
            ids = allowed(matcher)
            token = ids[data.draw(st.integers(0, 1 << 16)) % len(ids)]
            wrong = data.draw(st.integers(0, VOCAB_SIZE - 1))
            if data.draw(st.booleans()) and not from_scratch(grammars[name], tokens, stop_ids).accept(wrong):
                assert not matcher.accept(wrong)
            assert matcher.accept(token)
            tokens.append(token)
        assert matcher.num_accepted == len(tokens)
        expected = from_scratch(grammars[name], tokens, stop_ids)
        np.testing.assert_array_equal(mask_of(matcher), mask_of(expected))


@pytest.mark.parametrize("name", PARAMS)
def test_cursor_rows_are_those_of_accepting_one_by_one(grammars: dict[str, Grammar], name: str) -> None:
    k = 5
    for seed in range(30):
        rng = random.Random(seed)
        matcher, committed = grammars[name].matcher([EOS]), []
        for _ in range(4):
            rows = np.full((k + 1, NUM_WORDS), 0x5A5A5A5A, dtype=np.int32)
            before = mask_of(matcher)
            cursor = GrammarCursor(matcher, rows)
            cursor.start()
            drafts: list[int] = []
            wrong = False  # whether a draft was one that the grammar forbids
            for i in range(rng.randint(0, k)):
                here = mask_of(from_scratch(grammars[name], committed + drafts, [EOS]))
                if not wrong:
                    np.testing.assert_array_equal(rows[i], here)
                token = rng.choice(allowed_ids(here))
                if wrong or rng.random() < 0.2:
                    token = rng.randrange(VOCAB_SIZE)
                    wrong = wrong or not from_scratch(grammars[name], committed + drafts, [EOS]).accept(token)
                assert cursor.advance(token) is not wrong
                if not wrong:
                    drafts.append(token)
            last = mask_of(from_scratch(grammars[name], committed + drafts, [EOS]))
            np.testing.assert_array_equal(rows[len(drafts)], last)
            assert (rows[len(drafts) + 1 :] == -1).all()
            cursor.finish()
            assert matcher.num_accepted == len(committed)
            np.testing.assert_array_equal(mask_of(matcher), before)
            # settle: some of the drafts, and a token of the row after them
            emitted = drafts[: rng.randint(0, len(drafts))]
            emitted.append(rng.choice(allowed_ids(rows[len(emitted)])))
            assert all(matcher.accept(token) for token in emitted)
            committed += emitted


def test_masks_of_a_regex_by_hand(tokenizer: Tokenizer, compiled: Callable[..., Grammar]) -> None:
    words = {"a", "b"}
    for _ in range(3):
        words |= {word + letter for word in words for letter in "ab"}
    words |= {word + "c" for word in words}
    prefixes = {word[:i] for word in words for i in range(len(word) + 1)}
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in range(VOCAB_SIZE)]
    matcher = compiled(regex="[ab]{1,4}c?").matcher([EOS])
    written = ""
    for letter in "abba":
        expected = [i for i, text in enumerate(texts) if text and written + text in prefixes]
        assert allowed(matcher) == ([EOS] if written in words else []) + expected
        written += letter
        assert matcher.accept(tokenizer.encode(letter)[0])
    assert allowed(matcher) == [EOS, *tokenizer.encode("c")]


def test_choices_are_written_whole_and_nothing_else_is(tokenizer: Tokenizer, compiled: Callable[..., Grammar]) -> None:
    choices = ["red", "reddish", 'a"b\\n\n', "é😀", "日本", "/x/", *(f"label {i}" for i in range(5000))]
    grammar = compiled(choice=choices)

    def takes(text: str) -> bool:
        matcher = grammar.matcher([EOS])
        return all(matcher.accept(i) for i in [*tokenizer.encode(text), EOS])

    assert all(takes(choice) for choice in (*choices[:7], choices[-1]))
    assert not any(takes(text) for text in ("re", "redd", "", "red ", "reddishred", "é", "x"))


def test_only_stop_ids_follow_a_complete_text(tokenizer: Tokenizer, compiled: Callable[..., Grammar]) -> None:
    a, b, c = (tokenizer.encode(letter)[0] for letter in "abc")
    matcher = compiled(regex="ab?").matcher([EOS, c])
    assert allowed(matcher) == [a] or b not in allowed(matcher)
    assert not matcher.accept(EOS)
    assert not matcher.accept(c)
    assert matcher.accept(a)
    assert allowed(matcher) == [EOS, *sorted([b, c])]  # complete, and may go on
    assert matcher.accept(b)
    assert allowed(matcher) == [EOS, c]  # nothing may follow
    assert not matcher.accept(a)
    assert matcher.accept(c)
    assert matcher.num_accepted == 3
    assert allowed(matcher) == [EOS, c]  # ended: a row after the end has something to write
    assert not matcher.accept(a)
    assert matcher.accept(EOS)
    matcher.rollback(3)
    assert allowed(matcher) == [EOS, *sorted([b, c])]
    assert matcher.accept(b)
    assert matcher.accept(EOS)


def test_a_stop_id_that_is_text_ends_where_the_grammar_takes_it(
    tokenizer: Tokenizer, compiled: Callable[..., Grammar]
) -> None:
    a, b = (tokenizer.encode(letter)[0] for letter in "ab")
    matcher = compiled(regex="(a|b){3}").matcher([b])
    assert {a, b} <= set(allowed(matcher))
    assert matcher.accept(b)
    assert allowed(matcher) == [b]
    matcher.rollback(1)
    for _ in range(3):
        assert matcher.accept(a)
    assert allowed(matcher) == [b]


def test_without_stop_ids_eos_follows(tokenizer: Tokenizer, compiled: Callable[..., Grammar]) -> None:
    matcher = compiled(regex="a").matcher([])
    assert matcher.accept(tokenizer.encode("a")[0])
    assert allowed(matcher) == [EOS]
    assert matcher.accept(EOS)
    assert matcher.accept(EOS)


def test_without_any_stop_id_a_request_is_rejected(compiled: Callable[..., Grammar]) -> None:
    grammar = compiled(regex="a")
    without = Grammar(grammar._start, VOCAB_SIZE, grammar._end_token_id, None)
    with pytest.raises(InvalidRequestError, match=r"^stop_token_ids=\[\]: .*no eos token"):
        without.matcher([])


@pytest.mark.parametrize("vocab_size", [2048, 2049, 2050, 2079, 2080, 2081, 2304, 2000])
def test_padding_is_never_allowed(tokenizer: Tokenizer, vocab_size: int) -> None:
    grammar = compile_grammar(PARAMS["text"], tokenizer, vocab_size)
    matcher = grammar.matcher([EOS])
    ids = allowed_ids(mask_of(matcher, -(-vocab_size // 32)))
    assert ids[0] == EOS
    assert len(ids) > 1000
    assert max(ids) < min(vocab_size, 2048)
    for padding in range(2048, vocab_size + 2):
        assert not matcher.accept(padding)
    assert not matcher.accept(-1)


def test_what_the_library_gives_up_on_ends_and_can_be_taken_back(
    tokenizer: Tokenizer, compiled: Callable[..., Grammar]
) -> None:
    # each letter may end any of the counters, until the library has too many expressions
    grammar = compiled(regex="(((a{1,1000}){1,1000}){1,1000}){1,1000}")
    matcher, (letter,) = grammar.matcher([EOS]), tokenizer.encode("a")
    steps = 0
    while matcher.error is None:
        words = mask_of(matcher)
        if matcher.error is None and matcher.accept(letter):
            steps += 1
    assert "too many expressions" in matcher.error
    assert "\n" not in matcher.error
    assert matcher.num_accepted == steps > 3
    assert allowed_ids(words) == [EOS]
    # the automata are shared: what one text has used up is not another's to miss
    with_masks = grammar.matcher([EOS])
    for _ in range(steps):
        assert letter in allowed(with_masks)
        assert with_masks.accept(letter)
    assert with_masks.error is None
    matcher.rollback(steps - 3)
    np.testing.assert_array_equal(mask_of(matcher), mask_of(from_scratch(grammar, [letter] * 3, [EOS])))


def test_wrong_calls_are_rejected(compiled: Callable[..., Grammar]) -> None:
    matcher = compiled(regex="a+").matcher([EOS])
    for out in (np.zeros(NUM_WORDS + 1, np.int32), np.zeros((1, NUM_WORDS), np.int32), np.zeros(NUM_WORDS, np.int64)):
        with pytest.raises(SpecrsError, match=r"^out=.*: must be int32 of shape \(64,\)"):
            matcher.fill_mask(out)
    for count in (1, -1):
        with pytest.raises(SpecrsError, match=rf"^num_tokens={count}: must be from 0 to num_accepted=0"):
            matcher.rollback(count)
    with pytest.raises(SpecrsError, match=r"^stop_ids=2048: must be from 0 to 2047"):
        compiled(regex="a+").matcher([2048])


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 63, 64, 100, 2048])
def test_unpack_mask(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    forbidden = torch.rand(5, vocab_size, generator=generator) < 0.5
    words = torch.zeros(5, -(-vocab_size // 32), dtype=torch.int64)
    for row, token in (~forbidden).nonzero().tolist():
        words[row, token // 32] |= 1 << token % 32
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    unpacked = unpack_mask(words, vocab_size)
    assert unpacked.dtype == torch.bool
    assert torch.equal(unpacked, forbidden)
    assert torch.equal(unpack_mask(words[::2], vocab_size), forbidden[::2])


@pytest.mark.parametrize("name", PARAMS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_drafts_without_a_layout_are_the_tokens_that_must_come(
    grammars: dict[str, Grammar], name: str, data: st.DataObject
) -> None:
    stop_ids = data.draw(st.sampled_from([[EOS], [EOS, 5]]))
    matcher = grammars[name].matcher(stop_ids)
    matcher._start.layout = Layout(lambda token: b"text")
    for _ in range(data.draw(st.integers(0, 12))):
        before = mask_of(matcher)
        forced = matcher.drafts(data.draw(st.integers(1, 6)))
        assert (mask_of(matcher) == before).all()
        assert matcher.error is None
        for token in forced:
            assert allowed(matcher) == [token]
            assert matcher.accept(token)
        choices = allowed(matcher)
        if not forced and len(choices) == 1 and len(stop_ids) == 1:
            # what one token of the vocabulary can follow, the library need not know: a lone byte of a character
            assert choices == stop_ids or name in ("text", "object", "schema")
        if not matcher.accept(data.draw(st.sampled_from(choices))):
            raise AssertionError("an allowed token was rejected")


@pytest.mark.parametrize("name", PARAMS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_draft_is_allowed(
    grammars: dict[str, Grammar], tokenizer: Tokenizer, name: str, data: st.DataObject
) -> None:
    """Check that every draft is allowed, including guesses of the layout, which the first text of a grammar leaves for
    the second."""
    layout = Layout(lambda token: tokenizer.decode([token]).encode())
    for _ in range(2):
        matcher = grammars[name].matcher([EOS])
        matcher._start.layout = layout
        for _ in range(data.draw(st.integers(0, 20))):
            before, most = mask_of(matcher), data.draw(st.integers(1, 6))
            drafts = matcher.drafts(most)
            assert len(drafts) <= most
            assert (mask_of(matcher) == before).all()
            num_taken = data.draw(st.integers(0, len(drafts)))
            for token in drafts[:num_taken]:
                assert token in allowed(matcher)
                assert matcher.accept(token)
            assert matcher.accept(data.draw(st.sampled_from(allowed(matcher))))


def test_a_layout_is_drafted_from_its_second_time_on(compiled: Callable[..., Grammar], tokenizer: Tokenizer) -> None:
    keys = ("first", "second", "third")
    schema = {"type": "object", "properties": {key: {"type": "integer"} for key in keys}, "required": [*keys]}
    schema["additionalProperties"] = False
    grammar, values = compiled(json=schema), dict(zip(keys, (1, 22, 333), strict=True))
    for indent in (2, None, 4):
        matcher, drafted = grammar.matcher([EOS]), 0
        tokens = tokenizer.encode(json.dumps(values, indent=indent), add_special_tokens=False)
        place = 0
        while place < len(tokens):
            drafts = matcher.drafts(16)
            right = sum(itertools.takewhile(bool, map(operator.eq, drafts, tokens[place:])))
            drafted += right
            for token in tokens[place : place + right + 1]:
                assert matcher.accept(token)
            place += right + 1
        assert drafted > len(tokens) / 3, (indent, drafted, len(tokens))


def test_a_text_that_must_end_forces_the_only_stop_id(compiled: Callable[..., Grammar], tokenizer: Tokenizer) -> None:
    grammar = compiled(choice=["red"])
    red = tokenizer.encode("red", add_special_tokens=False)
    assert grammar.matcher([EOS]).drafts(9) == [*red, EOS]
    assert grammar.matcher([EOS]).drafts(len(red)) == red
    assert grammar.matcher([EOS, 5]).drafts(9) == red
    ended = grammar.matcher([EOS])
    assert all(map(ended.accept, [*red, EOS]))
    assert ended.drafts(9) == []
