"""The folder for half an hour on a GPU machine: complete, small, and steps that need no tool of this machine."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from module_files import load_file

ROOT = Path(__file__).parents[2]
NAMES = ("first", "second")


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
    for step in every(steps):
        for part in (*step.command, *step.rehearsal):
            if part.startswith(("tests/", "benches/")):
                assert (folder / part).exists(), (step.name, part)


def every(steps: ModuleType) -> list[Any]:
    return [step for command in steps.commands() for step in command.steps]


def test_commands(steps: ModuleType) -> None:
    """Check that each command is planned for less than nine minutes, that the first four have their order, and that
    none runs `make`."""
    found = every(steps)
    assert len({step.name for step in found}) == len(found)
    assert [command.name for command in steps.commands()][:4] == ["correct", "kernels", "baseline", "drafts"]
    assert all(command.seconds < 540 for command in steps.commands())
    ks = [step.command[step.command.index("--k") + 1] for step in found if step.name in ("baseline", "drafts")]
    assert ks == ["0,1,2", "3,5,auto"]
    for step in found:
        for command in (step.command, step.rehearsal):
            assert "make" not in command
            if "pytest" in command:
                assert command[command.index("pytest") + 1 : command.index("pytest") + 3] == ("-p", "no:benchmark")


def test_a_step_that_fails_or_is_not_there_says_so(folder: Path, steps: ModuleType) -> None:
    steps.RESULTS.mkdir(exist_ok=True)
    fails = steps.Step("fails", ("-c", "print('said', flush=True); raise SystemExit(3)"), ())
    assert steps.run(fails, {}, 60, rehearse=False)["exit"] == 3
    assert "said" in (folder / "results/fails.log").read_text()
    late = steps.Step("late", ("-c", "while True: pass"), ())
    assert steps.run(late, {}, 0.2, rehearse=False)["exit"] == "cut off after 0.2 s"
    lacks = steps.Step("lacks", (), (), "no-such-tool --x")
    assert steps.run(lacks, {}, 60, rehearse=False) == {"left out": "no-such-tool is not there"}


def test_a_command_shares_its_time_and_leaves_one_archive(
    folder: Path, steps: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Check that a command shares its time among steps (the second gets what the first leaves), and that results of
    both are in one archive in $OUT."""
    made = [steps.Step(name, ("-c", f"raise SystemExit({code})"), ()) for code, name in enumerate(NAMES)]
    given, run = list[float](), steps.run
    monkeypatch.setattr(
        steps, "run", lambda step, env, seconds, **how: given.append(seconds) or run(step, env, 60, **how)
    )
    monkeypatch.setattr(steps, "commands", lambda: [steps.Command("both", 5, made)])
    monkeypatch.setattr(steps, "prepare", lambda: steps.RESULTS.mkdir(exist_ok=True) or dict(os.environ))
    monkeypatch.setattr(steps, "lacks", lambda **_: None)
    monkeypatch.setattr(sys, "argv", ["run.py", "both"])
    monkeypatch.setenv("OUT", str(tmp_path))
    assert steps.main() == 1
    with tarfile.open(tmp_path / "results.tar.gz") as archive:
        names = archive.getnames()
        ended = json.load(archive.extractfile("results/steps.json"))  # type: ignore[arg-type]
    assert {f"results/{name}.log" for name in NAMES} <= set(names)
    assert [ended[name]["exit"] for name in NAMES] == [0, 1]
    assert given[1] < given[0] <= 5


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
