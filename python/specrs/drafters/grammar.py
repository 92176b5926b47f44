"""Drafts that a request's grammar forces: tokens after which nothing else is allowed.

The engine reads them from the grammar after each step, and `rust/core/src/drafts/host/grammar.rs` proposes them,
continued by another drafter without a model. Every engine on a CPU that drafts has this method without naming it.
"""

from __future__ import annotations

from specrs.core import HostDrafter
from specrs.drafters.method import HostMethod, MethodOptions

GRAMMAR = HostMethod(
    name="grammar", options=MethodOptions, declare=lambda _: HostDrafter("grammar"), drafts_of_requests=True
)
