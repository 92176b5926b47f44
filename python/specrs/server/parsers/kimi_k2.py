"""Parser of tool calls of Kimi K2: ids like `functions.name:0`, each with its JSON arguments, in a section of calls."""

from __future__ import annotations

import re

from specrs.server.parsers.marked_calls import MarkedCallParser, Marks

SECTION, END_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, END_CALL = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"


class KimiK2Parser(MarkedCallParser):
    """Parser of text and calls. The id of a call contains the name of its function."""

    marks = Marks(
        *(SECTION, END_SECTION, CALL, END_CALL),
        re.compile(rf"(?:functions\.)?(?P<name>\S+?)(?::\d+)?\s*{re.escape(ARGUMENTS)}"),
    )
