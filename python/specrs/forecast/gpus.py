"""GPUs as the roofline sees them: published figures, and constants fitted to one of them. Measures nothing."""

from __future__ import annotations

from dataclasses import dataclass

MEMORY_SHARE = 0.887
"""Of the published bandwidth, as a copy reaches it: 4.26 of 4.8 TB/s on an H200."""
COMPUTE_SHARE = 0.60
"""Of the published dense bf16 rate, as products of many rows reach it."""
OVERLAP = 1.5
"""Of b ms for bytes and f for flops a product takes `(b^p + f^p)^(1/p)`: 1 adds them, infinity is the longer one."""
ATTENTION_SHARE = 0.62
"""Of a copy's bandwidth, as attention over long contexts reaches it."""
PRODUCT_US = 3.0
"""Of a product beyond its bytes and flops: the end of the kernel before, first loads, partial sums."""
KERNEL_US = 2.2
"""Of a kernel that moves next to nothing."""
ATTENTION_US = 7.0
"""Of attention beyond its bytes: dependent loads and a reduction."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Published figures of one GPU, dense rates without sparsity."""

    name: str
    tb_per_s: float
    bf16_tflops: float
    memory_gb: float
    capability: int
    """Compute capability times ten."""
    num_sms: int
    shared_kib: int
    """That one thread block may have."""

    @property
    def bytes_per_us(self) -> float:
        """As a copy moves them."""
        return 1e6 * self.tb_per_s * MEMORY_SHARE

    @property
    def flops_per_us(self) -> float:
        """As products of many rows do them."""
        return 1e6 * self.bf16_tflops * COMPUTE_SHARE


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("H100", 3.35, 989.0, 80.0, 90, 132, 227),
        Gpu("H200", 4.8, 989.0, 141.0, 90, 132, 227),
        Gpu("B200", 8.0, 2250.0, 180.0, 100, 148, 227),
        Gpu("RTX 4090", 1.008, 165.2, 24.0, 89, 128, 99),
        Gpu("DGX Spark", 0.273, 125.0, 128.0, 121, 48, 99),
    )
}
"""By name. H100 is the SXM5 of 80 GB; memory of a DGX Spark is the CPU's, too."""
