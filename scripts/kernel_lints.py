"""Faults that compiled kernels show without a GPU: order of memory accesses, occupancy, pipelines. Compiles nothing.

Each function reads the TTGIR or the SASS of one kernel and returns a line for each fault.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

EARLY: Mapping[str, frozenset[str]] = {
    "skinny_linear_kernel": frozenset({"weight"}),
    "paged_attention_kernel": frozenset({"positions", "q_start", "k_start"}),
    "combine_kernel": frozenset({"positions", "q_start"}),
}
"""Arguments that a kernel may read before its dependent wait: weights, which no kernel writes, and places of rows,
which an earlier kernel has written (see `_dependent_launch`)."""
REGISTERS, SHARED, SHARED_EACH, THREADS = 65536, 233472, 1024, 2048
"""Limits of a multiprocessor of compute capability 9.0: registers, bytes of shared memory in all, bytes that each
thread block takes for itself, and threads."""

_WAIT, _START = "tt.grid_dependency_wait", "tt.grid_dependency_launch_dependents"
_VALUE = re.compile(r"%[\w$.-]+")
_POINTER = (
    "tt.splat",
    "tt.addptr",
    "tt.broadcast",
    "tt.expand_dims",
    "tt.bitcast",
    "ttg.convert_layout",
    "arith.select",
)


class TTGIR:
    """A kernel's TTGIR (Triton's GPU code before PTX), and the argument that each pointer in it comes from."""

    def __init__(self, text: str) -> None:
        self.lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
        self.arguments: list[str] = []
        # Names come again in other regions: the latest before a use is meant.
        self._made: dict[str, list[tuple[int, str]]] = {}
        for i, line in enumerate(self.lines):
            if "tt.func" in line:
                self.arguments = re.findall(r"(%\w+): !tt\.ptr", line)
            named = re.match(r"\s*(%[\w$.-]+)(?::\d+)? = (.*)", line)
            if named:
                self._made.setdefault(named[1], []).append((i, named[2]))
            carried = re.search(r"iter_args\(([^)]*)\)", line)
            for name, first in re.findall(r"(%[\w$.-]+) = (%[\w$.-]+)", carried[1] if carried else ""):
                self._made.setdefault(name, []).append((i, f"tt.splat {first}"))

    def _definition(self, name: str, before: int) -> tuple[int, str]:
        return next((made for made in reversed(self._made.get(name, [])) if made[0] < before), (-1, ""))

    def argument(self, pointer: str, at: int) -> str | None:
        """Return the kernel's argument from which `pointer`, used in line `at`, is computed; None if that cannot be
        told."""
        pointer = pointer.partition("#")[0]
        while pointer not in self.arguments:
            at, made = self._definition(pointer, at)
            values = _VALUE.findall(made)
            if not made.startswith(_POINTER) or not values:
                return None
            pointer = values[1 if made.startswith("arith.select") else 0]
        return pointer[1:]

    def is_used(self, at: int) -> bool:
        """Return whether a later line reads the result of the op at line `at`."""
        name = _VALUE.findall(self.lines[at])[0]
        return any(re.search(re.escape(name) + r"\b", line.partition(" = ")[2]) for line in self.lines[at + 1 :])

    def accesses(self) -> Iterator[tuple[int, str, str | None, str]]:
        """Yield `(line, op, argument, text)` of each access to global memory."""
        for i, line in enumerate(self.lines):
            found = re.search(r"(tt\.load|tt\.store|tt\.atomic_rmw|ttg\.async_copy_global_to_local)\b(.*)", line)
            if found:
                yield i, found[1], self.argument(_VALUE.findall(found[2])[0], i), line
            elif "prefetch.global" in line:
                yield i, "prefetch", self._prefetched(line, i), line

    def _prefetched(self, line: str, at: int) -> str | None:
        value = _VALUE.findall(line.partition("} ")[2])[0]
        made_at, made = self._definition(value, at)
        if made.startswith("tt.ptr_to_int"):
            return self.argument(_VALUE.findall(made)[0], made_at)
        return self.argument(value, at)


def early_accesses(name: str, ir: TTGIR) -> list[str]:
    """Return the forbidden accesses of a dependent kernel before it waits for the kernel before it."""
    wait = next((i for i, line in enumerate(ir.lines) if _WAIT in line), None)
    if wait is None:
        return ["does not wait for the kernel ahead of it"]
    allowed = EARLY.get(name, frozenset())
    return [
        f"{op} of {argument or 'an unknown pointer'} ahead of the dependent wait"
        for i, op, argument, _ in ir.accesses()
        if i < wait and (argument not in allowed or op in ("tt.store", "tt.atomic_rmw"))
    ]


def starts_next_early(ir: TTGIR) -> list[str]:
    """Report a kernel that lets the next one start before its own dependent wait. The next one could read what kernels
    further ahead have not finished writing."""
    wait, start = (next((i for i, line in enumerate(ir.lines) if op in line), None) for op in (_WAIT, _START))
    if start is not None and (wait is None or start < wait):
        return ["lets the kernel after it start before it has waited itself"]
    return []


def shared_results(ir: TTGIR) -> list[str]:
    """Report faults where programs hand results to the last one that arrives: release, acquire, loads that bypass the
    L1 cache, and a counter that ends at zero."""
    accesses = list(ir.accesses())
    counts = [(i, argument, line) for i, op, argument, line in accesses if op == "tt.atomic_rmw" and "acq_rel" in line]
    if not counts:
        others = [(i, argument) for i, op, argument, _ in accesses if op == "tt.atomic_rmw"]
        return [f"an atomic of {argument} that orders nothing, and its result is read" for i, argument in others
                if ir.is_used(i)]  # fmt: skip
    found = []
    for count, counter, line in counts:
        if "gpu" not in line:
            found.append("the count's scope is not the GPU")
        handed = {a for _, op, a, _ in accesses if op == "tt.store"} & {
            a for i, op, a, _ in accesses if op == "tt.load" and i > count
        }
        if not handed:
            found.append("nothing that is stored is loaded after the count")
        stores = [i for i, op, a, _ in accesses if op == "tt.store" and a in handed]
        found += [f"a store after the count (line {i})" for i in stores if i > count]
        before = [i for i in stores if i < count]
        if before and not any("ttg.barrier" in text for text in ir.lines[max(before) : count]):
            found.append("no barrier of all threads between the last store and the count")
        found += [
            f"{a} is loaded after the count without .cg"
            for i, op, a, text in accesses
            if op == "tt.load" and i > count and a in handed and "cache_modifier = cg" not in text
        ]
        if not any(op == "tt.store" and a == counter and i > count for i, op, a, _ in accesses):
            found.append(f"{counter} is not set back")
    return found


def pipelines(ir: TTGIR) -> list[str]:
    """Return a fault for each loop with a product whose operands do not arrive while the ones before them are
    multiplied."""
    found = []
    for lines in _loops(ir.lines):
        body = "\n".join(lines)
        if not re.search(r"tt\.dot |warp_group_dot |tc_gen5_mma ", body):
            continue
        found += ["a tt.load in a loop with a product" for line in lines if "tt.load " in line]
        waits = [int(number) for number in re.findall(r"async_wait .*num = (\d+)", body)]
        if "async_copy_global_to_local" not in body:
            found.append("nothing is copied ahead in a loop with a product")
        elif not waits or min(waits) == 0:
            found.append("a loop with a product waits for all copies")
    return found


def _loops(lines: Sequence[str]) -> Iterator[list[str]]:
    """Return the innermost loops, without their first line."""
    open_at: list[int] = []
    depths: list[int] = []
    has_inner: list[bool] = []
    for i, line in enumerate(lines):
        depth = len(line) - len(line.lstrip())
        if re.search(r"\bscf\.for\b", line):
            if has_inner:
                has_inner[-1] = True
            open_at.append(i)
            depths.append(depth)
            has_inner.append(False)
        elif depths and line.strip().startswith("}") and depth == depths[-1]:
            start = open_at.pop()
            depths.pop()
            if not has_inner.pop():
                yield list(lines[start + 1 : i])


_GLOBAL = re.compile(r"\b(LDG|STG|LDGSTS|ATOMG?|REDG?|UTMALDG|UTMASTG|UBLKCP|CCTL)\b[\w.]*")


def machine_order(name: str, sass: str, early_loads: int, ordered: bool) -> list[str]:
    """Report faults in the machine code of a dependent kernel. At most `early_loads` loads may stand before ACQBULK; if
    `ordered`, BAR, MEMBAR, ATOMG and CCTL must surround the count."""
    ops = [found.group(0) for line in sass.splitlines() if (found := re.search(_OP, line))]
    if "ACQBULK" not in ops:
        return ["no ACQBULK"]
    found = []
    before = ops[: ops.index("ACQBULK")]
    loads = [op for op in before if op.startswith("LDG") and not op.startswith("LDGSTS")]
    if len(loads) > early_loads:
        found.append(f"{len(loads)} loads before ACQBULK, {early_loads} are known")
    for op in before:
        if _GLOBAL.match(op) and op not in loads and not (op.startswith("CCTL.E.PF2") and name in EARLY):
            found.append(f"{op} before ACQBULK")
    if not ordered:
        return found
    for i, op in enumerate(ops):
        if op.startswith("ATOMG"):
            found += _around_count(ops, i)
    return found


_OP = re.compile(
    r"\b(?:ACQBULK|BAR\.SYNC[\w.]*|MEMBAR[\w.]*|(?:LDG|STG|LDGSTS|ATOMG?|REDG?|UTMA\w+|UBLKCP|CCTL)\b[\w.]*)"
)


def _around_count(ops: Sequence[str], at: int) -> list[str]:
    found = []
    fence = max((i for i in range(at) if ops[i].startswith("MEMBAR")), default=None)
    if fence is None or ".GPU" not in ops[fence]:
        return ["no MEMBAR.GPU before the count"]
    stored = max((i for i in range(at) if ops[i].startswith("STG")), default=-1)
    if stored > fence:
        found.append("a store between MEMBAR and the count")
    if not any(op.startswith("BAR.SYNC") for op in ops[stored + 1 : fence]):
        found.append("no BAR between the last store and MEMBAR")
    after = list(ops[at + 1 :])
    cached = next((i for i, op in enumerate(after) if op.startswith("CCTL.IVALL")), None)
    read = next((i for i, op in enumerate(after) if op.startswith("LDG")), len(after))
    if cached is None or cached > read:
        found.append("no CCTL.IVALL between the count and what is read after it")
    return found


def occupancy(programs: int, num_sms: int, threads: int, registers: int, shared: int) -> list[str]:
    """Return a fault if programs that must run at once, up to four on each multiprocessor, do not fit at once.

    A grid of more than four programs on each is taken to run in turns.
    """
    wanted = -(-programs // num_sms)
    by_shared = SHARED // (shared + SHARED_EACH)
    by_registers = REGISTERS // (-(-registers // 8) * 8 * threads)
    fits = min(by_shared, by_registers, THREADS // threads)
    if fits < 1 or (wanted <= 4 and fits < wanted):
        return [
            f"{wanted} programs on a multiprocessor are wanted and {fits} fit: {registers} registers x {threads} "
            f"threads allow {by_registers}, {shared} bytes of shared memory {by_shared}"
        ]
    return []
