"""Loading by ranks: each device gets only its part, cut on the host. The device is torch's `meta`, so that bytes can be
counted."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, make_checkpoint
from quantized_files import awq, fp8_block
from specrs.backends.cuda.loader import QuantizedLoader
from specrs.models.loader import open_checkpoint
from specrs.models.quantization.base import QuantizedTensors
from specrs.models.shards import Shard
from specrs.models.tensors import tensor_shapes
from specrs.models.torch_loader import Loader
from specrs.models.torch_weights import TorchWeights
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SHAPE: dict[str, Any] = {"hidden": 48, "intermediate": 96, "kv_heads": 2, "head_dim": 12, "group": 2, "vocab": 4097}
"""Sizes of a small model. Its embeddings are the largest tensors, and two ranks do not divide its ids."""


class Device(TorchDispatchMode):
    """Counts bytes on the device without memory: the most held at once, those held now, and bfloat16 bytes that came
    from the host."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[StorageWeakRef, int] = {}
        self.peak = self.moved = 0

    @property
    def held(self) -> int:
        self._storages = {ref: size for ref, size in self._storages.items() if not ref.expired()}
        return sum(self._storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.device.type == "meta":
                storage = tensor.untyped_storage()
                self._storages[StorageWeakRef(storage)] = storage.nbytes()
                if tensor.dtype == torch.bfloat16 and any(
                    isinstance(given, Tensor) and given.device.type == "cpu" for given in tree_leaves(args)
                ):
                    self.moved += tensor.nbytes
        self.peak = max(self.peak, self.held)
        return made


def in_pieces(weights: TorchWeights) -> int:
    """Return the bytes needed in addition to the weights while one of them is put together: its pieces, and itself if
    experts are stacked."""
    found = [w.num_bytes for layer in weights.layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    stacked = [layer.experts.gate_up + layer.experts.down for layer in weights.layers if layer.experts is not None]
    return max(found + [2 * w.num_bytes for experts in stacked for w in experts])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_is_given_its_part_alone(family: str, tmp_path: Path) -> None:
    """Check that a rank gets exactly its part, and while a projection is put together its pieces."""
    folder = make_checkpoint(tmp_path, family, **({"moe_intermediate_size": 96} if "moe" in family else {}), **SHAPE)
    config, checkpoint = open_checkpoint(folder, None, "auto")
    for rank in range(2):
        shard = Shard(rank, 2)
        with Device() as device:
            weights = Loader(config, checkpoint, torch.bfloat16, torch.device("meta"), shard).load()
            held = device.held
        own = shard.of_config(config)
        # Norms of heads are there once for each head.
        of_each = config.qk_norm and not config.qk_norm_whole
        repeated = config.num_layers * of_each * (own.num_heads + own.num_kv_heads - 2) * own.head_dim
        # Norms without weights, in Llama 4's layers with RoPE, have ones.
        rotated = sum(config.rope_of(i) is not None for i in range(config.num_layers))
        repeated += rotated * config.rotated_norm * (own.num_heads + own.num_kv_heads) * own.head_dim
        assert device.moved == 2 * (repeated + sum(map(math.prod, shard.tensor_shapes(config).values())))
        assert device.moved < 0.6 * 2 * sum(map(math.prod, tensor_shapes(config).values()))
        assert device.peak <= held + in_pieces(weights)


@pytest.mark.parametrize(("quantize", "sizes"), [(fp8_block, {}), (awq, {"kv_heads": 1, "group": 4})])
def test_quantized_weights_are_cut_before_they_are_given(quantize: Any, sizes: dict[str, int], tmp_path: Path) -> None:
    shape = SHAPE | {"hidden": 64, "intermediate": 128, "head_dim": 32} | sizes
    make_checkpoint(tmp_path / "source", "qwen2", dtype=torch.bfloat16, **shape)
    quantize(tmp_path / "source", tmp_path / "codes")
    config, checkpoint = open_checkpoint(tmp_path / "codes", None, "auto")
    assert isinstance(checkpoint, QuantizedTensors)
    with Device() as device:
        weights = QuantizedLoader(config, checkpoint, torch.bfloat16, torch.device("meta"), Shard(1, 2)).load()
        held = device.held
    assert device.peak <= held + in_pieces(weights)
