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
from specrs.backends.cuda.sampling.asked import AskedPlan, RowMasks, RowSampling
from specrs.backends.cuda.sampling.grammar import StepGrammar
from specrs.backends.cuda.sequences import Iteration
from specrs.backends.cuda.slots import TensorSlot
from specrs.backends.extras import ExtrasLookup, no_extras
from specrs.core import LOGPROBS_ALL, LOGPROBS_NONE, PARAM_COLUMNS, RequestSampling
from specrs.errors import EngineError
from specrs.kernels.cuda.adjust_logits import AskedRows, History, adjust
from specrs.kernels.cuda.sampling_scratch import SamplingScratch
from specrs.parallel.ranks import Ranks
from specrs.structured.matcher import GrammarMatcher
from specrs.transfer import to_device
from specrs.verify.params import SamplingRows, Steps
from specrs.verify.processing import filter_logits

Views = Mapping[str, Tensor]


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
        self._planned: tuple[tuple[int, ...], tuple[RowSampling, ...], AskedPlan | None] | None = None
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
        """Store on the host those parameters of a record's `count` admitted requests that no tensor holds. Reads the
        record's sections in host memory."""
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
        requests = tuple(self._rows[row] for row in rows)
        if steps.extras:
            matchers = [self.matcher(row) for row in rows]
            words = slot.grammar_masks(first, len(rows), it.max_k + 1, StepGrammar.words(self.vocab_size))
            has_grammar = [Steps.of(request.steps).extras for request in requests]
            grammar = StepGrammar(matchers, has_grammar, words, self.ranks)
        return SequenceSampling(
            state=state,
            it=it,
            steps=steps,
            params=self.params,
            prompt_len=self.prompt_len,
            plan=self._plan(it.planned, requests),
            grammar=grammar,
            logprobs={
                i: self.vocab_size if request.logprobs == LOGPROBS_ALL else request.logprobs
                for i, request in enumerate(requests)
                if request.logprobs != LOGPROBS_NONE
            },
            min_len=self._min_len(state, it, rows) if steps.extras and steps.min_tokens else None,
        )

    def _plan(self, planned: tuple[int, ...], requests: tuple[RowSampling, ...]) -> AskedPlan | None:
        """Return what the sequences ask. Kept until the next call, because a steady batch asks the same step after
        step."""
        if self._planned is None or self._planned[:2] != (planned, requests):
            made = AskedPlan.of(planned, requests, self.vocab_size, self.seeds.device)
            self._planned = planned, requests, made
        return self._planned[2]

    def _min_len(self, state: RowState, it: Iteration, rows: Sequence[int]) -> Tensor:
        """Return the positions from which stop ids count, `[B]` int64: 0 for sequences with a grammar.

        `SequenceSampling.adjust` masks their stop ids before `min_tokens`, unless the grammar allows nothing else. So a
        stop id that is drawn there must end the request.
        """
        has_grammar = torch.tensor([Steps.of(self._rows[row].steps).extras for row in rows])
        return state.min_len.index_select(0, it.rows).masked_fill_(to_device(has_grammar, it.rows.device), 0)


@dataclass(frozen=True, slots=True)
class SequenceSampling:
    """Adjustments for B sequences of one step. They are applied to the flat rows of logits whose requests ask for
    them."""

    state: RowState
    it: Iteration
    steps: Steps
    params: SamplingRows  # [R+1] rows
    prompt_len: Tensor  # [R+1] int64
    plan: AskedPlan | None  # None: no sequence has a mask, a bias or a penalty
    grammar: StepGrammar | None
    logprobs: Mapping[int, int]  # for each sequence that wants log probabilities, its number of top tokens
    min_len: Tensor | None = None  # [B] int64, positions from which stop ids count; None: those of row state

    def adjust(
        self,
        logits: Tensor,
        positions: Tensor,
        rows: AskedRows,
        n: Tensor,
        masks: Tensor | None,
        scratch: SamplingScratch,
    ) -> Tensor:
        """Apply masks, biases and penalties to `rows` of logits `[N, V]`, in place. Returns the largest logit that each
        of these M rows had before, `[M]` fp32.

        Args:
            positions: position whose token each flat row predicts, `[N]` int64. Its history is every token before it,
                drafts included.
            n: number of committed tokens of each sequence, `[B]` int64.
            masks: of grammars, for the rows that have one.
        """
        assert self.plan is not None
        top = torch.empty(len(rows.row), dtype=torch.float32, device=logits.device)
        state = self.state
        history = History(
            row=self.it.rows,
            n=n,
            tokens=state.tokens,
            prompt_len=self.prompt_len,
            stop_ids=state.stop_ids,
            min_len=state.min_len,
            values=self.params.values,
            max_context=self.it.max_context if self.plan.penalised else 0,
        )
        adjust(logits, positions, self.plan.asked, rows, masks, history, top, scratch)
        return top

    def filter(self, adjusted: Tensor, sequences: Tensor) -> Tensor:
        """Return logits `[N, V]` of flat rows with temperature, min_p, top_k and top_p applied. Greedy rows do not
        change."""
        return filter_logits(adjusted, self.params.select(self.it.rows[sequences]), self.steps)
