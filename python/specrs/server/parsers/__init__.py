"""Parsers of model output that arrives in pieces: reasoning, tool calls and content. They generate nothing and know no
HTTP.

Each format has a file; `base` has what they share, and `table` lists them under the names of vLLM's flags.
"""
