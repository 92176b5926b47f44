"""Fields of a record by name. Generated from the core's names: run `make generate` after a change in Rust."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)  # not frozen: that takes three times as long to make, twice a step
class HeaderFields:
    """Counts of one step, the first elements of its record, in the order of `specrs.core.HEADER_FIELDS`."""

    step_id: int
    """Id of the step. Steps are numbered from 0."""
    num_decode: int
    """Decoding sequences. They come first."""
    num_prefill: int
    """Prefill sequences, after the decoding sequences."""
    num_prefill_tokens: int
    """Tokens of all prefill chunks."""
    num_draft_chunks: int
    """Draft catch-up chunks, including chunks of length 0."""
    num_draft_tokens: int
    """Tokens of all draft catch-up chunks."""
    num_admitted: int
    """Requests that get their row in this step."""
    num_upload_tokens: int
    """Tokens of the admitted requests, all of them uploaded."""
    num_block_updates: int
    """Block table entries to set."""
    max_k: int
    """Largest K among the decoding sequences of this step."""
    num_preempted: int
    """Requests that lost their row in this plan."""
    num_constraints: int
    """Elements of the admitted requests' constraints."""
    num_snapshots: int
    """Snapshots of states that the step may write."""
    used_len: int
    """Elements of the record up to the last one that this step reads."""


@dataclass(frozen=True, slots=True)
class StepFlags:
    """Steps of sampling that some row of a batch needs, by the names of `specrs.core.SAMPLING_STEPS`."""

    greedy: bool = False
    """Take the largest logit."""
    random: bool = False
    """Draw a token at random."""
    temperature: bool = False
    """Divide the logits by a temperature."""
    top_k: bool = False
    """Keep the k largest logits."""
    top_p: bool = False
    """Keep the largest logits that hold a share of the probability."""
    min_p: bool = False
    """Keep the tokens that are likely enough compared with the most likely one."""
    repetition: bool = False
    """Apply a repetition penalty."""
    counts: bool = False
    """Apply a presence or frequency penalty."""
    constraints: bool = False
    """Apply allowed ids, biases or bad words."""
    min_tokens: bool = False
    """Exclude stop tokens before `min_tokens`."""
    logprobs: bool = False
    """Report log probabilities."""
    extras: bool = False
    """Apply what no record can hold, such as a grammar."""
    pooling: bool = False
    """Report the final hidden state of the prompt's last token, or its logits of the allowed ids. Draw no token."""


class ParamColumns(Generic[T]):
    """Sampling parameters of rows, a `T` for each column, in the order of `specrs.core.PARAM_COLUMNS`."""

    __slots__ = ()

    def column(self, index: int) -> T:
        """Return column `index`."""
        raise NotImplementedError

    @property
    def greedy(self) -> T:
        """1 in greedy rows, else 0. Greedy rows have temperature 1 and no filter."""
        return self.column(0)

    @property
    def temperature(self) -> T:
        """Divisor of the logits, above 0. 1 is off."""
        return self.column(1)

    @property
    def top_k(self) -> T:
        """Number of tokens to keep, at least 1. Infinity is off. fp32 counts up to 2^24."""
        return self.column(2)

    @property
    def top_p(self) -> T:
        """Share of probability to keep, in (0, 1). Infinity is off."""
        return self.column(3)

    @property
    def log_min_p(self) -> T:
        """`ln(min_p)`. Minus infinity is off."""
        return self.column(4)

    @property
    def repetition_penalty(self) -> T:
        """Repetition penalty, above 0. 1 is off."""
        return self.column(5)

    @property
    def presence_penalty(self) -> T:
        """Presence penalty. 0 is off."""
        return self.column(6)

    @property
    def frequency_penalty(self) -> T:
        """Frequency penalty. 0 is off."""
        return self.column(7)
