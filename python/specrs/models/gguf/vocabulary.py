"""Vocabulary of a GGUF file: tokens, their types, special ids, and the ids that end a text. Splits no text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from specrs.errors import CheckpointError, invalid
from specrs.models.errors import malformed
from specrs.models.gguf.file import GGUFFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens in `tokenizer.ggml.token_type`. Unused tokens are mostly padding (`[PAD32000]`) and have no text."""

_DEFAULT_IDS = {"bos": (1, CONTROL), "eos": (2, CONTROL), "unknown": (0, UNKNOWN)}
"""For sentencepiece's special tokens, (id, type) in files that do not name them."""

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
"""Names of tokens that end a text in llama.cpp, whatever ids the file names. `</s>` is not among them: in some
vocabularies it is an HTML tag, and if it ends texts, the file names its id."""
_MESSAGE_END = "<|end|>"
_MESSAGE_FORMATS = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})
"""Sets of tokens. A vocabulary with both tokens of a set writes several messages in a turn, and `<|end|>` ends only one
of them."""


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
        """Return the token that the file names for a role (`bos`, `eos`, `unknown`, `padding`), else the tokenizer's
        default as `special_id` has it; None if there is none.

        Raises CheckpointError for an id that no token has.
        """
        value = special_id(self.file.metadata, role)
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < len(self.tokens):
            raise refused(self.file, f"tokenizer.ggml.{role}_token_id", value, f"an id below {len(self.tokens)}")
        return self.tokens[value]

    def flag(self, name: str, default: bool) -> bool:
        """Return the file's `tokenizer.ggml.<name>`; `default` if it is missing. Raises CheckpointError if it is
        neither true nor false."""
        value = self.file.metadata.get(f"tokenizer.ggml.{name}", default)
        if type(value) is not bool:
            raise refused(self.file, f"tokenizer.ggml.{name}", value, "true or false")
        return value


def read_vocabulary(file: GGUFFile) -> Vocabulary:
    """Read the tokens of a file. Raises CheckpointError if the list is missing or empty, or has a token twice."""
    tokens = strings(file, "tokens")
    if not tokens:
        raise refused(file, "tokenizer.ggml.tokens", tokens, "a list of at least one string")
    known: set[str] = set()
    for token in tokens:
        if token in known:
            raise refused(file, "tokenizer.ggml.tokens", token, "each token once")
        known.add(token)
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
    """Return the id that the metadata name for a role. If they name none, return sentencepiece's default, provided that
    the token with this id has the right type; otherwise None.

    The value is not checked.
    """
    value = metadata.get(f"tokenizer.ggml.{role}_token_id")
    if value is not None or metadata.get("tokenizer.ggml.model") != "llama" or role not in _DEFAULT_IDS:
        return value
    default, kind = _DEFAULT_IDS[role]
    kinds = metadata.get("tokenizer.ggml.token_type")
    known = isinstance(kinds, list) and len(kinds) > default and kinds[default] == kind
    return default if known else None


def end_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Return the ids that end a text: those that the metadata name for it, and those of tokens whose names mean an end.

    Such a name does not count if the token's type is normal, because ordinary text may contain it. Raises
    CheckpointError for an id that is no integer.
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
    """Return the list `tokenizer.ggml.<name>` of the file. Raises CheckpointError if it is no list of strings."""
    value = file.metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise refused(file, f"tokenizer.ggml.{name}", value, "a list of strings")
    return value


def refused(file: GGUFFile, field: str, value: object, allowed: str) -> CheckpointError:
    """Return the error for a field because of which the tokenizer cannot be built."""
    also = "; or pass tokenizer=..., the folder or hub id of the model that the file was made of"
    return invalid(CheckpointError, field, value, f"not implemented; allowed: {allowed}{also} ({file.path})")
