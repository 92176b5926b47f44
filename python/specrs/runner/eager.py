"""The eager runner: executes a planned launch op by op, in stream order. Plans nothing and settles nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specrs.drafters.draft_model import DraftModel
from specrs.models.decoder import Decoder
from specrs.models.kv_cache import KVCache
from specrs.runner.iteration import Results, accept_and_update, draft, mask_min_tokens, prepare, verify
from specrs.runner.prefill import catch_up, last_rows, prefill
from specrs.runner.ring import Header, RingSlot
from specrs.runner.row_state import RowState
from specrs.runner.uploads import apply_uploads


class EagerRunner:
    """Runs launches on row state: uploads, prefill chunks, draft catch-up chunks, one decode iteration, in that
    order."""

    def __init__(
        self, target: Decoder, kv_cache: KVCache, drafter: DraftModel | None, state: RowState, block_size: int
    ) -> None:
        self.target = target
        self.kv_cache = kv_cache
        self.drafter = drafter
        self.state = state
        self.block_size = block_size
        self.num_target_passes = 0

    @torch.inference_mode()
    def launch(
        self,
        slot: RingSlot,
        header: Header,
        *,
        min_lens: Sequence[int],
        stop_ids: Sequence[Sequence[int]],
        mask_stops: bool,
    ) -> None:
        """Execute the launch planned in `slot.record`; mutates row state, both KV caches and `slot.results`.

        Args:
            min_lens, stop_ids: of the admitted rows, in admission order.
            mask_stops: some row of the launch has `min_tokens` still to go.
        """
        apply_uploads(self.state, slot, header, min_lens, stop_ids)
        if header.num_prefill:
            self._prefill(slot, header, mask_stops)
        if header.num_draft_chunks:
            assert self.drafter is not None, "the scheduler plans draft chunks only with a draft model"
            catch_up(self.state, slot, header, self.drafter)
        if header.num_decode:
            self._decode(slot, header, mask_stops)

    def _prefill(self, slot: RingSlot, header: Header, mask_stops: bool) -> None:
        hidden = prefill(self.state, slot, header, self.target, self.kv_cache)
        self.num_target_passes += 1
        results = slot.results_view.narrow(header.num_decode, header.num_prefill)
        _zero(results)
        chunks, rows = last_rows(slot, header)
        if not chunks:
            return
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
        logits = self.target.compute_logits(hidden[rows])
        if mask_stops:
            logits = mask_min_tokens(self.state, logits, it.rows, it.num_tokens - 1)
        q_start = torch.arange(len(chunks) + 1)
        final = Results(*(torch.empty_like(t[: len(chunks)]) for t in _fields(results)))
        accept_and_update(self.state, it, logits, q_start, torch.zeros_like(it.num_tokens), final)
        for mine, theirs in zip(_fields(results), _fields(final), strict=True):
            mine[chunks] = theirs

    def _decode(self, slot: RingSlot, header: Header, mask_stops: bool) -> None:
        entries = slice(0, header.num_decode)
        planned = slot.views["entry_k"][entries].tolist()
        it = prepare(
            self.state,
            slot.views["entry_row"][entries],
            planned,
            slot.views["entry_capacity"][entries],
            block_size=self.block_size,
            max_context=int((slot.views["entry_n_upper"][entries] + slot.views["entry_k"][entries]).max()),
            drafter=self.drafter,
        )
        if header.max_k and self.drafter is not None:
            flags = draft(self.state, it, self.drafter)
        else:
            flags = torch.zeros_like(it.num_tokens)
        logits, positions, q_start = verify(self.state, it, self.target, self.kv_cache)
        self.num_target_passes += 1
        if mask_stops:
            of_row = it.rows.repeat_interleave(q_start.diff(), output_size=len(positions))
            logits = mask_min_tokens(self.state, logits, of_row, positions)
        accept_and_update(self.state, it, logits, q_start, flags, slot.results_view.narrow(0, header.num_decode))


def _fields(results: Results) -> tuple[torch.Tensor, ...]:
    return (results.num_emitted, results.num_accepted, results.num_drafted, results.flags, results.tokens)


def _zero(results: Results) -> None:
    for tensor in _fields(results):
        tensor.zero_()
