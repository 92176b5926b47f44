"""Costs of steps from timed replays of captured graphs, with no sequences in the record. Chooses no K.

The replays leave out what depends on the requests: reads of their KV, and the host. The planner learns both from the
times of real steps, and they are about the same for every K.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Sequence

from specrs.backends.cuda.shapes import Buckets, LogitsMode, Shape
from specrs.core import CostModel

SECONDS = 5.0
"""Seconds that all replays may take. Batch sizes that do not fit into them lie between two that were timed."""
_SHORT_MS = 30.0
"""Milliseconds below which a graph is timed twice, because its first replay also brings it onto the device."""


def replayed_costs(
    buckets: Buckets,
    graphs: Container[object],
    replay_ms: Callable[[Shape], float],
    *,
    on_host: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> CostModel | None:
    """Return the milliseconds of steps by batch size and K. None: there are no graphs of whole iterations.

    Each step runs the graph of the next larger batch size, so the costs are constant from one size to the next.
    `on_host` times graphs for drafts that are in the record. `replay_ms` replays the graph of a shape. Ends within
    `SECONDS` by `clock`, but times at least the largest and the smallest batch.
    """
    kinds = _shapes(buckets, on_host=on_host)
    if not kinds or any(shape not in graphs for shapes in kinds.values() for shape in shapes):
        return None
    began, timed, longest = clock(), dict[int, list[float]](), 0.0
    for batch in _ends_first(list(kinds)):
        before = clock()
        if len(timed) >= 2 and before - began + longest > SECONDS:
            break
        timed[batch] = [_twice(replay_ms, shape) for shape in kinds[batch]]
        longest = max(longest, clock() - before)
    ks = [shape.max_k for shape in next(iter(kinds.values()))]
    between = CostModel(sorted(timed), ks, [timed[batch] for batch in sorted(timed)])
    counts, table, smaller = list[int](), list[list[float]](), 0
    for batch in kinds:
        steps = sorted({smaller + 1, batch})
        counts += steps
        table += [[between.ms(batch, k) for k in ks]] * len(steps)
        smaller = batch
    return CostModel(counts, ks, table)


def _shapes(buckets: Buckets, *, on_host: bool) -> dict[int, list[Shape]]:
    """Return the greedy whole iterations of each batch size, by K ascending."""
    found: dict[int, dict[int, Shape]] = {}
    for shape in buckets.whole_shapes():
        drafts_here = shape.max_k == 0 or not buckets.has_passes or (shape.passes == 0) == on_host
        if shape.logits_mode is LogitsMode.GREEDY and drafts_here:
            found.setdefault(shape.batch, {})[shape.max_k] = shape
    return {batch: [of[k] for k in sorted(of)] for batch, of in sorted(found.items())}


def _ends_first(sizes: Sequence[int]) -> Iterator[int]:
    """Yield the largest of ascending sizes, the smallest, two between, then all others from the smallest on.

    An early end leaves out large sizes, which take the most time and whose costs are nearly lines.
    """
    last = len(sizes) - 1
    order = [last, 0, last // 2, 3 * last // 4, *range(last)]
    yield from (sizes[i] for i in dict.fromkeys(order))


def _twice(replay_ms: Callable[[Shape], float], shape: Shape) -> float:
    once = replay_ms(shape)
    return min(once, replay_ms(shape)) if once < _SHORT_MS else once
