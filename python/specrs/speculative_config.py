"""`SpeculativeConfig`: how an engine drafts, under vLLM's names. Reads no checkpoint.

The options of each drafter are declared in its module of `specrs.drafters`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from specrs.drafters import HOST_METHODS, METHODS, DrafterOptions, methods_of, model_method
from specrs.drafters.method import WHERE, ModelMethod, wrong
from specrs.errors import (
    InvalidConfigError,
    SpecrsError,
    UnsupportedConfigError,
    did_you_mean,
    invalid,
    rejects_unknown_arguments,
    unknown_key,
)
from specrs.options import SPECULATING, Choice, Integer, ListOf, Number, Switch, check_options, option, options_of
from specrs.sampling import MAX_SPECULATIVE_TOKENS

AUTO = "auto"
DEFAULT_MAX_SPECULATIVE_TOKENS = 16
"""Default maximum number of drafts with `num_speculative_tokens="auto"` on a CPU, or on a device that is unknown."""
DEFAULT_MAX_SPECULATIVE_TOKENS_OF_GPUS = 7
"""Default maximum number of drafts with `num_speculative_tokens="auto"` on a GPU. Each K has CUDA graphs of its own,
which take memory and time at start."""


class _Methods(Choice):
    """A drafting method, or a list of different methods of which at most one has a model. Stored without spaces."""

    def check(self, error: type[SpecrsError], field: str, value: Any, also: str = "") -> str:
        methods = [part.strip() for part in value.split(",")] if isinstance(value, str) else []
        with_model = [method for method in methods if method not in HOST_METHODS]
        listed = f"methods are {', '.join(METHODS)}, or several with commas between"
        unknown = [method for method in methods if method not in METHODS]
        if unknown or not methods:
            hint = did_you_mean(unknown[0], METHODS) if unknown else ""
            raise invalid(UnsupportedConfigError, field, value, f"not implemented; {listed}{hint}")
        if len(set(methods)) < len(methods):
            raise invalid(error, field, value, f"names a method twice; {listed}")
        if len(with_model) > 1:
            raise invalid(error, field, value, f"names two drafters with a model of their own; {listed}")
        return ",".join(methods)


@dataclass(frozen=True, kw_only=True)
class DraftingOptions:
    """Options that all drafters have."""

    num_speculative_tokens: int | str = option(
        AUTO,
        Integer(0, MAX_SPECULATIVE_TOKENS, word=AUTO),
        "draft tokens per step",
        note="auto: the engine chooses",
        flag_name="spec-tokens",
        commands=SPECULATING,
        details="With `auto`, the engine picks the number that gives the most tokens per second, for each request and "
        "step. It drafts nothing if drafting would be slower. It measures the cost of steps for a second or two at "
        "start, and goes on measuring. A request may ask for fewer draft tokens.",
    )
    method: str = option(
        "draft_model",
        _Methods(METHODS),
        "drafter",
        note="or several with commas between, of which at most one has a model",
        flag_name="spec-method",
        commands=SPECULATING,
        details="`ngram` takes the longest n-gram at the end of the text that occurs earlier. It drafts what followed "
        "the last earlier occurrence. `suffix` drafts what most often followed the end of the text, in the text and "
        "in earlier outputs. Neither has a model. `eagle3` is a head over the target's hidden states, in either "
        "published format. `mtp` is the head in the target's own checkpoint. It is the default where there is one and "
        "no `model` is named. With a `model`, `mtp` is Gemma 4's assistant, which reads the target's KV. With a list, "
        "each request uses in each step the drafter with the most expected tokens per second.",
    )
    draft_tensor_parallel_size: int = option(
        1,
        Integer(1),
        "processes that compute the draft together",
        note="1, or the target's tensor_parallel_size",
        details="With 1, every rank computes the whole draft alone.",
    )
    rejection_sample_method: str = option(
        "rejection",
        Choice(("rejection", "standard", "coupled", "synthetic"), {"standard": "rejection"}),
        "rule that verifies sampled drafts",
        details="`rejection` (also called `standard`) accepts the most drafts. `coupled` gives the text that the same "
        "seed gives without speculation. Both sample the target's distribution, and greedy text is the same. "
        "`synthetic` is for timing only. Acceptance follows `synthetic_acceptance_rates`, the text is meaningless, "
        "and every output is marked.",
    )
    synthetic_acceptance_rates: tuple[float, ...] | None = option(
        None,
        ListOf(Number(0.0, 1.0), "rates"),
        "share of drafts accepted up to each position",
        default_is="needed and allowed with rejection_sample_method='synthetic' only",
    )
    disable_padded_drafter_batch: bool = option(False, Switch(), "no effect", note="accepted because vLLM has it")
    max_num_speculative_tokens: int | None = option(
        None,
        Integer(1, MAX_SPECULATIVE_TOKENS),
        "maximum draft tokens per step with num_speculative_tokens='auto'",
        default_is=f"{DEFAULT_MAX_SPECULATIVE_TOKENS} on a CPU, {DEFAULT_MAX_SPECULATIVE_TOKENS_OF_GPUS} on a GPU, "
        "whose graphs are made for each number",
        details="With `synthetic_acceptance_rates`, the default is the number of rates.",
    )


@rejects_unknown_arguments(InvalidConfigError)
@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig(DrafterOptions, DraftingOptions):
    """Configuration of drafting. Immutable and checked at construction; `from_mapping` reads vLLM's dictionary.

    docs/configuration.md lists the options, docs/drafters.md compares the methods. Raises `InvalidConfigError` for a
    wrong value, with field, value and what is allowed; `UnsupportedConfigError` for what vLLM has and specrs has not.
    """

    def __post_init__(self) -> None:
        self._check_method()  # first, so that its messages show the values that were given
        check_options(self, InvalidConfigError, WHERE)
        most = self.max_num_speculative_tokens
        if most is not None and self.num_speculative_tokens != AUTO:
            raise wrong("max_num_speculative_tokens", most, "allowed only with num_speculative_tokens='auto'")
        self.check_rules()
        self._check_revision()
        self._check_synthetic()

    def _check_method(self) -> None:
        """Raise `InvalidConfigError` for a wrong `method`, and for an option that only other methods have."""
        declared_options = options_of(type(self))
        method = declared_options["method"].check(InvalidConfigError, WHERE + "method", self.method)
        object.__setattr__(self, "method", method)
        for name in declared_options:
            value, owners = getattr(self, name), methods_of(name)
            if owners and not set(owners).intersection(self.methods) and value not in (None, False):
                listed = " or ".join(map(repr, owners))
                raise wrong(name, value, f"not allowed with method={self.method!r}; allowed with {listed}")

    def _check_revision(self) -> None:
        """Raise `InvalidConfigError` for a `revision` of a drafter that is in the target's checkpoint."""
        method = self.model_method
        if method is not None and method.bundled is None and self.revision is not None:
            reason = f"must be None without a model: {method.what} in the target's checkpoint has the target's revision"
            raise wrong("revision", self.revision, reason)

    def _check_synthetic(self) -> None:
        """Raise `InvalidConfigError` for acceptance rates without the rule `synthetic`, and for a list that has another
        length than K or whose rates increase."""
        name, rates, count = "synthetic_acceptance_rates", self.synthetic_acceptance_rates, self.most_speculative_tokens
        if self.rejection_sample_method != "synthetic":
            if rates is not None:
                raise wrong(name, rates, "allowed only with rejection_sample_method='synthetic'")
        elif len(rates or ()) != count:
            raise wrong(name, rates, f"must be a list of num_speculative_tokens={count} rates")
        elif count > MAX_SPECULATIVE_TOKENS:
            raise wrong(name, rates, f"must have at most {MAX_SPECULATIVE_TOKENS} rates")
        elif any(later > earlier for earlier, later in itertools.pairwise(rates or ())):
            raise wrong(name, rates, "must not rise: each is the share of drafts accepted up to that position")

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods of the list, in its order."""
        return tuple(self.method.split(","))

    @property
    def on_host(self) -> bool:
        """True if all drafts come from the text, without a model."""
        return HOST_METHODS.keys() >= set(self.methods)

    @property
    def drafts_on_host(self) -> bool:
        """True if some drafts come from the text."""
        return not HOST_METHODS.keys().isdisjoint(self.methods)

    @property
    def model_method(self) -> ModelMethod | None:
        """Entry of the drafter table for the drafter that has weights; None if all drafts come from the text."""
        return model_method(self.methods, self)

    @property
    def most_speculative_tokens(self) -> int:
        """Maximum number of drafts of an iteration. With `auto` and no maximum it is the default of a CPU; the
        configuration of an engine that is built has the maximum of its device."""
        if isinstance(self.num_speculative_tokens, int):
            return self.num_speculative_tokens
        if self.max_num_speculative_tokens is not None:
            return self.max_num_speculative_tokens
        return len(self.synthetic_acceptance_rates or ()) or DEFAULT_MAX_SPECULATIVE_TOKENS

    def on_device(self, most: int) -> SpeculativeConfig:
        """Return the configuration for a device on which `most` is the default maximum number of drafts."""
        given = self.max_num_speculative_tokens is not None or self.synthetic_acceptance_rates is not None
        if given or self.num_speculative_tokens != AUTO or most == self.most_speculative_tokens:
            return self
        return replace(self, max_num_speculative_tokens=most)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> SpeculativeConfig:
        """Build the configuration from a dictionary; dashes in keys equal underscores. Raises `InvalidConfigError` for
        an unknown key or a wrong value."""
        known = options_of(cls)
        values: dict[str, Any] = {}
        for key, value in mapping.items():
            name = key.replace("-", "_") if isinstance(key, str) else key
            if name not in known:
                raise unknown_key(InvalidConfigError, "speculative_config", key, known)
            if name in values:
                raise InvalidConfigError(f"speculative_config: {name} is given twice, with dashes and with underscores")
            values[name] = value
        return cls(**values)


def for_repeats(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a drafter's dictionary for measurements that repeat prompts.

    Drafters that learn from outputs keep no output for other requests then, unless the dictionary says how many to
    keep. Otherwise they would draft the output of an earlier run of the same prompt.
    """
    given = {name.replace("-", "_") for name in config if isinstance(name, str)}
    listed = [part.strip() for part in str(config.get("method", "")).split(",")]
    rows = [row for name, row in HOST_METHODS.items() if name in listed]
    added = {name: value for row in rows for name, value in row.for_repeats.items() if name not in given}
    return {**config, **added}
