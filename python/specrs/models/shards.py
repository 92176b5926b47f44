"""Which part of a model a rank holds: of its tensors, and of the sizes that config.json says. Exchanges nothing.

Attention is split by heads and the MLP, of a layer or of an expert, by its intermediate features: projections into
them by rows, those out of them by columns (Shoeybi et al. 2019), so that a layer has two sums. Fewer KV heads than
ranks are held by several ranks each. The vocabulary is split by rows, in parts of equal size, behind the last of which
there are rows of zeros. Norms and the experts' router are whole everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from specrs.errors import UnsupportedConfigError, UnsupportedModelError, invalid
from specrs.kernels.coded_weight import IN, OUT, CodedWeight
from specrs.models.config import ModelConfig
from specrs.models.dummy import DummyCheckpoint
from specrs.models.tensors import EMBEDDING, LM_HEAD, Tensors, tensor_shapes


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of rank `rank` of `size`."""

    rank: int
    size: int

    def of_config(self, c: ModelConfig) -> ModelConfig:
        """`c` with the heads and features of this rank; the vocabulary is the whole one."""
        experts = c.experts
        if experts is not None:
            experts = replace(experts, intermediate_size=experts.intermediate_size // self.size)
        return replace(
            c,
            num_heads=c.num_heads // self.size,
            num_kv_heads=max(1, c.num_kv_heads // self.size),
            intermediate_size=c.intermediate_size // self.size,
            experts=experts,
        )

    def kv_heads(self, c: ModelConfig) -> tuple[int, int]:
        """The first of this rank's KV heads, and how many."""
        count = max(1, c.num_kv_heads // self.size)
        return self.rank * c.num_kv_heads // self.size, count

    def of_codes(self, name: str, whole: CodedWeight, c: ModelConfig) -> CodedWeight | None:
        """This rank's part of the weight `name` of a checkpoint of `c`; None where it cannot be cut between groups, or
        where heads of a fused weight are held by several ranks."""
        leaf, kv_heads = name.split(".")[-2], c.num_kv_heads
        try:
            if leaf in ("o_proj", "down_proj"):
                return whole.shard(IN, self.rank, self.size)
            if leaf in ("k_proj", "v_proj") and kv_heads < self.size:
                return whole.shard(OUT, self.kv_heads(c)[0], kv_heads)
            if leaf == "gate_up_proj":
                return whole.shard(OUT, self.rank, self.size, [whole.shape[0] // 2] * 2)
            if leaf == "qkv_proj":
                kv = kv_heads * c.head_dim
                return whole.shard(OUT, self.rank, self.size, [c.num_heads * c.head_dim, kv, kv])
            return whole.shard(OUT, self.rank, self.size)
        except ValueError:
            return None

    def tensor_shapes(self, c: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Names and shapes of what this rank holds of a checkpoint of `c`."""
        shapes = tensor_shapes(self.of_config(c))
        rows = -(-c.vocab_size // self.size)
        return shapes | {name: (rows, c.hidden_size) for name in (EMBEDDING, LM_HEAD) if name in shapes}


def check_cuda_ranks(c: ModelConfig, field: str, size: int) -> None:
    """Raises UnsupportedModelError, which names `field`, for a model whose parts a GPU's kernels do not compute."""
    if c.qk_norm_whole:
        reason = "not implemented for norms over the query and key heads of all ranks on a GPU; allowed: 1"
        raise invalid(UnsupportedModelError, field, size, reason)


def check_divides(c: ModelConfig, source: str, field: str, size: int) -> None:
    """Raises UnsupportedConfigError, which names `field`, for a model that `size` ranks cannot split."""
    sizes = {"num_attention_heads": c.num_heads}
    if c.experts is None or not all(c.experts.layers):
        sizes["intermediate_size"] = c.intermediate_size
    if c.experts is not None:
        sizes["an expert's intermediate size"] = c.experts.intermediate_size
    for name, value in sizes.items():
        if value % size:
            raise invalid(UnsupportedConfigError, field, size, f"{source} has {name}={value}; allowed: its divisors")
    if c.num_kv_heads % size and size % c.num_kv_heads:
        allowed = "its divisors and multiples"
        reason = f"{source} has num_key_value_heads={c.num_kv_heads}; allowed: {allowed}"
        raise invalid(UnsupportedConfigError, field, size, reason)


class ShardedTensors:
    """The tensors of a checkpoint, of each the part of one rank."""

    def __init__(self, whole: Tensors, config: ModelConfig, shard: Shard) -> None:
        """`config` is that of the whole model."""
        self._whole, self._config, self._shard = whole, config, shard

    @property
    def folder(self) -> Path | str:
        """What messages call it."""
        return self._whole.folder

    def __contains__(self, name: str) -> bool:
        return name in self._whole

    def check(self, required: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]]) -> None:
        """Raise if what is `required` is not there in its shape, as a whole."""
        self._whole.check(required, optional)

    def read(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """This rank's part of one tensor as `dtype`: it is cut on the host, and `device` never holds the rest.

        Dummy weights are the exception, drawn whole on `device`: a host would take minutes.
        """
        if isinstance(self._whole, DummyCheckpoint):
            return self._part(name, self._whole.read(name, dtype, device))
        return self.mapped(name).to(device=device, dtype=dtype)

    def mapped(self, name: str) -> Tensor:
        """This rank's part of one tensor in the file's type, in memory of its own unless all of it is the rank's."""
        return self._part(name, self._whole.mapped(name))

    def _part(self, name: str, whole: Tensor) -> Tensor:
        module, kind = name.rsplit(".", 1) if "." in name else ("", name)
        leaf = module.rsplit(".", 1)[-1]
        if kind == "sinks":
            return self._even(whole)
        # A scale of K or V is that of all heads.
        cut = self._cuts().get(leaf) if kind in ("weight", "bias") else None
        return whole if cut is None else cut(whole, kind)

    def _cuts(self) -> dict[str, Callable[[Tensor, str], Tensor]]:
        c = self._config
        gate, up, down = ("gate_proj", "up_proj", "down_proj") if c.experts is None else c.experts.projections
        cuts: dict[str, Callable[[Tensor, str], Tensor]] = {
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
            cuts |= {"q_norm": self._even, "k_norm": self._kv}
        return cuts

    def _even(self, whole: Tensor, kind: str = "weight") -> Tensor:
        rows = len(whole) // self._shard.size
        return whole[self._shard.rank * rows :][:rows].clone()

    def _kv(self, whole: Tensor, kind: str = "weight") -> Tensor:
        first, count = self._shard.kv_heads(self._config)
        rows = len(whole) // self._config.num_kv_heads
        return whole[first * rows :][: count * rows].clone()

    def _qkv(self, whole: Tensor, kind: str) -> Tensor:
        c = self._config
        q, k, v = whole.split_with_sizes([c.num_heads * c.head_dim, *[c.num_kv_heads * c.head_dim] * 2])
        return torch.cat((self._even(q), self._kv(k), self._kv(v)))

    def _gate_up(self, whole: Tensor, kind: str) -> Tensor:
        return torch.cat([self._even(part) for part in whole.chunk(2)])

    def _columns(self, whole: Tensor, kind: str) -> Tensor:
        """Of a bias all on rank 0, and zeros elsewhere: it is in the sum once."""
        if kind == "bias":
            return whole if self._shard.rank == 0 else torch.zeros_like(whole)
        columns = whole.shape[1] // self._shard.size
        return whole[:, self._shard.rank * columns :][:, :columns].clone(memory_format=torch.contiguous_format)

    def _ids(self, whole: Tensor, kind: str) -> Tensor:
        rows = -(-len(whole) // self._shard.size)
        part = whole[self._shard.rank * rows :][:rows]
        return torch.cat((part, part.new_zeros(rows - len(part), *whole.shape[1:])))
