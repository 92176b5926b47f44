"""Parsers of tool calls of DeepSeek-V3 and R1, which have the arguments in a block of code, and of DeepSeek-V3.1, which
has them after the name."""

from __future__ import annotations

import re

from specrs.server.parsers.marked_calls import MarkedCallParser, Marks

SECTION, END_SECTION = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
CODE, END_CODE = "```json", "```"


class DeepSeekV3Parser(MarkedCallParser):
    """Parser of text and calls: the word `function`, the name, and the arguments in a block of code."""

    marks = Marks(
        SECTION, END_SECTION, CALL, END_CALL, re.compile(rf"\w*\s*{SEPARATOR}\s*(?P<name>\S+?)\s*({CODE})?"), END_CODE
    )


class DeepSeekV31Parser(MarkedCallParser):
    """Parser of text and calls: the name, and the arguments after a separator."""

    marks = Marks(SECTION, END_SECTION, CALL, END_CALL, re.compile(rf"(?P<name>\S+?)\s*{SEPARATOR}"))
