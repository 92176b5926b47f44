"""From a folder or hub id to a model of the native pass on a CPU. Copies no matrix that the file has as it is read;
quantizes those of projections where that is asked for."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from specrs.arrays import BFLOAT16, FLOAT32, Array, aligned, converted
from specrs.models.checkpoint import Checkpoint
from specrs.models.config import ModelConfig
from specrs.models.dense_native import NativeDense
from specrs.models.dense_weights import ExpertWeights, NativeExperts, NativeWeights
from specrs.models.dummy import DummyCheckpoint
from specrs.models.experts import Experts
from specrs.models.kv_dtypes import CODES
from specrs.models.layer_reader import LayerReader, ModelReader
from specrs.models.loader import open_checkpoint, resolve_dtype
from specrs.models.quantization.at_load import Float8AtLoad, quantized_codes
from specrs.models.quantization.base import QuantizedTensors
from specrs.models.stored import Codes, NativeWeight, QuantizedWeight, StackedWeight
from specrs.models.tensors import EMBEDDING, LM_HEAD, Tensors, tensor_shapes

logger = logging.getLogger("specrs")
_AT_ONCE = 1 << 20
"""Numbers that are compared at a time."""
_ROUTERS = (".gate.weight", ".router.weight")


def load_native(
    source: str | Path,
    *,
    dtype: str | np.dtype[Any] = "auto",
    revision: str | None = None,
    load_format: str = "auto",
    quantization: str | None = None,
    max_model_len: int | None = None,
    exact: bool = True,
    cache_dtype: np.dtype[Any] | None = None,
) -> NativeDense:
    """Load the model of a folder, hub id or GGUF file for the native pass of a CPU.

    `dtype` is float32 or bfloat16, or auto where that is float32. `max_model_len` is that of the engine, which LongRoPE
    depends on. With `load_format` `dummy` weights are random numbers, the same each time.

    Matrices that the file has in the type that passes read stay where it is mapped. float32 names the arithmetic and
    the KV cache: where bf16 holds all matrices exactly, passes read it, the same numbers in half the bytes.

    `quantization` `fp8` rounds the layers' projections to FP8, which are held as numbers; `int8` or `int4` quantizes
    them from the file's numbers, one matrix at a time, to INT8 by output or INT4 by group. Embedding, LM head and
    routers are kept as they are, in memory of their own, so that the file is mapped no longer.

    Of a quantized checkpoint codes stay codes where passes can read them; other matrices become numbers, one pass over
    the file, `dtype` if they are to be `exact`, else bf16.

    `cache_dtype` is that of K and V in the cache, `dtype`'s or one of codes; None: the former.

    Raises CheckpointError, also for a weight that cannot be quantized, and UnsupportedModelError for what is not
    implemented.
    """
    config, checkpoint = open_checkpoint(source, revision, load_format)
    config = config.for_length(max_model_len)
    resolved = resolve_dtype(dtype, config, "cpu")
    if quantization == "fp8":
        checkpoint, quantization = Float8AtLoad(checkpoint), None
    if isinstance(checkpoint, QuantizedTensors) and quantization is None:
        loader: _NativeLoader = _CodesLoader(config, checkpoint, resolved, exact)
    else:
        make = _NativeLoader if quantization is None else partial(_Quantizer, quantization)
        loader = make(config, checkpoint, resolved)
    loader.cache_dtype, loader.kv_codes = cache_dtype, cache_dtype in CODES.values()
    return NativeDense(loader.load())


class NativeReader(LayerReader[Array, NativeWeight]):
    """Leaves matrices as the file has them where it can; norms and biases are float32."""

    @property
    def vector_dtype(self) -> np.dtype[Any]:
        """See `LayerReader`; like what follows."""
        return FLOAT32

    def place(self, array: Array) -> Array:
        """See `LayerReader`."""
        return aligned(array)

    def read(self, name: str) -> Array:
        """See `LayerReader`."""
        return aligned(self.vector(name))

    def linear(self, names: list[str], *, bias: bool) -> NativeWeight:
        """See `LayerReader`."""
        return StackedWeight(tuple(self.matrix(f"{name}.weight") for name in names), self.biases(names, bias))

    def experts(self, prefix: str, experts: Experts) -> NativeExperts:
        """Return the experts of a layer, each as the file has it."""
        block, (gate, up, down) = prefix + experts.block, experts.projections
        names = [f"{block}.experts.{i}." for i in range(experts.count)]
        bias = experts.biases
        return ExpertWeights(
            router=self.router(f"{block}.{experts.router}", bias=bias),
            gate_up=tuple(self.linear([name + gate, name + up], bias=bias) for name in names),
            down=tuple(self.linear([name + down], bias=bias) for name in names),
        )

    def router(self, name: str, *, bias: bool) -> NativeWeight:
        """Return the router `name`, which chooses among experts."""
        return self.linear([name], bias=bias)

    def nothing(self) -> NativeWeight:
        """See `LayerReader`."""
        return StackedWeight((np.empty((0, 0), FLOAT32),))

    def biases(self, names: list[str], bias: bool) -> tuple[Array, ...] | None:
        return tuple(self.read(f"{name}.bias") for name in names) if bias else None


class _NativeLoader(NativeReader, ModelReader[Array, NativeWeight, np.dtype[Any]]):
    """A `NativeReader` of all tensors of one model."""

    checkpoint: Tensors
    kept = "all weights"
    """What `matrices` are."""

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint | QuantizedTensors | DummyCheckpoint, dtype: np.dtype[Any]
    ) -> None:
        self.config = self.held = config
        self.checkpoint = checkpoint
        self.dtype = self.storage = dtype

    def load(self) -> NativeWeights:
        """See `ModelReader`."""
        self.check()
        if self.dtype == FLOAT32 and not isinstance(self.checkpoint, DummyCheckpoint):
            matrices = [self.checkpoint.mapped(name) for name in self.matrices()]
            if matrices and all(fits_bfloat16(matrix) for matrix in matrices):
                self.storage = BFLOAT16
                if any(matrix.dtype != BFLOAT16 for matrix in matrices):
                    logger.info(
                        "%s: %s are kept as bfloat16, which holds them exactly", self.checkpoint.folder, self.kept
                    )
        return super().load()

    def lm_head(self, weight: Array) -> NativeWeight:
        """See `ModelReader`."""
        return StackedWeight((weight,))

    def matrices(self) -> list[str]:
        return [name for name, shape in tensor_shapes(self.config).items() if len(shape) == 2]

    def matrix(self, name: str) -> Array:
        """See `LayerReader`."""
        return aligned(converted(self.checkpoint.mapped(name), self.storage))


class _Quantizer(_NativeLoader):
    """Quantizes projections; what it keeps has memory of its own."""

    kept = "embedding, LM head and routers"

    def __init__(
        self,
        quantization: str,
        config: ModelConfig,
        checkpoint: Checkpoint | QuantizedTensors | DummyCheckpoint,
        dtype: np.dtype[Any],
    ) -> None:
        super().__init__(config, checkpoint, dtype)
        self.int4 = quantization == "int4"

    def linear(self, names: list[str], *, bias: bool) -> NativeWeight:
        return QuantizedWeight(tuple(self.codes(f"{name}.weight") for name in names), self.biases(names, bias))

    def codes(self, name: str) -> Codes:
        return quantized_codes(self.checkpoint.folder, name, self.checkpoint.mapped(name), int4=self.int4)

    def matrices(self) -> list[str]:
        return [name for name in super().matrices() if name in (EMBEDDING, LM_HEAD) or name.endswith(_ROUTERS)]

    def router(self, name: str, *, bias: bool) -> NativeWeight:
        """Kept as it is: another expert is another text."""
        return StackedWeight((self.matrix(f"{name}.weight"),), self.biases([name], bias))

    def matrix(self, name: str) -> Array:
        return np.array(converted(self.checkpoint.mapped(name), self.storage), order="C")


class _CodesLoader(_NativeLoader):
    """Leaves codes as they are where passes read them, and makes numbers of others."""

    checkpoint: QuantizedTensors
    kept = "weights that are not quantized"

    def __init__(self, config: ModelConfig, checkpoint: QuantizedTensors, dtype: np.dtype[Any], exact: bool) -> None:
        super().__init__(config, checkpoint, dtype)
        self.made = dtype if exact else BFLOAT16
        self.num_codes, self.num_made, self.made_bytes = 0, 0, 0

    def load(self) -> NativeWeights:
        weights = super().load()
        logger.info(
            "%s: %d matrices stay codes, %d become %s when they are loaded: %.2f GiB",
            self.checkpoint.folder,
            self.num_codes,
            self.num_made,
            self.made,
            self.made_bytes / 2**30,
        )
        return weights

    def linear(self, names: list[str], *, bias: bool) -> NativeWeight:
        weights = [f"{name}.weight" for name in names]
        codes = [self.checkpoint.codes(name) for name in weights if self.checkpoint.is_quantized(name)]
        packed = tuple(part for part in codes if part is not None)
        if len(packed) < len(names) or len({(part.codes.dtype, part.scales.shape[1]) for part in packed}) > 1:
            return super().linear(names, bias=bias)
        self.num_codes += len(packed)
        return QuantizedWeight(packed, self.biases(names, bias))

    def matrices(self) -> list[str]:
        return [name for name in super().matrices() if not self.checkpoint.is_quantized(name)]

    def matrix(self, name: str) -> Array:
        if not self.checkpoint.is_quantized(name):
            return super().matrix(name)
        made = converted(self.checkpoint.mapped(name), self.made)
        self.num_made, self.made_bytes = self.num_made + 1, self.made_bytes + made.nbytes
        return np.ascontiguousarray(made)


def fits_bfloat16(matrix: Array) -> bool:
    """Return whether bf16 holds every number of `matrix` exactly. The first rows often tell, so it goes by rows."""
    if matrix.dtype == BFLOAT16:
        return True
    rows = max(1, _AT_ONCE // matrix.shape[1])
    parts = (matrix[first : first + rows] for first in range(0, len(matrix), rows))
    return all(np.array_equal(converted(converted(part, BFLOAT16), part.dtype), part) for part in parts)
