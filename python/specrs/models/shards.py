"""The part of a model that a tensor parallel rank holds: of its tensors and of its sizes. Exchanges nothing.

Attention is split by heads, and an MLP or expert by its intermediate features. Projections into them are split by rows,
projections out of them by columns, so a layer has two sums over ranks (Shoeybi et al. 2019). If there are fewer KV
heads than ranks, several ranks hold the same head. A gated delta net is split by key heads, each with its value heads,
and a short convolution by channels.
The vocabulary is split by rows into parts of equal size; the last part is padded with rows of zeros. Every rank holds
all norms, the experts' router and the gate of a shared expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from specrs.arrays import Array, converted
from specrs.errors import UnsupportedConfigError, UnsupportedModelError, invalid
from specrs.models.config import ModelConfig
from specrs.models.experts import SHARED_SIZE
from specrs.models.registry import FAMILIES
from specrs.models.tensors import EMBEDDING, LM_HEAD, Tensors, state_inputs, tensor_shapes


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model that rank `rank` of `size` ranks holds."""

    rank: int
    size: int

    def of_config(self, c: ModelConfig) -> ModelConfig:
        """Return `c` with this rank's number of heads and intermediate size. Hidden size and vocabulary size stay those
        of the whole model."""
        experts, delta, conv, size = c.experts, c.delta, c.conv, self.size
        if experts is not None:
            shared = None if experts.shared is None else experts.shared // size
            experts = replace(experts, intermediate_size=experts.intermediate_size // size, shared=shared)
        if delta is not None:
            delta = replace(delta, key_heads=delta.key_heads // size, value_heads=delta.value_heads // size)
        if conv is not None:
            conv = replace(conv, channels=conv.channels // size)
        return replace(
            c,
            num_heads=c.num_heads // size,
            num_kv_heads=max(1, c.num_kv_heads // size),
            intermediate_size=c.intermediate_size // size,
            experts=experts,
            delta=delta,
            conv=conv,
        )

    def kv_heads(self, c: ModelConfig) -> tuple[int, int]:
        """Return the index of this rank's first KV head, and the number of its KV heads."""
        count = max(1, c.num_kv_heads // self.size)
        return self.rank * c.num_kv_heads // self.size, count

    def tensor_shapes(self, c: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the tensors that this rank holds of a checkpoint of `c`."""
        shapes = tensor_shapes(self.of_config(c))
        rows = -(-c.vocab_size // self.size)
        return shapes | {name: (rows, c.hidden_size) for name in (EMBEDDING, LM_HEAD) if name in shapes}


def check_gpu_parts(c: ModelConfig, field: str, size: int) -> None:
    """Raise UnsupportedModelError, which names `field`, if GPU kernels cannot compute a rank's part of the model: its
    norms span the heads of several ranks."""
    if c.qk_norm_whole:
        part = "norms over the query and key heads of all ranks"
        reason = f"not implemented for {part} on a GPU; allowed: 1, or device='cpu'"
        raise invalid(UnsupportedModelError, field, size, reason)


def check_divides(c: ModelConfig, source: str, field: str, size: int) -> None:
    """Raise UnsupportedConfigError, which names `field`, if `size` ranks cannot split the model in `source`."""
    if c.varied:
        reason = f"not implemented for a model whose layers have different sizes, as in {source}; allowed: 1"
        raise invalid(UnsupportedConfigError, field, size, reason)
    sizes = {"num_attention_heads": c.num_heads}
    if c.experts is None or not all(c.experts.layers):
        sizes[FAMILIES[c.architecture].intermediate_field] = c.intermediate_size
    if c.experts is not None:
        sizes["an expert's intermediate size"] = c.experts.intermediate_size
        if c.experts.shared is not None:
            sizes[SHARED_SIZE] = c.experts.shared
    if c.delta is not None:
        # Its value heads are a multiple of these.
        sizes["linear_num_key_heads"] = c.delta.key_heads
    if c.conv is not None:
        sizes["hidden_size"] = c.conv.channels
    for name, value in sizes.items():
        if value % size:
            raise invalid(UnsupportedConfigError, field, size, f"{source} has {name}={value}; allowed: its divisors")
    if c.num_kv_heads % size and size % c.num_kv_heads:
        allowed = "its divisors and multiples"
        reason = f"{source} has num_key_value_heads={c.num_kv_heads}; allowed: {allowed}"
        raise invalid(UnsupportedConfigError, field, size, reason)


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a tensor that a rank holds: slices of it, concatenated along `axis`, then rows of zeros."""

    slices: tuple[tuple[slice, ...], ...]
    zero_rows: int = 0
    axis: int = 0

    def of(self, whole: Array) -> Array:
        """Return the part of `whole` as a copy."""
        parts = [whole[place] for place in self.slices]
        if self.zero_rows:
            parts.append(np.zeros((self.zero_rows, *whole.shape[1:]), whole.dtype))
        return np.concatenate(parts, self.axis)


class ShardedTensors:
    """Tensors of a checkpoint, each sliced to the part of one rank."""

    def __init__(self, whole: Tensors, config: ModelConfig, shard: Shard) -> None:
        """Slice the tensors of the checkpoint `whole` for `shard`. `config` is that of the whole model."""
        self._whole, self._cuts = whole, Cuts(config, shard)

    @property
    def folder(self) -> Path | str:
        """Name of the checkpoint in messages."""
        return self._whole.folder

    def __contains__(self, name: str) -> bool:
        return name in self._whole

    def check(self, required: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]]) -> None:
        """Raise CheckpointError if a `required` tensor is missing. Shapes are those of the whole model."""
        self._whole.check(required, optional)

    def read(self, name: str, dtype: np.dtype[Any]) -> Array:
        """Return this rank's part of the tensor `name` as `dtype`."""
        return converted(self.mapped(name), dtype)

    def mapped(self, name: str) -> Array:
        """Return this rank's part of the tensor `name` in the file's dtype: a copy, or the whole tensor if every rank
        holds all of it."""
        whole = self._whole.mapped(name)
        cut = self._cuts.of(name, whole.shape)
        return whole if cut is None else cut.of(whole)


class Cuts:
    """Rules for cutting each tensor of a checkpoint to the part of one rank."""

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        """Make the rules of `shard` for the whole model's `config`."""
        self._config, self._shard = config, shard
        c = config
        gate, up, down = ("gate_proj", "up_proj", "down_proj") if c.experts is None else c.experts.projections
        self._by_leaf: dict[str, Callable[[tuple[int, ...], str], Cut]] = {
            "embed_tokens": self._ids,
            "lm_head": self._ids,
            "q_proj": self._even,
            "k_proj": self._kv,
            "v_proj": self._kv,
            "qkv_proj": self._qkv,
            "gate_up_proj": self._gate_up,
            "o_proj": self._columns,
            **dict.fromkeys(("gate_proj", "up_proj", gate, up), self._even),
            **dict.fromkeys(("down_proj", down), self._columns),
        }
        if c.qk_norm_whole:
            self._by_leaf |= {"q_norm": self._even, "k_norm": self._kv}
        if c.delta is not None:
            # Rows are ordered by head, but two tensors have q of all heads, then k, then v.
            self._by_leaf |= dict.fromkeys(state_inputs(c.delta), self._even)
            self._by_leaf |= {"in_proj_qkv": self._net_qkv, "conv1d": self._net_qkv, "out_proj": self._net_columns}
        if c.conv is not None:
            self._by_leaf |= {"in_proj": self._thirds, "conv": self._even, "out_proj": self._columns}

    def of(self, name: str, shape: tuple[int, ...]) -> Cut | None:
        """Return the part of the tensor `name`, which has `shape`. None: the rank holds all of it."""
        module, kind = name.rsplit(".", 1) if "." in name else ("", name)
        if kind in ("sinks", "A_log", "dt_bias"):  # one number for each head
            return self._even(shape, kind)
        # A scale of K or V holds for all heads, so every rank needs it.
        cut = self._by_leaf.get(module.rsplit(".", 1)[-1]) if kind in ("weight", "bias") else None
        if cut is None or (cut == self._columns and kind == "bias" and self._shard.rank == 0):
            return None
        return cut(shape, kind)

    def _even(self, shape: tuple[int, ...], kind: str) -> Cut:
        return Cut((self._even_rows(0, shape[0]),))

    def _even_rows(self, first: int, size: int) -> tuple[slice]:
        """Return this rank's equal share of the `size` rows from `first` on."""
        rows = size // self._shard.size
        return (slice(first + self._shard.rank * rows, first + (self._shard.rank + 1) * rows),)

    def _kv(self, shape: tuple[int, ...], kind: str) -> Cut:
        return Cut((self._kv_rows(0, shape[0]),))

    def _kv_rows(self, first: int, size: int) -> tuple[slice]:
        """Return this rank's share of the `size` rows from `first` on, which belong to all KV heads."""
        head, count = self._shard.kv_heads(self._config)
        rows = size // self._config.num_kv_heads
        return (slice(first + head * rows, first + (head + count) * rows),)

    def _qkv(self, shape: tuple[int, ...], kind: str) -> Cut:
        c = self._config
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        return Cut((self._even_rows(0, q), self._kv_rows(q, kv), self._kv_rows(q + kv, kv)))

    def _net_qkv(self, shape: tuple[int, ...], kind: str) -> Cut:
        """Return this rank's share of the rows of a delta net's q, k and v, of all heads each."""
        d = self._config.delta
        assert d is not None
        keys = d.key_heads * d.key_dim
        return Cut((self._even_rows(0, keys), self._even_rows(keys, keys), self._even_rows(2 * keys, d.inner)))

    def _thirds(self, shape: tuple[int, ...], kind: str) -> Cut:
        """Return this rank's share of the rows of a short convolution's B, C and x, of all channels each."""
        size = shape[0] // 3
        return Cut(tuple(self._even_rows(first, size) for first in (0, size, 2 * size)))

    def _net_columns(self, shape: tuple[int, ...], kind: str) -> Cut:
        """Return this rank's columns of a delta net's output projection, in the order of its value heads."""
        d = self._config.delta
        assert d is not None
        if not d.turned:
            return self._columns(shape, kind)
        turn = d.key_heads * d.value_dim
        own = (self._even_rows(first, turn) for first in range(0, d.inner, turn))
        return Cut(tuple((slice(None), *columns) for columns in own), axis=1)

    def _gate_up(self, shape: tuple[int, ...], kind: str) -> Cut:
        size = shape[0] // 2
        return Cut((self._even_rows(0, size), self._even_rows(size, size)))

    def _columns(self, shape: tuple[int, ...], kind: str) -> Cut:
        """Return this rank's columns of a matrix. The whole bias is on rank 0, and zeros on others, so it is added
        once."""
        if kind == "bias":
            return Cut((), shape[0])
        columns = shape[1] // self._shard.size
        return Cut(((slice(None), slice(self._shard.rank * columns, (self._shard.rank + 1) * columns)),))

    def _ids(self, shape: tuple[int, ...], kind: str) -> Cut:
        rows = -(-shape[0] // self._shard.size)
        first = min(self._shard.rank * rows, shape[0])
        end = min(first + rows, shape[0])
        return Cut(((slice(first, end),),), rows - (end - first))
