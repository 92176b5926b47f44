"""Parser of tool calls of Step3: `<steptml:invoke name="..."><steptml:parameter name="key">value</steptml:parameter>
</steptml:invoke>` between marks with wide bars."""

from __future__ import annotations

from specrs.server.parsers.tagged_calls import TaggedCallParser, Tags


class Step3Parser(TaggedCallParser):
    """Parser of text and calls. Each parameter is reported once it is complete."""

    tags = Tags(
        opens=("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>"),
        inside=("function", "<｜tool_sep｜>"),
        closes=("<｜tool_call_end｜>", "<｜tool_calls_end｜>"),
        function='<steptml:invoke name="',
        end_name='">',
        end_function="</steptml:invoke>",
        key='<steptml:parameter name="',
        end_key='">',
        end_value="</steptml:parameter>",
    )
