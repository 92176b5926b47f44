"""Suffix decoding: drafts the tokens that most often followed the end of the text, in it and in earlier outputs.

`rust/core/src/drafts/host/suffix` proposes (Oliaro et al., arXiv 2411.04975).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specrs.core import HostDrafter
from specrs.drafters.method import HostMethod, MethodOptions
from specrs.options import Integer, Number, option, options_of

_PREFIX = "suffix_decoding_"


@dataclass(frozen=True, kw_only=True)
class SuffixOptions(MethodOptions):
    """Options of `method="suffix"`, under vLLM's names. The Rust core has the same options without the prefix
    `suffix_decoding_`, and defines their defaults."""

    suffix_decoding_max_tree_depth: int | None = option(
        None, Integer(2, 256), "tokens of a pattern and its draft together", default_is="24"
    )
    suffix_decoding_max_cached_requests: int | None = option(
        None, Integer(0), "outputs kept for other requests", note="0: none", default_is="10000"
    )
    suffix_decoding_max_spec_factor: float | None = option(
        None, Number(0.0, open_low=True), "draft tokens per token of the pattern", default_is="1"
    )
    suffix_decoding_min_token_prob: float | None = option(
        None, Number(0.0, 1.0), "least count of a draft token, as a share of its pattern's", default_is="0.1"
    )
    suffix_decoding_max_memory_bytes: int | None = option(
        None, Integer(0), "bytes of kept outputs, the oldest of which are dropped", default_is="1G"
    )

    @property
    def suffix_decoding(self) -> dict[str, Any]:
        """Options that were set, under the Rust core's names (without `suffix_decoding_`)."""
        given = {name.removeprefix(_PREFIX): getattr(self, name) for name in options_of(SuffixOptions)}
        return {name: value for name, value in given.items() if value is not None}


def declare(options: SuffixOptions) -> HostDrafter:
    """Return the declaration of this drafter for the scheduler."""
    return HostDrafter("suffix", **options.suffix_decoding)


SUFFIX = HostMethod(
    name="suffix",
    options=SuffixOptions,
    declare=declare,
    # It would draft the outputs that it has seen for the same prompts.
    for_repeats={_PREFIX + "max_cached_requests": 0},
)
