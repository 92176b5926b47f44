"""The number of threads that torch uses in a command's process, whether or not torch is imported yet."""

import os
import subprocess
import sys

import pytest
from specrs.cli.threads import set_torch_threads
from specrs.errors import InvalidConfigError

VARIABLE = "OMP_NUM_THREADS"


@pytest.mark.parametrize(
    ("threads", "bundled", "before", "after"),
    [
        (3, False, None, "3"),
        (3, True, "2", "3"),
        (None, True, None, "1"),
        (None, True, "2", "2"),
        (None, False, None, None),
        (None, False, "2", "2"),
    ],
)
def test_before_torch_is_imported_the_variable_says_it(
    threads: int | None, bundled: bool, before: str | None, after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setenv(VARIABLE, before or "")
    if before is None:
        monkeypatch.delenv(VARIABLE)
    set_torch_threads(threads, bundled=bundled)
    assert os.environ.get(VARIABLE) == after
    assert "torch" not in sys.modules


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="torch takes no more threads than there are processors")
def test_torch_follows_the_variable() -> None:
    code = """
from specrs.cli.threads import set_torch_threads
set_torch_threads(2, bundled=True)
import torch
print(torch.get_num_threads())
set_torch_threads(1, bundled=True)
print(torch.get_num_threads())
"""
    environment = os.environ | {VARIABLE: "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == ["2", "1"]


def test_no_threads_are_an_error() -> None:
    with pytest.raises(InvalidConfigError, match=r"^--threads=0: must be an integer of at least 1"):
        set_torch_threads(0, bundled=False)
