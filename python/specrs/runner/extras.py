"""What a launch needs of a request and no record can hold, because it is no number. Known to the host alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specrs.structured.matcher import GrammarMatcher


@dataclass(frozen=True, slots=True)
class RequestExtras:
    """Of one request; the step `extras` of its record says that it has any. Its launches run at depth 1."""

    matcher: GrammarMatcher


ExtrasLookup = Callable[[int], RequestExtras | None]
"""The extras of a request id; None where it has none."""


def no_extras(request_id: int) -> RequestExtras | None:
    """For runners whose requests have none."""
    return None
