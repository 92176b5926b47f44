"""Reads the tensors of an EAGLE-3 head's checkpoint, for torch or for native passes. Builds no head."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Generic

import numpy as np

from specrs.arrays import Array
from specrs.drafters.eagle3.config import Eagle3Config
from specrs.drafters.eagle3.weights import HeadWeights
from specrs.models.checkpoint import Checkpoint
from specrs.models.decoder_weights import D, DecoderFacts, T, W
from specrs.models.errors import malformed
from specrs.models.layer_reader import LayerReader

EMBEDDING, LM_HEAD, D2T = "embed_tokens.weight", "lm_head.weight", "d2t"
NOT_READ = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""Names of tensors that training scripts save in a head's checkpoint and that no pass of the head reads."""
_OLD_FC_NORMS = ("aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight")


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """Folder of a head, opened for a target and checked against it. No tensor is read yet."""

    path: str
    """The user's name for the head."""
    config: Eagle3Config
    checkpoint: Checkpoint


def tensor_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors that a head's checkpoint must hold. Optional tensors are not among
    them."""
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
    """Reader of one head's tensors, which it fuses and lays out."""

    file: Checkpoint
    config: Eagle3Config
    """Configuration of the whole head."""
    held: Eagle3Config
    """Configuration with the number of attention heads and features that this rank holds."""
    target: DecoderFacts
    dtype: D

    def load(self) -> HeadWeights[T, W, D]:
        """Read all tensors. Raises CheckpointError if one is missing, unknown, misshapen or not finite."""
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
        """Check names and shapes of the tensors. Return the names of the norms that are applied before `fc` to each of
        the target's hidden states; [] if there are none. Raises CheckpointError."""
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
        """Return the target's id of each draft id, int64. `d2t` holds the difference between them. The ids must ascend,
        so no two are equal."""
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
        """Return the embedding. It is the target's own tensor if the file has no embedding, or one that equals the
        target's."""

    @abstractmethod
    def fc(self, name: str) -> W:
        """Return the projection of the target's hidden states."""

    @abstractmethod
    def lm_head(self, embedding: T) -> W:
        """Return the LM head: the file's; if the file has none, `embedding` if it is tied, else the target's."""
