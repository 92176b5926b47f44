"""From a folder or hub id to an EAGLE-3 head of a target. Every tensor of the file is known, and all that a head needs
are there: names that fit nothing would leave weights at random, which no result shows but a low acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specrs.arrays import BFLOAT16, Array, aligned, converted
from specrs.errors import CheckpointError
from specrs.models.checkpoint import Checkpoint, read_json, resolve_folder
from specrs.models.dense_native import NativeDense
from specrs.models.dense_weights import DenseFacts, NativeWeights
from specrs.models.eagle3_config import TargetFacts, parse_eagle3_config
from specrs.models.eagle3_native import NativeEagle3Head
from specrs.models.eagle3_reader import EMBEDDING, LM_HEAD, HeadFiles, HeadReader
from specrs.models.eagle3_weights import Eagle3Facts
from specrs.models.errors import of_folder
from specrs.models.native_loader import NativeReader
from specrs.models.stored import NativeWeight, StackedWeight
from specrs.models.tensors import Readable

if TYPE_CHECKING:
    from specrs.parallel.ranks import Ranks


def load_eagle3(
    path: str | Path,
    target: DenseFacts,
    *,
    aux_hidden_state_layer_ids: Sequence[int] | None = None,
    rope_theta: float | None = None,
    revision: str | None = None,
    cache_dtype: np.dtype[Any] | None = None,
    ranks: Ranks | None = None,
) -> Eagle3Facts:
    """Load the head in a folder or hub id for `target`, in its dtype and on its device; all is checked before any is
    read. The head of a native target is a `NativeEagle3Head`, every other an `Eagle3Head` of torch's.

    With `ranks`, those of the target, it is this rank's part of the head; without, the whole head, whatever the
    target's ranks are. `cache_dtype` is the type of its K and V, see `HeadWeights`.

    Embedding and LM head are the target's where the checkpoint leaves them out or has the same numbers.

    Raises CheckpointError, UnsupportedModelError or InvalidConfigError, see `parse_eagle3_config`; CheckpointError for
    tensors that are missing, unknown or misshapen, and for a head that is only there as a pickle.
    """
    folder = resolve_folder(path, revision)
    with of_folder(folder):
        config = parse_eagle3_config(
            read_json(folder / "config.json"),
            TargetFacts(
                target.config.hidden_size, target.vocab_size, target.num_layers, target.max_position_embeddings
            ),
            aux_hidden_state_layer_ids=aux_hidden_state_layer_ids,
            rope_theta=rope_theta,
        )
    try:
        checkpoint = Checkpoint(folder)
    except CheckpointError as error:
        if any(folder.glob("*.safetensors*")):
            raise
        raise CheckpointError(f"{error}; for a head `specrs convert-head {path} FOLDER` does it") from error
    files = HeadFiles(str(path), config, checkpoint)
    if isinstance(target, NativeDense):
        native = NativeHeadReader(files, target).load()
        return NativeEagle3Head(replace(native, cache_dtype=cache_dtype))
    from specrs.models.eagle3_torch import load_torch_head  # and torch, which native targets do without

    return load_torch_head(files, target, cache_dtype, ranks)


class NativeHeadReader(NativeReader, HeadReader[Array, NativeWeight, np.dtype[Any]]):
    """Leaves matrices as the file has them where passes read that; norms and biases are float32."""

    def __init__(self, files: HeadFiles, target: NativeDense) -> None:
        self.checkpoint: Readable = files.checkpoint
        self.file, self.config, self.held = files.checkpoint, files.config, files.config
        self.target, self.dtype = target, target.dtype
        self._shared: NativeWeights = target.weights

    def embedding(self) -> Array:
        """See `HeadReader`; like what follows."""
        shared = self._shared.embedding
        if EMBEDDING not in self.checkpoint:
            return shared
        own = self.file.mapped(EMBEDDING)
        if own.shape == shared.shape and np.array_equal(converted(own, shared.dtype), shared):
            return shared
        return self.matrix(EMBEDDING)

    def fc(self, name: str) -> NativeWeight:
        """See `HeadReader`."""
        return StackedWeight((self.matrix(name),))

    def lm_head(self, embedding: Array) -> NativeWeight:
        """See `HeadReader`."""
        if LM_HEAD in self.checkpoint:
            return StackedWeight((self.matrix(LM_HEAD),))
        if self.config.layer.tie_word_embeddings and EMBEDDING in self.checkpoint:
            return StackedWeight((embedding,))
        return self._shared.lm_head

    def matrix(self, name: str) -> Array:
        """See `LayerReader`."""
        matrix = self.file.mapped(name)
        return aligned(matrix if matrix.dtype == BFLOAT16 else converted(matrix, self.dtype))
