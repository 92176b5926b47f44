"""Rows of the table of drafters, and the base of their options. Names no drafter and loads nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specrs.core import HostDrafter
from specrs.drafters.base import LoadedDrafter, Loading
from specrs.errors import InvalidConfigError, invalid
from specrs.model_values import MODEL_PATH
from specrs.options import SPECULATING, Integer, Text, option

if TYPE_CHECKING:
    from specrs.models.config import ModelConfig

WHERE = "speculative_config."
"""Prefix of the names of drafter options in error messages."""


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """Base of a drafter's options. `SpeculativeConfig` inherits the options of all drafters."""

    def check_rules(self) -> None:
        """Raise `InvalidConfigError` for options of this drafter that contradict each other."""


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(MethodOptions):
    """Options of a drafter that has weights."""

    model: str | None = option(
        None,
        MODEL_PATH,
        "folder or hub id of the draft model or head",
        default_is="the bundled draft, for the bundled target only",
        flag_name="spec-model",
        commands=SPECULATING,
    )
    max_model_len: int | None = option(
        None,
        Integer(2),
        "tokens of the draft's context",
        default_is="the checkpoint's",
        details="A request that outgrows it goes on without drafts.",
    )
    revision: str | None = option(None, Text(), "branch, tag or commit of the draft's hub id", default_is="main")


@dataclass(frozen=True, kw_only=True)
class Method:
    """One row of the table of drafters."""

    name: str
    """Value of `speculative_config.method` that selects the row. Rows may share a name if they differ in `serves`."""
    options: type[MethodOptions]
    """Options of the drafter. Options of other drafters are rejected if this one is used."""


@dataclass(frozen=True, kw_only=True)
class HostMethod(Method):
    """A drafter without a model: the Rust core proposes from texts when it plans a step."""

    declare: Callable[[Any], HostDrafter]
    """Function from a `SpeculativeConfig` to the declaration from which the scheduler is built."""
    drafts_of_requests: bool = False
    """True if its drafts come with a request, such as a prediction. An engine that takes drafts from the host anyway
    then has the method without naming it."""
    for_repeats: Mapping[str, Any] = field(default_factory=dict)
    """Options for measurements that repeat prompts, unless the user sets them."""


@dataclass(frozen=True, kw_only=True)
class ModelMethod(Method):
    """A drafter with weights of its own."""

    what: str
    """Noun for its checkpoint in error messages, such as `a draft`."""
    bundled: Callable[[], str] | None
    """Function that returns the folder of the drafter that comes with the package, for the bundled target. None: the
    drafter is in the target's checkpoint, whatever the target is."""
    load: Callable[[Loading], LoadedDrafter]
    """Function that loads the drafter's weights. Raises `InvalidConfigError` or a subclass if a file is missing, wrong
    or not supported."""
    check: Callable[[str, str | None, ModelConfig], None] | None = None
    """Function that checks the configuration of the drafter in a folder or hub id, at a revision, for a target, before
    weights are loaded. Raises `InvalidConfigError` or a subclass. None: `load` checks it."""
    serves: Callable[[Any], bool] = lambda _: True
    """Function that returns True if a `SpeculativeConfig` with the row's `name` means this row. The first such row is
    used."""
    is_model: bool = True
    """True if the checkpoint is a whole model. It may then be quantized and split over ranks, and has a tokenizer."""
    same_tokenizer: bool = True
    """True if the drafter has a tokenizer, which must be the target's."""
    quantized_target: bool = True
    """True if the drafter works for targets with `quantization`."""


def wrong(name: str, value: object, reason: str) -> InvalidConfigError:
    """Return the error for the drafter option `name` at `value`. `reason` says what is wrong."""
    return invalid(InvalidConfigError, WHERE + name, value, reason)
