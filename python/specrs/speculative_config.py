"""How an engine drafts: `SpeculativeConfig`, under vLLM's names, checked once. Reads no checkpoint."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specrs.errors import (
    InvalidConfigError,
    UnsupportedConfigError,
    check_bool,
    check_choice,
    check_int,
    check_number,
    check_text,
    did_you_mean,
    invalid,
    rejects_unknown_arguments,
    unknown_key,
)
from specrs.sampling import MAX_SPECULATIVE_TOKENS

_REJECTION_NAMES = {
    "rejection": "rejection",
    "standard": "rejection",
    "coupled": "coupled",
    "synthetic": "synthetic",
}
AUTO = "auto"
DEFAULT_MAX_SPECULATIVE_TOKENS = 7
"""The most drafts of `num_speculative_tokens="auto"` unless told otherwise: 8 rows of verification a request."""
_MODEL = frozenset(
    {
        "model",
        "revision",
        "max_model_len",
        "quantization",
        "kv_cache_dtype",
        "parallel_drafting",
        "use_heterogeneous_vocab",
    }
)
METHODS = {
    "draft_model": _MODEL,
    "eagle3": frozenset({"model", "revision", "max_model_len", "aux_hidden_state_layer_ids", "rope_theta"}),
    "ngram": frozenset({"prompt_lookup_min", "prompt_lookup_max"}),
    "suffix": frozenset(
        {
            "suffix_decoding_max_tree_depth",
            "suffix_decoding_max_cached_requests",
            "suffix_decoding_max_spec_factor",
            "suffix_decoding_min_token_prob",
            "suffix_decoding_max_memory_bytes",
        }
    ),
}
"""The ways of drafting, each with the keys that it has and others may not have."""
HOST_METHODS = frozenset({"ngram", "suffix"})
"""Those that draft from the text, without a model."""
DEFAULT_PROMPT_LOOKUP = 5
"""Tokens of an n-gram, shortest and longest, unless told otherwise."""
MAX_PROMPT_LOOKUP = 1024
KV_CACHE_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")
AT_LOAD = ("fp8", "int8", "int4")
"""Methods that also quantize weights of 16 and 32 bit as they are loaded. `models.quantization.table` has them, too,
because models do not import settings; a test compares the two."""
QUANTIZATIONS = (*AT_LOAD, "compressed-tensors", "gptq", "awq", "mxfp4", "gguf")


@rejects_unknown_arguments(InvalidConfigError)
@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are drafted. Immutable and checked at construction; `from_mapping` reads vLLM's dictionary.

    `method`: `draft_model`, or `ngram`: drafts are what followed the longest n-gram that ends the text, where it stood
    last before. It needs no model, and pays where texts repeat their prompts: summaries, edits, code.
    `suffix`: drafts are what followed the end of the text most often, in it and in earlier outputs (suffix decoding).
    It needs no model either, and drafts more the more it has seen. A list, as `suffix,draft_model`: each request has in
    each launch the drafter that promises the most tokens for its time; at most one of them has a model.
    `suffix_decoding_max_tree_depth` (24, 2 to 256): tokens of a pattern and its draft together.
    `suffix_decoding_max_cached_requests` (10000): outputs that are kept, 0 for none but a request's own.
    `suffix_decoding_max_spec_factor` (1.0): draft tokens for each token of the pattern.
    `suffix_decoding_min_token_prob` (0.1): the least that a draft token's count may be of its pattern's.
    `suffix_decoding_max_memory_bytes` (1 GiB): the oldest outputs go where more bytes are in use.
    `eagle3`: a head over the target's hidden states (EAGLE-3), in either published format.
    `prompt_lookup_min`, `prompt_lookup_max`: tokens of an n-gram, 1 to 1024, for `ngram`: the longest is looked for
    first. With neither both are 5, with one of them both are that.
    `model`: folder or hub id of the draft model or head; None is the bundled draft, for the bundled target only.
    `aux_hidden_state_layer_ids`: for `eagle3`: target layers at whose entry the head reads hidden states, ascending (id
    2: what two layers have computed); None is what its checkpoint says, read so, or 2, n // 2 and n - 3 of n layers.
    `rope_theta`: for `eagle3`: the base of its rotary embedding, above 0; None is its checkpoint's.
    `num_speculative_tokens`: drafts per iteration, 0 to 16; a request may ask for fewer. `"auto"` chooses for every
    request and launch what yields the most tokens per second, none included, from what launches cost (measured for a
    second or two at start, refined as they run) and how drafts fare; `max_num_speculative_tokens` is then the most,
    7 by default.
    `max_model_len`: the draft's context; a request that outgrows it goes on without drafts. None is the checkpoint's.
    `draft_tensor_parallel_size`: 1, the draft whole on every rank, which computes it alone, or the target's.
    `rejection_sample_method`: `rejection` (`standard` is its other name) accepts most; `coupled` gives the text
    that the same seed gives without speculation. Both sample the target's distribution; greedy text is the same.
    `synthetic` is for timing only: it accepts draft i with the unconditional rate `synthetic_acceptance_rates[i - 1]`,
    whatever the models say, so the text is no model's. Every output is marked so.
    `disable_padded_drafter_batch`: accepted for vLLM's sake; rows are never padded here.
    `quantization`: as the engine's, of the draft; None: what its checkpoint says, whatever the target is.
    `kv_cache_dtype`: as the engine's, of the draft model; None: the engine's, as for a head always.
    `parallel_drafting`: the draft model is one that was fine-tuned with mask tokens to give all drafts in one pass
    (PARD); its config.json names its mask token, as `mask_token_id`, `pard_token` or `ptd_token_id`.
    `use_heterogeneous_vocab`: the draft may have another tokenizer than the target. Under `coupled` it reads and writes
    text (string-level exact match); under `rejection` it proposes the tokens that both vocabularies have (token-level
    intersection), and is fed its unknown token, or its EOS, for others.
    """

    num_speculative_tokens: int | str
    model: str | None = None
    method: str = "draft_model"
    max_model_len: int | None = None
    revision: str | None = None
    draft_tensor_parallel_size: int = 1
    rejection_sample_method: str = "rejection"
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    disable_padded_drafter_batch: bool = False
    max_num_speculative_tokens: int | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    suffix_decoding_max_tree_depth: int | None = None
    suffix_decoding_max_cached_requests: int | None = None
    suffix_decoding_max_spec_factor: float | None = None
    suffix_decoding_min_token_prob: float | None = None
    suffix_decoding_max_memory_bytes: int | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    parallel_drafting: bool = False
    use_heterogeneous_vocab: bool = False
    aux_hidden_state_layer_ids: tuple[int, ...] | None = None
    rope_theta: float | None = None

    def __post_init__(self) -> None:
        error, at = InvalidConfigError, "speculative_config."
        checked: dict[str, object] = {"model": check_model_path(at + "model", self.model)}
        if self.num_speculative_tokens != AUTO:
            checked["num_speculative_tokens"] = check_int(
                error,
                at + "num_speculative_tokens",
                self.num_speculative_tokens,
                0,
                MAX_SPECULATIVE_TOKENS,
                also=", or 'auto'",
            )
        if self.max_num_speculative_tokens is not None:
            most = check_int(
                error,
                at + "max_num_speculative_tokens",
                self.max_num_speculative_tokens,
                1,
                MAX_SPECULATIVE_TOKENS,
                also=", or None",
            )
            if self.num_speculative_tokens != AUTO:
                raise invalid(
                    error, at + "max_num_speculative_tokens", most, "allowed only with num_speculative_tokens='auto'"
                )
        if self.max_model_len is not None:
            checked["max_model_len"] = check_int(error, at + "max_model_len", self.max_model_len, 2, also=", or None")
        if self.revision is not None:
            check_text(error, at + "revision", self.revision, also=", or None")
        checked["method"] = _check_methods(at + "method", self.method)
        object.__setattr__(self, "method", checked["method"])
        check_quantization(at + "quantization", self.quantization)
        if self.kv_cache_dtype is not None:
            checked["kv_cache_dtype"] = check_kv_cache_dtype(at + "kv_cache_dtype", self.kv_cache_dtype)
        checked["aux_hidden_state_layer_ids"] = _layer_ids(self.aux_hidden_state_layer_ids)
        if self.rope_theta is not None:
            checked["rope_theta"] = check_number(
                error, at + "rope_theta", self.rope_theta, 0.0, math.inf, open_low=True
            )
        self._check_method()
        name = "draft_tensor_parallel_size"
        checked[name] = check_int(error, at + name, self.draft_tensor_parallel_size, 1)
        rule = check_choice(error, at + "rejection_sample_method", self.rejection_sample_method, _REJECTION_NAMES)
        checked["rejection_sample_method"] = _REJECTION_NAMES[rule]
        rates = _synthetic_rates(self.synthetic_acceptance_rates, rule, self.most_speculative_tokens)
        checked["synthetic_acceptance_rates"] = rates
        check_bool(error, at + "disable_padded_drafter_batch", self.disable_padded_drafter_batch)
        check_bool(error, at + "parallel_drafting", self.parallel_drafting)
        check_bool(error, at + "use_heterogeneous_vocab", self.use_heterogeneous_vocab)
        if self.use_heterogeneous_vocab and self.parallel_drafting:
            reason = "not implemented with parallel_drafting=True; allowed: False"
            raise invalid(UnsupportedConfigError, at + "use_heterogeneous_vocab", True, reason)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def _check_method(self) -> None:
        """What belongs to another method is refused; n-gram sizes are checked."""
        error, at = InvalidConfigError, "speculative_config."
        own = frozenset().union(*(METHODS[method] for method in self.methods))
        for name in sorted(frozenset().union(*METHODS.values()) - own):
            if getattr(self, name) not in (None, False):
                owners = " or ".join(repr(method) for method, keys in METHODS.items() if name in keys)
                reason = f"not allowed with method={self.method!r}; allowed with {owners}"
                raise invalid(error, at + name, getattr(self, name), reason)
        for name in ("prompt_lookup_min", "prompt_lookup_max"):
            if getattr(self, name) is not None:
                check_int(error, at + name, getattr(self, name), 1, MAX_PROMPT_LOOKUP, also=", or None")
        for name, least, most in (
            ("suffix_decoding_max_tree_depth", 2, 256),
            ("suffix_decoding_max_cached_requests", 0, None),
            ("suffix_decoding_max_memory_bytes", 0, None),
        ):
            if getattr(self, name) is not None:
                check_int(error, at + name, getattr(self, name), least, most, also=", or None")
        factor, prob = self.suffix_decoding_max_spec_factor, self.suffix_decoding_min_token_prob
        if factor is not None:
            check_number(error, at + "suffix_decoding_max_spec_factor", factor, 0.0, open_low=True)
        if prob is not None:
            check_number(error, at + "suffix_decoding_min_token_prob", prob, 0.0, 1.0)
        least, most = self.prompt_lookup
        if least > most:
            raise invalid(error, at + "prompt_lookup_min", least, f"must be at most prompt_lookup_max={most}")

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
        given = {name.removeprefix(start): getattr(self, name) for name in METHODS["suffix"]}
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
        known = {field.name for field in dataclasses.fields(cls)}
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


def _check_methods(field: str, value: object) -> str:
    """The list without spaces. Raises for what is no method, for one given twice, and for two that have a model."""
    methods = [part.strip() for part in value.split(",")] if isinstance(value, str) else []
    with_model = [method for method in methods if method not in HOST_METHODS]
    listed = f"methods are {', '.join(METHODS)}, or several with commas between"
    unknown = [method for method in methods if method not in METHODS]
    if unknown or not methods:
        hint = did_you_mean(unknown[0], METHODS) if unknown else ""
        raise invalid(UnsupportedConfigError, field, value, f"not implemented; {listed}{hint}")
    if len(set(methods)) < len(methods):
        raise invalid(InvalidConfigError, field, value, f"names a method twice; {listed}")
    if len(with_model) > 1:
        raise invalid(InvalidConfigError, field, value, f"names two drafters with a model of their own; {listed}")
    return ",".join(map(str, methods))


def check_model_path(field: str, value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    return check_text(InvalidConfigError, field, value, also=": a folder or a hub id, or None")


def check_quantization(field: str, value: object) -> None:
    if value is not None and value not in QUANTIZATIONS:
        allowed = ", ".join(map(repr, (None, *QUANTIZATIONS)))
        raise invalid(UnsupportedConfigError, field, value, f"not implemented; allowed: {allowed}")


def check_kv_cache_dtype(field: str, value: object) -> str:
    """Its name; `fp8` is `fp8_e4m3`."""
    if value not in KV_CACHE_DTYPES:
        allowed = ", ".join(map(repr, KV_CACHE_DTYPES))
        raise invalid(UnsupportedConfigError, field, value, f"not implemented; allowed: {allowed}")
    return "fp8_e4m3" if value == "fp8" else str(value)


def _layer_ids(value: object) -> tuple[int, ...] | None:
    """How many layers there are, the head's loader knows."""
    field, error = "speculative_config.aux_hidden_state_layer_ids", InvalidConfigError
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not value:
        raise invalid(error, field, value, "must be a list of layer ids, or None")
    ids = tuple(check_int(error, f"{field}[{i}]", layer, 0) for i, layer in enumerate(value))
    if any(later <= earlier for earlier, later in itertools.pairwise(ids)):
        raise invalid(error, field, value, "must rise: hidden states are read in the order of the layers")
    return ids


def _synthetic_rates(value: object, rule: str, num_speculative_tokens: int) -> tuple[float, ...] | None:
    field, error = "speculative_config.synthetic_acceptance_rates", InvalidConfigError
    if rule != "synthetic":
        if value is not None:
            raise invalid(error, field, value, "allowed only with rejection_sample_method='synthetic'")
        return None
    if not isinstance(value, list | tuple) or len(value) != num_speculative_tokens:
        raise invalid(error, field, value, f"must be a list of num_speculative_tokens={num_speculative_tokens} rates")
    rates = tuple(check_number(error, f"{field}[{i}]", rate, 0.0, 1.0) for i, rate in enumerate(value))
    if any(later > earlier for earlier, later in itertools.pairwise(rates)):
        raise invalid(error, field, value, "must not rise: each is the share of drafts accepted up to that position")
    return rates
