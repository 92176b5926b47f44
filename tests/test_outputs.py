"""Derived figures, from a histogram counted by hand."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import tokenizers
from specrs.engine.output_builder import TokenTexts
from specrs.outputs import AcceptanceFigures, EngineStats, RequestMetrics
from specrs.tokenizer import Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Metaspace, Sequence


def test_figures_of_a_histogram() -> None:
    # ten drafts: four with no token accepted, three with one, two with two, one with all three; two drafted only one
    figures = AcceptanceFigures(draft_tokens=26, acceptance_histogram=[4, 3, 2, 1])
    assert (figures.drafts, figures.accepted_tokens) == (10, 10)
    assert figures.acceptance_length == 2.0
    assert figures.acceptance_rate == pytest.approx(10 / 26)
    assert figures.accepted_per_position == [6, 3, 1]
    assert figures.per_position == [0.6, 0.3, 0.1]


def test_nothing_drafted() -> None:
    for figures in (EngineStats(), RequestMetrics(), AcceptanceFigures(acceptance_histogram=[0, 0, 0])):
        assert (figures.drafts, figures.acceptance_length, figures.acceptance_rate) == (0, 1.0, 0.0)
    assert AcceptanceFigures(acceptance_histogram=[0, 0, 0]).per_position == [0.0, 0.0]


def test_times_that_did_not_happen() -> None:
    assert RequestMetrics(arrival_time=1.0).time_to_first_token is None
    metrics = RequestMetrics(arrival_time=1.0, first_token_time=1.5, finish_time=3.5, num_generated_tokens=5)
    assert (metrics.time_to_first_token, metrics.latency, metrics.time_per_output_token) == (0.5, 2.5, 0.5)
    one = RequestMetrics(arrival_time=1.0, first_token_time=1.5, finish_time=1.5, num_generated_tokens=1)
    assert one.time_per_output_token is None


def test_tokens_by_themselves(tokenizer: Tokenizer) -> None:
    texts = TokenTexts(tokenizer)
    backend = tokenizer.backend
    for text in ("return", " return", "\n    ", "(", "<|endoftext|>"):
        (token,) = tokenizer.encode(text)[:1]
        assert texts[token] == backend.decode([token], skip_special_tokens=False)
    assert texts[tokenizer.encode("<|endoftext|>")[0]] == "<|endoftext|>"
    assert "\ufffd" in texts[tokenizer.encode("\N{PARTY POPPER}")[0]]


def test_a_word_keeps_its_blank_where_decoders_drop_it() -> None:
    vocabulary = {"\u2581def": 0, "x": 1, "\u2581": 2, "<0xC3>": 3, "<0xA9>": 4}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="x"))
    backend.decoder = Sequence([ByteFallback(), Metaspace(), Fuse()])

    def decode(ids: list[int], *, skip_special_tokens: bool) -> str:
        return str(backend.decode(ids, skip_special_tokens=skip_special_tokens))

    assert decode([0], skip_special_tokens=False) == "def"
    texts = TokenTexts(cast(Any, SimpleNamespace(decode=decode)))
    assert [texts[token] for token in range(5)] == [" def", "x", " ", "\ufffd", "\ufffd"]


def test_a_token_that_would_be_a_character_next_to_itself() -> None:
    def decode(ids: list[int], *, skip_special_tokens: bool) -> str:
        return (b"\xa9\xc3" * len(ids)).decode(errors="replace")

    assert TokenTexts(cast(Any, SimpleNamespace(decode=decode)))[0] == "\ufffd\ufffd"
