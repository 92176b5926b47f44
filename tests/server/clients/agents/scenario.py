"""Tasks of each agent client: call a tool, take its result, answer by a schema. Imported by the scripts."""

from __future__ import annotations

import sys
from typing import Literal

from pydantic import BaseModel

URL = sys.argv[1] + "/v1" if len(sys.argv) > 1 else ""
MODEL = "smollm2"
KEY = "none"
INSTRUCTIONS = "You answer questions about the weather. Use the tool, then answer in one short sentence."
QUESTION = "How warm is it in Rome?"
LIMIT = 200
"""Maximum number of tokens of an answer. The model's greedy texts end sooner."""

calls: list[str] = []
"""The cities that `weather` was called with, in order."""


class Answer(BaseModel):
    """The structured answer."""

    city: Literal["Rome", "Oslo"]
    warm: bool


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Current weather of a city.

    Args:
        city: Name of the city.
    """
    calls.append(city)
    return f"{city}: 21 degrees, sunny"


SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Current weather of a city.", "parameters": SCHEMA},
}
FORMAT = {
    "type": "json_schema",
    "json_schema": {
        "name": "Answer",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "warm": {"type": "boolean"}},
            "required": ["city", "warm"],
            "additionalProperties": False,
        },
    },
}
MESSAGES = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": QUESTION}]


def called(times: int) -> None:
    """Check that the tool was called at least `times` times, and clear the list of calls."""
    assert len(calls) >= times, calls
    assert set(calls) <= {"Rome", "Oslo"}, calls
    calls.clear()
