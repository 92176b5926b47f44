"""Products by cuBLASLt through nvmath-python, with algorithms that were chosen before. Chooses none at run time, except
in `autotune`.

nvmath's documentation does not mention CUDA graphs. A product can be captured because, by nvmath's source (1.0),
`execute` with operands on the device enqueues only `cublasLtMatmul` and an event, and waits for nothing. Operand C is
overwritten, so no result is allocated, and the workspace is the one buffer that is passed in. `specrs tune` times
products inside a graph, so a table holds only algorithms that were captured.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from specrs.backends.cuda.providers import CUBLASLT, Choice
from specrs.extras import install_command

logger = logging.getLogger(__name__)

WORKSPACE_BYTES = 32 * 2**20
"""Bytes of the workspace, NVIDIA's recommendation for sm_90. All products share it, because they run one after the
other on one stream."""
ALIGNMENT = 256
"""Bytes to which operands must be aligned. Algorithms are chosen for operands that are."""
_MAX_PLANS = 4096
"""Maximum number of plans, a few kilobytes of host memory each. Captured passes make theirs when the engine starts.
Products of further shapes are left to cuBLAS."""
_DTYPES = (torch.bfloat16, torch.float16)


class _FixedMemory:
    """Allocator for nvmath that returns one buffer each time."""

    def __init__(self, buffer: Tensor, pointer: Any) -> None:
        self.buffer = buffer
        self.device_id = buffer.device.index or 0
        self._pointer = pointer

    def memalloc(self, size: int) -> Any:
        """Return the buffer, of which `size` bytes are needed."""
        assert size <= self.buffer.nbytes, f"size={size}: the workspace has {self.buffer.nbytes} bytes"
        return self._pointer(self.buffer.data_ptr(), size, None)


class CublasLt:
    """Plans of products by shape, over one workspace of `WORKSPACE_BYTES` on `device`. One stream at a time may use
    it."""

    def __init__(self, device: torch.device) -> None:
        """Raises ModuleNotFoundError if nvmath-python is not installed."""
        from nvmath.bindings import cublasLt
        from nvmath.linalg import advanced
        from nvmath.memory import MemoryPointer

        self._advanced = advanced
        self._bytes = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._memory = _FixedMemory(self._bytes, MemoryPointer)
        self._plans: dict[tuple[Any, ...], Any] = {}
        self.version: int = cublasLt.get_version()
        """Version of cuBLASLt, as it reports it."""

    @classmethod
    def load(cls, device: torch.device) -> CublasLt | None:
        """Return the products of `device`; None, which is logged, if nvmath-python or a package of it is missing."""
        if find_spec("nvmath") is None:
            logger.info("cuBLAS in place of cuBLASLt: %s", install_command("cublaslt"))
            return None
        try:
            return cls(device)
        except ImportError as error:
            logger.warning("cuBLAS in place of cuBLASLt: %s: %s", error, install_command("cublaslt"))
            return None

    def multiply(self, x: Tensor, weight: Tensor, out: Tensor, choice: Choice) -> bool:
        """Write `x` `[M, K]` times `weight` `[N, K]`, transposed, into `out` `[M, N]`, all of one 16-bit dtype, with
        the algorithm of `choice`. Return False, with nothing written, if cuBLASLt cannot.

        The first product of a shape makes its plan, which must not happen in a capture.
        """
        assert choice.provider == CUBLASLT
        if any(tensor.data_ptr() % ALIGNMENT for tensor in (x, weight, out)) or choice.version != self.version:
            return False
        key = (*x.shape, len(weight), x.dtype, out.dtype, x.stride(0), weight.stride(0), out.stride(0))
        if key not in self._plans:
            if len(self._plans) >= _MAX_PLANS or x.dtype not in _DTYPES or out.dtype != x.dtype:
                return False
            assert not torch.cuda.is_current_stream_capturing(), "a pass must run before it is captured"
            self._plans[key] = self._tried(x, weight, out, choice)
        plan = self._plans[key]
        if plan is None:
            return False
        plan.reset_operands_unchecked(a=x, b=weight.t(), c=out)
        plan.execute()
        return True

    def autotune(self, x: Tensor, weight: Tensor, out: Tensor) -> Choice:
        """Return the fastest algorithm for these operands, of those that cuBLASLt's heuristics propose. Overwrites
        `out`, and waits for the device."""
        with self._matmul(x, weight, out) as matmul:
            matmul.plan()
            matmul.autotune()
            return Choice(CUBLASLT, matmul.algorithms[0].as_numpy().tobytes(), self.version)

    def _tried(self, x: Tensor, weight: Tensor, out: Tensor, choice: Choice) -> Any:
        """Return a plan that has computed this product once; None if cuBLASLt rejects the algorithm for the shape."""
        import numpy
        from nvmath.bindings.cublasLt import cuBLASLtError, matmul_heuristic_result_dtype

        if len(choice.algorithm) != matmul_heuristic_result_dtype.itemsize:
            return None
        held = numpy.frombuffer(choice.algorithm, dtype=matmul_heuristic_result_dtype)
        matmul = self._matmul(x, weight, out)
        try:
            # With algorithms that are given, nothing is timed and nothing asked of the device.
            matmul.plan(algorithms=[self._advanced.Algorithm.from_numpy(held)])
            matmul.execute()
        except cuBLASLtError as error:
            logger.info("cuBLAS in place of cuBLASLt for %s: %s", [*x.shape, len(weight)], error)
            matmul.free()
            return None
        return matmul

    def _matmul(self, x: Tensor, weight: Tensor, out: Tensor) -> Any:
        options = {"inplace": True, "allocator": self._memory, "memory_limit": WORKSPACE_BYTES}
        return self._advanced.Matmul(x, weight.t(), out, beta=0.0, options=options)
