"""What ranks exchange of tensors that are where they compute: sums, and gathered parts. Decides no sizes.

On a GPU an exchange is enqueued on the current stream, waits for nothing on the host and allocates nothing, so a graph
holds it. Every rank enqueues the same ones in the same order.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

ONE_SHOT_DTYPES = (torch.float32, torch.bfloat16)
"""What torch's one-shot sum adds."""


class Exchanges(Protocol):
    """The exchanges of one rank's passes, for tensors of one kind of device."""

    def reserve(self, rows: int, width: int, dtype: torch.dtype) -> None:
        """Sums of up to `rows` rows of `width` numbers are to come. All ranks say so at once, before they capture."""

    def part(self, out: Tensor) -> Tensor:
        """Where this rank is to write its part of a sum into `out` `[N, width]` contiguous: of the same shape, perhaps
        `out` itself. Holds until the next `sum`."""

    def sum(self, out: Tensor) -> None:
        """Write the sum of every rank's `part(out)` into `out`: the same bits on all ranks."""

    def gather(self, x: Tensor, found: Tensor) -> None:
        """Write `x` of every rank, in their order, into `found` `[size, *x.shape]`; both are contiguous."""

    def abort(self) -> None:
        """End the exchanges that run or wait, because a rank is lost. From any thread."""

    def close(self) -> None:
        """There are no more exchanges. All ranks have come to the end of theirs."""


class GroupExchanges:
    """By the default process group, on a GPU NCCL's. A sum's order is NCCL's choice, by its size; what a rank gets are
    the bits that the others get, because each number is added up in one place."""

    def reserve(self, rows: int, width: int, dtype: torch.dtype) -> None:
        """Nothing: see `Exchanges`, like what follows."""

    def part(self, out: Tensor) -> Tensor:
        """`out`."""
        return out

    def sum(self, out: Tensor) -> None:
        """In place."""
        dist.all_reduce(out)

    def gather(self, x: Tensor, found: Tensor) -> None:
        """One all-gather."""
        dist.all_gather_into_tensor(found.view(-1), x.view(-1))

    def abort(self) -> None:
        """Kernels of NCCL that wait for another rank end."""
        if dist.group.WORLD is not None:
            dist.group.WORLD.abort()

    def close(self) -> None:
        """Destroy the group."""
        if dist.is_initialized():
            dist.destroy_process_group()


class SymmetricExchanges(GroupExchanges):
    """The same, but sums of few rows by torch's symmetric memory: one kernel on every rank reads the parts of all and
    adds them in rank order.

    A part is written where the others read it, so nothing is copied. The kernel waits for the others before it reads
    and before it ends, so the next product may write there.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup) -> None:
        """`group`: the default one."""
        self._device, self._group = device, group
        self._buffers: dict[tuple[int, torch.dtype], Tensor] = {}

    def reserve(self, rows: int, width: int, dtype: torch.dtype) -> None:
        """Allocate what the others read, and exchange where it is. Waits for them; raises RuntimeError where GPUs
        cannot read each other's memory."""
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
        """Memory that the others read, of as many rows as were reserved; of more `out`."""
        staged = self._staged(out)
        return out if staged is None else staged

    def sum(self, out: Tensor) -> None:
        """One shot, or by NCCL where no part was staged."""
        staged = self._staged(out)
        if staged is None:
            super().sum(out)
        else:
            torch.ops.symm_mem.one_shot_all_reduce_out(staged, "sum", self._group.group_name, out)
