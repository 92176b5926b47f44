"""Drafts from the text that a request predicts for its own output (`SamplingParams.prediction`).

`rust/core/src/drafts/host/prediction.rs` proposes, and finds its place again after an edit. Every engine on a CPU that
drafts has this method without naming it.
"""

from __future__ import annotations

from specrs.core import HostDrafter
from specrs.drafters.method import HostMethod, MethodOptions

PREDICTION = HostMethod(
    name="prediction", options=MethodOptions, declare=lambda _: HostDrafter("prediction"), drafts_of_requests=True
)
