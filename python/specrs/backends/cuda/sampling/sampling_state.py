"""Sampling parameters, seeds and masks of the requests in each state row. Draws and accepts nothing.

All of them come from records. Parameters are in tensors as long as a row lives. Masks, biases and bad words stay on the
host, because few requests have any and a mask is as wide as the vocabulary. They are stacked for the steps that need
them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specrs.backends.cuda.row_state import RowState
from specrs.backends.cuda.sampling.grammar import PackedMasks, StepGrammar
from specrs.backends.cuda.sequences import Iteration
from specrs.backends.cuda.slots import TensorSlot
from specrs.backends.extras import ExtrasLookup, no_extras
from specrs.core import LOGPROBS_ALL, LOGPROBS_NONE, PARAM_COLUMNS, RequestSampling
from specrs.errors import EngineError
from specrs.parallel.ranks import Ranks
from specrs.structured.matcher import GrammarMatcher
from specrs.transfer import to_device
from specrs.verify.history import context_rows, count_tokens, pack_bad_words
from specrs.verify.params import SamplingRows, Steps
from specrs.verify.processing import Constraints, adjust_logits, filter_logits, leaves_only_stops

Views = Mapping[str, Tensor]


ADJUSTED_ROWS = 256
"""Maximum number of flat rows whose logits are adjusted at the same time."""
_BYTES_PER_LOGIT = 32
"""Bytes that adjusting a logit takes at most, on top of the result: two int32 counts, a mask, and five fp32 numbers."""


def adjusting_bytes(rows: int, vocab_size: int) -> int:
    """Return the bytes that adjusting `rows` rows of logits takes on the device, the result included."""
    return (4 * rows + _BYTES_PER_LOGIT * min(rows, ADJUSTED_ROWS)) * vocab_size


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Masks and biases of one request, on the host until a step needs them."""

    forbidden: Tensor | None  # [V] bool, True outside allowed_token_ids; None: all are allowed
    bias_ids: list[int]
    bias: list[float]
    bad_words: Sequence[Sequence[int]]

    @classmethod
    def read(cls, host: Views, i: int, vocab_size: int) -> RowMasks:
        """Return the constraints of the request that a record admits as number i."""
        num_allowed, num_biases, num_words = (
            int(host[name][i]) for name in ("admit_num_allowed", "admit_num_biases", "admit_num_bad_words")
        )
        start, end = host["admit_constraint_start"][i : i + 2].tolist()
        sizes = [max(num_allowed, 0), num_biases, num_biases, num_words]
        sizes.append(end - start - sum(sizes))
        allowed, bias_ids, bias, lengths, tokens = host["constraint"][start:end].split_with_sizes(sizes)
        forbidden = None
        if num_allowed >= 0:
            forbidden = torch.ones(vocab_size, dtype=torch.bool).index_fill_(0, allowed, False)
        words = [word.tolist() for word in tokens.split_with_sizes(lengths.tolist())] if num_words else []
        return cls(forbidden, bias_ids.tolist(), bias.view(torch.float64).tolist(), words)


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Fields, kept on the host, of the request that was last admitted into a row."""

    request_id: int
    prompt_len: int
    steps: int  # bits of `specrs.core.STEPS`
    logprobs: int  # number of top tokens, LOGPROBS_ALL or LOGPROBS_NONE
    prompt_logprobs: int
    masks: RowMasks | None = None


def _needs_logits(steps: Steps) -> bool:
    """Return whether steps change logits or report them, other than by temperature, top_k, top_p and min_p."""
    return bool(steps.penalties or steps.constraints or steps.min_tokens or steps.logprobs or steps.extras)


class SamplingState:
    """Sampling parameters of every row: R = max_num_seqs rows and the padding row."""

    def __init__(self, max_num_seqs: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Start with greedy rows. `dtype` is that of the target's logits."""
        self.vocab_size = vocab_size
        self.params = SamplingRows.allocate(max_num_seqs + 1, dtype=dtype, device=device)
        self.seeds = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self.prompt_len = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        _, greedy = RequestSampling(temperature=0.0).columns("float32")
        self._rows = [RowSampling(-1, 0, greedy, LOGPROBS_NONE, LOGPROBS_NONE)] * (max_num_seqs + 1)
        self._needing_host: set[int] = set()  # rows for which `needs_host` is True
        self.extras: ExtrasLookup = no_extras
        self.ranks: Ranks | None = None  # rank 0 alone has extras

    def admit(self, device: Views, count: int) -> None:
        """Copy the parameters of a record's `count` admitted requests from its sections on the device. Mutates their
        rows. `remember` keeps what is in no tensor."""
        rows, params = device["admit_row"][:count], device["admit_params"].view(torch.float64)
        self.seeds.index_copy_(0, rows, device["admit_seed"][:count])
        self.prompt_len.index_copy_(0, rows, device["admit_prompt_len"][:count])
        values = self.params.values
        values.index_copy_(0, rows, params.view(-1, len(PARAM_COLUMNS))[:count].to(values.dtype))

    def remember(self, host: Views, count: int) -> None:
        """Store on the host what tensors do not hold of a record's `count` admitted requests, from its sections on the
        host."""
        told = ("admit_row", "admit_request_id", "admit_prompt_len", "admit_steps", "admit_logprobs")
        columns = [host[name][:count].tolist() for name in (*told, "admit_prompt_logprobs")]
        for i, (row, request_id, prompt_len, steps, logprobs, prompt_logprobs) in enumerate(zip(*columns, strict=True)):
            masks = RowMasks.read(host, i, self.vocab_size) if Steps.of(steps).constraints else None
            self._rows[row] = RowSampling(request_id, prompt_len, steps, logprobs, prompt_logprobs, masks)
            needs_host = _needs_logits(Steps.of(steps)) or prompt_logprobs != LOGPROBS_NONE
            (self._needing_host.add if needs_host else self._needing_host.discard)(row)

    def row(self, row: int) -> RowSampling:
        """Return what the host stores of the request that was last admitted into `row`."""
        return self._rows[row]

    def steps(self, rows: Sequence[int]) -> Steps:
        """Return the sampling steps that any of these rows needs."""
        return Steps.of(functools.reduce(operator.or_, (self._rows[row].steps for row in rows)))

    def needs_logits(self, rows: Sequence[int]) -> bool:
        """Return whether a row wants log probabilities, or any step between logits and sampling other than
        temperature, top_k, top_p and min_p."""
        return _needs_logits(self.steps(rows))

    def needs_host(self, rows: NDArray[np.int64]) -> bool:
        """Return whether a row needs logits (`needs_logits`) or wants prompt log probabilities. Fast, because it runs
        in every step: without rows that need the host, it looks at none."""
        return bool(self._needing_host) and not self._needing_host.isdisjoint(rows.tolist())

    def matcher(self, row: int) -> GrammarMatcher | None:
        """Return the grammar of the request in `row`; None if it has none, and on ranks other than 0.

        Raises:
            EngineError: the record marks extras, but there are none. A record alone cannot be replayed then.
        """
        request = self._rows[row]
        if not Steps.of(request.steps).extras or (self.ranks is not None and self.ranks.rank > 0):
            return None
        extras = self.extras(request.request_id)
        if extras is None:
            raise EngineError(f"request {request.request_id}: the step needs its extras, which are in no record")
        return extras.matcher

    def for_sequences(
        self, state: RowState, it: Iteration, rows: Sequence[int], slot: TensorSlot, first: int = 0
    ) -> SequenceSampling:
        """Return the adjustments that the sequences of an iteration need. `rows` are `it.rows` on the host. `first` is
        the step's index of the first sequence. `slot` has memory for grammar masks."""
        steps, grammar = self.steps(rows), None
        if steps.extras:
            matchers = [self.matcher(row) for row in rows]
            words = slot.grammar_masks(first, len(rows), it.max_k + 1, StepGrammar.words(self.vocab_size))
            has_grammar = [Steps.of(self._rows[row].steps).extras for row in rows]
            grammar = StepGrammar(matchers, has_grammar, words, self.vocab_size, self.ranks)
        tops = [self._rows[row].logprobs for row in rows] if steps.logprobs else []
        return SequenceSampling(
            state=state,
            it=it,
            steps=steps,
            params=self.params,
            prompt_len=self.prompt_len,
            masks=self._stack([self._rows[row].masks for row in rows]) if steps.constraints else None,
            grammar=grammar,
            num_logprobs=None if not tops else self.vocab_size if LOGPROBS_ALL in tops else max(tops),
            vocab_size=self.vocab_size,
            min_len=self._min_len(state, it, rows) if steps.extras and steps.min_tokens else None,
        )

    def _min_len(self, state: RowState, it: Iteration, rows: Sequence[int]) -> Tensor:
        """Return the positions from which stop ids count, `[B]` int64: 0 for sequences with a grammar.

        `SequenceSampling.adjust` masks their stop ids before `min_tokens`, unless the grammar allows nothing else. So a
        stop id that is drawn there must end the request.
        """
        has_grammar = torch.tensor([Steps.of(self._rows[row].steps).extras for row in rows])
        return state.min_len.index_select(0, it.rows).masked_fill_(to_device(has_grammar, it.rows.device), 0)

    def _stack(self, masks: Sequence[RowMasks | None]) -> Constraints:
        """Stack the masks and biases of B sequences on the device."""
        dtype = self.params.temperature.dtype
        some = [m for m in masks if m is not None]
        forbidden = bad_words = bias_ids = bias = None
        if any(m.forbidden is not None for m in some):
            none = torch.zeros(self.vocab_size, dtype=torch.bool)
            forbidden = torch.stack([none if m is None or m.forbidden is None else m.forbidden for m in masks])
        if any(m.bad_words for m in some):
            count = max(len(m.bad_words) for m in some)
            length = max(len(word) for m in some for word in m.bad_words)
            bad_words = torch.stack([pack_bad_words(m.bad_words if m else (), count, length) for m in masks])
        if any(m.bias_ids for m in some):
            width = max(len(m.bias_ids) for m in some)
            bias_ids = torch.zeros((len(masks), width), dtype=torch.int64)
            bias = torch.zeros((len(masks), width), dtype=dtype)
            for i, m in enumerate(masks):
                if m is not None and m.bias_ids:
                    bias_ids[i, : len(m.bias_ids)] = torch.tensor(m.bias_ids)
                    bias[i, : len(m.bias)] = torch.tensor(m.bias, dtype=dtype)
        made = (forbidden, bad_words, bias_ids, bias)
        forbidden, bad_words, bias_ids, bias = (None if t is None else to_device(t, self.seeds.device) for t in made)
        return Constraints(forbidden=forbidden, bad_words=bad_words, bias_ids=bias_ids, bias=bias)


@dataclass(frozen=True, slots=True)
class SequenceSampling:
    """Adjustments for B sequences of one step, applied to logits `[N, V]` of their flat rows."""

    state: RowState
    it: Iteration
    steps: Steps
    params: SamplingRows  # [R+1] rows; sampling steps select the rows that they need
    prompt_len: Tensor  # [R+1] int64
    masks: Constraints | None  # [B] rows of forbidden, bad_words and bias; None: no sequence has any
    grammar: StepGrammar | None
    num_logprobs: int | None  # largest number of top logprobs of a sequence; None if none wants any
    vocab_size: int
    min_len: Tensor | None = None  # [B] int64, positions from which stop ids count; None: those of row state

    def adjust(self, logits: Tensor, sequences: Tensor, positions: Tensor, masks: PackedMasks | None = None) -> Tensor:
        """Return logits `[N, V]` of flat rows with masks, biases and penalties applied. The argument is not mutated.

        More than `ADJUSTED_ROWS` rows are adjusted one part after the other, which bounds the memory.

        Args:
            sequences: sequence of each flat row, `[N]` int64.
            positions: position whose token each flat row predicts, `[N]` int64. Its history is every token before it,
                drafts included.
            masks: of grammars.
        """
        if not self.adjusts and masks is None:
            return logits
        if len(logits) <= ADJUSTED_ROWS:
            return self._adjust(logits, sequences, positions, slice(0, len(logits)), masks)
        out = torch.empty_like(logits)
        for first in range(0, len(logits), ADJUSTED_ROWS):
            part = slice(first, min(first + ADJUSTED_ROWS, len(logits)))
            out[part] = self._adjust(logits[part], sequences[part], positions[part], part, masks)
        return out

    def _adjust(
        self, logits: Tensor, sequences: Tensor, positions: Tensor, part: slice, masks: PackedMasks | None
    ) -> Tensor:
        """Adjust the flat rows of `part`."""
        steps, forbidden = self.steps, None if masks is None else masks.forbidden(part)
        rows = self.it.rows[sequences]
        counts = None
        if steps.penalties:
            history = self.state.tokens[rows, : self.it.max_context]
            counts = count_tokens(history, positions, self.prompt_len[rows], self.vocab_size)
        return adjust_logits(
            logits,
            self.params.select(rows),
            steps,
            constraints=self._constraints(sequences, rows, positions, forbidden),
            counts=counts,
        )

    def filter(self, adjusted: Tensor, sequences: Tensor) -> Tensor:
        """Return logits `[N, V]` of flat rows with temperature, min_p, top_k and top_p applied. Greedy rows do not
        change."""
        return filter_logits(adjusted, self.params.select(self.it.rows[sequences]), self.steps)

    @property
    def adjusts(self) -> bool:
        """True if some sequence has a mask, a bias or a penalty."""
        return bool(self.steps.penalties or self.steps.constraints or self.steps.min_tokens or self.grammar)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the logits."""
        return self.params.values.dtype

    def _constraints(
        self, sequences: Tensor, rows: Tensor, positions: Tensor, forbidden: Tensor | None
    ) -> Constraints | None:
        """Return the masks and biases of flat rows; None if no sequence has any."""
        masks = self.masks
        if masks is None and not self.steps.min_tokens and forbidden is None:
            return None
        bad_words = context = bias_ids = bias = stop_ids = stops_forbidden = None
        if self.steps.min_tokens:
            stop_ids = self.state.stop_ids[rows]
            stops_forbidden = positions < self.state.min_len[rows]
            if forbidden is not None:
                stops_forbidden &= ~leaves_only_stops(forbidden, stop_ids)
        if masks is not None:
            if masks.forbidden is not None:
                own = masks.forbidden[sequences]
                forbidden = own if forbidden is None else forbidden | own
            if masks.bad_words is not None:
                bad_words = masks.bad_words[sequences]
                context = context_rows(self.state.tokens, rows, positions, bad_words.shape[2] - 1)
            if masks.bias_ids is not None and masks.bias is not None:
                bias_ids, bias = masks.bias_ids[sequences], masks.bias[sequences]
        return Constraints(forbidden, bad_words, context, stop_ids, stops_forbidden, bias_ids, bias)
