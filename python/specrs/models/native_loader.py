"""From a folder or hub id to a model of the native pass on a CPU. Copies no matrix that the file has as it is read."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor

from specrs.kernels.linear import StackedWeight, Weight
from specrs.models.checkpoint import Checkpoint
from specrs.models.config import ModelConfig
from specrs.models.dense_native import NativeDense
from specrs.models.dense_weights import DenseWeights
from specrs.models.dummy import DummyCheckpoint
from specrs.models.loader import Loader, open_checkpoint, resolve_dtype
from specrs.models.tensors import LM_HEAD, tensor_shapes

logger = logging.getLogger("specrs")
_AT_ONCE = 1 << 20
"""Numbers that are compared at a time."""


def load_native(
    source: str | Path, *, dtype: str | torch.dtype = "auto", revision: str | None = None, load_format: str = "auto"
) -> NativeDense:
    """The same for the native pass of a CPU: `dtype` float32 or bfloat16, or auto where that is float32.

    Matrices that the file has in the type that passes read stay where it is mapped. float32 names the arithmetic and
    the KV cache: where bf16 holds all matrices exactly, passes read it, the same numbers in half the bytes.

    Raises as `load_model`.
    """
    config, checkpoint = open_checkpoint(source, revision, load_format)
    return NativeDense(_NativeLoader(config, checkpoint, resolve_dtype(dtype, config, torch.device("cpu"))).load())


class _NativeLoader(Loader):
    """Leaves matrices as the file has them where it can; norms and biases are fp32."""

    checkpoint: Checkpoint | DummyCheckpoint

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint | DummyCheckpoint, dtype: torch.dtype) -> None:
        super().__init__(config, checkpoint, dtype, torch.device("cpu"))
        self.storage = dtype

    def load(self) -> DenseWeights:
        self.check()
        if self.dtype == torch.float32 and not isinstance(self.checkpoint, DummyCheckpoint):
            matrices = [self.checkpoint.mapped(name) for name in self.matrices()]
            if all(fits_bfloat16(matrix) for matrix in matrices):
                self.storage = torch.bfloat16
                if any(matrix.dtype != torch.bfloat16 for matrix in matrices):
                    logger.info(
                        "%s: all weights are kept as bfloat16, which holds them exactly", self.checkpoint.folder
                    )
        return super().load()

    def linear(self, names: list[str], *, bias: bool) -> Weight:
        biases = tuple(self.read(f"{name}.bias") for name in names) if bias else None
        return StackedWeight(tuple(self.matrix(f"{name}.weight") for name in names), biases)

    def lm_head(self, weight: Tensor) -> Weight:
        return StackedWeight((weight,))

    def matrices(self) -> list[str]:
        shapes = tensor_shapes(self.config)
        names = [name for name, shape in shapes.items() if len(shape) == 2]
        return names if LM_HEAD in shapes or LM_HEAD not in self.checkpoint else [*names, LM_HEAD]

    def matrix(self, name: str) -> Tensor:
        matrix = self.checkpoint.mapped(name).to(self.storage).contiguous()
        # a file may begin its tensors anywhere
        return matrix.clone() if matrix.data_ptr() % matrix.element_size() else matrix

    def read(self, name: str) -> Tensor:
        return self.checkpoint.read(name, torch.float32, self.device)


def fits_bfloat16(tensor: Tensor) -> bool:
    """Whether bf16 holds every number of `tensor`, a matrix, exactly. Looks at some rows at a time, because the first
    often tell."""
    if tensor.dtype == torch.bfloat16:
        return True
    rows = max(1, _AT_ONCE // tensor.shape[1])
    return all(bool((part.to(torch.bfloat16).to(part.dtype) == part).all()) for part in torch.split(tensor, rows))
