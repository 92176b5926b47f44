"""Sentencepiece vocabularies in GGUF files: ids and texts equal those of the library sentencepiece."""

from __future__ import annotations

import json
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from checkpoints import write_tokenizer
from gguf_files import write_metadata
from hypothesis import example, given
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor
from sentencepiece_files import USER_DEFINED, corpus, metadata_of, train
from specrs.errors import CheckpointError
from specrs.models.gguf.vocabulary import end_ids
from specrs.tokenizer import Tokenizer
from tokenizers import Tokenizer as Backend
from transformers import LlamaTokenizer

LINES = corpus()
VOCABULARIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {}),
    "across words": ({"split_by_whitespace": False}, {"add_space_prefix": True}),
    "no prefix": ({"add_dummy_prefix": False}, {"add_space_prefix": False}),
    "stripped": ({"remove_extra_whitespaces": True}, {"remove_extra_whitespaces": True}),
    "stripped, no prefix": (
        {"remove_extra_whitespaces": True, "add_dummy_prefix": False},
        {"remove_extra_whitespaces": True, "add_space_prefix": False},
    ),
    "no bytes": ({"byte_fallback": False}, {}),
}
"""Settings of the trainer, and the metadata of a file, by name."""
SPECIAL = ("<s>", "</s>", "<unk>", *USER_DEFINED)


class Pair(NamedTuple):
    spm: SentencePieceProcessor
    ours: Tokenizer

    def encode(self, text: str) -> list[int]:
        return self.ours.encode(text, add_special_tokens=False)


@pytest.fixture(scope="module", params=VOCABULARIES)
def vocabulary(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    settings, fields = VOCABULARIES[request.param]
    spm = train(LINES, **settings)
    path = write_metadata(tmp_path_factory.mktemp("spm") / "model.gguf", metadata_of(spm, **fields))
    return Pair(spm, Tokenizer(str(path)))


@pytest.fixture(scope="module")
def llama() -> SentencePieceProcessor:
    return train(LINES)


TEXTS = st.one_of(
    st.text("ab \n", max_size=40),
    st.text("abcdefx() \t\né日\u0301\u2581🎉\x00", max_size=20),
    st.lists(st.sampled_from(LINES), max_size=2).map(" ".join),
    st.text(max_size=10),
).filter(lambda text: not any(token in text for token in SPECIAL))


@given(text=TEXTS)
@example("")
@example(" ")
@example("   a  b   ")
@example("a\n\n  b 🎉é")
def test_ids_and_text_are_those_of_sentencepiece(vocabulary: Pair, text: str) -> None:
    ids = vocabulary.spm.encode(text)
    assert vocabulary.encode(text) == ids
    if "\u2581" in text:  # which the library takes for a space of its own when it strips them
        return
    decoded = vocabulary.spm.decode(ids).replace(" \u2047 ", "<unk>")  # how the library writes the unknown token
    for found in (vocabulary.ours.decode, vocabulary.ours.decoder.decode):
        assert found(ids, skip_special_tokens=False) == decoded


@given(parts=st.lists(st.one_of(TEXTS, st.sampled_from(SPECIAL)), max_size=6))
@example(["<s>", "a cat", "</s>", " a cat", "<|user|>", "\n", "<tool>"])
def test_each_text_between_special_tokens_is_encoded_as_a_whole_one(vocabulary: Pair, parts: list[str]) -> None:
    text, expected = "".join(parts), []
    for part in re.split("(" + "|".join(map(re.escape, SPECIAL)) + ")", text):
        expected += [vocabulary.spm.piece_to_id(part)] if part in SPECIAL else vocabulary.spm.encode(part)
    assert vocabulary.encode(text) == expected


@pytest.mark.parametrize("seed", range(8))
def test_order_of_merges_in_vocabularies_of_two_letters(seed: int, tmp_path: Path) -> None:
    """Check the order of merges in vocabularies of two letters: many pieces can be made in several ways and overlap, so
    a wrong order shows."""
    rng = random.Random(seed)
    weights = [rng.random() for _ in "ab "]

    def text(longest: int) -> str:
        return "".join(rng.choices("ab ", weights, k=rng.randrange(1, longest)))

    spm = train(
        [text(60) for _ in range(300)],
        vocab_size=261 + rng.randrange(8, 60),
        split_by_whitespace=bool(seed % 2),
        user_defined_symbols=[],
    )
    ours = Tokenizer(str(write_metadata(tmp_path / "model.gguf", metadata_of(spm))))
    for _ in range(300):
        given = text(40)
        assert ours.encode(given, add_special_tokens=False) == spm.encode(given), given


def test_ids_are_those_of_transformers_without_special_tokens(llama: SentencePieceProcessor, tmp_path: Path) -> None:
    """Check ids against transformers without special tokens. Its `legacy=False` differs from sentencepiece only in
    texts that begin with a space."""
    metadata = metadata_of(llama)
    ours = Tokenizer(str(write_metadata(tmp_path / "model.gguf", metadata)))
    merges = [tuple(merge) for merge in _json(ours)["model"]["merges"]]
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    theirs = LlamaTokenizer(vocab=vocab, merges=merges, legacy=False, add_bos_token=True)
    for line in LINES:
        if not line.startswith(" "):
            assert ours.encode(line) == theirs.encode(line)


def _json(tokenizer: Tokenizer) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(tokenizer.backend.to_str())
    return content


@pytest.mark.parametrize("eos", [None, False, True])
@pytest.mark.parametrize("bos", [None, False, True])
def test_tokens_around_a_text(
    bos: bool | None, eos: bool | None, llama: SentencePieceProcessor, tmp_path: Path
) -> None:
    """Check BOS and EOS around a text. A file that does not mention BOS has one, as in llama.cpp."""
    fields = {"add_bos_token": bos, "add_eos_token": eos}
    ours = Tokenizer(str(write_metadata(tmp_path / "model.gguf", metadata_of(llama, **fields))))
    first, last = [] if bos is False else [llama.bos_id()], [llama.eos_id()] if eos else []
    assert ours.encode("a cat") == [*first, *llama.encode("a cat"), *last]
    assert ours.encode("") == [*first, *last]
    assert ours.decode(ours.encode(" a  cat")) == " a  cat"


def test_special_ids_of_sentencepiece_hold_where_the_file_names_none(
    llama: SentencePieceProcessor, tmp_path: Path
) -> None:
    fields = dict.fromkeys(("bos_token_id", "eos_token_id", "unknown_token_id"))
    ours = Tokenizer(str(write_metadata(tmp_path / "model.gguf", metadata_of(llama, **fields))))
    assert ours.special_tokens_map == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert end_ids(metadata_of(llama, **fields)) == [2]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scores": None}, r"tokenizer\.ggml\.scores=None: not implemented; allowed: a list of \d+ finite numbers"),
        ({"scores": [0.0]}, r"tokenizer\.ggml\.scores=\[0\.0\]: not implemented"),
        ({"precompiled_charsmap": [1, 2]}, r"tokenizer\.ggml\.precompiled_charsmap=\[1, 2\]: not implemented"),
        ({"add_space_prefix": 1}, r"tokenizer\.ggml\.add_space_prefix=1: not implemented; allowed: true or false"),
        ({"remove_extra_whitespaces": "x"}, r"remove_extra_whitespaces='x': not implemented; allowed: true or false"),
        ({"model": "t5"}, r"tokenizer\.ggml\.model='t5': not implemented; allowed: 'gpt2' .*'llama' .* or 'gemma4'"),
    ],
)
def test_vocabularies_that_are_rejected(
    fields: dict[str, Any], message: str, llama: SentencePieceProcessor, tmp_path: Path
) -> None:
    path = write_metadata(tmp_path / "model.gguf", metadata_of(llama, **fields))
    with pytest.raises(CheckpointError, match=message + r"(?s:.*)pass tokenizer=\.\.\."):
        Tokenizer(str(path))


def test_a_vocabulary_must_have_a_token_for_what_it_does_not_know(tmp_path: Path) -> None:
    spm = train(LINES, byte_fallback=False)
    kinds = [3 if kind == 2 else kind for kind in metadata_of(spm)["tokenizer.ggml.token_type"]]
    path = write_metadata(tmp_path / "model.gguf", metadata_of(spm, unknown_token_id=None, token_type=kinds))
    with pytest.raises(CheckpointError, match=r"unknown_token_id=None: not implemented; allowed: an id, or a voc"):
        Tokenizer(str(path))


def test_padding_has_no_text(llama: SentencePieceProcessor, tmp_path: Path) -> None:
    plain = metadata_of(llama)
    size = len(plain["tokenizer.ggml.tokens"])
    more: dict[str, list[Any]] = {"tokens": ["[PAD1]", "[PAD2]"], "scores": [-1000.0] * 2, "token_type": [5, 5]}
    fields = {name: plain[f"tokenizer.ggml.{name}"] + values for name, values in more.items()}
    ours = Tokenizer(str(write_metadata(tmp_path / "model.gguf", metadata_of(llama, **fields))))
    assert ours.unused_ids == {size, size + 1}
    assert ours.vocab_size == size
    assert ours.decode([size, *llama.encode("a cat"), size + 1]) == "a cat"
    assert ours.encode("[PAD1]", add_special_tokens=False) == llama.encode("[PAD1]")


def test_a_file_next_to_another_tokenizer_uses_its_own(llama: SentencePieceProcessor, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 400)
    path = write_metadata(tmp_path / "model.gguf", metadata_of(llama))
    for source in (path, tmp_path):
        assert Tokenizer(str(source)).encode("a cat") == [llama.bos_id(), *llama.encode("a cat")]
    assert Backend.from_file(str(tmp_path / "tokenizer.json")).encode("a cat").ids != llama.encode("a cat")


def test_text_never_has_an_unused_id(llama: SentencePieceProcessor, tmp_path: Path) -> None:
    kinds = metadata_of(llama)["tokenizer.ggml.token_type"]
    unused = llama.piece_to_id("\u2581banana")
    assert llama.encode("banana") == [unused]
    kinds[unused] = 5
    ours = Tokenizer(str(write_metadata(tmp_path / "model.gguf", metadata_of(llama, token_type=kinds))))
    ids = ours.encode("banana", add_special_tokens=False)
    assert unused not in ids
    assert ours.decode(ids) == "banana"


def _highest_score_first(text: str, scores: dict[str, float]) -> list[str]:
    """Return the pieces of `text`: the pair with the highest score is joined first, the leftmost of equal ones."""
    pieces = list(text)
    while True:
        pairs = [(scores.get(a + b), -i) for i, (a, b) in enumerate(pairwise(pieces))]
        known = [(score, i) for score, i in pairs if score is not None]
        if not known:
            return pieces
        at = -max(known)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


@st.composite
def _scores(draw: st.DrawFn) -> dict[str, float]:
    """Draw scores of the letters a, b and c and of pieces made of two others. Some scores are equal."""
    pieces = ["a", "b", "c"]
    for _ in range(draw(st.integers(1, 9))):
        joined = draw(st.sampled_from(pieces)) + draw(st.sampled_from(pieces))
        if joined not in pieces and len(joined) < 9:
            pieces.append(joined)
    distinct = draw(st.permutations(range(len(pieces))))
    step = draw(st.sampled_from([1, 1, 3]))
    return {piece: -float(score // step) for piece, score in zip(pieces, distinct, strict=True)}


@given(scores=_scores(), texts=st.lists(st.text("abc", min_size=1, max_size=20), min_size=5, max_size=20))
@example(scores={"a": 0.0, "b": 0.0, "c": 0.0, "ab": -1.0, "bc": -2.0, "abc": -3.0}, texts=["abcbcab"])
@example(scores={"a": 0.0, "b": 0.0, "c": 0.0, "ab": -1000.0, "bc": -1000.0}, texts=["abc", "cbcabc"])
def test_a_vocabulary_is_read_as_its_scores_say_or_rejected(
    scores: dict[str, float], texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    fields = {
        "model": "llama",
        "tokens": ["<unk>", *scores],
        "scores": [0.0, *scores.values()],
        "token_type": [2, *[1] * len(scores)],
        "add_space_prefix": False,
        "add_bos_token": False,
    }
    metadata = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    path = str(write_metadata(tmp_path_factory.mktemp("scores") / "model.gguf", metadata))
    merged = [score for piece, score in scores.items() if len(piece) > 1]
    if len(set(merged)) < len(merged):
        with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.scores=\[.*unlike '.*pass tokenizer=\.\.\."):
            Tokenizer(path)
        return
    ours = Tokenizer(path)
    for text in texts:
        assert ours.backend.encode(text).tokens == _highest_score_first(text, scores)


def test_equal_scores_of_tokens_that_are_not_merged_are_accepted(llama: SentencePieceProcessor, tmp_path: Path) -> None:
    """Check that equal scores of unmerged tokens are accepted: converters write one score for all control, byte, added
    and padding tokens."""
    plain = metadata_of(llama)
    kinds, scores = plain["tokenizer.ggml.token_type"], plain["tokenizer.ggml.scores"]
    scores = [score if kind == 1 else -1000.0 for score, kind in zip(scores, kinds, strict=True)]
    letters = {
        i
        for i, (piece, kind) in enumerate(zip(plain["tokenizer.ggml.tokens"], kinds, strict=True))
        if kind == 1 and len(piece) == 1
    }
    scores = [0.0 if i in letters else score for i, score in enumerate(scores)]
    ours = Tokenizer(str(write_metadata(tmp_path / "model.gguf", metadata_of(llama, scores=scores))))
    for line in LINES[:50]:
        assert ours.encode(line, add_special_tokens=False) == llama.encode(line)
