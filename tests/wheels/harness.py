"""Where the wheels are, and how their tests run commands. Holds no tests."""

import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
VERSION = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]


def wheel(package: str, processor: str) -> Path:
    """The one wheel of a package for a processor, of this version."""
    (path,) = DIST.glob(f"{package}-{VERSION}-cp311-abi3-*_{processor}.whl")
    return path


def run(*command: str | Path) -> str:
    """Its output. No path of this environment is handed on."""
    done = subprocess.run(command, cwd=DIST, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
