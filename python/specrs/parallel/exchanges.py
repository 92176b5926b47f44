"""Exchanges of tensors among ranks, on the device that holds them: sums and gathered parts. Decides no sizes.

On a GPU an exchange is enqueued on the current stream, does not wait on the host and allocates nothing, so it can be
part of a graph. Every rank enqueues the same exchanges in the same order.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

ONE_SHOT_DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes that torch's one-shot all-reduce supports."""


class Exchanges(Protocol):
    """Exchanges of one rank's passes, for tensors on one kind of device."""

    def reserve(self, rows: int, width: int, dtype: torch.dtype) -> None:
        """Prepare for sums of up to `rows` rows of `width` elements. All ranks call it at the same point, before they
        capture graphs."""

    def part(self, out: Tensor) -> Tensor:
        """Return the tensor into which this rank writes its part of a sum for `out` `[N, width]`, contiguous. It has
        the shape of `out`, may be `out` itself, and is valid until the next `sum`."""

    def sum(self, out: Tensor) -> None:
        """Write the sum over all ranks of `part(out)` into `out`. All ranks get the same bits."""

    def gather(self, x: Tensor, found: Tensor) -> None:
        """Write `x` of every rank, in the order of ranks, into `found` `[size, *x.shape]`. Both are contiguous."""

    def abort(self) -> None:
        """End the exchanges that run or wait, because a rank is lost. May be called from any thread."""

    def close(self) -> None:
        """Release what the exchanges hold. Called once all ranks have finished their last exchange."""


class GroupExchanges:
    """Exchanges by torch's default process group, which is NCCL's on a GPU. NCCL chooses a sum's order by its size. All
    ranks get the same bits, because each number is added up in one place."""

    def reserve(self, rows: int, width: int, dtype: torch.dtype) -> None:
        """Do nothing: NCCL sums in place and needs no memory that other ranks read."""

    def part(self, out: Tensor) -> Tensor:
        """Return `out`, where this rank writes its part of a sum."""
        return out

    def sum(self, out: Tensor) -> None:
        """Sum `out` `[N, width]` over all ranks, in place."""
        dist.all_reduce(out)

    def gather(self, x: Tensor, found: Tensor) -> None:
        """Write `x` of every rank, in the order of ranks, into `found` by one all-gather."""
        dist.all_gather_into_tensor(found.view(-1), x.view(-1))

    def abort(self) -> None:
        """Abort the process group, which ends NCCL kernels that wait for another rank. May be called from any
        thread."""
        if dist.group.WORLD is not None:
            dist.group.WORLD.abort()

    def close(self) -> None:
        """Destroy the process group, if there is one."""
        if dist.is_initialized():
            dist.destroy_process_group()


class SymmetricExchanges(GroupExchanges):
    """Exchanges by NCCL, except that sums of few rows use torch's symmetric memory. One kernel on every rank reads the
    parts of all ranks and adds them in the order of ranks.

    A rank writes its part where the others read it, so nothing is copied. The kernel waits for the other ranks before
    it reads and before it ends, so the next product may overwrite the part.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup) -> None:
        """Prepare exchanges on `device`. `group` is the default process group, whose ranks share the memory."""
        self._device, self._group = device, group
        self._buffers: dict[tuple[int, torch.dtype], Tensor] = {}

    def reserve(self, rows: int, width: int, dtype: torch.dtype) -> None:
        """Allocate memory for sums of up to `rows` rows of `width` elements, and exchange its addresses with the other
        ranks. Does nothing for a dtype that the one-shot kernel does not support, or if enough is reserved.

        Waits for all ranks. Raises RuntimeError if the GPUs cannot read each other's memory.
        """
        held = self._buffers.get((width, dtype))
        if dtype in ONE_SHOT_DTYPES and (held is None or len(held) < rows):
            self._buffers[width, dtype] = self._allocate(rows, width, dtype)

    def _allocate(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        import torch.distributed._symmetric_memory as symm_mem  # registers operators, which a CPU does without

        buffer = symm_mem.empty(rows, width, dtype=dtype, device=self._device)
        symm_mem.rendezvous(buffer, self._group)
        return buffer

    def _staged(self, out: Tensor) -> Tensor | None:
        buffer = self._buffers.get((out.shape[1], out.dtype))
        return None if buffer is None or len(out) > len(buffer) else buffer[: len(out)]

    def part(self, out: Tensor) -> Tensor:
        """Return the tensor into which this rank writes its part of a sum for `out` `[N, width]`. It has the shape of
        `out` and lies in memory that the other ranks read. Returns `out` itself if N exceeds the reserved rows, or if
        nothing was reserved for this width and dtype."""
        staged = self._staged(out)
        return out if staged is None else staged

    def sum(self, out: Tensor) -> None:
        """Write the sum of every rank's `part(out)` into `out`. Uses the one-shot kernel if the parts lie in shared
        memory, otherwise NCCL."""
        staged = self._staged(out)
        if staged is None:
            super().sum(out)
        else:
            torch.ops.symm_mem.one_shot_all_reduce_out(staged, "sum", self._group.group_name, out)
