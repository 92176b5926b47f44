"""Types and documentation of the Rust extension. Import its names from `specrs.core`.

Buffers are numpy arrays that the caller owns: C-contiguous, aligned, of exactly the dtype and size stated, writable
    where the core writes. Anything else is an `InvalidBufferError` naming the argument, what arrived and what is
    expected. A call that raises has changed nothing in the core. Objects may be shared between threads; each call holds
    the object's lock.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Protocol, final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "DRAFTER_DEVICE",
    "DRAFTER_NGRAM",
    "DRAFTER_SUFFIX",
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
    "HEADER_FIELDS",
    "LOGPROBS_ALL",
    "LOGPROBS_NONE",
    "MAX_STOP_IDS",
    "PARAM_COLUMNS",
    "PLAN_IDLE",
    "PLAN_LAUNCH",
    "PLAN_SETTLE_FIRST",
    "PURPOSE_ACCEPT",
    "PURPOSE_DRAFT",
    "PURPOSE_GUMBEL",
    "PURPOSE_RECOVER",
    "STEPS",
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
    "IntegrityError",
    "InvalidAcceptanceError",
    "InvalidBlockError",
    "InvalidBufferError",
    "InvalidConfigError",
    "InvalidRequestError",
    "InvalidResultsError",
    "InvalidTokenizerError",
    "KVEventBatch",
    "NgramProposer",
    "NotRunningError",
    "OutOfBlocksError",
    "Output",
    "Outputs",
    "RequestSampling",
    "RequestView",
    "Sampler",
    "Scheduler",
    "SettleOrderError",
    "SlotMapper",
    "SpecrsError",
    "SpeculationPlanner",
    "SuffixCache",
    "SuffixDrafter",
    "TextDrafter",
    "TokenDecoder",
    "UnknownRequestError",
    "philox_gumbel",
    "philox_uniform",
    "quantize_weight",
]

HEADER_FIELDS: Final[tuple[str, ...]]
"""Names of the elements of a record's header by index; those behind them are 0."""
PARAM_COLUMNS: Final[tuple[str, ...]]
"""Names of a row's parameter columns by index: greedy (0 or 1), temperature (1 in greedy rows), top_k and top_p
(infinity is off), log_min_p (ln(min_p), minus infinity is off), repetition_penalty (1 is off), presence_penalty and
frequency_penalty (0 is off)."""
STEPS: Final[tuple[str, ...]]
"""Names of the bits of `admit_steps`, the lowest first: which steps a row's request needs."""
MAX_STOP_IDS: Final[int]
"""Stop tokens of one request that a row of device state holds."""
LOGPROBS_NONE: Final[int]
"""`admit_logprobs` and `admit_prompt_logprobs` of a request that wants none."""
LOGPROBS_ALL: Final[int]
"""`admit_logprobs` and `admit_prompt_logprobs` of a request that wants those of the whole vocabulary."""
GREEDY_BELOW: Final[float]
"""Temperatures under this are greedy: logits divided by less could overflow."""
UNKNOWN_BELOW: Final[float]
"""How far below a row's least logit the ids are put that a drafter with ids of its own does not know: probability 0 in
float32 at temperatures up to 96, and finite."""
PLAN_IDLE: Final[int]
"""`Scheduler.plan`: nothing to do and nothing in flight."""
PLAN_LAUNCH: Final[int]
"""`Scheduler.plan`: the record holds a launch."""
PLAN_SETTLE_FIRST: Final[int]
"""`Scheduler.plan`: nothing can be planned before the oldest launch in flight has settled."""

FLAG_TARGET_NON_FINITE: Final[int]
"""Result flag (bit 0): the target's logits were NaN or infinite in a row that the iteration reached; the request ends
with `FINISH_ERROR`."""
FLAG_DRAFT_NON_FINITE: Final[int]
"""Result flag (bit 1): the draft's logits were not finite; the request goes on without drafts."""
FLAG_CAPACITY: Final[int]
"""Result flag (bit 2): a position lay beyond the row's capacity; the request ends with `FINISH_ERROR`."""
FLAG_NOTHING_DRAFTED: Final[int]
"""Result flag (bit 3): the drafter on the device was asked, and had nothing to propose; counts as a draft in vain."""
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
"""Finish reason of an `Output`: ended by the caller. `settle` never writes it."""
FINISH_ERROR: Final[int]
"""Finish reason: a fault on the device."""

DRAFTER_DEVICE: Final[int]
"""Whose drafts an entry has: the drafter's on the device; of entries without drafts, too."""
DRAFTER_NGRAM: Final[int]
"""Whose drafts an entry has: `NgramProposer`'s."""
DRAFTER_SUFFIX: Final[int]
"""Whose drafts an entry has: `SuffixDrafter`'s."""

PURPOSE_DRAFT: Final[int]
"""Philox purpose: draws the draft token from q."""
PURPOSE_ACCEPT: Final[int]
"""Philox purpose: the uniform that accepts or rejects a draft token."""
PURPOSE_RECOVER: Final[int]
"""Philox purpose, reserved: no rule draws with it; the token after the drafts has `PURPOSE_GUMBEL`'s noise."""
PURPOSE_GUMBEL: Final[int]
"""Philox purpose: the noise of the target's own draw, which the draft shares under the `coupled` rule."""

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
    """Launches settle in the order in which they were planned."""

class InvalidResultsError(SpecrsError):
    """The device reported something that its launch cannot have produced."""

class IntegrityError(SpecrsError):
    """The books of the core contradict each other: a bug in specrs."""

class InvalidTokenizerError(SpecrsError):
    """A tokenizer cannot be read, or fails on tokens."""

@final
class CachedDrafter:
    """A drafter with KV of its own in the target's blocks, on the device: a draft model. It catches up from tokens.

    Pass 1 of an iteration feeds the last `max_draft_lag` positions of a row's n tokens, pass i draft i - 1; after
    K > 0 drafts that left n' tokens its KV is valid on [0, min(n' - 1, n + K - 1)). With a `mask_token_id` (parallel
    drafting) pass 1 feeds that id in place of drafts 1 to K - 1 and there is no other; its KV is then valid on [0, n).
    """

    def __new__(
        cls,
        *,
        max_model_len: int,
        max_draft_lag: int = 2,
        mask_token_id: int | None = None,
        cost_ratio: float = 1.0,
    ) -> CachedDrafter:
        """What a `Scheduler` must know of it.

        Args:
            max_model_len: positions that it can take; a request that outgrows them goes on without drafts. At least 1.
            max_draft_lag: positions that its KV may lag behind n for it still to draft; at least 1.
            mask_token_id: what one pass for all drafts feeds in their place, 0 or above; None: a pass for each draft.
            cost_ratio: cost of a catch-up token in tokens of the budget, above 0: its share of the target's parameters.

        Raises:
            InvalidConfigError: a negative size; other values are checked by `Scheduler`.
        """

    @property
    def max_model_len(self) -> int:
        """Positions that it can take."""

    @property
    def max_draft_lag(self) -> int:
        """Positions that its KV may lag behind n for it still to draft."""

    @property
    def mask_token_id(self) -> int | None:
        """What one pass for all drafts feeds in their place; None: a pass for each draft."""

    @property
    def cost_ratio(self) -> float:
        """Cost of a catch-up token in tokens of the budget."""

@final
class HiddenDrafter:
    """A head that drafts from the target's hidden states on the device, with KV of its own in the target's blocks.

    KV of position p is made of the hidden state there and of the token at p + 1. Pass 1 of an iteration feeds the
    positions before n - 1 whose hidden states are kept and whose KV is missing, pass i its own output and draft i - 1;
    after drafting at n tokens its KV is valid up to n - 1. It catches up only in launches that compute hidden states: a
    record's draft chunks are parts of its prompt chunks, or of length 0 at position 0, to start anew. Where it lags
    further behind it starts anew with those that are kept.
    """

    def __new__(cls, *, max_model_len: int, max_draft_lag: int) -> HiddenDrafter:
        """What a `Scheduler` must know of it.

        Args:
            max_model_len: positions that it can take; a request that outgrows them goes on without drafts. At least 1.
            max_draft_lag: positions that its KV may lag behind n for it to go on from there: hidden states of one
                position less are kept for each row. At least K + 2.

        Raises:
            InvalidConfigError: a negative size; other values are checked by `Scheduler`.
        """

    @property
    def max_model_len(self) -> int:
        """Positions that it can take."""

    @property
    def max_draft_lag(self) -> int:
        """Positions that its KV may lag behind n for it to go on from there."""

@final
class TextDrafter:
    """A model on the device with a tokenizer of its own, that reads and writes text (SLEM).

    Its KV is its own affair, outside the target's blocks: there is nothing to catch up. How many drafts its text comes
    to is known when it is written, so `num_drafted` may be less than the entry's K.
    """

    def __new__(cls) -> TextDrafter:
        """What a `Scheduler` must know of it: nothing."""

@final
class NgramProposer:
    """Proposes what followed the longest n-gram that ends a sequence, where it stood last before (prompt lookup).

    Of several places of the longest n-gram the rightmost counts. Where the sequence ends before there are enough
    drafts they go on with themselves, so that a loop of three tokens is drafted round and round. With
    `prompt_lookup_min=0` the last token is proposed where nothing is found, so that every sequence has drafts, for
    measuring. No state: every call looks through the sequence, a few ns a token.
    """

    def __new__(cls, prompt_lookup_min: int = 5, prompt_lookup_max: int = 5) -> NgramProposer:
        """A proposer for n-grams of `prompt_lookup_min` to `prompt_lookup_max` tokens.

        Raises:
            InvalidConfigError: unless 0 <= prompt_lookup_min <= prompt_lookup_max and 1 <= prompt_lookup_max <= 1024.
        """

    @property
    def prompt_lookup_min(self) -> int:
        """The shortest n-gram that is looked for, in tokens."""

    @property
    def prompt_lookup_max(self) -> int:
        """The longest n-gram that is looked for, in tokens."""

    def propose(self, token_ids: NDArray[np.int64], num_speculative_tokens: int) -> NDArray[np.int64]:
        """Drafts of what may follow `token_ids` `[n]`: `[num_speculative_tokens]`, or `[0]` where no n-gram was found.

        Raises:
            InvalidConfigError: num_speculative_tokens is not in 0 to 1024.
            InvalidBufferError: token_ids is not a contiguous int64 vector.
        """

@final
class SuffixCache:
    """Suffix decoding: drafts are what followed the end of a text most often, in it and in other requests' outputs.

    After Oliaro et al., arXiv 2411.04975, with vLLM's settings. Each running request has a tree of the substrings of
    its prompt and output, and one more tree has those of all outputs, of ended requests, too. For a pattern, the last
    m tokens of a text, the most frequent token that follows is drafted, then the one behind it, while its count over
    the pattern's is at least `min_token_prob`; at most `max_spec_factor * m` and `max_tree_depth - m` tokens. The draft
    with the largest sum of these ratios is taken. Of equal ones: the request's own tree first, the pattern that may
    draft more, the longer one; of equally frequent tokens the lowest id. So drafts are a function of the texts alone.

    A token takes some 50 bytes where texts repeat little, 110 in texts of common phrases, and at most 14 times
    `max_tree_depth`, where each is there twice.
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
        """An empty cache. The oldest outputs of ended requests go where there are more than `max_cached_requests`, or
        more than `max_memory_bytes` are in use; what running requests need is never cut. With `max_cached_requests=0`
        no request's output is looked at for another.

        Raises:
            InvalidConfigError: max_tree_depth is not in 2 to 256, max_spec_factor not finite and above 0,
                min_token_prob not in 0 to 1, or a size is negative.
        """

    def start_request(self, request_id: int, prompt_token_ids: NDArray[np.int64]) -> None:
        """Take in a request with its prompt `[n]`; mutates the cache.

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
        """Drafts `[m]` of what may follow a running request's text, m <= num_speculative_tokens; their score, how many
        are expected to stand; and the length of their pattern. Without any, `[0]`, 0 and 0.

        Raises:
            UnknownRequestError: the request is not running.
            InvalidConfigError: num_speculative_tokens is not in 0 to 1024.
        """

    def stop_request(self, request_id: int) -> None:
        """End a running request; its output is kept for others. Mutates the cache.

        Raises:
            UnknownRequestError: the request is not running.
        """

    def evict(self, request_id: int) -> bool:
        """Forget the outputs of ended requests of this id; whether there were any. Mutates the cache."""

    def stats(self) -> dict[str, int]:
        """What it holds: `num_requests` running, `num_cached_requests` ended, `num_output_tokens` of all outputs,
        `num_request_tokens` of running requests' own trees, `num_nodes`, and `memory_bytes` in use. Allocations are up
        to twice that."""

    def __contains__(self, key: int, /) -> bool:
        """Whether the request of this id is running."""

@final
class SuffixDrafter:
    """Suffix decoding as a drafter of `Scheduler`, which keeps a `SuffixCache` for it."""

    def __new__(
        cls,
        *,
        max_tree_depth: int = 24,
        max_cached_requests: int = 10000,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
        max_memory_bytes: int = 1073741824,
    ) -> SuffixDrafter:
        """Arguments and errors as of `SuffixCache`."""

@final
class RequestSampling:
    """What a request asks of sampling, under vLLM's names and with vLLM's defaults. Immutable.

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
    ) -> RequestSampling:
        """Takes over the values.

        Args:
            seed: its random numbers depend on these 64 bits, the position and nothing else.
            temperature: at least 0; below `GREEDY_BELOW` greedy, and top_k, top_p and min_p have no effect.
            top_k: 0 is all. top_p: above 0, at most 1. min_p: 0 to 1.
            repetition_penalty: above 0.
            logprobs, prompt_logprobs: most likely tokens to report beside each token, -1 for all, None for none.
            allowed_token_ids: `[n]` int64, the only tokens that may be written; copied.
            logit_bias: what is added to the logits of some tokens.
            bad_words_token_ids: token sequences that are not written, none of them empty.
            has_extras: whether it needs what no record can hold; a step of its record says so.

        Raises:
            InvalidRequestError: top_k is negative.
            InvalidBufferError: allowed_token_ids is not a contiguous int64 vector.
        """

    def columns(self, logits_dtype: str) -> tuple[list[float], int]:
        """A row's `PARAM_COLUMNS`, rounded to "float32" or "float64", and the bits of `STEPS` that they need.

        Raises:
            InvalidConfigError: logits_dtype is neither.
        """

@final
class Scheduler:
    """Which requests run, on which row and blocks, with how many drafts, in which launch.

    Continuous batching with chunked prefill, deferred drafting, prefix caching and preemption by recompute. `plan`
    writes one launch into a record, the caller executes it on device row state, `settle` takes the results.
    Deterministic: the same calls give the same records. It holds no KV and no logits, runs nothing, and knows no time.

    R = `max_num_seqs`, C = `max_num_batched_tokens`, K = `num_speculative_tokens`. An *entry* is one row's part in a
    launch: entries `[0, num_decode)` are decode rows by K descending, entry `num_decode + j` is prefill chunk j.
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
        | TextDrafter
        | NgramProposer
        | SuffixDrafter
        | Sequence[CachedDrafter | HiddenDrafter | TextDrafter | NgramProposer | SuffixDrafter]
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
        priority_aging_launches: int = 0,
        max_loras: int = 0,
        enable_prefix_caching: bool = True,
        enable_kv_cache_events: bool = False,
        hash_key: bytes = ...,
    ) -> Scheduler:
        """A scheduler with no requests and all blocks free.

        Args:
            max_num_seqs: rows of device state (R), the most requests that run at once; 1 to 65536.
            max_model_len: the most tokens of a request, prompt and output; at least 2.
            num_blocks: KV blocks in the pool; at least 1.
            block_size: positions per KV block; at least 1.
            max_num_batched_tokens: tokens per launch (C) that decode, prefill and draft chunks share; at least 1.
                Decode never waits for it; chunks always have a quarter of it.
            num_speculative_tokens: the most draft tokens per request and launch (K), 0 to 1024.
            drafter: what proposes drafts; with None nothing drafts. One on the host (`NgramProposer`, `SuffixDrafter`)
                is asked by `plan`, which writes its drafts into the record, and needs `max_in_flight=1`. Of several, at
                most one of each kind, each request has in each launch the one that promises the most.
            sliding_window: the last positions that a query attends to, its own among them, where all layers of the
                target and of what drafts in its blocks have a window: the largest of these, at least 2. Blocks behind
                it come back while their request goes on. None: some layer attends to all positions. With
                `window_groups` only the layers of the first group count.
            window_groups: windows of further KV groups: layers of the target with block tables of their own in the one
                pool, whose blocks come back behind the group's window. Each at least 2 and no longer than the first
                group's, at most 1024 of them; the draft's layers are in the first group. None: all layers are in one.
                Not with `enable_kv_cache_events`.
            max_in_flight: launches that may be planned and not yet settled, 1 to 1024.
            max_constraint_len: elements (W) that a request's allowed_token_ids, logit_bias and bad words may take in a
                record, and those of all that a launch admits: an id one, a bias two, a bad word one and its tokens.
            logits_dtype: "float32" or "float64", what sampling parameters are rounded to.
            num_reserved_decode_tokens: positions of output that each running request has blocks for, or could get, when
                a newcomer is admitted; at least 0, which preempts often in a full pool.
            long_prefill_token_threshold: the most prompt tokens of a request in a launch; 0: three quarters of what is
                left when its turn comes, and what other prompts leave of the rest.
            max_prefill_stall_ms: the most milliseconds that prompt and draft chunks take of a launch in which requests
                decode, which wait for it, by the times that `time_launch` is told; 16 tokens of prompts and 512
                of drafts' catch-up go through in any case. 0 is no bound.
            attention_cost_ratio: what attending to one position costs, in what a token at the start of a context does,
                by which `max_prefill_stall_ms` reckons chunks deep in a context; layers with a window count nothing.
                At least 0; default 1 / 4096.
            priority_aging_launches: launches by which a request must have arrived earlier to go before one of a
                priority better by 1; 0: priority always counts more.
            max_loras: the most LoRA adapters of the requests that run at once, at most 1024; 0: no request has one.
                A request whose adapter would be one too many waits, and no request of an adapter overtakes it.
            enable_prefix_caching: whether requests share the KV of equal prefixes.
            enable_kv_cache_events: whether `take_kv_events` tells what came into the prefix cache and left it.
            hash_key: 16 bytes, default all zero. A secret key keeps clients from building prompts that collide.

        Raises:
            InvalidConfigError: naming the first setting outside its range.
        """

    @property
    def record_size(self) -> int:
        """int64 elements of the buffer that `plan` writes."""

    @property
    def results_size(self) -> int:
        """int64 elements of the buffer that `settle` reads."""

    @property
    def settled_size(self) -> int:
        """int64 elements of the buffer that `settle` writes."""

    def record_layout(self) -> dict[str, tuple[int, int]]:
        """Sections of the record as `name: (offset, length)` in int64 elements, in buffer order.

        Of each section only the elements that the header counts are written.

        header: `HEADER_FIELDS`, the rest 0. launch_id counts from 0; num_decode, num_prefill: entries;
            num_prefill_tokens, num_draft_chunks, num_draft_tokens, num_admitted, num_upload_tokens, num_block_updates,
            num_constraints, num_preempted: elements of the sections below; max_k: the largest K of an entry.
        entry_row [R], entry_k [R] (0 for chunks), entry_capacity [R] (positions that the row's block table covers),
            entry_n_upper [R] (upper bound of the row's tokens at the start of the launch).
        chunk_start [R], chunk_len [R], chunk_is_last [R]: prefill chunk j; the last one of a prompt emits a token.
        prefill_token [C], prefill_position [C], prefill_q_start [R + 1]: the chunks' rows, flat. prefill_slot [G, C]:
            their KV slots, in each of G = 1 + len(window_groups) groups.
        draft_chunk_row [R], draft_chunk_start [R], draft_chunk_len [R], draft_q_start [R + 1], draft_position,
            draft_slot (of the first group): draft catch-up chunks; their tokens are in row state, and afterwards the
            row's draft_len is start + len, also where len is 0. Slot -1: do not write. draft_chunk_k_start [R]: from
            this chunk on the row's drafter reads KV from this position on; 0 without a window.
        entry_drafter [R]: whose drafts an entry has, `DRAFTER_*`.
        draft_token [R, K]: drafts of drafters on the host, those of entry i from element i * K on; empty without one.
        admit_row [R], admit_request_id [R], admit_num_tokens [R], admit_prompt_len [R] (less than num_tokens after a
            preemption), admit_draft_len [R], admit_limit [R], admit_num_cached [R]: requests that get their row in this
            launch, before its chunks run.
        admit_min_len [R] (stop tokens count from this position on), admit_stop_ids [R, MAX_STOP_IDS] (-1 behind them).
        admit_lora [R]: the id of its adapter, 0 of none.
        admit_salt [R]: equal for requests of the same `cache_salt` and adapter, and for no others; different in each
            scheduler.
        admit_seed [R], admit_steps [R] (`STEPS`), admit_params [R, len(PARAM_COLUMNS)] (bits of float64),
            admit_logprobs [R], admit_prompt_logprobs [R]: what they ask of sampling.
        admit_num_allowed [R] (-1: all are), admit_num_biases [R], admit_num_bad_words [R], admit_constraint_start
            [R + 1]: parts of `constraint` [W], which has of one request after the other its allowed ids, ids with a
            bias, the biases as bits of float64, the lengths of bad words, their tokens.
        upload_token: all tokens of the admitted requests, one request after the other.
        block_row, block_index, block_id: block table updates, `table[row, index] = id`. Entries behind a row's window
            stay as they are, and are read no more. block_group: the group of each; empty where there is one.
        preempted_request_id [R]: requests that lost their row in this plan.
        """

    def results_layout(self) -> dict[str, tuple[int, int]]:
        """Sections of the results as `name: (offset, length)` in int64 elements; all by entry.

        num_emitted [R], num_accepted [R], num_drafted [R] (K after the device's own limits), flags [R] (`FLAG_*` bits),
        finish_reason [R] (`FINISH_STOP` where the last token emitted is a stop token at a position of at least
        admit_min_len, else `FINISH_LENGTH` where the row is at its limit, else `FINISH_NONE`: the device judges, and
        `settle` only refuses what cannot be), tokens [R * (K + 1)], row-major by entry: those emitted; element i from
        num_accepted + 1 to num_drafted is draft i (from 1), which was rejected, and is read for `Output`s with
        `keep_drafts` alone. A prompt's last chunk emits 1 token; other chunks and rows that had ended report 0
        everywhere.
        """

    def settled_layout(self) -> dict[str, tuple[int, int]]:
        """Sections of what `settle` writes as `name: (offset, length)` in int64 elements; all by entry.

        request_id [R] (-1 if the entry's results were dropped), num_new [R] (deliver `tokens[entry, :num_new]`),
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
    ) -> None:
        """Queues a request behind all waiting ones of its priority.

        Args:
            request_id: at least 0 and not in use; may be used again after the request's end.
            token_ids: `[n]` int64, the prompt, at least one token; copied.
            limit: the most tokens it may reach, prompt and output: `min(n + max_tokens, max_model_len)`.
            min_tokens: output tokens before which stop ids do not count.
            num_speculative_tokens: draft tokens per launch, at most the engine's; 0 never drafts.
            priority: smaller values go first, ties by arrival.
            caller: who asks for it together with others: requests of different callers share rows and blocks evenly,
                whatever each asks for, where priorities are equal and do not age. None: it is asked for alone.
            stop_token_ids: `[s]` int64, tokens that end the output, at most `MAX_STOP_IDS`; copied.
            sampling: how tokens are drawn; the defaults where None. The device is told, in the record.
            cache_salt: the request shares prefixes only with requests of the same salt.
            lora: id from 1 and name of the LoRA adapter that it is computed with, with whose requests alone it shares
                prefixes; None: the base model.
            extra_keys: `(position, key)` by position, which does not decrease: what the prompt's KV depends on besides
                its tokens, such as the hash of an image or an adapter's name. From the block of that position on the
                request shares blocks only with requests whose extra keys are equal too. Keys have at least one byte.

        Raises:
            DuplicateRequestError: the id is waiting or running.
            InvalidRequestError: a parameter is not allowed, among them a limit that needs more blocks than the pool
                has.
            InvalidBufferError: an array is not a contiguous int64 vector.
        """

    def request(self, request_id: int) -> RequestView:
        """What is known of a waiting or running request: its state, lengths and block table. A copy; changes nothing.

        Raises:
            UnknownRequestError: the id is neither waiting nor running.
        """

    def request_ids(self) -> list[int]:
        """Ids of the waiting requests, then of the running ones, each most important first."""

    def take_kv_events(self) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
        """What came into the prefix cache and left it since the last call, in order.

        Empty unless `enable_kv_cache_events` is set. Taken after each `plan`, before its launch executes,
        `BlockRemoved` names the cached blocks that the launch may overwrite, whose KV can still be copied out on the
        launch's stream. The scheduler keeps at most two blocks' worth of events per block of the pool, more than a
        launch and its settling come to; who takes none for longer finds `AllBlocksCleared` in place of what was
        dropped.
        """

    def take_kv_event_batch(self) -> KVEventBatch | None:
        """The same as one object, of which nothing of Python's is made yet; None if nothing happened."""

    def abort(self, request_id: int) -> None:
        """Ends a waiting or running request now; what is in flight for it will be dropped.

        Raises:
            UnknownRequestError: the id is neither waiting nor running.
        """

    def speculate(self, planner: SpeculationPlanner) -> None:
        """Lets `planner` choose the K of every request for the next `plan`; call it right before.

        A request gets no more than its own `num_speculative_tokens`. Without this call it keeps the K chosen last, its
        own at first. Requests whose acceptance the planner found collapsed get their draft KV built again. After the
        launch, `tell` the planner of it. Holds both locks.

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
        """Tells `planner` what became of a launch, by its record and its results, settled or not.

        `ms`, how long it took, counts where it did nothing but decode. An entry whose drafter had nothing to propose
        had a first draft that did not stand. Where drafters on the host and on the device draft, the planner hears
        only of the device's. Mutates the planner alone. Holds both locks.

        Raises:
            InvalidBufferError: a buffer is not a contiguous int64 array of its layout's size, or as
                `SpeculationPlanner.settle`.
        """

    def time_launch(self, launch_id: int, ms: float) -> None:
        """Tells how long the launch that settled last took, from its beginning, or the end of the one before it, until
        all that waits for it has been told.

        By that, plans take as many prompt tokens beside requests that decode as `max_prefill_stall_ms` allows; without
        it the call does nothing.

        Raises:
            SettleOrderError: another launch settled last.
            InvalidBufferError: `ms` is not a finite time above 0.
        """

    def rebuild_draft(self, request_id: int) -> None:
        """Lets a running request's draft KV be written again from position 0, by catch-up chunks of coming launches.

        Its blocks lose their draft marks, so that no other request goes on with what is broken. A request that drafts
        nothing is left as it is.

        Raises:
            UnknownRequestError: the id is neither waiting nor running.
            NotRunningError: it waits.
        """

    def preempt(self, request_id: int) -> None:
        """Sends a running request back to waiting, at its original place, as `plan` does when blocks are short.

        Its settled tokens stay; what is in flight for it will be dropped; its KV is computed again where the prefix
        cache no longer has it.

        Raises:
            UnknownRequestError: the id is neither waiting nor running.
            NotRunningError: it waits.
        """

    def plan(self, record: NDArray[np.int64]) -> int:
        """Plans the next launch into `record` `[record_size]` int64; `PLAN_IDLE`, `PLAN_LAUNCH` or `PLAN_SETTLE_FIRST`.

        After `PLAN_LAUNCH` the launch is in flight until it settles; otherwise the record's content is unspecified.

        Raises:
            InvalidBufferError: `record` is not a writable contiguous int64 vector of that size.
        """

    def settle(self, launch_id: int, results: NDArray[np.int64], settled: NDArray[np.int64]) -> None:
        """Takes the results of the oldest launch in flight and writes what came of each entry into `settled`.

        `results` is `[results_size]` int64, `settled` `[settled_size]` int64; they must not overlap.

        Raises:
            SettleOrderError: it is not this launch's turn.
            InvalidResultsError: the launch cannot have had these results.
            InvalidBufferError: a buffer does not have its dtype, layout or size.
        """

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""

    @property
    def num_running(self) -> int:
        """Requests with a row."""

    @property
    def num_launches(self) -> int:
        """Launches planned since the start, which is the id of the next one."""

    @property
    def num_in_flight(self) -> int:
        """Launches planned and not yet settled."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds, cached ones included."""

    @property
    def num_groups(self) -> int:
        """G: KV groups."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""

    def least_blocks(self, limit: int) -> int:
        """Blocks without which a request of `limit` tokens does not get there, alone in the pool: fewer than its
        positions take where `sliding_window` lets blocks come back. Raises InvalidConfigError for a negative limit."""

    @property
    def num_preemptions(self) -> int:
        """Times a running request went back to waiting."""

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose target KV came from the prefix cache, counted when their request was first admitted."""

    def has_unfinished(self) -> bool:
        """Whether a request waits or runs, or a launch is in flight."""

    def acceptance(self) -> AcceptanceTracker:
        """A copy of the acceptance books of all settled launches."""

    def acceptance_of(self, drafter: int) -> AcceptanceTracker:
        """A copy of the part of one drafter, `DRAFTER_*`, in them.

        Raises:
            InvalidConfigError: there is no such drafter.
        """

    def draft_errors_of(self, drafter: int) -> tuple[int, str | None]:
        """How often a drafter on the host, `DRAFTER_NGRAM` or `DRAFTER_SUFFIX`, has failed, and how it did last. Each
        time cost the drafts of one request in one launch. Of `DRAFTER_DEVICE` its host knows: (0, None).

        Raises:
            InvalidConfigError: there is no such drafter.
        """

    def draft_kv_not_written(self, blocks: NDArray[np.int64]) -> None:
        """Takes it that the device has not written the draft KV that a launch was to write into `blocks` `[N]`: the
        launch planned last, or, behind prompt chunks for a head that reads hidden states, the one before it. To be
        told before the next `plan`.

        A draft model catches up from there; a head starts anew, with every request that shares one of the blocks. No
        block among them keeps its draft mark. Mutates.

        Raises:
            InvalidBlockError: one is not in the pool; nothing has changed then.
        """

    def pause_drafting(self, launches: int) -> None:
        """Lets the next `launches` launches draft nothing on the device, nor write draft KV; drafters on the host go
        on. 0 ends a pause. Mutates.

        Raises:
            InvalidConfigError: it is below 0.
        """

    def set_draft_costs(self, pass_cost: float, row_costs: Sequence[float], catch_up_cost: float) -> None:
        """What drafts cost, as shares of a launch without any: a drafting pass on the device, verifying 1, 2, .. K
        drafts, and a position of a chunk that closes the lag of draft KV, at least a pass for all of them. Where there
        are several drafters each request's is chosen by them. Mutates.

        Raises:
            InvalidConfigError: a cost is not finite and at least 0, or `row_costs` are not K.
        """

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes. Returns False, and changes nothing, while any block is held."""

    def check_integrity(self) -> None:
        """Checks that the scheduler's books agree; reads everything, so it is for tests and idle times.

        Raises:
            IntegrityError: naming the first contradiction.
        """

@final
class RequestView:
    """What the scheduler knew of a request when it was asked, by `Scheduler.request`.

    Lengths are the least that comes of the launches in flight if the request does not end in them; without launches in
    flight they are exact.
    """

    @property
    def state(self) -> Literal["waiting", "prefill", "decode"]:
        """Whether it has no row (new, or preempted), target KV of its prompt still to be planned, or decodes."""

    @property
    def row(self) -> int | None:
        """Its row of device state; None while it waits."""

    @property
    def num_tokens(self) -> int:
        """Settled tokens: the prompt and the output so far."""

    @property
    def limit(self) -> int:
        """The most tokens that it may reach."""

    @property
    def num_computed_tokens(self) -> int:
        """Positions with valid target KV; 0 while it waits."""

    @property
    def num_draft_computed_tokens(self) -> int:
        """Positions with valid draft KV; 0 while it waits."""

    @property
    def num_speculative_tokens(self) -> int:
        """Draft tokens that it asks for per launch now; 0 while it waits."""

    @property
    def num_in_flight(self) -> int:
        """Launches in flight that name its row."""

    @property
    def block_table(self) -> NDArray[np.int64]:
        """`[blocks]` int64, a copy: its blocks, position by position, -1 where they came back behind its
        window; empty while it waits."""

@final
class BlockStored:
    """KV event: consecutive blocks of a request can be found from now on. Names are those of vLLM's KV events."""

    @property
    def blocks(self) -> list[int]:
        """The blocks."""

    @property
    def block_hashes(self) -> list[int]:
        """Their hashes, 128 bits each."""

    @property
    def parent_block_hash(self) -> int | None:
        """Hash of the block before the first of them; None at position 0."""

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """`[blocks * block_size]` int64, a copy: their tokens."""

    @property
    def block_size(self) -> int:
        """Positions per block."""

    @property
    def extra_keys(self) -> list[list[tuple[int, bytes]]]:
        """By block, `(offset, key)`: its extra keys and the offset in the block from which on each counts."""

    @property
    def cache_salt(self) -> bytes:
        """The request's cache salt, where the first of the blocks begins its text; else empty."""

    @property
    def lora_id(self) -> int | None:
        """Id of the LoRA adapter that they were computed with; None: the base model."""

    @property
    def lora_name(self) -> str | None:
        """Its name."""

@final
class BlockRemoved:
    """KV event: blocks can no longer be found. Their KV stays until the next launch that was planned executes."""

    @property
    def blocks(self) -> list[int]:
        """The blocks."""

    @property
    def block_hashes(self) -> list[int]:
        """The hashes that they had."""

    @property
    def has_draft(self) -> list[bool]:
        """Whether their draft KV was valid too."""

@final
class AllBlocksCleared:
    """KV event: what was stored before counts no longer, because of a reset or of events that were not taken in time.

    What follows is true again; blocks stored before may still be cached then, but no event will say so.
    """

@final
class KVEventBatch:
    """What `Scheduler.take_kv_event_batch` took. May be used in another thread than the scheduler's."""

    def events(self) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
        """The events, in order."""

    def msgpack(self, timestamp: float, data_parallel_rank: int = 0) -> bytes:
        """The events as a payload of vLLM's KV events, in MessagePack; releases the interpreter while it encodes.

        `[timestamp, events, data_parallel_rank]`, an event a map with its `type`. `timestamp` is in seconds since 1970.
        Hashes are the lower 64 bits of a block's. `extra_keys` are told by block without their offsets, the cache salt
        before those of the first block.
        """

@final
class TokenDecoder:
    """Token ids to text, by a tokenizer's own decoder. One serves all requests, in any thread."""

    def __new__(cls, json: str) -> TokenDecoder:
        """From `tokenizers.Tokenizer.to_str()`, the content of tokenizer.json; its normalizer, pre-tokenizer and merges
        do not matter.

        Raises:
            InvalidTokenizerError: it cannot be read.
        """

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`, all at once. Raises InvalidTokenizerError if the decoder fails on them."""

@final
class Output:
    """What one request has produced: tokens, text as it comes, acceptance books, times, its end.

    Text is what decoding all ids at once gives, except that a stop string ends it, and that the end of a stream of
    bytes which are no text may differ in its number of replacement characters. Bytes of an unfinished character are
    held back until it is complete, or until `finish`.

    A stop string counts if the token that completes it is at 0-based output index `min_tokens` or later. Where one
    token completes several, the one that ends first counts; among those, the longest.
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
        """An output that has nothing yet.

        Args:
            request_id: its request's, in the scheduler.
            prompt_token_ids: the last few are context for the decoder; their text is not part of the output.
            num_speculative_tokens: K of the acceptance books, 0 to 1024.
            decoder: None for tokens without text.
            skip_special_tokens: whether special tokens have no text.
            stop: stop strings, none empty.
            include_stop_str_in_output: whether the stop string or stop token that ends the text is part of it.
            min_tokens: output tokens before which stop strings do not count.
            keep_drafts: whether `drafts` tells what was drafted. The results of its launches must then have the drafts
                that were rejected, as `results_layout` says of `tokens`.

        Raises:
            InvalidConfigError, InvalidRequestError: a setting outside its range.
            InvalidTokenizerError: the prompt cannot be decoded.
        """

    @property
    def request_id(self) -> int:
        """The request's id."""

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""

    def token_ids(self, start: int = 0) -> list[int]:
        """Output tokens from index `start` on."""

    @property
    def text(self) -> str:
        """All text so far; ends before a stop string, or behind it with `include_stop_str_in_output`."""

    @property
    def stable_text(self) -> str:
        """The part of `text` that no further token can take back: a possible beginning of a stop string is left out."""

    @property
    def finish_reason(self) -> int | None:
        """`FINISH_*`; None while it has not ended."""

    @property
    def finish_time(self) -> float | None:
        """`now` of its end."""

    @property
    def error(self) -> str | None:
        """Why, where a launch or the decoder ended it with `FINISH_ERROR`."""

    @property
    def error_flags(self) -> int:
        """`FLAG_*` bits with which a launch reported the error that ended it; 0 for every other end."""

    @property
    def stop(self) -> int | None:
        """Index of the stop string that ended it."""

    @property
    def first_token_time(self) -> float | None:
        """`now` of its first token."""

    def acceptance(self) -> AcceptanceTracker:
        """A copy of its acceptance books."""

    def drafts(self, start: int = 0) -> list[tuple[int, int, list[int]]] | None:
        """What was drafted, an entry for each iteration that drafted, from entry `start` on; None if not kept.

        Of each: the index of the output token that the iteration began with, how many drafts were accepted, and the
        ids of those behind them, which were rejected.
        """

    def record(self, drafted: int, accepted: int) -> None:
        """Count one draft in its acceptance books. Mutates.

        Raises:
            InvalidAcceptanceError: impossible counts.
        """

    def append(self, token_ids: Sequence[int], *, ended_by_token: bool = False, now: float = 0.0) -> tuple[int, bool]:
        """Take new tokens; how many were taken, and whether a stop string ended the text among them. Mutates.

        Tokens behind the one that completes a stop string are not taken. With `ended_by_token` the last one is a stop
        token: an output token, but no text unless `include_stop_str_in_output`.

        Raises:
            InvalidTokenizerError: their text cannot be decoded; none is taken.
        """

    def finish(self, reason: int, *, now: float = 0.0) -> None:
        """End it: bytes held back become replacement characters, but not after an error. Mutates.

        The first end counts, and `FINISH_ERROR` over any other.

        Raises:
            InvalidRequestError: `reason` is no end.
        """

@final
class Outputs:
    """The outputs of all requests that run: one call settles a launch and hands it to its requests."""

    def __new__(cls) -> Outputs:
        """No outputs."""

    def add(self, output: Output) -> None:
        """Take in a request's output, by its id. Mutates."""

    def remove(self, request_id: int) -> bool:
        """Give up a request that ended otherwise; whether it was there. Mutates."""

    @property
    def num_tokens(self) -> int:
        """Tokens handed to requests since the start."""

    def __len__(self) -> int:
        """Requests that have not ended."""

    def settle(
        self,
        scheduler: Scheduler,
        launch_id: int,
        results: NDArray[np.int64],
        settled: NDArray[np.int64],
        *,
        now: float = 0.0,
        fault: str | None = None,
    ) -> tuple[list[int], list[int]]:
        """`Scheduler.settle`, and all that follows for the outputs of its requests: tokens, text, stop strings, books,
        ends. Releases the interpreter for the latter. Mutates.

        In `settled`, `num_new` is then what each request kept, and `finish_reason` also tells of stop strings and of
        text that cannot be decoded (`FINISH_ERROR`); requests that ended by those have left the scheduler, too.

        Args:
            now: the time, for `first_token_time` and `finish_time`.
            fault: why the launch failed as a whole, for entries with flags.

        Returns:
            Ids of the requests that got tokens or ended, in the order of their entries, and of those that ended.

        Raises:
            SettleOrderError, InvalidBufferError, InvalidResultsError: as `Scheduler.settle`; nothing has changed.
        """

@final
class SpeculationPlanner:
    """How many tokens each request drafts in the next launch: the most expected tokens per millisecond, none included.

    It knows what launches cost (a `CostModel`, refined by `settle`) and how drafts fared: by position over all
    requests, and one factor for each request, both exponentially forgotten. It changes its mind for 0.5 % (`MARGIN`)
    more tokens per millisecond or not at all, and gives requests different K only for 3 % (`MIXED_MARGIN`). To learn
    what it does not see, it spends 0.4 % (`PROBE_SHARE`) of the time on drafting deeper than it would, one request at a
    time, and 0.2 % (`TRIAL_SHARE`), at first more, on another K for all. A useless draft ends at K = 0, and one that
    becomes good again is found.

    `Scheduler.speculate` drives it. On its own: requests go by row, a number below R = `max_num_seqs` that is theirs
    while they run; `reset` for a new request on a row, `decide` before each launch, `settle` after it.
    """

    def __new__(
        cls, *, max_num_seqs: int, num_speculative_tokens: int, costs: CostModel, catch_up_ms: float = 0.0
    ) -> SpeculationPlanner:
        """A planner that has seen no draft yet; it copies `costs`.

        Args:
            max_num_seqs: rows (R), 1 to 65536.
            num_speculative_tokens: the most drafts that it chooses (K), 1 to 1024.
            costs: milliseconds by batch and K of launches that only decode; beyond its grid as `CostModel.ms` goes on.
            catch_up_ms: milliseconds of each position of a draft catch-up chunk beside them, at least 0.

        Raises:
            InvalidConfigError: naming the setting outside its range.
        """

    @property
    def max_num_seqs(self) -> int:
        """R."""

    @property
    def num_speculative_tokens(self) -> int:
        """K."""

    def costs(self) -> CostModel:
        """A copy of the costs as refined by now. Only ratios mean anything: a machine that slows down as a whole does
        not change them."""

    def conditional_acceptance(self) -> list[float]:
        """`[K]`: chance that each draft token of an average request is accepted, given that those before it were."""

    def reset(self, row: int) -> None:
        """A new request runs on `row`: forgets what was known of the one before.

        Raises:
            InvalidBufferError: there is no such row.
        """

    def decide(
        self, rows: NDArray[np.int64], caps: NDArray[np.int64], lags: NDArray[np.int64], ks: NDArray[np.int64]
    ) -> None:
        """Writes the K of each of the next launch's B decoding requests into `ks`.

        Args:
            rows: `[B]`, distinct.
            caps: `[B]`, the most that each may draft now; above K counts as K.
            lags: `[B]`, positions that its draft KV would have to catch up before it drafts, 0 for none.
            ks: `[B]`, written.

        Raises:
            InvalidBufferError: lengths differ, a row is not known, a cap or lag is negative; nothing has changed.
        """

    def settle(
        self,
        rows: NDArray[np.int64],
        ks: NDArray[np.int64],
        drafted: NDArray[np.int64],
        accepted: NDArray[np.int64],
        ms: float | None = None,
    ) -> None:
        """Learns what became of a launch of B decode entries.

        Args:
            rows, ks: `[B]`, row and K of each, as launched.
            drafted: `[B]`, tokens drafted: K after the device's own limits.
            accepted: `[B]`, how many of them the target accepted.
            ms: how long the launch took, if it did nothing but decode; refines the costs where all drafted alike.

        Raises:
            InvalidBufferError: lengths differ, a row is not known, a K or `ms` is outside its range.
            InvalidAcceptanceError: unless `accepted <= drafted <= ks`. Nothing has changed then.
        """

    def take_collapsed(self) -> list[int]:
        """Rows whose requests' acceptance has collapsed since the last call, each once: rebuild their draft KV.

        A collapse is a first draft token that stands a quarter as often as this request's used to (a CUSUM test);
        `Scheduler.speculate` takes and rebuilds them by itself.
        """

@final
class AcceptanceTracker:
    """Acceptance books: how many drafted tokens the target accepted.

    One iteration of one request with `drafted >= 1` is one draft of `drafted` tokens, `accepted` of them accepted,
    before stop tokens or limits cut the text.
    """

    def __new__(cls, num_speculative_tokens: int) -> AcceptanceTracker:
        """Empty books for drafts of at most `num_speculative_tokens` (K, 0 to 1024) tokens.

        Raises:
            InvalidConfigError: K is outside that range.
        """

    @property
    def num_speculative_tokens(self) -> int:
        """K, the most tokens one draft can have."""

    def record(self, drafted: int, accepted: int) -> None:
        """Enters one iteration; `drafted == 0` is no draft and changes nothing.

        Raises:
            InvalidAcceptanceError: unless `0 <= accepted <= drafted <= K`.
        """

    def reset(self) -> None:
        """Forgets everything recorded."""

    @property
    def drafts(self) -> int:
        """Iterations that drafted at least one token."""

    @property
    def draft_tokens(self) -> int:
        """Tokens drafted."""

    @property
    def accepted_tokens(self) -> int:
        """Drafted tokens that the target accepted."""

    @property
    def acceptance_length(self) -> float:
        """Mean tokens emitted per draft: `1 + accepted_tokens / drafts`; 1.0 without drafts."""

    @property
    def acceptance_rate(self) -> float:
        """`accepted_tokens / draft_tokens`; 0.0 without drafts."""

    @property
    def per_position(self) -> list[float]:
        """`[K]`: share of all drafts whose token i was accepted, unconditional. Sums to `acceptance_length - 1`."""

    @property
    def accepted_per_position(self) -> list[int]:
        """`[K]`: drafts whose token i was accepted."""

    @property
    def histogram(self) -> list[int]:
        """`[K + 1]`: drafts by the number of their tokens that were accepted."""

@final
class BlockPool:
    """Who holds which KV block, and which blocks can be found again by content.

    A block is free, held (`ref_count >= 1`), or cached (registered, not held, evicted least recently freed
    first). A registered block has mark T (its target KV is valid); mark D says that its draft KV is valid too. Every
    operation is O(1).
    """

    def __new__(cls, num_blocks: int) -> BlockPool:
        """A pool whose blocks are all free; the first allocations give 0, 1, 2, ...

        Raises:
            InvalidConfigError: unless `1 <= num_blocks <= 2**31`.
        """

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give: free and cached ones."""

    def ref_count(self, block: int) -> int | None:
        """Holders of `block`; None if the pool has no such block."""

    def allocate(self) -> int:
        """Gives a block with one holder and no marks; free blocks first, then the least recently freed cached one.

        Raises:
            OutOfBlocksError: every block is held.
        """

    def next_eviction(self) -> int | None:
        """The cached block that the next `allocate` will evict; None if it will take a free one or find none.

        Its KV is still what `block_hash` names, so it can be copied out first.
        """

    def share(self, block: int) -> None:
        """Adds a holder to a held or cached block.

        Raises:
            InvalidBlockError: the block is free or not in the pool.
        """

    def free(self, block: int) -> None:
        """Takes a holder away; without holders a registered block is cached, any other is free.

        Free a sequence's blocks last to first, so that its tail is evicted before its head.

        Raises:
            InvalidBlockError: the block is not held, or not in the pool.
        """

    def lookup(self, block_hash: int) -> int | None:
        """The block registered under this 128-bit hash, held or cached; it is not shared by looking."""

    def register(self, block: int, block_hash: int) -> bool:
        """Sets mark T: the held block can be found under `block_hash` from now on.

        Returns False, and changes nothing, if another block has that content already.

        Raises:
            InvalidBlockError: the block is not held, is registered already, or is not in the pool.
            OverflowError: the hash does not fit 128 bits.
        """

    def is_registered(self, block: int) -> bool:
        """Whether `block` has mark T; False if the pool has no such block."""

    def block_hash(self, block: int) -> int | None:
        """The hash that `block` is registered under; None if it is not, or the pool has no such block."""

    def has_draft(self, block: int) -> bool:
        """Whether `block` has mark D; False if the pool has no such block."""

    def mark_draft(self, block: int) -> None:
        """Sets mark D on a registered held block and ends its claim.

        Raises:
            InvalidBlockError: the block is not held, not registered, or not in the pool.
        """

    def claim(self, block: int, claimant: int) -> bool:
        """Takes the claim on writing the draft KV of a held block with mark T only; False if another has it.

        Raises:
            InvalidBlockError: the block is not in that state, or `claimant` is not in `[0, 2**32 - 1)`.
        """

    def claimant(self, block: int) -> int | None:
        """Who has the claim on `block`."""

    def release_claim(self, block: int, claimant: int) -> bool:
        """Gives `claimant`'s claim back; False if it has none."""

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content. Returns False, and changes nothing, while any block is held."""

    def check_integrity(self) -> None:
        """Checks that lists, marks, claims and hashes agree. O(num_blocks).

        Raises:
            IntegrityError: naming the first contradiction.
        """

@final
class BlockHasher:
    """Names of KV blocks by content: SipHash-2-4-128 under a key, chained over blocks, with a salt at the root."""

    def __new__(cls, hash_key: bytes = ...) -> BlockHasher:
        """A hasher with this 16-byte key, default all zero; caches that should agree use the same key.

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
        """The 128-bit hashes of all full blocks of `token_ids` `[n]` int64; `n // block_size` of them.

        Args:
            parent: the hash of the block that they follow, to go on from tokens that were hashed before; by default
                they begin a sequence.
            extra_keys: as in `Scheduler.add_request`; positions count from `token_ids[0]`.

        Raises:
            InvalidConfigError: `block_size` is below 1, or both `parent` and `cache_salt` are given.
            InvalidBufferError: `token_ids` is not a contiguous int64 vector, or `extra_keys` is not allowed.
        """

@final
class CpuPool:
    """Threads that passes on a CPU are shared among, the caller's among them. They end when nothing shares it.

    In a process that is forked off the one that made it there are none: what shares it raises `SpecrsError`.
    """

    def __new__(cls, threads: int) -> CpuPool:
        """A pool of `threads` participants: the caller and `threads - 1` threads.

        Raises:
            InvalidConfigError: `threads` is less than 1, or more than the system gives.
        """

    @property
    def threads(self) -> int:
        """Participants, the caller among them."""

    def close(self) -> None:
        """Ends its threads, once no call uses it. What shares it raises `SpecrsError` from then on; a pool of one
        participant goes on."""

@final
class CpuWeights:
    """Weights of a dense decoder, read where they are: arrays are kept alive and must not be written.

    Numbers are float32, or uint16 with the bits of bfloat16. Norms and biases are copied.
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
        embedding: NDArray[np.generic],
        layers: Sequence[Mapping[str, object]],
        final_norm: NDArray[np.generic],
        lm_head: Sequence[
            tuple[NDArray[np.generic] | tuple[NDArray[np.generic], NDArray[np.generic]], NDArray[np.generic] | None]
        ],
        frequencies: NDArray[np.float32],
        head: Mapping[str, object] | None = None,
        rotations: tuple[list[tuple[list[float], float]], list[int | None]] | None = None,
        multipliers: tuple[float, float, float] | None = None,
        windows: list[int | None] | None = None,
        activation: str = "silu",
        clamped_swiglu: tuple[float, float] | None = None,
        kv_scales: Sequence[tuple[float, float]] | None = None,
    ) -> CpuWeights:
        """A decoder's weights; sizes by the names of config.json.

        A projection is a list of `(weight, bias or None)`, `[out_i, in]` and `[out_i]`: features above each other. A
        weight is an array, or `(codes, scales)` as `quantize_weight` writes them; codes may also be -128 and -8, scales
        float32, and INT8 have a scale for each group `[out, groups]` of a multiple of 16 inputs.

        Args:
            embedding: `[vocab_size, hidden_size]`.
            layers: a mapping each: `input_norm` and `post_attention_norm` `[hidden_size]`, or None where attention and
                MLP are fed the residual stream as it is; `attention_output_norm` and `mlp_output_norm` `[hidden_size]`
                of what they add to it, or None, or not there; `q_norm` and `k_norm` `[head_dim]` or None, with
                `qk_norm_whole` `[heads * head_dim]`, for all heads as one; `sinks` `[heads]`, a score more of each
                query head, with a value of zero, or None, or not there; the projections `qkv` (all heads of q, then k,
                then v), `o`, `gate_up`, `down`. In place of the last two `experts` may be a mapping: the
                projections `router` (hidden_size to the experts) and of each expert `gate_up` and `down`; `per_token`,
                how many a row is sent to; `normalized`: their weights add up to 1. All such layers have the same sizes.
            final_norm: `[hidden_size]`.
            lm_head: a projection from hidden_size to vocab_size.
            frequencies: `[head_dim / 2]`, the angle of each rotated pair at position 1.
            head: makes it an EAGLE-3 head: one layer, whose `qkv` has 2 * hidden_size inputs, the normed embedding and
                the hidden state that passes are fed, normed; `lm_head` may have any number of ids. `hidden_layers`: L
                layers of the target at whose entry it reads hidden states; `fc`: a projection of all of them to
                hidden_size; `fc_norm`: `[L * the target's hidden_size]` or None, a norm of what `fc` is fed, with
                `fc_norm_each` of each layer's state by itself; `hidden_norm`: `[hidden_size]`; `norm_before_residual`:
                its residual is the normed hidden state; `norm_output`: it leaves its states behind the final norm to
                the next pass; `target_ids`: the target's id of each of its own, ascending.
            rotations: in place of `frequencies`, where layers rotate in several ways, or a part of a head: pairs of
                frequencies `[P]`, of the first 2 P features, and what their cosines and sines are multiplied by; then
                for each layer which of them it has, or None. None: `frequencies` in all layers.
            multipliers: of embeddings, of what attention and MLP add to the residual stream, and of attention scores.
                None: 1, 1 and 1 / sqrt(head_dim).
            windows: for each layer how many positions a row attends, its own among them and the last; None: all.
            activation: of the MLP's gate, `silu` or `gelu_pytorch_tanh`.
            clamped_swiglu: in place of it alpha and limit of `g sigmoid(alpha g) (u + 1)`, the gate g at most limit and
                the value u from -limit to limit.
            kv_scales: for each layer that of its keys and that of its values in a cache of codes; None: 1.

        Raises:
            InvalidConfigError: a size is negative.
            InvalidBufferError: an array's dtype, layout, alignment or shape, by name.
        """

@final
class CpuLora:
    """A LoRA adapter of a decoder, read where it is: arrays are kept alive and must not be written."""

    def __new__(
        cls,
        weights: CpuWeights,
        layers: Sequence[Mapping[str, Sequence[tuple[NDArray[np.generic], NDArray[np.generic], int]]]],
    ) -> CpuLora:
        """For decoders of weights like these.

        Args:
            layers: for each layer by `qkv`, `o`, `gate_up` and `down` what is added to that projection, a list of
                A `[rank, inputs]` and B `[outputs, rank]` times the scale, float32 or uint16 with the
                bits of bfloat16, and which of the projection's outputs is the first of these.

        Raises:
            InvalidBufferError: an array's dtype, layout, alignment or shape, by name; layers that are not as many.
        """

@final
class CpuKVCache:
    """A KV cache that passes write, in arrays of the caller, which are kept alive."""

    def __new__(
        cls,
        layers: Sequence[NDArray[np.generic]],
        groups: Sequence[tuple[int, int]] | None = None,
        codes: str | None = None,
    ) -> CpuKVCache:
        """Per layer `[num_blocks + 1, 2, num_kv_heads, block_size, head_dim]`, float32 or uint16 with the bits of
        bfloat16; dimension 1 is K, V. Slot s is block `s // block_size`, offset `s % block_size`; the last block is
        never read.

        With `groups`, of each of the model's layers its KV group and which of the arrays it has: layers of several
        groups may have the same one, since a block is of one group at a time. None: one group, an array for each layer.

        With `codes` `fp8_e4m3` or `fp8_e5m2` arrays are uint8: a key or value x is the code of x / scale, of the
        scales of the weights that passes use.

        Raises:
            InvalidConfigError: `codes` of another name.
            InvalidBufferError: an array's dtype, layout, alignment or shape, by name; a group without layers, an array
                that is none, or that two layers of a group have.
        """

@final
class CpuDecoder:
    """The forward pass of a dense decoder over flat rows, with work space of its own: one pass at a time.

    A row's sums have one order, whatever the other rows and the threads: its numbers are the same bits.
    """

    def __new__(
        cls, weights: CpuWeights, pool: CpuPool, *, bf16_rows: bool = False, prompt_tiles: bool = False
    ) -> CpuDecoder:
        """A decoder of these weights on these threads, both of which others may share.

        With `bf16_rows` rows are rounded to bf16 before every product, whose sums then have one order of their own.
        With `prompt_tiles` so have those of prompts' rows with bf16 weights, which AMX multiplies by tiles, in fp32.

        Raises:
            InvalidConfigError: `prompt_tiles` where this process may not use tiles.
            InvalidBufferError: a matrix that is not bf16, or has inputs that are no multiple of 32, with `bf16_rows`.
        """

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
        beside: NDArray[np.float32] | None = None,
        k_start: NDArray[np.int64] | None = None,
        group_slots: NDArray[np.int64] | None = None,
        group_tables: NDArray[np.int64] | None = None,
        prompts: bool = False,
        adapters: Sequence[tuple[CpuLora, list[int]]] = ...,
    ) -> None:
        """Feeds N rows of B requests: writes their K and V, and their final states, behind the final norm.

        Args:
            tokens: `[N]`.
            positions: `[N]`, ascending within a request; -1 masks a row, whose state is finite and means nothing.
            slots: `[N]`; -1 keeps no K and V.
            q_start: `[B + 1]`, first row of each request; rows from the last on are masked.
            block_table: `[B, max_blocks]`.
            hidden: `[N, hidden_size]`, written.
            hidden_layers: L layers; their number itself is behind the last, before the final norm.
            entries: `[N, L, hidden_size]`, written: the residual stream where it enters those layers; at layer 1 of a
                head what its next pass is fed.
            beside: `[N, hidden_size]`, for a head and only for it: each row's hidden state.
            k_start: `[B]`, the first position that a request's rows attend, none of which is before it; None: 0.
            group_slots: `[G - 1, N]`, of the KV groups behind the first, where `kv_cache` has several.
            group_tables: `[G - 1, B, max_blocks]`, likewise; what lies before a group's windows means nothing.
            prompts: all rows are of prompts.

        Raises:
            InvalidBufferError: an array has the wrong dtype, layout or size, or names a token, position, slot, block or
                layer that does not exist; nothing is written.
        """

    def fuse(self, states: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        """Of a head: the target's hidden states `[N, L, its hidden_size]` as its own, into `out` `[N, hidden_size]`.

        Raises:
            InvalidBufferError: an array has the wrong dtype, layout or size, or this is no head; nothing is written.
        """

    def logits(self, hidden: NDArray[np.float32], logits: NDArray[np.float32]) -> None:
        """Logits of final states `[L, hidden_size]` into `logits` `[L, ids]`, of the first ids.

        Raises:
            InvalidBufferError: an array has the wrong dtype, layout or size; nothing is written.
        """

    def argmax(
        self, hidden: NDArray[np.float32], num_ids: int, ids: NDArray[np.int64], top: NDArray[np.float32]
    ) -> None:
        """The most probable of the first `num_ids` ids of final states `[L, hidden_size]`: the lowest in a tie, the
        first NaN where there is one.

        Args:
            ids, top: `[L]`, written: id and logit.

        Raises:
            InvalidBufferError: an array has the wrong dtype, layout or size; nothing is written.
        """

_Logprobs = tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]
"""Log probabilities of m tokens: their values `[m]` and ranks `[m]`; ids `[m, n]` and values `[m, n]` of the most
probable ones."""

class _CallableModel(Protocol):
    """A model whose passes Python computes, or an EAGLE-3 head, with a KV cache of its own."""

    vocab_size: int
    """Ids that it can be fed; of a head the target's."""
    num_ids: int
    """Logits of a row."""
    num_layers: int
    hidden_size: int
    """Numbers of a hidden state; anything where no head reads them."""
    target_ids: NDArray[np.int64] | None
    """[num_ids] int64, ascending, of a head: the target's id of each logit; None: logit i is for id i."""
    aux_hidden_state_layers: Sequence[int]
    """Of a head: layers of the target at whose entry it reads hidden states; empty for a model."""
    aux_hidden_state_size: int
    """Of a head: numbers of one of these states."""

    def forward(
        self,
        inputs: dict[str, Any],
        wanted: NDArray[np.int64],
        keeps: bool,
        layers: list[int],
        beside: NDArray[np.float32] | None,
    ) -> tuple[NDArray[np.float32] | None, NDArray[np.float32] | None, NDArray[np.bool_] | None]:
        """Run one pass over N rows and write their K and V.

        Args:
            inputs: keywords of `specrs.models.inputs.PassInputs` as int64 arrays, and `rows` `[B]`, the row of state of
                each of the B sequences.
            wanted: rows whose logits are asked for; with `keeps` they are asked for later, by `logits`.
            layers: layers whose hidden states are asked for where the rows enter them; of a head `[1]`: what it leaves
                for its next pass.
            beside: `[N, hidden_size]`, what a head is fed next to the tokens; None for a model.

        Returns:
            Logits `[len(wanted), num_ids]` or None, hidden states `[N, len(layers), hidden_size]` or None, and `[N]`
            whether the final state of each row is finite: None where the last row of a prompt tells that of all before.
        """

    def logits(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return logits `[len(rows), num_ids]` of rows of the last pass with `keeps`, by their place in `wanted`."""

    def fuse(self, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return what a head is fed for the target's hidden states `[N, layers, aux_hidden_state_size]`:
        `[N, hidden_size]`."""

class _StepHost(Protocol):
    """What a step asks of Python. Sequences are named by their index in the results."""

    @property
    def has_ranks(self) -> bool:
        """Whether other ranks run the same step; `enter` and `leave` are called then."""

    def start_grammar(self, index: int, row: int) -> NDArray[np.int32]:
        """Return the mask of the sequence's next token, `[ceil(V / 32)]`: bit t % 32 of word t // 32 is set for ids
        that may come. Its request is in `row` of row state."""

    def advance_grammar(self, index: int, token: int) -> NDArray[np.int32]:
        """Return the mask of the token after the next draft."""

    def draft_ids(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the draft model's ids of a text that is `tokens` for the target; empty where it has none."""

    def target_ids(
        self, tokens: NDArray[np.int64], own: NDArray[np.int64], drafted: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the target's ids of `drafted`, which the draft model wrote after its ids `own` of that text."""

    def enter(self, stage: int) -> None:
        """Begin a stage of the drafter: 1 feeds a head what prompts left to it, 2 feeds draft chunks, 4 drafts."""

    def leave(self, stage: int, error: Exception | None) -> bool:
        """End a stage, which failed with `error` here or did not. Returns whether it failed on any rank."""

_Source = tuple[CpuDecoder, CpuKVCache] | _CallableModel
"""A native model with its KV cache, or one that Python computes."""

@final
class CpuIteration:
    """Runs planned launches of a scheduler on a CPU, each in one call: uploads, prompt chunks, draft catch-up chunks,
    one decode iteration, in this order.

    It applies what requests ask of their logits, and reports log probabilities.
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
        """For launches of `scheduler`, whose settings are read now.

        Args:
            state: R = max_num_seqs. `num_tokens`, `draft_len`, `draft_start`, `limit`, `min_len`, `prompt_len`, `seeds`
                `[R + 1]` int64; `active` `[R + 1]` bool; `tokens` `[R + 1, max_model_len + 1]`, `block_table`
                `[R + 1, max_blocks]`, `stop_ids` `[R + 1, MAX_STOP_IDS]` int64; `params`
                `[R + 1, len(PARAM_COLUMNS)]` float32. With a `HiddenDrafter` `hidden_states`
                `[R + 1, max_draft_lag * numbers of a position]` float32 and `hidden_start` `[R + 1]` int64. With
                `window_groups` `group_tables` `[(G - 1) * (R + 1), max_blocks]` int64, group by group. They are kept
                alive, and written by `run`.
            draft: of a scheduler with a `CachedDrafter` or `TextDrafter`, or an EAGLE-3 head of one with a
                `HiddenDrafter`.
            rule: `rejection` or `coupled`, for requests that sample.
            rates: `[K]`; drafts stand at these unconditional rates by position, whatever the models say: for timing.
            logprobs_mode: what `logprobs` reports: `raw_logprobs`, `raw_logits`, `processed_logprobs` or
                `processed_logits`, as in vLLM.
            shared_tokens: of a draft with another tokenizer: pairs (the target's id, the draft's id) of tokens that
                both have, and the draft's id that it is fed for others. Only shared tokens are drafted.
            text_limits: with a `TextDrafter`: tokens of a text in the draft's ids at most, tokens that it is fed in a
                step, about, and the block size of its KV cache. Row r of state has blocks r * B to r * B + B - 1 of it,
                as many as hold such a text.

        Raises:
            InvalidConfigError: a rule, rates, mode or draft that cannot be.
            InvalidBufferError: shared tokens that a model does not have.
            InvalidBufferError: an array of `state` has the wrong dtype, layout or shape, or is missing.
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
    ]:
        """Executes the launch planned in `record`; writes row state, both KV caches, and what it reports to `results`.

        `adapters` are those of rows of state that the target's passes are computed with, each row at most once.
        `host` has the grammars of the launch's requests; None: none of them has one, and drafts are not text.

        What prompt chunks leave to a head is fed to it by the next call, so that no first token waits for it.

        Returns:
            Passes of the target and of the draft; where the draft's failed, so that the launch has gone on without
            their drafts, why, and the blocks for `Scheduler.draft_kv_not_written`, ascending; the log probabilities of
            what was emitted, by entry; and those of prompt tokens, by request id and position of the first. Both for
            requests that ask for them.

        Raises:
            InvalidBufferError: a buffer has the wrong dtype or size, or a record names what does not exist; row state
                may have been written.
            Exception: whatever the target's `_CallableModel` or `host` raises.
        """

    def set_rule(self, rule: str) -> None:
        """Verifies by `rejection` or `coupled` from the next launch on.

        Raises:
            InvalidConfigError: another rule.
        """

@final
class CostModel:
    """Milliseconds of an iteration by batch size and number of draft tokens K, and what follows from them.

    One iteration drafts K tokens and yields AL tokens, the acceptance length at K: `TPOT = ms / AL`; speed-ups are over
    the same batch at K = 0. Between grid points costs are interpolated linearly. K = 0 stands apart: costs at K >= 1
    come from the points with K >= 1 alone, wherever there are two of them. Beyond the last K or batch the last segment
    goes on, but never falls; before the first K >= 1 the first one does, but no lower than T_t = 0 allows; before the
    first batch the cost stays.

    Acceptance lengths are given by K: `acceptance_lengths[i]` is that of K = i + 1, from 1 to K + 1.
    """

    def __new__(cls, batches: Sequence[int], ks: Sequence[int], ms: Sequence[Sequence[float]]) -> CostModel:
        """A grid: `ms[b][j]` is the cost of `batches[b]` requests at `ks[j]` drafts each. `ks` begins with 0.

        Raises:
            InvalidConfigError: batches (1 to 2**20) or ks do not increase, or a cost is missing or not above 0.
        """

    @staticmethod
    def lines(
        batches: Sequence[int], draft_ms: Sequence[float], target_ms: Sequence[float], vanilla_ms: Sequence[float]
    ) -> CostModel:
        """`ITL = K * T_d + T_t` at each batch size: `draft_ms` is T_d, `target_ms` T_t, `vanilla_ms` the cost at K = 0.

        Raises:
            InvalidConfigError: lengths differ, batches do not increase, T_d is below 0 or another time not above 0.
        """

    @staticmethod
    def implied_draft_ms(tpot_ms: float, k: int, acceptance_length: float, target_ms: float) -> float:
        """The T_d that explains an observed TPOT: `(tpot_ms * AL - T_t) / K`; negative where T_t alone takes longer.

        Raises:
            InvalidConfigError: a time is not above 0, `k` below 1, or the acceptance length not from 1 to k + 1.
        """

    @property
    def batches(self) -> list[int]:
        """`[B]`: batch sizes of the grid."""

    @property
    def ks(self) -> list[int]:
        """`[N]`: numbers of draft tokens of the grid, 0 first."""

    @property
    def table(self) -> list[list[float]]:
        """`[B][N]`: the costs of the grid in milliseconds."""

    def ms(self, batch: int, k: int) -> float:
        """Cost of an iteration of `batch` requests with `k` drafts each. Batch 0 counts as 1.

        Raises:
            InvalidConfigError: `batch` or `k` is negative.
        """

    def tpot(self, batch: int, k: int, acceptance_length: float) -> float:
        """Milliseconds per output token: `ms(batch, k) / acceptance_length`.

        Raises:
            InvalidConfigError: a number is negative, or the acceptance length not from 1 to k + 1.
        """

    def speedup(self, batch: int, k: int, acceptance_length: float) -> float:
        """TPOT without drafts over TPOT with `k` of them.

        Raises:
            InvalidConfigError: as `tpot`.
        """

    def best_k(self, batch: int, acceptance_lengths: Sequence[float]) -> int:
        """The K of the lowest TPOT, 0 among them; of equal ones the smallest.

        Raises:
            InvalidConfigError: `batch` is negative, or an acceptance length not from 1 to K + 1.
        """

    def last_paying_k(self, batch: int, acceptance_lengths: Sequence[float]) -> int:
        """The largest of the given K that is still faster than no drafts; 0 if none is.

        Raises:
            InvalidConfigError: as `best_k`.
        """

    def break_even_batch(self, acceptance_lengths: Sequence[float]) -> int | None:
        """The smallest batch within the grid at which no K is faster than no drafts; None if there is none.

        Raises:
            InvalidConfigError: an acceptance length is not from 1 to K + 1.
        """

    def observe(self, batch: int, k: int, ms: float, weight: float) -> None:
        """Moves the grid towards a measured cost. Mutates.

        Each of the up to four grid points around (batch, k) is scaled by its share in the interpolation times `weight`;
        on a grid point this is an exponential average with `weight` for the new value.

        Raises:
            InvalidConfigError: (batch, k) is not within the grid, `ms` not above 0, or `weight` not in (0, 1].
        """

@final
class SlotMapper:
    """Where a position's KV lives: `block_table[position // block_size] * block_size + position % block_size`.

    Slot -1, which writes nothing, where the position is negative, beyond the table, or in an entry below 0.
    """

    def __new__(cls, block_size: int) -> SlotMapper:
        """A mapper for blocks of `block_size` positions.

        Raises:
            InvalidConfigError: `block_size` is below 1.
        """

    @property
    def block_size(self) -> int:
        """Positions per block."""

    def slot(self, block_table: NDArray[np.int64], position: int) -> int:
        """The slot of one position; `block_table` is `[blocks]` int64.

        Raises:
            InvalidBufferError: `block_table` is not a contiguous int64 vector.
        """

    def map(self, block_table: NDArray[np.int64], positions: NDArray[np.int64], out: NDArray[np.int64]) -> None:
        """Writes the slots of `positions` `[N]` of one request into `out` `[N]`; all int64.

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
        """Writes the slots of flat rows: rows `q_start[b]:q_start[b + 1]` belong to request b.

        `block_tables` is `[B, blocks]`, `q_start` `[B + 1]` from 0 to N without decreasing, `positions` and `out`
        `[N]`; all int64.

        Raises:
            InvalidBufferError: an array has the wrong dtype, layout, size or content; `out` is unchanged.
        """

@final
class Sampler:
    """Sampling of fp32 rows on a CPU: cuts, noise, draws and the verification of drafts in one pass over each row.

    Rows come with masks, biases and penalties applied. `params` `[R, >= 5]` float32 holds per row of state: greedy
    (not 0: the largest logit, the lowest id of equal ones), temperature (positive), top_k (inf is off), top_p in (0, 1)
    (inf is off), ln(min_p) (-inf is off); further columns are ignored. `seeds` is `[R]` int64, its bits taken as
    unsigned. `rows` names the row of state of each row of logits, or of each request. Noise is that of `philox_gumbel`
    and `philox_uniform`; only kept tokens get any. A row of logits whose largest is not finite gives some token of the
    vocabulary; its `largest` tells.
    """

    def __new__(cls, vocab_size: int) -> Sampler:
        """A sampler for rows of `vocab_size` logits (V).

        Raises:
            InvalidConfigError: unless `1 <= vocab_size <= 2**31`.
        """

    @property
    def vocab_size(self) -> int:
        """V."""

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
        """Draws a token of each row: argmax(x + g) with x the filtered logits, g the Gumbel noise of (seed, position).

        Args:
            logits: `[N, V]`.
            rows: `[N]`.
            positions: `[N]`, of the tokens drawn.
            purpose: one of `PURPOSE_*`.
            tokens: `[N]`, written.
            largest: `[N]`, written: the largest logit, NaN if there is one.
            q: `[B, K, V]`, B >= N; `q[i, column]` gets the probabilities that row i was drawn from.

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
        """Verifies the drafts of B requests: by the rule `rejection` with `q`, by `coupled` without.

        `rejection` (Leviathan et al. 2023, algorithm 1): draft i stands if u * q < p, with the uniform of
        (seed, n + i, `PURPOSE_ACCEPT`); after m drafts the token is drawn with the noise of
        (seed, n + m, `PURPOSE_GUMBEL`), from max(0, p - q) after a rejection. `coupled`: a draft stands while it is
        what its row draws with that noise. Without drafts the rules are the same.

        Args:
            logits: `[N, V]`; row `q_start[b] + i` is for position n + i of request b.
            rows: `[B]`.
            q_start: `[B + 1]`; request b owns at least num_drafts[b] + 1 rows.
            num_tokens: n, `[B]`.
            num_drafts: `[B]`, 0 to K.
            drafts: `[B, K]`; columns from num_drafts on are ignored.
            q: `[B, K, V]`, what the drafts were drawn from; anything in columns from num_drafts on.
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
        """Writes the logits `[N, V]` over their temperature into `out` `[N, V]`, -inf where the filters remove a token.

        These are the cuts of `verify`. Greedy rows are copied. `rows` is `[N]`.

        Raises:
            InvalidBufferError: an array has the wrong dtype, layout, size or content; nothing is written.
        """

def philox_uniform(
    seeds: NDArray[np.int64], positions: NDArray[np.int64], purpose: int, out: NDArray[np.float32]
) -> None:
    """Writes uniforms in (0, 1) into `out` `[N, V]` float32: row r, column t is token t at `(seeds[r], positions[r])`.

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
    """Writes standard Gumbel values `-ln(-ln((word + 0.5) * 2**-32))` into `out` `[N, V]` float32.

    Rows, columns and words as in `philox_uniform`. Computed in float64 from all 32 bits of the word and rounded once,
    so always finite. `philox_uniform` keeps 23 bits, too
    few for the tail: a token of probability 1e-8 would be drawn thirty times too rarely.

    Raises:
        InvalidConfigError: `purpose` is not one of `PURPOSE_*`.
        InvalidBufferError: an array has the wrong dtype, layout or size.
    """

def quantize_weight(
    name: str, weight: NDArray[np.generic], codes: NDArray[np.generic], scales: NDArray[np.uint16]
) -> None:
    """Writes `weight` `[out, in]` (float32, or uint16 with the bits of bfloat16) as codes times scales, each number to
    the nearest, by as many threads as the process may run.

    Args:
        name: what an error calls the weight.
        codes: int8 `[out, in]`, -127 to 127, is INT8; uint8 `[out, in / 2]` is INT4, -7 to 7: of 32 inputs 16 bytes,
            byte i with code + 8 of input i in its lower half and of input 16 + i in its upper half.
        scales: bits of bfloat16. `[out, 1]` for INT8; `[out, groups]` for INT4, groups of a multiple of 32 inputs. A
            scale is the least at which the largest number of its group has a code, so numbers are off by at most half
            of it. Code times scale is exact in float32.

    Raises:
        InvalidBufferError: an array has the wrong dtype, layout or size, or a number is not finite or 2^127 and above.
    """
