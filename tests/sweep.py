"""How many generated cases a sweep tries: the same ones in every run, or as many as `SPECRS_SWEEP` asks for."""

import os
from typing import Any

from hypothesis import HealthCheck, settings


def sweep(examples: int, **more: Any) -> settings:
    """Settings of a slow property with `examples` cases. More of them, by `SPECRS_SWEEP`, are drawn at random."""
    asked = int(os.environ.get("SPECRS_SWEEP", examples))
    derandomize, unchecked = asked <= examples, list(HealthCheck)
    return settings(max_examples=asked, deadline=None, derandomize=derandomize, suppress_health_check=unchecked, **more)
