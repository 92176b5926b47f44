"""The examples that are clients, as a reader runs them: each by the interpreter of its package's environment."""

import json
import re
from pathlib import Path

import pytest

from .conftest import Client

FOLDER = Path(__file__).parents[3] / "examples"


@pytest.fixture
def url(base_url: str) -> str:
    return f"{base_url}/v1"


def test_openai_client(url: str, client: Client) -> None:
    whole, streamed = client("openai", "python", str(FOLDER / "openai_client.py"), url).split("\nstreamed:\n")
    assert whole.strip()
    assert streamed == whole


def test_tools(url: str, client: Client) -> None:
    printed = client("openai", "python", str(FOLDER / "tools.py"), url)
    calls = re.findall(r"^weather\((.*)\) -> (.*)$", printed, re.MULTILINE)
    assert calls
    for arguments, result in calls:
        assert result == f"{json.loads(arguments)['city']}: 21 degrees, sunny"


def test_langchain_client(url: str, client: Client) -> None:
    *streamed, verdict = client("agents", "python", str(FOLDER / "langchain_client.py"), url).splitlines()
    assert "".join(streamed).strip()
    assert re.fullmatch(r"Verdict\(language='(Python|Rust)', complete=(True|False)\)", verdict)
