"""Reads the tokenizer of a folder. No code from a checkpoint ever runs.

The pipeline from text to ids is that of tokenizer.json, whatever class tokenizer_config.json names. The settings
`add_bos_token`, `add_eos_token`, `add_prefix_space`, `legacy` and `clean_up_tokenization_spaces` do not change it:
tokenizer.json was written with them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specrs.errors import CheckpointError, invalid, short
from specrs.models.checkpoint import read_json, resolve_folder
from specrs.tokenizer.parts import TokenizerParts
from specrs.tokenizer.special_tokens import SpecialTokens, is_known_class
from specrs.tokenizer.template_files import read_chat_template

_OTHER_FILES = ("tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "*.tiktoken", "tiktoken.model")
"""Files with vocabularies that transformers can convert if tokenizer.json is missing."""


def folder_tokenizer(source: str, revision: str | None) -> TokenizerParts:
    """Read the tokenizer of a folder, or of a hub id, whose files are downloaded first, without weights.

    Raises `CheckpointError` for files that are missing or malformed, and for a tokenizer that needs code of the
    checkpoint.
    """
    folder = resolve_folder(source, revision, weights=False)
    if not (folder / "tokenizer.json").is_file():
        return _converted(source, folder)
    model = read_json(folder / "config.json") if os.path.lexists(folder / "config.json") else {}
    settings = _object(folder / "tokenizer_config.json")
    _refuse_remote_code(source, settings)
    from tokenizers import Tokenizer

    special = SpecialTokens(
        settings,
        model=model,
        special_tokens_map=_object(folder / "special_tokens_map.json"),
        added_tokens=_object(folder / "added_tokens.json"),
        file=folder / "tokenizer_config.json",
    )
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    named, extra = special.add_to(backend)
    backend.encode_special_tokens = bool(settings.get("split_special_tokens"))
    return TokenizerParts(backend, named, extra, read_chat_template(folder, settings))


def _object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is no file."""
    return read_json(path) if os.path.lexists(path) else {}


def _refuse_remote_code(source: str, settings: Mapping[str, Any]) -> None:
    if settings.get("auto_map") and not is_known_class(settings.get("tokenizer_class")):
        raise CheckpointError(
            f"tokenizer={short(source)}: tokenizer_config.json has auto_map={short(settings['auto_map'])}, which asks "
            "to run code from the checkpoint, and code is never run; use a tokenizer without auto_map, or with a "
            "tokenizer_class of transformers, such as PreTrainedTokenizerFast"
        )


def _converted(source: str, folder: Path) -> TokenizerParts:
    """Return the tokenizer that transformers makes from a folder without tokenizer.json."""
    if not any(next(folder.glob(pattern), None) for pattern in _OTHER_FILES):
        reason = "tokenizer.json is missing; use a fast tokenizer, or set skip_tokenizer_init=True"
        raise invalid(CheckpointError, "tokenizer", source, reason)
    settings = _object(folder / "tokenizer_config.json")
    _refuse_remote_code(source, settings)
    try:
        from transformers import AutoTokenizer
    except ImportError:
        reason = "tokenizer.json is missing, and only transformers converts other files"
        remedy = "pip install specrs[transformers], or use a folder with tokenizer.json"
        raise invalid(CheckpointError, "tokenizer", source, f"{reason}; {remedy}") from None
    made: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    backend = getattr(made, "backend_tokenizer", None)
    if backend is None:
        reason = f"transformers makes no fast tokenizer of its files, but a {type(made).__name__}"
        raise invalid(CheckpointError, "tokenizer", source, f"{reason}; add tokenizer.json")
    extra = tuple(made.extra_special_tokens)
    return TokenizerParts(backend, made.special_tokens_map, extra, read_chat_template(folder, settings))
