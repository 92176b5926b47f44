"""What an iteration on a CUDA device reads and writes. Computes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specrs.core import HEADER_FIELDS
from specrs.drafters.base import Drafter
from specrs.kernels.cuda.prepare import Sizes
from specrs.kernels.cuda.sampling_scratch import SamplingScratch
from specrs.kernels.cuda.sampling_structs import RowParams
from specrs.models.base import TorchModel
from specrs.models.eagle3_cuda import CudaEagle3Head
from specrs.models.kv_cache import KVCache
from specrs.runner.cuda.buffers import Buffers, DeviceRecord
from specrs.runner.cuda.chunk_buffers import ChunkBuffers
from specrs.runner.cuda.hidden_rows import HiddenRows
from specrs.runner.cuda.row_state import RowState


@dataclass(frozen=True, slots=True)
class Reduced:
    """The part of the target's vocabulary that a drafter proposes, S ids of its own."""

    target_ids: Tensor  # [S] int64, ascending
    source: Tensor  # [V] int64, the own id of each of the target's, -1 for none


@dataclass(frozen=True, slots=True)
class Head:
    """A head over hidden states of the target, and what is kept for it."""

    model: CudaEagle3Head
    rows: HiddenRows
    layers: tuple[int, ...]
    entries: Tensor  # [max_rows, L, hidden], where the target's passes leave them


@dataclass(frozen=True, slots=True)
class Context:
    """All that an iteration reads and writes; fixed for the engine's life, so its addresses are too."""

    state: RowState
    params: RowParams
    record: DeviceRecord
    buffers: Buffers
    chunks: ChunkBuffers
    scratch: SamplingScratch
    target: TorchModel
    kv_cache: KVCache
    drafter: Drafter | None
    head: Head | None  # of a drafter that reads hidden states
    reduced: Reduced | None  # None: the drafter has the target's ids, or the first of them
    fed_ids: Tensor | None  # [V] int64, what a draft of another tokenizer is fed for the target's ids
    proposed: Tensor | None  # [R, K], the record's drafts of entries 0, 1 ..; None: no drafter is on the host
    draft_start: Tensor | None  # [R + 1] int64, from where on a row's draft KV is there; None: from 0, of all
    sizes: Sizes
    max_model_len: int
    rule: str  # rejection or coupled; the same with a point mass as q, and then coupled
    rates: Tensor | None  # [K] fp32, for timing only: drafts stand at these rates, whatever the models say

    @property
    def in_parallel(self) -> bool:
        """Whether one pass makes all drafts."""
        return self.sizes.mask_token_id is not None

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Target layers whose entries its passes keep."""
        return () if self.head is None else self.head.layers


@dataclass(frozen=True, slots=True)
class LaunchEntries:
    """Which of the launch's entries an iteration is for: decode entries, the prompt chunks behind them, or both."""

    count: Tensor  # [1], in the record's header; [2]: of decode entries and of chunks
    first: int = 0
    emits: Tensor | None = None  # [>= B] 1 for the last chunk of a prompt


def entries_of(record: dict[str, Tensor], kind: str, first: int = 0, emits: Tensor | None = None) -> LaunchEntries:
    """The decode (`num_decode`) or prompt (`num_prefill`) entries of the device's record."""
    at = HEADER_FIELDS.index(kind)
    return LaunchEntries(record["header"][at : at + 1], first, emits)


def all_entries(record: dict[str, Tensor]) -> LaunchEntries:
    """All entries of the device's record, those of prompts that go on emit nothing."""
    at = HEADER_FIELDS.index("num_decode")
    assert HEADER_FIELDS[at + 1] == "num_prefill"
    return LaunchEntries(record["header"][at : at + 2], emits=record["chunk_is_last"])
