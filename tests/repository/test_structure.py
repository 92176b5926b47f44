"""docs/structure.md names every module, and nothing that does not exist; the README names the oldest supported Rust."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python/specrs"


EXAMPLES = {
    "scripts/architecture_picture.py",
    "scripts/prose.py",
    *("scripts/train_pair.py", "scripts/train_hybrid.py", "scripts/train_eagle3.py", "scripts/eagle3_text.py"),
    *("examples/host_loop.py", "examples/scheduler.py"),
}


def modules() -> set[str]:
    """Return all modules as the page names them: the package's relative to it, all others relative to the
    repository."""
    python = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py*") if path.suffix in (".py", ".pyi")}
    kernels = {path.relative_to(ROOT).as_posix() for path in (ROOT / "kernels").rglob("*.py")}
    rust = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("rust/*/src/**/*.rs")}
    return python | kernels | rust


def test_structure_is_complete() -> None:
    page = (ROOT / "docs/structure.md").read_text()
    named = set(re.findall(r"`([\w/.-]+\.(?:pyi?|rs))`", page)) - EXAMPLES
    known = modules()
    assert named - known == set(), "named, but not there"
    # What these hold is their folder's; the page names an __init__.py that holds more than that.
    quiet = {name for name in known if name.endswith(("__init__.py", "/core/src/lib.rs", "/tests.rs"))}
    assert known - quiet - named == set(), "there, but not named"


def test_readme_names_the_oldest_rust() -> None:
    oldest = re.search(r'^rust-version = "(.*)"$', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)
    assert oldest is not None
    assert f"Rust {oldest[1]} or newer" in (ROOT / "README.md").read_text()
