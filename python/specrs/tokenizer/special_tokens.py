"""Special and added tokens that the JSON files next to tokenizer.json list. Adds them to a tokenizer.

The rules are transformers', so that ids are equal:

- `added_tokens_decoder` of tokenizer_config.json lists added tokens. Only if it is missing, special_tokens_map.json and
  added_tokens.json are read, and they take precedence over tokenizer_config.json.
- A token that is listed with other flags than in tokenizer.json gets the listed flags. Without `added_tokens_decoder`,
  tokenizer.json lists its own tokens, which take precedence over added_tokens.json.
- A listed token that has a role is special.
- A token that tokenizer.json does not have gets the next free id, whatever id a file says.
- A role that no file mentions has the token that the tokenizer's class has for it (`DEFAULTS`). Here, unlike in
  transformers, that applies only if tokenizer.json has the token: a model has no embedding for another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrs.models.errors import malformed

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Roles that every tokenizer may have. A checkpoint adds its own, such as `image_token`."""
_LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_GPT2 = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
_QWEN2 = dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>")
DEFAULTS: dict[str, dict[str, str]] = {
    "LlamaTokenizer": _LLAMA,
    "CodeLlamaTokenizer": _LLAMA,
    "GemmaTokenizer": {
        "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>",
    },
    "Qwen2Tokenizer": _QWEN2,
    "Qwen3_5Tokenizer": _QWEN2,
    "GPT2Tokenizer": _GPT2,
    "GPTNeoXTokenizer": {**_GPT2, "pad_token": "<|padding|>"},
    "CohereTokenizer": {
        "bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>", "unk_token": "<UNK>", "pad_token": "<PAD>",
        "cls_token": "<CLS>", "sep_token": "<SEP>", "mask_token": "<MASK_TOKEN>",
    },
}  # fmt: skip
"""Special tokens of transformers' tokenizer classes that causal language models use."""
CLASSES = frozenset(
    {*DEFAULTS, "PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend", "BloomTokenizer", "T5Tokenizer"}
)
"""Names of transformers' classes for causal language models. None of them needs code of a checkpoint."""
_CLASS_OF_MODEL = {
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("gpt2", "gptj", "gpt_neo", "phi", "opt"), "GPT2Tokenizer"),
    **dict.fromkeys(("gpt_neox", "falcon_mamba", "olmo", "olmoe"), "GPTNeoXTokenizer"),
    **dict.fromkeys(("cohere", "cohere2"), "CohereTokenizer"),
    "code_llama": "CodeLlamaTokenizer",
}
"""For each `model_type` of config.json, the tokenizer class that applies if no file names one."""
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class SpecialTokens:
    """Special and added tokens in the files of one folder."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        model: Mapping[str, Any],
        special_tokens_map: Mapping[str, Any],
        added_tokens: Mapping[str, Any],
        file: Path,
    ) -> None:
        """`settings` is the content of tokenizer_config.json, whose path is `file`, `model` that of config.json, and
        the others those of the files of these names. Content of files that are missing is empty.

        Raises `CheckpointError` for a token that is neither a string nor an object with a content.
        """
        self._file = file
        said = dict(settings)
        listed, extra = said.pop("added_tokens_decoder", None), _extra(said)
        if listed is None:
            said |= {key: _marked_special(value) for key, value in special_tokens_map.items()}
            extra = extra or _extra(said)
        if isinstance(extra, Mapping):
            said, extra = {**said, **extra}, ()
        if not isinstance(extra, list | tuple):
            raise malformed("extra_special_tokens", extra, "a list of tokens", file=str(file))
        self._extra = [self._token("extra_special_tokens", value) for value in extra]
        self._defaults = DEFAULTS.get(class_name(settings, model) or "", {})
        self._said = {
            key: None if value is None else self._token(key, value)
            for key, value in said.items()
            if key in ROLES or (key.endswith("_token") and isinstance(value, str | Mapping))
        }
        self._lists_all = listed is not None
        self._listed = self._added(added_tokens) if listed is None else self._decoded(listed)

    def add_to(self, backend: Tokenizer) -> tuple[dict[str, str], tuple[str, ...]]:
        """Add the tokens that `backend` does not have yet, which mutates it. Return the tokens with a role, and the
        other special tokens."""
        there = backend.get_added_tokens_decoder()
        contents = {token.content for token in there.values()}
        defaults = {role: token for role, token in self._defaults.items() if token in contents}
        said = {**defaults, **self._said}
        order = [*ROLES, *(role for role in said if role not in ROLES)]
        named = {role: token for role in order if (token := said.get(role)) is not None}
        given = [*named.values(), *self._extra]
        listed = self._listed if self._lists_all else {**self._listed, **there}
        added = [listed[index] for index in sorted(listed)]
        contents.update(token.content for token in added)
        added += [_added_token(token) for token in given if str(token) not in contents]
        special = set(map(str, named.values()))
        for token in added:
            token.special = token.special or token.content in special
        backend.add_tokens(added)
        return {role: str(token) for role, token in named.items()}, tuple(map(str, self._extra))

    def _decoded(self, listed: object) -> dict[int, AddedToken]:
        if not isinstance(listed, Mapping) or not all(key.isdecimal() for key in listed):
            raise malformed("added_tokens_decoder", listed, "an object of tokens by their id", file=str(self._file))
        for value in listed.values():
            if not isinstance(value, Mapping):
                raise malformed("added_tokens_decoder", value, "an object with a content", file=str(self._file))
        return {int(key): _added_token(self._token("added_tokens_decoder", value)) for key, value in listed.items()}

    def _added(self, ids: Mapping[str, Any]) -> dict[int, AddedToken]:
        from tokenizers import AddedToken

        for token, index in ids.items():
            if type(index) is not int:
                raise malformed(token, index, "an id", file=str(self._file.with_name("added_tokens.json")))
        special = {str(token) for token in (*(self._defaults | self._said).values(), *self._extra)}
        return {
            index: AddedToken(token, normalized=token not in special, special=token in special)
            for token, index in ids.items()
        }

    def _token(self, field: str, value: object) -> str | AddedToken:
        from tokenizers import AddedToken

        if isinstance(value, str):
            return value
        if not isinstance(value, Mapping) or not isinstance(value.get("content"), str):
            raise malformed(field, value, "a string, or an object with a content", file=str(self._file))
        flags = {name: value[name] for name in _FLAGS if name in value}
        if not all(type(flag) is bool for flag in flags.values()):
            raise malformed(field, value, "a token whose flags are true or false", file=str(self._file))
        return AddedToken(value["content"], **flags)


def class_name(settings: Mapping[str, Any], model: Mapping[str, Any]) -> str | None:
    """Return the name of the transformers class for a tokenizer, without the ending `Fast`; None if no file names one.

    `settings` is the content of tokenizer_config.json, `model` that of config.json.
    """
    for name in (settings.get("tokenizer_class"), model.get("tokenizer_class")):
        if isinstance(name, str) and name:
            return name.removesuffix("Fast")
    return _CLASS_OF_MODEL.get(str(model.get("model_type")))


def is_known_class(name: object) -> bool:
    """Return True if `name` is a tokenizer class of transformers, with or without the ending `Fast`."""
    return isinstance(name, str) and bool({name, name.removesuffix("Fast"), f"{name}Fast"} & CLASSES)


def _extra(said: Mapping[str, Any]) -> Any:
    return said.get("extra_special_tokens") or said.get("additional_special_tokens") or ()


def _marked_special(value: object) -> object:
    """Return a token of special_tokens_map.json with its flag set to special, which the file does not say for tokens
    with flags."""
    if isinstance(value, list):
        return [_marked_special(item) for item in value]
    return {**value, "special": True} if isinstance(value, Mapping) and "content" in value else value


def _added_token(token: str | AddedToken) -> AddedToken:
    from tokenizers import AddedToken

    return AddedToken(token, special=True) if isinstance(token, str) else token
