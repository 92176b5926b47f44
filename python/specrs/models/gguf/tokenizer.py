"""Builds the tokenizer of a GGUF file from that file alone, whatever else its folder has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from specrs.models.gguf.byte_level import WHOLE_WORDS, byte_level
from specrs.models.gguf.file import open_gguf
from specrs.models.gguf.sentencepiece import listed_merges, sentencepiece
from specrs.models.gguf.vocabulary import CONTROL, UNKNOWN, USER_DEFINED, Vocabulary, read_vocabulary, refused

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_SENTENCEPIECE, _BYTE_LEVEL, _GEMMA4 = "llama", "gpt2", "gemma4"
"""Values of `tokenizer.ggml.model` that can be read."""


class GGUFTokenizer(NamedTuple):
    """A tokenizer and what its file says about it."""

    backend: Tokenizer
    special_tokens: dict[str, str]
    """Tokens by their role, such as `eos_token`."""
    chat_template: str | None
    unused_ids: frozenset[int]
    """Ids that stand for no text, padding for example."""


def gguf_tokenizer(path: Path) -> GGUFTokenizer:
    """Read the file's tokenizer. Raises CheckpointError if it is missing, damaged or not implemented."""
    file = open_gguf(path)
    kind, template = file.metadata.get("tokenizer.ggml.model"), file.metadata.get("tokenizer.chat_template")
    if kind not in (_BYTE_LEVEL, _SENTENCEPIECE, _GEMMA4):
        allowed = f"{_BYTE_LEVEL!r} (byte-level BPE), {_SENTENCEPIECE!r} (sentencepiece BPE) or {_GEMMA4!r}"
        raise refused(file, "tokenizer.ggml.model", kind, allowed)
    if template is not None and not isinstance(template, str):
        raise refused(file, "tokenizer.chat_template", template, "a string")
    vocabulary = read_vocabulary(file)
    roles = {role: token for role, name in _ROLES.items() if (token := vocabulary.special(name)) is not None}
    builders = {_BYTE_LEVEL: byte_level, _SENTENCEPIECE: sentencepiece, _GEMMA4: listed_merges}
    backend = builders[kind](vocabulary)
    _add_tokens(backend, vocabulary)
    default_bos = kind != _BYTE_LEVEL or file.metadata["tokenizer.ggml.pre"] in WHOLE_WORDS
    _put_around(backend, vocabulary, default_bos, always_bos=kind == _GEMMA4)
    _add_roles(backend, roles)
    return GGUFTokenizer(backend, roles, template, vocabulary.unused_ids)


def _add_tokens(backend: Tokenizer, vocabulary: Vocabulary) -> None:
    """Add the tokens that are searched for in a text before it is split: special and user-defined ones."""
    from tokenizers import AddedToken

    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind != USER_DEFINED)
            for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
            if kind in (CONTROL, UNKNOWN, USER_DEFINED)
        ]
    )


def _add_roles(backend: Tokenizer, roles: dict[str, str]) -> None:
    """Add the tokens with a role as special tokens, even if the file gives them another type."""
    from tokenizers import AddedToken

    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([AddedToken(token, special=True) for token in roles.values() if token not in added])


def _put_around(backend: Tokenizer, vocabulary: Vocabulary, default_bos: bool, *, always_bos: bool) -> None:
    """Let the tokenizer put BOS and EOS around a text, as `add_bos_token` and `add_eos_token` say. With `always_bos`,
    BOS does not depend on the file, as in llama.cpp: some files of Gemma 4 wrongly say false.

    Raises CheckpointError if the file asks for a token that it does not name.
    """
    from tokenizers import processors

    around: dict[str, str | None] = {}
    for role, default in (("bos", default_bos), ("eos", False)):
        adds, token = vocabulary.flag(f"add_{role}_token", default), vocabulary.special(role)
        adds |= always_bos and role == "bos"
        if adds and token is None and f"tokenizer.ggml.add_{role}_token" in vocabulary.file.metadata:
            raise refused(vocabulary.file, f"tokenizer.ggml.{role}_token_id", None, f"an id, for add_{role}_token=true")
        around[role] = token if adds else None
    first, last = ([token] if token is not None else [] for token in (around["bos"], around["eos"]))
    if first or last:
        ids = vocabulary.ids
        backend.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", *last, *first, "$B", *last],
            special_tokens=[(token, ids[token]) for token in {*first, *last}],
        )
