"""A planned launch, executed by torch op by op. Plans nothing and settles nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specrs.core import PURPOSE_ACCEPT
from specrs.drafters.base import Drafter, HiddenInputs, device_drafter, drafted_on_host, host_drafts
from specrs.drafters.draft_model import ModelPasses
from specrs.models.base import TorchModel
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache
from specrs.models.torch_arrays import TORCH_DTYPES
from specrs.reference.accept import accept, at_rates, update
from specrs.reference.iteration import Drafted, Scored, draft, place, prepare, verify
from specrs.runner.cuda.entries import Iteration
from specrs.runner.cuda.hidden_rows import HiddenRows
from specrs.runner.cuda.logprobs import entry_logprobs, prompt_logprobs
from specrs.runner.cuda.noise import Noise
from specrs.runner.cuda.prefill import (
    catch_up_inputs,
    caught_up,
    chunk_faults,
    flag_chunks,
    last_chunks,
    last_rows,
    prefill_inputs,
)
from specrs.runner.cuda.row_state import RowState
from specrs.runner.cuda.sampling_state import EntrySampling, SamplingState
from specrs.runner.cuda.slots import Results, TensorSlot
from specrs.runner.cuda.uploads import apply_uploads
from specrs.runner.extras import ExtrasLookup
from specrs.runner.ring import Header
from specrs.verify.synthetic import accept_at_rates


class ReferenceRunner:
    """Runs launches on row state: uploads, prefill chunks, draft catch-up chunks, one decode iteration, in order.

    A drafter that fails ends the launch.
    """

    def __init__(
        self,
        target: TorchModel,
        kv_cache: KVCache,
        drafter: Drafter | None,
        state: RowState,
        sampling: SamplingState,
        *,
        block_size: int,
        rule: str,
        rates: Sequence[float] | None = None,
        logprobs_mode: str,
    ) -> None:
        """`rule` verifies the entries that sample: `rejection` or `coupled`. With `rates` drafts stand at these
        unconditional rates by position, whatever the models say: for timing only."""
        self.target = target
        self.kv_cache = kv_cache
        self.drafter = drafter
        self.state = state
        self.sampling = sampling
        self.block_size = block_size
        self.rule = rule
        self.rates = None if rates is None else torch.tensor(rates, dtype=sampling.params.values.dtype)
        self._noise = Noise(sampling.seeds, sampling.vocab_size, sampling.params.values.dtype)
        self.logprobs_mode = logprobs_mode
        self.num_target_passes = 0
        self.k_start: Tensor | None = None  # [R + 1] int64, from where on a row's drafter reads KV; None: from 0
        self.hidden: HiddenRows | None = None
        if isinstance(drafter, ModelPasses) and drafter.model.sliding_window is not None:
            self.k_start = torch.zeros(state.limit.shape[0], dtype=torch.int64)
        self._behind: tuple[PassInputs, HiddenInputs] | None = None  # a pass that a launch left over
        if drafter is not None and drafter.hidden_layers:
            self.hidden = HiddenRows.allocate(
                state.limit.shape[0] - 1,
                (drafter.max_draft_lag or 0) - device_drafter(drafter).token_offset,
                len(drafter.hidden_layers),
                device_drafter(drafter).hidden_size,
                TORCH_DTYPES[target.states_dtype],
                torch.device("cpu"),
            )

    def launch(self, slot: TensorSlot, header: Header) -> None:
        """Execute the launch planned in `slot.record`; mutates row state, both KV caches and the slot's results."""
        if header.num_admitted:
            self.sampling.remember(slot.views, header.num_admitted)
        self._execute(slot, header)

    @torch.inference_mode()
    def _execute(self, slot: TensorSlot, header: Header) -> None:
        slot.logprobs.clear()
        slot.prompt_logprobs.clear()
        self._feed_behind()
        apply_uploads(self.state, self.sampling, slot.views, slot.views, header)
        if self.hidden is not None and header.num_admitted:
            self.hidden.admit(slot.views, header.num_admitted)
        if self.k_start is not None and header.num_admitted:
            self.k_start.index_fill_(0, slot.views["admit_row"][: header.num_admitted], 0)
        entries = self._prefill(slot, header) if header.num_prefill else None
        if header.num_draft_chunks:
            self._catch_up(slot, header, entries)
        if header.num_decode:
            self._decode(slot, header)

    def use_extras(self, lookup: ExtrasLookup) -> None:
        """Where to find what no record can say of a request."""
        self.sampling.extras = lookup

    def wait(self, slot: TensorSlot) -> None:
        """A launch has ended when it returns."""

    def close(self) -> None:
        """It has nothing to end."""

    def _feed_behind(self) -> None:
        """Feed a drafter that reads hidden states what the prompt chunks of the launch before have left to it."""
        behind, self._behind = self._behind, None
        if behind is not None:
            device_drafter(self.drafter).feed(*behind)

    def _catch_up(self, slot: TensorSlot, header: Header, entries: Tensor | None) -> None:
        """The launch's draft chunks, for a drafter that reads hidden states those of its prompt chunks' `entries`."""
        if self.hidden is not None:
            behind = self.hidden.chunks(self.state, slot.views, slot.views, header, entries)
            self._behind = behind
            caught_up(self.state, slot.views, header)
            return
        views, windowed = slot.views, self.k_start is not None
        inputs = catch_up_inputs(self.state, views, views, header, windowed=windowed)
        if self.k_start is not None:
            chunks = slice(0, header.num_draft_chunks)
            self.k_start.index_copy_(0, views["draft_chunk_row"][chunks], views["draft_chunk_k_start"][chunks])
        if inputs is not None:
            device_drafter(self.drafter).feed(inputs)
        caught_up(self.state, views, header)

    @property
    def _hidden_layers(self) -> tuple[int, ...]:
        return () if self.drafter is None else self.drafter.hidden_layers

    def _prefill(self, slot: TensorSlot, header: Header) -> Tensor | None:
        """The prompt chunks; their hidden states for the drafter, `[num_prefill_tokens, L, hidden]`."""
        inputs = prefill_inputs(self.state, slot.views, slot.views, header)
        hidden, states = self.target.forward(inputs, self.kv_cache, self._hidden_layers)
        self.num_target_passes += 1
        results = slot.results_view.narrow(header.num_decode, header.num_prefill)
        for tensor in results.tensors():
            tensor.zero_()
        prompt_logprobs(slot, header, hidden, self.target.compute_logits, self.state, self.sampling)
        at = last_rows(slot.views, header)
        last = hidden[at]
        if self.target.ends_in_window:
            last += chunk_faults(hidden, slot.views, header)
        flag_chunks(last, results.flags)
        chunks = last_chunks(slot.views, header)
        if not chunks:
            return states
        # The end of a prompt is an iteration without drafts: its last hidden row gives the distribution of position n.
        entries = torch.tensor(chunks, dtype=torch.int64) + header.num_decode
        it = prepare(
            self.state,
            slot.views["entry_row"][entries],
            [0] * len(chunks),
            slot.views["entry_capacity"][entries],
            block_size=self.block_size,
            max_context=int(slot.views["entry_n_upper"][entries].max()),
            drafter=None,
        )
        final = Results(*(torch.empty_like(tensor[: len(chunks)]) for tensor in results.tensors()))
        drafted = Drafted(torch.zeros_like(it.num_tokens), None)
        logits = self.target.compute_logits(last[chunks])
        scored = Scored(logits, it.num_tokens - 1, it.rows.new_empty(len(chunks), 0))
        sampling = self.sampling.for_entries(self.state, it, it.rows.tolist(), slot, header.num_decode)
        self._finish(slot, entries, it, scored, drafted, sampling, final)
        for mine, theirs in zip(results.tensors(), final.tensors(), strict=True):
            mine[chunks] = theirs
        if self.hidden is not None and states is not None:
            self.hidden.keep_last(it.rows, it.num_tokens - 1, states[at[chunks]])
        return states

    def _decode(self, slot: TensorSlot, header: Header) -> None:
        entries = slice(0, header.num_decode)
        mixes = self.drafter is not None and not self.drafter.on_host and len(slot.views["draft_token"]) > 0
        on_host = drafted_on_host(slot.views, header.num_decode) if mixes else None
        it = prepare(
            self.state,
            slot.views["entry_row"][entries],
            slot.views["entry_k"][entries].tolist(),
            slot.views["entry_capacity"][entries],
            block_size=self.block_size,
            max_context=int((slot.views["entry_n_upper"][entries] + slot.views["entry_k"][entries]).max()),
            drafter=self.drafter,
            on_host=on_host,
        )
        sampling = self.sampling.for_entries(self.state, it, it.rows.tolist(), slot)
        if not header.max_k or self.drafter is None:
            drafted = Drafted(torch.zeros_like(it.num_tokens), None)
        elif self.drafter.on_host:
            proposed = host_drafts(slot.views, self.state.limit.shape[0] - 1)[entries, : header.max_k]
            drafted = place(self.state, it, proposed, sampling)
        else:
            if on_host is not None:
                proposed = host_drafts(slot.views, self.state.limit.shape[0] - 1)[entries, : header.max_k]
                place(self.state, it, proposed, sampling, on_host)
            drafter, k_start = device_drafter(self.drafter), self.k_start
            drafted = draft(self.state, it, drafter, sampling, self.rule, on_host, self.hidden, k_start)
        scored = self._verify(it)
        results = slot.results_view.narrow(0, header.num_decode)
        index = torch.arange(header.num_decode)
        self._finish(slot, index, it, scored, drafted, sampling, results)
        if self.hidden is not None and scored.entries is not None:
            self.hidden.keep_verified(self.state, it, scored.entries, on_host)

    def _verify(self, it: Iteration) -> Scored:
        self.num_target_passes += 1
        return verify(self.state, it, self.target, self.kv_cache, self._hidden_layers)

    def _finish(
        self,
        slot: TensorSlot,
        entries: Tensor,
        it: Iteration,
        scored: Scored,
        drafted: Drafted,
        sampling: EntrySampling,
        results: Results,
    ) -> None:
        verdict = accept(it, scored, drafted, sampling)
        if self.rates is not None and it.max_k:
            at = it.num_tokens[:, None] + torch.arange(it.max_k)
            uniforms = self._noise.uniform(it.rows, at, PURPOSE_ACCEPT)
            verdict = at_rates(
                self.state, it, verdict, accept_at_rates(self.rates[: it.max_k], uniforms, it.num_drafts)
            )
        if sampling.grammar is not None:
            sampling.grammar.finish()
        update(self.state, it, verdict, drafted, results, sampling.min_len)
        if sampling.num_logprobs is not None:
            slot.logprobs.update(
                entry_logprobs(
                    self.logprobs_mode, entries.tolist(), scored.logits, verdict.adjusted, verdict.tokens, sampling
                )
            )
