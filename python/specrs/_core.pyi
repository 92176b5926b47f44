"""Types and documentation of the Rust extension. Import its names from `specrs.core`.

Buffers are numpy arrays that the caller owns: C-contiguous, aligned, of exactly the stated dtype and size, and writable
where the core writes. Any other array raises an `InvalidBufferError` that names the argument, what arrived and what is
expected. A call that raises has changed nothing in the core. Objects may be shared between threads; each call holds the
object's lock.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Protocol, final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "DRAFTERS",
    "DRAFTER_DEVICE",
    "FINISH_ABORT",
    "FINISH_ERROR",
    "FINISH_LENGTH",
    "FINISH_NONE",
    "FINISH_STOP",
    "FLAG_CAPACITY",
    "FLAG_DRAFT_NON_FINITE",
    "FLAG_NOTHING_DRAFTED",
    "FLAG_NO_TOKEN_ALLOWED",
    "FLAG_TARGET_NON_FINITE",
    "GREEDY_BELOW",
    "HEADER_DOCS",
    "HEADER_FIELDS",
    "LOGPROBS_ALL",
    "LOGPROBS_NONE",
    "MAX_STOP_IDS",
    "PARAM_COLUMNS",
    "PARAM_COLUMN_DOCS",
    "PLAN_IDLE",
    "PLAN_SETTLE_FIRST",
    "PLAN_STEP",
    "PURPOSE_ACCEPT",
    "PURPOSE_DRAFT",
    "PURPOSE_GUMBEL",
    "PURPOSE_RECOVER",
    "SAMPLING_STEPS",
    "SAMPLING_STEP_DOCS",
    "UNKNOWN_BELOW",
    "AcceptanceTracker",
    "AllBlocksCleared",
    "BlockHasher",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "CachedDrafter",
    "CostModel",
    "CpuDecoder",
    "CpuIteration",
    "CpuKVCache",
    "CpuLora",
    "CpuPool",
    "CpuWeights",
    "DuplicateRequestError",
    "HiddenDrafter",
    "HostDrafter",
    "IntegrityError",
    "InvalidAcceptanceError",
    "InvalidBlockError",
    "InvalidBufferError",
    "InvalidConfigError",
    "InvalidRequestError",
    "InvalidResultsError",
    "InvalidTokenizerError",
    "KVEventBatch",
    "KVStore",
    "NgramProposer",
    "NotRunningError",
    "OutOfBlocksError",
    "Output",
    "Outputs",
    "PackedMatrix",
    "RequestSampling",
    "RequestView",
    "Sampler",
    "Scheduler",
    "SettleOrderError",
    "SharedKVDrafter",
    "SlotMapper",
    "SpecrsError",
    "SpeculationPlanner",
    "SuffixCache",
    "TextDrafter",
    "TokenDecoder",
    "UnknownRequestError",
    "cpu_instruction_sets",
    "philox_gumbel",
    "philox_uniform",
    "quantize_q4_k",
    "quantize_weight",
]

DRAFTERS: Final[tuple[str, ...]]
"""Names of the drafters, by the number in `seq_drafter`: the device's, then the methods of `HostDrafter`."""
HEADER_FIELDS: Final[tuple[str, ...]]
"""Names of the elements of a record's header by index. The elements after them are 0."""
HEADER_DOCS: Final[tuple[str, ...]]
"""Descriptions of `HEADER_FIELDS`, by index."""
PARAM_COLUMNS: Final[tuple[str, ...]]
"""Names of a row's parameter columns by index."""
PARAM_COLUMN_DOCS: Final[tuple[str, ...]]
"""Descriptions of `PARAM_COLUMNS` by index: which values are allowed, and which value is off."""
SAMPLING_STEPS: Final[tuple[str, ...]]
"""Names of the sampling steps that a row's request may need, by bit of `admit_steps`, lowest first."""
SAMPLING_STEP_DOCS: Final[tuple[str, ...]]
"""Descriptions of `SAMPLING_STEPS`, by bit."""
MAX_STOP_IDS: Final[int]
"""Maximum number of stop tokens of one request, which fit in a row of device state."""
LOGPROBS_NONE: Final[int]
"""Value of `admit_logprobs` and `admit_prompt_logprobs` for a request that wants no log probabilities."""
LOGPROBS_ALL: Final[int]
"""Value of `admit_logprobs` and `admit_prompt_logprobs` for a request that wants log probabilities of the whole
vocabulary."""
GREEDY_BELOW: Final[float]
"""Temperature below which a request is greedy, because logits divided by less could overflow."""
UNKNOWN_BELOW: Final[float]
"""Distance below a row's smallest logit at which a drafter's unknown target ids are placed. It is finite, and means
probability 0 in float32 at temperatures up to 96."""
PLAN_IDLE: Final[int]
"""Result of `Scheduler.plan`: nothing is to be done and nothing is in flight."""
PLAN_STEP: Final[int]
"""Result of `Scheduler.plan`: the record contains a step."""
PLAN_SETTLE_FIRST: Final[int]
"""Result of `Scheduler.plan`: the oldest step in flight must settle before anything can be planned."""

FLAG_TARGET_NON_FINITE: Final[int]
"""Result flag (bit 0): the target's logits were NaN or infinite in a row that the iteration reached; the request ends
with `FINISH_ERROR`."""
FLAG_DRAFT_NON_FINITE: Final[int]
"""Result flag (bit 1): the draft's logits were not finite; the request goes on without drafts."""
FLAG_CAPACITY: Final[int]
"""Result flag (bit 2): a position lay beyond the row's capacity; the request ends with `FINISH_ERROR`."""
FLAG_NOTHING_DRAFTED: Final[int]
"""Result flag (bit 3): the drafter on the device was asked and had nothing to propose; counts as one rejected draft."""
FLAG_NO_TOKEN_ALLOWED: Final[int]
"""Result flag (bit 4): the request's constraints exclude every token at its next position, and the logits were finite;
the request ends with `FINISH_ERROR`."""

FINISH_NONE: Final[int]
"""Finish reason: the request goes on."""
FINISH_STOP: Final[int]
"""Finish reason: a stop token, which is the last token delivered."""
FINISH_LENGTH: Final[int]
"""Finish reason: the request reached its limit."""
FINISH_ABORT: Final[int]
"""Finish reason of an `Output`: the caller ended the request. `settle` never writes this value."""
FINISH_ERROR: Final[int]
"""Finish reason: a fault on the device, no allowed token, or text that cannot be decoded."""

DRAFTER_DEVICE: Final[int]
"""Number of the drafter on the device. Sequences without drafts have this number too."""

PURPOSE_DRAFT: Final[int]
"""Philox purpose: draw of a draft token from q."""
PURPOSE_ACCEPT: Final[int]
"""Philox purpose: uniform that accepts or rejects a draft token."""
PURPOSE_RECOVER: Final[int]
"""Philox purpose: reserved and unused. The token after the drafts is drawn with the noise of `PURPOSE_GUMBEL`."""
PURPOSE_GUMBEL: Final[int]
"""Philox purpose: noise of the target's own draw, which the draft shares under the `coupled` rule."""

class SpecrsError(Exception):
    """Base of every error that specrs raises on purpose."""

class InvalidConfigError(SpecrsError, ValueError):
    """A setting is outside its range."""

class InvalidRequestError(SpecrsError, ValueError):
    """A request can never be served as given."""

class DuplicateRequestError(SpecrsError):
    """A request with this id is waiting or running."""

class UnknownRequestError(SpecrsError):
    """No request with this id is waiting or running."""

class NotRunningError(SpecrsError):
    """The operation needs a running request and this one is waiting."""

class OutOfBlocksError(SpecrsError):
    """The block pool has no block to give."""

class InvalidBlockError(SpecrsError):
    """A block id is outside the pool, or its state does not allow the operation."""

class InvalidBufferError(SpecrsError):
    """A numpy buffer has the wrong dtype, shape, layout, size or content."""

class InvalidAcceptanceError(SpecrsError):
    """A draft was recorded with impossible counts."""

class SettleOrderError(SpecrsError):
    """Steps settle in the order in which they were planned."""

class InvalidResultsError(SpecrsError):
    """The device reported something that its step cannot have produced."""

class IntegrityError(SpecrsError):
    """The state of the scheduler or the block pool contradicts itself: a bug in specrs."""

class InvalidTokenizerError(SpecrsError):
    """A tokenizer cannot be read, or fails on tokens."""

@final
class CachedDrafter:
    """Drafter on the device with its own KV in the target's blocks, which catches up from tokens: a draft model.

    Pass 1 of an iteration feeds the last `max_draft_lag` positions of a row's n tokens; pass i feeds draft i - 1. After
    K > 0 drafts that left n' tokens, its KV is valid on [0, min(n' - 1, n + K - 1)). With a `mask_token_id` (parallel
    drafting), pass 1 feeds that id in place of drafts 1 to K - 1 and is the only pass. Its KV is then valid on [0, n).
    """

    def __new__(
        cls,
        *,
        max_model_len: int,
        max_draft_lag: int = 2,
        mask_token_id: int | None = None,
        cost_ratio: float = 1.0,
    ) -> CachedDrafter:
        """Make the description of a draft model for a `Scheduler`.

        Args:
            max_model_len: number of positions that the draft model can take. Requests that outgrow them go on without
                drafts. At least 1.
            max_draft_lag: maximum number of positions that the KV may lag behind a row's n tokens so that the row still
                drafts; at least 1.
            mask_token_id: token id that one pass for all drafts feeds in their place, 0 or above. None: one pass per
                draft.
            cost_ratio: cost of a catch-up token in tokens of the budget, above 0: the draft's share of the target's
                parameters.

        Raises:
            InvalidConfigError: a negative size; other values are checked by `Scheduler`.
        """

    @property
    def max_model_len(self) -> int:
        """Number of positions that the draft model can take."""

    @property
    def max_draft_lag(self) -> int:
        """Maximum number of positions that the KV may lag behind a row's n tokens so that the row still drafts."""

    @property
    def mask_token_id(self) -> int | None:
        """Token id that one pass for all drafts feeds in their place. None: one pass per draft."""

    @property
    def cost_ratio(self) -> float:
        """Cost of a catch-up token in tokens of the budget."""

@final
class HiddenDrafter:
    """Head on the device that drafts from the target's hidden states, with its own KV in the target's blocks.

    The KV of position p is computed from the hidden state there and the token at p + 1. Pass 1 of an iteration feeds
    the positions before n - 1 whose hidden states are kept and whose KV is missing. Pass i feeds the output of the pass
    before and draft i - 1. After drafting at n tokens, its KV is valid up to n - 1.

    The head catches up only in steps that compute hidden states. A record's draft chunks are parts of its prompt
    chunks, or have length 0 at position 0 to order a new start. If the KV lags further, the head starts anew from the
    hidden states that are kept.
    """

    def __new__(cls, *, max_model_len: int, max_draft_lag: int, keeps_hits: bool = False) -> HiddenDrafter:
        """Make the description of a head for a `Scheduler`.

        Args:
            max_model_len: number of positions that the head can take. Requests that outgrow them go on without drafts.
                At least 1.
            max_draft_lag: maximum number of positions that the head's KV may lag behind n so that it continues from
                there. Hidden states of one position less are kept for each row. At least K + 2.
            keeps_hits: True if a prefix hit is kept whole although its last block alone lacks the head's KV. The head
                then starts anew after it. False: the hit gives up that block.

        Raises:
            InvalidConfigError: a negative size; other values are checked by `Scheduler`.
        """

    @property
    def max_model_len(self) -> int:
        """Number of positions that the head can take."""

    @property
    def max_draft_lag(self) -> int:
        """Maximum number of positions that the head's KV may lag behind n so that it continues from there."""

    @property
    def keeps_hits(self) -> bool:
        """True if a prefix hit is kept whole although its last block alone lacks the head's KV."""

@final
class SharedKVDrafter:
    """Head on the device without KV of its own, which attends the target's (Gemma 4's assistant).

    Every pass of an iteration has one row for a request, at position n - 2. It reads the target's KV up to there.
    Pass 1 feeds the last token and the target's hidden state of position n - 2, the only one that is kept. Pass i feeds
    draft i - 1 and what the pass before left. Nothing has to be valid before it drafts, so requests never catch up.
    """

    def __new__(cls, *, max_model_len: int) -> SharedKVDrafter:
        """Make the description of a head for a `Scheduler`.

        Args:
            max_model_len: number of positions that the head can take. Requests that outgrow them go on without drafts.
                At least 1.

        Raises:
            InvalidConfigError: a negative size; other values are checked by `Scheduler`.
        """

    @property
    def max_model_len(self) -> int:
        """Number of positions that the head can take."""

@final
class TextDrafter:
    """Draft model on the device with its own tokenizer, whose drafts are compared as text (SLEM).

    Its KV is outside the target's blocks and needs no catch-up. The number of drafts is known only when the model has
    generated its text, so `num_drafted` may be less than the sequence's K.
    """

    def __new__(cls) -> TextDrafter:
        """Make the description of a model that drafts by text. It has no settings."""

@final
class HostDrafter:
    """Drafter of a `Scheduler` that proposes from texts, without a model. `plan` writes its drafts into the record."""

    def __new__(cls, method: str, **settings: float) -> HostDrafter:
        """Make a drafter of `method`, one of `DRAFTERS` after the first.

        `settings` have the names and defaults of `NgramProposer` for `ngram`, and of `SuffixCache` for `suffix`. The
        methods `prediction` and `grammar`, whose drafts come with requests, have none.

        Raises:
            InvalidConfigError: there is no such method or setting, or a value is outside its range.
        """

    @property
    def method(self) -> str:
        """Name of the method, one of `DRAFTERS`."""

@final
class NgramProposer:
    """Prompt lookup: proposes the continuation of the longest n-gram at the end of a sequence, from its last earlier
    occurrence.

    If the sequence ends before there are enough drafts, they continue with the first drafts, so that a loop of three
    tokens is repeated. With `prompt_lookup_min=0` the last token is proposed if nothing is found, so that every
    sequence has drafts, for measuring. There is no state: every call searches the sequence, a few ns per token.
    """

    def __new__(cls, prompt_lookup_min: int = 5, prompt_lookup_max: int = 5) -> NgramProposer:
        """Make a proposer for n-grams of `prompt_lookup_min` to `prompt_lookup_max` tokens.

        Raises:
            InvalidConfigError: unless 0 <= prompt_lookup_min <= prompt_lookup_max and 1 <= prompt_lookup_max <= 1024.
        """

    @property
    def prompt_lookup_min(self) -> int:
        """Length of the shortest n-gram that is searched for, in tokens."""

    @property
    def prompt_lookup_max(self) -> int:
        """Length of the longest n-gram that is searched for, in tokens."""

    def propose(self, token_ids: NDArray[np.int64], num_speculative_tokens: int) -> NDArray[np.int64]:
        """Return drafts of the continuation of `token_ids` `[n]`: `[num_speculative_tokens]`, or `[0]` if no n-gram was
        found.

        Raises:
            InvalidConfigError: num_speculative_tokens is not in 0 to 1024.
            InvalidBufferError: token_ids is not a contiguous int64 vector.
        """

@final
class SuffixCache:
    """Suffix decoding: proposes the most frequent continuation of a text, counted in it and in other requests' outputs.

    After Oliaro et al., arXiv 2411.04975, with vLLM's settings. Each running request has a tree of the substrings of
    its prompt and output. One more tree has the substrings of all outputs, including those of ended requests.

    A pattern is the last m tokens of a text. The draft begins with the most frequent token after the pattern, then the
    most frequent token after that one, and so on. It ends where a token's count, divided by the pattern's, falls below
    `min_token_prob`. It has at most `max_spec_factor * m` and at most `max_tree_depth - m` tokens.

    The draft with the largest sum of these ratios is taken. Ties go to the request's own tree, then to the pattern that
    may draft more, then to the longer pattern. Of equally frequent tokens the lowest id is taken. So drafts are a
    function of the texts alone.

    A token takes about 50 bytes if texts repeat little, and 110 in texts of common phrases. It takes at most 14 times
    `max_tree_depth` bytes, if each token occurs twice.
    """

    def __new__(
        cls,
        *,
        max_tree_depth: int = 24,
        max_cached_requests: int = 10000,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
        max_memory_bytes: int = 1073741824,
    ) -> SuffixCache:
        """Make an empty cache. The oldest outputs of ended requests are evicted while there are more than
        `max_cached_requests`, or more than `max_memory_bytes` are in use. The trees of running requests are never cut.
        With `max_cached_requests=0` no request's output is used for another.

        Raises:
            InvalidConfigError: max_tree_depth is not in 2 to 256, max_spec_factor not finite and above 0,
                min_token_prob not in 0 to 1, or a size is negative.
        """

    def start_request(self, request_id: int, prompt_token_ids: NDArray[np.int64]) -> None:
        """Add a running request with its prompt `[n]`; mutates the cache.

        Raises:
            DuplicateRequestError: the request is running.
            InvalidBufferError: prompt_token_ids is not a contiguous int64 vector of ids below 2^32.
        """

    def append(self, request_id: int, token_ids: NDArray[np.int64]) -> None:
        """Add output tokens `[n]` to a running request; mutates the cache.

        Raises:
            UnknownRequestError: the request is not running.
            InvalidBufferError: token_ids is not a contiguous int64 vector of ids below 2^32.
        """

    def propose(self, request_id: int, num_speculative_tokens: int) -> tuple[NDArray[np.int64], float, int]:
        """Return drafts `[m]` of a running request's continuation, m <= num_speculative_tokens; their score, which is
        the expected number of accepted drafts; and the length of their pattern. Without drafts, `[0]`, 0 and 0.

        Raises:
            UnknownRequestError: the request is not running.
            InvalidConfigError: num_speculative_tokens is not in 0 to 1024.
        """

    def stop_request(self, request_id: int) -> None:
        """End a running request and keep its output for drafts of others. Mutates the cache.

        Raises:
            UnknownRequestError: the request is not running.
        """

    def evict(self, request_id: int) -> bool:
        """Remove the outputs of ended requests with this id. Return whether there were any. Mutates the cache."""

    def stats(self) -> dict[str, int]:
        """Return the sizes of the cache: `num_requests` running, `num_cached_requests` ended, `num_output_tokens` of
        all outputs, `num_request_tokens` of running requests' own trees, `num_nodes`, and `memory_bytes` in use.
        Allocations are up to twice that number of bytes."""

    def __contains__(self, key: int, /) -> bool:
        """Return whether the request with this id is running."""

@final
class RequestSampling:
    """Sampling parameters of a request, with vLLM's names and defaults. Immutable.

    Ranges are checked when a scheduler takes the request.
    """

    def __new__(
        cls,
        *,
        seed: int = 0,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        allowed_token_ids: NDArray[np.int64] | None = None,
        logit_bias: dict[int, float] | None = None,
        bad_words_token_ids: Sequence[Sequence[int]] = ...,
        has_extras: bool = False,
        pooling: bool = False,
    ) -> RequestSampling:
        """Store the parameters.

        Args:
            seed: 64 bits; the request's random numbers depend only on them and the position.
            temperature: at least 0. Below `GREEDY_BELOW` the request is greedy, and top_k, top_p and min_p have no
                effect.
            top_k: number of most probable tokens to keep; 0 keeps all.
            top_p: share of the probability to keep, above 0 and at most 1.
            min_p: minimum probability of a token relative to the most probable one, 0 to 1.
            repetition_penalty: above 0; 1 is off.
            presence_penalty: 0 is off.
            frequency_penalty: 0 is off.
            logprobs: number of most probable tokens to report with each output token, -1 for all, None for none.
            prompt_logprobs: number of most probable tokens to report with each prompt token, -1 for all, None for none.
            allowed_token_ids: `[n]` int64, the only ids that the output may contain; copied.
            logit_bias: number that is added to the logit of each of these ids.
            bad_words_token_ids: token sequences that the output must not contain, none of them empty.
            has_extras: whether the request needs data that no record can hold. The record then has the sampling step
                `extras`.
            pooling: whether the request wants the final hidden state of its prompt's last token, or with
                `allowed_token_ids` that token's logits of these ids. No token is drawn: the output is token 0.

        Raises:
            InvalidRequestError: top_k is negative.
            InvalidBufferError: allowed_token_ids is not a contiguous int64 vector.
        """

    def columns(self, logits_dtype: str) -> tuple[list[float], int]:
        """Return a row's `PARAM_COLUMNS`, rounded to "float32" or "float64", and the bits of `SAMPLING_STEPS` that
        they need.

        Raises:
            InvalidConfigError: logits_dtype has another name.
        """

@final
class Scheduler:
    """Scheduler: decides which requests run in a step, on which rows and blocks, with how many drafts.

    It does continuous batching with chunked prefill, deferred drafting, prefix caching and preemption by recompute.
    `plan` writes one step into a record, the caller executes it on device row state, and `settle` takes the results.
    It is deterministic: the same calls give the same records. It holds no KV and no logits, runs nothing, and has no
    clock.

    R = `max_num_seqs`, C = `max_num_batched_tokens`, K = `num_speculative_tokens`. A *sequence* is one row's part in a
    step: sequences `[0, num_decode)` are decode rows by K descending, sequence `num_decode + j` is prefill chunk j.
    """

    def __new__(
        cls,
        *,
        max_num_seqs: int,
        max_model_len: int,
        num_blocks: int,
        block_size: int,
        max_num_batched_tokens: int,
        num_speculative_tokens: int = 0,
        drafter: CachedDrafter
        | HiddenDrafter
        | SharedKVDrafter
        | TextDrafter
        | HostDrafter
        | Sequence[CachedDrafter | HiddenDrafter | SharedKVDrafter | TextDrafter | HostDrafter]
        | None = None,
        sliding_window: int | None = None,
        window_groups: Sequence[int] | None = None,
        max_in_flight: int = 1,
        max_constraint_len: int = 0,
        logits_dtype: str = "float32",
        num_reserved_decode_tokens: int = 64,
        long_prefill_token_threshold: int = 0,
        max_prefill_stall_ms: float = 0.0,
        attention_cost_ratio: float = ...,
        merged_rooms: Sequence[tuple[int, int, int]] | None = None,
        max_merged_chunks: int = 0,
        max_merged_steps: int = 0,
        priority_aging_steps: int = 0,
        max_loras: int = 0,
        enable_prefix_caching: bool = True,
        num_snapshots: int = 0,
        snapshot_interval: int = 2048,
        decode_snapshot_interval: int = 512,
        enable_kv_cache_events: bool = False,
        enable_block_saves: bool = False,
        hash_key: bytes = ...,
    ) -> Scheduler:
        """Make a scheduler with no requests and all blocks free.

        Args:
            max_num_seqs: number of rows of device state (R), and so the maximum number of running requests; 1 to 65536.
            max_model_len: maximum number of tokens of a request, prompt and output; at least 2.
            num_blocks: number of KV blocks in the pool; at least 1.
            block_size: number of positions per KV block; at least 1.
            max_num_batched_tokens: number of tokens per step (C) that decode, prefill and draft chunks share; at
                least 1. Decoding never waits for it; chunks always have a quarter of it.
            num_speculative_tokens: maximum number of draft tokens per request and step (K), 0 to 1024.
            drafter: drafter or list of drafters; with None no request drafts. A `HostDrafter` is asked by `plan`, which
                writes its drafts into the record, and needs `max_in_flight=1`. A list has at most one drafter that is
                not a `HostDrafter`, and no method twice. Each request then gets in each step the drafter that
                promises the most.
            sliding_window: largest window of the layers, if all layers of the target and of the drafter in its blocks
                have one. A window is the number of last positions that a query attends to, its own included; at least
                2. Blocks before the window return to the pool while their request runs. None: some layer attends to all
                positions. With `window_groups` only the layers of the first group count.
            window_groups: windows of further KV groups, which are layers of the target with their own block tables in
                the one pool. Their blocks return to it once they lie before the group's window. There are at most 1024,
                each at least 2 and no longer than the first group's window. The draft's layers are in the first group.
                None: all layers are in one group. Not with `enable_kv_cache_events`.
            max_in_flight: maximum number of steps that are planned and not yet settled, 1 to 1024.
            max_constraint_len: maximum number of elements (W) that allowed_token_ids, logit_bias and bad words take in
                a record, for one request and for all admitted in one step. An id takes one, a bias two, a bad word
                one plus its tokens.
            logits_dtype: "float32" or "float64", the precision to which sampling parameters are rounded.
            num_reserved_decode_tokens: number of output positions for which each running request must have or get
                blocks when a new request is admitted; at least 0. With 0, a full pool often preempts.
            long_prefill_token_threshold: maximum number of prompt tokens of a request in a step. With 0, a request
                may use three quarters of the tokens left at its turn, plus whatever other prompts leave unused.
            max_prefill_stall_ms: maximum time in milliseconds of prompt and draft chunks in a step with decoding
                requests, which wait for it. Times are learnt from `time_step`. 16 prompt tokens and 512 catch-up
                tokens are allowed in any case. 0 is no bound.
            attention_cost_ratio: cost of attending to one position, relative to a token at the start of a context.
                `max_prefill_stall_ms` estimates chunks deep in a context with it; layers with a window add nothing. At
                least 0; default 1 / 4096.
            merged_rooms: rooms for prompt tokens in the passes that verify the tokens of decoding sequences, as
                `(num_speculative_tokens, num_seqs, num_tokens)`, ascending. A step of B sequences whose largest number
                of drafts is K may use those with this K and the smallest number of sequences that is at least B. It
                takes the first of which two hold its prompts, or else the last. It uses none if it verifies less than
                half of B * (K + 1) tokens. Chunks next to decoding sequences are limited to the
                room. None: every prompt chunk has a pass of its own.
            max_merged_chunks: maximum number of prompt chunks in such a pass; at least 1 with `merged_rooms`.
            max_merged_steps: number of steps with the largest room into which all running prompts must fit; at least 1
                with `merged_rooms`. If they do not fit, their chunks have a pass of their own and are not cut to a
                room.
            priority_aging_steps: number of steps that a request must have arrived earlier to go before one with a
                priority better by 1. With 0, priority always counts more.
            max_loras: maximum number of different LoRA adapters among the running requests, at most 1024; 0 if no
                request has one. A request whose adapter would exceed it waits, and no request with an adapter overtakes
                it.
            enable_prefix_caching: whether requests share the KV of equal prefixes.
            num_snapshots: number of slots for snapshots of states, if layers of the target have states in the place of
                KV; 0 if none have. A prefix hit then needs a snapshot at its end. Not with windows.
            snapshot_interval: number of prompt tokens between two snapshots of a long prompt, at least 1.
            decode_snapshot_interval: number of tokens between two snapshots of a request that decodes, at least 1. It
                keeps the last of them.
            enable_kv_cache_events: whether `take_kv_events` reports the blocks that entered and left the prefix cache.
            enable_block_saves: whether a `KVStore` saves cached blocks. Not with windows.
            hash_key: 16 bytes, default all zero. A secret key keeps clients from building prompts that collide.

        Raises:
            InvalidConfigError: naming the first setting outside its range.
        """

    @property
    def record_size(self) -> int:
        """Number of int64 elements in the buffer that `plan` writes."""

    @property
    def results_size(self) -> int:
        """Number of int64 elements in the buffer that `settle` reads."""

    @property
    def settled_size(self) -> int:
        """Number of int64 elements in the buffer that `settle` writes."""

    def record_layout(self) -> dict[str, tuple[int, int]]:
        """Return the sections of the record as `name: (offset, length)` in int64 elements, in buffer order.

        Of each section, only as many elements are written as the header counts.

        header: `HEADER_FIELDS` (described in `HEADER_DOCS`), then zeros. Its counts are numbers of elements of the
            sections below. No step reads elements from `used_len` on.
        seq_row [R], seq_k [R] (0 for chunks), seq_capacity [R] (positions that the row's block table covers),
            seq_n_upper [R] (upper bound of the row's tokens at the start of the step).
        chunk_start [R], chunk_len [R], chunk_is_last [R]: prefill chunk j; the last one of a prompt emits a token.
        prefill_token [C], prefill_position [C], prefill_q_start [R + 1]: the chunks' rows, flat. prefill_slot [G, C]:
            their KV slots, in each of G = 1 + len(window_groups) groups.
        draft_chunk_row [R], draft_chunk_start [R], draft_chunk_len [R], draft_q_start [R + 1], draft_position,
            draft_slot (of the first group): draft catch-up chunks. Their tokens are in row state. Afterwards the row's
            draft_len is start + len, also if len is 0. Slot -1: do not write. draft_chunk_k_start [R]: from this chunk
            on the row's drafter reads KV from this position on; 0 without a window.
        seq_drafter [R]: drafter of each sequence's drafts, an index of `DRAFTERS`.
        draft_token [R, K]: drafts of drafters on the host, those of sequence i from element i * K on; empty without
            one.
        admit_row [R], admit_request_id [R], admit_num_tokens [R], admit_prompt_len [R] (less than num_tokens after a
            preemption), admit_draft_len [R], admit_limit [R], admit_num_cached [R]: requests that get their row in this
            step, before its chunks run.
        admit_min_len [R] (stop tokens count from this position on), admit_stop_ids [R, MAX_STOP_IDS] (-1 after them).
        admit_snapshot [R]: slot of the snapshot that the row's states begin with, -1 for none; empty without snapshots.
            It is read before the step writes any.
        snapshot_row [N], snapshot_len [N], snapshot_slot [N], with N = num_snapshots: snapshots to write. A snapshot is
            written in the step in which the row's states pass that number of positions with committed tokens alone.
        admit_lora [R]: id of the request's adapter, 0 for none.
        admit_salt [R]: number that is equal only for requests of the same `cache_salt` and adapter; it differs between
            schedulers.
        admit_seed [R], admit_steps [R] (`SAMPLING_STEPS`), admit_params [R, len(PARAM_COLUMNS)] (bits of float64),
            admit_logprobs [R], admit_prompt_logprobs [R]: sampling parameters of the requests.
        admit_num_allowed [R] (-1: all are), admit_num_biases [R], admit_num_bad_words [R], admit_constraint_start [R +
            1]: parts of `constraint` [W]. It has for one request after the other its allowed ids, ids with a bias, the
            biases as bits of float64, the lengths of bad words, their tokens.
        upload_token: all tokens of the admitted requests, one request after the other.
        block_row, block_index, block_id: block table updates, `table[row, index] = id`. Entries before a row's window
            are not changed and no longer read. block_group: the group of each; empty if there is one group.
        preempted_request_id [R]: requests that lost their row in this plan.
        """

    def results_layout(self) -> dict[str, tuple[int, int]]:
        """Return the sections of the results as `name: (offset, length)` in int64 elements, each by sequence.

        num_emitted [R], num_accepted [R], num_drafted [R] (K after the device's own limits), flags [R] (`FLAG_*` bits).
        finish_reason [R]: `FINISH_STOP` if the last emitted token is a stop token at a position of at least
            admit_min_len; otherwise `FINISH_LENGTH` if the row is at its limit, else `FINISH_NONE`. The device judges,
            and `settle` only rejects impossible values.
        tokens [R * (K + 1)], row-major by sequence: the emitted tokens. Element i from num_accepted + 1 to num_drafted
            is draft i (from 1), which was rejected. Only an `Output` with `keep_drafts` reads it.

        A prompt's last chunk emits 1 token. Other chunks and rows that had ended report 0 everywhere.
        """

    def settled_layout(self) -> dict[str, tuple[int, int]]:
        """Return the sections of the buffer that `settle` writes as `name: (offset, length)` in int64 elements, each by
        sequence.

        request_id [R] (-1 if the sequence's results were dropped), num_new [R] (deliver `tokens[sequence, :num_new]`),
        finish_reason [R] (`FINISH_*`).
        """

    def add_request(
        self,
        request_id: int,
        token_ids: NDArray[np.int64],
        *,
        limit: int,
        min_tokens: int = 0,
        num_speculative_tokens: int = 0,
        priority: int = 0,
        caller: int | None = None,
        stop_token_ids: NDArray[np.int64] | None = None,
        sampling: RequestSampling | None = None,
        cache_salt: bytes = ...,
        lora: tuple[int, str] | None = None,
        extra_keys: Sequence[tuple[int, bytes]] | None = None,
        prediction: NDArray[np.int64] | None = None,
    ) -> None:
        """Add a request to the queue, after all waiting requests of its priority.

        Args:
            request_id: at least 0 and not in use; may be used again after the request's end.
            token_ids: `[n]` int64, the prompt, at least one token; copied.
            limit: maximum number of tokens of the request, prompt and output: `min(n + max_tokens, max_model_len)`.
            min_tokens: number of output tokens before which stop ids do not count.
            num_speculative_tokens: number of draft tokens per step, at most the engine's; 0 never drafts.
            priority: smaller values go first, ties by arrival.
            caller: id of the caller that sent the request. Requests of different callers share rows and blocks evenly
                if their priorities are equal and do not age, however many each caller sends. None: the request counts
                as a caller of its own.
            stop_token_ids: `[s]` int64, tokens that end the output, at most `MAX_STOP_IDS`; copied.
            sampling: sampling parameters, which the device gets in the record; None for the defaults.
            cache_salt: salt of the prefixes; the request shares prefixes only with requests of the same salt.
            lora: id (from 1) and name of the request's LoRA adapter. It shares prefixes only with requests of the same
                adapter. None: the base model.
            extra_keys: `(position, key)` in order of position: extra dependencies of the prompt's KV besides its
                tokens, such as the hash of an image or an adapter's name. From the block of that position on, the
                request shares blocks only with requests whose extra keys are equal too. Keys have at least one byte.
            prediction: `[p]` int64, tokens that the caller expects in the output, which the drafter `prediction`
                proposes; copied. They never change the output.

        Raises:
            DuplicateRequestError: the id is waiting or running.
            InvalidRequestError: a parameter is not allowed, for example a limit that needs more blocks than the pool
                has.
            InvalidBufferError: an array is not a contiguous int64 vector.
        """

    def set_grammar_drafts(self, request_id: int, token_ids: NDArray[np.int64]) -> None:
        """Set the tokens `[f]` int64 that a request's grammar forces, or makes likely, after its settled ones. Mutates.

        The drafter `grammar` proposes them, continued by another drafter on the host, until the request has more
        tokens.

        Raises:
            UnknownRequestError: the id is neither waiting nor running.
            InvalidRequestError: a token id is outside its range.
            InvalidBufferError: the array is not a contiguous int64 vector.
        """

    def request(self, request_id: int) -> RequestView:
        """Return a view of a waiting or running request: its state, lengths and block table. A copy; changes nothing.

        Raises:
            UnknownRequestError: the id is neither waiting nor running.
        """

    def request_ids(self) -> list[int]:
        """Return the ids of the waiting requests, then of the running ones, each most important first."""

    def take_kv_events(self) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
        """Take the changes of the prefix cache since the last call, in order.

        The list is empty unless `enable_kv_cache_events` is set. If events are taken after each `plan`, before its
        step executes, `BlockRemoved` names the cached blocks that the step may overwrite. Their KV can still be
        copied out on the step's stream.

        The scheduler keeps at most two blocks' worth of events per block of the pool, more than a step and its
        settling produce. A caller that takes no events for longer gets `AllBlocksCleared` in place of dropped events.
        """

    def take_kv_event_batch(self) -> KVEventBatch | None:
        """Take the changes of the prefix cache since the last call as one object, before any Python events are made.
        None if nothing happened."""

    def abort(self, request_id: int) -> None:
        """End a waiting or running request now; its results in flight will be dropped.

        Raises:
            UnknownRequestError: the id is neither waiting nor running.
        """

    def speculate(self, planner: SpeculationPlanner) -> None:
        """Let `planner` choose the K of every request for the next `plan`; call it right before.

        A request gets no more than its own `num_speculative_tokens`. Without this call it keeps the K chosen last, at
        first its own. The draft KV of requests whose acceptance the planner found collapsed is rebuilt. After the
        step, pass its results to the planner with `tell`. Holds both locks.

        Raises:
            InvalidConfigError: the planner's `max_num_seqs` or `num_speculative_tokens` is not the scheduler's.
        """

    def tell(
        self,
        planner: SpeculationPlanner,
        record: NDArray[np.int64],
        results: NDArray[np.int64],
        ms: float | None = None,
    ) -> None:
        """Pass the results of a step to `planner`, from its record and its results, settled or not.

        `ms` is the step's duration, which counts if the step did nothing but decode. A sequence whose drafter had
        nothing to propose counts as one rejected draft. With drafters on the host and on the device, the planner gets
        only the device's drafts. Mutates only the planner. Holds both locks.

        Raises:
            InvalidBufferError: a buffer is not a contiguous int64 array of its layout's size, or the planner rejects a
                row, a K or `ms`.
            InvalidAcceptanceError: counts of drafted and accepted tokens are impossible.
        """

    def time_step(self, step_id: int, ms: float) -> None:
        """Record how long the step that settled last took. The time starts at its beginning or at the end of the
        step before it, and ends when all its waiting clients have their results.

        With these times, plans limit prompt tokens next to decoding requests by `max_prefill_stall_ms`. If that setting
        is 0, the call does nothing.

        Raises:
            SettleOrderError: another step settled last.
            InvalidBufferError: `ms` is not a finite time above 0.
        """

    def rebuild_draft(self, request_id: int) -> None:
        """Rebuild a running request's draft KV from position 0, by catch-up chunks of coming steps.

        Its blocks lose their draft marks, so that no other request continues from broken KV. A request that drafts
        nothing is left as it is.

        Raises:
            UnknownRequestError: the id is neither waiting nor running.
            NotRunningError: the request is waiting.
        """

    def preempt(self, request_id: int) -> None:
        """Return a running request to its original place in the waiting queue, as `plan` does when there are too few
        blocks.

        Its settled tokens stay, and its results in flight will be dropped. Its KV is computed again unless the prefix
        cache still has it.

        Raises:
            UnknownRequestError: the id is neither waiting nor running.
            NotRunningError: the request is waiting.
        """

    def plan(self, record: NDArray[np.int64]) -> int:
        """Plan the next step into `record` `[record_size]` int64. Return `PLAN_IDLE`, `PLAN_STEP` or
        `PLAN_SETTLE_FIRST`.

        After `PLAN_STEP` the step is in flight until it settles; otherwise the record's content is unspecified.

        Raises:
            InvalidBufferError: `record` is not a writable contiguous int64 vector of that size.
        """

    def settle(self, step_id: int, results: NDArray[np.int64], settled: NDArray[np.int64]) -> None:
        """Take the results of the oldest step in flight and write the settled result of each sequence into `settled`.

        `results` is `[results_size]` int64, `settled` `[settled_size]` int64; they must not overlap.

        Raises:
            SettleOrderError: another step is the oldest in flight.
            InvalidResultsError: the step cannot have had these results.
            InvalidBufferError: a buffer does not have its dtype, layout or size.
        """

    @property
    def num_waiting(self) -> int:
        """Number of requests without a row."""

    @property
    def num_running(self) -> int:
        """Number of requests with a row."""

    @property
    def num_steps(self) -> int:
        """Number of steps planned since the start, which is the id of the next one."""

    @property
    def num_in_flight(self) -> int:
        """Number of steps planned and not yet settled."""

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that no request holds, cached ones included."""

    @property
    def num_groups(self) -> int:
        """Number of KV groups, G."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool."""

    def least_blocks(self, limit: int) -> int:
        """Return the minimum number of blocks with which a request of `limit` tokens can reach its limit, alone in the
        pool. It is less than the blocks of all positions if `sliding_window` lets blocks return to the pool.

        Raises:
            InvalidConfigError: `limit` is negative.
        """

    @property
    def num_preemptions(self) -> int:
        """Number of times that a running request was preempted."""

    def state_cache_stats(self) -> dict[str, int]:
        """Return `num_slots` and `num_cached`, the numbers of snapshots of states that fit and that can be found, and
        since the start the numbers `hits` of requests that began with a snapshot, `stored` of snapshots written, and
        `evictions` of snapshots that gave way."""

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens whose target KV came from the prefix cache, counted when their request was first
        admitted."""

    def has_unfinished(self) -> bool:
        """Return whether a request waits or runs, or a step is in flight."""

    def acceptance(self) -> AcceptanceTracker:
        """Return a copy of the acceptance statistics of all settled steps."""

    def acceptance_of(self, drafter: int) -> AcceptanceTracker:
        """Return a copy of the acceptance statistics of one drafter, an index of `DRAFTERS`, in all settled steps.

        Raises:
            InvalidConfigError: there is no such drafter.
        """

    def draft_errors_of(self, drafter: int) -> tuple[int, str | None]:
        """Return how often a drafter, an index of `DRAFTERS`, has failed on the host, and its last failure. Each
        failure cost the drafts of one request in one step. It is (0, None) for `DRAFTER_DEVICE`, whose failures a
        runner sees.

        Raises:
            InvalidConfigError: there is no such drafter.
        """

    def draft_kv_not_written(self, blocks: NDArray[np.int64]) -> None:
        """Note that the device has not written the draft KV that a step was to write into `blocks` `[N]`. That step
        is the one planned last. For prompt chunks of a head that reads hidden states, it is the one before. Call this
        before the next `plan`.

        A draft model catches up from these blocks. A head starts anew, in every request that shares one of the blocks.
        No block among them keeps its draft mark. Mutates.

        Raises:
            InvalidBlockError: a block is not in the pool; nothing has changed then.
        """

    def pause_drafting(self, steps: int) -> None:
        """Stop drafting on the device and writing draft KV for the next `steps` steps. Drafters on the host go
        on. 0 ends a pause. Mutates.

        Raises:
            InvalidConfigError: `steps` is negative.
        """

    def set_draft_costs(self, pass_cost: float, row_costs: Sequence[float], catch_up_cost: float) -> None:
        """Set the costs of drafts, as shares of a step without drafts: a drafting pass on the device, verifying 1, 2,
        .. K drafts, and a position of a chunk that closes the lag of draft KV. The whole chunk costs at least a pass.
        With several drafters, each request's drafter is chosen by these costs. Mutates.

        Raises:
            InvalidConfigError: a cost is not finite and at least 0, or `row_costs` does not have K elements.
        """

    def take_loads(self) -> list[int]:
        """Take the ids of waiting requests that the last `plan` would have admitted if they did not wait for blocks of
        a `KVStore`."""

    def has_due(self) -> bool:
        """Return whether a block or an output waits for `KVStore.save`."""

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. Return False, and change nothing, while any block is held."""

    def check_integrity(self) -> None:
        """Check that the scheduler's state agrees with itself; reads everything, so it is for tests and idle times.

        Raises:
            IntegrityError: naming the first contradiction.
        """

@final
class RequestView:
    """View of a request, as `Scheduler.request` found it.

    Lengths are the smallest that the steps in flight can lead to if the request does not end in them. Without
    steps in flight they are exact.
    """

    @property
    def state(self) -> Literal["waiting", "prefill", "decode"]:
        """State: "waiting" without a row (new, or preempted), "prefill" while target KV of the prompt is still to be
        planned, or "decode"."""

    @property
    def row(self) -> int | None:
        """Row of device state; None while the request waits."""

    @property
    def num_tokens(self) -> int:
        """Number of settled tokens: the prompt and the output so far."""

    @property
    def limit(self) -> int:
        """Maximum number of tokens of the request."""

    @property
    def num_computed_tokens(self) -> int:
        """Number of positions with valid target KV; 0 while the request waits."""

    @property
    def num_draft_computed_tokens(self) -> int:
        """Number of positions with valid draft KV; 0 while the request waits."""

    @property
    def num_speculative_tokens(self) -> int:
        """Number of draft tokens that the request currently asks for per step; 0 while it waits."""

    @property
    def num_in_flight(self) -> int:
        """Number of steps in flight that name the request's row."""

    @property
    def block_table(self) -> NDArray[np.int64]:
        """Blocks of the request in order of position, `[blocks]` int64, a copy. -1 stands for blocks before its
        window, which returned to the pool. Empty while the request waits."""

@final
class BlockStored:
    """KV event: consecutive blocks of a request can be found from now on. Names are those of vLLM's KV events."""

    @property
    def blocks(self) -> list[int]:
        """Ids of the stored blocks."""

    @property
    def block_hashes(self) -> list[int]:
        """Hashes of the stored blocks, 128 bits each."""

    @property
    def parent_block_hash(self) -> int | None:
        """Hash of the block before the first stored one; None at position 0."""

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """Tokens of the stored blocks, `[blocks * block_size]` int64, a copy."""

    @property
    def block_size(self) -> int:
        """Number of positions per block."""

    @property
    def extra_keys(self) -> list[list[tuple[int, bytes]]]:
        """Extra keys of each stored block, as `(offset, key)` with the offset in the block from which the key
        counts."""

    @property
    def cache_salt(self) -> bytes:
        """Cache salt of the request, if the first stored block begins its text; else empty."""

    @property
    def lora_id(self) -> int | None:
        """Id of the LoRA adapter that the stored blocks were computed with; None for the base model."""

    @property
    def lora_name(self) -> str | None:
        """Name of the LoRA adapter that the stored blocks were computed with; None for the base model."""

    @property
    def is_snapshot(self) -> bool:
        """True if these are snapshots of states at the ends of blocks, in the place of KV; `blocks` has their slots
        then. With states, a prefix hit needs KV and a snapshot."""

@final
class BlockRemoved:
    """KV event: blocks can no longer be found. Their KV is unchanged until the next planned step executes."""

    @property
    def blocks(self) -> list[int]:
        """Ids of the removed blocks."""

    @property
    def block_hashes(self) -> list[int]:
        """Hashes that the removed blocks had."""

    @property
    def has_draft(self) -> list[bool]:
        """Whether the draft KV of each removed block was valid too."""

    @property
    def is_snapshot(self) -> bool:
        """True if these are snapshots of states, as in `BlockStored`."""

@final
class AllBlocksCleared:
    """KV event: all blocks were removed, by a reset, or earlier events were dropped because they were not taken in
    time.

    Later events are correct again. After a drop, blocks stored before may still be cached, but no event will name them.
    """

@final
class KVEventBatch:
    """Changes that `Scheduler.take_kv_event_batch` took. May be used in another thread than the scheduler's."""

    def events(self) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
        """Return the changes as events, in order."""

    def msgpack(self, timestamp: float, data_parallel_rank: int = 0) -> bytes:
        """Return the events as a payload of vLLM's KV events, in MessagePack; releases the interpreter while it
        encodes.

        The payload is `[timestamp, events, data_parallel_rank]`, where an event is a map with its `type`. `timestamp`
        is in seconds since 1970. Hashes are the lower 64 bits of a block's hash. `extra_keys` are reported by block
        without offsets; in the first block they begin with the cache salt.
        """

@final
class KVStore:
    """KV blocks, snapshots of states and outputs of requests in a folder, which outlive the process. One process
    writes, others read.

    Blocks and snapshots are copied by the calling thread. Another thread writes them. Methods may be called by the
    thread of the scheduler alone, except `stats`.
    """

    def __new__(
        cls,
        path: str,
        namespace: bytes,
        *,
        max_bytes: int,
        segment_bytes: int,
        owner: int,
        fresh_key: bytes,
        snapshot_bytes: int = 0,
    ) -> KVStore:
        """Open the folder, which is made with mode 0700 if it is missing, and read the headers of its records.

        Args:
            path: folder.
            namespace: 32 bytes, a digest of all that KV depends on besides tokens, salt and adapter.
            max_bytes: maximum number of bytes of all segments, those of other namespaces included. The least recently
                used segments are deleted beyond.
            segment_bytes: number of bytes after which a new segment begins.
            owner: id of the user whom folder and files must belong to.
            fresh_key: 16 random bytes, the key of block hashes if the folder has none.
            snapshot_bytes: bytes of a snapshot of the target's states, as `CpuDecoder.snapshot_bytes`. A prefix then
                needs a snapshot at its end, which is in the store or in memory.

        Raises:
            InvalidConfigError: a setting is outside its range, or the folder must not be used as it is.
            OSError: the system refused an operation; `errno` says why.
        """

    @property
    def hash_key(self) -> bytes:
        """Key of block hashes, which all processes with this folder share."""

    def await_load(self, scheduler: Scheduler, request_id: int) -> bool:
        """Let a waiting request wait for `load` if the store makes its prefix hit longer: with the block after its
        cached ones, and if layers have states, with a snapshot. Return whether it does.

        Raises:
            UnknownRequestError: the id is not live.
        """

    def load(
        self,
        scheduler: Scheduler,
        request_id: int,
        target: CpuKVCache,
        draft: CpuKVCache | None = None,
        *,
        ms: float = ...,
    ) -> bool:
        """Copy blocks of a request's prompt from the store into the caches, and put them into the prefix cache. If
        layers have states, these are the blocks before the last snapshot, and then that snapshot.

        Reads at least one block or a snapshot, and no more blocks after `ms` milliseconds. A record that is not whole
        ends the prefix. Return True if there is no more to read, and let the request go on. Releases the interpreter
        while it reads. Returns True, too, if the request has ended.
        """

    def save(
        self,
        scheduler: Scheduler,
        target: CpuKVCache,
        draft: CpuKVCache | None = None,
        *,
        ms: float = ...,
    ) -> bool:
        """Copy due blocks, snapshots and outputs to the queue of the thread that writes, for `ms` milliseconds or until
        the queue is full. Return True if none is left. Does nothing and returns False while another process
        writes."""

    def restore_outputs(self, scheduler: Scheduler) -> None:
        """Add the outputs in the store to the suffix drafter of `scheduler`, oldest first."""

    def ask_for_lock(self) -> None:
        """Let the thread that writes try to become the writer of the folder. `save` does so once a second."""

    def flush(self) -> None:
        """Wait until all that was saved is written, or has failed. Releases the interpreter."""

    def close(self) -> None:
        """Write all waiting records, and end the thread. May be called again. Releases the interpreter."""

    def take_error(self) -> str | None:
        """Take the last error of a write."""

    def stats(self) -> dict[str, int]:
        """Return counters since the store was opened: `queried_blocks`, `loaded_blocks`, `loaded_snapshots`,
        `read_bytes`, `writes`, `written_bytes`, `errors`; and `records` and `is_writer` as of now."""

@final
class TokenDecoder:
    """Decoder from token ids to text by a tokenizer's own rules. All requests share it, in any thread."""

    def __new__(cls, json: str) -> TokenDecoder:
        """Make a decoder from `tokenizers.Tokenizer.to_str()`, the content of tokenizer.json. Its normalizer,
        pre-tokenizer and merges do not matter.

        Raises:
            InvalidTokenizerError: the JSON cannot be read.
        """

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode `token_ids`, all at once. Raises InvalidTokenizerError if the decoder fails on them."""

@final
class Output:
    """Output of one request: tokens, text as it comes, acceptance statistics, times, its end.

    The text equals that of decoding all ids at once, except that a stop string ends it. If it ends in a run of bytes
    that are no text, the number of replacement characters may differ too. Bytes of an unfinished character are held
    back until it is complete, or until `finish`.

    A stop string counts if the token that completes it is at 0-based output index `min_tokens` or later. If one token
    completes several, the one that ends first counts; among those, the longest.
    """

    def __new__(
        cls,
        request_id: int,
        prompt_token_ids: Sequence[int],
        *,
        num_speculative_tokens: int = 0,
        decoder: TokenDecoder | None = None,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = ...,
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        keep_drafts: bool = False,
    ) -> Output:
        """Make an empty output.

        Args:
            request_id: id of the request in the scheduler.
            prompt_token_ids: prompt, whose last few tokens are context for the decoder; their text is not part of the
                output.
            num_speculative_tokens: K of the acceptance statistics, 0 to 1024.
            decoder: decoder of the text; None for tokens without text.
            skip_special_tokens: whether special tokens have no text.
            stop: stop strings, none empty.
            include_stop_str_in_output: whether the stop string or stop token that ends the text is part of it.
            min_tokens: number of output tokens before which stop strings do not count.
            keep_drafts: whether `drafts` returns the drafts. The results of the request's steps must then contain
                the rejected drafts, as `results_layout` describes for `tokens`.

        Raises:
            InvalidConfigError, InvalidRequestError: a setting is outside its range.
            InvalidTokenizerError: the prompt cannot be decoded.
        """

    @property
    def request_id(self) -> int:
        """Id of the request."""

    @property
    def num_tokens(self) -> int:
        """Number of output tokens so far."""

    def token_ids(self, start: int = 0) -> list[int]:
        """Return the output tokens from index `start` on."""

    @property
    def text(self) -> str:
        """Text so far. It ends before a stop string, or after it with `include_stop_str_in_output`."""

    @property
    def stable_text(self) -> str:
        """Part of `text` that no further token can remove: a possible beginning of a stop string is left out."""

    def stable_text_from(self, start: int = 0) -> tuple[str, int]:
        """Return the part of `stable_text` from `start` on, and its end in bytes of UTF-8. Copies nothing else.

        Args:
            start: 0, or the end that an earlier call returned.

        Raises:
            InvalidRequestError: `start` is after the end of the text or within a character.
        """

    @property
    def finish_reason(self) -> int | None:
        """Finish reason, `FINISH_*`; None while the request has not ended."""

    @property
    def finish_time(self) -> float | None:
        """Time of the end, as passed in `now`; None while the request has not ended."""

    @property
    def error(self) -> str | None:
        """Message, if a step or the decoder ended the request with `FINISH_ERROR`."""

    @property
    def error_flags(self) -> int:
        """Flags (`FLAG_*` bits) with which a step reported the error that ended the request; 0 for every other
        end."""

    @property
    def stop(self) -> int | None:
        """Index of the stop string that ended the text; None without one."""

    @property
    def first_token_time(self) -> float | None:
        """Time of the first token, as passed in `now`; None before it."""

    def acceptance(self) -> AcceptanceTracker:
        """Return a copy of the request's acceptance statistics."""

    def drafts(self, start: int = 0) -> list[tuple[int, int, list[int]]] | None:
        """Return the drafts of each iteration that drafted, from entry `start` on; None if they are not kept.

        Each entry has the index of the output token that the iteration began with, the number of accepted drafts, and
        the ids of the rejected drafts.
        """

    def record(self, drafted: int, accepted: int) -> None:
        """Record one draft in the acceptance statistics. Mutates.

        Raises:
            InvalidAcceptanceError: the counts are impossible.
        """

    def append(self, token_ids: Sequence[int], *, ended_by_token: bool = False, now: float = 0.0) -> tuple[int, bool]:
        """Take new tokens. Return how many were taken, and whether a stop string has ended the text. Mutates.

        Tokens after the one that completes a stop string are not taken, in this call or a later one. With
        `ended_by_token` the last one is a stop token: an output token, but no text unless `include_stop_str_in_output`
        is set.

        Raises:
            InvalidTokenizerError: the text of the tokens cannot be decoded; none is taken.
        """

    def finish(self, reason: int, *, now: float = 0.0) -> None:
        """End the output: bytes held back become replacement characters, except after an error. Mutates.

        The first end counts, but `FINISH_ERROR` replaces any other end.

        Raises:
            InvalidRequestError: `reason` is no finish reason.
        """

@final
class Outputs:
    """Outputs of all running requests: one call settles a step and hands its results to the requests."""

    def __new__(cls) -> Outputs:
        """Make an empty collection."""

    def add(self, output: Output) -> None:
        """Add a request's output, by its id. Mutates."""

    def remove(self, request_id: int) -> bool:
        """Remove a request that ended outside a step, for example by an abort. Return whether the request was known.
        Mutates."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens handed to requests since the start."""

    def __len__(self) -> int:
        """Return the number of requests that have not ended."""

    def settle(
        self,
        scheduler: Scheduler,
        step_id: int,
        results: NDArray[np.int64],
        settled: NDArray[np.int64],
        *,
        now: float = 0.0,
        fault: str | None = None,
    ) -> tuple[list[int], list[int]]:
        """Settle a step as `Scheduler.settle` does, and hand its results to the outputs of its requests: tokens,
        text, stop strings, statistics, ends. Releases the interpreter for the outputs. Mutates.

        In `settled`, `num_new` is then the number of tokens that each request kept. `finish_reason` also reports stop
        strings, and text that cannot be decoded (`FINISH_ERROR`). Requests that ended for these reasons have left the
        scheduler too.

        Args:
            now: the time, for `first_token_time` and `finish_time`.
            fault: reason why the step failed as a whole, for sequences with flags.

        Returns:
            Ids of the requests that received tokens or ended, in the order of their sequences, and ids of those that
            ended.

        Raises:
            SettleOrderError: another step is the oldest in flight; nothing has changed.
            InvalidBufferError: a buffer does not have its dtype, layout or size; nothing has changed.
            InvalidResultsError: the step cannot have had these results; nothing has changed.
        """

@final
class SpeculationPlanner:
    """Planner that chooses how many tokens each request drafts in the next step, possibly none: the most expected
    tokens per millisecond.

    It knows the costs of steps (a `CostModel`, refined by `settle`) and the acceptance of drafts. Acceptance is
    estimated by position over all requests, times one factor per request, both exponentially forgotten. It changes its
    choice only for 0.5 % (`MARGIN`) more tokens per millisecond, and gives requests different K only for 3 %
    (`MIXED_MARGIN`).

    To learn about other choices, it spends 0.4 % (`PROBE_SHARE`) of the time on drafting deeper, one request at a time.
    It spends 0.2 % (`TRIAL_SHARE`), at first more, on another K for all requests. A useless draft ends at K = 0, and
    one that becomes good again is found.

    `Scheduler.speculate` drives it. On its own, requests are named by row, a number below R = `max_num_seqs` that
    belongs to one request while it runs. Call `reset` for a new request on a row, `decide` before each step, and
    `settle` after it.
    """

    def __new__(
        cls,
        *,
        max_num_seqs: int,
        num_speculative_tokens: int,
        costs: CostModel,
        catch_up_ms: float = 0.0,
        lora_costs: CostModel | None = None,
    ) -> SpeculationPlanner:
        """Make a planner that has seen no drafts; it copies `costs` and `lora_costs`.

        Args:
            max_num_seqs: number of rows (R), 1 to 65536.
            num_speculative_tokens: maximum number of drafts that it chooses (K), 1 to 1024.
            costs: milliseconds by batch and K of steps that only decode, extended beyond the grid by `CostModel.ms`.
            catch_up_ms: additional milliseconds of each position of a draft catch-up chunk, at least 0.
            lora_costs: costs of steps in which a request has a LoRA adapter. None: `costs` are those of all steps.

        Raises:
            InvalidConfigError: naming the setting outside its range.
        """

    @property
    def max_num_seqs(self) -> int:
        """Number of rows, R."""

    @property
    def num_speculative_tokens(self) -> int:
        """Maximum number of drafts that the planner chooses, K."""

    def costs(self, *, has_lora: bool = False) -> CostModel:
        """Return a copy of the costs as refined by now: of steps in which a request has a LoRA adapter if `has_lora`,
        else of steps in which none has. Only ratios of costs are meaningful: a machine that slows down as a whole does
        not change them."""

    def conditional_acceptance(self) -> list[float]:
        """Return the chance that each draft token of an average request is accepted, given the drafts before it,
        `[K]`."""

    def reset(self, row: int, *, has_lora: bool = False) -> None:
        """Start the statistics of a new request on `row` and discard those of the request before it. `has_lora`: the
        request has a LoRA adapter.

        Raises:
            InvalidBufferError: there is no such row.
        """

    def decide(
        self, rows: NDArray[np.int64], caps: NDArray[np.int64], lags: NDArray[np.int64], ks: NDArray[np.int64]
    ) -> None:
        """Write the K of each of the next step's B decoding requests into `ks`.

        Args:
            rows: `[B]`, distinct.
            caps: `[B]`, maximum number of drafts of each request now; values above K count as K.
            lags: `[B]`, positions that each request's draft KV would have to catch up first, 0 for none.
            ks: `[B]`, written.

        Raises:
            InvalidBufferError: lengths differ, a row is out of range, or a cap or lag is negative; nothing has changed.
        """

    def settle(
        self,
        rows: NDArray[np.int64],
        ks: NDArray[np.int64],
        drafted: NDArray[np.int64],
        accepted: NDArray[np.int64],
        ms: float | None = None,
    ) -> None:
        """Record the results of a step of B decoding sequences.

        Args:
            rows: `[B]`, row of each sequence.
            ks: `[B]`, K of each sequence as planned.
            drafted: `[B]`, number of drafted tokens: K after the device's own limits.
            accepted: `[B]`, number of drafted tokens that the target accepted.
            ms: duration of the step, if it did nothing but decode. It refines the costs if all requests had the same
                K.

        Raises:
            InvalidBufferError: lengths differ, a row is out of range, or a K or `ms` is outside its range.
            InvalidAcceptanceError: unless `accepted <= drafted <= ks`. Nothing has changed then.
        """

    def take_collapsed(self) -> list[int]:
        """Take the rows whose requests' acceptance has collapsed since the last call, each once. Their draft KV should
        be rebuilt.

        A collapse is a first draft token that is accepted a quarter as often as before in this request (a CUSUM test).
        `Scheduler.speculate` takes these rows and rebuilds their draft KV by itself.
        """

@final
class AcceptanceTracker:
    """Acceptance statistics: how many drafted tokens the target accepted.

    One iteration of one request with `drafted >= 1` is one draft of `drafted` tokens, `accepted` of them accepted,
    before stop tokens or limits cut the text.
    """

    def __new__(cls, num_speculative_tokens: int) -> AcceptanceTracker:
        """Make empty statistics for drafts of at most `num_speculative_tokens` (K, 0 to 1024) tokens.

        Raises:
            InvalidConfigError: K is outside that range.
        """

    @property
    def num_speculative_tokens(self) -> int:
        """Maximum number of tokens in one draft, K."""

    def record(self, drafted: int, accepted: int) -> None:
        """Record one iteration; `drafted == 0` is no draft and changes nothing.

        Raises:
            InvalidAcceptanceError: unless `0 <= accepted <= drafted <= K`.
        """

    def reset(self) -> None:
        """Forget everything recorded."""

    @property
    def drafts(self) -> int:
        """Number of iterations that drafted at least one token."""

    @property
    def draft_tokens(self) -> int:
        """Number of drafted tokens."""

    @property
    def accepted_tokens(self) -> int:
        """Number of drafted tokens that the target accepted."""

    @property
    def acceptance_length(self) -> float:
        """Mean number of tokens emitted per draft: `1 + accepted_tokens / drafts`; 1.0 without drafts."""

    @property
    def acceptance_rate(self) -> float:
        """Share of draft tokens that the target accepted; 0.0 without drafts."""

    @property
    def per_position(self) -> list[float]:
        """Share of all drafts whose token i was accepted, unconditional, `[K]`. Sums to `acceptance_length - 1`."""

    @property
    def accepted_per_position(self) -> list[int]:
        """Number of drafts whose token i was accepted, `[K]`."""

    @property
    def histogram(self) -> list[int]:
        """Number of drafts by their number of accepted tokens, `[K + 1]`."""

@final
class BlockPool:
    """Reference counts of KV blocks, and the prefix cache that finds blocks by content.

    A block is free, held (`ref_count >= 1`), or cached (registered, not held, evicted least recently freed first). A
    registered block has the flag `target_valid`: its target KV is valid. The flag `draft_valid` says that its draft KV
    is valid too. Every operation is O(1).
    """

    def __new__(cls, num_blocks: int) -> BlockPool:
        """Make a pool whose blocks are all free; the first allocations return 0, 1, 2, ...

        Raises:
            InvalidConfigError: unless `1 <= num_blocks <= 2**31`.
        """

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool."""

    @property
    def num_free(self) -> int:
        """Number of blocks that `allocate` can return: free and cached ones."""

    def ref_count(self, block: int) -> int | None:
        """Return the number of holders of `block`; None if the pool has no such block."""

    def allocate(self) -> int:
        """Allocate a block with one holder and no marks: a free block, or else the least recently freed cached one.

        Raises:
            OutOfBlocksError: every block is held.
        """

    def next_eviction(self) -> int | None:
        """Return the cached block that the next `allocate` will evict; None if it will take a free block or find none.

        The block's KV still matches `block_hash`, so it can be copied out first.
        """

    def share(self, block: int) -> None:
        """Add a holder to a held or cached block.

        Raises:
            InvalidBlockError: the block is free or not in the pool.
        """

    def free(self, block: int) -> None:
        """Remove one holder of a block. Without holders a registered block becomes cached, any other becomes free.

        Free a sequence's blocks last to first, so that its tail is evicted before its head.

        Raises:
            InvalidBlockError: the block is not held, or not in the pool.
        """

    def lookup(self, block_hash: int) -> int | None:
        """Return the block registered under this 128-bit hash, held or cached; a look-up adds no holder."""

    def register(self, block: int, block_hash: int) -> bool:
        """Set the flag `target_valid` (valid target KV): the held block can be found under `block_hash` from now on.

        Returns False, and changes nothing, if another block has that content already.

        Raises:
            InvalidBlockError: the block is not held, is registered already, or is not in the pool.
            OverflowError: the hash does not fit 128 bits.
        """

    def is_registered(self, block: int) -> bool:
        """Return whether `block` has `target_valid` (valid target KV); False if the pool has no such block."""

    def block_hash(self, block: int) -> int | None:
        """Return the hash that `block` is registered under; None if it is not, or the pool has no such block."""

    def has_draft(self, block: int) -> bool:
        """Return whether `block` has `draft_valid` (valid draft KV); False if the pool has no such block."""

    def mark_draft(self, block: int) -> None:
        """Set the flag `draft_valid` (valid draft KV) on a registered held block and end its claim.

        Raises:
            InvalidBlockError: the block is not held, not registered, or not in the pool.
        """

    def claim(self, block: int, claimant: int) -> bool:
        """Take the claim on writing the draft KV of a registered held block without `draft_valid` (valid draft KV).
        Return False if another holder has it.

        Raises:
            InvalidBlockError: the block is not in that state, or `claimant` is not in `[0, 2**32 - 1)`.
        """

    def claimant(self, block: int) -> int | None:
        """Return the holder that has the claim on writing the draft KV of `block`; None without one."""

    def release_claim(self, block: int, claimant: int) -> bool:
        """Release the claim of `claimant` on `block`. Return False if it has none."""

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content. Return False, and change nothing, while any block is held."""

    def check_integrity(self) -> None:
        """Check that lists, marks, claims and hashes agree. O(num_blocks).

        Raises:
            IntegrityError: naming the first contradiction.
        """

@final
class BlockHasher:
    """Content hashes of KV blocks: SipHash-2-4-128 under a key, chained over blocks, with a salt at the root."""

    def __new__(cls, hash_key: bytes = ...) -> BlockHasher:
        """Make a hasher with this 16-byte key, default all zero. Caches that should agree must use the same key.

        Raises:
            InvalidConfigError: the key does not have 16 bytes.
        """

    def hash_blocks(
        self,
        token_ids: NDArray[np.int64],
        block_size: int,
        cache_salt: bytes = ...,
        *,
        parent: int | None = None,
        extra_keys: Sequence[tuple[int, bytes]] | None = None,
    ) -> list[int]:
        """Return the 128-bit hashes of all full blocks of `token_ids` `[n]` int64; there are `n // block_size`.

        Args:
            parent: hash of the block before `token_ids`, to continue after tokens that were hashed before. By default
                the tokens begin a sequence.
            extra_keys: extra dependencies of the KV as `(position, key)`, as in `Scheduler.add_request`; positions
                count from `token_ids[0]`.

        Raises:
            InvalidConfigError: `block_size` is below 1, or both `parent` and `cache_salt` are given.
            InvalidBufferError: `token_ids` is not a contiguous int64 vector, or `extra_keys` is not allowed.
        """

@final
class CpuPool:
    """Pool of threads that passes on a CPU are shared among, including the caller's, and the instructions that passes
    use. The threads end when no object uses the pool.

    In a process that was forked off the one that made the pool, its threads do not exist: objects that use it raise
    `SpecrsError`.
    """

    def __new__(cls, threads: int, instructions: str | None = None) -> CpuPool:
        """Make a pool of `threads` threads: the caller's and `threads - 1` of its own. `instructions` is one of
        `cpu_instruction_sets`, but not `amx`; None: the fastest.

        Raises:
            InvalidConfigError: `threads` is less than 1, or more than the system gives; the processor has no
                `instructions` of this name.
        """

    @property
    def threads(self) -> int:
        """Number of threads that a pass runs on, including the caller's."""

    @property
    def instructions(self) -> str:
        """Name of the instruction set that passes use."""

    def close(self) -> None:
        """End the pool's threads, once no call uses them. Objects that use the pool raise `SpecrsError` from then
        on. A pool of one thread, the caller's, goes on."""

@final
class PackedMatrix:
    """A quantized matrix `[out, in]` in the layout that products on a CPU read: integers of 2 to 8 bits with scales.

    Sixteen outputs lie side by side. The numbers are exactly those that were given.
    """

    KINDS: Final[list[str]]
    """GGML's names of the block types that can be packed."""

    def __new__(cls, kind: str, blocks: NDArray[np.uint8], order: NDArray[np.int64] | None = None) -> PackedMatrix:
        """Pack the rows of a file, by as many threads as the process may run.

        Args:
            kind: one of `KINDS`.
            blocks: `[out, bytes of a row]`, as the file has them.
            order: `[out]`, the row of `blocks` that each output is; None keeps their order.

        Raises:
            InvalidBufferError: another kind, rows that are no whole blocks, a scale that is not finite, or an `order`
                that names other rows.
        """

    @staticmethod
    def grouped(
        values: NDArray[np.int16], scales: NDArray[np.float32], order: NDArray[np.int64] | None = None
    ) -> PackedMatrix:
        """Pack integers, by as many threads as the process may run. Weight `[o, i]` is `values[o, i]` times the scale
        of its group.

        Scales are stored as bf16 or fp16 if that holds them exactly. The matrix then becomes INT4 if in every group the
        integers differ by less than 16. With fp32 scales it becomes INT4 if all integers are from -8 to 7. Otherwise it
        becomes INT8.

        Args:
            values: `[out, in]`, -128 to 127.
            scales: `[out, groups]`; groups have the same number of inputs, a multiple of 32.
            order: `[in]`, the input that each column of `values` belongs to; None: columns are in the inputs' order.
                Products round activations in the order of the columns.

        Raises:
            InvalidBufferError: other groups or integers, a scale that is not finite, an `order` without each input
                once, or a wrong dtype or layout.
        """

    @property
    def kind(self) -> str:
        """GGML's name of the block type, or INT4 or INT8."""

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and of inputs, `(out, in)`."""

    @property
    def order(self) -> NDArray[np.int64] | None:
        """Indices of the inputs in the order in which activations are rounded, `[in]`; None if inputs keep their order.
        A copy."""

    @property
    def nbytes(self) -> int:
        """Bytes of its memory."""

    def numbers(self) -> NDArray[np.float32]:
        """Return the matrix as numbers, `[out, in]` float32, each rounded once, with inputs in their own order. Made on
        each call."""

@final
class CpuWeights:
    """Weights of a decoder or of a drafting head, with or without experts. Arrays are read where they are: they are
    kept alive and must not be written.

    Elements are float32, or uint16 with the bits of bfloat16. Norms and biases are copied.
    """

    def __new__(
        cls,
        *,
        vocab_size: int,
        hidden_size: int,
        intermediate_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rms_norm_eps: float,
        embedding: NDArray[np.generic] | PackedMatrix,
        layers: Sequence[Mapping[str, object]],
        final_norm: NDArray[np.generic],
        lm_head: Sequence[tuple[NDArray[np.generic] | PackedMatrix, NDArray[np.generic] | None]],
        frequencies: NDArray[np.float32],
        head: Mapping[str, object] | None = None,
        mtp: Mapping[str, object] | None = None,
        assistant: Mapping[str, object] | None = None,
        rotations: tuple[list[tuple[list[float], float]], list[int | None]] | None = None,
        multipliers: tuple[float, float, float] | None = None,
        query_scaling: tuple[float, int, int, bool] | None = None,
        windows: list[int | None] | None = None,
        activation: str = "silu",
        clamped_swiglu: tuple[float, float] | None = None,
        kv_scales: Sequence[tuple[float, float]] | None = None,
        layer_embedding: tuple[
            int,
            NDArray[np.generic] | PackedMatrix,
            Sequence[tuple[NDArray[np.generic] | PackedMatrix, NDArray[np.generic] | None]],
            NDArray[np.generic],
        ]
        | None = None,
        softcap: float | None = None,
        target_ids: list[int] | None = None,
        chunked: bool = False,
        interleaved_rope: bool = False,
    ) -> CpuWeights:
        """Make the weights of a decoder or a head; sizes by the names of config.json.

        A projection is a list of `(weight, bias or None)`, `[out_i, in]` and `[out_i]`: features above each other. A
        weight is an array or a `PackedMatrix`.

        Args:
            embedding: `[vocab_size, hidden_size]`.
            layers: a mapping each: `input_norm` and `post_attention_norm` `[hidden_size]`, or None where attention and
                MLP are fed the residual stream as it is; `attention_output_norm` and `mlp_output_norm` `[hidden_size]`
                of what they add to it, or None, or not there; `q_norm` and `k_norm` `[head_dim]` or None, with
                `qk_norm_whole` `[heads * head_dim]`, for all heads as one; `sinks` `[heads]`, a score more of each
                query head, with a value of zero, or None, or not there; the projections `qkv` (all heads of q, then k,
                then v), `o`, `gate_up`, `down`. In place of the last two `experts` may be a mapping: the
                projections `router` (hidden_size to the experts) and of each expert `gate_up` and `down`; `per_token`,
                how many a row is sent to; `normalized`: their weights add up to 1; `weighs_input`, or not there: their
                weights are sigmoids and multiply their inputs. All such layers have the same sizes. `shared`, or None,
                or not there, is an expert that every row uses: projections `gate` (to one number, whose sigmoid
                multiplies its output; None, or not there, if it is added as it is), `gate_up` and `down`.
                `scales`, or None, or not there, are factors of a router that reads the residual stream, normed without
                a weight: of its input `[hidden_size]`, and of the weights of chosen experts. `norms`, or None, or not
                there, make `gate_up` and `down` of the layer an MLP next to the experts: norms of its output, of the
                experts' input and of their output, `[hidden_size]`. Their sum gets `mlp_output_norm`.
                With `output_gate`, each query head in `qkv` is followed by the gate of its output. A mapping `delta`
                puts a gated delta net in the place of attention: its sizes `key_heads`, `value_heads`, `key_dim`,
                `value_dim` and `kernel`; `conv` `[kernel * conv_dim]`, `a_log` and `dt_bias` `[value_heads]`, `norm`
                `[value_dim]`. Then `qkv` is the projection to q, k, v, z, b and a, and `o` its output projection, which
                with `turned` reads the first value head of every key head, then the second, and so on. With
                `by_key_head`, outputs of `qkv` are q, k, v and z of each key head, then b and a of each.
                A mapping `conv` puts a short convolution in the place of attention: `kernel`, and `conv` `[kernel *
                hidden_size]`. Then `qkv` is the projection to B, C and x, each `[hidden_size]`, and `o` its output
                projection.
                A mapping `varied` makes the layer differ from others: its sizes `num_kv_heads`, `head_dim` and
                `intermediate_size`, none larger than the model's; `keys_are_values`: `qkv` has no v heads; `source`: an
                earlier layer whose keys and values it attends, `qkv` has q heads alone; `value_norm`: each head of
                values is normed, without a weight; `addition`: a projection from hidden_size to the layer's embedding,
                one back, and the norm of what is added; `scalar`: a factor of the layer's output.
            final_norm: `[hidden_size]`.
            lm_head: a projection from hidden_size to vocab_size.
            frequencies: `[head_dim / 2]`, the angle of each rotated pair at position 1.
            head: makes it an EAGLE-3 head: one layer, whose `qkv` has 2 * hidden_size inputs, the normed embedding and
                the hidden state that passes are fed, normed; `lm_head` may have any number of ids. `hidden_layers`: L
                layers of the target at whose entry it reads hidden states; `fc`: a projection of all of them to
                hidden_size; `fc_norm`: `[L * the target's hidden_size]` or None, a norm of what `fc` is fed, with
                `fc_norm_each` of each layer's state by itself; `hidden_norm`: `[hidden_size]`; `norm_before_residual`:
                its residual is the normed hidden state; `norm_output`: it leaves its states after the final norm to
                the next pass; `target_ids`: the target's id of each of its own, ascending.
            mtp: makes it an MTP head: one layer, which reads what `fc` makes of the normed embedding and the normed
                hidden state. `target_layers`: the target's number of layers; `fc`: a projection from 2 * hidden_size;
                `embedding_norm` and `hidden_norm`: `[hidden_size]`; `target_ids`: the target's id of each of its own,
                ascending. `lm_head` may have more outputs than these; the first ones are used. It leaves its states
                after the final norm to the next pass.
            assistant: makes it a head without keys and values, whose layers attend a target's; passes take the target's
                cache. A layer's `source` is then the place of its keys and values among the target's layers that have
                some. `embedding` is the target's, `[vocab_size, state_size]`. `target_layers`: the target's number of
                layers; `state_size`: the size of its states; `pre`: a projection from 2 * state_size, the embedding and
                the hidden state, to hidden_size; `post`: a projection of the state after the final norm to state_size,
                for the next pass; `target_ids` as in `mtp`. A row at position p is rotated as p + 1.
            rotations: in place of `frequencies`, where layers rotate in several ways, or a part of a head: pairs of
                frequencies `[P]`, of the first 2 P features, and what their cosines and sines are multiplied by; then
                for each layer which of them it has, or None. None: `frequencies` in all layers.
            multipliers: of embeddings, of what attention and MLP add to the residual stream, and of attention scores.
                None: 1, 1 and 1 / sqrt(head_dim).
            query_scaling: beta, length and offset of the factor of queries, `1 + beta ln(1 + floor((position + offset)
                / length))`, and whether only layers that are not rotated have it. None: it is 1.
            windows: for each layer how many positions a row attends, its own among them and the last; None: all.
            activation: of the MLP's gate, `silu` or `gelu_pytorch_tanh`.
            clamped_swiglu: in place of it alpha and limit of `g sigmoid(alpha g) (u + 1)`, the gate g at most limit and
                the value u from -limit to limit.
            kv_scales: for each layer that of its keys and that of its values in a cache of codes; None: 1.
            layer_embedding: per-layer embeddings, if layers have an `addition`: the number of features for each layer,
                a table `[ids, layers * features]`, a projection from hidden_size to layers * features, and the norm of
                each layer's part `[features]`. None: there are none.
            softcap: number c for which logits x become `c tanh(x / c)`. None: logits stay as they are.
            target_ids: ids that the outputs of `lm_head` are for, ascending, for a draft model that drafts some ids
                only. None: it has an output for each id. Not with `head`, `mtp` or `assistant`.
            chunked: a row's window ends where its chunk begins. Chunks are as long as the window.
            interleaved_rope: neighbouring features of a head are rotated against each other, in place of its halves.

        Raises:
            InvalidConfigError: a size is negative, or `activation` has another name.
            InvalidBufferError: an array's dtype, layout, alignment or shape, by name.
        """

@final
class CpuLora:
    """LoRA adapter of a decoder in borrowed arrays, which are kept alive and must not be written."""

    def __new__(
        cls,
        weights: CpuWeights,
        layers: Sequence[Mapping[str, Sequence[Any]]],
    ) -> CpuLora:
        """Make an adapter for decoders with these weights.

        Args:
            layers: for each layer a mapping from `qkv`, `o`, `gate_up` and `down` to the parts that are added to that
                projection. A part is A `[rank, inputs]`, B `[outputs, rank]` times the scale, and the projection's
                output at which the part begins. Arrays are float32, or uint16 with the bits of bfloat16. `experts` maps
                to a pair for each expert: the parts of its gate and up projection, and those of its down projection. It
                is empty without parts for experts.

        Raises:
            InvalidBufferError: an array's dtype, layout, alignment or shape is wrong, or the number of layers differs.
        """

@final
class CpuKVCache:
    """KV cache that passes write, in arrays of the caller, which are kept alive."""

    def __new__(
        cls,
        layers: Sequence[NDArray[np.generic]],
        groups: Sequence[tuple[int, int]] | None = None,
        codes: str | None = None,
    ) -> CpuKVCache:
        """Make a cache of one array per layer with attention, `[num_blocks + 1, 2, num_kv_heads, block_size,
        head_dim]`, float32 or uint16 with the bits of bfloat16. Dimension 1 is K, V. Slot s is block `s // block_size`,
        offset `s % block_size`; the last block is never read.

        `groups` has for each of these layers its KV group and the index of its array. Layers of different groups
        may share an array, because a block belongs to one group at a time. None: one group, with an array for each
        layer.

        With `codes` `fp8_e4m3` or `fp8_e5m2`, arrays are uint8. A key or value x is stored as the code of x / scale,
        with the scales in the weights that passes use.

        Raises:
            InvalidConfigError: `codes` has another name.
            InvalidBufferError: an array's dtype, layout, alignment or shape is wrong, or a group has no layers. Also if
                an index of an array is out of range, or two layers of a group have one array.
        """

    @property
    def state_bytes(self) -> int:
        """Bytes of the states that requests have next to the KV, for models whose layers have some. It grows when a row
        is first used."""

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of the snapshots of states. It grows when a slot is first used."""

@final
class CpuDecoder:
    """Forward pass of a decoder over flat rows, with its own work space: one pass at a time.

    The order of a row's sums does not depend on other rows or threads, so its results always have the same bits.
    """

    def __new__(
        cls, weights: CpuWeights, pool: CpuPool, *, activations: str = "auto", prompt_tiles: bool = False
    ) -> CpuDecoder:
        """Make a decoder of these weights on these threads, both of which other decoders may share.

        `activations` is the type that rows are rounded to before products. For packed weights that is 16-bit integers
        with `auto`, `int16` and `fp32`, 8-bit integers with `int8`; rows of other weights are not rounded. With `bf16`
        all rows are rounded to bf16, and sums have another fixed order. With `prompt_tiles`, AMX multiplies prompts'
        rows by tiles if weights are bf16; these products stay in fp32, and their sums have another fixed order too.

        Raises:
            InvalidConfigError: `prompt_tiles` is set but this process may not use tiles, or `activations` is unknown.
            InvalidBufferError: with `bf16`, a matrix is not bf16, or its number of inputs is no multiple of 32.
        """

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of a snapshot of the states of one request; 0 if no layer has a state."""

    def forward(
        self,
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64],
        slots: NDArray[np.int64],
        q_start: NDArray[np.int64],
        block_table: NDArray[np.int64],
        kv_cache: CpuKVCache,
        hidden: NDArray[np.float32],
        hidden_layers: list[int] = ...,
        entries: NDArray[np.float32] | None = None,
        head_states: NDArray[np.float32] | None = None,
        k_start: NDArray[np.int64] | None = None,
        group_slots: NDArray[np.int64] | None = None,
        group_tables: NDArray[np.int64] | None = None,
        prompts: bool = False,
        adapters: Sequence[tuple[CpuLora, list[int]]] = ...,
    ) -> None:
        """Run a pass over N rows of B requests: write their K and V, and their hidden states after the final norm.

        Args:
            tokens: `[N]`.
            positions: `[N]`, ascending within a request; -1 masks a row, whose state is finite and means nothing.
            slots: `[N]`; -1 keeps no K and V.
            q_start: `[B + 1]`, first row of each request; rows from the last on are masked.
            block_table: `[B, max_blocks]`.
            kv_cache: KV cache that is read and written.
            hidden: `[N, hidden_size]`, written.
            hidden_layers: L layers. The number of layers stands for the stream after the last layer, before the final
                norm; one more for the stream after it.
            entries: `[N, L, hidden_size]`, written: the residual stream as the input of those layers. In a head, layer
                1 is the input of its next pass.
            head_states: `[N, hidden_size]`, only for a head: each row's hidden state.
            k_start: `[B]`, the first position that a request's rows attend, at most their own; None: 0.
            group_slots: `[G - 1, N]`, slots in the KV groups after the first, if `kv_cache` has several.
            group_tables: `[G - 1, B, max_blocks]`, block tables of these groups; entries before a group's window mean
                nothing.
            prompts: whether all rows belong to prompts.
            adapters: LoRA adapters, each with the rows that use it.

        Raises:
            InvalidBufferError: an array has the wrong dtype, layout or size, or names a token, position, slot, block or
                layer that does not exist; nothing is written.
        """

    def fuse(self, states: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        """Fuse the target's hidden states `[N, L, its hidden_size]` into those of an EAGLE-3 head, `out` `[N,
        hidden_size]`. For another head, which reads the target's states as they are, they are copied.

        Raises:
            InvalidBufferError: an array has the wrong dtype, layout or size, or this is no head; nothing is written.
        """

    def logits(self, hidden: NDArray[np.float32], logits: NDArray[np.float32]) -> None:
        """Write the logits of the first ids for final states `[L, hidden_size]` into `logits` `[L, ids]`.

        Raises:
            InvalidBufferError: an array has the wrong dtype, layout or size; nothing is written.
        """

    def argmax(
        self, hidden: NDArray[np.float32], num_ids: int, ids: NDArray[np.int64], top: NDArray[np.float32]
    ) -> None:
        """Find the most probable of the first `num_ids` ids for final states `[L, hidden_size]`: the lowest in a tie,
        the first NaN if there is one.

        Args:
            ids: `[L]`, written: the most probable id.
            top: `[L]`, written: its logit.

        Raises:
            InvalidBufferError: an array has the wrong dtype, layout or size; nothing is written.
        """

_Logprobs = tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]
"""Log probabilities of m tokens: values `[m]` and ranks `[m]`, then ids `[m, n]` and values `[m, n]` of the most
probable tokens."""

class _CallableModel(Protocol):
    """Model, or EAGLE-3 or MTP head, whose passes Python computes, with its own KV cache."""

    vocab_size: int
    """Number of ids that the model can be fed; for a head the target's."""
    num_ids: int
    """Number of logits in a row."""
    num_layers: int
    hidden_size: int
    """Numbers in a hidden state; any value if neither heads nor requests with pooling read them."""
    target_ids: NDArray[np.int64] | None
    """Target's id of each of a head's logits, [num_ids] int64, ascending. None: logit i is for id i."""
    aux_hidden_state_layers: Sequence[int]
    """Layers of the target whose input states a head reads; empty for other models."""
    aux_hidden_state_size: int
    """Size of the hidden state that a head reads from each of these layers."""

    def forward(
        self,
        inputs: dict[str, Any],
        wanted: NDArray[np.int64],
        keeps: bool,
        layers: list[int],
        head_states: NDArray[np.float32] | None,
    ) -> tuple[NDArray[np.float32] | None, NDArray[np.float32] | None, NDArray[np.bool_] | None]:
        """Run one pass over N rows and write their K and V.

        Args:
            inputs: keywords of `specrs.models.inputs.PassInputs` as int64 arrays (`snapshots` as a tuple), and `rows`
                `[B]`, the state row of each of the B sequences.
            wanted: rows whose logits are returned; with `keeps`, rows whose hidden states are kept for `logits` and
                `hidden`.
            keeps: whether to keep the hidden states of `wanted` instead of returning logits.
            layers: layers whose input states are returned; the number of layers and one more are explained at
                `CpuDecoder.forward`. For a head `[1]`: the input of its next pass.
            head_states: `[N, hidden_size]`, input of a head in addition to the tokens; None for other models.

        Returns:
            Logits `[len(wanted), num_ids]` or None; hidden states `[N, len(layers), hidden_size]` or None; and whether
            the final state of each row is finite, `[N]`. The last is None if the last row of a prompt shows it for all
            rows before it.
        """

    def logits(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the logits `[len(rows), num_ids]` of rows of the last pass with `keeps`, by their index in
        `wanted`."""

    def hidden(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the final hidden states `[len(rows), hidden_size]` of rows of the last pass with `keeps`, by their
        index in `wanted`."""

    def restore_states(self, row: int, slot: int) -> None:
        """Give a state row the states of a snapshot that a pass wrote into `slot`."""

    def fuse(self, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """Combine the target's hidden states `[N, layers, aux_hidden_state_size]` into the input of a head, `[N,
        hidden_size]`."""

class _StepHost(Protocol):
    """Host of a step: services that a step needs from Python. Sequences are named by their index in the results."""

    @property
    def has_ranks(self) -> bool:
        """Whether other ranks run the same step, so that `enter` and `leave` are called."""

    def start_grammar(self, index: int, row: int) -> NDArray[np.int32]:
        """Return the mask of the sequence's next token, `[ceil(V / 32)]`: bit t % 32 of word t // 32 is set for ids
        that may come next. The sequence's request is in `row` of row state."""

    def advance_grammar(self, index: int, token: int) -> NDArray[np.int32]:
        """Advance the grammar of a sequence by its next draft `token`. Return the mask of the token after it."""

    def draft_ids(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the draft model's ids of the text that `tokens` are for the target; empty if the text has none."""

    def target_ids(
        self, tokens: NDArray[np.int64], own: NDArray[np.int64], drafted: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the target's ids of the draft model's continuation `drafted`. The text before it is `own` in the
        draft model's ids and `tokens` in the target's."""

    def enter(self, stage: int) -> None:
        """Begin a stage of the drafter: 1 runs a head over the prompt chunks of the step before, 2 feeds draft chunks,
        4 drafts."""

    def leave(self, stage: int, error: Exception | None) -> bool:
        """End a stage, with the `error` it failed with on this rank, or None. Return whether it failed on any rank."""

_Source = tuple[CpuDecoder, CpuKVCache | None] | _CallableModel
"""Native model with its KV cache (None: it attends the target's), or a model that Python computes."""

@final
class CpuIteration:
    """Executor of planned steps on a CPU, each in one call: uploads, prompt chunks, draft catch-up chunks, and one
    decode iteration, in this order.

    It applies the logits processors of requests, and reports log probabilities.
    """

    def __new__(
        cls,
        scheduler: Scheduler,
        state: dict[str, NDArray[np.generic]],
        target: _Source,
        draft: _Source | None = None,
        *,
        rule: str = "rejection",
        rates: Sequence[float] | None = None,
        logprobs_mode: str = "raw_logprobs",
        shared_tokens: tuple[Sequence[tuple[int, int]], int] | None = None,
        text_limits: tuple[int, int, int] | None = None,
    ) -> CpuIteration:
        """Make an executor for steps of `scheduler`, whose settings are read now.

        Args:
            state: arrays of row state, with R = max_num_seqs. `num_tokens`, `draft_len`, `draft_start`, `limit`,
                `min_len`, `prompt_len`, `seeds` `[R + 1]` int64; `active` `[R + 1]` bool; `tokens` `[R + 1,
                max_model_len + 1]`, `block_table` `[R + 1, max_blocks]`, `stop_ids` `[R + 1, MAX_STOP_IDS]` int64;
                `params` `[R + 1, len(PARAM_COLUMNS)]` float32. With a `HiddenDrafter` also `hidden_states` `[R + 1,
                max_draft_lag * numbers of a position]` float32 and `hidden_start` `[R + 1]` int64, and with a
                `SharedKVDrafter` the same for one position. With `window_groups`
                also `group_tables` `[(G - 1) * (R + 1), max_blocks]` int64, group by group. They are kept alive, and
                written by `run`.
            target: model that verifies drafts.
            draft: draft model of a scheduler with a `CachedDrafter` or `TextDrafter`, or EAGLE-3 or MTP head of one
                with a `HiddenDrafter`. With a `SharedKVDrafter`, a head without a KV cache (None) and a native target.
            rule: `rejection` or `coupled`, for requests that sample.
            rates: `[K]`, unconditional rates by position at which drafts are accepted, whatever the models say: for
                timing.
            logprobs_mode: values that `logprobs` reports: `raw_logprobs`, `raw_logits`, `processed_logprobs` or
                `processed_logits`, as in vLLM.
            shared_tokens: for a draft with another tokenizer, pairs (target's id, draft's id) of tokens in both
                vocabularies, and the draft's id that it is fed for other tokens. Only shared tokens are drafted.
            text_limits: with a `TextDrafter`, three numbers. They are the maximum number of the draft's ids in a text,
                the approximate number of tokens that it is fed in a step, and the block size of its KV cache. Row r of
                state has its blocks r * B to r * B + B - 1, where B blocks hold such a text.

        Raises:
            InvalidConfigError: the rule, rates, mode or draft is not allowed.
            InvalidBufferError: a model does not have one of the shared tokens, or an array of `state` is missing or has
                the wrong dtype, layout or shape.
        """

    def run(
        self,
        record: NDArray[np.int64],
        results: NDArray[np.int64],
        adapters: Sequence[tuple[CpuLora, list[int]]] = ...,
        host: _StepHost | None = None,
    ) -> tuple[
        tuple[int, int],
        tuple[Exception, NDArray[np.int64]] | None,
        list[tuple[int, _Logprobs]],
        list[tuple[int, int, _Logprobs]],
        list[tuple[int, NDArray[np.float32]]],
    ]:
        """Execute the step planned in `record`: write row state, both KV caches, and the results into `results`.

        `adapters` are LoRA adapters with the state rows that the target computes with them, each row at most once.
        `host` has the grammars of the step's requests. None: no request has a grammar, and drafts are not text.

        The states that prompt chunks leave to a head are fed to it by the next call, so that no first token waits for
        it.

        Returns:
            Number of passes of the target and of the draft. Failure of the draft's passes, if any: the exception, and
            the blocks for `Scheduler.draft_kv_not_written`, ascending; the step has then gone on without their
            drafts. Log probabilities of emitted tokens, by sequence. Log probabilities of prompt tokens, by request id
            and position of the first. Both are for requests that want them. Results of requests with pooling whose
            prompt has ended, by request id: the final hidden state `[hidden_size]`, or the logits of the allowed ids in
            ascending order of the ids.

        Raises:
            InvalidBufferError: a buffer has the wrong dtype or size, or a record has an index that does not exist; row
                state may have been written.
            Exception: the target's `_CallableModel` or `host` raised it.
        """

    def set_rule(self, rule: str) -> None:
        """Verify by the rule `rejection` or `coupled` from the next step on.

        Raises:
            InvalidConfigError: `rule` has another name.
        """

@final
class CostModel:
    """Milliseconds of an iteration by batch size and number of draft tokens K, and the figures that follow from them.

    One iteration drafts K tokens and yields AL tokens, the acceptance length at K: `TPOT = ms / AL`. Speed-ups compare
    with the same batch at K = 0.

    Between grid points, costs are interpolated linearly. K = 0 is separate: costs at K >= 1 come only from the points
    with K >= 1, if there are at least two of them. Beyond the last K or batch size, costs continue the line of the last
    segment, but never fall. Below the first K >= 1, they continue the line of the first segment, but at least K times
    the cost of a draft pass. Below the first batch size, the cost is constant.

    Acceptance lengths are given by K: `acceptance_lengths[i]` is that of K = i + 1, from 1 to K + 1.
    """

    def __new__(cls, batches: Sequence[int], ks: Sequence[int], ms: Sequence[Sequence[float]]) -> CostModel:
        """Make a cost model of a grid: `ms[b][j]` is the cost of `batches[b]` requests at `ks[j]` drafts each. `ks`
        begins with 0.

        Raises:
            InvalidConfigError: batches (1 to 2**20) or ks do not increase, or a cost is missing or not above 0.
        """

    @staticmethod
    def lines(
        batches: Sequence[int], draft_ms: Sequence[float], target_ms: Sequence[float], vanilla_ms: Sequence[float]
    ) -> CostModel:
        """Make a cost model of one straight line per batch size: `ITL = K * T_d + T_t`. `draft_ms` is T_d, `target_ms`
        T_t, `vanilla_ms` the cost at K = 0.

        Raises:
            InvalidConfigError: lengths differ, batches do not increase, T_d is below 0 or another time not above 0.
        """

    @staticmethod
    def implied_draft_ms(tpot_ms: float, k: int, acceptance_length: float, target_ms: float) -> float:
        """Return the T_d that explains an observed TPOT: `(tpot_ms * AL - T_t) / K`. It is negative if T_t alone
        exceeds `tpot_ms * AL`.

        Raises:
            InvalidConfigError: a time is not above 0, `k` below 1, or the acceptance length not from 1 to k + 1.
        """

    @property
    def batches(self) -> list[int]:
        """Batch sizes of the grid, `[B]`."""

    @property
    def ks(self) -> list[int]:
        """Numbers of draft tokens of the grid, `[N]`, 0 first."""

    @property
    def table(self) -> list[list[float]]:
        """Costs of the grid in milliseconds, `[B][N]`."""

    def ms(self, batch: int, k: int) -> float:
        """Return the cost in milliseconds of an iteration of `batch` requests with `k` drafts each. Batch 0 counts as
        1.

        Raises:
            InvalidConfigError: `batch` or `k` is negative.
        """

    def tpot(self, batch: int, k: int, acceptance_length: float) -> float:
        """Return the milliseconds per output token: `ms(batch, k) / acceptance_length`.

        Raises:
            InvalidConfigError: a number is negative, or the acceptance length not from 1 to k + 1.
        """

    def speedup(self, batch: int, k: int, acceptance_length: float) -> float:
        """Return the speed-up of `k` drafts: TPOT without drafts divided by TPOT with them.

        Raises:
            InvalidConfigError: a number is negative, or the acceptance length not from 1 to k + 1.
        """

    def best_k(self, batch: int, acceptance_lengths: Sequence[float]) -> int:
        """Return the K with the lowest TPOT, where 0 is a candidate and ties go to the smallest K.

        Raises:
            InvalidConfigError: `batch` is negative, or an acceptance length not from 1 to K + 1.
        """

    def last_paying_k(self, batch: int, acceptance_lengths: Sequence[float]) -> int:
        """Return the largest of the given K that is still faster than no drafts; 0 if none is.

        Raises:
            InvalidConfigError: `batch` is negative, or an acceptance length not from 1 to K + 1.
        """

    def break_even_batch(self, acceptance_lengths: Sequence[float]) -> int | None:
        """Return the smallest batch size within the grid at which no K is faster than no drafts; None if there is none.

        Raises:
            InvalidConfigError: an acceptance length is not from 1 to K + 1.
        """

    def observe(self, batch: int, k: int, ms: float, weight: float) -> None:
        """Move the grid towards a measured cost. Mutates.

        Each of the up to four grid points around (batch, k) moves by its share in the interpolation times `weight`. On
        a grid point this is an exponential average with `weight` for the new value.

        Raises:
            InvalidConfigError: (batch, k) is not within the grid, `ms` not above 0, or `weight` not in (0, 1].
        """

@final
class SlotMapper:
    """Mapper of positions to KV slots: `block_table[position // block_size] * block_size + position % block_size`.

    The slot is -1, to which a write writes nothing, if the position is negative, beyond the table, or in an entry below
    0.
    """

    def __new__(cls, block_size: int) -> SlotMapper:
        """Make a mapper for blocks of `block_size` positions.

        Raises:
            InvalidConfigError: `block_size` is below 1.
        """

    @property
    def block_size(self) -> int:
        """Number of positions per block."""

    def slot(self, block_table: NDArray[np.int64], position: int) -> int:
        """Return the slot of one position; `block_table` is `[blocks]` int64.

        Raises:
            InvalidBufferError: `block_table` is not a contiguous int64 vector.
        """

    def map(self, block_table: NDArray[np.int64], positions: NDArray[np.int64], out: NDArray[np.int64]) -> None:
        """Write the slots of `positions` `[N]` of one request into `out` `[N]`; all int64.

        Raises:
            InvalidBufferError: an array has the wrong dtype, layout or size; `out` is unchanged.
        """

    def map_batch(
        self,
        block_tables: NDArray[np.int64],
        q_start: NDArray[np.int64],
        positions: NDArray[np.int64],
        out: NDArray[np.int64],
    ) -> None:
        """Write the slots of flat rows: rows `q_start[b]:q_start[b + 1]` belong to request b.

        `block_tables` is `[B, blocks]`, `q_start` `[B + 1]` from 0 to N without decreasing, `positions` and `out`
        `[N]`; all int64.

        Raises:
            InvalidBufferError: an array has the wrong dtype, layout, size or content; `out` is unchanged.
        """

@final
class Sampler:
    """Sampler of fp32 rows on a CPU: cuts, noise, draws and the verification of drafts in one pass over each row.

    Masks, biases and penalties must already be applied to the rows. `params` `[R, >= 5]` float32 has five columns per
    state row: greedy (not 0: the largest logit, the lowest id of equal ones), temperature (positive), top_k (inf is
    off), top_p in (0, 1) (inf is off), ln(min_p) (-inf is off). Further columns are ignored.

    `seeds` is `[R]` int64, its bits taken as unsigned. `rows` names the state row of each row of logits, or of each
    request. Noise is that of `philox_gumbel` and `philox_uniform`; only kept tokens get any. If the largest logit of a
    row is not finite, as its `largest` shows, some token of the vocabulary is drawn.
    """

    def __new__(cls, vocab_size: int) -> Sampler:
        """Make a sampler for rows of `vocab_size` logits (V).

        Raises:
            InvalidConfigError: unless `1 <= vocab_size <= 2**31`.
        """

    @property
    def vocab_size(self) -> int:
        """Number of logits in a row, V."""

    def draw(
        self,
        logits: NDArray[np.float32],
        params: NDArray[np.float32],
        seeds: NDArray[np.int64],
        rows: NDArray[np.int64],
        positions: NDArray[np.int64],
        purpose: int,
        tokens: NDArray[np.int64],
        largest: NDArray[np.float32],
        q: NDArray[np.float32] | None = None,
        column: int = 0,
    ) -> None:
        """Draw a token from each row: argmax(x + g) with x the filtered logits, g the Gumbel noise of (seed, position).

        Args:
            logits: `[N, V]`.
            params: `[R, >= 5]`, parameters of each state row.
            seeds: `[R]`, seed of each state row.
            rows: `[N]`, state row of each row of logits.
            positions: `[N]`, of the tokens drawn.
            purpose: one of `PURPOSE_*`.
            tokens: `[N]`, written.
            largest: `[N]`, written: the largest logit, NaN if there is one.
            q: `[B, K, V]`, B >= N; `q[i, column]` gets the probabilities that row i was drawn from.
            column: index in `q` that is written.

        Raises:
            InvalidConfigError: `purpose` is not one of `PURPOSE_*`.
            InvalidBufferError: an array has the wrong dtype, layout, size or content; nothing is written.
        """

    def verify(
        self,
        logits: NDArray[np.float32],
        params: NDArray[np.float32],
        seeds: NDArray[np.int64],
        rows: NDArray[np.int64],
        q_start: NDArray[np.int64],
        num_tokens: NDArray[np.int64],
        num_drafts: NDArray[np.int64],
        drafts: NDArray[np.int64],
        q: NDArray[np.float32] | None,
        num_accepted: NDArray[np.int64],
        tokens: NDArray[np.int64],
        largest: NDArray[np.float32],
    ) -> None:
        """Verify the drafts of B requests: by the rule `rejection` with `q`, by `coupled` without.

        `rejection` (Leviathan et al. 2023, algorithm 1): draft i is accepted if u * q < p, with the uniform of (seed, n
        + i, `PURPOSE_ACCEPT`). After m drafts the token is drawn with the noise of (seed, n + m, `PURPOSE_GUMBEL`),
        from max(0, p - q) after a rejection. `coupled`: every row draws with that noise, and drafts are accepted up to
        the first that differs from its row's draw. Without drafts both rules are equal.

        Args:
            logits: `[N, V]`; row `q_start[b] + i` is for position n + i of request b.
            params: `[R, >= 5]`, parameters of each state row.
            seeds: `[R]`, seed of each state row.
            rows: `[B]`, state row of each request.
            q_start: `[B + 1]`; request b owns at least num_drafts[b] + 1 rows.
            num_tokens: n, `[B]`.
            num_drafts: `[B]`, 0 to K.
            drafts: `[B, K]`; columns from num_drafts on are ignored.
            q: `[B, K, V]`, distributions that the drafts were drawn from; columns from num_drafts on are ignored.
            num_accepted: m, `[B]`, written.
            tokens: `[B, K + 1]`, written: the accepted drafts, then the drawn token in all columns left.
            largest: `[N]`, written: the largest logit of each row, NaN if there is one.

        Raises:
            InvalidBufferError: an array has the wrong dtype, layout, size or content; nothing is written.
        """

    def filter(
        self,
        logits: NDArray[np.float32],
        params: NDArray[np.float32],
        rows: NDArray[np.int64],
        out: NDArray[np.float32],
    ) -> None:
        """Write the logits `[N, V]` over their temperature into `out` `[N, V]`, -inf where the filters remove a token.

        The filters cut as in `verify`. Greedy rows are copied. `rows` is `[N]`.

        Raises:
            InvalidBufferError: an array has the wrong dtype, layout, size or content; nothing is written.
        """

def cpu_instruction_sets() -> list[str]:
    """Return the names of the instruction sets that this processor has and CPU passes can use, the fastest first.

    `amx` multiplies the prompts of `cpu_prefill="amx"` and many rows of quantized weights. Of the others, a `CpuPool`
    uses the first unless it is told another: `avx512_bf16`, `avx512`, `avx_vnni`, `avx2`, `neon` or `portable`, which
    every processor has.
    """

def philox_uniform(
    seeds: NDArray[np.int64], positions: NDArray[np.int64], purpose: int, out: NDArray[np.float32]
) -> None:
    """Write uniforms in (0, 1) into `out` `[N, V]` float32: row r, column t is token t at `(seeds[r], positions[r])`.

    Philox4x32-10 (Salmon et al., SC 2011); key = the seed's 64 bits, low word first; counter = (t // 4, low and high
    word of the position, purpose); lane t % 4. The value is `((word >> 9) + 0.5) * 2**-23`, exact in float32 and never
    0 or 1. This layout is frozen. `seeds` and `positions` are `[N]` int64, their bits taken as unsigned.

    Raises:
        InvalidConfigError: `purpose` is not one of `PURPOSE_*`.
        InvalidBufferError: an array has the wrong dtype, layout or size.
    """

def philox_gumbel(
    seeds: NDArray[np.int64], positions: NDArray[np.int64], purpose: int, out: NDArray[np.float32]
) -> None:
    """Write standard Gumbel values `-ln(-ln((word + 0.5) * 2**-32))` into `out` `[N, V]` float32.

    Rows, columns and words are those of `philox_uniform`. Values are computed in float64 from all 32 bits of the word
    and rounded once, so they are always finite. The 23 bits of `philox_uniform` are too few for the tail: a token of
    probability 1e-8 would be drawn thirty times too rarely.

    Raises:
        InvalidConfigError: `purpose` is not one of `PURPOSE_*`.
        InvalidBufferError: an array has the wrong dtype, layout or size.
    """

def quantize_q4_k(name: str, weight: NDArray[np.generic]) -> NDArray[np.uint8]:
    """Return `weight` `[out, in]` (float32, or uint16 with the bits of bfloat16) as blocks of Q4_K, uint8
    `[out, in / 256 * 144]`, by as many threads as the process may run.

    Each 32 numbers get a scale and a minimum of 6 bits each with about the least squared error. The bytes are the same
    on every machine.

    Raises:
        InvalidBufferError: `weight` has the wrong dtype or layout, its inputs are no multiple of 256, or a number is
            not finite or its absolute value above 4,126,752. `name` is what the error calls the weight.
    """

def quantize_weight(
    name: str, weight: NDArray[np.generic], largest: int, codes: NDArray[np.int8], scales: NDArray[np.uint16]
) -> None:
    """Write `weight` `[out, in]` (float32, or uint16 with the bits of bfloat16) as integers times scales, each number
    to the nearest, by as many threads as the process may run.

    A scale is the least bf16 number at which the largest number of its group has a code, so numbers are off by at most
    half of it. Integer times scale is exact in float32.

    Args:
        name: what an error calls the weight.
        largest: 7 for INT4, 127 for INT8: integers are from `-largest` to `largest`.
        codes: `[out, in]`, written.
        scales: `[out, groups]`, bits of bfloat16, written. Groups have the same number of inputs.

    Raises:
        InvalidBufferError: an array has the wrong dtype, layout or size, or a number is not finite or its absolute
            value 2^127 or more. After a wrong number, `codes` and `scales` may be written in part.
    """
