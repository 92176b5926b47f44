"""What one request may ask for, under vLLM's names and defaults. Values are checked here; nothing is sampled here."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import InitVar, dataclass
from enum import Enum
from numbers import Integral
from typing import Any

from specrs.core import GREEDY_BELOW, MAX_STOP_IDS
from specrs.errors import (
    InvalidRequestError,
    UnsupportedRequestError,
    check_bool,
    check_int,
    check_number,
    check_text,
    invalid,
    short,
    unknown_key,
)

MAX_SPECULATIVE_TOKENS = 16
MAX_STOP_TOKEN_IDS = MAX_STOP_IDS
"""Stop ids of one request in all, the checkpoint's eos ids included: each row of device state holds this many."""
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LENGTH = 1024
MAX_N = 128
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 32
MAX_BAD_WORD_LENGTH = 1024
MAX_TEMPERATURE = 100.0
MAX_LOGIT_BIAS = 100.0
REPETITION_PENALTIES = (0.01, 100.0)
"""Beyond these, logits that a model gives leave the range of fp32, or all become equal."""
_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1


class RequestOutputKind(Enum):
    """What each output of a stream holds, under vLLM's names.

    `CUMULATIVE`: the whole completion so far. `DELTA`: what is new since the output before. `FINAL_ONLY`: the whole
    completion, and there is one output, the last.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What one request may ask for. Immutable; `replace` makes a changed copy. Every value is checked at construction.

    Names and defaults are vLLM's. `num_speculative_tokens` is this project's own: how many tokens to draft for this
    request in each iteration, 0 to the engine's number; None is the engine's number. No parameter means anything else
    because tokens are drafted.

    `temperature` 0 (or less than 1e-5) is greedy, and the parameters of randomness then have no effect. `seed`: under
    the rule `coupled`, and where nothing is drafted, text depends on nothing but prompt, parameters and seed; under
    `rejection` also on which iterations drafted how much, which other requests may change. None (or -1) gives every
    request its own, derived from the engine's seed. `n` completions have different seeds: `seed`, and others derived
    from it (`derive_seed`).

    Penalties count the output, `repetition_penalty` also the prompt. `logit_bias` maps ids (integers, or their decimal
    strings) to what is added to their logits, -100 to 100. `bad_words` are not written: each word as it is given, and
    after a blank (`tokenize_bad_words`). Only `allowed_token_ids` are, where given. `structured_outputs` is a
    `StructuredOutputsParams` or a dictionary of its fields.

    `logprobs`: of each output token and of this many most likely ones, -1 for all; `prompt_logprobs`: of the prompt's.
    `return_drafts`, this project's own: `CompletionOutput.drafts` tell what was drafted, the rejected tokens included.
    `output_kind` is a `RequestOutputKind`: what each output of a stream holds. `LLM.generate` returns one whole output
    for each prompt, whatever the kind.

    Stop ids are `stop_token_ids` and, unless `ignore_eos`, the checkpoint's eos ids. One of them ends a request once
    `min_tokens` tokens are out. It is not written before, unless `structured_outputs` leaves nothing else: then the
    request ends there. The id stays in `token_ids`; its text is left out unless `include_stop_str_in_output`. Stop
    strings end a request at the token that completes one. The text is cut where the string starts, or after it with
    `include_stop_str_in_output`. At most 64 stop ids (eos included) and 64 stop strings of 1024 characters.
    `max_tokens=None` means as many as the context holds.

    vLLM's other parameters are accepted at their defaults and refused by name otherwise; so are, when the request is
    added, the few here that are not implemented (`reject_unimplemented`).

    Raises `InvalidRequestError` naming field, value and what is allowed.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: Any = None
    logit_bias: Mapping[int, float] | Mapping[str, float] | None = None
    allowed_token_ids: Collection[int] | None = None
    bad_words: Sequence[str] | None = None
    extra_args: Mapping[str, Any] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    num_speculative_tokens: int | None = None
    return_drafts: bool = False
    # vLLM's, checked and not kept
    best_of: InitVar[int | None] = None
    truncate_prompt_tokens: InitVar[int | None] = None
    flat_logprobs: InitVar[bool] = False
    logprob_token_ids: InitVar[Sequence[int] | None] = None
    prompt_logprob_token_ids: InitVar[Sequence[int] | None] = None
    prompt_logprob_start: InitVar[int | None] = None
    skip_reading_prefix_cache: InitVar[bool | None] = None
    stream_interval: InitVar[int | None] = None
    skip_clone: InitVar[bool] = False
    thinking_token_budget: InitVar[int | None] = None
    repetition_detection: InitVar[Any] = None
    logits_processors: InitVar[Any] = None

    def __post_init__(self, *vllm_only: object) -> None:
        _check_vllm_only(vllm_only)
        error = InvalidRequestError
        seed = _optional_int("seed", self.seed, -_INT64_MAX - 1, _INT64_MAX)
        checked: dict[str, object] = {
            "n": check_int(error, "n", self.n, 1, MAX_N),
            "presence_penalty": check_number(error, "presence_penalty", self.presence_penalty, -2.0, 2.0),
            "frequency_penalty": check_number(error, "frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            "repetition_penalty": check_number(
                error, "repetition_penalty", self.repetition_penalty, *REPETITION_PENALTIES
            ),
            "temperature": check_number(error, "temperature", self.temperature, 0.0, MAX_TEMPERATURE),
            "top_p": check_number(error, "top_p", self.top_p, 0.0, 1.0, open_low=True),
            # -1 is the older spelling of "all tokens"
            "top_k": max(0, check_int(error, "top_k", self.top_k, -1, _INT32_MAX)),
            "min_p": check_number(error, "min_p", self.min_p, 0.0, 1.0),
            "seed": None if seed == -1 else seed,
            "stop": _stop_strings(self.stop),
            "stop_token_ids": _stop_token_ids(self.stop_token_ids),
            "max_tokens": _optional_int("max_tokens", self.max_tokens, 1),
            "min_tokens": check_int(error, "min_tokens", self.min_tokens, 0, _INT32_MAX),
            "logprobs": _optional_int("logprobs", self.logprobs, -1),
            "prompt_logprobs": _optional_int("prompt_logprobs", self.prompt_logprobs, -1),
            "structured_outputs": _structured_outputs(self.structured_outputs),
            "logit_bias": _logit_bias(self.logit_bias),
            "allowed_token_ids": _allowed_token_ids(self.allowed_token_ids),
            "bad_words": _bad_words(self.bad_words),
            "output_kind": _output_kind(self.output_kind),
            "num_speculative_tokens": _optional_int(
                "num_speculative_tokens", self.num_speculative_tokens, 0, MAX_SPECULATIVE_TOKENS
            ),
        }
        for name in (
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "include_stop_str_in_output",
            "return_drafts",
        ):
            check_bool(error, name, getattr(self, name))
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise invalid(error, "min_tokens", self.min_tokens, f"must be at most max_tokens={self.max_tokens}")
        if self.stop and not self.detokenize:
            raise invalid(error, "stop", self.stop, "needs detokenize=True: stop strings are found in text")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without randomness."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, empty if None."""
        assert isinstance(self.stop, tuple)  # made at construction
        return self.stop

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with `changes`, checked again."""
        for name in changes:
            if name not in FIELDS and name not in _VLLM_ONLY:
                raise unknown_key(InvalidRequestError, "SamplingParams", name, FIELDS)
        return dataclasses.replace(self, **changes)

    def without(self, *names: str) -> SamplingParams:
        """A copy with these fields at their defaults. Nothing is checked again: a default goes with any other value."""
        other = copy.copy(self)
        for name in names:
            object.__setattr__(other, name, getattr(_DEFAULTS, name))
        return other


FIELDS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
"""Every field of `SamplingParams` with its default."""

_VLLM_ONLY: dict[str, tuple[object, ...]] = {
    "best_of": (None, 1),
    "truncate_prompt_tokens": (None,),
    "flat_logprobs": (False,),
    "logprob_token_ids": (None,),
    "prompt_logprob_token_ids": (None,),
    "prompt_logprob_start": (None,),
    "skip_reading_prefix_cache": (None,),
    "stream_interval": (None,),
    "skip_clone": (False, True),
    "thinking_token_budget": (None,),
    "repetition_detection": (None,),
    "logits_processors": (None, []),
}
"""vLLM's parameters that have no meaning here, in the order of `SamplingParams`, with the values that are served."""


def derive_seed(seed: int, *indices: int) -> int:
    """A seed for one of many, `[-2**63, 2**63)`: of every index, the next seed is number `index` of the SplitMix64
    sequence (Steele, Lea and Flood 2014) that starts at the one before.

    This is where all seeds come from. Of a prompt with `seed=s`, completion 0 samples with s itself and completion
    i > 0 with `derive_seed(s, i)`. Of a prompt without, number j of its `LLM` (counted from 0 over all calls, refused
    prompts included), completion i samples with `derive_seed(engine seed, j, i)`: a fresh engine with the same seed
    gives the same calls the same text, and whether a prompt is refused changes no other seed.

    For one seed, different indices never give the same result.
    """
    state = seed & _UINT64
    for index in indices:
        state = (state + (index + 1) * 0x9E3779B97F4A7C15) & _UINT64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _UINT64
        state ^= state >> 31
    return state - (state >> 63 << 64)


_UINT64 = 2**64 - 1


def tokenize_bad_words(
    words: Sequence[str], encode: Callable[[str], Sequence[int]], vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """The token sequences that `bad_words` forbid: each word as it is, and after a blank if that begins otherwise.

    The blank is for the many vocabularies in which a word within a text is another token than at its start. `encode`
    adds no special tokens. Raises `InvalidRequestError` for a word without tokens, of more than 32, or with ids outside
    the model's vocabulary.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for i, word in enumerate(words):
        plain, spaced = tuple(encode(word)), tuple(encode(f" {word}"))
        forms = [plain] if word.startswith(" ") or spaced[:1] == plain[:1] else [plain, spaced]
        for ids in forms:
            if not 1 <= len(ids) <= MAX_BAD_WORD_TOKENS:
                raise invalid(
                    InvalidRequestError,
                    f"bad_words[{i}]",
                    word,
                    f"{len(ids)} tokens, allowed are 1 to {MAX_BAD_WORD_TOKENS}",
                )
            if max(ids) >= vocab_size:
                raise invalid(
                    InvalidRequestError,
                    f"bad_words[{i}]",
                    word,
                    f"has token {max(ids)}, allowed are ids below {vocab_size}, the model's vocabulary",
                )
            sequences[ids] = None
    return tuple(sequences)


def _check_vllm_only(values: Sequence[object]) -> None:
    for (name, served), value in zip(_VLLM_ONLY.items(), values, strict=True):
        if not any(type(value) is type(same) and value == same for same in served):
            allowed = " or ".join(repr(same) for same in served)
            raise invalid(UnsupportedRequestError, name, value, f"not implemented; allowed: {allowed}")


def _optional_int(field: str, value: object, low: int, high: int | None = None) -> int | None:
    return None if value is None else check_int(InvalidRequestError, field, value, low, high, also=", or None")


def _output_kind(value: object) -> RequestOutputKind:
    """The kind that `value`, a `RequestOutputKind` of ours or of vLLM, stands for."""
    if isinstance(value, Enum) and value.name in RequestOutputKind.__members__:
        return RequestOutputKind[value.name]
    allowed = ", ".join(kind.name for kind in RequestOutputKind)
    raise invalid(InvalidRequestError, "output_kind", value, f"must be a RequestOutputKind: {allowed}")


def _stop_strings(value: object) -> tuple[str, ...]:
    return _texts("stop", value, MAX_STOP_STRINGS, MAX_STOP_STRING_LENGTH)


def _bad_words(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        raise invalid(InvalidRequestError, "bad_words", value, "must be a list of strings, or None")
    return tuple(dict.fromkeys(_texts("bad_words", value, MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH)))


def _texts(field: str, value: object, most: int, longest: int) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise invalid(InvalidRequestError, field, value, "must be a string, a list of strings, or None")
    if len(value) > most:
        raise InvalidRequestError(f"{field}: {len(value)} strings, allowed are at most {most}")
    strings = tuple(check_text(InvalidRequestError, f"{field}[{i}]", item) for i, item in enumerate(value))
    for i, item in enumerate(strings):
        if len(item) > longest:
            raise InvalidRequestError(f"{field}[{i}]: {len(item)} characters, allowed are at most {longest}")
        if any("\ud800" <= c <= "\udfff" for c in item):
            raise invalid(InvalidRequestError, f"{field}[{i}]", item, "must be text: a lone surrogate is no character")
    return strings


def _stop_token_ids(value: object) -> tuple[int, ...]:
    return () if value is None else _ids("stop_token_ids", value, MAX_STOP_TOKEN_IDS)


def _allowed_token_ids(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    ids = _ids("allowed_token_ids", value)
    if not ids:
        raise invalid(InvalidRequestError, "allowed_token_ids", value, "must have at least one token id, or be None")
    if len(set(ids)) < len(ids):
        first = {item: i for i, item in reversed(list(enumerate(ids)))}
        i, item = next((i, item) for i, item in enumerate(ids) if first[item] < i)
        raise invalid(InvalidRequestError, f"allowed_token_ids[{i}]", item, "is there already; allowed is each id once")
    return ids


def _ids(field: str, value: object, most: int | None = None) -> tuple[int, ...]:
    if not isinstance(value, Collection) or isinstance(value, (str, bytes, Mapping)):
        raise invalid(InvalidRequestError, field, value, "must be a list of token ids, or None")
    if most is not None and len(value) > most:
        raise InvalidRequestError(f"{field}: {len(value)} ids, allowed are at most {most}")
    return tuple(check_int(InvalidRequestError, f"{field}[{i}]", item, 0) for i, item in enumerate(value))


def _logit_bias(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise invalid(InvalidRequestError, "logit_bias", value, "must be a dictionary of token ids to numbers, or None")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        field = f"logit_bias[{short(key)}]"
        # JSON has no other keys than strings
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20 else key
        if isinstance(token, bool) or not isinstance(token, Integral) or token < 0:
            raise invalid(
                InvalidRequestError, field, bias, "keys must be token ids: integers of at least 0, or strings of them"
            )
        if int(token) in biases:
            raise invalid(InvalidRequestError, field, bias, "is there already; allowed is each id once")
        biases[int(token)] = check_number(InvalidRequestError, field, bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    return biases or None


def _structured_outputs(value: object) -> object:
    if value is None:
        return None
    from specrs.structured.params import StructuredOutputsParams

    if isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, Mapping):
        raise invalid(
            InvalidRequestError,
            "structured_outputs",
            value,
            "must be a StructuredOutputsParams, a dictionary of its fields, or None",
        )
    return StructuredOutputsParams.from_mapping(value)


_NOT_YET: dict[str, tuple[Callable[[Any], bool], str]] = {
    "spaces_between_special_tokens": (lambda v: v is True, "True"),
    "extra_args": (lambda v: v is None or (isinstance(v, Mapping) and len(v) == 0), "None"),
}


def reject_unimplemented(params: SamplingParams) -> None:
    """Refuse, by name, values that are valid but that this version does not implement.

    Raises `UnsupportedRequestError`. Nothing else knows what is missing.
    """
    for name, (implemented, allowed) in _NOT_YET.items():
        value = getattr(params, name)
        if not implemented(value):
            raise invalid(UnsupportedRequestError, name, value, f"not implemented yet; allowed: {allowed}")


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What an engine can take, for `validate_request`.

    `vocab_size`: ids a prompt may hold are `[0, vocab_size)`, the target's. `num_speculative_tokens`: the engine's K, 0
    without a draft. `eos_token_ids`: ids that end a text, of the checkpoint and its tokenizer.
    `max_logprobs`: the most that `logprobs` may ask for, -1 is `vocab_size`.
    """

    max_model_len: int
    vocab_size: int
    num_speculative_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()
    max_logprobs: int = 20


def max_constraint_len(vocab_size: int) -> int:
    """Elements of a record that hold any one request's `allowed_token_ids`, `logit_bias` and `bad_words`."""
    words = 2 * MAX_BAD_WORDS  # each as it is, and after a blank
    return 3 * vocab_size + words * (1 + MAX_BAD_WORD_TOKENS)


@dataclass(frozen=True, slots=True)
class RequestBounds:
    """What a valid request comes to: `limit` tokens (prompt and output) at most, K drafts, and its stop ids, sorted."""

    limit: int
    num_speculative_tokens: int
    stop_token_ids: tuple[int, ...]


def validate_request(prompt_token_ids: Sequence[int], params: SamplingParams, limits: RequestLimits) -> RequestBounds:
    """Check a request against an engine, and return the bounds that follow. Changes nothing.

    Raises `InvalidRequestError` (or its subclass `UnsupportedRequestError`) naming field, value and what is allowed.
    """
    error = InvalidRequestError
    reject_unimplemented(params)
    _check_token_ids("prompt_token_ids", prompt_token_ids, limits.vocab_size)
    length, longest = len(prompt_token_ids), limits.max_model_len - 1
    if length == 0:
        raise invalid(error, "prompt", [], "must have at least one token")
    if length > longest:
        raise error(
            f"prompt: {length} tokens, allowed are at most {longest} "
            f"(max_model_len={limits.max_model_len} less one token to generate)"
        )
    if params.stop_token_ids:
        _check_token_ids("stop_token_ids", tuple(params.stop_token_ids), limits.vocab_size)
    for field in ("logprobs", "prompt_logprobs"):
        _check_num_logprobs(field, getattr(params, field), limits)
    for token, bias in (params.logit_bias or {}).items():
        if int(token) >= limits.vocab_size:
            raise invalid(
                error,
                f"logit_bias[{token}]",
                bias,
                f"keys must be ids of the vocabulary, integers from 0 to {limits.vocab_size - 1}",
            )
    stop_ids = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else limits.eos_token_ids)}
    if len(stop_ids) > MAX_STOP_TOKEN_IDS:
        raise error(
            f"stop_token_ids: {len(stop_ids)} ids with the checkpoint's eos ids, "
            f"allowed are at most {MAX_STOP_TOKEN_IDS} in all"
        )
    if params.allowed_token_ids is not None:
        _check_token_ids("allowed_token_ids", tuple(params.allowed_token_ids), limits.vocab_size)
        if params.min_tokens > 0 and stop_ids.issuperset(params.allowed_token_ids):
            raise invalid(
                error,
                "allowed_token_ids",
                params.allowed_token_ids,
                f"must have an id that is no stop id, for min_tokens={params.min_tokens}",
            )
    drafts = params.num_speculative_tokens
    if drafts is not None and drafts > limits.num_speculative_tokens:
        raise invalid(
            error,
            "num_speculative_tokens",
            drafts,
            f"must be at most {limits.num_speculative_tokens}, the engine's number"
            if limits.num_speculative_tokens
            else "must be 0 or None, because the engine does not draft; start it with a speculative_config",
        )
    return RequestBounds(
        limit=min(limits.max_model_len, length + (params.max_tokens or limits.max_model_len)),
        num_speculative_tokens=limits.num_speculative_tokens if drafts is None else drafts,
        stop_token_ids=tuple(sorted(stop_ids)),
    )


def _check_token_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Every id an integer in `[0, vocab_size)`; a bad one is named with its index. A bool is not an id."""
    if {*map(type, ids)} <= {int} and (len(ids) == 0 or (min(ids) >= 0 and max(ids) < vocab_size)):
        return
    for i, item in enumerate(ids):
        check_int(InvalidRequestError, f"{field}[{i}]", item, 0, vocab_size - 1, also=", an id of the vocabulary")


def _check_num_logprobs(field: str, count: int | None, limits: RequestLimits) -> None:
    if count is None:
        return
    vocab_size = limits.vocab_size
    most = vocab_size if limits.max_logprobs == -1 else min(limits.max_logprobs, vocab_size)
    if (vocab_size if count == -1 else count) > most:
        every = "" if most == vocab_size else f"; -1, all, needs max_logprobs of -1 or at least {vocab_size}"
        raise invalid(
            InvalidRequestError,
            field,
            count,
            f"must be from 0 to {most}, the engine's max_logprobs (--max-logprobs){every}",
        )


_DEFAULTS = SamplingParams()
