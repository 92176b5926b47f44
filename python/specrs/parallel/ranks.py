"""What ranks exchange while they compute: sums and parts of tensors. Starts no process and watches none.

A sum is taken by every rank from all parts, in the order of ranks: all have the same bits, and they depend neither on
timing nor on how many rows there are. A ring, which gloo's own all-reduce is, adds in an order that depends on where in
the tensor an element lies, and gains nothing for the few rows of a decode pass.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from specrs.errors import EngineError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class ExchangeError(EngineError):
    """An exchange among ranks that did not come about: another rank has ended or hangs."""


class Ranks:
    """One rank of `size`, and its connections to all others. For one thread at a time."""

    def __init__(self, store: Store, rank: int, size: int, *, address: str, timeout: float) -> None:
        """Connect to the other ranks, which do the same with the same `store`. Waits for them.

        Args:
            address: what to listen on, at a port that the system chooses: 127.0.0.1 for ranks of one machine.
            timeout: seconds that an exchange may take.

        Raises:
            ExchangeError: the others did not come within `timeout` seconds.
        """
        self.rank, self.size = rank, size
        self.num_begun = 0
        """Exchanges so far, the running one included: of ranks that wait for each other, the one that is waited for has
        begun fewer."""
        self.waiting_since: float | None = None
        """By time.monotonic, when the running exchange began; None: none runs."""
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=timeout)
        try:
            self._group = dist.ProcessGroupGloo(store, rank, size, options)
        except RuntimeError as fault:
            raise ExchangeError(f"rank {rank} could not connect to the others: {fault}") from fault

    def gather(self, x: Tensor) -> Tensor:
        """`[size, *x.shape]`: `x` of every rank, in their order; shape and dtype are the same on all.

        Raises:
            ExchangeError: another rank has ended, or did not answer in time.
        """
        x = x.contiguous()
        found = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        self._exchange(found.view(-1).view(torch.uint8), x.view(-1).view(torch.uint8))
        return found

    def add_(self, x: Tensor) -> Tensor:
        """The sum of `x` of every rank, written to `x`. Raises as `gather`."""
        parts = self.gather(x).unbind(0)
        torch.add(parts[0], parts[1], out=x)
        for part in parts[2:]:
            x.add_(part)
        return x

    def side_by_side(self, x: Tensor, width: int) -> Tensor:
        """`[N, width]` from `x` `[N, W]` of every rank, columns in the order of ranks; of the last ones only so many
        as there are. Raises as `gather`."""
        parts = self.gather(x)
        return parts.movedim(0, 1).reshape(len(x), self.size * x.shape[1])[:, :width].contiguous()

    def look_up(self, table: Tensor, ids: Tensor) -> Tensor:
        """Rows `ids` `[N]` of a table whose rows every rank has `len(table)` of, in their order: `[N, *]`.

        The sum is exact: all parts but one are 0. Raises as `gather`.
        """
        own = ids - self.rank * len(table)
        elsewhere = (own < 0) | (own >= len(table))
        rows = table.index_select(0, own.clamp_(0, len(table) - 1))
        return self.add_(rows.masked_fill_(elsewhere[:, None], 0))

    def take_first(self, x: Tensor) -> Tensor:
        """`x` of rank 0, written to `x` of every rank. Raises as `gather`."""
        return x.copy_(self.gather(x)[0])

    def _exchange(self, found: Tensor, given: Tensor) -> None:
        self.num_begun += 1
        self.waiting_since = time.monotonic()
        try:
            if given.numel():
                self._group._allgather_base(found, given).wait()  # type: ignore[attr-defined]
        except RuntimeError as fault:
            raise ExchangeError(f"rank {self.rank} waited for another one: {fault}") from fault
        finally:
            self.waiting_since = None
