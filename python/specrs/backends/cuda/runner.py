"""CUDA runner: enqueues a planned step and the copy of its results. Plans nothing, waits for nothing.

A decode iteration is one graph if its shape has one (whole). Otherwise it is one graph per pass, with single ops
between the graphs (chained). Without graphs (eager) it is also chained, with passes run op by op. Eager shapes are
padded to the same sizes as graphs, for which kernels are compiled at the start. All three kinds call the same functions
on the same buffers. Steps that need masks, penalties, grammars or log probabilities between logits and sampling run
chained.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specrs.backends.cuda.adapters import Adapters
from specrs.backends.cuda.adjusted import accept_adjusted, draft_adjusted, sequence_sampling
from specrs.backends.cuda.chunk_passes import ChunkPasses
from specrs.backends.cuda.context import Context, sequences_of
from specrs.backends.cuda.drafting import draft_pass
from specrs.backends.cuda.graphs import Graphs, Uncaptured
from specrs.backends.cuda.hidden_rows import HiddenInputs
from specrs.backends.cuda.iteration import accept_and_update, assemble, lm_head, prepare, verify_pass
from specrs.backends.cuda.prefill import (
    catch_up_inputs,
    caught_up,
    chunk_faults,
    flag_chunks,
    last_chunks,
    last_rows,
    prefill_inputs,
)
from specrs.backends.cuda.sampling.grammar import StepGrammar
from specrs.backends.cuda.sampling.logprobs import prompt_logprobs
from specrs.backends.cuda.sampling.sampling_state import SamplingState, SequenceSampling
from specrs.backends.cuda.shapes import Buckets, LogitsMode, MergedShape, Shape
from specrs.backends.cuda.slots import TensorSlot, blocks_of, drafted_on_host, host_drafts
from specrs.backends.cuda.step_costs import replayed_costs
from specrs.backends.cuda.uploads import apply_uploads
from specrs.backends.extras import ExtrasLookup
from specrs.backends.ring import Header, RingSlot
from specrs.core import CostModel
from specrs.drafters.base import DrafterCounts
from specrs.drafters.host import OnHost
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache
from specrs.transfer import to_device


@dataclass(frozen=True, slots=True)
class Decoding:
    """The decoding sequences of a step, by K descending, as in its record."""

    rows: list[int]
    """State row of each sequence."""
    ks: list[int]
    """Number of drafts of each sequence."""
    on_host: list[bool]
    """For each sequence, True if the record has its drafts."""
    depth: int
    """Maximum number of drafts of a sequence for which `on_host` is False; 0 if there is none."""


@dataclass(frozen=True, slots=True)
class Work:
    """Graphs and passes for steps of one kind: with a LoRA adapter in some sequence, or with none."""

    ctx: Context
    graphs: Graphs | Uncaptured


class CudaRunner:
    """Runner of steps on one CUDA stream.

    A step enqueues, in this order:

    - uploads of new requests and changed rows
    - prompt chunks, in a pass of their own
    - the draft model's catch-up chunks
    - one decode iteration: drafts, verification, sampling
    - the copy of the results to the host
    - a head's pass over the prompt chunks

    If the buckets have a graph for it, prompt chunks are rows of the verification pass and get no pass of their own.
    """

    def __init__(
        self,
        ctx: Context,
        sampling: SamplingState,
        buckets: Buckets,
        graphs: Graphs | Uncaptured,
        *,
        logprobs_mode: str,
        loras: Adapters | None = None,
        plain: Work | None = None,
    ) -> None:
        """Make a runner of `graphs` over `ctx`. `loras` are the LoRA adapters of requests; None: no request has one.
        `plain` has the graphs and passes of steps without LoRA adapters. None: `graphs` serve all steps."""
        self.buckets = buckets
        self.adapted, self.plain = Work(ctx, graphs), plain
        self._use(self.adapted)
        self.sampling = sampling
        self.logprobs_mode = logprobs_mode
        self.loras = loras
        self.num_target_passes = 0
        self._on_host = None if ctx.proposed is None else OnHost()
        self._decoding_sequences = sequences_of(ctx.record.views, "num_decode")
        device = ctx.state.tokens.device
        # Triton's interpreter runs the same code on a CPU, where there are no streams.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self._stream is not None:
            # Weights and zeroed buffers were enqueued on another stream, which this one does not wait for by itself.
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._warned = False

    def _work(self, *, has_lora: bool) -> Work:
        """Return the work of steps in which a sequence has a LoRA adapter, or of steps in which none has."""
        return self.adapted if has_lora or self.plain is None else self.plain

    def _use(self, work: Work) -> None:
        """Let the following steps run `work`."""
        self.ctx, self.graphs = work.ctx, work.graphs
        self._chunks = ChunkPasses(work.ctx, self.buckets, work.graphs)

    def _on_stream(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    @property
    def drafter(self) -> DrafterCounts | None:
        """The drafter, with its count of passes. None without speculation."""
        return self.ctx.drafter or self._on_host

    @property
    def supports_pooling(self) -> bool:
        """False: steps on a GPU return no hidden states."""
        return False

    @property
    def is_native(self) -> bool:
        """False, because a step is a chain of kernels."""
        return False

    @torch.inference_mode()
    def step_costs(self, *, on_host: bool, has_lora: bool = False) -> CostModel | None:
        """Return the milliseconds of steps by batch and K, from replays without sequences. With `has_lora`, all rows of
        these have the adapter of slot 0. None without graphs, or without adapters. Clears the device's record."""
        if has_lora and self.loras is None:
            return None
        graphs = self._work(has_lora=has_lora).graphs
        adapted = self.loras.in_all_rows() if has_lora and self.loras is not None else contextlib.nullcontext()
        with self._on_stream(), adapted:
            self.ctx.record.views["header"].zero_()
            return replayed_costs(self.buckets, graphs, partial(self._replay_ms, graphs), on_host=on_host)

    def _replay_ms(self, graphs: Graphs | Uncaptured, shape: Shape) -> float:
        """Return the milliseconds of one replay on the current stream. Waits for it."""
        if self._stream is None:
            began = time.perf_counter()
            graphs.replay(shape)
            return 1e3 * (time.perf_counter() - began)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graphs.replay(shape)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    @property
    def kv_cache(self) -> KVCache:
        """KV cache of the target."""
        return self.ctx.kv_cache

    @torch.inference_mode()
    def execute(self, slot: RingSlot, header: Header) -> None:
        """Enqueue the step planned in `slot.record`. `slot.results` are complete when `wait` returns."""
        assert isinstance(slot, TensorSlot)
        slot.logprobs.clear()
        slot.prompt_logprobs.clear()
        slot.draft_fault = None
        with self._on_stream():
            if self.loras is not None:
                self._use(self._work(has_lora=self.loras.begin_step(slot.views, header)))
            ctx = self.ctx
            used = min(header.used_len, len(ctx.record.record))  # the host alone reads constraints, which come last
            ctx.record.record[:used].copy_(slot.pinned_record[:used], non_blocking=True)
            if header.num_admitted:
                self.sampling.remember(slot.views, header.num_admitted)
            apply_uploads(ctx.state, self.sampling, slot.views, ctx.record.views, header)
            if ctx.states is not None:
                ctx.states.begin_step(slot.views, ctx.record.views, header)
            if ctx.hidden is not None and header.num_admitted:
                ctx.hidden.rows.admit(ctx.record.views, header.num_admitted)
            if ctx.draft_start is not None and header.num_admitted:
                ctx.draft_start.index_fill_(0, ctx.record.views["admit_row"][: header.num_admitted], 0)
            decoding = self._decoding(slot, header.num_decode)
            merged = self._merged(slot, header, decoding)
            entries = self._prefill(slot, header) if header.num_prefill and merged is None else None
            head_prefill = self._catch_up(slot, header, entries) if header.num_draft_chunks else None
            if merged is not None and slot.draft_fault is not None:
                merged = None
                self._prefill(slot, header)
            slot.merged = merged is not None
            if header.num_decode:
                self._decode(slot, header, decoding, merged)
            slot.pinned_results.copy_(ctx.record.results, non_blocking=True)
            if slot.done is not None:
                slot.done.record()
            # A head's pass over prompt chunks comes after the results. If it fails, the head starts anew.
            if head_prefill is not None and not self._feed(slot, header, *head_prefill):
                rows = ctx.record.views["draft_chunk_row"][: header.num_draft_chunks]
                ctx.state.draft_len.index_fill_(0, rows, 0)

    def use_extras(self, lookup: ExtrasLookup) -> None:
        """Set the function that finds the grammar of a request id, which records cannot hold."""
        self.sampling.extras = lookup

    def close(self) -> None:
        """Do nothing: the runner has no threads or processes."""

    def wait(self, slot: RingSlot) -> None:
        """Block until the step in `slot` has delivered its results. Raises ExchangeError if another rank is lost or
        takes too long."""
        assert isinstance(slot, TensorSlot)
        if slot.done is None:
            return
        if self.sampling.ranks is None:
            slot.done.synchronize()
        else:
            self.sampling.ranks.wait_for(lambda: slot.has_ended)

    def _failed(self, slot: TensorSlot, error: Exception, lost: NDArray[np.int64] | None = None) -> None:
        """Record an exception of the drafter in `slot`. With several ranks it is raised again and ends the step,
        because the other ranks have enqueued their part of the drafter's passes and cannot take it back."""
        if self.sampling.ranks is not None:
            raise error
        slot.drafter_failed(error, lost)

    def _prefill(self, slot: TensorSlot, header: Header) -> Tensor | None:
        """Run the prompt chunks. Return their hidden states for the drafter, `[num_prefill_tokens, L, hidden]`, a
        view."""
        ctx, views = self.ctx, self.ctx.record.views
        inputs = prefill_inputs(ctx.state, slot.views, views, header)
        hidden, states = self._chunks.target(inputs)
        self.num_target_passes += 1
        faults = chunk_faults(hidden, views, header) if ctx.target.ends_in_window else None
        prompt_logprobs(slot, header, hidden, ctx.target.compute_logits, ctx.state, self.sampling)
        count, first = header.num_prefill, header.num_decode
        at = last_rows(views, header)
        last = hidden.index_select(0, at)
        results = ctx.record.results_view.narrow(first, count)
        if last_chunks(slot.views, header):
            self._end_prompts(slot, header, last, None if states is None else states.index_select(0, at))
        else:
            for tensor in results.tensors():
                tensor.zero_()
        flag_chunks(last if faults is None else last + faults, results.flags)
        return states

    def _end_prompts(self, slot: TensorSlot, header: Header, last: Tensor, states: Tensor | None) -> None:
        """Draw the first token of prompts that end. Other chunks report zeros. `last` `[num_prefill, hidden_size]` are
        final states of the chunks' last rows, `states` the hidden states of the same rows for the drafter."""
        ctx, views = self.ctx, self.ctx.record.views
        count, first = header.num_prefill, header.num_decode
        # The end of a prompt is an iteration without drafts: its last hidden row gives the distribution of position n.
        rows = slot.views["seq_row"][first : first + count].tolist()
        shape = Shape(count, 0, count, self._logits_mode(rows))
        emits = views["chunk_is_last"]
        prepare(ctx, shape, sequences_of(views, "num_prefill", first, emits))
        lm_head(ctx, last, greedy=shape.logits_mode is LogitsMode.GREEDY)
        if shape.logits_mode is LogitsMode.LOGITS:
            context = self._context(slot, first, count)
            sampling = sequence_sampling(ctx, self.sampling, [0] * count, rows, context, slot, first)
            accept_adjusted(ctx, shape, sampling, slot, first, self.logprobs_mode, states)
        else:
            accept_and_update(ctx, shape, first, prompts=states)

    def _catch_up(
        self, slot: TensorSlot, header: Header, entries: Tensor | None
    ) -> tuple[PassInputs, HiddenInputs] | None:
        """Run the draft model's catch-up chunks. For a head, return the inputs of its pass over prompt chunks, whose
        hidden states are `entries`; the pass runs later, because no first token waits for it."""
        ctx, views, head_prefill, written = self.ctx, self.ctx.record.views, None, True
        if ctx.hidden is not None:
            head_prefill = ctx.hidden.rows.chunks(ctx.state, slot.views, views, header, entries)
        else:
            inputs = catch_up_inputs(ctx.state, slot.views, views, header, windowed=ctx.draft_start is not None)
            if ctx.draft_start is not None:
                chunks = slice(0, header.num_draft_chunks)
                ctx.draft_start.index_copy_(0, views["draft_chunk_row"][chunks], views["draft_chunk_k_start"][chunks])
            if inputs is not None:
                written = self._feed(slot, header, inputs)
        caught_up(ctx.state, views, header, written=written)
        return head_prefill

    def _feed(self, slot: TensorSlot, header: Header, inputs: PassInputs, hidden: HiddenInputs | None = None) -> bool:
        """Enqueue the drafter's pass over the step's draft chunks. Return False if it raised."""
        try:
            self._chunks.draft(inputs, hidden)
        except Exception as error:
            slots = slot.views["draft_slot"][: header.num_draft_tokens]
            self._failed(slot, error, blocks_of(slots, self.ctx.sizes.block_size))
            return False
        return True

    def _logits_mode(self, rows: Sequence[int]) -> LogitsMode:
        if self.sampling.needs_logits(rows):
            return LogitsMode.LOGITS
        return LogitsMode.SAMPLED if self.sampling.steps(rows).random else LogitsMode.GREEDY

    def _context(self, slot: TensorSlot, first: int, count: int) -> int:
        """Return an upper bound, known on the host, of position + 1 over the sequences."""
        sequences = slice(first, first + count)
        return int((slot.views["seq_n_upper"][sequences] + slot.views["seq_k"][sequences]).max())

    def _decoding(self, slot: TensorSlot, count: int) -> Decoding:
        rows, ks = (slot.views[name][:count].tolist() for name in ("seq_row", "seq_k"))
        on_host = [False] * count if self.ctx.proposed is None else drafted_on_host(slot.views, count).tolist()
        depth = max((k for k, placed in zip(ks, on_host, strict=True) if not placed), default=0)
        return Decoding(rows, ks, on_host, depth)

    def _merged(self, slot: TensorSlot, header: Header, decoding: Decoding) -> MergedShape | None:
        """Return the shape of an iteration that has the step's prompt chunks in its verification pass. None: they need
        their own pass. That is so if they do not fit, if nothing decodes, or for masks, penalties and log
        probabilities."""
        count, chunks = header.num_decode, header.num_prefill
        if not (count and chunks):
            return None
        rows = slot.views["seq_row"][: count + chunks]
        if self.sampling.needs_host(rows.numpy()):
            return None
        whole = self.buckets.whole(decoding.ks, self._logits_mode(rows.tolist()), decoding.depth)
        if whole is None:
            return None
        merged = self.buckets.merged(whole, count, header.num_prefill_tokens, chunks)
        return merged if merged in self.graphs else None

    def _merge(self, slot: TensorSlot, header: Header, shape: MergedShape) -> None:
        """Run an iteration that has the step's prompt chunks in its verification pass."""
        ctx, views = self.ctx, self.ctx.record.views
        chunks, tokens = slice(0, header.num_prefill), header.num_prefill_tokens
        ctx.chunks.fill(prefill_inputs(ctx.state, slot.views, views, header), shape.chunk_shape)
        ctx.chunks.mask_ends(last_rows(views, header), views["chunk_is_last"][chunks])
        self.graphs.replay(shape)
        # The last rows of prompts that end are rows of verification, and checked by their logits.
        faults = chunk_faults(ctx.chunks.merged[shape][:tokens], views, header)
        flag_chunks(faults, ctx.record.results_view.narrow(header.num_decode, header.num_prefill).flags)

    def _decode(self, slot: TensorSlot, header: Header, decoding: Decoding, merged: MergedShape | None) -> None:
        depth = decoding.depth
        self.num_target_passes += 1
        if self.ctx.drafter is not None:
            self.ctx.drafter.num_passes += min(depth, 1) if self.ctx.in_parallel else depth
        if merged is not None:
            self._merge(slot, header, merged)
            return
        logits_mode = self._logits_mode(decoding.rows)
        if logits_mode is not LogitsMode.LOGITS and slot.draft_fault is None:
            whole = self.buckets.whole(decoding.ks, logits_mode, depth)
            if whole is not None and whole in self.graphs:
                self.graphs.replay(whole)
                return
        self._chained(slot, decoding, logits_mode)

    def _chained(self, slot: TensorSlot, decoding: Decoding, logits_mode: LogitsMode) -> None:
        """Run an iteration pass by pass. A pass is a graph if there is one for it."""
        ctx = self.ctx
        ks, count = decoding.ks, len(decoding.ks)
        shape = self.buckets.chained(ks, logits_mode, decoding.depth)
        if shape is None:
            shape = self.buckets.exact(ks, logits_mode, decoding.depth)
            self._warn(count)
        prepare(ctx, shape, self._decoding_sequences)
        sampling = None
        if logits_mode is LogitsMode.LOGITS:
            sampling = sequence_sampling(ctx, self.sampling, ks, decoding.rows, self._context(slot, 0, count), slot)
            if sampling.grammar is not None:
                self._follow(slot, decoding, sampling.grammar)
        self._draft(slot, decoding.on_host, partial(self._draft_passes, decoding, logits_mode, sampling))
        if shape.max_k:
            assemble(ctx, shape)
        verification = ("verify", shape.batch, shape.rows, logits_mode is LogitsMode.GREEDY)
        if verification in self.graphs:
            self.graphs.replay(verification)
        else:
            verify_pass(ctx, shape.batch, shape.rows, ctx.sizes.max_k + 1, greedy=logits_mode is LogitsMode.GREEDY)
        if sampling is not None:
            accept_adjusted(ctx, shape, sampling, slot, 0, self.logprobs_mode)
        else:
            accept_and_update(ctx, shape)

    def _draft_passes(self, decoding: Decoding, logits_mode: LogitsMode, sampling: SequenceSampling | None) -> None:
        ctx = self.ctx
        for i in range(1, decoding.depth + 1):
            count = sum(k >= i for k in decoding.ks)
            key = ("draft", self.buckets.chained_batch(count), i, logits_mode)
            if key in self.graphs:
                self.graphs.replay(key)
            elif i == 1 or not ctx.in_parallel:
                draft_pass(ctx, i, count, logits_mode)
            if sampling is not None:
                draft_adjusted(ctx, i, count, sampling, decoding.on_host)

    def _draft(self, slot: TensorSlot, on_host: list[bool], passes: Callable[[], None]) -> None:
        """Run the draft passes of the prepared iteration. If one raises, or the drafter failed before in this step, the
        number of drafts made on the device becomes 0. KV that was enqueued until then lies past `draft_len`, which
        stays."""
        if slot.draft_fault is None:
            try:
                passes()
                return
            except Exception as error:
                self._failed(slot, error)
        k = self.ctx.buffers.k[: len(on_host)]
        k.mul_(to_device(torch.tensor(on_host), k.device))

    def _follow(self, slot: TensorSlot, decoding: Decoding, grammar: StepGrammar) -> None:
        """Advance the grammars over the drafts in the record, without reading anything back from the device."""
        if not any(decoding.on_host):
            return
        proposed, placed = host_drafts(slot.views, self.ctx.state.limit.shape[0] - 1), torch.tensor(decoding.on_host)
        for i in range(decoding.ks[0]):
            count = sum(k > i for k in decoding.ks)
            grammar.observe(proposed[:count, i], placed[:count])

    def _warn(self, batch: int) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"a batch of {batch} is beyond the captured sizes {self.buckets.batches}: such steps run eagerly, "
                "more slowly and with the same results; raise cudagraph_capture_sizes",
                stacklevel=2,
            )
