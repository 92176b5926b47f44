"""A server for the clients, and their environments, which `make test-clients` makes. Holds no tests."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from server.harness import Server, serving

ROOT = Path(__file__).parents[3]
TIMEOUT = 280.0

Client = Callable[..., str]


@pytest.fixture(scope="session")
def pair() -> Iterator[Server]:
    """A server of the bundled pair under the name `pair`."""
    with serving(
        # float64: texts of one request are compared across batches, in which fp32 rounds differently.
        *("--served-model-name", "pair", "--dtype", "float64", "--max-model-len", "512"),
        *("--spec-tokens", "5"),
        "--disable-uvicorn-access-log",
        *("--per-request-spec-decode-metrics", "summary", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    ) as server:
        yield server


@pytest.fixture
def client(tmp_path: Path) -> Client:
    """A function that runs a command of a client's environment in a folder of its own and returns its output. Fails if
    the command does."""

    def run(environment: str, command: str, *arguments: str, offline: bool = True) -> str:
        path = ROOT / ".venv-clients" / environment / "bin" / command
        assert path.exists(), f"{path}: run make test-clients"
        variables = {**os.environ, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
        if not offline:
            # aiperf reads a local tokenizer only without it; nothing is downloaded for one
            del variables["HF_HUB_OFFLINE"]
        done = subprocess.run(
            [str(path), *arguments], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=TIMEOUT
        )
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
        return done.stdout

    return run


@pytest.fixture
def base_url(pair: Server) -> Iterator[str]:
    """Address of the server, which must be idle and intact before and after the test."""
    pair.wait_until_idle()
    yield f"http://127.0.0.1:{pair.port}"
    assert pair.process.poll() is None, "".join(pair.lines)
    pair.wait_until_idle()
