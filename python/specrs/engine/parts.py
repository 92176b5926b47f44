"""Parts that an engine is constructed from. `specrs.engine.build` builds them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specrs.backends.base import Runner
from specrs.backends.ring import Header, Ring, RingSlot
from specrs.backends.weights import Weights
from specrs.config import EngineConfig
from specrs.core import KVEventBatch, Scheduler, SpeculationPlanner
from specrs.drafters.base import DraftCheck
from specrs.engine.disk_cache import DiskCache
from specrs.engine.loras import LoRAStore
from specrs.parallel.team import Team
from specrs.sampling import RequestLimits

Publish = Callable[[KVEventBatch], None]
"""Function that is called with the changes of the prefix cache, once per step that changes it. It must not block."""
Watch = Callable[[RingSlot, Header, float], None]
"""Function that is called for each settled step with its slot, its header, and its milliseconds."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Everything that `Engine` is constructed from: scheduler, runner, weights and limits, and optional parts."""

    config: EngineConfig
    weights: Weights
    limits: RequestLimits
    scheduler: Scheduler
    ring: Ring
    runner: Runner
    drafters: tuple[str, ...] = ()
    """Names of the engine's drafting methods."""
    planner: SpeculationPlanner | None = None
    """Plans the number of drafts of each step; without one, the scheduler drafts what requests ask for."""
    team: Team | None = None
    """The other ranks, which run the same steps. None: there is one rank."""
    loras: LoRAStore | None = None
    """LoRA adapters for requests. None: LoRA is off."""
    publish: Publish | None = None
    """Receiver of the prefix cache's events. None: there are no events."""
    disk: DiskCache | None = None
    """The prefix cache on disk. None: there is none."""
    draft_check: DraftCheck | None = None
    """Check that warns if the first drafts are rarely accepted, because the drafter may read other hidden states than
    in training."""
