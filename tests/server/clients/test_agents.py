"""Agent clients, unmodified, against SmolLM2: a loop of tools, a structured answer, and both at once, whole and
streamed. Each client is a script of `agents/`, run by the interpreter of its environment."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.harness import Server, serving

from .conftest import ROOT, Client

FOLDER = Path(__file__).with_name("agents")
SCRIPTS = sorted(path.stem for path in FOLDER.glob("with_*.py"))


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Server]:
    """A server of SmolLM2 as users start it, with drafts from its text."""
    found = subprocess.run([str(ROOT / "scripts/real_model"), sys.executable], capture_output=True, text=True)
    if found.returncode == 3:
        pytest.skip(found.stderr)
    assert found.returncode == 0, found.stderr
    with serving(
        *(found.stdout.strip(), "--served-model-name", "smollm2", "--max-model-len", "2048"),
        *("--spec-method", "suffix", "--spec-tokens", "4", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        "--disable-uvicorn-access-log",
    ) as server:
        yield server


@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", SCRIPTS)
def test_client(script: str, smollm2: Server, client: Client) -> None:
    url = f"http://127.0.0.1:{smollm2.port}"
    assert client("agents", "python", str(FOLDER / f"{script}.py"), url).splitlines()[-1] == "ok"
    assert smollm2.process.poll() is None, "".join(smollm2.lines)
    smollm2.wait_until_idle()
