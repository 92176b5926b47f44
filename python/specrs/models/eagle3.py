"""From a folder or hub id to an EAGLE-3 head of a target. Every tensor of the file is known, and all that a head needs
are there: names that fit nothing would leave weights at random, which no result shows but a low acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from specrs.errors import CheckpointError
from specrs.kernels.linear import DenseWeight, PackedWeight, StackedWeight, Weight, pack
from specrs.kernels.rotary import signed_frequencies
from specrs.models.base import Model
from specrs.models.checkpoint import Checkpoint, read_json, resolve_folder
from specrs.models.dense import Dense
from specrs.models.dense_native import NativeDense
from specrs.models.dense_weights import DenseFacts
from specrs.models.eagle3_config import Eagle3Config, TargetFacts, parse_eagle3_config
from specrs.models.eagle3_head import Eagle3Head, Eagle3Weights
from specrs.models.eagle3_native import NativeEagle3Head
from specrs.models.errors import malformed, of_folder
from specrs.models.loader import LayerReader
from specrs.models.native_loader import NativeReader
from specrs.models.quantization.at_load import aligned
from specrs.models.rope import frequencies
from specrs.models.shards import Shard, ShardedTensors, check_divides
from specrs.parallel.ranks import Ranks

EMBEDDING, LM_HEAD, D2T = "embed_tokens.weight", "lm_head.weight", "d2t"
NOT_READ = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""What training leaves beside the head's own tensors."""
_OLD_FC_NORMS = ("aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight")


def load_eagle3(
    path: str | Path,
    target: Model,
    *,
    dtype: torch.dtype,
    aux_hidden_state_layer_ids: Sequence[int] | None = None,
    rope_theta: float | None = None,
    revision: str | None = None,
    cache_dtype: torch.dtype | None = None,
    ranks: Ranks | None = None,
) -> Eagle3Head:
    """Load the head in a folder or hub id for `target`, on the target's device; all is checked before any is read.
    The head of a native target is native, too. With `ranks`, those of the target, it is this rank's part of the head;
    without, the whole head, whatever the target's ranks are. `cache_dtype`: of its K and V, see `Eagle3Weights`.

    Embedding and LM head are the target's where the checkpoint leaves them out or has the same numbers.

    Raises CheckpointError, UnsupportedModelError or InvalidConfigError, see `parse_eagle3_config`; CheckpointError for
    tensors that are missing, unknown or misshapen, and for a head that is only there as a pickle.
    """
    facts = cast("DenseFacts", target)
    folder = resolve_folder(path, revision)
    with of_folder(folder):
        config = parse_eagle3_config(
            read_json(folder / "config.json"),
            TargetFacts(facts.config.hidden_size, facts.vocab_size, facts.num_layers, facts.max_position_embeddings),
            aux_hidden_state_layer_ids=aux_hidden_state_layer_ids,
            rope_theta=rope_theta,
        )
    try:
        checkpoint = Checkpoint(folder)
    except CheckpointError as error:
        if any(folder.glob("*.safetensors*")):
            raise
        raise CheckpointError(f"{error}; for a head `specrs convert-head {path} FOLDER` does it") from error
    if isinstance(target, NativeDense):
        native = _NativeLoader(config, checkpoint, facts, dtype).load()
        return NativeEagle3Head(replace(native, cache_dtype=cache_dtype))
    if ranks is not None:
        check_divides(config.layer, str(path), "speculative_config.draft_tensor_parallel_size", ranks.size)
    weights = _Loader(config, checkpoint, facts, dtype, ranks).load()
    return Eagle3Head(replace(weights, cache_dtype=cache_dtype), ranks)


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


class _Loader(LayerReader):
    """Reads, fuses and lays out the tensors of one head."""

    def __init__(
        self,
        config: Eagle3Config,
        checkpoint: Checkpoint,
        target: DenseFacts,
        dtype: torch.dtype,
        ranks: Ranks | None = None,
    ) -> None:
        shard = None if ranks is None else Shard(ranks.rank, ranks.size)
        whole = checkpoint if shard is None else ShardedTensors(checkpoint, config.layer, shard)
        super().__init__(whole, dtype, target.device)
        self.file = checkpoint
        self.config = config
        self.target = target
        self.held = config if shard is None else replace(config, layer=shard.of_config(config.layer))
        # A whole head of a target in parts shares no memory with it.
        self.parts = target if ranks is None and isinstance(target, Dense) and target.ranks is not None else None

    def load(self) -> Eagle3Weights:
        config, c = self.config, self.config.layer
        fc_norms = self.check()
        target_ids = self.target_ids()
        embedding = self.embedding()
        fc_norm = None
        if config.norm_before_fc:
            fc_norm = self.read("input_norm.weight")
        elif config.fc_norm:
            fc_norm = torch.stack([self.read(name) for name in fc_norms])
        return Eagle3Weights(
            config=self.held,
            dtype=self.dtype,
            device=self.device,
            embedding=embedding,
            fc=self.fc("fc.weight"),
            fc_norm=fc_norm,
            hidden_norm=self.read(config.layer_prefix + "hidden_norm.weight"),
            layer=self.layer(config.layer_prefix, self.held.layer),
            final_norm=self.read("norm.weight"),
            lm_head=self.lm_head(embedding),
            rotary=signed_frequencies(frequencies((c.rope_theta, c.rope_scaling), c.head_dim)).to(self.device),
            target_ids=target_ids.to(self.device),
            max_position_embeddings=max(c.max_position_embeddings, self.target.max_position_embeddings),
        )

    def check(self) -> list[str]:
        """Check names and shapes; the names of the norms of the entries."""
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

    def target_ids(self) -> Tensor:
        """The target's id of each draft id: `d2t` holds the difference. Kept ids ascend, so no two are the same."""
        size, vocab = self.config.draft_vocab_size, self.config.layer.vocab_size
        own = torch.arange(size)
        if D2T not in self.checkpoint:
            if size != vocab:
                allowed = f"{vocab}, the target's ids, where the file has no {D2T}"
                raise malformed("draft_vocab_size", size, allowed)
            return own
        d2t, file = self.file.mapped(D2T), str(self.file.folder)
        if d2t.dtype not in (torch.int64, torch.int32) or tuple(d2t.shape) != (size,):
            found = f"{tuple(d2t.shape)} of {str(d2t.dtype).removeprefix('torch.')}"
            raise malformed(D2T, found, f"({size},) of int64, as draft_vocab_size says", file=file)
        ids = own + d2t
        outside = ((ids < 0) | (ids >= vocab)).nonzero().view(-1).tolist()
        if outside:
            at, allowed = outside[0], f"an offset to an id of the target, from 0 to {vocab - 1}"
            raise malformed(f"{D2T}[{at}]", int(d2t[at]), allowed, file=file)
        falls = (ids.diff() <= 0).nonzero().view(-1).tolist()
        if falls:
            at = falls[0] + 1
            allowed = f"at least {int(d2t[at - 1])}, so that ids of the target increase"
            raise malformed(f"{D2T}[{at}]", int(d2t[at]), allowed, file=file)
        return ids

    def embedding(self) -> Tensor:
        shared = self.target.weights.embedding
        if EMBEDDING not in self.checkpoint:
            return shared if self.parts is None else self.parts.whole_embedding()
        if isinstance(self.checkpoint, Checkpoint):
            own = self.checkpoint.mapped(EMBEDDING)
        else:
            own = self.checkpoint.read(EMBEDDING, self.dtype, self.device)
        if own.shape == shared.shape and torch.equal(own.to(shared), shared):
            return shared
        return own.to(device=self.device, dtype=self.dtype)

    def fc(self, name: str) -> Weight:
        return pack(self.read(name))

    def lm_head(self, embedding: Tensor) -> Weight:
        config = self.config
        kept = torch.float32 if self.dtype == torch.bfloat16 and self.device.type == "cpu" else self.dtype
        if LM_HEAD in self.checkpoint:
            return pack(self.checkpoint.read(LM_HEAD, self.dtype, self.device).to(kept))
        if config.layer.tie_word_embeddings and EMBEDDING in self.checkpoint:
            return pack(embedding.to(kept))
        shared = self.target.weights.lm_head if self.parts is None else self.parts.whole_lm_head()
        same = isinstance(shared, DenseWeight | PackedWeight) and self.target.dtype == self.dtype
        return shared if same else pack(shared.dequantized().to(kept))


class _NativeLoader(NativeReader, _Loader):
    """Leaves matrices as the file has them where passes read that; norms and biases are fp32."""

    def embedding(self) -> Tensor:
        own = super().embedding()
        return own if own is self.target.weights.embedding else self.matrix(EMBEDDING)

    def fc(self, name: str) -> Weight:
        return StackedWeight((self.matrix(name),))

    def lm_head(self, embedding: Tensor) -> Weight:
        if LM_HEAD in self.checkpoint:
            return StackedWeight((self.matrix(LM_HEAD),))
        if self.config.layer.tie_word_embeddings and EMBEDDING in self.checkpoint:
            return StackedWeight((embedding,))
        return self.target.weights.lm_head

    def matrix(self, name: str) -> Tensor:
        matrix = self.file.mapped(name)
        return aligned(matrix if matrix.dtype == torch.bfloat16 else matrix.to(self.dtype))
