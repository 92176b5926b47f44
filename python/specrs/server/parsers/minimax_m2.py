"""Parser of tool calls of MiniMax-M2: `<invoke name="..."><parameter name="key">value</parameter></invoke>`, all calls
between `<minimax:tool_call>` tags."""

from __future__ import annotations

from specrs.server.parsers.tagged_calls import TaggedCallParser, Tags


class MiniMaxM2Parser(TaggedCallParser):
    """Parser of text and calls. Each parameter is reported once it is complete."""

    tags = Tags(
        opens=("<minimax:tool_call>",),
        closes=("</minimax:tool_call>",),
        function='<invoke name="',
        end_name='">',
        end_function="</invoke>",
        key='<parameter name="',
        end_key='">',
        end_value="</parameter>",
    )
