"""Loader of EAGLE-3 heads for a CPU. A head is native if its target is, and else computed by torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specrs.arrays import Array, converted
from specrs.backends.cpu.weights import NativeReader, head_matrix
from specrs.core import PackedMatrix
from specrs.drafters.eagle3.files import open_head
from specrs.drafters.eagle3.native import NativeEagle3Head
from specrs.drafters.eagle3.reader import EMBEDDING, LM_HEAD, HeadFiles, HeadReader
from specrs.drafters.eagle3.weights import Eagle3Facts
from specrs.models.decoder_weights import DecoderFacts, NativeWeights
from specrs.models.native_decoder import NativeDecoder
from specrs.models.stored import NativeWeight, StackedWeight
from specrs.models.tensors import Readable

if TYPE_CHECKING:
    from specrs.parallel.ranks import Ranks


def load_eagle3(
    path: str | Path,
    target: DecoderFacts,
    *,
    cache_dtype: np.dtype[Any] | None = None,
    ranks: Ranks | None = None,
    **options: Any,
) -> Eagle3Facts:
    """Load the EAGLE-3 head in a folder or hub id for `target`. `options` go to `open_head`; `cache_dtype` and `ranks`
    are explained at `load_head`.

    Raises CheckpointError for tensors that are missing, unknown or misshapen.
    """
    return load_head(open_head(path, target, **options), target, cache_dtype, ranks)


def load_head(
    files: HeadFiles, target: DecoderFacts, cache_dtype: np.dtype[Any] | None = None, ranks: Ranks | None = None
) -> Eagle3Facts:
    """Load a head in the dtype of `target`: a `NativeEagle3Head` for a native target, else torch's `Eagle3Head`.

    With the target's `ranks`, load this rank's part; without, the whole head, even if the target has ranks.
    `cache_dtype` is the dtype of the head's K and V in the cache; None: the head's dtype.

    Embedding and LM head are the target's if the checkpoint leaves them out or has the same numbers. Raises
    CheckpointError for tensors that are missing, unknown or misshapen. All are checked before the first is read.
    """
    if isinstance(target, NativeDecoder):
        native = NativeHeadReader(files, target).load()
        return NativeEagle3Head(replace(native, cache_dtype=cache_dtype))
    from specrs.drafters.eagle3.torch_loader import load_torch_head
    from specrs.models.torch_decoder import TorchDecoder  # and torch, which native targets do without

    assert isinstance(target, TorchDecoder)
    return load_torch_head(files, target, cache_dtype, ranks)


class NativeHeadReader(NativeReader, HeadReader[Array, NativeWeight, np.dtype[Any]]):
    """Reads a head's tensors for native passes. Matrices stay mapped if passes can read them in place; norms and biases
    become float32."""

    def __init__(self, files: HeadFiles, target: NativeDecoder) -> None:
        self.checkpoint: Readable = files.checkpoint
        self.file, self.config, self.held = files.checkpoint, files.config, files.config
        self.target, self.dtype = target, target.dtype
        self._shared: NativeWeights = target.weights

    def embedding(self) -> Array:
        """Return the embedding, `[vocab, hidden]`: the target's array if the file has none or the same numbers."""
        shared = self._shared.embedding
        if EMBEDDING not in self.checkpoint:
            return shared
        own = self.file.mapped(EMBEDDING)
        if isinstance(shared, PackedMatrix):  # its numbers are not at hand to compare with
            return self.matrix(EMBEDDING)
        if own.shape == shared.shape and np.array_equal(converted(own, shared.dtype), shared):
            return shared
        return self.matrix(EMBEDDING)

    def fc(self, name: str) -> NativeWeight:
        """Return the projection `name`, which fuses hidden states of the target."""
        return StackedWeight((self.matrix(name),))

    def lm_head(self, embedding: Array) -> NativeWeight:
        """Return the LM head: the checkpoint's, else `embedding` if they are tied, else the target's."""
        if LM_HEAD in self.checkpoint:
            return StackedWeight((self.matrix(LM_HEAD),))
        if self.config.layer.tie_word_embeddings and EMBEDDING in self.checkpoint:
            return StackedWeight((embedding,))
        return self._shared.lm_head

    def matrix(self, name: str) -> Array:
        """Return the matrix `name`: in place if it is bf16, else converted to the head's dtype."""
        return head_matrix(self.file.mapped(name), self.dtype)
