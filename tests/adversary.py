"""Triton's interpreter with the freedom of a GPU: programs run in random order and see stores late. Holds no tests.

Each program of a grid is a thread, and one thread runs at a time. At a memory access another program may continue.
Other programs see a store only after its program has done an atomic operation with release semantics at GPU scope, and
then only stores before the program's last barrier, because a program has many threads on a GPU. All other stores become
visible when the program ends. Loads without `.cg` see other programs' memory as it was before the launch, as the L1
cache may. So a missing release, barrier or `.cg`, and an order that programs do not have, show as wrong numbers.
"""

from __future__ import annotations

import inspect
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from triton._C.libtriton import interpreter as memory
from triton._C.libtriton import ir
from triton.runtime import interpreter

RELEASES = (ir.MEM_SEMANTIC.RELEASE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)


@dataclass(eq=False)
class Program:
    """One program of a launch, with the stores that only it can see: address, and the bytes of an element.
    `behind_barrier` has those since its last barrier, `ahead_of_barrier` earlier ones."""

    place: tuple[int, int, int]
    behind_barrier: dict[int, bytes] = field(default_factory=dict)
    ahead_of_barrier: dict[int, bytes] = field(default_factory=dict)
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ended: bool = False
    error: BaseException | None = None


class Grid:
    """The programs of one kernel launch, run in an order drawn from `rng`."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.running: Program | None = None
        self.before: dict[int, tuple[bytes, set[Program]]] = {}
        """For each address written: the bytes before the launch, and the programs that have published a store there."""
        self._back = threading.Semaphore(0)

    def run(self, places: list[tuple[int, int, int]], call: Callable[[], None]) -> None:
        """Run every program to its end. Raises what a program raises."""
        programs = [Program(place) for place in places]
        threads = [threading.Thread(target=self._body, args=(program, call), daemon=True) for program in programs]
        for thread in threads:
            thread.start()
        live = list(programs)
        while live:
            program = self.running = self.rng.choice(live)
            interpreter.interpreter_builder.set_grid_idx(*program.place)
            program.turn.release()
            self._back.acquire()
            if program.ended:
                live.remove(program)
        for thread in threads:
            thread.join()
        self.running = None
        for program in programs:
            if program.error is not None:
                raise program.error

    def _body(self, program: Program, call: Callable[[], None]) -> None:
        program.turn.acquire()
        try:
            call()
            self.switch()
        except BaseException as error:  # handed to the thread that waits
            program.error = error
        self.barrier()
        self._publish(program)
        program.ended = True
        self._back.release()

    def switch(self) -> None:
        """Let another program run next, with some probability."""
        program = self.running
        assert program is not None
        if self.rng.random() < 0.5:
            self._back.release()
            program.turn.acquire()

    def store(self, pointers: NDArray[Any], values: NDArray[Any], mask: NDArray[Any]) -> None:
        """Keep the elements that the running program stores; others do not see them yet."""
        self.switch()
        assert self.running is not None
        shape = np.broadcast(pointers, values, mask).shape
        chosen = np.broadcast_to(mask, shape).astype(bool)
        addresses = np.broadcast_to(pointers, shape)[chosen].tolist()
        kept = np.broadcast_to(values, shape)[chosen]
        self.running.behind_barrier.update(
            {address: value.tobytes() for address, value in zip(addresses, kept, strict=True)}
        )

    def load(
        self, pointers: NDArray[Any], mask: NDArray[Any], other: NDArray[Any], dtype: Any, fresh: bool
    ) -> NDArray[Any]:
        """Return the elements as the running program sees them: its own stores, and with `fresh` those that others have
        published. Without `fresh`, what others have stored is as it was before the launch."""
        self.switch()
        program = self.running
        assert program is not None
        found: NDArray[Any] = np.array(memory.load(pointers, mask, other, dtype))
        own = program.ahead_of_barrier | program.behind_barrier
        stale = {} if fresh else {a: was for a, (was, by) in self.before.items() if by != {program}}
        changed = stale | own
        if changed:
            known = np.isin(pointers, np.fromiter(changed, dtype=np.uint64, count=len(changed)))
            for at in np.argwhere(known & np.broadcast_to(mask, pointers.shape).astype(bool)):
                place = tuple(at)
                found[place] = np.frombuffer(changed[int(pointers[place])], dtype=found.dtype)[0]
        return found

    def atomic(self, operation: Callable[[], Any], pointers: NDArray[Any], releases: bool) -> Any:
        """Do an atomic `operation` on memory, after publishing the running program's stores to `pointers`. If it
        releases, stores before the last barrier are published, too."""
        self.switch()
        program = self.running
        assert program is not None
        if releases:
            self._publish(program)
        self._publish(program, only={int(address) for address in pointers.reshape(-1)})
        found = operation()
        self.switch()
        return found

    def barrier(self) -> None:
        """Synchronize the running program's threads: its next release publishes every store made before."""
        assert self.running is not None
        self.running.ahead_of_barrier |= self.running.behind_barrier
        self.running.behind_barrier.clear()

    def _publish(self, program: Program, only: set[int] | None = None) -> None:
        for kept in (program.ahead_of_barrier, *(() if only is None else (program.behind_barrier,))):
            for address in [a for a in kept if only is None or a in only]:
                value = kept.pop(address)
                kind = np.dtype(f"u{len(value)}")
                at, whole = np.array([address], dtype=np.uint64), np.ones(1, dtype=bool)
                was = np.array(memory.load(at, whole, np.zeros(1, kind), kind)).tobytes()
                self.before.setdefault(address, (was, set()))[1].add(program)
                memory.store(at, np.frombuffer(value, kind).copy(), whole)


@contextmanager
def adversary(seed: int) -> Iterator[None]:
    """While this context is open, run interpreted launches with programs in a random order that `seed` decides."""
    rng = random.Random(seed)
    grids: list[Grid] = []
    builder = type(interpreter.interpreter_builder)

    def handle(data: NDArray[Any], dtype: Any) -> Any:
        return interpreter.TensorHandle(data, dtype)

    def load(self: Any, ptrs: Any, mask: Any, other: Any, policy: Any, *_: Any) -> Any:
        kind = ptrs.get_element_ty()
        dtype = interpreter._get_np_dtype(kind)
        empty = np.zeros_like(ptrs.data, dtype=dtype) if other is None else other.data
        return handle(grids[-1].load(ptrs.data, mask.data, empty, dtype, str(policy).lower().endswith("cg")), kind)

    def store(self: Any, ptrs: Any, value: Any, mask: Any, *_: Any) -> None:
        grids[-1].store(ptrs.data, value.data, mask.data)

    plain = builder.create_atomic_rmw

    def atomic(self: Any, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        releases = sem in RELEASES and scope in (ir.MEM_SYNC_SCOPE.GPU, ir.MEM_SYNC_SCOPE.SYSTEM)
        return grids[-1].atomic(lambda: plain(self, op, ptr, val, mask, sem, scope), ptr.data, releases)

    def execute(self: Any, *given: Any, **named: Any) -> None:
        known = inspect.getfullargspec(self.fn)
        named = {k: v for k, v in named.items() if k in known.args or k in known.kwonlyargs}
        host, named_host = self._init_args_hst(given, named)
        scope = interpreter._patch_lang(self.fn)
        try:
            args = inspect.getcallargs(self.fn, *host, **named_host)
            args = {k: v if k in self.constexprs else interpreter._implicit_cvt(v) for k, v in args.items()}
            sizes = self.grid(args) if callable(self.grid) else self.grid
            sizes = (*sizes, 1, 1, 1)[:3]
            interpreter.interpreter_builder.set_grid_dim(*sizes)
            grids.append(Grid(rng))
            grids[-1].run(list(product(*map(range, sizes))), lambda: self.fn(**args))
        finally:
            scope.restore()
        self._restore_args_dev(given, host, named, named_host)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_masked_load", load)
        patch.setattr(builder, "create_masked_store", store)
        patch.setattr(builder, "create_atomic_rmw", atomic)
        patch.setattr(builder, "create_barrier", lambda self: grids[-1].barrier())
        patch.setattr(builder, "get_cache_policy", lambda self, modifier, eviction: modifier, raising=False)
        patch.setattr(interpreter.GridExecutor, "__call__", execute)
        yield
