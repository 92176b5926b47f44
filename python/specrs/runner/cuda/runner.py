"""The CUDA runner: enqueues a planned launch and the copy of its results. Plans nothing, waits for nothing.

A decode iteration is one graph where there is one for its shape (whole), else one graph a pass with single ops between
them (chained), else op by op (eager). All three call the same functions on the same buffers. Launches that need masks,
penalties, grammars or log probabilities between logits and draw run chained.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from specrs.core import HEADER_FIELDS
from specrs.drafters.base import Drafter, host_drafts, model_drafter
from specrs.models.kv_cache import KVCache
from specrs.runner.cuda.adjusted import accept_adjusted, draft_adjusted, entry_sampling
from specrs.runner.cuda.graphs import Graphs
from specrs.runner.cuda.iteration import (
    Context,
    LaunchEntries,
    accept_and_update,
    assemble,
    draft_pass,
    lm_head,
    prepare,
    run,
    take_drafts,
    verify_pass,
)
from specrs.runner.cuda.shapes import Buckets, Shape, Tail
from specrs.runner.extras import ExtrasLookup
from specrs.runner.logprobs import prompt_logprobs
from specrs.runner.prefill import catch_up_inputs, caught_up, flag_chunks, last_chunks, last_rows, prefill_inputs
from specrs.runner.ring import Header, Layout, RingSlot
from specrs.runner.sampling_state import EntrySampling, SamplingState
from specrs.runner.uploads import apply_uploads


def entries_of(record: dict[str, Tensor], kind: str, first: int = 0, emits: Tensor | None = None) -> LaunchEntries:
    """The decode (`num_decode`) or prompt (`num_prefill`) entries of the device's record."""
    at = HEADER_FIELDS.index(kind)
    return LaunchEntries(record["header"][at : at + 1], first, emits)


class CudaRunner:
    """Runs launches on one stream: uploads, prompt chunks, draft catch-up chunks, one decode iteration, in order."""

    def __init__(
        self,
        ctx: Context,
        sampling: SamplingState,
        buckets: Buckets,
        graphs: Graphs | None,
        record_layout: Layout,
        *,
        logprobs_mode: str,
    ) -> None:
        """`graphs` None: everything runs eagerly (`enforce_eager`)."""
        self.ctx = ctx
        self.sampling = sampling
        self.buckets = buckets
        self.graphs = graphs
        self.logprobs_mode = logprobs_mode
        self.num_target_passes = 0
        self._layout = record_layout
        self._decode_entries = entries_of(ctx.record.views, "num_decode")
        device = ctx.state.tokens.device
        # Triton's interpreter runs the same code on a CPU, where there are no streams.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self._stream is not None:
            # Weights and zeroed buffers were enqueued on another stream, which this one does not wait for by itself.
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._warned = False

    @property
    def drafter(self) -> Drafter | None:
        """What drafts, None without speculation."""
        return self.ctx.drafter

    @property
    def kv_cache(self) -> KVCache:
        """The target's."""
        return self.ctx.kv_cache

    @torch.inference_mode()
    def launch(self, slot: RingSlot, header: Header) -> None:
        """Enqueue the launch planned in `slot.record`; `slot.results` are there when `wait` returns."""
        ctx = self.ctx
        slot.logprobs.clear()
        slot.prompt_logprobs.clear()
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            used = self._used(header)
            ctx.record.record[:used].copy_(slot.pinned_record[:used], non_blocking=True)
            if header.num_admitted:
                self.sampling.remember(slot.views, header.num_admitted)
            apply_uploads(ctx.state, self.sampling, slot.views, ctx.record.views, header)
            if header.num_prefill:
                self._prefill(slot, header)
            if header.num_draft_chunks:
                self._catch_up(slot, header)
            if header.num_decode:
                self._decode(slot, header)
            slot.pinned_results.copy_(ctx.record.results, non_blocking=True)
            if slot.done is not None:
                slot.done.record()

    def use_extras(self, lookup: ExtrasLookup) -> None:
        """Where to find what no record can say of a request."""
        self.sampling.extras = lookup

    def close(self) -> None:
        """It has nothing to end."""

    def wait(self, slot: RingSlot) -> None:
        """Block until the launch of `slot` has delivered its results."""
        if slot.done is not None:
            slot.done.synchronize()

    def _used(self, header: Header) -> int:
        """Elements of the record that the launch has written and the device reads."""
        for name, count in (
            ("upload_token", header.num_upload_tokens),
            ("draft_slot", header.num_draft_tokens),
            ("prefill_slot", header.num_prefill_tokens),
        ):
            if count:
                return self._layout[name][0] + count
        return self._layout["prefill_token"][0]

    def _prefill(self, slot: RingSlot, header: Header) -> None:
        ctx, views = self.ctx, self.ctx.record.views
        hidden = ctx.target.forward(prefill_inputs(ctx.state, slot.views, views, header), ctx.kv_cache).final
        self.num_target_passes += 1
        prompt_logprobs(slot, header, hidden, ctx.target.compute_logits, ctx.state, self.sampling)
        count, first = header.num_prefill, header.num_decode
        last = hidden.index_select(0, last_rows(views, header))
        results = ctx.record.results_view.narrow(first, count)
        if last_chunks(slot.views, header):
            self._end_prompts(slot, header, last)
        else:
            for tensor in results.tensors():
                tensor.zero_()
        flag_chunks(last, results.flags)

    def _end_prompts(self, slot: RingSlot, header: Header, last: Tensor) -> None:
        """Draw the tokens behind prompts that end; other chunks report zeros. `last`: `[num_prefill, hidden_size]`."""
        ctx, views = self.ctx, self.ctx.record.views
        count, first = header.num_prefill, header.num_decode
        # The end of a prompt is an iteration without drafts: its last hidden row gives the distribution of position n.
        rows = slot.views["entry_row"][first : first + count].tolist()
        shape = Shape(count, 0, count, self._tail(rows))
        emits = views["chunk_is_last"]
        prepare(ctx, shape, entries_of(views, "num_prefill", first, emits))
        lm_head(ctx, last, greedy=shape.tail is Tail.GREEDY)
        if shape.tail is Tail.LOGITS:
            context = self._context(slot, first, count)
            sampling = entry_sampling(ctx, self.sampling, [0] * count, rows, context, slot, first)
            accept_adjusted(ctx, shape, sampling, slot, first, self.logprobs_mode)
        else:
            accept_and_update(ctx, shape, first)

    def _catch_up(self, slot: RingSlot, header: Header) -> None:
        ctx, views = self.ctx, self.ctx.record.views
        inputs = catch_up_inputs(ctx.state, slot.views, views, header)
        if inputs is not None:
            model_drafter(ctx.drafter).feed(inputs)
        caught_up(ctx.state, views, header)

    def _tail(self, rows: Sequence[int]) -> Tail:
        if not self.sampling.is_plain(rows):
            return Tail.LOGITS
        return Tail.SAMPLED if self.sampling.steps(rows).random else Tail.GREEDY

    def _context(self, slot: RingSlot, first: int, count: int) -> int:
        """Host bound of position + 1 over the entries."""
        entries = slice(first, first + count)
        return int((slot.views["entry_n_upper"][entries] + slot.views["entry_k"][entries]).max())

    def _decode(self, slot: RingSlot, header: Header) -> None:
        entries = slice(0, header.num_decode)
        planned = slot.views["entry_k"][entries].tolist()
        rows = slot.views["entry_row"][entries].tolist()
        tail = self._tail(rows)
        self.num_target_passes += 1
        if self.ctx.drafter is not None and not self.ctx.drafter.on_host:
            self.ctx.drafter.num_passes += planned[0]
        if self.graphs is not None and tail is not Tail.LOGITS:
            whole = self.buckets.whole(planned, tail)
            if whole is not None:
                self.graphs.replay(whole)
                return
        self._chained(slot, planned, rows, tail)

    def _chained(self, slot: RingSlot, planned: list[int], rows: list[int], tail: Tail) -> None:
        """Pass by pass; each pass is a graph where there is one."""
        ctx = self.ctx
        shape = None if self.graphs is None else self.buckets.chained(planned, tail)
        if shape is None:
            shape = self.buckets.exact(planned, tail)
            self._warn(len(planned))
        if tail is not Tail.LOGITS and self.graphs is None:
            run(ctx, shape, self._decode_entries)
            return
        prepare(ctx, shape, self._decode_entries)
        sampling = None
        if tail is Tail.LOGITS:
            context = self._context(slot, 0, len(planned))
            sampling = entry_sampling(ctx, self.sampling, planned, rows, context, slot)
        if shape.max_k and ctx.drafter is not None and ctx.drafter.on_host:
            self._take(slot, shape, planned, sampling)
        for i in range(1, shape.max_k + 1 if self.buckets.has_passes else 1):
            count = sum(k >= i for k in planned)
            key = ("draft", self.buckets.batch(count), i, tail)
            if self.graphs is not None and key in self.graphs:
                self.graphs.replay(key)
            else:
                draft_pass(ctx, i, count, tail)
            if sampling is not None:
                draft_adjusted(ctx, i, count, sampling)
        if shape.max_k:
            assemble(ctx, shape)
        verification = ("verify", shape.batch, shape.rows, tail is Tail.GREEDY)
        if self.graphs is not None and verification in self.graphs:
            self.graphs.replay(verification)
        else:
            verify_pass(ctx, shape.batch, shape.rows, ctx.sizes.max_k + 1, greedy=tail is Tail.GREEDY)
        if sampling is not None:
            accept_adjusted(ctx, shape, sampling, slot, 0, self.logprobs_mode)
        else:
            accept_and_update(ctx, shape)

    def _take(self, slot: RingSlot, shape: Shape, planned: list[int], sampling: EntrySampling | None) -> None:
        """The drafts of the record; a grammar goes along them on the host, without reading anything back."""
        take_drafts(self.ctx, shape)
        if sampling is not None and sampling.grammar is not None:
            proposed = host_drafts(slot.views, self.ctx.state.limit.shape[0] - 1)
            for i in range(shape.max_k):
                count = sum(k > i for k in planned)
                sampling.grammar.observe(proposed[:count, i], torch.ones(count, dtype=torch.bool))

    def _warn(self, batch: int) -> None:
        if self.graphs is not None and not self._warned:
            self._warned = True
            warnings.warn(
                f"a batch of {batch} is beyond the captured sizes {self.buckets.batches}: such launches run eagerly, "
                "more slowly and with the same results; raise cudagraph_capture_sizes",
                stacklevel=2,
            )
