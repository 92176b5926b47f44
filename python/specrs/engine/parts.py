"""The parts that an engine is constructed from, and the protocol of its runner. `specrs.engine.build` builds them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from specrs.config import EngineConfig
from specrs.core import KVEventBatch, Scheduler, SpeculationPlanner
from specrs.drafters.base import DrafterCounts
from specrs.engine.head_check import HeadCheck
from specrs.engine.loras import LoRAStore
from specrs.engine.weights import Weights
from specrs.parallel.team import Team
from specrs.runner.extras import ExtrasLookup
from specrs.runner.ring import Header, Ring, RingSlot
from specrs.sampling import RequestLimits

Publish = Callable[[KVEventBatch], None]
"""Called with the changes of the prefix cache, once per step that changes it. Must not wait."""
Watch = Callable[[RingSlot, Header, float], None]
"""Called with each launch that settled: its slot, its header, and the milliseconds that it took."""


class Runner(Protocol):
    """Executes planned launches on a device. `CpuRunner` and `CudaRunner` implement this protocol."""

    num_target_passes: int

    @property
    def drafter(self) -> DrafterCounts | None:
        """The drafter; None without speculation."""

    @property
    def kv_cache(self) -> Any:
        """The KV cache of the target."""

    def use_extras(self, lookup: ExtrasLookup) -> None:
        """Set the function that finds the grammar of a request id. Records hold numbers only."""

    def launch(self, slot: RingSlot, header: Header) -> None:
        """Execute or enqueue the launch planned in `slot.record`."""

    def wait(self, slot: RingSlot) -> None:
        """Return when `slot.results` hold what the launch reported."""

    def close(self) -> None:
        """End the threads and processes that the runner has started."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Everything that `Engine` is constructed from: scheduler, runner, weights and limits, and optional parts."""

    config: EngineConfig
    weights: Weights
    limits: RequestLimits
    scheduler: Scheduler
    ring: Ring
    runner: Runner
    planner: SpeculationPlanner | None = None
    """Plans the number of drafts of each step; without one, the scheduler drafts what requests ask for."""
    team: Team | None = None
    """The other ranks, where the runner's launches are theirs too."""
    loras: LoRAStore | None = None
    """The adapters that requests may have; None: they may have none."""
    publish: Publish | None = None
    """Takes the events of the prefix cache."""
    head_check: HeadCheck | None = None
    """Looks whether a head's drafts are ever accepted."""
