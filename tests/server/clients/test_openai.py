"""The openai client: list, completion, chat, streaming with usage, every kind of error; and its list of fields."""

import json
from pathlib import Path

from .conftest import Client

SCRIPT = Path(__file__).with_name("openai_client.py")
FIELDS = Path(__file__).with_name("openai_fields.py")


def test_openai(base_url: str, client: Client) -> None:
    assert client("openai", "python", str(SCRIPT), base_url).splitlines()[-1] == "ok"


def test_the_list_of_fields_is_the_packages(client: Client) -> None:
    """Check that the committed list of fields is the package's. `tests/server/test_fields.py` checks the server against
    this list, without the package."""
    listed = json.loads(Path(__file__).parents[1].joinpath("openai_fields.json").read_text())
    assert json.loads(client("openai", "python", str(FIELDS))) == listed
