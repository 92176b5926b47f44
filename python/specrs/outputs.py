"""Results for users: outputs with texts, and statistics. Derived statistics are properties; nothing is stored twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from specrs.errors import SpecrsError


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of one token, with the n most likely tokens at its position, most likely first.

    `rank` is 1 for the most likely token; of equally likely ones, the lowest id ranks first. `top_ids` and
    `top_logprobs` have n entries each.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log probability of one token at one position; `rank` is 1 for the most likely, `decoded_token` its text.

    `logprob` is what the engine's `logprobs_mode` says. `decoded_token` is None without a tokenizer or `detokenize`.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, kw_only=True)
class AcceptanceFigures:
    """Acceptance statistics of one request or of an engine.

    One draft is one iteration with at least one draft token. `acceptance_histogram[m]` is the number of drafts of which
    exactly m tokens were accepted, with m from 0 to K. `draft_tokens` is the number of tokens drafted. Iterations count
    as they ran, before a stop or `max_tokens` cut the text. `synthetic_acceptance`: drafts were accepted at given
    rates, for timing, and the text is not the target's.
    """

    draft_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=lambda: [0])
    synthetic_acceptance: bool = False

    @property
    def drafts(self) -> int:
        """Number of iterations that drafted at least one token."""
        return sum(self.acceptance_histogram)

    @property
    def accepted_tokens(self) -> int:
        """Number of draft tokens that were accepted."""
        return sum(m * count for m, count in enumerate(self.acceptance_histogram))

    @property
    def acceptance_length(self) -> float:
        """Mean number of tokens per drafting iteration: 1 + accepted tokens / drafts; 1.0 if nothing was drafted."""
        return 1.0 + self.accepted_tokens / self.drafts if self.drafts else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens / draft tokens; 0.0 if nothing was drafted."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def accepted_per_position(self) -> list[int]:
        """`[K]`: for each draft position, the number of drafts whose token there was accepted."""
        return list(accumulate(reversed(self.acceptance_histogram[1:])))[::-1]

    @property
    def per_position(self) -> list[float]:
        """`[K]`: share of all drafts whose i-th token was accepted (unconditional); 0.0 if nothing was drafted."""
        return [count / self.drafts if self.drafts else 0.0 for count in self.accepted_per_position]


@dataclass(frozen=True, kw_only=True)
class RequestMetrics(AcceptanceFigures):
    """Figures of one prompt, over all its n completions. Counts are sums over the completions.

    `scheduled_time` is when the first completion began to run, `first_token_time` when the first of all tokens came,
    and `finish_time` when the last completion ended. Times are seconds of `time.monotonic`, None for what did not
    happen.
    """

    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_predicted_tokens: int | None = None
    """Number of tokens drafted from `SamplingParams.prediction`; None without one."""
    num_accepted_predicted_tokens: int = 0
    """Number of tokens drafted from `SamplingParams.prediction` that were accepted."""
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
        """Seconds per token after the first, over the tokens of all completions; None with fewer than two tokens."""
        seconds = _between(self.first_token_time, self.finish_time)
        if seconds is None or self.num_generated_tokens < 2:
            return None
        return seconds / (self.num_generated_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCacheStats:
    """Statistics of the prefix cache on disk (`kv_cache_path`) since the engine's start or the last `reset_stats`.

    - `queried_tokens`: number of prompt tokens, in whole blocks, that were not cached in memory and were looked for.
    - `loaded_tokens`: number of these that were read from disk into the KV cache.
    - `loaded_snapshots`: number of snapshots of states that were read from disk.
    - `read_bytes`, `written_bytes`: number of bytes of records.
    - `errors`: number of records and files that could not be read or written. Each cost a part of the cache.
    - `is_writer`: False while another process writes to the folder, and this one only reads.
    """

    queried_tokens: int = 0
    loaded_tokens: int = 0
    loaded_snapshots: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    errors: int = 0
    is_writer: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class StateCacheStats:
    """Statistics of the snapshots of states, for models whose layers have some.

    - `num_slots`, `num_cached`: number of snapshots that fit, and that a prefix hit can begin with now.
    - `num_bytes`: bytes of the snapshots that can be found now.
    - `hits`: number of requests that began with a snapshot, counted again after a preemption.
    - `stored`: number of snapshots that were written.
    - `evictions`: number of snapshots that were evicted, for another one or together with the KV block at their end.
    """

    num_slots: int = 0
    num_cached: int = 0
    num_bytes: int = 0
    hits: int = 0
    stored: int = 0
    evictions: int = 0


@dataclass(frozen=True, kw_only=True)
class EngineStats(AcceptanceFigures):
    """Statistics of an engine since its start or the last `reset_stats`.

    - `target_passes`, `draft_passes`: number of forward passes of each model, prefill chunks included.
    - `prompt_tokens`, `generation_tokens`: number of prompt tokens and of generated tokens.
    - `num_cached_tokens`: number of prompt tokens taken from the prefix cache.
    - `num_preemptions`: number of times that a request lost its blocks and was recomputed.
    - `num_running`, `num_waiting`: number of requests now.
    - `num_blocks`, `num_free_blocks`: number of blocks of the KV pool now.
    - `drafters`: acceptance statistics of each drafter, by its `speculative_config.method`. They add up to the
      engine's.
    - `draft_errors`: number of failures of each drafter. The step, or one request in it, then went on without drafts.
    - `disk_cache`: statistics of the prefix cache on disk; None without one.
    - `state_cache`: statistics of the snapshots of states since the engine's start; None without snapshots.
    - `running_loras`, `waiting_loras`: names of the LoRA adapters of requests that run or wait now.
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
    disk_cache: DiskCacheStats | None = None
    state_cache: StateCacheStats | None = None
    running_loras: tuple[str, ...] = ()
    waiting_loras: tuple[str, ...] = ()

    @property
    def kv_cache_usage(self) -> float:
        """Share of KV blocks that requests hold, from 0 to 1; blocks that only the prefix cache holds are free."""
        return 1.0 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0


@dataclass(frozen=True, slots=True)
class Draft:
    """Drafts of one iteration for one completion.

    `start` is the index of the first draft among all tokens of the completion, whatever `output_kind` says. The first
    `num_accepted` tokens from there are drafts, unless a stop or limit cut them off. The token after them is the
    target's. `rejected_token_ids` are the drafts after the accepted ones, in order.
    """

    start: int
    num_accepted: int
    rejected_token_ids: list[int]

    @property
    def num_drafted(self) -> int:
        """Number of tokens that the iteration drafted (its K)."""
        return self.num_accepted + len(self.rejected_token_ids)


@dataclass(kw_only=True)
class CompletionOutput:
    """One completion of a prompt.

    `text`, `token_ids`, `logprobs` and `drafts` cover the whole completion so far; with `RequestOutputKind.DELTA`, only
    what is new since the previous output.

    - `index`: which of the prompt's n completions this is.
    - `delta`: the text that this output adds to the previous one; all text if there is no previous one.
    - `cumulative_logprob`: sum of the log probabilities of all tokens so far. None unless logprobs were requested.
    - `logprobs`: a dictionary for each of `token_ids`: the token itself first, then the requested number of most
      likely tokens, most likely first. None unless logprobs were requested.
    - `drafts`: an entry for each iteration that drafted. None unless `return_drafts` was set.
    - `finish_reason`: None while the completion runs, then `stop`, `length`, `abort` or `error`.
    - `stop_reason`: the stop string or stop token id that ended it. None for an eos token and all other endings.
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
        """Prepend `earlier.delta` to `delta`, so that this output also covers `earlier`, a previous output that was not
        read."""
        self.delta = earlier.delta + self.delta


@dataclass(kw_only=True)
class RequestOutput:
    """A prompt and its n completions: `outputs[i]` is completion i.

    `prompt` is None if the prompt was given as token ids. `error` is the cause if a `finish_reason` is `error`.
    `prompt_logprobs` has a dictionary for each prompt token, like those in `CompletionOutput.logprobs`; it is None for
    the first token, which nothing predicts. Prompt log probabilities are always log-softmax of the model's logits,
    whatever `logprobs_mode` says. `prompt_logprobs` is None if they were not requested or are not computed yet.
    `pooled` is the result of a request with pooling (`specrs.engine.request.Request.pooled`), None for all others.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: SpecrsError | None = None
    pooled: NDArray[np.float32] | None = field(default=None, compare=False, repr=False)

    def extend_back(self, earlier: RequestOutput) -> None:
        """Make every completion of this output also cover `earlier`, a previous output of the same request that was not
        read."""
        for before, after in zip(earlier.outputs, self.outputs, strict=True):
            after.extend_back(before)

    @classmethod
    def from_error(
        cls, request_id: int, prompt: str | None, prompt_token_ids: list[int], error: SpecrsError, n: int = 1
    ) -> RequestOutput:
        """Return the output of a prompt that was rejected before its `n` completions ran."""
        return cls(
            request_id=str(request_id),
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            outputs=[CompletionOutput(index=i, finish_reason="error") for i in range(n)],
            finished=True,
            metrics=RequestMetrics(),
            error=error,
        )


@dataclass(kw_only=True)
class EmbeddingOutput:
    """Embedding of a prompt, `[dimensions]`."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Number of dimensions."""
        return len(self.embedding)


@dataclass(kw_only=True)
class ScoringOutput:
    """Score of a pair of texts: a cosine from -1 to 1 of an embedding model, else a probability from 0 to 1."""

    score: float


@dataclass(kw_only=True)
class EmbeddingRequestOutput:
    """A prompt and its embedding. `num_cached_tokens` is the number of prompt tokens found in the prefix cache."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass(kw_only=True)
class ScoringRequestOutput:
    """A pair of texts and its score. `prompt_token_ids` are the tokens of the pair's prompt, or of both texts if they
    are embedded. `num_cached_tokens` is the number of them found in the prefix cache."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


def token_counts(outputs: Iterable[RequestOutput]) -> dict[str, int]:
    """Return how often each token id occurs in `outputs` of `LLM.generate` or `LLM.chat`, by id as a string.

    Written to a file as JSON, it is a value of the option `draft_vocab_counts`.
    """
    counts = Counter(token for output in outputs for each in output.outputs for token in each.token_ids)
    return {str(token): count for token, count in sorted(counts.items())}


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
