"""Exchanges among ranks while they compute: sums and gathered parts of host tensors. Starts no process and watches
none.

Tensors on a GPU have their own `exchanges`; these connections remain next to them. For a sum, every rank adds all parts
in the order of ranks. So all ranks have the same bits, which depend neither on timing nor on the number of rows. A
ring, which gloo's own all-reduce uses, adds in an order that depends on an element's place in the tensor. It also gains
nothing for the few rows of a decode pass.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from specrs.parallel.connection import ExchangeError
from specrs.parallel.exchanges import Exchanges

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class Ranks:
    """One rank of `size`, and its connections to all others. Use it from one thread at a time."""

    def __init__(self, store: Store, rank: int, size: int, *, address: str, timeout: float) -> None:
        """Connect to the other ranks, which do the same with the same `store`. Waits for them.

        Args:
            address: address to listen on, at a port that the system chooses; 127.0.0.1 for ranks of one machine.
            timeout: maximum seconds of an exchange.

        Raises:
            ExchangeError: another rank did not connect within `timeout` seconds.
        """
        self.rank, self.size = rank, size
        self.device = torch.device("cpu")
        """Device on which this rank computes."""
        self.exchanges: Exchanges = HostExchanges(self)
        """Exchanges of tensors on this rank's device."""
        self.given_up = threading.Event()
        """Set when another rank is known to be lost. Exchanges then stop waiting for it."""
        self.num_begun = 0
        """Number of exchanges so far, including the running one. If ranks wait for each other, the rank that has begun
        fewer is the one that the others wait for."""
        self.waiting_since: float | None = None
        """Start of the running exchange, by time.monotonic; None: none runs."""
        self._store, self._address, self._timeout = store, address, timeout
        self._num_drafting = 0
        self._drafting: dist.ProcessGroupGloo | None = None
        self._group: dist.ProcessGroupGloo | None = self._connect(store)

    def _connect(self, store: Store) -> dist.ProcessGroupGloo:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._address)]
        options._timeout = timedelta(seconds=self._timeout)
        try:
            return dist.ProcessGroupGloo(store, self.rank, self.size, options)
        except RuntimeError as fault:
            raise ExchangeError(f"rank {self.rank} could not connect to the others: {fault}") from fault

    def connect_drafting(self) -> None:
        """Connect to the other ranks for `drafting`, or again after that has failed on one of them. All ranks call it
        at the same time.

        Returns when all are connected. Otherwise a rank whose drafter fails immediately would close its connections
        while another rank still connects to it and waits until the timeout.

        Raises ExchangeError if a rank did not connect in time, and soon if `given_up` is set.
        """
        self._drafting = None
        self._num_drafting += 1
        store = dist.PrefixStore(f"drafting {self._num_drafting}", self._store)  # type: ignore[attr-defined]
        store.set(f"here {self.rank}", "")
        end = time.monotonic() + self._timeout
        with self._waiting():
            # what connects cannot be interrupted, so nothing connects before all are there
            while not store.check([f"here {rank}" for rank in range(self.size)]):
                if self.given_up.wait(0.001):
                    raise ExchangeError(f"rank {self.rank} connects to no other any more: one of them is lost")
                if time.monotonic() > end:
                    raise ExchangeError(f"rank {self.rank} waited for another one, to connect to it again")
            self._drafting = self._connect(store)
        self.gather(torch.zeros(1))

    @contextlib.contextmanager
    def drafting(self) -> Iterator[None]:
        """Context whose exchanges use connections of their own. If the block raises, these connections are closed.
        Another rank's exchange in its block then soon fails, too, and exchanges outside the block stay in step."""
        group = self._group
        self._group = self._drafting
        try:
            yield
        except BaseException:
            self._group = self._drafting = None
            raise
        finally:
            self._group = group

    def gather(self, x: Tensor) -> Tensor:
        """Return `x` of every rank in the order of ranks, `[size, *x.shape]`. Shape and dtype must be the same on all.
        On a GPU the exchange is only enqueued: a rank that is lost then shows in `wait_for`.

        Raises:
            ExchangeError: `x` is in host memory, and another rank has ended or did not answer in time.
        """
        x = x.contiguous()
        found = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        if x.device.type != "cpu":
            self.exchanges.gather(x, found)
            return found
        self._exchange(found.view(-1).view(torch.uint8), x.view(-1).view(torch.uint8))
        return found

    def add_(self, x: Tensor) -> Tensor:
        """Add `x` of all ranks, write the sum to `x` and return it. Raises ExchangeError if another rank has ended or
        does not answer in time."""
        return _add(self.gather(x).unbind(0), x)

    def side_by_side(self, x: Tensor, width: int) -> Tensor:
        """Concatenate the columns of `x` `[N, W]` of all ranks, in the order of ranks, and cut the result to `[N,
        width]`. Raises ExchangeError if another rank has ended or does not answer in time."""
        parts = self.gather(x)
        return parts.movedim(0, 1).reshape(len(x), self.size * x.shape[1])[:, :width].contiguous()

    def look_up(self, table: Tensor, ids: Tensor) -> Tensor:
        """Return the rows `ids` `[N]` of a table that is split over the ranks by rows: `[N, *]`. Each rank has
        `len(table)` rows, in the order of ranks.

        The result is a sum over ranks, which is exact because all parts but one are 0. Raises ExchangeError if another
        rank has ended or does not answer in time.
        """
        own = ids - self.rank * len(table)
        elsewhere = (own < 0) | (own >= len(table))
        rows = table.index_select(0, own.clamp_(0, len(table) - 1)).masked_fill_(elsewhere[:, None], 0)
        return self.add_(rows)

    def gather_numbers(self, number: int) -> list[int]:
        """Return `number` of every rank, in the order of ranks. Raises ExchangeError if another rank has ended or does
        not answer in time."""
        numbers: list[int] = self.gather(torch.tensor([number])).view(-1).tolist()
        return numbers

    def take_first_array(self, array: NDArray[Any]) -> NDArray[Any]:
        """Write rank 0's `array` into `array` of every rank, and return it. Raises ExchangeError if another rank has
        ended or does not answer in time."""
        self.take_first(torch.from_numpy(array))
        return array

    def take_first(self, x: Tensor) -> Tensor:
        """Write `x` of rank 0 to `x` of every rank, and return it. Raises ExchangeError if another rank has ended or
        does not answer in time."""
        return x.copy_(self.gather(x)[0])

    def wait_for(self, done: Callable[[], bool]) -> None:
        """Wait until `done()` returns True, which says that work enqueued on a device, with exchanges in it, has ended.

        Raises:
            ExchangeError: another rank is lost, or the work took too long.
        """
        end = time.monotonic() + self._timeout
        with self._waiting():
            while not done():
                if self.given_up.is_set():
                    raise ExchangeError(f"rank {self.rank} waits for no other any more: one of them is lost")
                if time.monotonic() > end:
                    raise ExchangeError(f"rank {self.rank} waited for another one, in what its GPU runs")
                time.sleep(20e-6)

    def give_up(self) -> None:
        """Stop waiting for other ranks, because one is lost. May be called from any thread."""
        self.given_up.set()
        self.exchanges.abort()

    def close(self) -> None:
        """Close the exchanges of the device, unless a rank is lost, in which case they were aborted."""
        if not self.given_up.is_set():
            self.exchanges.close()

    def _exchange(self, found: Tensor, given: Tensor) -> None:
        with self._waiting():
            if self._group is None:
                raise ExchangeError(f"rank {self.rank} is no longer connected to the others")
            try:
                if given.numel():
                    self._group._allgather_base(found, given).wait()  # type: ignore[attr-defined]
            except RuntimeError as fault:
                raise ExchangeError(f"rank {self.rank} waited for another one: {fault}") from fault

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        self.num_begun += 1
        self.waiting_since = time.monotonic()
        try:
            yield
        finally:
            self.waiting_since = None


class HostExchanges:
    """Exchanges of host tensors over the connections of `Ranks`. Passes under Triton's interpreter use them."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def reserve(self, rows: int, width: int, dtype: torch.dtype) -> None:
        """Do nothing: sums over host connections need no memory that other ranks read."""

    def part(self, out: Tensor) -> Tensor:
        """Return `out`, where this rank writes its part of a sum."""
        return out

    def sum(self, out: Tensor) -> None:
        """Sum `out` `[N, width]` over all ranks in the order of ranks, in place. Raises ExchangeError if another rank
        has ended or does not answer in time."""
        self._ranks.add_(out)

    def gather(self, x: Tensor, found: Tensor) -> None:
        """Write `x` of every rank, in the order of ranks, into `found`. Waits for the other ranks. Raises ExchangeError
        if another rank has ended or does not answer in time."""
        found.copy_(self._ranks.gather(x))

    def abort(self) -> None:
        """Do nothing: a rank that waits checks `Ranks.given_up`, or fails when a connection closes."""

    def close(self) -> None:
        """Do nothing: `Ranks` closes its connections."""


def _add(parts: Sequence[Tensor], out: Tensor) -> Tensor:
    """Write the sum of at least two `parts`, added in their order, to `out` and return it."""
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)
    return out
