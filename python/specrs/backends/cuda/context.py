"""Everything that an iteration on a CUDA device reads and writes, as one value. Computes nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from specrs.backends.cuda.buffers import Buffers, DeviceRecord
from specrs.backends.cuda.chunk_buffers import ChunkBuffers
from specrs.backends.cuda.decoder import CudaDecoder
from specrs.backends.cuda.draft_passes import DraftPasses, HiddenSource
from specrs.backends.cuda.draft_rules import DraftRules
from specrs.backends.cuda.net_states import NetStates
from specrs.backends.cuda.row_state import RowState
from specrs.core import HEADER_FIELDS
from specrs.kernels.cuda.prepare import Sizes
from specrs.kernels.cuda.sampling_scratch import SamplingScratch
from specrs.kernels.cuda.sampling_structs import RowParams
from specrs.models.base import TorchModel
from specrs.models.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class Context:
    """Everything that an iteration reads and writes. Its memory lives as long as the engine, at fixed addresses."""

    state: RowState
    params: RowParams
    record: DeviceRecord
    buffers: Buffers
    chunks: ChunkBuffers
    scratch: SamplingScratch
    target: TorchModel
    states: NetStates[Any] | None  # of the target's delta nets or short convolutions; None: all layers have attention
    kv_cache: KVCache
    drafter: DraftPasses | None  # None without speculation, and if all drafts are from the host
    rules: DraftRules
    proposed: Tensor | None  # [R, K], the record's drafts by sequence; None: no drafter is on the host
    draft_start: Tensor | None  # [R + 1] int64, first position of each row's draft KV; None: 0
    sizes: Sizes
    max_model_len: int
    rule: str  # rejection or coupled; coupled if q is a point mass, where both are the same
    rates: Tensor | None  # [K] fp32, acceptance rates used instead of the rule, for timing only

    def without_adapters(self) -> Context | None:
        """Return the context for steps in which no sequence has a LoRA adapter. It has the same buffers, and a target
        that computes without adapters. None: the engine has no LoRA adapters."""
        if not isinstance(self.target, CudaDecoder) or self.target.adapters is None:
            return None
        return replace(self, target=replace(self.target, adapters=None))

    @property
    def in_parallel(self) -> bool:
        """True if one draft pass makes all drafts."""
        return self.sizes.mask_token_id is not None

    @property
    def hidden(self) -> HiddenSource | None:
        """Hidden states of the target that are stored for the drafter; None if the drafter reads none."""
        return None if self.drafter is None else self.drafter.hidden

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layers of the target whose inputs are kept for the drafter."""
        return () if self.hidden is None else self.hidden.layers


@dataclass(frozen=True, slots=True)
class StepSequences:
    """Sequences of a step that an iteration covers: decoding ones, the prompt chunks after them, or both."""

    count: Tensor  # [1], a view of the record's header; [2]: of decoding sequences and of chunks
    first: int = 0
    emits: Tensor | None = None  # [>= B] 1 for the last chunk of a prompt


def sequences_of(record: dict[str, Tensor], kind: str, first: int = 0, emits: Tensor | None = None) -> StepSequences:
    """Return the decoding (`num_decode`) or prompt (`num_prefill`) sequences of the device's record."""
    at = HEADER_FIELDS.index(kind)
    return StepSequences(record["header"][at : at + 1], first, emits)


def all_sequences(record: dict[str, Tensor]) -> StepSequences:
    """Return all sequences of the device's record. Prompt chunks that do not end their prompt emit nothing."""
    at = HEADER_FIELDS.index("num_decode")
    assert HEADER_FIELDS[at + 1] == "num_prefill"
    return StepSequences(record["header"][at : at + 2], emits=record["chunk_is_last"])
