"""The instruction set of native passes follows SPECRS_ISA, and its bits do not."""

from __future__ import annotations

import os

import pytest
from specrs.core import CpuPool, cpu_instruction_sets
from specrs.errors import InvalidConfigError
from specrs.instruction_sets import VARIABLE, start_pool, usable_instruction_sets

SETS = [name for name in cpu_instruction_sets() if name != "amx"]


@pytest.mark.parametrize("name", SETS)
def test_a_named_set_is_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, name)
    usable = usable_instruction_sets()
    assert [each for each in usable if each != "amx"] == SETS[SETS.index(name) :]
    assert ("amx" in usable) == ("amx" in cpu_instruction_sets() and name.startswith("avx512"))
    assert start_pool(1).instructions == name


@pytest.mark.parametrize("name", [None, ""])
def test_the_fastest_is_the_default(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that an unset or empty variable leaves all sets of the processor."""
    if name is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, name)
    assert usable_instruction_sets() == cpu_instruction_sets()
    assert start_pool(2).instructions == SETS[0] == CpuPool(2).instructions


@pytest.mark.parametrize("name", ["amx", "sse9"])
def test_unknown_sets_are_rejected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, name)
    with pytest.raises(InvalidConfigError, match=rf"{VARIABLE}='{name}': must be one of {', '.join(SETS)}; unset it"):
        start_pool(1)
    with pytest.raises(InvalidConfigError, match=f"instructions={name}: must be one of"):
        CpuPool(1, name)


@pytest.mark.skipif(not os.environ.get(VARIABLE), reason=f"{VARIABLE} is not set")
def test_these_tests_run_under_the_named_set() -> None:
    assert start_pool(1).instructions == os.environ[VARIABLE]
