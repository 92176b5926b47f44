"""Promises of the manifest of the crate specrs-core: no dependency needs a newer compiler than stated, all files are in
its folder, and it has what crates.io asks for."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def packages() -> list[dict[str, Any]]:
    """Every package that the lock file names, as cargo reads their manifests."""
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--offline"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["packages"]
    return found


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))[:2]


def test_no_dependency_needs_a_newer_compiler(packages: list[dict[str, Any]]) -> None:
    oldest = re.search(r'^rust-version = "(.*)"$', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)
    assert oldest is not None
    newer = {
        package["name"]: package["rust_version"]
        for package in packages
        if package["rust_version"] and version(package["rust_version"]) > version(oldest[1])
    }
    assert newer == {}


def test_the_crate_lies_in_its_folder(packages: list[dict[str, Any]]) -> None:
    """Check that all files of the crate are in its folder: cargo silently leaves others out of the package, but for a
    warning."""
    (core,) = (package for package in packages if package["name"] == "specrs-core")
    folder = ROOT / "rust/core"
    outside = [target["src_path"] for target in core["targets"] if not Path(target["src_path"]).is_relative_to(folder)]
    assert outside == []
    reached = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in folder.rglob("*.rs")
        for name in re.findall(r'(?:#\[path = |include\w*!\()"(.*?)"', path.read_text())
        if not (path.parent / name).resolve().is_relative_to(folder)
    ]
    assert reached == []


def test_the_crate_says_what_it_is(packages: list[dict[str, Any]]) -> None:
    (core,) = (package for package in packages if package["name"] == "specrs-core")
    assert all(core[field] for field in ("description", "license", "documentation", "keywords", "categories", "readme"))
    assert len(core["keywords"]) <= 5, "crates.io takes no more"
    assert (ROOT / "rust/core/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
