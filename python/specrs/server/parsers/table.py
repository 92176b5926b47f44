"""Tables of the parsers, under the names of vLLM's flags, and what chat templates say about them."""

from __future__ import annotations

import secrets
import string

from specrs.server.parsers.base import ToolParser
from specrs.server.parsers.deepseek_v3 import DeepSeekV3Parser, DeepSeekV31Parser
from specrs.server.parsers.gemma4 import Gemma4Parser
from specrs.server.parsers.glm45 import GLM45Parser
from specrs.server.parsers.harmony import HarmonyContent, HarmonyParser, HarmonyReasoning
from specrs.server.parsers.hermes import HermesParser
from specrs.server.parsers.kimi_k2 import KimiK2Parser
from specrs.server.parsers.llama3_json import Llama3JSONParser
from specrs.server.parsers.minimax_m2 import MiniMaxM2Parser
from specrs.server.parsers.mistral import MistralParser
from specrs.server.parsers.pythonic import LFM2Parser, PythonicParser
from specrs.server.parsers.qwen3_coder import Qwen3CoderParser
from specrs.server.parsers.reasoning import MARKS, MarkedReasoning, ReasoningParser
from specrs.server.parsers.step3 import Step3Parser

AUTO = "auto"
"""Name that stands for the tool parser that the chat template shows."""
TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "deepseek_v3": DeepSeekV3Parser,
    "deepseek_v31": DeepSeekV31Parser,
    "gemma4": Gemma4Parser,
    "glm45": GLM45Parser,
    "hermes": HermesParser,
    "kimi_k2": KimiK2Parser,
    "lfm2": LFM2Parser,
    "llama3_json": Llama3JSONParser,
    "minimax_m2": MiniMaxM2Parser,
    "mistral": MistralParser,
    "openai": HarmonyParser,
    "pythonic": PythonicParser,
    "qwen3_coder": Qwen3CoderParser,
    "step3": Step3Parser,
}
TOOL_PARSER_ALIASES = {"glm47": "glm45", "harmony": "openai"}
"""Further names of tool parsers. GLM-4.7 has the format of GLM-4.5, and `harmony` is the name of gpt-oss's format."""
_HARMONY = "openai_gptoss"
REASONING_PARSERS = tuple(sorted([*MARKS, _HARMONY]))
REASONING_PARSER_ALIASES = {"glm47": "glm45", "gpt_oss": _HARMONY}
"""Other names of reasoning parsers."""
_SHOWN_BY = (
    (("<|channel|>", "<|message|>"), "openai"),
    (("<|tool_call>",), "gemma4"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<｜tool▁sep｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁sep｜>",), "deepseek_v31"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<steptml:invoke",), "step3"),
    (("<function=",), "qwen3_coder"),
    (("<arg_key>",), "glm45"),
    (("<tool_call>",), "hermes"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|tool_list_start|>",), "lfm2"),
    (("<|tool_call_start|>",), "lfm2"),
    (("List of tools: ", "<|im_start|>"), "lfm2"),
    (("<|python_start|>",), "pythonic"),
    (("[func_name1(",), "pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (('{"name": function name, "parameters":',), "llama3_json"),
)
"""Marks that a chat template has all of, and the parser of the calls that it shows. The first row that fits counts."""


def parser_shown_by(template: str) -> str | None:
    """Return the tool parser whose form of calls the chat template `template` shows; None if it shows no known form."""
    return next((name for marks, name in _SHOWN_BY if all(mark in template for mark in marks)), None)


def content_parser(reasoning_parser: str | None) -> ToolParser | None:
    """Return the parser of an answer without calls, for models of `reasoning_parser`. None: all of it is content."""
    return HarmonyContent() if reasoning_parser == _HARMONY else None


def begins_with_reasoning(parser: str, prompt: str) -> bool:
    """Return True if a completion of `prompt` begins inside of reasoning, for models of the reasoning parser
    `parser`."""
    return parser in MARKS and MARKS[parser].begin_after(prompt)


def new_reasoning_parser(parser: str, *, opened: bool) -> ReasoningParser:
    """Return a new reasoning parser named `parser`. With `opened`, the completion begins inside of reasoning."""
    return HarmonyReasoning() if parser == _HARMONY else MarkedReasoning(MARKS[parser], opened=opened)


def needs_special_tokens(reasoning_parser: str | None) -> bool:
    """Return True if the marks of `reasoning_parser` are special tokens, which the text must then include."""
    return reasoning_parser == _HARMONY or (reasoning_parser in MARKS and MARKS[reasoning_parser].special)


def new_call_id(parser: str | None, name: str, number: int) -> str:
    """Return a new id for a call of the tool `name`. `number`: how many calls the conversation had before.

    Templates of Mistral models accept only ids of nine letters and digits. Templates of Kimi K2 show the id to the
    model, which was trained with ids `functions.NAME:NUMBER`.
    """
    if parser == "mistral":
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    if parser == "kimi_k2":
        return f"functions.{name}:{number}"
    return f"call_{secrets.token_hex(12)}"
