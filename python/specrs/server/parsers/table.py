"""Table of the parsers, under the names of vLLM's flags."""

from __future__ import annotations

import secrets
import string

from specrs.server.parsers.base import ToolParser
from specrs.server.parsers.hermes import HermesParser
from specrs.server.parsers.llama3_json import Llama3JSONParser
from specrs.server.parsers.mistral import MistralParser
from specrs.server.parsers.pythonic import PythonicParser
from specrs.server.parsers.qwen3_coder import Qwen3CoderParser

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JSONParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
    "qwen3_coder": Qwen3CoderParser,
}
REASONING_PARSERS = ("deepseek_r1", "qwen3")


def new_call_id(parser: str | None) -> str:
    """Return a new unique id for a tool call. Templates of Mistral models accept only ids of nine letters and
    digits."""
    if parser == "mistral":
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"
