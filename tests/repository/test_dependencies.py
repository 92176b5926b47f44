"""Packages that are installed: the default dependencies, the extras, and the lock files made of them."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HEAVY = re.compile(r"torch|triton|transformers|nvidia-.*|cuda-.*|matplotlib|pyarrow|aiohttp")
"""Packages that a CPU must not need."""


def name_of(requirement: str) -> str:
    """Return the normalised name of a requirement's distribution."""
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def locked(name: str) -> dict[str, set[str]]:
    """Return the versions of each package in a lock file."""
    versions: dict[str, set[str]] = {}
    for package, version in re.findall(
        r"^([\w.-]+)==([\w.+]+)", (ROOT / f"environments/{name}.lock").read_text(), re.M
    ):
        versions.setdefault(name_of(package), set()).add(version)
    return versions


def names(*extras: str) -> set[str]:
    """Return the distributions of the default dependencies and of these extras."""
    project = PROJECT["project"]
    of_extras = [requirement for extra in extras for requirement in project["optional-dependencies"][extra]]
    return {name_of(requirement) for requirement in [*project["dependencies"], *of_extras]}


def group(name: str) -> set[str]:
    """Return the distributions of a dependency group, with those of the groups that it includes."""
    found = set()
    for item in PROJECT["dependency-groups"][name]:
        found |= {name_of(item)} if isinstance(item, str) else group(item["include-group"])
    return found


def test_a_cpu_needs_nothing_heavy() -> None:
    assert [name for name in sorted(names() | locked("runtime").keys()) if HEAVY.fullmatch(name)] == []
    assert [name for name in locked("dev") if HEAVY.fullmatch(name)], "the pattern matches what there is"


@pytest.mark.parametrize(
    ("lock", "wanted"),
    [
        ("runtime", names() | group("build")),
        ("cuda", names("cuda") | group("build")),
        ("dev", names("cuda", "transformers", "bench") | group("dev")),
    ],
)
def test_a_lock_has_every_requirement(lock: str, wanted: set[str]) -> None:
    assert wanted - locked(lock).keys() == set()


@pytest.mark.parametrize("lock", ["runtime", "cuda"])
def test_what_is_installed_later_changes_no_version(lock: str) -> None:
    """Check that later installs change no version: `make test` after `make demo` only adds packages."""
    everything = locked("dev")
    assert {name: versions for name, versions in locked(lock).items() if everything.get(name) != versions} == {}


def test_the_build_installs_no_development_packages() -> None:
    """Check that a build installs no development packages: maturin installs the group `dev` unless another is named,
    and tests need torch."""
    lines = [line for line in (ROOT / "Makefile").read_text().splitlines() if "maturin develop" in line]
    assert [line for line in lines if "--group build" not in line] == []
    assert lines


def test_classifiers_name_the_pythons_that_are_supported() -> None:
    named = re.findall(r"Python :: 3\.(\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    low, high = re.findall(r"3\.(\d+)", PROJECT["project"]["requires-python"])
    assert list(map(int, named)) == list(range(int(low), int(high)))
