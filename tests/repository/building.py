"""Runs maturin for tests that look into what it builds, one build at a time. Holds no tests."""

import fcntl
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def maturin(*arguments: str | Path, project: Path = ROOT) -> None:
    """Run maturin in the folder of a project. All builds share one target folder, so that little is compiled.

    Maturin moves the library through that folder: of two builds at once, by two workers of pytest, one finds it gone.
    """
    command = [sys.executable, "-m", "maturin", *arguments]
    with open(ROOT / "pyproject.toml") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
