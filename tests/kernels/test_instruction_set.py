"""`make test-isa` runs under the instruction set that it names: every library is asked for its own."""

import os
import platform
from pathlib import Path

import pytest
import torch
from instruction_sets import SAYS, SETS, VARIABLE, ask_libraries, chosen

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the variables are those of x86-64")


def assert_says(said: dict[str, str], name: str) -> None:
    """Raise unless each library says that it uses the set `name`. MKL is checked only on Intel's processors."""
    assert (said["ATen"], said["oneDNN"], said["OpenBLAS"]) == tuple(
        SAYS[name][library] for library in ("ATen", "oneDNN", "OpenBLAS")
    )
    if "GenuineIntel" in Path("/proc/cpuinfo").read_text():  # MKL reads its variable on Intel's processors only
        assert SAYS[name]["MKL"] in said["MKL"]


def others(environment: dict[str, str]) -> dict[str, str]:
    """Return the environment without the variables of any set."""
    return {key: value for key, value in environment.items() if key not in {*SETS["portable"], VARIABLE}}


@pytest.mark.parametrize("name", SETS)
def test_every_library_takes_it(name: str) -> None:
    assert_says(ask_libraries(others(dict(os.environ)) | SETS[name]), name)


@pytest.mark.skipif(not os.environ.get(VARIABLE), reason=f"{VARIABLE} is not set: the machine's own instruction set")
def test_these_tests_run_under_it(capsys: pytest.CaptureFixture[str]) -> None:
    name = os.environ[VARIABLE]
    assert {key: os.environ.get(key) for key in SETS[name]} == SETS[name]
    assert torch.backends.cpu.get_cpu_capability() == SAYS[name]["ATen"]
    said = ask_libraries(dict(os.environ))
    with capsys.disabled():
        print(f"\n{VARIABLE}={name}: " + ", ".join(f"{library} {what}" for library, what in said.items()))
    assert_says(said, name)


def test_an_empty_name_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that an empty variable counts as unset, because make and CI pass unset variables on as empty."""
    monkeypatch.setenv(VARIABLE, "")
    assert chosen() == {}
    monkeypatch.setenv(VARIABLE, "sse9")
    with pytest.raises(ValueError, match=rf"{VARIABLE}='sse9': must be one of portable, avx2"):
        chosen()
