"""An engine that plays scripts, and one thread for real ones. Holds no tests."""

from collections.abc import Iterator

import pytest
import torch

from .scripted import ScriptedEngine


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread: passes of this size take a fraction of a millisecond, and threads on busy cores wait for each
    other far longer."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
