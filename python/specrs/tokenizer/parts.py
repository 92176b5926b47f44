"""Parts of a tokenizer, independent of the files they come from. Reads no file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import tokenizers

ChatTemplate: TypeAlias = str | dict[str, str] | None
"""A chat template, several by name, or none."""


@dataclass(frozen=True)
class TokenizerParts:
    """A tokenizer, and what its checkpoint says about it."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str] = field(default_factory=dict)
    """Tokens by their role, such as `eos_token`."""
    extra_special_tokens: tuple[str, ...] = ()
    """Special tokens without a role."""
    chat_template: ChatTemplate = None
    unused_ids: frozenset[int] = frozenset()
    """Ids that stand for no text, such as the padding of a GGUF file's vocabulary."""
