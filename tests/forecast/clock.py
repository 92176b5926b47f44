"""A simulated clock that only an engine's passes advance. Holds no tests."""

import pytest
from specrs.engine.engine import Engine
from specrs.engine.request import Request
from specrs.pair import DRAFT


def count_passes(monkeypatch: pytest.MonkeyPatch, *, draft_token_ms: float = 0.0) -> None:
    """Advance a simulated clock in passes, for `forecast --measure`: 1 ms for the draft's, 10 ms for the target's, and
    `draft_token_ms` for each draft token."""
    now = 0.0
    step = Engine.step

    def timed(engine: Engine) -> list[Request]:
        nonlocal now
        before = engine.stats()
        touched = step(engine)
        after = engine.stats()
        target = 1e-3 if engine.config.target == str(DRAFT) else 10e-3
        now += (after.target_passes - before.target_passes) * target
        now += (after.draft_passes - before.draft_passes) * 1e-3
        now += (after.draft_tokens - before.draft_tokens) * 1e-3 * draft_token_ms
        return touched

    monkeypatch.setattr(Engine, "step", timed)
    monkeypatch.setattr("specrs.forecast.measure.time.perf_counter", lambda: now)
