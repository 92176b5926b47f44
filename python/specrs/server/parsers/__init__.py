"""Text of models, read as it is written: reasoning, tool calls, content. Generates nothing and knows no HTTP.

A format is a file; `base` is what they share, `table` names them as vLLM's flags do.
"""
