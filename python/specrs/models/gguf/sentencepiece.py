"""Builds a sentencepiece BPE tokenizer from a GGUF file, without the library sentencepiece. A file has scores of
pieces, or for Gemma 4 a list of merges.

Sentencepiece merges the two neighbours whose joined piece has the highest score; of equal scores, the leftmost. Here
that order is a list of merges, which cannot express "leftmost" for two different pieces. So vocabularies in which two
merged pieces have the same score are rejected. Each text between special tokens is encoded as sentencepiece encodes a
whole text, with a space in front, as llama.cpp does.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from specrs.models.gguf.byte_level import check_merges, read_merges
from specrs.models.gguf.vocabulary import NORMAL, Vocabulary, refused

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.normalizers import Normalizer

_SPACE = "\u2581"
"""Character that stands for a space in pieces of sentencepiece."""


def sentencepiece(vocabulary: Vocabulary) -> Tokenizer:
    """Return the tokenizer without added tokens and post-processor. Raises CheckpointError for a kind of tokenizer that
    is not implemented, and for wrong scores."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers

    file, ids = vocabulary.file, vocabulary.ids
    charsmap = file.metadata.get("tokenizer.ggml.precompiled_charsmap")
    if charsmap:
        # `normalizers.Precompiled` maps whole graphemes: of a ligature with an accent it drops the accent.
        raise refused(file, "tokenizer.ggml.precompiled_charsmap", charsmap, "a file without it")
    unknown, has_bytes = vocabulary.special("unknown"), _has_bytes(vocabulary)
    bpe = models.BPE(vocab=ids, merges=_merges(vocabulary), unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes)
    made = Tokenizer(bpe)
    prefix = vocabulary.flag("add_space_prefix", True)
    strips = vocabulary.flag("remove_extra_whitespaces", False)
    steps: list[Normalizer] = []
    if strips:
        steps += [normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if prefix:
        steps.append(normalizers.Prepend(_SPACE))
    steps.append(normalizers.Replace(" ", _SPACE))
    if strips:
        steps.append(normalizers.Replace(Regex(rf"{_SPACE}+\z"), ""))
    made.normalizer = normalizers.Sequence(steps)
    decoding = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix or strips:
        decoding.append(decoders.Strip(" ", 1, 0))
    made.decoder = decoders.Sequence(decoding)
    return made


def listed_merges(vocabulary: Vocabulary) -> Tokenizer:
    """Return the tokenizer of Gemma 4, whose files list merges of characters: without added tokens and post-processor.
    Texts are not split before merges, and get no space in front. Raises CheckpointError for a kind of tokenizer that is
    not implemented, and for wrong merges."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    file, ids, merges = vocabulary.file, vocabulary.ids, read_merges(vocabulary)
    if vocabulary.flag("add_space_prefix", False):
        raise refused(file, "tokenizer.ggml.add_space_prefix", True, "false for tokenizer.ggml.model='gemma4'")
    unknown, has_bytes = vocabulary.special("unknown"), _has_bytes(vocabulary)
    try:
        bpe = models.BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes)
    except Exception:
        check_merges(vocabulary, merges)
        raise
    made = Tokenizer(bpe)
    made.normalizer = normalizers.Replace(" ", _SPACE)
    made.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


def _has_bytes(vocabulary: Vocabulary) -> bool:
    """Return whether the vocabulary has a token for every byte. Raises CheckpointError if it has neither these nor a
    token for unknown text."""
    has_bytes = all(f"<0x{byte:02X}>" in vocabulary.ids for byte in range(256))
    if vocabulary.special("unknown") is None and not has_bytes:
        allowed = "an id, or a vocabulary with all bytes <0x00> to <0xFF>"
        raise refused(vocabulary.file, "tokenizer.ggml.unknown_token_id", None, allowed)
    return has_bytes


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Return pairs of pieces in the order in which they are merged: by the score of the joined piece, highest first.

    Raises CheckpointError for scores that are missing or are no numbers, and for two merged pieces with the same score.
    """
    scores = vocabulary.file.metadata.get("tokenizer.ggml.scores")
    count = len(vocabulary.tokens)
    if not isinstance(scores, list) or len(scores) != count or not all(map(_is_number, scores)):
        allowed = f"a list of {count} finite numbers, as many as tokenizer.ggml.tokens"
        raise refused(vocabulary.file, "tokenizer.ggml.scores", scores, allowed)
    pieces = {
        token: score
        for token, kind, score in zip(vocabulary.tokens, vocabulary.kinds, scores, strict=True)
        if kind == NORMAL
    }
    pairs: list[tuple[float, int, str, str]] = []
    beginnings: list[str] = []  # pieces that `token` begins with, the shortest first; a sorted list has them before it
    for token in sorted(pieces):
        while beginnings and not token.startswith(beginnings[-1]):
            beginnings.pop()
        for left in beginnings:
            right = token[len(left) :]
            if right in pieces:
                pairs.append((-pieces[token], len(left), left, right))
        beginnings.append(token)
    merged: dict[float, str] = {}
    for score, _, left, right in pairs:
        other = merged.setdefault(score, left + right)
        if other != left + right:
            allowed = f"different scores for all normal pieces that are merged, unlike {other!r} and {left + right!r}"
            raise refused(vocabulary.file, "tokenizer.ggml.scores", [-score, -score], allowed)
    return [(left, right) for _, _, left, right in sorted(pairs)]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
