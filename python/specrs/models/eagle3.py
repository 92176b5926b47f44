"""From a folder or hub id to an EAGLE-3 head of a target. Every tensor of the file is known, and all that a head needs
are there: names that fit nothing would leave weights at random, which no result shows but a low acceptance."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

import numpy as np

from specrs.arrays import BFLOAT16, Array, aligned, converted
from specrs.errors import CheckpointError
from specrs.models.checkpoint import Checkpoint, read_json, resolve_folder
from specrs.models.dense_native import NativeDense
from specrs.models.dense_weights import D, DenseFacts, NativeWeights, T, W
from specrs.models.eagle3_config import Eagle3Config, TargetFacts, parse_eagle3_config
from specrs.models.eagle3_native import NativeEagle3Head
from specrs.models.eagle3_weights import Eagle3Facts, HeadWeights
from specrs.models.errors import malformed, of_folder
from specrs.models.layer_reader import LayerReader
from specrs.models.native_loader import NativeReader
from specrs.models.stored import NativeWeight, StackedWeight
from specrs.models.tensors import Readable

if TYPE_CHECKING:
    from specrs.parallel.ranks import Ranks

EMBEDDING, LM_HEAD, D2T = "embed_tokens.weight", "lm_head.weight", "d2t"
NOT_READ = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""What training leaves beside the head's own tensors."""
_OLD_FC_NORMS = ("aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight")


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """A head's folder, opened for a target and checked against it. No tensor is read."""

    path: str
    """What the user calls it."""
    config: Eagle3Config
    checkpoint: Checkpoint


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


def tensor_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that the checkpoint of a head must hold; those that it may are not among them."""
    c, p = config.layer, config.layer_prefix
    h, q, kv, i = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size
    fused = len(config.aux_layer_ids) * config.target_hidden_size
    projections = {
        "self_attn.q_proj": (q, 2 * h, c.qkv_bias),
        "self_attn.k_proj": (kv, 2 * h, c.qkv_bias),
        "self_attn.v_proj": (kv, 2 * h, c.qkv_bias),
        "self_attn.o_proj": (h, q, c.o_bias),
        "mlp.gate_proj": (i, h, c.mlp_bias),
        "mlp.up_proj": (i, h, c.mlp_bias),
        "mlp.down_proj": (h, i, c.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (h, fused), "norm.weight": (h,)}
    for name, (rows, columns, bias) in projections.items():
        shapes[f"{p}{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{p}{name}.bias"] = (rows,)
    shapes |= {f"{p}{name}.weight": (h,) for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")}
    if c.qk_norm:
        shapes |= {f"{p}self_attn.{x}_norm.weight": (c.head_dim,) for x in "qk"}
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (fused,)
    return shapes


class HeadReader(LayerReader[T, W], Generic[T, W, D]):
    """Reads, fuses and lays out the tensors of one head."""

    file: Checkpoint
    config: Eagle3Config
    """The whole head's."""
    held: Eagle3Config
    """With the heads and features that are here."""
    target: DenseFacts
    dtype: D

    def load(self) -> HeadWeights[T, W, D]:
        """Read everything. Raises CheckpointError."""
        config, c = self.config, self.config.layer
        fc_norms = self.check()
        target_ids = self.target_ids()
        embedding = self.embedding()
        fc_norm = None
        if config.norm_before_fc:
            fc_norm = self.read("input_norm.weight")
        elif config.fc_norm:
            fc_norm = self.place(np.stack([self.vector(name) for name in fc_norms]))
        return HeadWeights(
            config=self.held,
            dtype=self.dtype,
            embedding=embedding,
            fc=self.fc("fc.weight"),
            fc_norm=fc_norm,
            hidden_norm=self.read(config.layer_prefix + "hidden_norm.weight"),
            layer=self.layer(config.layer_prefix, self.held.layer),
            final_norm=self.read("norm.weight"),
            lm_head=self.lm_head(embedding),
            rotary=self.signed((c.rope_theta, c.rope_scaling), c.head_dim),
            target_ids=self.place(target_ids),
            max_position_embeddings=max(c.max_position_embeddings, self.target.max_position_embeddings),
        )

    def check(self) -> list[str]:
        """Check names and shapes; return the names of the norms of the entries."""
        config, c, target = self.config, self.config.layer, self.target
        required = tensor_shapes(config)
        fc_norms: list[str] = []
        if config.fc_norm:
            fc_norms = [f"fc_norm.{i}.weight" for i in range(len(config.aux_layer_ids))]
            if len(fc_norms) == len(_OLD_FC_NORMS) and fc_norms[0] not in self.checkpoint:
                fc_norms = list(_OLD_FC_NORMS) if _OLD_FC_NORMS[0] in self.checkpoint else fc_norms
            required |= dict.fromkeys(fc_norms, (config.target_hidden_size,))
        optional = {
            EMBEDDING: (c.vocab_size, c.hidden_size),
            LM_HEAD: (config.draft_vocab_size, c.hidden_size),
        }
        own = EMBEDDING in self.checkpoint
        if c.hidden_size != target.config.hidden_size and not own:
            required[EMBEDDING] = optional[EMBEDDING]
        tied = own and c.tie_word_embeddings
        if config.draft_vocab_size != c.vocab_size or (c.hidden_size != target.config.hidden_size and not tied):
            required[LM_HEAD] = optional[LM_HEAD]
        self.file.check(required, optional, not_checked=(D2T, *NOT_READ))
        return fc_norms

    def target_ids(self) -> Array:
        """Return the target's id of each draft id, int64: `d2t` holds the difference. Kept ids ascend, so no two are
        the same."""
        size, vocab = self.config.draft_vocab_size, self.config.layer.vocab_size
        own = np.arange(size)
        if D2T not in self.checkpoint:
            if size != vocab:
                allowed = f"{vocab}, the target's ids, where the file has no {D2T}"
                raise malformed("draft_vocab_size", size, allowed)
            return own
        d2t, file = self.file.mapped(D2T), str(self.file.folder)
        if d2t.dtype not in (np.int64, np.int32) or d2t.shape != (size,):
            raise malformed(
                D2T, f"{d2t.shape} of {d2t.dtype}", f"({size},) of int64, as draft_vocab_size says", file=file
            )
        ids = own + d2t
        outside = np.flatnonzero((ids < 0) | (ids >= vocab))
        if len(outside):
            at, allowed = outside[0], f"an offset to an id of the target, from 0 to {vocab - 1}"
            raise malformed(f"{D2T}[{at}]", int(d2t[at]), allowed, file=file)
        falls = np.flatnonzero(np.diff(ids) <= 0)
        if len(falls):
            at = falls[0] + 1
            allowed = f"at least {int(d2t[at - 1])}, so that ids of the target increase"
            raise malformed(f"{D2T}[{at}]", int(d2t[at]), allowed, file=file)
        return ids

    @abstractmethod
    def embedding(self) -> T:
        """Return the embedding: the target's where the file has none, or the same numbers."""

    @abstractmethod
    def fc(self, name: str) -> W:
        """Return the projection of the target's states."""

    @abstractmethod
    def lm_head(self, embedding: T) -> W:
        """Return the LM head: the file's, else `embedding` where it is tied to the file's, else the target's."""


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
