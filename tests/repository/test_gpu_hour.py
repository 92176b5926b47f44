"""The folder for an hour on a GPU machine: complete, small, and steps that no tool of this machine is needed for."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from module_files import load_file

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hour")
    wheel = made / "specrs-0-py3-none-any.whl"
    wheel.write_bytes(b"")
    command = [sys.executable, ROOT / "scripts/gpu_hour", made / "packed", "--wheel", wheel]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return made / "packed"


@pytest.fixture(scope="module")
def steps(folder: Path) -> ModuleType:
    return load_file("gpu_hour_steps", folder / "run.py")


def test_the_folder_is_small_and_has_what_steps_name(folder: Path, steps: ModuleType) -> None:
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 10e6, "without the wheel"
    assert len((folder / "COMMIT").read_text().strip()) >= 7
    for step in steps.steps():
        for part in (*step.command, *step.rehearsal):
            if part.startswith(("tests/", "benches/")):
                assert (folder / part).exists(), (step.name, part)


def test_steps(steps: ModuleType) -> None:
    found = steps.steps()
    assert len({step.name for step in found}) == len(found)
    assert steps.LIMIT < 600
    for step in found:
        for command in (step.command, step.rehearsal):
            assert "make" not in command
            if "pytest" in command:
                assert command[command.index("pytest") + 1 : command.index("pytest") + 3] == ("-p", "no:benchmark")


def test_a_step_that_fails_or_is_not_there_says_so(
    folder: Path, steps: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps.RESULTS.mkdir(exist_ok=True)
    fails = steps.Step("fails", ("-c", "print('said', flush=True); raise SystemExit(3)"), ())
    assert steps.run(fails, {}, rehearse=False)["exit"] == 3
    assert "said" in (folder / "results/fails.log").read_text()
    monkeypatch.setattr(steps, "LIMIT", 0.2)
    late = steps.Step("late", ("-c", "while True: pass"), ())
    assert steps.run(late, {}, rehearse=False)["exit"] == "cut off after 0.2 s"
    lacks = steps.Step("lacks", (), (), "no-such-tool --x")
    assert steps.run(lacks, {}, rehearse=False) == {"left out": "no-such-tool is not there"}


@pytest.mark.parametrize(
    ("triton", "numpy", "rehearse", "reason"),
    [("3.6.0", "2.4.0", True, "numpy 2.4.0"), ("3.6.0", "2.5.5", False, None), ("3.9.0", "2.5.5", True, None)],
)
def test_what_is_not_there_is_named_before_the_first_step(
    steps: ModuleType, monkeypatch: pytest.MonkeyPatch, triton: str, numpy: str, rehearse: bool, reason: str | None
) -> None:
    monkeypatch.setattr(steps, "version", {"triton": triton, "numpy": numpy}.__getitem__)
    found = steps.lacks(rehearse=rehearse)
    assert found is None if reason is None else reason in found
    monkeypatch.setattr(steps, "MODULES", ("torch", "no_such_module"))
    assert steps.lacks(rehearse=False) == "not installed: no_such_module"
