"""Builds a byte-level BPE tokenizer from a GGUF file.

A file names the rule by which text is normalized and split before merges. A wrong rule gives other ids without an
error, so an unknown name is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specrs.errors import CheckpointError, short
from specrs.models.gguf.vocabulary import Vocabulary, refused, strings

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_QWEN35 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2, _DIGITS = "gpt2", "digits"
"""Rules for splitting text: ByteLevel's own expression, and each digit by itself before it."""
SPLITS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "lfm2", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "jais", "mpt"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
}
"""Rule by which text is split into words before merges, for each value of `tokenizer.ggml.pre`."""
NFC = frozenset({"qwen2", "qwen35", "deepseek-r1-qwen", "olmo", "mpt", "command-r"})
"""Values of `tokenizer.ggml.pre` whose tokenizers normalize text to NFC first, as their `tokenizer.json` does."""
WHOLE_WORDS = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "lfm2", "tekken"})
"""Values of `tokenizer.ggml.pre` whose tokenizers look a whole word up before they merge its parts. If the file does
not say otherwise, they put BOS before a text."""


def byte_level(vocabulary: Vocabulary) -> Tokenizer:
    """Return the tokenizer without added tokens and post-processor. Raises CheckpointError for a kind of tokenizer that
    is not implemented, and for wrong merges."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    file, ids = vocabulary.file, vocabulary.ids
    name = file.metadata.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in SPLITS:
        raise refused(file, "tokenizer.ggml.pre", name, ", ".join(SPLITS))
    merges = read_merges(vocabulary)
    split = SPLITS[name]
    try:
        made = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=name in WHOLE_WORDS))
    except Exception:
        check_merges(vocabulary, merges)
        raise
    if name in NFC:
        made.normalizer = normalizers.NFC()
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split in (_GPT2, _DIGITS))
    steps: dict[str, Any] = {
        _GPT2: [bytes_alone],
        _DIGITS: [pre_tokenizers.Digits(individual_digits=True), bytes_alone],
    }
    made.pre_tokenizer = pre_tokenizers.Sequence(
        steps.get(split) or [pre_tokenizers.Split(Regex(split), "isolated"), bytes_alone]
    )
    made.decoder = decoders.ByteLevel()
    return made


def read_merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Return the pairs of tokens in the file's list of merges. Raises CheckpointError if there is no such list."""
    return [(left, right) for left, _, right in (merge.partition(" ") for merge in strings(vocabulary.file, "merges"))]


def check_merges(vocabulary: Vocabulary, merges: list[tuple[str, str]]) -> None:
    """Raise CheckpointError for the first pair that is not of the vocabulary, or whose joined token is not."""
    for i, (left, right) in enumerate(merges):
        if not {left, right, left + right} <= vocabulary.ids.keys():
            at = f"tokenizer.ggml.merges[{i}]={short(f'{left} {right}')}"
            raise CheckpointError(f"{vocabulary.file.path}: {at}: no tokens of the vocabulary")
