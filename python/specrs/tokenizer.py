"""The checkpoint's tokenizer: text to ids, chats to ids, and whether two tokenizers are the same. Runs no model.

transformers reads the files and renders chat templates (in its sandbox); `tokenizers` does the work. Only tokenizers
with a `tokenizer.json` are read, and no code from a checkpoint ever runs.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrs.chat_template import RENDER_ARGUMENTS, render
from specrs.core import TokenDecoder
from specrs.errors import (
    CheckpointError,
    InvalidRequestError,
    TokenizerMismatchError,
    UnsupportedRequestError,
    invalid,
    invalid_request,
    short,
)

if TYPE_CHECKING:
    import tokenizers

    from specrs.config import EngineConfig

logger = logging.getLogger("specrs")

_PROBES = (
    "Hello, world! It's 2026.",
    "def f(x):\n    return {**x, 'k': [1, 2.5]}\n\t# done\n",
    "Grüße, naïve café; 日本語 и русский 🎉",
    "  12345 67890\r\n\r\n\u00a0",
)
"""Texts on which draft and target must agree: words, code, other scripts, digits and white space split differently."""

_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of a content's parts, each with the key of its text."""

_LONG_TEXT = 2**17
"""Characters; shorter texts are encoded whatever their length, in tens of milliseconds."""


class Tokenizer:
    """One tokenizer. `hf` is transformers' object, `backend` the `tokenizers.Tokenizer` within it.

    `unused_ids` are ids that stand for no text, such as the padding of a GGUF file's vocabulary.
    """

    def __init__(self, source: str, revision: str | None = None) -> None:
        """Read the tokenizer of a folder, hub id or GGUF file.

        Raises `CheckpointError` if it is missing, broken, has no `tokenizer.json` or is of a class that transformers
        does not have: code of a checkpoint is never run.
        """
        self.source = source
        read = _reader(source, revision)
        try:
            self.hf: Any
            self.unused_ids: frozenset[int]
            self.hf, self.unused_ids = read()
            self.backend: tokenizers.Tokenizer = self.hf.backend_tokenizer
        except CheckpointError:
            raise
        except Exception as fault:
            _blame_config(source, revision, fault)
            raise CheckpointError(f"tokenizer={short(source)}: could not be read: {_first_line(fault)}") from fault
        # tokenizer.json may carry both; a prompt is refused when it is too long, never cut in silence
        self.backend.no_truncation()
        self.backend.no_padding()

    @cached_property
    def decoder(self) -> TokenDecoder:
        """The decoding half, which the core's texts share; made when it is first asked for.

        Raises `CheckpointError` for a decoder that is Python code, which has no JSON.
        """
        try:
            return TokenDecoder(self.backend.to_str())
        except Exception as fault:
            raise CheckpointError(
                f"tokenizer={short(self.source)}: its decoder could not be taken over: {_first_line(fault)}"
            ) from fault

    @property
    def vocab_size(self) -> int:
        """Tokens with added ones; the models' embeddings may have more rows."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def max_chars_per_token(self) -> int | None:
        """The most characters that one token stands for; None where an unknown word of any length is one token."""
        from tokenizers import models, pre_tokenizers

        vocab, model = self.backend.get_vocab(with_added_tokens=True), self.backend.model
        if not isinstance(model, models.BPE):
            return None
        bytes_ = (
            [f"<0x{byte:02X}>" for byte in range(256)] if model.byte_fallback else pre_tokenizers.ByteLevel.alphabet()
        )
        if not all(token in vocab for token in bytes_):
            return None
        if self.backend.normalizer is None:
            return max(map(len, vocab))
        normalizer = str(json.loads(self.backend.to_str())["normalizer"])
        if any(kind in normalizer for kind in ("Regex", "Strip", "Precompiled", "Bert")):
            return None  # it may remove text of any length, runs of spaces for example
        return max(map(len, vocab)) * 4  # NFC and its kin make one character of up to four

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Ids of `text`, with what the checkpoint puts around a sequence (a BOS token) unless told otherwise.

        With `max_tokens`, a text that is far longer costs what its beginning does: 16 MB took 9 s and 3 GB before.
        A text that is a little longer is encoded; its length is the caller's to check.

        Raises `InvalidRequestError` if `text` is no text: not a string, or with lone surrogates; and where it is far
        longer than `max_tokens`.
        """
        if not isinstance(text, str):
            raise invalid_request("prompt", text, "must be a string")
        try:
            text.encode()
        except UnicodeEncodeError as fault:
            raise InvalidRequestError(
                f"prompt[{fault.start}]={short(text[fault.start])}: a lone surrogate is no character; allowed is any "
                "text that can be written as UTF-8"
            ) from None
        if max_tokens is not None and len(text) > _LONG_TEXT:
            self._check_length(text, max_tokens)
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def _check_length(self, text: str, max_tokens: int) -> None:
        most, size = self.max_chars_per_token, _LONG_TEXT
        too_long = most is not None and len(text) > most * max_tokens
        while not too_long and size < len(text):
            # Twice: how a text goes on may change how the end of its beginning is split.
            too_long = len(self.backend.encode(text[:size], add_special_tokens=False).ids) > 2 * max_tokens
            size *= 4
        if too_long:
            raise InvalidRequestError(
                f"prompt: its {len(text)} characters are more than the {max_tokens} tokens that are allowed"
            )

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`, all at once."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def bytes_in_vocabulary(self, token_id: int) -> bytes:
        """The bytes that the vocabulary's entry of a token stands for; empty for an id that it does not have.

        For byte-level tokenizers and those with a fallback to bytes. Other vocabularies may write a token otherwise
        than it is decoded.
        """
        token = self.backend.id_to_token(token_id)
        return b"" if token is None else self._bytes_of(token)

    def _bytes_of(self, token: str) -> bytes:
        if self._is_byte_level and all(symbol in _BYTE_OF_SYMBOL for symbol in token):
            return bytes(_BYTE_OF_SYMBOL[symbol] for symbol in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    @cached_property
    def _is_byte_level(self) -> bool:
        """Whether the vocabulary writes bytes as symbols. The decoder says so: its JSON alone, not the vocabulary's."""
        decoder = self.backend.decoder
        return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation, by the checkpoint's template or `chat_template`, in a sandbox.

        Contents are strings, or lists of `{"type": "text", "text": ...}` parts, which are joined by newlines.
        `chat_template_kwargs` are the template's own variables. Messages that the template leaves out are logged.

        Raises `InvalidRequestError` for messages that are none, without a template, and when the template fails.
        """
        rendered = render(
            self.chat_arguments(
                messages,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
        )
        for warning in rendered.warnings:
            logger.warning("%s", warning)
        return rendered.text

    def chat_arguments(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Plain data from which `specrs.chat_template.render` makes the text of `render_chat`, in any process.

        `hints` are variables that the template gets where it reads them; each of the others gives a warning.

        Raises `InvalidRequestError` for messages that are none, and without a template.
        """
        if chat_template is None and not self.hf.chat_template:
            raise invalid_request(
                "chat_template",
                None,
                f"the tokenizer of {self.source} has none; pass chat_template=..., or use generate",
            )
        variables = dict(chat_template_kwargs or {})
        for name in variables:
            if name in RENDER_ARGUMENTS:
                raise invalid_request(
                    f"chat_template_kwargs[{name!r}]",
                    variables[name],
                    "specrs sets it, and it cannot be overridden; leave it out",
                )
        if add_generation_prompt and continue_final_message:
            raise invalid_request(
                "continue_final_message", True, "must be False where add_generation_prompt is True (its default)"
            )
        if tools is not None and not all(isinstance(tool, Mapping) for tool in tools):
            raise invalid_request("tools", tools, "must be a list of dictionaries, each a function's JSON schema")
        conversation = [_message(i, message) for i, message in enumerate(messages)]
        if not conversation:
            raise invalid_request("messages", messages, "must have at least one message")
        given = None if tools is None else [dict(tool) for tool in tools]
        return {
            "messages": conversation,
            "special_tokens": dict(self.hf.special_tokens_map),
            "variables": variables,
            "hints": dict(hints or {}),
            "tools": given,
            "chat_template": self.hf.get_chat_template(chat_template, given),
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }


def load_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """The engine's tokenizer, compared with the draft's where there is one; None with `skip_tokenizer_init`.

    Checks first that target and draft are models, because a folder without a model has no tokenizer either.

    Raises `CheckpointError` if one cannot be read, `TokenizerMismatchError` if the two differ.
    """
    from specrs.models.errors import OF_DRAFT, about
    from specrs.models.loader import check_is_model

    check_is_model(config.target, revision=config.revision)
    if config.skip_tokenizer_init:
        return None
    own = config.tokenizer is not None
    revision = config.tokenizer_revision or (None if own else config.revision)
    fields = "tokenizer" if own else "model", "tokenizer_revision" if config.tokenizer_revision else "revision"
    with about(*fields):
        tokenizer = Tokenizer(config.tokenizer or config.target, revision)
    speculative, draft = config.speculative_config, config.draft
    if speculative is None or speculative.most_speculative_tokens == 0 or speculative.use_heterogeneous_vocab:
        return tokenizer
    if speculative.reads_hidden:  # a head comes without a tokenizer; its ids are checked against the target's
        return tokenizer
    if draft not in (None, config.target):
        with about(*OF_DRAFT):
            check_is_model(str(draft), revision=speculative.revision)
            theirs = Tokenizer(str(draft), speculative.revision)
        check_same_tokenizer(tokenizer, theirs)
    return tokenizer


def check_same_tokenizer(target: Tokenizer, draft: Tokenizer) -> None:
    """Check that every id that both tokenizers have means the same to both.

    Each may have tokens more than the other, as padding and as added tokens: a draft neither proposes nor is fed ids
    that its model has no row for.

    Raises `TokenizerMismatchError` that names the first difference.
    """
    reason = _vocabulary_difference(_used(target), _used(draft))
    if reason is None:
        for probe in _PROBES:
            if target.encode(probe, add_special_tokens=False) != draft.encode(probe, add_special_tokens=False):
                reason = f"the vocabularies agree, but {probe!r} is split differently"
                break
    if reason is not None:
        raise TokenizerMismatchError(
            f"speculative_config.model={short(draft.source)}: its tokenizer differs from that of {target.source}: "
            f"{reason}; allowed is a draft with the target's tokenizer, or "
            "use_heterogeneous_vocab=True"
        )


def end_ids(checkpoint: Sequence[int], tokenizer: Tokenizer | None, vocab_size: int) -> tuple[int, ...]:
    """Ids that end a text: those of the `checkpoint`'s configuration, then the tokenizer's own end, as in vLLM.

    An id of the tokenizer at or above `vocab_size`, which the model cannot emit, is left out.
    """
    own = None if tokenizer is None else tokenizer.hf.eos_token_id
    return tuple(dict.fromkeys([*checkpoint, *([own] if type(own) is int and 0 <= own < vocab_size else [])]))


def _used(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of the tokens that stand for text, by token."""
    vocab = tokenizer.backend.get_vocab(with_added_tokens=True)
    return {token: token_id for token, token_id in vocab.items() if token_id not in tokenizer.unused_ids}


def shared_ids(target: Tokenizer, draft: Tokenizer) -> list[tuple[int, int]]:
    """Pairs (target's id, draft's id) of the tokens that both have: special ones of the same name, and BOS and EOS by
    their role, others by the bytes that they stand for. Ascending, each id at most once; empty where there are none."""
    ours, theirs = _meanings(target), _meanings(draft)
    shared = {token_id: theirs[meaning] for meaning, token_id in ours.items() if meaning in theirs}
    for role in ("bos_token_id", "eos_token_id"):
        mine, other = getattr(target.hf, role), getattr(draft.hf, role)
        if None not in (mine, other) and mine not in shared and other not in shared.values():
            shared[mine] = other
    return sorted(shared.items())


def unknown_id(draft: Tokenizer) -> int:
    """What a draft is fed for a token that its tokenizer does not have: its unknown token, or else its EOS.

    Raises `TokenizerMismatchError` if it has neither.
    """
    for name in ("unk_token_id", "eos_token_id"):
        token_id = getattr(draft.hf, name)
        if token_id is not None:
            return int(token_id)
    raise TokenizerMismatchError(
        f"speculative_config.model={short(draft.source)}: its tokenizer has no unk_token and no eos_token, and "
        "use_heterogeneous_vocab=True feeds one of them for tokens that it does not know"
    )


def _meanings(tokenizer: Tokenizer) -> dict[tuple[bool, bytes], int]:
    """Ids by whether the token is an added one and the bytes that it stands for; the lowest id of several."""
    backend = tokenizer.backend
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    found: dict[tuple[bool, bytes], int] = {}
    for token, token_id in sorted(_used(tokenizer).items(), key=lambda item: item[1]):
        meaning = token.encode() if token in added else tokenizer._bytes_of(token)
        found.setdefault((token in added, meaning), token_id)
    return found


def _byte_symbols() -> dict[str, int]:
    """What byte-level tokenizers write for a byte: itself where it is printable Latin-1, else U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_SYMBOL = _byte_symbols()


def _vocabulary_difference(target: dict[str, int], draft: dict[str, int]) -> str | None:
    """The first id that both vocabularies have for different tokens, or token that both have under different ids."""
    ours, theirs = ({token_id: token for token, token_id in vocab.items()} for vocab in (target, draft))
    for token_id, token in sorted(ours.items()):
        other = theirs.get(token_id)
        if other == token or (other is None and token not in draft):
            continue
        where = f"id {token_id} is {short(token)} for the target and "
        what = f"{short(other)} for the draft" if other is not None else f"id {draft[token]} for the draft"
        return f"{where}{what} ({len(target)} tokens in the target's vocabulary, {len(draft)} in the draft's)"
    return None


def _message(index: int, message: object) -> dict[str, Any]:
    at = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise invalid_request(at, message, "must be a dictionary with a role and a content")
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        if not isinstance(content, Sequence):
            raise invalid_request(f"{at}['content']", content, "must be a string or a list of text parts")
        content = "\n".join(_part(f"{at}['content'][{i}]", part) for i, part in enumerate(content))
    # many templates handle a missing key, but not a null
    return {key: value for key, value in {**message, "content": content}.items() if value is not None}


def _part(at: str, part: object) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or "type" not in part:
        raise invalid_request(at, part, "must be a text part: {'type': 'text', 'text': ...}")
    key = _PARTS.get(str(part["type"]))
    if key is None:
        allowed = ", ".join(map(repr, _PARTS))
        raise invalid(UnsupportedRequestError, f"{at}['type']", part["type"], f"not implemented; allowed: {allowed}")
    if not isinstance(part.get(key), str):
        raise invalid_request(f"{at}[{key!r}]", part.get(key), "must be a string")
    return str(part[key])


def _reader(source: str, revision: str | None) -> Callable[[], tuple[Any, frozenset[int]]]:
    """A function that reads the tokenizer of `source`, and its unused ids. The files are there when it is called."""
    from specrs.models.checkpoint import read_json
    from specrs.models.gguf.checkpoint import gguf_path
    from specrs.models.gguf.tokenizer import gguf_tokenizer, gguf_unused_ids

    file = gguf_path(source, revision)
    if file is not None:
        return lambda: (gguf_tokenizer(file), gguf_unused_ids(file))
    folder = _folder(source, revision)
    if os.path.lexists(folder / "config.json"):
        read_json(folder / "config.json")  # transformers would wait for a pipe, and read a device for ever
    _refuse_remote_code(source, folder)
    return lambda: (_folder_tokenizer(folder), frozenset())


def _folder_tokenizer(folder: Path) -> Any:
    """transformers' tokenizer of a folder, with the pipeline of its tokenizer.json.

    Classes of transformers such as `LlamaTokenizer` build a pipeline of their own, which treats spaces differently.
    """
    import tokenizers
    from transformers import AutoTokenizer

    made: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    own, backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")), made.backend_tokenizer
    backend.model, backend.normalizer = own.model, own.normalizer
    backend.pre_tokenizer, backend.decoder = own.pre_tokenizer, own.decoder
    backend.post_processor = own.post_processor
    return made


def _folder(source: str, revision: str | None) -> Path:
    """The folder that holds the tokenizer's files; those of a hub id are downloaded first, without weights."""
    from specrs.models.checkpoint import resolve_folder

    folder = resolve_folder(source, revision, weights=False)
    if not (folder / "tokenizer.json").is_file():
        raise invalid(
            CheckpointError,
            "tokenizer",
            source,
            "tokenizer.json is missing; allowed are fast tokenizers, or skip_tokenizer_init=True",
        )
    return folder


def _refuse_remote_code(source: str, folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        raise CheckpointError(
            f"tokenizer={short(source)}: tokenizer_config.json could not be read: {_first_line(fault)}"
        ) from fault
    if isinstance(settings, dict) and settings.get("auto_map") and not _is_of_transformers(settings):
        raise CheckpointError(
            f"tokenizer={short(source)}: tokenizer_config.json has auto_map={short(settings['auto_map'])}, which asks "
            "to run code from the checkpoint; code is never run, allowed are tokenizers without auto_map, or with a "
            "tokenizer_class of transformers"
        )


def _is_of_transformers(settings: Mapping[str, Any]) -> bool:
    """Whether `tokenizer_class` is a class of transformers, so that the code that `auto_map` names is not needed."""
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    name = settings.get("tokenizer_class")
    names = {name.removesuffix("Fast"), name, f"{name}Fast"} if isinstance(name, str) else set()
    return any(tokenizer_class_from_name(known) is not None for known in names)


def _blame_config(source: str, revision: str | None, fault: Exception) -> None:
    """Raise `CheckpointError` if transformers, which reads config.json before a tokenizer, failed at what is there."""
    import torch
    from huggingface_hub.errors import StrictDataclassError

    from specrs.models.checkpoint import resolve_folder
    from specrs.models.errors import malformed
    from specrs.models.gguf.checkpoint import gguf_path
    from specrs.models.loader import is_known_family, load_config

    if gguf_path(source, revision) is not None:
        return
    path = resolve_folder(source, revision, weights=False) / "config.json"
    if not path.exists():
        return
    if is_known_family(source, revision=revision):
        dtype = load_config(source, revision=revision).checkpoint_dtype
        if dtype is not None and not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise malformed("dtype", dtype, "a dtype of torch", file=str(path))
    if isinstance(fault, StrictDataclassError):
        raise CheckpointError(f"{path}: {' '.join(str(fault).split())[:500]}") from fault


def _first_line(fault: Exception) -> str:
    lines = str(fault).strip().splitlines()
    return lines[0] if lines else type(fault).__name__
