"""What the rows of a launch ask of sampling: parameters, seeds, masks. Holds them per row; draws and accepts nothing.

Parameters live in tensors for a row's whole life. Masks, biases and words are kept on the host and stacked for the
launches that need them: few requests have any, and a dense mask is as wide as the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specrs.runner.grammar import LaunchGrammar
from specrs.runner.samplers import CoreSampler, RowSampler, TorchSampler
from specrs.transfer import to_device
from specrs.verify.history import context_rows, count_tokens, pack_bad_words
from specrs.verify.params import SamplingRows, Steps
from specrs.verify.processing import Constraints, adjust_logits

if TYPE_CHECKING:
    from specrs.engine.request import Request
    from specrs.runner.iteration import Iteration
    from specrs.runner.row_state import RowState


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Masks and biases of one request, on the host until a launch needs them; None where it has none."""

    forbidden: Tensor | None  # [V] bool, outside allowed_token_ids
    bias_ids: list[int]
    bias: list[float]
    bad_words: Sequence[Sequence[int]]

    @classmethod
    def of(cls, request: Request, vocab_size: int) -> RowMasks | None:
        """The masks that the request's parameters ask for."""
        params = request.params
        forbidden = None
        if params.allowed_token_ids is not None:
            forbidden = torch.ones(vocab_size, dtype=torch.bool)
            forbidden[list(params.allowed_token_ids)] = False
        bias = params.logit_bias or {}
        if forbidden is None and not bias and not request.bad_words_token_ids:
            return None
        return cls(forbidden, [int(i) for i in bias], [float(b) for b in bias.values()], request.bad_words_token_ids)


class SamplingState:
    """Sampling parameters of every row, R = max_num_seqs rows and the padding row."""

    def __init__(self, max_num_seqs: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """`dtype` is that of the target's logits."""
        self.vocab_size = vocab_size
        self.params = SamplingRows.allocate(max_num_seqs + 1, dtype=dtype, device=device)
        self.seeds = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        core = dtype == torch.float32 and device.type == "cpu"
        make: type[CoreSampler | TorchSampler] = CoreSampler if core else TorchSampler
        self.sampler: RowSampler = make(self.params, self.seeds, vocab_size)
        self.prompt_len = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self._steps = [Steps(greedy=True)] * (max_num_seqs + 1)
        self._masks: dict[int, RowMasks] = {}
        self._requests: dict[int, Request] = {}

    def admit(self, row: int, request: Request) -> None:
        """Take over a request's parameters for the row it was admitted into; mutates the row's entries."""
        p = request.params
        self._requests[row] = request
        self.seeds[row].fill_(request.seed)
        self.prompt_len[row].fill_(len(request.prompt_token_ids))
        self._steps[row] = self.params.write(
            row,
            temperature=p.temperature,
            top_k=p.top_k,
            top_p=p.top_p,
            min_p=p.min_p,
            repetition_penalty=p.repetition_penalty,
            presence_penalty=p.presence_penalty,
            frequency_penalty=p.frequency_penalty,
        )
        self._masks.pop(row, None)
        masks = RowMasks.of(request, self.vocab_size)
        if masks is not None:
            self._masks[row] = masks

    def request(self, row: int) -> Request:
        """The request that was last admitted into `row`."""
        return self._requests[row]

    def steps(self, rows: Sequence[int]) -> Steps:
        """The steps that some of these rows need."""
        steps = self._steps[rows[0]]
        for row in rows[1:]:
            steps = steps | self._steps[row]
        return steps

    def is_plain(self, rows: Sequence[int]) -> bool:
        """Whether these rows ask for nothing between logits and draw but temperature, top_k, top_p and min_p, and for
        no log probabilities."""
        return not any(
            self._steps[row].penalties
            or row in self._masks
            or self._requests[row].matcher is not None
            or self._requests[row].params.min_tokens
            or self._requests[row].params.logprobs is not None
            for row in rows
        )

    def for_entries(self, state: RowState, it: Iteration, rows: Sequence[int]) -> EntrySampling:
        """What the entries of an iteration ask for; mutates nothing. `rows` are `it.rows`, known to the host."""
        steps = self.steps(rows)
        requests = [self._requests[row] for row in rows]
        masks = [self._masks.get(row) for row in rows]
        grammars = [request.matcher for request in requests]
        tops = [request.params.logprobs for request in requests if request.params.logprobs is not None]
        return EntrySampling(
            state=state,
            it=it,
            steps=steps,
            params=self.params,
            sampler=self.sampler,
            prompt_len=self.prompt_len,
            masks=self._stack(masks) if any(masks) else None,
            mask_stops=any(request.params.min_tokens for request in requests),
            grammar=LaunchGrammar(grammars, it.max_k, self.vocab_size) if any(grammars) else None,
            num_logprobs=None if not tops else self.vocab_size if -1 in tops else max(tops),
            vocab_size=self.vocab_size,
        )

    def _stack(self, masks: Sequence[RowMasks | None]) -> Constraints:
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
class EntrySampling:
    """What B entries of one launch ask for, and what that makes of logits `[N, V]` of their flat rows."""

    state: RowState
    it: Iteration
    steps: Steps
    params: SamplingRows  # of all rows, [R+1, 1]; what a step needs is selected where it runs
    sampler: RowSampler
    prompt_len: Tensor  # of all rows, [R+1]
    masks: Constraints | None  # of B entries; forbidden, bad_words, bias
    mask_stops: bool
    grammar: LaunchGrammar | None
    num_logprobs: int | None  # most top logprobs that an entry wants; None if none wants any
    vocab_size: int

    def adjust(self, logits: Tensor, entries: Tensor, positions: Tensor, forbidden: Tensor | None = None) -> Tensor:
        """Masks, biases and penalties of flat rows; logits `[N, V]` are not mutated.

        Args:
            entries: entry of each flat row, `[N]` int64.
            positions: position that each flat row gives the distribution of, `[N]` int64; its history is every token
                before it, drafts included.
            forbidden: `[N, V]` bool from a grammar.
        """
        steps = self.steps
        if not self.adjusts and forbidden is None:
            return logits
        rows = self.it.rows[entries]
        counts = None
        if steps.penalties:
            history = self.state.tokens[rows, : self.it.max_context]
            counts = count_tokens(history, positions, self.prompt_len[rows], self.vocab_size)
        return adjust_logits(
            logits,
            self.params.select(rows),
            steps,
            constraints=self._constraints(entries, rows, positions, forbidden),
            counts=counts,
        )

    def filter(self, adjusted: Tensor, entries: Tensor) -> Tensor:
        """Temperature, min_p, top_k, top_p of flat rows `[N, V]`; greedy rows stay as they are."""
        return self.sampler.filter(adjusted, self.it.rows[entries], self.steps)

    @property
    def adjusts(self) -> bool:
        """Whether an entry has a mask, a bias or a penalty."""
        return bool(self.steps.penalties or self.masks or self.mask_stops or self.grammar)

    @property
    def dtype(self) -> torch.dtype:
        """That of the logits."""
        return self.params.values.dtype

    def _constraints(
        self, entries: Tensor, rows: Tensor, positions: Tensor, forbidden: Tensor | None
    ) -> Constraints | None:
        masks = self.masks
        if masks is None and not self.mask_stops and forbidden is None:
            return None
        bad_words = context = bias_ids = bias = stop_ids = stops_forbidden = None
        if masks is not None:
            if masks.forbidden is not None:
                own = masks.forbidden[entries]
                forbidden = own if forbidden is None else forbidden | own
            if masks.bad_words is not None:
                bad_words = masks.bad_words[entries]
                context = context_rows(self.state.tokens, rows, positions, bad_words.shape[2] - 1)
            if masks.bias_ids is not None and masks.bias is not None:
                bias_ids, bias = masks.bias_ids[entries], masks.bias[entries]
        if self.mask_stops:
            stop_ids = self.state.stop_ids[rows]
            stops_forbidden = positions < self.state.min_len[rows]
        return Constraints(forbidden, bad_words, context, stop_ids, stops_forbidden, bias_ids, bias)
