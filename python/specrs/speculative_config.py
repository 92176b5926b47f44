"""`SpeculativeConfig`: how an engine drafts, under vLLM's names. Reads no checkpoint."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import Any

from specrs.errors import (
    InvalidConfigError,
    SpecrsError,
    UnsupportedConfigError,
    did_you_mean,
    invalid,
    rejects_unknown_arguments,
    unknown_key,
)
from specrs.options import (
    Choice,
    Integer,
    ListOf,
    Number,
    Switch,
    Text,
    check_options,
    option,
    options_of,
)
from specrs.sampling import MAX_SPECULATIVE_TOKENS

AUTO = "auto"
DEFAULT_MAX_SPECULATIVE_TOKENS = 7
"""Default maximum of drafts with `num_speculative_tokens="auto"`: 8 rows of verification per request."""
METHODS = ("draft_model", "eagle3", "ngram", "suffix")
"""The methods of drafting."""
HOST_METHODS = frozenset({"ngram", "suffix"})
"""Methods that draft from the text, without a model."""
DEFAULT_PROMPT_LOOKUP = 5
"""Default length of an n-gram in tokens, shortest and longest."""
KV_CACHE_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")
AT_LOAD = ("fp8", "int8", "int4")
"""Methods that also quantize weights of 16 and 32 bit as they are loaded. `models.quantization.table` has them, too,
because models do not import settings; a test compares the two."""
QUANTIZATIONS = (*AT_LOAD, "compressed-tensors", "gptq", "awq", "mxfp4", "gguf")
MODEL_PATH = Text("a folder or a hub id")
QUANTIZATION = Choice(QUANTIZATIONS, unsupported=True)
CACHE_DTYPE = Choice(KV_CACHE_DTYPES, {"fp8": "fp8_e4m3"}, unsupported=True)
_NGRAM = Integer(1, 1024)
_WHERE = "speculative_config."


class _Methods(Choice):
    """A method, or a list of different ones of which at most one has a model. Stored without spaces."""

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


@rejects_unknown_arguments(InvalidConfigError)
@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are drafted. Immutable and checked at construction; `from_mapping` reads vLLM's dictionary.

    docs/configuration.md lists the options, docs/drafters.md compares the methods. Raises `InvalidConfigError` naming
    field, value and what is allowed; `UnsupportedConfigError` for what vLLM has and specrs has not.
    """

    num_speculative_tokens: int | str = option(
        MISSING,
        Integer(0, MAX_SPECULATIVE_TOKENS, word=AUTO),
        "draft tokens per step",
        note="auto: the engine chooses",
        flag_name="spec-tokens",
        commands=("serve",),
        details="With `auto`, the engine picks the number for each request and step that gives the most tokens per "
        "second. It drafts nothing if drafting would be slower. It measures the cost of steps for a second or two at "
        "start, and goes on measuring as it runs. A request may ask for fewer.",
    )
    model: str | None = option(
        None,
        MODEL_PATH,
        "folder or hub id of the draft model or head",
        default_is="the bundled draft, for the bundled target only",
        flag_name="spec-model",
        commands=("serve",),
        methods=("draft_model", "eagle3"),
    )
    method: str = option(
        "draft_model",
        _Methods(METHODS),
        "drafter",
        note="or several with commas between, of which at most one has a model",
        flag_name="spec-method",
        commands=("serve",),
        details="`ngram` drafts what followed the longest n-gram that ends the text, where it stood last before. "
        "`suffix` drafts what followed the end of the text most often, in it and in earlier outputs. Neither has a "
        "model. `eagle3` is a head over the target's hidden states, in either published format. With a list, each "
        "request has in each step the drafter that promises the most tokens for its time.",
    )
    max_model_len: int | None = option(
        None,
        Integer(2),
        "tokens of the draft's context",
        default_is="the checkpoint's",
        methods=("draft_model", "eagle3"),
        details="A request that outgrows it goes on without drafts.",
    )
    revision: str | None = option(
        None,
        Text(),
        "branch, tag or commit of the draft's hub id",
        default_is="main",
        methods=("draft_model", "eagle3"),
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
        details="`rejection` (also called `standard`) accepts most. `coupled` gives the text that the same seed gives "
        "without speculation. Both sample the target's distribution, and greedy text is the same. `synthetic` is for "
        "timing only: acceptance follows `synthetic_acceptance_rates`, the text is no model's, and every output is "
        "marked.",
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
        default_is=f"{DEFAULT_MAX_SPECULATIVE_TOKENS}",
    )
    prompt_lookup_min: int | None = option(
        None,
        _NGRAM,
        "tokens of the shortest n-gram",
        default_is=f"prompt_lookup_max, else {DEFAULT_PROMPT_LOOKUP}",
        methods=("ngram",),
    )
    prompt_lookup_max: int | None = option(
        None,
        _NGRAM,
        "tokens of the longest n-gram, which is looked for first",
        default_is=f"prompt_lookup_min, else {DEFAULT_PROMPT_LOOKUP}",
        methods=("ngram",),
    )
    suffix_decoding_max_tree_depth: int | None = option(
        None, Integer(2, 256), "tokens of a pattern and its draft together", default_is="24", methods=("suffix",)
    )
    suffix_decoding_max_cached_requests: int | None = option(
        None,
        Integer(0),
        "outputs kept for other requests",
        note="0: none",
        default_is="10000",
        methods=("suffix",),
    )
    suffix_decoding_max_spec_factor: float | None = option(
        None,
        Number(0.0, open_low=True),
        "draft tokens per token of the pattern",
        default_is="1",
        methods=("suffix",),
    )
    suffix_decoding_min_token_prob: float | None = option(
        None,
        Number(0.0, 1.0),
        "least count of a draft token, as a share of its pattern's",
        default_is="0.1",
        methods=("suffix",),
    )
    suffix_decoding_max_memory_bytes: int | None = option(
        None,
        Integer(0),
        "bytes of kept outputs, the oldest of which are dropped",
        default_is="1G",
        methods=("suffix",),
    )
    quantization: str | None = option(
        None, QUANTIZATION, "type of the draft's weights", default_is="its checkpoint's", methods=("draft_model",)
    )
    kv_cache_dtype: str | None = option(
        None, CACHE_DTYPE, "type of the draft's KV cache", default_is="the engine's", methods=("draft_model",)
    )
    parallel_drafting: bool = option(
        False,
        Switch(),
        "all drafts come from one pass",
        methods=("draft_model",),
        details="The draft model was fine-tuned with mask tokens for this (PARD). Its config.json names the mask token "
        "as `mask_token_id`, `pard_token` or `ptd_token_id`.",
    )
    use_heterogeneous_vocab: bool = option(
        False,
        Switch(),
        "the draft may have another tokenizer than the target",
        methods=("draft_model",),
        details="Under `coupled`, the draft reads and writes text (string-level exact match). Under `rejection`, it "
        "proposes the tokens that both vocabularies have (token-level intersection). For others "
        "it reads its unknown token, or its EOS.",
    )
    aux_hidden_state_layer_ids: tuple[int, ...] | None = option(
        None,
        ListOf(Integer(0), "layer ids"),
        "target layers at whose entry the head reads hidden states, ascending",
        default_is="the checkpoint's, else 2, n // 2 and n - 3 of n layers",
        methods=("eagle3",),
        details="Id 2 stands for what two layers have computed.",
    )
    rope_theta: float | None = option(
        None,
        Number(0.0, math.inf, open_low=True),
        "base of the head's rotary embedding",
        default_is="its checkpoint's",
        methods=("eagle3",),
    )

    def __post_init__(self) -> None:
        self._check_method()  # first, so that its messages show the values that were given
        check_options(self, InvalidConfigError, _WHERE)
        most = self.max_num_speculative_tokens
        if most is not None and self.num_speculative_tokens != AUTO:
            raise _wrong("max_num_speculative_tokens", most, "allowed only with num_speculative_tokens='auto'")
        ids = self.aux_hidden_state_layer_ids
        if ids is not None and any(later <= earlier for earlier, later in itertools.pairwise(ids)):
            reason = "must rise: hidden states are read in the order of the layers"
            raise _wrong("aux_hidden_state_layer_ids", list(ids), reason)
        least, longest = self.prompt_lookup
        if least > longest:
            raise _wrong("prompt_lookup_min", least, f"must be at most prompt_lookup_max={longest}")
        self._check_synthetic()
        if self.use_heterogeneous_vocab and self.parallel_drafting:
            reason = "not implemented with parallel_drafting=True; allowed: False"
            raise invalid(UnsupportedConfigError, _WHERE + "use_heterogeneous_vocab", True, reason)

    def _check_method(self) -> None:
        """Raise `InvalidConfigError` for a wrong `method`, and for an option that only other methods have."""
        declared_options = options_of(type(self))
        method = declared_options["method"].check(InvalidConfigError, _WHERE + "method", self.method)
        object.__setattr__(self, "method", method)
        for name, declared in declared_options.items():
            value, owners = getattr(self, name), declared.methods
            if owners and not set(owners).intersection(self.methods) and value not in (None, False):
                listed = " or ".join(map(repr, owners))
                raise _wrong(name, value, f"not allowed with method={self.method!r}; allowed with {listed}")

    def _check_synthetic(self) -> None:
        """Raise `InvalidConfigError` for rates without the rule `synthetic`, and for rates that are no such shares."""
        name, rates, count = "synthetic_acceptance_rates", self.synthetic_acceptance_rates, self.most_speculative_tokens
        if self.rejection_sample_method != "synthetic":
            if rates is not None:
                raise _wrong(name, rates, "allowed only with rejection_sample_method='synthetic'")
        elif len(rates or ()) != count:
            raise _wrong(name, rates, f"must be a list of num_speculative_tokens={count} rates")
        elif any(later > earlier for earlier, later in itertools.pairwise(rates or ())):
            raise _wrong(name, rates, "must not rise: each is the share of drafts accepted up to that position")

    @property
    def methods(self) -> tuple[str, ...]:
        """The drafters of the list, in its order."""
        return tuple(self.method.split(","))

    @property
    def on_host(self) -> bool:
        """Whether all drafts come from the text, without a model."""
        return HOST_METHODS.issuperset(self.methods)

    @property
    def drafts_on_host(self) -> bool:
        """Whether some drafts come from the text."""
        return not HOST_METHODS.isdisjoint(self.methods)

    @property
    def suffix_decoding(self) -> dict[str, Any]:
        """The settings of suffix decoding that are given, as `specrs.core.SuffixDrafter` names them."""
        start = "suffix_decoding_"
        names = [name for name, declared in options_of(type(self)).items() if declared.methods == ("suffix",)]
        given = {name.removeprefix(start): getattr(self, name) for name in names}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def reads_hidden(self) -> bool:
        """Whether drafts come from the target's hidden states."""
        return "eagle3" in self.methods

    @property
    def prompt_lookup(self) -> tuple[int, int]:
        """The shortest and the longest n-gram that is looked for."""
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        given = least if most is None else most
        default = DEFAULT_PROMPT_LOOKUP if given is None else given
        return default if least is None else least, default if most is None else most

    @property
    def most_speculative_tokens(self) -> int:
        """The most drafts of an iteration."""
        if isinstance(self.num_speculative_tokens, int):
            return self.num_speculative_tokens
        given = self.max_num_speculative_tokens
        return DEFAULT_MAX_SPECULATIVE_TOKENS if given is None else given

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> SpeculativeConfig:
        """Read a dictionary; dashes in keys equal underscores. Raises `InvalidConfigError` for an unknown key."""
        known = options_of(cls)
        values: dict[str, Any] = {}
        for key, value in mapping.items():
            name = key.replace("-", "_") if isinstance(key, str) else key
            if name not in known:
                raise unknown_key(InvalidConfigError, "speculative_config", key, known)
            if name in values:
                raise InvalidConfigError(f"speculative_config: {name} is given twice, with dashes and with underscores")
            values[name] = value
        if "num_speculative_tokens" not in values:
            raise InvalidConfigError(
                "speculative_config.num_speculative_tokens: is missing; set it to 'auto', or to an integer from 0 to "
                f"{MAX_SPECULATIVE_TOKENS}"
            )
        return cls(**values)


def for_repeats(config: Mapping[str, Any]) -> dict[str, Any]:
    """A drafter's dictionary for measurements in which prompts come again: suffix decoding keeps no output of a request
    for others, unless the dictionary says how many. Otherwise it would draft what it has written before."""
    key = "suffix_decoding_max_cached_requests"
    given = {name.replace("-", "_") for name in config if isinstance(name, str)}
    listed = "suffix" in [part.strip() for part in str(config.get("method", "")).split(",")]
    return {**config, key: 0} if listed and key not in given else dict(config)


def _wrong(name: str, value: object, reason: str) -> InvalidConfigError:
    return invalid(InvalidConfigError, _WHERE + name, value, reason)
