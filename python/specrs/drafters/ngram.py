"""Prompt lookup: drafts the tokens that followed the last earlier occurrence of the longest n-gram at the end of the
text.

`rust/core/src/drafts/host/ngram.rs` proposes (Saxena 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

from specrs.core import HostDrafter
from specrs.drafters.method import HostMethod, MethodOptions, wrong
from specrs.options import Integer, option

DEFAULT_PROMPT_LOOKUP = 5
"""Default length in tokens of both the shortest and the longest n-gram."""
_NGRAM = Integer(1, 1024)


@dataclass(frozen=True, kw_only=True)
class NgramOptions(MethodOptions):
    """Options of `method="ngram"`."""

    prompt_lookup_min: int | None = option(
        None, _NGRAM, "tokens of the shortest n-gram", default_is=f"prompt_lookup_max, else {DEFAULT_PROMPT_LOOKUP}"
    )
    prompt_lookup_max: int | None = option(
        None,
        _NGRAM,
        "tokens of the longest n-gram, which is looked for first",
        default_is=f"prompt_lookup_min, else {DEFAULT_PROMPT_LOOKUP}",
    )

    @property
    def prompt_lookup(self) -> tuple[int, int]:
        """Lengths of the shortest and of the longest n-gram to look for."""
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        given = least if most is None else most
        default = DEFAULT_PROMPT_LOOKUP if given is None else given
        return default if least is None else least, default if most is None else most

    def check_rules(self) -> None:
        """Raise `InvalidConfigError` if the shortest n-gram is longer than the longest."""
        least, longest = self.prompt_lookup
        if least > longest:
            raise wrong("prompt_lookup_min", least, f"must be at most prompt_lookup_max={longest}")


def declare(options: NgramOptions) -> HostDrafter:
    """Return the declaration of this drafter for the scheduler."""
    least, most = options.prompt_lookup
    return HostDrafter("ngram", prompt_lookup_min=least, prompt_lookup_max=most)


NGRAM = HostMethod(name="ngram", options=NgramOptions, declare=declare)
