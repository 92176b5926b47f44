"""What ranks exchange while they compute: sums and parts of tensors of the host. Starts no process and watches none.

Tensors of a GPU have `exchanges` of their own, beside which these connections stay. A sum is taken by every rank from
all parts, in the order of ranks: all have the same bits, and they depend neither on timing nor on how many rows there
are. A ring, which gloo's own all-reduce is, adds in an order that depends on where in the tensor an element lies, and
gains nothing for the few rows of a decode pass.
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
        self.device = torch.device("cpu")
        """Where this rank computes."""
        self.exchanges: Exchanges = HostExchanges(self)
        """Those of tensors that are there."""
        self.given_up = threading.Event()
        """Set where another rank is known to be lost: it is waited for no longer."""
        self.num_begun = 0
        """Exchanges so far, the running one included: of ranks that wait for each other, the one that is waited for has
        begun fewer."""
        self.waiting_since: float | None = None
        """By time.monotonic, when the running exchange began; None: none runs."""
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
        """Connect to the other ranks for `drafting`; anew, where that has failed on one of them. All do it at once.

        Returns when all are connected: a rank whose drafter fails at once closes its connections, and another that
        were still connecting to it would wait for it until the timeout. Raises as `__init__`, and soon where `given_up`
        is set.
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
        """Exchanges inside go over connections of their own. Where the block raises, they end: so another rank's
        exchange in it fails, too, soon, and those outside stay in step."""
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
        """`[size, *x.shape]`: `x` of every rank, in their order; shape and dtype are the same on all.

        Raises:
            ExchangeError: another rank has ended, or did not answer in time.
        """
        x = x.contiguous()
        found = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        if x.device.type != "cpu":
            self.exchanges.gather(x, found)
            return found
        self._exchange(found.view(-1).view(torch.uint8), x.view(-1).view(torch.uint8))
        return found

    def add_(self, x: Tensor) -> Tensor:
        """The sum of `x` of every rank, written to `x`. Raises as `gather`."""
        return _add(self.gather(x).unbind(0), x)

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
        rows = table.index_select(0, own.clamp_(0, len(table) - 1)).masked_fill_(elsewhere[:, None], 0)
        return self.add_(rows)

    def gather_numbers(self, number: int) -> list[int]:
        """Return `number` of every rank, in their order. Raises as `gather`."""
        numbers: list[int] = self.gather(torch.tensor([number])).view(-1).tolist()
        return numbers

    def take_first_array(self, array: NDArray[Any]) -> NDArray[Any]:
        """Write rank 0's `array` into `array` of every rank, and return it. Raises as `gather`."""
        self.take_first(torch.from_numpy(array))
        return array

    def take_first(self, x: Tensor) -> Tensor:
        """`x` of rank 0, written to `x` of every rank. Raises as `gather`."""
        return x.copy_(self.gather(x)[0])

    def wait_for(self, done: Callable[[], bool]) -> None:
        """Return when `done()`: what was enqueued on a device, with exchanges in it, has come to its end.

        Raises:
            ExchangeError: another rank is lost, or it took too long.
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
        """Another rank is lost: nothing waits for it any longer. From any thread."""
        self.given_up.set()
        self.exchanges.abort()

    def close(self) -> None:
        """There are no more exchanges of what is on a device; where a rank is lost, they were ended."""
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
    """Over the connections of `Ranks`, which take tensors of the host: what Triton's interpreter runs with."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def reserve(self, rows: int, width: int, dtype: torch.dtype) -> None:
        """Nothing: see `Exchanges`, like what follows."""

    def part(self, out: Tensor) -> Tensor:
        """`out`."""
        return out

    def sum(self, out: Tensor) -> None:
        """In rank order."""
        self._ranks.add_(out)

    def gather(self, x: Tensor, found: Tensor) -> None:
        """Waits for the others. Raises ExchangeError."""
        found.copy_(self._ranks.gather(x))

    def abort(self) -> None:
        """Nothing: who waits looks at `Ranks.given_up`, or fails when a connection closes."""

    def close(self) -> None:
        """Nothing."""


def _add(parts: Sequence[Tensor], out: Tensor) -> Tensor:
    """Their sum in this order, written to `out`."""
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)
    return out
