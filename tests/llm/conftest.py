"""An engine that plays scripts. Holds no tests."""

import pytest

from .scripted import ScriptedEngine


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()
