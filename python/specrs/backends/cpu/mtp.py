"""Loader of MTP heads for a CPU. A head is native if its target is, and else computed by torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from specrs.arrays import Array
from specrs.backends.cpu.weights import NativeReader, head_matrix
from specrs.drafters.mtp.native import NativeMtpHead
from specrs.drafters.mtp.reader import MtpFiles, MtpReader
from specrs.drafters.mtp.weights import MtpFacts
from specrs.models.decoder_weights import DecoderFacts
from specrs.models.native_decoder import NativeDecoder, rows_of
from specrs.models.stored import NativeWeight

if TYPE_CHECKING:
    from specrs.parallel.ranks import Ranks


def load_mtp(
    files: MtpFiles, target: DecoderFacts, cache_dtype: np.dtype[Any] | None = None, ranks: Ranks | None = None
) -> MtpFacts:
    """Load a head in the dtype of `target`: a `NativeMtpHead` for a native target, else torch's `MtpHead`.

    With the target's `ranks`, load this rank's part; without, the whole head, even if the target has ranks.
    `cache_dtype` is the dtype of the head's K and V in the cache; None: the head's dtype. Embedding and LM head are the
    target's. Raises CheckpointError for tensors that are missing, unknown or misshapen, before the first is read.
    """
    if isinstance(target, NativeDecoder):
        return NativeMtpHead(NativeMtpReader(files, target).load(cache_dtype))
    from specrs.drafters.mtp.torch_loader import load_torch_mtp
    from specrs.models.torch_decoder import TorchDecoder  # and torch, which native targets do without

    assert isinstance(target, TorchDecoder)
    return load_torch_mtp(files, target, cache_dtype, ranks)


class NativeMtpReader(NativeReader, MtpReader[Array, NativeWeight, np.dtype[Any]]):
    """Reads a head's tensors for native passes. Matrices stay mapped if they are bf16; norms become float32."""

    def __init__(self, files: MtpFiles, target: NativeDecoder) -> None:
        self.checkpoint = files.tensors
        self.files, self.held, self.target = files, files.config, target

    def matrix(self, name: str) -> Array:
        """Return the matrix `name`: in place if it is bf16, else converted to the target's dtype."""
        return head_matrix(self.files.tensors.mapped(name), self.target.dtype)

    def lm_head(self, ids: Array, *, first: bool) -> NativeWeight:
        """Return the target's LM head if `ids` are its first ones. Otherwise copy the rows `ids`, as bfloat16 if they
        are quantized: that suffices for drafts."""
        shared: NativeWeight = self.target.weights.lm_head
        return shared if first else rows_of(shared, ids)
