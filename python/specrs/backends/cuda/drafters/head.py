"""Passes of a head on a GPU, EAGLE-3 or MTP. The head reads hidden states of the target."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, cast

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


class Scoring(Protocol):
    """LM head of a head with its buffers on a GPU."""

    def compute_logits(self, final: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the logits of final states, `[N, Vd]` fp32. With `out` `[N, Vd]`, write them into it."""

    def compute_argmax(self, final: Tensor, ids: Tensor, top: Tensor) -> None:
        """Write the most probable of the head's own ids of each row into `ids` `[N]` int64, and its logit into `top`
        `[N]` fp32."""


@dataclass(slots=True, kw_only=True)
class HiddenStatePasses:
    """Members that the passes of all drafters share that read hidden states. `DraftPasses` documents the members."""

    model: Scoring
    kv_cache: KVCache
    sizes: DraftSizes
    reduced: Reduced | None
    hidden: HiddenSource | None
    num_passes: int = 0
    sliding_window: int | None = None

    @classmethod
    def of(cls, head: Any, model: Scoring, kv_cache: KVCache, room: Room, width: int) -> Self:
        """Return passes of `model`, which has the weights of the head `head`. `width` is the number of positions per
        row whose hidden states are kept."""
        limits, layers, size = room.limits, head.aux_layer_ids, head.target_hidden_size
        states_dtype = TORCH_DTYPES[limits.target.states_dtype]
        kept = HiddenRows.allocate(limits.max_num_seqs, width, len(layers), size, states_dtype, head.device)
        vocab_size = limits.target.vocab_size
        reduced = Reduced.of(head.target_ids, vocab_size) if head.vocab_size < vocab_size else None
        return cls(
            model=model,
            kv_cache=kv_cache,
            sizes=DraftSizes(
                TORCH_DTYPES[limits.target.dtype],
                room.first_pass_rows,
                hidden_size=head.state_size,
                states_size=len(layers) * size,
                num_ids=0 if reduced is None else head.vocab_size,
            ),
            reduced=reduced,
            hidden=HiddenSource(kept, layers, cast("CudaDecoder", room.target).entry_buffer(layers)),
        )

    def known(self, ids: Tensor, out: Tensor) -> Tensor:
        return ids  # it has the target's embedding

    def first_states(self, b: Buffers, positions: Tensor) -> Tensor:
        """Return the target's hidden states at the `positions` `[N]` of pass 1, `[N, L * hidden]`, a view of `b`."""
        assert self.hidden is not None
        states, batch = b.first_states[: len(positions)], len(positions) // self.sizes.first_pass_rows
        gather_states(self.hidden.rows, b.row[:batch], positions, states)
        return states

    def compute_argmax(self, hidden: Tensor, ids: Tensor, top: Tensor) -> None:
        self.model.compute_argmax(hidden, ids, top)

    def compute_logits(self, hidden: Tensor, out: Tensor) -> None:
        self.model.compute_logits(hidden, out)


@dataclass(slots=True, kw_only=True)
class HeadPasses(HiddenStatePasses):
    """Passes of an EAGLE-3 or MTP head. `DraftPasses` documents the members.

    Pass 1 reads hidden states of the target. Pass i reads the states that pass i - 1 has written.
    """

    model: CudaEagle3Head | CudaMtpHead

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
        return cls.of(own, model, own.allocate_cache(room.num_blocks, limits.block_size), room, room.width)

    def forward(self, b: Buffers, i: int, inputs: PassInputs) -> Tensor:
        batch, rows = inputs.block_table.shape[0], inputs.max_q_len
        left = b.left[:batch]
        hidden = self.model.fuse(self.first_states(b, inputs.positions)) if i == 1 else left
        recurrent, final = self.model.forward(inputs, hidden, self.kv_cache, b.k_start[:batch])
        left.copy_(recurrent[rows - 1 :: rows])
        return final

    def catch_up(self, inputs: PassInputs, hidden: HiddenInputs | None = None) -> None:
        assert hidden is not None
        any_length = replace(inputs, max_q_len=max(inputs.max_q_len, ANY_LENGTH))
        self.model.forward(any_length, self.model.fuse(hidden.states), self.kv_cache, hidden.k_start)
