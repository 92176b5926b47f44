"""Tokenizer of one checkpoint: text to ids and back, and chats to text. Runs no model.

The library `tokenizers` does the work. `folder.py` reads the files, and `models/gguf` reads GGUF files.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from specrs.chat_template import RENDER_ARGUMENTS, render
from specrs.core import TokenDecoder
from specrs.errors import CheckpointError, InvalidRequestError, invalid_request, short
from specrs.tokenizer.folder import folder_tokenizer
from specrs.tokenizer.messages import checked_messages
from specrs.tokenizer.parts import ChatTemplate, TokenizerParts
from specrs.tokenizer.template_files import choose_template

logger = logging.getLogger("specrs")

_LONG_TEXT = 2**17
"""Maximum number of characters of a text that is always encoded, which takes tens of milliseconds. Longer texts are
checked first."""


class Tokenizer:
    """Tokenizer of a checkpoint. Its methods may be called by several threads.

    `backend` is the `tokenizers.Tokenizer`. `special_tokens_map` has tokens by their role (`"eos_token"`),
    `extra_special_tokens` special ones without a role. `chat_template` is a template, several by name, or None.
    `unused_ids` are ids that stand for no text, such as the padding of a GGUF file's vocabulary.
    """

    def __init__(self, source: str, revision: str | None = None) -> None:
        """Read the tokenizer of a folder, hub id or GGUF file.

        Raises `CheckpointError` if it is missing, broken or needs code of the checkpoint, which is never run.
        """
        self.source = source
        try:
            parts = _read(source, revision)
        except CheckpointError:
            raise
        except Exception as fault:
            raise CheckpointError(f"tokenizer={short(source)}: could not be read: {_first_line(fault)}") from fault
        self.backend = parts.backend
        self.special_tokens_map = parts.special_tokens
        self.extra_special_tokens = parts.extra_special_tokens
        self.chat_template: ChatTemplate = parts.chat_template
        self.unused_ids = parts.unused_ids
        # tokenizer.json may carry both; a prompt is rejected when it is too long, never cut in silence
        self.backend.no_truncation()
        self.backend.no_padding()

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a sequence; None without one."""
        return self.special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a sequence; None without one."""
        return self.special_id("eos_token")

    def special_id(self, role: str) -> int | None:
        """Id of the token with a role, such as `unk_token`; None without one."""
        token = self.special_tokens_map.get(role)
        return None if token is None else self.backend.token_to_id(token)

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of the special tokens, with a role or without, each once."""
        tokens = dict.fromkeys([*self.special_tokens_map.values(), *self.extra_special_tokens])
        return [found for token in tokens if (found := self.backend.token_to_id(token)) is not None]

    @cached_property
    def decoder(self) -> TokenDecoder:
        """Decoder of the core, which turns ids into text. Made at its first use.

        Raises `CheckpointError` for a decoder that is Python code, which has no JSON form.
        """
        try:
            return TokenDecoder(self.backend.to_str())
        except Exception as fault:
            raise CheckpointError(
                f"tokenizer={short(self.source)}: its decoder could not be taken over: {_first_line(fault)}"
            ) from fault

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added tokens included. Embeddings of models may have more rows."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def max_chars_per_token(self) -> int | None:
        """Maximum number of characters that one token stands for. None if an unknown word of any length is one
        token."""
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

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None, field: str = "prompt"
    ) -> list[int]:
        """Return the ids of `text`. With `add_special_tokens`, they include what the checkpoint puts around a sequence,
        such as a BOS token.

        With `max_tokens`, a text that is far longer is rejected at the cost of its beginning: to encode 16 MB would
        take 9 s and 3 GB. A text that is only a little longer is encoded; the caller has to check its length.

        Raises `InvalidRequestError`, which names the request's `field`, if `text` is not a string or has lone
        surrogates, and if it is far longer than `max_tokens`.
        """
        if not isinstance(text, str):
            raise invalid_request(field, text, "must be a string")
        try:
            text.encode()
        except UnicodeEncodeError as fault:
            raise InvalidRequestError(
                f"{field}[{fault.start}]={short(text[fault.start])}: a lone surrogate is no character; use "
                "text that can be written as UTF-8"
            ) from None
        if max_tokens is not None and len(text) > _LONG_TEXT:
            self._check_length(field, text, max_tokens)
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def _check_length(self, field: str, text: str, max_tokens: int) -> None:
        most, size = self.max_chars_per_token, _LONG_TEXT
        too_long = most is not None and len(text) > most * max_tokens
        while not too_long and size < len(text):
            # Twice: how a text goes on may change how the end of its beginning is split.
            too_long = len(self.backend.encode(text[:size], add_special_tokens=False).ids) > 2 * max_tokens
            size *= 4
        if too_long:
            raise InvalidRequestError(
                f"{field}: its {len(text)} characters are more than the {max_tokens} tokens that are allowed"
            )

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of all `token_ids`."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def bytes_in_vocabulary(self, token_id: int) -> bytes:
        """Return the bytes of a token's entry in the vocabulary; empty for an id that it does not have.

        It works for byte-level tokenizers and for those with a fallback to bytes. Other vocabularies may write a token
        differently from its decoded text.
        """
        token = self.backend.id_to_token(token_id)
        return b"" if token is None else self.bytes_of(token)

    def bytes_of(self, token: str) -> bytes:
        """Return the bytes of a token, given as the vocabulary writes it. Exact only for byte-level tokenizers and
        those with a fallback to bytes."""
        if self._is_byte_level and all(symbol in _BYTE_OF_SYMBOL for symbol in token):
            return bytes(_BYTE_OF_SYMBOL[symbol] for symbol in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    @cached_property
    def _is_byte_level(self) -> bool:
        """True if the vocabulary writes bytes as symbols, which the decoder shows. Reads only the decoder's JSON, not
        the vocabulary's."""
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
        """Return the prompt of a conversation, rendered in a sandbox by the checkpoint's template or by
        `chat_template`.

        Contents are strings, or lists of `{"type": "text", "text": ...}` parts, which are joined by newlines.
        `chat_template_kwargs` are the template's own variables. Messages that the template leaves out are logged.

        Raises `InvalidRequestError` for malformed messages, without a template, and if the template fails.
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

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **chat_template_kwargs: Any,
    ) -> list[int] | str:
        """Return the ids of a conversation, or its text with `tokenize=False`. Arguments and defaults are those of
        transformers.

        The text is that of `render_chat`. Raises `InvalidRequestError` for malformed messages, without a template, and
        if the template fails.
        """
        text = self.render_chat(
            conversation,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

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
        """Return plain data from which `specrs.chat_template.render` makes the text of `render_chat`, in any process.

        `hints` are variables that the template gets if it reads them; each of the others gives a warning.

        Raises `InvalidRequestError` for malformed messages, and without a template.
        """
        template = choose_template(self.chat_template, chat_template, has_tools=tools is not None)
        if not template:
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
        conversation = checked_messages(messages)
        given = None if tools is None else [dict(tool) for tool in tools]
        return {
            "messages": conversation,
            "special_tokens": dict(self.special_tokens_map),
            "variables": variables,
            "hints": dict(hints or {}),
            "tools": given,
            "chat_template": template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }


def _byte_symbols() -> dict[str, int]:
    """Return the byte of each symbol that byte-level tokenizers write. A byte is written as itself if it is printable
    Latin-1, else as a character from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_SYMBOL = _byte_symbols()


def _read(source: str, revision: str | None) -> TokenizerParts:
    from specrs.models.gguf.checkpoint import gguf_path
    from specrs.models.gguf.tokenizer import gguf_tokenizer

    file = gguf_path(source, revision)
    if file is None:
        return folder_tokenizer(source, revision)
    made = gguf_tokenizer(file)
    return TokenizerParts(made.backend, made.special_tokens, (), made.chat_template, made.unused_ids)


def _first_line(fault: Exception) -> str:
    lines = str(fault).strip().splitlines()
    return lines[0] if lines else type(fault).__name__
