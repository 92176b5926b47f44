"""Parts of a request that steps need but records cannot hold, because they are no numbers. Only the host has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specrs.structured.matcher import GrammarMatcher


@dataclass(frozen=True, slots=True)
class RequestExtras:
    """Extras of one request: data that no record can hold, such as a grammar. In records, the bit `extras` of
    `admit_steps` marks such a request. With one of them in a step, only one step is in flight."""

    matcher: GrammarMatcher
    """Matcher of the request's grammar."""


ExtrasLookup = Callable[[int], RequestExtras | None]
"""Function that returns the extras of a request id, or None."""


def no_extras(request_id: int) -> RequestExtras | None:
    """Return None: the lookup of runners whose requests have no extras."""
    return None
