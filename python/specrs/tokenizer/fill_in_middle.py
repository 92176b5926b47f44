"""Prompts that ask for the text between a prefix and a suffix, for tokenizers with tokens for it (Bavarian et al. 2022,
arXiv 2207.14255)."""

from __future__ import annotations

from dataclasses import dataclass

from specrs.errors import invalid_request
from specrs.tokenizer.text import Tokenizer


@dataclass(frozen=True, slots=True)
class _Markers:
    """Tokens that mark the parts of a prompt. The prompt is prefix, suffix, middle; or suffix, prefix if `middle` is
    None."""

    prefix: str
    suffix: str
    middle: str | None
    ends: tuple[str, ...] = ()
    """Other tokens after which the text in the middle has ended."""


_FORMS = (
    _Markers(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    _Markers("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<|endoftext|>", "<fim_pad>", "<file_sep>")),
    _Markers("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<|endoftext|>", "<fim-pad>")),
    _Markers("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    _Markers("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    _Markers("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", ("\u2581<EOT>",)),
    _Markers("[PREFIX]", "[SUFFIX]", None),
)
"""Markers of Qwen and CodeGemma, StarCoder, SantaCoder and Granite, DeepSeek, GLM, Code Llama, and Codestral."""


def _markers(tokenizer: Tokenizer) -> _Markers | None:
    """Return the first form whose tokens the tokenizer has; None if there is none."""
    known = tokenizer.backend.token_to_id
    for form in _FORMS:
        if all(known(token) is not None for token in (form.prefix, form.suffix, form.middle) if token is not None):
            return form
    return None


def middle_prompt(tokenizer: Tokenizer, prefix: str, suffix: str, max_tokens: int | None = None) -> list[int]:
    """Return the ids of a prompt that asks for the text between `prefix` and `suffix`.

    It begins with the tokens that the checkpoint puts before a sequence. `max_tokens` is described at
    `Tokenizer.encode`. Raises `InvalidRequestError` for a tokenizer that has no tokens for such prompts.
    """
    form = _markers(tokenizer)
    if form is None:
        reason = "the tokenizer has no tokens for text in the middle; leave it out, or use a model trained for it"
        raise invalid_request("suffix", suffix, reason)

    def part(marker: str, text: str, field: str = "prompt") -> list[int]:
        found = tokenizer.backend.token_to_id(marker)
        assert found is not None  # all markers of a form are known
        return [found, *tokenizer.encode(text, add_special_tokens=False, max_tokens=max_tokens, field=field)]

    before, after = part(form.prefix, prefix), part(form.suffix, suffix, "suffix")
    begin = tokenizer.encode("")
    if begin and begin[-1] == tokenizer.eos_token_id:
        begin.pop()
    return begin + (after + before if form.middle is None else before + after + part(form.middle, ""))


def middle_ends(tokenizer: Tokenizer) -> list[int]:
    """Return the ids after which a text in the middle has ended, besides the model's own end ids; empty for a tokenizer
    without tokens for such prompts."""
    form = _markers(tokenizer)
    if form is None:
        return []
    tokens = (form.prefix, form.suffix, form.middle, *form.ends)
    ids = [tokenizer.backend.token_to_id(token) for token in tokens if token is not None]
    return [token_id for token_id in ids if token_id is not None]
