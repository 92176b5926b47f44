"""`SamplingParams`: the sampling parameters of a request, under vLLM's names and defaults. Nothing is sampled here."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import InitVar, dataclass
from enum import Enum
from typing import Any

from specrs.core import GREEDY_BELOW
from specrs.errors import (
    InvalidRequestError,
    UnsupportedRequestError,
    check_int,
    invalid,
    rejects_unknown_arguments,
    unknown_key,
)
from specrs.options import Checked, Command, Integer, Number, Switch, check_options, option
from specrs.sampling_lists import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_STRING_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    read_allowed_token_ids,
    read_bad_words,
    read_logit_bias,
    read_prediction,
    read_stop_strings,
    read_stop_token_ids,
    read_structured_outputs,
)
from specrs.vllm_arguments import SAMPLING

MAX_SPECULATIVE_TOKENS = 16
MAX_BAD_WORD_TOKENS = 32
_INT32_MAX = 2**31 - 1
_PENALTY = Number(-2.0, 2.0)
_COMMANDS: tuple[Command, ...] = ("chat", "generate", "bench serve")


class RequestOutputKind(Enum):
    """Content of each output of a stream, under vLLM's names.

    `CUMULATIVE`: the whole completion so far. `DELTA`: what is new since the previous output. `FINAL_ONLY`: there is
    only one output, at the end, with the whole completion.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def _read_output_kind(value: object) -> RequestOutputKind:
    """Convert `value` to a `RequestOutputKind`. It may be ours, vLLM's, or None for the default."""
    if value is None:
        return RequestOutputKind.CUMULATIVE
    if isinstance(value, Enum) and value.name in RequestOutputKind.__members__:
        return RequestOutputKind[value.name]
    allowed = ", ".join(kind.name for kind in RequestOutputKind)
    raise invalid(InvalidRequestError, "output_kind", value, f"must be a RequestOutputKind: {allowed}")


CORE_NUMBERS = (
    *("temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logprobs", "prompt_logprobs"),
)
"""Sampling parameters that are passed to `specrs.core.RequestSampling` unchanged."""


@rejects_unknown_arguments(InvalidRequestError)
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a request. Immutable; `replace` makes a changed copy. Every value is checked at
    construction.

    Names and defaults are vLLM's. docs/configuration.md lists the parameters. Only `num_speculative_tokens` and
    `return_drafts` are specrs' own. Every parameter has the same meaning with and without speculation.

    vLLM's other parameters are accepted at their defaults and rejected otherwise. The few fields here that are not
    implemented are rejected when the request is added (`reject_unimplemented`).

    Raises `InvalidRequestError` for a wrong value, with field, value and what is allowed.
    """

    n: int = option(
        1,
        Integer(1, 128),
        "completions of the prompt",
        details="The first has `seed`, the others seeds that are derived from it (`derive_seed`).",
    )
    presence_penalty: float = option(
        0.0, _PENALTY, "amount subtracted from the logit of each token that the output has"
    )
    frequency_penalty: float = option(
        0.0, _PENALTY, "amount subtracted from a token's logit for each time that the output has it"
    )
    repetition_penalty: float = option(
        1.0,
        Number(0.01, 100.0),  # beyond these, logits leave the range of fp32, or all become equal
        "divisor of positive logits, and factor of negative ones, of tokens that prompt or output have",
    )
    temperature: float = option(
        1.0, Number(0.0, 100.0), "divisor of the logits", note="0, or less than 1e-5, is greedy", commands=_COMMANDS
    )
    top_p: float = option(
        1.0,
        Number(0.0, 1.0, open_low=True),
        "share of probability to sample from",
        commands=_COMMANDS,
    )
    top_k: int = option(
        0, Integer(-1, _INT32_MAX), "number of tokens to sample from", note="0 and -1: all", commands=_COMMANDS
    )
    min_p: float = option(
        0.0, Number(0.0, 1.0), "least probability, as a share of the most probable token's", commands=_COMMANDS
    )
    seed: int | None = option(
        None,
        Integer(-(2**63), 2**63 - 1),
        "number that samples are derived from",
        note="-1: none",
        default_is="one per request, from the engine's seed",
        commands=("chat", "generate"),
        details="Under the rule `coupled`, or without drafts, text depends on nothing but prompt, parameters and seed. "
        "Under `rejection` it also depends on how much each step drafted, which other requests may change.",
    )
    stop: str | Sequence[str] | None = option(
        None,
        Checked(read_stop_strings, f"up to {MAX_STOP_STRINGS} texts of {MAX_STOP_STRING_LENGTH} characters", True),
        "texts that end the output",
        default_is="none",
        commands=("generate",),
        details="The request ends at the token that completes one. The output ends where that text begins.",
    )
    stop_token_ids: Sequence[int] | None = option(
        None,
        Checked(read_stop_token_ids, f"up to {MAX_STOP_TOKEN_IDS} ids with the checkpoint's eos ids"),
        "token ids that end the output",
        default_is="none but eos",
        details="The id stays in `token_ids`. Its text is left out.",
    )
    ignore_eos: bool = option(False, Switch(), "go on after an end token", commands=("generate",))
    max_tokens: int | None = option(
        16,
        Integer(1),
        "maximum tokens to generate",
        none=True,
        commands=("chat", "generate"),
        details="None is as many as the context holds.",
    )
    min_tokens: int = option(
        0,
        Integer(0, _INT32_MAX),
        "tokens before which no stop id is written",
        details="A stop id ends the request earlier if `structured_outputs` allows nothing else.",
    )
    logprobs: int | None = option(
        None,
        Integer(-1),
        "most likely tokens whose log probabilities are reported, next to the output token's",
        note="-1: all",
        default_is="no log probabilities",
    )
    prompt_logprobs: int | None = option(
        None,
        Integer(-1),
        "most likely tokens whose log probabilities are reported for each prompt token",
        note="-1: all",
        default_is="no log probabilities",
    )
    detokenize: bool = option(True, Switch(), "make text of the output")
    skip_special_tokens: bool = option(True, Switch(), "leave special tokens out of the text")
    spaces_between_special_tokens: bool = option(True, Switch(), "put spaces between special tokens", note="on only")
    include_stop_str_in_output: bool = option(False, Switch(), "keep the stop text, or the stop id's text")
    structured_outputs: Any = option(
        None,
        Checked(read_structured_outputs, "a StructuredOutputsParams, or a dictionary of its fields"),
        "schema, regex, grammar or choices that the text follows",
        default_is="free text",
    )
    logit_bias: Mapping[int, float] | Mapping[str, float] | None = option(
        None,
        Checked(read_logit_bias, f"ids to numbers from {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}"),
        "amount added to the logits of token ids",
        default_is="none",
    )
    allowed_token_ids: Collection[int] | None = option(
        None, Checked(read_allowed_token_ids, "at least one id"), "the only ids that are written", default_is="all"
    )
    bad_words: Sequence[str] | None = option(
        None,
        Checked(read_bad_words, f"up to {MAX_BAD_WORDS} words of {MAX_BAD_WORD_TOKENS} tokens"),
        "words that are not written",
        default_is="none",
        details="Each word is forbidden as it is given, and after a blank.",
    )
    extra_args: Mapping[str, Any] | None = option(
        None, Checked(lambda value: value, "None"), "no effect", default_is="None"
    )
    output_kind: RequestOutputKind = option(
        RequestOutputKind.CUMULATIVE,
        Checked(_read_output_kind, "a `RequestOutputKind`: CUMULATIVE, DELTA or FINAL_ONLY"),
        "what each output of a stream holds",
        default_is="the whole completion so far",
        details="`LLM.generate` returns one whole output for each prompt, whatever the kind.",
    )
    num_speculative_tokens: int | None = option(
        None, Integer(0, MAX_SPECULATIVE_TOKENS), "draft tokens per step, at most", default_is="the engine's number"
    )
    prediction: str | Sequence[int] | None = option(
        None,
        Checked(read_prediction, "text or token ids, with n=1"),
        "text that the output is expected to repeat",
        default_is="none",
        details="It is drafted, and found again after parts that differ. It never changes the output. It has no effect "
        "on engines that do not draft, and with two steps in flight, the default on a GPU, unless a method without a "
        "model is configured. OpenAI's `prediction` sets it.",
    )
    return_drafts: bool = option(
        False, Switch(), "report drafted tokens in `CompletionOutput.drafts`, the rejected ones included"
    )
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
        check_options(self, error)
        if self.top_k == -1:  # an older spelling of "all tokens"
            object.__setattr__(self, "top_k", 0)
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise invalid(error, "min_tokens", self.min_tokens, f"must be at most max_tokens={self.max_tokens}")
        if self.prediction and self.n > 1:
            raise invalid(error, "prediction", self.prediction, f"not allowed with n={self.n}; allowed: n=1")
        if self.stop and not self.detokenize:
            raise invalid(error, "stop", self.stop, "needs detokenize=True: stop strings are found in text")

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, empty if None."""
        assert isinstance(self.stop, tuple)  # made at construction
        return self.stop

    def replace(self, **changes: Any) -> SamplingParams:
        """Return a copy with `changes`, which is checked again."""
        for name in changes:
            if name not in FIELDS and name not in SAMPLING:
                raise unknown_key(InvalidRequestError, "SamplingParams", name, FIELDS)
        return dataclasses.replace(self, **changes)

    def without(self, *names: str) -> SamplingParams:
        """Return a copy with the fields `names` at their defaults. It is not checked again, because a default is valid
        with any other value."""
        other = copy.copy(self)
        for name in names:
            object.__setattr__(other, name, getattr(_DEFAULTS, name))
        return other


FIELDS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
"""Default of every field of `SamplingParams`, by name."""


def derive_seed(seed: int, *indices: int) -> int:
    """Derive one of many seeds from `seed`, in `[-2**63, 2**63)`. For each index in turn, the next seed is number
    `index` of the SplitMix64 sequence (Steele, Lea and Flood 2014) that starts at the previous seed.

    All seeds come from here. For a prompt with `seed=s`, completion 0 uses s itself and completion i > 0 uses
    `derive_seed(s, i)`. For prompt number j of an `LLM` without a seed, completion i uses `derive_seed(engine seed, j,
    i)`. Prompts are counted from 0 over all calls, and rejected prompts count. So a fresh engine with the same seed
    gives the same calls the same text, and a rejected prompt changes no other seed.

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
    """Return the token sequences that `bad_words` forbid: each word as it is, and also after a blank if it does not
    begin with one.

    In many vocabularies, a word within a text is another token than at its start. `encode` adds no special tokens.
    Raises `InvalidRequestError` for a word without tokens, of more than 32 tokens, or with ids outside the model's
    vocabulary.
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
                    f"{len(ids)} tokens; must be from 1 to {MAX_BAD_WORD_TOKENS}",
                )
            if max(ids) >= vocab_size:
                raise invalid(
                    InvalidRequestError,
                    f"bad_words[{i}]",
                    word,
                    f"has token {max(ids)}; must have ids below {vocab_size}, the model's vocabulary",
                )
            sequences[ids] = None
    return tuple(sequences)


def _check_vllm_only(values: Sequence[object]) -> None:
    """Check the values of vLLM's other parameters, in the order of `SamplingParams` and of vllm_arguments.json. Raises
    `InvalidRequestError` for a value that would have an effect."""
    for (name, argument), value in zip(SAMPLING.items(), values, strict=True):
        if not argument.accepts(value):
            raise UnsupportedRequestError(argument.reason(name, value))


_NOT_YET: dict[str, tuple[Callable[[Any], bool], str]] = {
    "spaces_between_special_tokens": (lambda v: v is True, "True"),
    "extra_args": (lambda v: v is None or (isinstance(v, Mapping) and len(v) == 0), "None"),
}


def reject_unimplemented(params: SamplingParams) -> None:
    """Raise `UnsupportedRequestError` for a value that is valid but not implemented in this version. This is the only
    place that knows which values are not implemented."""
    for name, (implemented, allowed) in _NOT_YET.items():
        value = getattr(params, name)
        if not implemented(value):
            raise invalid(UnsupportedRequestError, name, value, f"not implemented yet; allowed: {allowed}")


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of an engine that requests are checked against.

    `vocab_size`: number of the target's token ids. `num_speculative_tokens`: the engine's K; 0 without a drafter.
    `eos_token_ids`: ids that end a text, from checkpoint and tokenizer. `max_logprobs`: the maximum for `logprobs`; -1
    is `vocab_size`. `has_lm_head`: False if the model only embeds.
    """

    max_model_len: int
    vocab_size: int
    num_speculative_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()
    max_logprobs: int = 20
    has_lm_head: bool = True


def max_constraint_len(vocab_size: int) -> int:
    """Return the number of elements of a record that hold the `allowed_token_ids`, `logit_bias` and `bad_words` of any
    request."""
    words = 2 * MAX_BAD_WORDS  # each as it is, and after a blank
    return 3 * vocab_size + words * (1 + MAX_BAD_WORD_TOKENS)


@dataclass(frozen=True, slots=True)
class RequestBounds:
    """Bounds of a valid request: at most `limit` tokens (prompt and output), K drafts, and its sorted stop ids."""

    limit: int
    num_speculative_tokens: int
    stop_token_ids: tuple[int, ...]


def validate_request(prompt_token_ids: Sequence[int], params: SamplingParams, limits: RequestLimits) -> RequestBounds:
    """Check a request against an engine's limits, and return its bounds. Changes nothing.

    Raises `InvalidRequestError` (or its subclass `UnsupportedRequestError`) for a wrong value, with field, value and
    what is allowed.
    """
    error = InvalidRequestError
    reject_unimplemented(params)
    _check_token_ids("prompt_token_ids", prompt_token_ids, limits.vocab_size)
    length, longest = len(prompt_token_ids), limits.max_model_len - 1
    if length == 0:
        raise invalid(error, "prompt", [], "must have at least one token")
    if length > longest:
        raise error(
            f"prompt: {length} tokens; must be at most {longest} "
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
            f"stop_token_ids: {len(stop_ids)} ids with the checkpoint's eos ids; "
            f"must be at most {MAX_STOP_TOKEN_IDS} in all"
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
    """Check that every id is an integer in `[0, vocab_size)`. Raises `InvalidRequestError` with the index of the first
    bad id. A bool is not an id."""
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
