"""The files of deploy/: their flags, paths and times are those of the code. `make lint-deploy` lints them.

None was run: there is no Docker daemon, cluster or init system in the tests.
"""

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import yaml
from specrs.cli import parser
from specrs.cli.arguments import spell
from specrs.cli.config_file import with_config_file

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file() and path.name != ".yamllint")
DOCKERFILES = [DEPLOY / "Dockerfile", DEPLOY / "Dockerfile.cuda"]
BASE_BYTES = 45_000_000
"""Compressed layers of python:3.13-slim-bookworm, rounded up."""
MAX_IMAGE_BYTES = 200_000_000


def load(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def kubernetes(kind: str) -> dict[str, Any]:
    (found,) = (one for one in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()) if one["kind"] == kind)
    return dict(found)


def container() -> dict[str, Any]:
    return dict(kubernetes("Deployment")["spec"]["template"]["spec"]["containers"][0])


def instruction(path: Path, name: str) -> list[str]:
    """Return the JSON list of the last instruction of this name in a Dockerfile."""
    found = re.findall(rf"^\s*{name} (\[.*\])$", path.read_text(), re.MULTILINE)
    return list(json.loads(found[-1]))


def commands() -> dict[str, list[str]]:
    """Return the arguments of `specrs` in each file."""
    unit = re.search(r"^ExecStart=/opt/specrs/bin/specrs (.*)$", (DEPLOY / "specrs.service").read_text(), re.MULTILINE)
    assert unit is not None
    examples = {
        f"{path.name}, the comment": shlex.split(found)
        for path in DOCKERFILES
        for found in re.findall(r"^#   docker run .* specrs(?::cuda)? (serve .*)$", path.read_text(), re.MULTILINE)
    }
    assert len(examples) == len(DOCKERFILES)
    return {
        **{path.name: instruction(path, "CMD") for path in DOCKERFILES},
        **examples,
        "compose.yaml": load("compose.yaml")["services"]["specrs"]["command"],
        "specrs.service": unit[1].split(),
        "kubernetes.yaml": container()["args"],
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_file_says_that_it_was_linted_and_not_run(path: Path) -> None:
    assert re.search(r"^#.* Linted with .*, not run\.$", path.read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", commands())
def test_the_commands_are_those_of_the_command_line(name: str) -> None:
    argv = [word.replace("/etc/specrs/", f"{DEPLOY}/") for word in commands()[name]]
    read = parser(["serve"]).parse_args(with_config_file(spell(argv)))
    assert read.command == "serve"
    outside = name in ("specrs.service",)  # the others are reached through a container's port
    assert read.host == (None if outside else "0.0.0.0")


def shutdown_timeout(argv: list[str]) -> float:
    """Return the seconds that requests get when a server is stopped, from the arguments or from serve.yaml."""
    given = [float(word.partition("=")[2]) for word in argv if word.startswith("--shutdown-timeout=")]
    return given[0] if given else float(load("serve.yaml")["shutdown-timeout"])


def test_a_server_is_killed_only_after_its_own_timeout() -> None:
    unit = re.search(r"^TimeoutStopSec=(\d+)$", (DEPLOY / "specrs.service").read_text(), re.MULTILINE)
    assert unit is not None
    spec = kubernetes("Deployment")["spec"]["template"]["spec"]
    graces = {
        "specrs.service": float(unit[1]),
        "compose.yaml": float(load("compose.yaml")["services"]["specrs"]["stop_grace_period"].removesuffix("s")),
        "kubernetes.yaml": float(spec["terminationGracePeriodSeconds"]),
    }
    for name, seconds in graces.items():
        assert seconds > shutdown_timeout(commands()[name]) > 0, name


def test_probes_ask_for_what_the_server_has() -> None:
    routes = set(re.findall(r'Route\("(/[\w.]*)"', (ROOT / "python/specrs/server/app.py").read_text()))
    probes = [container()[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    probes += [re.search(r"127\.0\.0\.1:8000(/\w+)", path.read_text())[1] for path in DOCKERFILES]  # type: ignore[index]
    assert set(probes) == {"/health"}
    assert {"/health", "/metrics"} <= routes
    assert load("prometheus.yaml")["scrape_configs"][0]["static_configs"][0]["targets"] == ["specrs:8000"]
    assert container()["ports"][0]["containerPort"] == load("serve.yaml")["port"] == 8000


def test_mounted_files_exist() -> None:
    mounts = [mount for service in load("compose.yaml")["services"].values() for mount in service["volumes"]]
    files = [mount.split(":")[0] for mount in mounts if mount.startswith(".")]
    assert len(files) == 5
    assert all((DEPLOY / file).exists() for file in files)
    provided = load("grafana/dashboards.yaml")["providers"][0]["options"]["path"]
    assert f"../dashboards:{provided}:ro" in mounts


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_have_a_compiler_and_a_python_that_are_supported(path: Path) -> None:
    text = path.read_text()
    oldest = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["rust-version"]
    rust = re.search(r"^FROM rust:([\d.]+)-", text, re.MULTILINE)
    python = re.search(r"^ARG PYTHON=3\.(\d+)-", text, re.MULTILINE)
    assert rust is not None
    assert python is not None
    assert [int(part) for part in rust[1].split(".")] >= [int(part) for part in oldest.split(".")]
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"] == ">=3.11,<3.14"
    assert 11 <= int(python[1]) < 14
    (lock,) = set(re.findall(r"environments/\w+\.lock", text))
    assert (ROOT / lock).is_file()


def test_the_cpu_image_is_small() -> None:
    """Check that the CPU image is small: base image and wheels, whose files count uncompressed, an upper bound. It has
    no build tools."""
    lock = (ROOT / "environments/runtime.lock").read_text()
    names = {re.sub("[-_.]+", "-", name).lower() for name in re.findall(r"^([\w.-]+)==", lock, re.MULTILINE)}
    elsewhere = {"colorama", "httpx2-jsfetch"}  # for Windows and for browsers
    total = BASE_BYTES
    for name in names - elsewhere - {"maturin", "pip"}:
        total += sum(file.size or 0 for file in distribution(name).files or [])
    package = (path for path in (ROOT / "python/specrs").rglob("*") if path.is_file() and path.suffix != ".pyc")
    total += sum(path.stat().st_size for path in package)
    assert 100_000_000 < total <= MAX_IMAGE_BYTES


def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "specrs.service"
    text = (DEPLOY / "specrs.service").read_text().replace("/opt/specrs/bin/specrs", shutil.which("true") or "true")
    unit.write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
