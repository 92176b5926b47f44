"""Engines whose steps the reference runner executes. Holds no tests."""

from __future__ import annotations

from typing import Any

import torch
from models.native_passes import over_tensors
from specrs.backends.blueprint import Blueprint
from specrs.backends.cpu.runner import CpuRunner
from specrs.backends.extras import ExtrasLookup
from specrs.backends.ring import Header, RingSlot
from specrs.drafters.cpu import CpuDrafter
from specrs.drafters.hidden_state import LoadedHead
from specrs.engine.engine import Engine
from specrs.reference.drafting import Drafter, HiddenStateDrafter, ModelDrafter
from specrs.reference.step import ReferenceRunner


class EngineRunner(ReferenceRunner):
    """The reference iteration as the runner of an engine."""

    num_target_passes = 0

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.num_steps = 0

    def execute(self, slot: RingSlot, header: Header) -> None:
        super().execute(slot, header)
        self.num_steps += 1

    def use_extras(self, lookup: ExtrasLookup) -> None:
        self.extras = lookup

    def wait(self, slot: RingSlot) -> None:
        """Do nothing: a step has ended when `execute` returns."""

    def close(self) -> None:
        """Do nothing: this runner has no threads."""


def on_reference(engine: Engine) -> EngineRunner:
    """Replace the engine's runner by the reference runner, which uses the same models and KV caches. Return the
    reference runner."""
    before, blueprint = engine.runner, Blueprint(engine.config, engine.weights).with_kv_groups()
    assert isinstance(before, CpuRunner)
    drafter: Drafter | None = None
    if isinstance(before.drafter, CpuDrafter):
        model, limits = over_tensors(before.drafter.model), blueprint.draft_limits
        given = model, before.drafter.kv_cache, before.target.vocab_size, limits.shared_len
        if isinstance(blueprint.drafter, LoadedHead):
            drafter = HiddenStateDrafter(*given, max_draft_lag=blueprint.drafter.max_draft_lag(limits))
        else:
            drafter = ModelDrafter(*given)
    blocks = -(-blueprint.max_model_len // engine.config.block_size)
    tables = torch.zeros((engine.config.max_num_seqs, engine.scheduler.num_groups, blocks), dtype=torch.int64)
    mode = engine.config.logprobs_mode
    made = EngineRunner(
        over_tensors(before.target), before.kv_cache, drafter, tables, rule=before.rule, logprobs_mode=mode
    )
    made.use_extras(before._host.extras)
    if drafter is not None:
        drafter.num_passes = 0  # type: ignore[attr-defined]
    engine.runner = made  # type: ignore[assignment]
    return made
