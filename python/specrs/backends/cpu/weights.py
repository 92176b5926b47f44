"""Loader of native models from a folder, hub id or GGUF file. Matrices stay mapped if native passes can read them in
place."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from specrs.arrays import BFLOAT16, FLOAT32, Array, aligned, converted
from specrs.backends.kv_memory import host_memory
from specrs.core import PackedMatrix
from specrs.engine_options import INTEGER_ACTIVATIONS
from specrs.errors import CheckpointError, UnsupportedConfigError, invalid
from specrs.models.checkpoint import Checkpoint
from specrs.models.config import ModelConfig
from specrs.models.decoder_weights import ExpertWeights, NativeExperts, NativeWeights
from specrs.models.dummy import DummyCheckpoint
from specrs.models.experts import Experts
from specrs.models.kv_dtypes import CODES
from specrs.models.layer_reader import LayerReader, ModelReader
from specrs.models.loader import open_checkpoint, resolve_dtype
from specrs.models.native_decoder import NativeDecoder
from specrs.models.quantization.at_load import QuantizedAtLoad, quantized_at_load
from specrs.models.quantization.base import QuantizedTensors
from specrs.models.stored import NativeWeight, PackedWeight, StackedWeight
from specrs.models.tensors import EMBEDDING, LAYER_EMBEDDING, LM_HEAD, Tensors, tensor_shapes

logger = logging.getLogger("specrs")
_AT_ONCE = 1 << 20
"""Number of elements that are compared at a time."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """Rounding that a CPU does when it computes with a quantized checkpoint: of dequantized weights, and of
    activations."""

    exact: bool = True
    """Whether matrices whose layout passes cannot read are dequantized to the model's dtype; else to bf16."""
    activations: str = "auto"
    """Type that activations are rounded to before products: `auto`, `int16`, `int8`, `fp32` (not rounded) or
    `bf16`."""

    @property
    def packs(self) -> bool:
        """Whether quantized matrices are packed, and activations rounded to integers for them."""
        return self.activations == "auto" or self.integers

    @property
    def integers(self) -> bool:
        """Whether some matrix has to be packed, so that activations can be rounded to integers."""
        return self.activations in INTEGER_ACTIVATIONS


ROUNDING = Rounding()


def load_native(
    source: str | Path,
    *,
    dtype: str | np.dtype[Any] = "auto",
    revision: str | None = None,
    load_format: str = "auto",
    quantization: str | None = None,
    max_model_len: int | None = None,
    cache_dtype: np.dtype[Any] | None = None,
    rounding: Rounding = ROUNDING,
) -> NativeDecoder:
    """Load the model of a folder, hub id or GGUF file for native CPU passes.

    `dtype` is float32, bfloat16, or auto if that means float32. `max_model_len` is the engine's, on which LongRoPE
    depends. With `load_format` `dummy`, weights are random, the same each time. `cache_dtype` is the dtype of K and V
    in the cache: `dtype` (None), or FP8.

    Matrices whose dtype passes can read stay in the mapped file. float32 is the dtype of arithmetic and KV cache. If
    bf16 holds all matrices exactly, passes read them as bf16, the same numbers in half the bytes.

    `quantization` `fp8` rounds projections to FP8, and holds them dequantized. `int8` by output, `int4` by group,
    `q8_0`, `q4_0` and `q4_k` by groups of 32 quantize them from the file's numbers, one matrix at a time. Embedding, LM
    head and routers are not quantized but copied, so that the file does not stay mapped. Embeddings of single layers
    stay.

    Quantized matrices are packed if a packed layout holds them exactly, embedding and LM head too, and activations are
    rounded to 16-bit integers for products with them. `rounding` says what becomes of others.

    Raises CheckpointError, also for a weight that cannot be quantized, and UnsupportedModelError for what is not
    implemented. Raises UnsupportedConfigError for activations `int16` and `int8` if no matrix can be packed.
    """
    config, checkpoint = open_checkpoint(source, revision, load_format)
    config = config.for_length(max_model_len)
    resolved = resolve_dtype(dtype, config)
    if quantization is not None:
        loader: _NativeLoader = _QuantizedLoader(
            config, quantized_at_load(checkpoint, quantization), resolved, rounding
        )
    elif isinstance(checkpoint, QuantizedTensors):
        loader = _QuantizedLoader(config, checkpoint, resolved, rounding)
    elif rounding.integers:
        raise _nothing_to_pack(source, rounding)
    else:
        loader = _NativeLoader(config, checkpoint, resolved)
    loader.cache_dtype, loader.kv_codes = cache_dtype, cache_dtype in CODES.values()
    weights = loader.load()
    if rounding.integers and isinstance(loader, _QuantizedLoader) and not loader.num_packed:
        raise _nothing_to_pack(source, rounding)
    return NativeDecoder(weights)


def _nothing_to_pack(source: str | Path, rounding: Rounding) -> UnsupportedConfigError:
    """Return the exception for activations that are integers, and a model without matrices that can be packed."""
    reason = f"{source} has no quantized matrix that can be packed; allowed: 'auto' or 'fp32'"
    return invalid(UnsupportedConfigError, "cpu_activations", rounding.activations, reason)


def head_matrix(matrix: Array, dtype: np.dtype[Any]) -> Array:
    """Return a matrix of a drafter's head, aligned: in place if it is bf16, else converted to `dtype`."""
    return aligned(matrix if matrix.dtype == BFLOAT16 else converted(matrix, dtype))


class NativeReader(LayerReader[Array, NativeWeight]):
    """Reads tensors for native passes. Matrices stay mapped if passes can read them in place; norms and biases become
    float32."""

    @property
    def vector_dtype(self) -> np.dtype[Any]:
        """Dtype of norms and biases: float32."""
        return FLOAT32

    def place(self, array: Array) -> Array:
        """Return `array` in aligned memory; unchanged if it already is."""
        return aligned(array)

    def read(self, name: str) -> Array:
        """Return the tensor `name`, which is not a matrix, in float32."""
        return aligned(self.vector(name))

    def linear(self, names: list[str], *, bias: bool) -> NativeWeight:
        """Return the projections `names`, which share an input, as one."""
        return StackedWeight(tuple(self.matrix(f"{name}.weight") for name in names), self.biases(names, bias))

    def experts(self, prefix: str, experts: Experts) -> NativeExperts:
        """Return the router and experts of the layer whose tensor names begin with `prefix`."""
        block, (gate, up, down) = prefix + experts.block, experts.projections
        names = [f"{block}experts.{i}." for i in range(experts.count)]
        bias = experts.biases
        return ExpertWeights(
            router=self.router(f"{block}{experts.router}", bias=bias),
            gate_up=tuple(self.linear([name + gate, name + up], bias=bias) for name in names),
            down=tuple(self.linear([name + down], bias=bias) for name in names),
            shared=self.shared_expert(block, experts),
            scales=self.router_scales(block, experts),
        )

    def router(self, name: str, *, bias: bool) -> NativeWeight:
        """Return the router `name`, which chooses among experts."""
        return self.linear([name], bias=bias)

    def nothing(self) -> NativeWeight:
        """Return an empty projection, for layers that do not have one."""
        return StackedWeight((np.empty((0, 0), FLOAT32),))

    def biases(self, names: list[str], bias: bool) -> tuple[Array, ...] | None:
        """Return the biases of the projections `names` in float32; None unless `bias`."""
        return tuple(self.read(f"{name}.bias") for name in names) if bias else None


class _NativeLoader(NativeReader, ModelReader[Array, NativeWeight, np.dtype[Any]]):
    """Reads all tensors of one model for native passes."""

    checkpoint: Tensors
    kept = "all weights"
    """Description of the tensors that `matrices` names, for log messages."""

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint | QuantizedTensors | DummyCheckpoint, dtype: np.dtype[Any]
    ) -> None:
        self.config = self.held = config
        self.checkpoint = checkpoint
        self.dtype = self.storage = dtype

    def load(self) -> NativeWeights:
        """Check and read all tensors. Matrices become bf16 if that holds all of them exactly. Raises
        CheckpointError."""
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
        """Return the LM head whose weights are `weight`."""
        return StackedWeight((weight,))

    def matrices(self) -> list[str]:
        """Return the names of the matrices that stay unquantized."""
        return [name for name, shape in tensor_shapes(self.config).items() if len(shape) == 2]

    def matrix(self, name: str) -> Array:
        """Return the matrix `name` in the dtype of storage: in place if the file has that dtype."""
        return aligned(converted(self.checkpoint.mapped(name), self.storage))


class _QuantizedLoader(_NativeLoader):
    """Packs quantized matrices if a packed layout holds them exactly, and dequantizes the others."""

    checkpoint: QuantizedTensors
    kept = "weights that are not quantized"

    def __init__(
        self, config: ModelConfig, checkpoint: QuantizedTensors, dtype: np.dtype[Any], rounding: Rounding
    ) -> None:
        super().__init__(config, checkpoint, dtype)
        self.packs = rounding.packs
        self.made = dtype if rounding.exact else BFLOAT16
        self.copies = isinstance(checkpoint, QuantizedAtLoad)
        if self.copies:
            self.kept = "embedding, LM head and routers"
        self.num_packed, self.packed_bytes = 0, 0
        self.num_made, self.made_bytes = 0, 0

    def load(self) -> NativeWeights:
        self._check_memory()
        weights = super().load()
        logger.info(
            "%s: %d matrices are packed, %.2f GiB; %d become %s when they are loaded, %.2f GiB",
            self.checkpoint.folder,
            self.num_packed,
            self.packed_bytes / 2**30,
            self.num_made,
            self.made,
            self.made_bytes / 2**30,
        )
        return weights

    def _check_memory(self) -> None:
        """Raise CheckpointError if the quantized matrices take more memory than there is. Reads no tensor data."""
        bits, have = 0.0, host_memory()
        for name, shape in tensor_shapes(self.config).items():
            if name in self.checkpoint and self.checkpoint.is_quantized(name):
                of_weight = self.checkpoint.packed_bits(name) if self.packs else 8 * self.made.itemsize
                bits += math.prod(shape) * of_weight
        if bits / 8 > have:
            kept = "" if self.packs else f" as {self.made}, which cpu_activations='auto' would not need"
            needed = f"the weights take at least {bits / 2**33:.2f} GiB{kept}"
            room = f"this process may use {have / 2**30:.2f} GiB of memory"
            remedy = "use a model with fewer weights or fewer bits"
            raise CheckpointError(f"{self.checkpoint.folder}: {needed}, and {room}; {remedy}")

    def linear(self, names: list[str], *, bias: bool) -> NativeWeight:
        packed = self._in_one_order(names, [self._packed(f"{name}.weight") for name in names])
        if all(part is None for part in packed):
            return super().linear(names, bias=bias)
        parts = (self.matrix(f"{n}.weight") if part is None else part for n, part in zip(names, packed, strict=True))
        return PackedWeight(tuple(parts), self.biases(names, bias))

    def lm_head(self, weight: Array) -> NativeWeight:
        return PackedWeight((weight,)) if isinstance(weight, PackedMatrix) else super().lm_head(weight)

    def matrices(self) -> list[str]:
        return [name for name in super().matrices() if not self.checkpoint.is_quantized(name)]

    def matrix(self, name: str) -> Array:
        """Return the matrix `name`: packed if it is a quantized embedding or LM head that can be packed, else as
        numbers."""
        if not self.checkpoint.is_quantized(name):
            found = super().matrix(name)
            # A pass reads few rows of the layers' embeddings, which are large.
            return np.array(found, order="C") if self.copies and name != LAYER_EMBEDDING else found
        if name in (EMBEDDING, LAYER_EMBEDDING, LM_HEAD) and (packed := self._packed(name)) is not None:
            # Passes look up embeddings in packed blocks, too; nothing else reads them.
            return cast("Array", packed)
        made = converted(self.checkpoint.mapped(name), self.made)
        self.num_made, self.made_bytes = self.num_made + 1, self.made_bytes + made.nbytes
        return np.ascontiguousarray(made)

    def _packed(self, name: str) -> PackedMatrix | None:
        packed = self.checkpoint.packed(name) if self.packs and self.checkpoint.is_quantized(name) else None
        if packed is not None:
            self.num_packed, self.packed_bytes = self.num_packed + 1, self.packed_bytes + packed.nbytes
        return packed

    def _in_one_order(self, names: list[str], packed: list[PackedMatrix | None]) -> list[PackedMatrix | None]:
        """Return the packed matrices of the projections `names`, which share an input. Matrices whose inputs have
        another order than those of the first become None, because activations are rounded in one order for all."""
        first = next((i for i, part in enumerate(packed) if part is not None), 0)
        kept: list[PackedMatrix | None] = []
        for name, part in zip(names, packed, strict=True):
            if part is None or _same(part.order, cast("PackedMatrix", packed[first]).order):
                kept.append(part)
                continue
            reason = f"is in another order of inputs than {names[first]}"
            logger.warning("%s: %s %s, so it becomes %s", self.checkpoint.folder, name, reason, self.made)
            self.num_packed, self.packed_bytes = self.num_packed - 1, self.packed_bytes - part.nbytes
            kept.append(None)
        return kept


def _same(order: Array | None, other: Array | None) -> bool:
    return order is other or (order is not None and other is not None and np.array_equal(order, other))


def fits_bfloat16(matrix: Array) -> bool:
    """Return whether bf16 holds every element of `matrix` exactly. Checks some rows at a time, because often one of the
    first rows already does not fit."""
    if matrix.dtype == BFLOAT16:
        return True
    rows = max(1, _AT_ONCE // matrix.shape[1])
    parts = (matrix[first : first + rows] for first in range(0, len(matrix), rows))
    return all(np.array_equal(converted(converted(part, BFLOAT16), part.dtype), part) for part in parts)
