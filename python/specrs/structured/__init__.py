"""Structured output: what a request may demand of its text, and the masks that enforce it. Samples nothing.

`params` has what a user writes. `compiler` compiles it, after a trial in a process that can be killed (`worker`).
`grammar` is the result, and `matcher` follows one request through it. Importing this package imports only `params`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specrs.structured.params import StructuredOutputsParams

if TYPE_CHECKING:
    from specrs.structured.grammar import Grammar, compile_grammar, submit_grammar
    from specrs.structured.matcher import GrammarCursor, GrammarMatcher
    from specrs.structured.torch_masks import unpack_mask

_HOME = {
    "Grammar": "grammar",
    "compile_grammar": "grammar",
    "submit_grammar": "grammar",
    "GrammarCursor": "matcher",
    "GrammarMatcher": "matcher",
    "unpack_mask": "torch_masks",
}
"""For each public name, the module that has it. A module is imported when one of its names is first used. `torch_masks`
needs torch."""

__all__ = [
    "Grammar",
    "GrammarCursor",
    "GrammarMatcher",
    "StructuredOutputsParams",
    "compile_grammar",
    "submit_grammar",
    "unpack_mask",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'specrs.structured' has no attribute {name!r}")
    return getattr(import_module(f"specrs.structured.{_HOME[name]}"), name)
