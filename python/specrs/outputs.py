"""What comes back to a user: texts, and figures about them. Derived figures are properties; nothing is stored twice."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specrs.errors import SpecrsError


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """What the engine says of one token: itself, and the n most likely at its position, the likeliest first.

    `rank` is 1 for the most likely token; of equal ones the lowest id ranks first. `top_ids`, `top_logprobs`: `[n]`.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Logprob:
    """What a user is told of one token at one position; `rank` is 1 for the most likely, `decoded_token` its text.

    `logprob` is what the engine's `logprobs_mode` says. `decoded_token` is None without a tokenizer or `detokenize`.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, kw_only=True)
class AcceptanceFigures:
    """The acceptance books of one request or of an engine.

    One draft is one iteration with at least one draft token. `acceptance_histogram[m]` counts the drafts of which
    exactly m tokens were accepted, m from 0 to K; `draft_tokens` is the number of tokens drafted. Iterations count as
    they ran, before a stop or `max_tokens` cut the text. `synthetic_acceptance`: drafts stood at given rates, for
    timing; the text is not the target's.
    """

    draft_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=lambda: [0])
    synthetic_acceptance: bool = False

    @property
    def drafts(self) -> int:
        """Iterations that drafted."""
        return sum(self.acceptance_histogram)

    @property
    def accepted_tokens(self) -> int:
        """Draft tokens that were accepted."""
        return sum(m * count for m, count in enumerate(self.acceptance_histogram))

    @property
    def acceptance_length(self) -> float:
        """Tokens per drafting iteration: 1 + accepted tokens / drafts; 1.0 if nothing was drafted."""
        return 1.0 + self.accepted_tokens / self.drafts if self.drafts else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens / draft tokens; 0.0 if nothing was drafted."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def accepted_per_position(self) -> list[int]:
        """`[K]`: drafts whose i-th token was accepted."""
        return list(accumulate(reversed(self.acceptance_histogram[1:])))[::-1]

    @property
    def per_position(self) -> list[float]:
        """`[K]`: share of all drafts whose i-th token was accepted (unconditional); 0.0 if nothing was drafted."""
        return [count / self.drafts if self.drafts else 0.0 for count in self.accepted_per_position]


@dataclass(frozen=True, kw_only=True)
class RequestMetrics(AcceptanceFigures):
    """Figures of one prompt, of its n completions together: counts are sums, times those of the first token of all and
    of the end of the last; `scheduled_time` is when the first of them began to run. Times are seconds of
    `time.monotonic`, None for what did not happen.
    """

    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    arrival_time: float | None = None
    scheduled_time: float | None = None
    first_token_time: float | None = None
    finish_time: float | None = None

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return _between(self.arrival_time, self.first_token_time)

    @property
    def latency(self) -> float | None:
        """Seconds from arrival to the end."""
        return _between(self.arrival_time, self.finish_time)

    @property
    def time_per_output_token(self) -> float | None:
        """Seconds per token after the first, of all completions; None with fewer than two tokens."""
        seconds = _between(self.first_token_time, self.finish_time)
        if seconds is None or self.num_generated_tokens < 2:
            return None
        return seconds / (self.num_generated_tokens - 1)


@dataclass(frozen=True, kw_only=True)
class EngineStats(AcceptanceFigures):
    """Figures of an engine since its start or `reset_stats`.

    `target_passes`, `draft_passes`: forward passes of each model, prefill chunks included. `num_cached_tokens`: prompt
    tokens taken from the prefix cache. `num_preemptions`: requests that lost their blocks and were recomputed.
    `num_running`, `num_waiting`: requests now. `num_blocks`, `num_free_blocks`: of the KV pool, now. `drafters`: the
    acceptance books by drafter, under the names of `speculative_config.method`; they add up to the engine's.
    `draft_errors`: how often each drafter has failed; a launch, or a request in it, then went on without its drafts.
    `running_loras`, `waiting_loras`: names of the LoRA adapters of requests that run, and that wait, now.
    """

    draft_passes: int = 0
    target_passes: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    drafters: dict[str, AcceptanceFigures] = field(default_factory=dict)
    draft_errors: dict[str, int] = field(default_factory=dict)
    running_loras: tuple[str, ...] = ()
    waiting_loras: tuple[str, ...] = ()

    @property
    def kv_cache_usage(self) -> float:
        """Share of KV blocks that requests hold, from 0 to 1; blocks that only the prefix cache holds are free."""
        return 1.0 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0


@dataclass(frozen=True, slots=True)
class Draft:
    """What one iteration drafted for a completion.

    `start` is the index of its first token among all tokens of the completion, whatever `output_kind` says. The first
    `num_accepted` tokens from there are drafts, as far as no stop and no limit cut them off, and the token after them
    is the target's. `rejected_token_ids` are the drafts after the accepted ones, in their order.
    """

    start: int
    num_accepted: int
    rejected_token_ids: list[int]

    @property
    def num_drafted(self) -> int:
        """Tokens drafted, K of this iteration."""
        return self.num_accepted + len(self.rejected_token_ids)


@dataclass(kw_only=True)
class CompletionOutput:
    """One completion of a prompt.

    `delta` is the text that this output adds to the one before it (all of it, if there is none). `text`, `token_ids`,
    `logprobs` and `drafts` cover the whole completion so far; with `RequestOutputKind.DELTA`, only what is new.
    `logprobs` has one dictionary for each of `token_ids`: the token itself first, then as many as were asked for, the
    likeliest first; None unless they were asked for. `cumulative_logprob` is the sum over all tokens so far.
    `drafts` has an entry for each iteration that drafted; None unless `return_drafts` asks for it.
    `finish_reason`: None while it runs, then `stop`, `length`, `abort` or `error`. `stop_reason`: the stop string or
    stop token id that ended it, None for an eos token.
    """

    index: int = 0
    text: str = ""
    delta: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    drafts: list[Draft] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def extend_back(self, earlier: CompletionOutput) -> None:
        """Make this output cover what `earlier`, an unread output before it, covers. Mutates."""
        self.delta = earlier.delta + self.delta


@dataclass(kw_only=True)
class RequestOutput:
    """A prompt and what became of it: `outputs[i]` is completion i of n.

    `error` says why, where a `finish_reason` is `error`; `prompt` is None for ids. `prompt_logprobs` has an entry for
    each prompt token, as `CompletionOutput.logprobs`, None for the first, which nothing predicts. They are always
    log-softmax of what the model gave, whatever `logprobs_mode`; None unless they were asked for, or not there yet.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: SpecrsError | None = None

    def extend_back(self, earlier: RequestOutput) -> None:
        """Make this output cover what `earlier`, an unread output before it, covers. Mutates."""
        for before, after in zip(earlier.outputs, self.outputs, strict=True):
            after.extend_back(before)

    @classmethod
    def from_error(
        cls, request_id: int, prompt: str | None, prompt_token_ids: list[int], error: SpecrsError, n: int = 1
    ) -> RequestOutput:
        """The output of a prompt that was refused before its n completions ran."""
        return cls(
            request_id=str(request_id),
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            outputs=[CompletionOutput(index=i, finish_reason="error") for i in range(n)],
            finished=True,
            metrics=RequestMetrics(),
            error=error,
        )


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
