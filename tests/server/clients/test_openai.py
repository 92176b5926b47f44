"""The openai client: list, completion, chat, streaming with usage, every kind of error."""

from pathlib import Path

from .conftest import Client

SCRIPT = Path(__file__).with_name("openai_client.py")


def test_openai(base_url: str, client: Client) -> None:
    assert client("openai", "python", str(SCRIPT), base_url).splitlines()[-1] == "ok"
