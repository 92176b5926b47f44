"""GPUs for the roofline model: published figures, and constants that were fitted to one of the GPUs. Measures
nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MEMORY_SHARE = 0.887
"""Share of the published bandwidth that a copy reaches: 4.26 of 4.8 TB/s on an H200."""
COMPUTE_SHARE = 0.72
"""Share of the published dense bf16 rate that products of many rows reach."""
OVERLAP = 1.75
"""Exponent p of a product's time `(b^p + f^p)^(1/p)`, from b ms for bytes and f ms for flops. 1 adds both; infinity
takes the longer one."""
ATTENTION_SHARE = 0.62
"""Share of a copy's bandwidth that attention over long contexts reaches."""
PRODUCT_US = 3.0
"""Microseconds that a matrix product takes in addition to its bytes and flops: the end of the previous kernel, first
loads, partial sums."""
KERNEL_US = 2.2
"""Microseconds of a kernel that moves almost no data."""
ATTENTION_US = 7.0
"""Microseconds that attention takes in addition to its bytes: dependent loads and a reduction."""
GAP_US = 1.3
"""Microseconds between two steps of an engine, in which the GPU waits. The host's work is done during steps."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Published figures of one GPU. Rates are dense, without sparsity."""

    name: str
    tb_per_s: float
    bf16_tflops: float
    memory_gb: float
    capability: int
    """Compute capability times ten, for example 90."""
    num_sms: int
    shared_kib: int
    """Maximum shared memory of one thread block, in KiB."""
    torch_name: str
    """torch's name of the device, by which the table of products has entries."""
    products: Path | None = None
    """Table of products of an engine on this GPU, as `specrs tune` writes it. None: the package's."""

    @property
    def bytes_per_us(self) -> float:
        """Bytes per microsecond that a copy reaches."""
        return 1e6 * self.tb_per_s * MEMORY_SHARE

    @property
    def flops_per_us(self) -> float:
        """Floating-point operations per microsecond that products of many rows reach."""
        return 1e6 * self.bf16_tflops * COMPUTE_SHARE


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("H100", 3.35, 989.0, 80.0, 90, 132, 227, "NVIDIA H100 80GB HBM3"),
        Gpu("H200", 4.8, 989.0, 141.0, 90, 132, 227, "NVIDIA H200"),
        Gpu("B200", 8.0, 2250.0, 180.0, 100, 148, 227, "NVIDIA B200"),
        Gpu("RTX 4090", 1.008, 165.2, 24.0, 89, 128, 99, "NVIDIA GeForce RTX 4090"),
        Gpu("DGX Spark", 0.273, 125.0, 128.0, 121, 48, 99, "NVIDIA GB10"),
    )
}
"""GPUs by name. H100 is the SXM5 with 80 GB. A DGX Spark shares its memory with the CPU."""
