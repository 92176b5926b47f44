"""Drafters: methods that propose tokens. This module has the table of all of them.

A drafter is a file or folder here, with its options, its declaration to the scheduler and its loader, and a row in the
table. `DrafterOptions` inherits the options of all drafters, and `SpeculativeConfig` inherits it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specrs.drafters.assistant import ASSISTANT, AssistantOptions
from specrs.drafters.draft_model import DRAFT_MODEL
from specrs.drafters.eagle3 import EAGLE3, Eagle3Options
from specrs.drafters.grammar import GRAMMAR
from specrs.drafters.method import WHERE, HostMethod, Method, ModelMethod
from specrs.drafters.mtp import MTP, MtpOptions
from specrs.drafters.ngram import NGRAM, NgramOptions
from specrs.drafters.other_tokenizer import OTHER_TOKENIZER, OtherTokenizerOptions
from specrs.drafters.parallel import PARALLEL, ParallelOptions
from specrs.drafters.prediction import PREDICTION
from specrs.drafters.suffix import SUFFIX, SuffixOptions
from specrs.errors import UnsupportedConfigError, invalid
from specrs.options import options_of

TABLE: tuple[Method, ...] = (
    OTHER_TOKENIZER,
    PARALLEL,
    DRAFT_MODEL,
    EAGLE3,
    ASSISTANT,
    MTP,
    NGRAM,
    SUFFIX,
    PREDICTION,
    GRAMMAR,
)
"""Rows of all drafters. If several rows have the same name, the first whose `serves` returns True is used."""


@dataclass(frozen=True, kw_only=True)
class DrafterOptions(
    SuffixOptions, NgramOptions, MtpOptions, AssistantOptions, Eagle3Options, OtherTokenizerOptions, ParallelOptions
):
    """Options of all drafters. Python orders the fields of the last base class first."""

    def check_rules(self) -> None:
        """Raise `InvalidConfigError` for options of a drafter that contradict each other, and for options that are not
        implemented together."""
        for row in TABLE:
            row.options.check_rules(self)
        if self.use_heterogeneous_vocab and self.parallel_drafting:
            reason = "not implemented with parallel_drafting=True; allowed: False"
            raise invalid(UnsupportedConfigError, WHERE + "use_heterogeneous_vocab", True, reason)
        for other in ("use_heterogeneous_vocab", "parallel_drafting"):
            if self.draft_vocab_size is not None and getattr(self, other):
                reason = f"not implemented with {other}=True; leave draft_vocab_size out"
                raise invalid(UnsupportedConfigError, WHERE + "draft_vocab_size", self.draft_vocab_size, reason)


METHODS = tuple(dict.fromkeys(row.name for row in TABLE))
"""Names of all drafting methods."""
HOST_METHODS = {row.name: row for row in TABLE if isinstance(row, HostMethod)}
"""Rows of the methods that draft from the text, without a model, by name."""


def methods_of(option: str) -> tuple[str, ...]:
    """Return the methods that have `option` among their own options. Empty for an option that every method has."""
    return tuple(dict.fromkeys(row.name for row in TABLE if option in options_of(row.options)))


def model_method(methods: Sequence[str], speculative: Any) -> ModelMethod | None:
    """Return the row of the one drafter with a model among `methods`; None if they all draft from the text."""
    rows = (row for row in TABLE if isinstance(row, ModelMethod))
    return next((row for row in rows if row.name in methods and row.serves(speculative)), None)
