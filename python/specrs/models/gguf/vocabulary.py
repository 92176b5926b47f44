"""The vocabulary in a GGUF file: tokens, their types, special ids, and the ids that end a text. Splits no text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from specrs.errors import CheckpointError, invalid
from specrs.models.errors import malformed
from specrs.models.gguf.file import GGUFFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens, `tokenizer.ggml.token_type`. Unused ones are mostly padding (`[PAD32000]`) and have no text."""

_DEFAULT_IDS = {"bos": (1, CONTROL), "eos": (2, CONTROL), "unknown": (0, UNKNOWN)}
"""Id and type of sentencepiece's special tokens, for files that do not name them."""

_END_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_END_NAMES = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"),
        *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>", "<turn|>"),
        *("<end_of_turn>", "<end_of_utterance>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~["),
        *("<\uff5cend\u2581of\u2581sentence\uff5c>", "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
        *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
    }
)
"""Names that end a text in llama.cpp, whatever ids the file names. `</s>` is not among them: it is an HTML tag in some
vocabularies, and where it is the end, the file names its id."""
_MESSAGE_END = "<|end|>"
_MESSAGE_FORMATS = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})
"""Vocabularies with both tokens of a set write several messages in a turn, and `<|end|>` ends only one of them."""


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of a file. `kinds` has the type of each token, `size` the number of ids up to the last one in use."""

    file: GGUFFile
    tokens: list[str]
    kinds: list[int]
    size: int

    @cached_property
    def ids(self) -> dict[str, int]:
        """Id of each token, without the unused ones at the end."""
        return dict(zip(self.tokens, range(self.size), strict=False))

    @property
    def unused_ids(self) -> frozenset[int]:
        """Ids that stand for no text."""
        return frozenset(i for i, kind in enumerate(self.kinds) if kind == UNUSED)

    def special(self, role: str) -> str | None:
        """The token that the file names for a role (`bos`, `eos`, `unknown`, `padding`), None without one.

        Raises CheckpointError for an id that no token has.
        """
        value = special_id(self.file.metadata, role)
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < len(self.tokens):
            raise refused(self.file, f"tokenizer.ggml.{role}_token_id", value, f"an id below {len(self.tokens)}")
        return self.tokens[value]

    def flag(self, name: str, default: bool) -> bool:
        """The file's `tokenizer.ggml.<name>`. Raises CheckpointError if it is neither true nor false."""
        value = self.file.metadata.get(f"tokenizer.ggml.{name}", default)
        if type(value) is not bool:
            raise refused(self.file, f"tokenizer.ggml.{name}", value, "true or false")
        return value


def read_vocabulary(file: GGUFFile) -> Vocabulary:
    """The tokens of a file. Raises CheckpointError for a list that is missing, empty or has a token twice."""
    tokens = strings(file, "tokens")
    if not tokens:
        raise refused(file, "tokenizer.ggml.tokens", tokens, "a list of at least one string")
    if len(set(tokens)) < len(tokens):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.tokens has the same token twice")
    kinds = file.metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise refused(
            file,
            "tokenizer.ggml.token_type",
            kinds,
            f"a list of {len(tokens)} numbers, as many as tokenizer.ggml.tokens",
        )
    named = (special_id(file.metadata, role) for role in ("bos", "eos", "unknown", "padding"))
    used = [i for i, kind in enumerate(kinds) if kind != UNUSED]
    used += [i for i in named if type(i) is int and 0 <= i < len(tokens)]
    size = max(used, default=-1) + 1
    return Vocabulary(file, tokens, kinds, size)


def special_id(metadata: Mapping[str, Any], role: str) -> Any:
    """The id that the metadata name for a role, or sentencepiece's default where a token of the right type has it.

    The value is not checked. None: there is no such token.
    """
    value = metadata.get(f"tokenizer.ggml.{role}_token_id")
    if value is not None or metadata.get("tokenizer.ggml.model") != "llama" or role not in _DEFAULT_IDS:
        return value
    default, kind = _DEFAULT_IDS[role]
    kinds = metadata.get("tokenizer.ggml.token_type")
    known = isinstance(kinds, list) and len(kinds) > default and kinds[default] == kind
    return default if known else None


def end_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Ids that end a text: those that the metadata name for it, and tokens whose names mean an end.

    A name counts unless the token is of type normal, which ordinary text may be. Raises CheckpointError for an id that
    is no integer.
    """
    ids = {role: special_id(metadata, role) for role in _END_ROLES}
    for role, value in ids.items():
        if value is not None and type(value) is not int:
            raise malformed(f"tokenizer.ggml.{role}_token_id", value, "an id")
    tokens, kinds = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    named: dict[str, int] = {}
    if isinstance(tokens, list):
        typed = isinstance(kinds, list) and len(kinds) == len(tokens)
        named = {
            token: i
            for i, token in enumerate(tokens)
            if isinstance(token, str) and token in _END_NAMES and not (typed and kinds[i] == NORMAL)  # type: ignore[index]
        }
    found = dict.fromkeys([*(value for value in ids.values() if value is not None), *named.values()])
    if any(both <= named.keys() for both in _MESSAGE_FORMATS):
        found.pop(named.get(_MESSAGE_END, -1), None)
    return list(found)


def strings(file: GGUFFile, name: str) -> list[str]:
    """The file's `tokenizer.ggml.<name>`. Raises CheckpointError if it is no list of strings."""
    value = file.metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise refused(file, f"tokenizer.ggml.{name}", value, "a list of strings")
    return value


def refused(file: GGUFFile, field: str, value: object, allowed: str) -> CheckpointError:
    """The error for a field of a tokenizer that cannot be built."""
    also = "; or pass tokenizer=..., the folder or hub id of the model that the file was made of"
    return invalid(CheckpointError, field, value, f"not implemented; allowed: {allowed}{also} ({file.path})")
