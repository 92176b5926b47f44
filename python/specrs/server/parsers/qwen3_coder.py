"""Parser of tool calls of Qwen3-Coder: `<function=name><parameter=key>value</parameter></function>` between
`<tool_call>` tags."""

from __future__ import annotations

from specrs.server.parsers.tagged_calls import TaggedCallParser, Tags


class Qwen3CoderParser(TaggedCallParser):
    """Parser of text and calls. Each parameter is reported once it is complete."""

    tags = Tags(
        opens=("<tool_call>",),
        closes=("</tool_call>",),
        function="<function=",
        end_name=">",
        end_function="</function>",
        key="<parameter=",
        end_key=">",
        end_value="</parameter>",
        wrapped=True,
    )
