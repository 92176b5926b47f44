"""From a folder or hub id to a model of the native pass on a CPU. Copies no matrix that the file has as it is read;
quantizes those of projections where that is asked for."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from specrs.kernels.linear import Codes, QuantizedWeight, StackedWeight, Weight
from specrs.models.checkpoint import Checkpoint
from specrs.models.config import ModelConfig
from specrs.models.dense_native import NativeDense
from specrs.models.dense_weights import DenseWeights, ExpertWeights
from specrs.models.dummy import DummyCheckpoint
from specrs.models.experts import Experts
from specrs.models.loader import LayerReader, Loader, open_checkpoint, resolve_dtype
from specrs.models.quantization.at_load import Float8AtLoad, aligned, quantized_codes
from specrs.models.quantization.base import QuantizedTensors
from specrs.models.tensors import EMBEDDING, LM_HEAD, tensor_shapes

logger = logging.getLogger("specrs")
_AT_ONCE = 1 << 20
"""Numbers that are compared at a time."""
_ROUTERS = (".gate.weight", ".router.weight")


def load_native(
    source: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    load_format: str = "auto",
    quantization: str | None = None,
    max_model_len: int | None = None,
    exact: bool = True,
    cache_dtype: torch.dtype | None = None,
) -> NativeDense:
    """The same for the native pass of a CPU: `dtype` float32 or bfloat16, or auto where that is float32.

    Matrices that the file has in the type that passes read stay where it is mapped. float32 names the arithmetic and
    the KV cache: where bf16 holds all matrices exactly, passes read it, the same numbers in half the bytes.

    `quantization` `fp8` rounds the layers' projections to FP8, which are held as numbers; `int8` or `int4` quantizes
    them from the file's numbers, one matrix at a time, to INT8 by output or INT4 by group. Embedding, LM head and
    routers are kept as they are, in memory of their own, so that the file is mapped no longer.

    Of a quantized checkpoint codes stay codes where passes can read them; other matrices become numbers, one pass over
    the file, `dtype` if they are to be `exact`, else bf16.

    `cache_dtype` is that of K and V in the cache, `dtype`'s or one of codes; None: the former.

    Raises as `load_model`; CheckpointError for a weight that cannot be quantized.
    """
    config, checkpoint = open_checkpoint(source, revision, load_format)
    config = config.for_length(max_model_len)
    resolved = resolve_dtype(dtype, config, torch.device("cpu"))
    if quantization == "fp8":
        checkpoint, quantization = Float8AtLoad(checkpoint), None
    if isinstance(checkpoint, QuantizedTensors) and quantization is None:
        loader: _NativeLoader = _CodesLoader(config, checkpoint, resolved, exact)
    else:
        make = _NativeLoader if quantization is None else partial(_Quantizer, quantization)
        loader = make(config, checkpoint, resolved)
    loader.cache_dtype = cache_dtype
    return NativeDense(loader.load())


class NativeReader(LayerReader):
    """Leaves matrices as the file has them where it can; norms and biases are fp32."""

    def linear(self, names: list[str], *, bias: bool) -> Weight:
        return StackedWeight(tuple(self.matrix(f"{name}.weight") for name in names), self.biases(names, bias))

    def experts(self, prefix: str, experts: Experts) -> ExpertWeights:
        """Each as the file has it."""
        block, (gate, up, down) = prefix + experts.block, experts.projections
        names = [f"{block}.experts.{i}." for i in range(experts.count)]
        bias = experts.biases
        return ExpertWeights(
            router=self.router(f"{block}.{experts.router}", bias=bias),
            gate_up=tuple(self.linear([name + gate, name + up], bias=bias) for name in names),
            down=tuple(self.linear([name + down], bias=bias) for name in names),
        )

    def router(self, name: str, *, bias: bool) -> Weight:
        """The router `name`, which chooses among experts."""
        return self.linear([name], bias=bias)

    def biases(self, names: list[str], bias: bool) -> tuple[Tensor, ...] | None:
        return tuple(aligned(self.read(f"{name}.bias")) for name in names) if bias else None

    def read(self, name: str) -> Tensor:
        return self.checkpoint.read(name, torch.float32, self.device)


class _NativeLoader(NativeReader, Loader):
    """The same for all tensors of one model."""

    checkpoint: Checkpoint | QuantizedTensors | DummyCheckpoint
    kept = "all weights"
    """What `matrices` are."""

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint | QuantizedTensors | DummyCheckpoint, dtype: torch.dtype
    ) -> None:
        super().__init__(config, checkpoint, dtype, torch.device("cpu"))
        self.storage = dtype

    def load(self) -> DenseWeights:
        self.check()
        if self.dtype == torch.float32 and not isinstance(self.checkpoint, DummyCheckpoint):
            matrices = [self.checkpoint.mapped(name) for name in self.matrices()]
            if matrices and all(fits_bfloat16(matrix) for matrix in matrices):
                self.storage = torch.bfloat16
                if any(matrix.dtype != torch.bfloat16 for matrix in matrices):
                    logger.info(
                        "%s: %s are kept as bfloat16, which holds them exactly", self.checkpoint.folder, self.kept
                    )
        return super().load()

    def lm_head(self, weight: Tensor) -> Weight:
        return StackedWeight((weight,))

    def matrices(self) -> list[str]:
        return [name for name, shape in tensor_shapes(self.config).items() if len(shape) == 2]

    def matrix(self, name: str) -> Tensor:
        return aligned(self.checkpoint.mapped(name).to(self.storage))


class _Quantizer(_NativeLoader):
    """Quantizes projections; what it keeps has memory of its own."""

    kept = "embedding, LM head and routers"

    def __init__(
        self,
        quantization: str,
        config: ModelConfig,
        checkpoint: Checkpoint | QuantizedTensors | DummyCheckpoint,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(config, checkpoint, dtype)
        self.int4 = quantization == "int4"

    def linear(self, names: list[str], *, bias: bool) -> Weight:
        return QuantizedWeight(tuple(self.codes(f"{name}.weight") for name in names), self.biases(names, bias))

    def codes(self, name: str) -> Codes:
        return quantized_codes(self.checkpoint.folder, name, self.checkpoint.mapped(name), int4=self.int4)

    def matrices(self) -> list[str]:
        return [name for name in super().matrices() if name in (EMBEDDING, LM_HEAD) or name.endswith(_ROUTERS)]

    def router(self, name: str, *, bias: bool) -> Weight:
        """Kept as it is: another expert is another text."""
        return StackedWeight((self.matrix(f"{name}.weight"),), self.biases([name], bias))

    def matrix(self, name: str) -> Tensor:
        return self.checkpoint.mapped(name).to(self.storage, copy=True)


class _CodesLoader(_NativeLoader):
    """Leaves codes as they are where passes read them, and makes numbers of others."""

    checkpoint: QuantizedTensors
    kept = "weights that are not quantized"

    def __init__(self, config: ModelConfig, checkpoint: QuantizedTensors, dtype: torch.dtype, exact: bool) -> None:
        super().__init__(config, checkpoint, dtype)
        self.made = dtype if exact else torch.bfloat16
        self.num_codes, self.num_made, self.made_bytes = 0, 0, 0

    def load(self) -> DenseWeights:
        weights = super().load()
        logger.info(
            "%s: %d matrices stay codes, %d become %s when they are loaded: %.2f GiB",
            self.checkpoint.folder,
            self.num_codes,
            self.num_made,
            str(self.made).removeprefix("torch."),
            self.made_bytes / 2**30,
        )
        return weights

    def linear(self, names: list[str], *, bias: bool) -> Weight:
        weights = [f"{name}.weight" for name in names]
        codes = [self.checkpoint.codes(name) for name in weights if self.checkpoint.is_quantized(name)]
        packed = tuple(part for part in codes if part is not None)
        if len(packed) < len(names) or len({(part.codes.dtype, part.scales.shape[1]) for part in packed}) > 1:
            return super().linear(names, bias=bias)
        self.num_codes += len(packed)
        return QuantizedWeight(packed, self.biases(names, bias))

    def matrices(self) -> list[str]:
        return [name for name in super().matrices() if not self.checkpoint.is_quantized(name)]

    def matrix(self, name: str) -> Tensor:
        if not self.checkpoint.is_quantized(name):
            return super().matrix(name)
        made = self.checkpoint.mapped(name).to(self.made)
        self.num_made, self.made_bytes = self.num_made + 1, self.made_bytes + made.nbytes
        return made.contiguous()


def fits_bfloat16(tensor: Tensor) -> bool:
    """Whether bf16 holds every number of `tensor`, a matrix, exactly. Looks at some rows at a time, because the first
    often tell."""
    if tensor.dtype == torch.bfloat16:
        return True
    rows = max(1, _AT_ONCE // tensor.shape[1])
    return all(bool((part.to(torch.bfloat16).to(part.dtype) == part).all()) for part in torch.split(tensor, rows))
