"""Finds the wheels, and runs commands for their tests. Holds no tests."""

import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
VERSION = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]


def wheel(package: str, processor: str) -> Path:
    """Return the wheel of a package for a processor, of this version. There must be exactly one."""
    (path,) = DIST.glob(f"{package}-{VERSION}-cp311-abi3-*_{processor}.whl")
    return path


def run(*command: str | Path) -> str:
    """Run a command and return its output. Paths of this environment are not passed on."""
    done = subprocess.run(command, cwd=DIST, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
