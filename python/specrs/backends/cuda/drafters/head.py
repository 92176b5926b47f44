"""Passes of a head on a GPU, EAGLE-3 or MTP. The head reads hidden states of the target."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor

from specrs.backends.cuda.buffers import Buffers, DraftSizes
from specrs.backends.cuda.decoder import CudaDecoder
from specrs.backends.cuda.draft_passes import HiddenSource, Reduced, Room
from specrs.backends.cuda.eagle3 import CudaEagle3Head
from specrs.backends.cuda.hidden_rows import HiddenInputs, HiddenRows
from specrs.backends.cuda.mtp import CudaMtpHead
from specrs.drafters.eagle3.head import Eagle3Head
from specrs.drafters.hidden_state import LoadedHead
from specrs.drafters.mtp.head import MtpHead
from specrs.kernels.cuda.attention_config import ANY_LENGTH
from specrs.kernels.cuda.hidden_states import gather_states
from specrs.models.inputs import PassInputs
from specrs.models.kv_cache import KVCache
from specrs.models.torch_arrays import TORCH_DTYPES


@dataclass(slots=True, kw_only=True)
class HeadPasses:
    """Passes of an EAGLE-3 or MTP head. `DraftPasses` documents the members.

    Pass 1 reads hidden states of the target. Pass i reads the states that pass i - 1 has written.
    """

    model: CudaEagle3Head | CudaMtpHead
    kv_cache: KVCache
    sizes: DraftSizes
    reduced: Reduced | None
    hidden: HiddenSource | None
    num_passes: int = 0
    sliding_window: int | None = None

    @classmethod
    def make(cls, drafter: LoadedHead, room: Room) -> HeadPasses:
        """Return the passes of `drafter`."""
        limits, own = room.limits, cast("Eagle3Head | MtpHead", drafter.model)
        rows, seqs = room.max_rows, limits.max_num_seqs
        model: CudaEagle3Head | CudaMtpHead
        if isinstance(own, MtpHead):
            model = CudaMtpHead(own, max_rows=rows, max_seqs=seqs)
        else:
            model = CudaEagle3Head(own.weights, max_rows=rows, max_seqs=seqs, ranks=own.ranks)
        layers, size = own.aux_layer_ids, own.target_hidden_size
        kept = HiddenRows.allocate(
            seqs,
            room.width,
            len(layers),
            size,
            TORCH_DTYPES[limits.target.states_dtype],
            own.device,
        )
        vocab_size = limits.target.vocab_size
        reduced = Reduced.of(own.target_ids, vocab_size) if own.vocab_size < vocab_size else None
        return cls(
            model=model,
            kv_cache=own.allocate_cache(room.num_blocks, limits.block_size),
            sizes=DraftSizes(
                TORCH_DTYPES[limits.target.dtype],
                room.first_pass_rows,
                hidden_size=own.hidden_size,
                states_size=len(layers) * size,
                num_ids=0 if reduced is None else own.vocab_size,
            ),
            reduced=reduced,
            hidden=HiddenSource(kept, layers, cast("CudaDecoder", room.target).entry_buffer(layers)),
        )

    def known(self, ids: Tensor, out: Tensor) -> Tensor:
        return ids  # it has the target's embedding

    def forward(self, b: Buffers, i: int, inputs: PassInputs) -> Tensor:
        batch, rows = inputs.block_table.shape[0], inputs.max_q_len
        left = b.left[:batch]
        hidden = left
        if i == 1:
            assert self.hidden is not None
            states = b.first_states[: batch * rows]
            gather_states(self.hidden.rows, b.row[:batch], inputs.positions, states)
            hidden = self.model.fuse(states)
        recurrent, final = self.model.forward(inputs, hidden, self.kv_cache, b.k_start[:batch])
        left.copy_(recurrent[rows - 1 :: rows])
        return final

    def compute_argmax(self, hidden: Tensor, ids: Tensor, top: Tensor) -> None:
        self.model.compute_argmax(hidden, ids, top)

    def compute_logits(self, hidden: Tensor, out: Tensor) -> None:
        self.model.compute_logits(hidden, out)

    def catch_up(self, inputs: PassInputs, hidden: HiddenInputs | None = None) -> None:
        assert hidden is not None
        any_length = replace(inputs, max_q_len=max(inputs.max_q_len, ANY_LENGTH))
        self.model.forward(any_length, self.model.fuse(hidden.states), self.kv_cache, hidden.k_start)
