"""Builds an engine from an `EngineConfig`: loads weights, makes a scheduler and a runner, and measures the cost of
steps. Serves nothing."""

from __future__ import annotations

import contextlib
import json
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from specrs.backends.base import Backend, Runner, SlotType
from specrs.backends.blueprint import Blueprint
from specrs.backends.kv_memory import check_memory
from specrs.backends.ranks import LeadingRunner
from specrs.backends.ring import Ring
from specrs.backends.table import backend_of, resolve_device
from specrs.backends.weights import Weights
from specrs.config import EngineConfig
from specrs.core import CostModel, Scheduler, SpeculationPlanner
from specrs.engine.disk_cache import DiskCache, open_store
from specrs.engine.engine import Engine
from specrs.engine.kv_events import KVEventPublisher
from specrs.engine.loras import LoRAStore
from specrs.engine.parts import EngineParts
from specrs.engine.plan import plan_engine
from specrs.engine.states import resolve_states
from specrs.engine.warm_up import measure_costs
from specrs.engine.weights import load_weights
from specrs.errors import UnsupportedConfigError, invalid
from specrs.models.loader import load_config
from specrs.parallel.connection import Kind
from specrs.parallel.start import Meeting, lead
from specrs.parallel.team import Team

Lead = Callable[[int, float, str, dict[str, Any]], tuple[Team, Meeting]]
"""Type of the function `lead`, and of its substitutes that run ranks as threads."""


def build_engine(config: EngineConfig, weights: Weights | None = None, lead: Lead = lead) -> Engine:
    """Load the models of `config` (or share `weights`), and allocate caches and row state. If K is planned by cost,
    measure the cost of steps.

    If `tensor_parallel_size` exceeds 1, `lead` starts the other ranks. In a process of torchrun that is not rank 0,
    this function does not return: it runs rank 0's steps, and ends the process when rank 0 ends.

    Raises:
        InvalidConfigError: the configuration or a checkpoint is wrong; often a subclass of this error.
        RankLostError: a rank did not start.
    """
    if config.tensor_parallel_size > 1:
        if weights is not None:
            reason = "not implemented for weights that are loaded; allowed: 1"
            raise invalid(UnsupportedConfigError, "tensor_parallel_size", config.tensor_parallel_size, reason)
        from specrs.engine.build_ranks import build_on_ranks  # and torch

        return build_on_ranks(config, lead, _build)
    device = resolve_device(config.device) if weights is None else weights.device
    backend = backend_of(device)
    with backend.current(device):
        if weights is None:
            check_memory(config, lambda: backend.free_memory(device))
            weights = load_weights(config)
        config = resolve_states(config, weights.target.state_bytes, lambda: backend.free_memory(device))
        return _build(config, weights)


def _build(
    config: EngineConfig, weights: Weights, team: Team | None = None, end: Callable[[], None] | None = None
) -> Engine:
    """Build an engine with loaded `weights`. `resolve_states` has made `config`. `team` are the other ranks, which
    `end` ends."""
    if config.synthetic:
        warnings.warn(
            "rejection_sample_method='synthetic': drafts are accepted at given rates, for timing only; the text is "
            "not the target's",
            stacklevel=2,
        )
    backend, blueprint = plan_engine(config, weights)
    with contextlib.ExitStack() as undo:
        engine = _assemble(backend, blueprint, team, end, undo)
        undo.pop_all()
    return engine


def _assemble(
    backend: Backend,
    blueprint: Blueprint,
    team: Team | None,
    end: Callable[[], None] | None,
    undo: contextlib.ExitStack,
) -> Engine:
    """Make the parts of an engine and the engine itself. `undo` collects functions that end the parts made so far; they
    run if a later part fails."""
    config = blueprint.config
    blocks = backend.num_blocks(blueprint)
    if team is not None:
        blocks = min(blocks, *(ready["num_blocks"] for ready in team.collect(Kind.READY)))
        team.send(Kind.START, json.dumps({"num_blocks": blocks}).encode())
    store = open_store(blueprint)
    if store is not None:
        undo.callback(store.close)
    scheduler = blueprint.scheduler(blocks, disk_key=None if store is None else store.hash_key)
    loras = leading = None
    if config.enable_lora:
        decoder = blueprint.weights.decoder
        whole = decoder.config if team is None else load_config(config.target, revision=config.revision)
        loras = LoRAStore(
            decoder,
            max_lora_rank=config.max_lora_rank,
            max_cpu_loras=config.most_cpu_loras,
            config=whole,
            experts=backend.adapts_experts,
        )
        if team is not None:
            from specrs.backends.rank_loras import LeadingLoRAs  # and torch

            leading = LeadingLoRAs(loras.get, decoder, whole, team)
    ranks, find_adapter = None if team is None else team.ranks, None if loras is None else loras.get
    if leading is not None:
        find_adapter = leading.get
    runner = backend.make_runner(blueprint, scheduler, blocks, ranks, find_adapter)
    undo.callback(runner.close)
    if team is not None:
        assert end is not None
        runner = LeadingRunner(runner, team, end, leading)
    make_slot = backend.slot_type(blueprint.device)
    planner = None
    if config.plans_speculation and blueprint.num_speculative_tokens:
        costs, catch_up_ms = _measure(blueprint, scheduler, runner, blocks, make_slot)
        planner = SpeculationPlanner(
            max_num_seqs=config.most_seqs,
            num_speculative_tokens=blueprint.num_speculative_tokens,
            costs=costs,
            catch_up_ms=catch_up_ms,
            lora_costs=runner.step_costs(on_host=blueprint.drafter is None, has_lora=True),
        )
    publisher = None
    if config.kv_events_config is not None and config.kv_events_config.publishes:
        publisher = KVEventPublisher(config.kv_events_config)
        undo.callback(publisher.close)
    disk = None if store is None else DiskCache(store, scheduler, runner, config.block_size)
    drafter = blueprint.weights.drafter
    engine = Engine(
        replace(
            make_parts(blueprint, scheduler, runner, make_slot),
            planner=planner,
            team=team,
            loras=loras,
            publish=None if publisher is None else publisher.publish,
            disk=disk,
            draft_check=None if drafter is None else drafter.check(str(config.draft)),
        )
    )
    if publisher is not None:
        weakref.finalize(engine, publisher.close)
    if disk is not None:
        weakref.finalize(engine, disk.close)
    return engine


def _measure(
    blueprint: Blueprint, scheduler: Scheduler, runner: Runner, blocks: int, make_slot: SlotType
) -> tuple[CostModel, float]:
    """Measure the cost of steps, and the cost of catch-up per position, with temporary schedulers.

    If some drafts come from the host, `scheduler` is given the cost of each kind of draft.
    """

    def measured(drafter: str) -> tuple[CostModel, float]:
        own = blueprint.scheduler(blocks, measuring=drafter)
        return measure_costs(make_parts(blueprint, own, runner, make_slot), on_host=drafter == "host")

    if not blueprint.host_drafters:
        return measured("device")
    # Made-up prompts propose nothing, so a scheduler that drafts for them measures what a draft's row costs.
    on_host, _ = measured("host")
    k, base = blueprint.num_speculative_tokens, on_host.ms(1, 0)
    rows = [max(0.0, on_host.ms(1, drafts) / base - 1.0) for drafts in range(1, k + 1)]
    if blueprint.drafter is None:
        scheduler.set_draft_costs(0.0, rows, 0.0)
        return on_host, 0.0
    costs, catch_up_ms = measured("device")
    drafting = (costs.ms(1, k) / costs.ms(1, 0) - 1.0 - rows[-1]) / k
    scheduler.set_draft_costs(max(0.0, drafting), rows, catch_up_ms / base)
    return costs, catch_up_ms


def make_parts(blueprint: Blueprint, scheduler: Scheduler, runner: Runner, make_slot: SlotType) -> EngineParts:
    """Return the parts that every engine has, with a new ring of slots."""
    ring = Ring(scheduler, blueprint.num_speculative_tokens, blueprint.depth, make_slot)
    return EngineParts(
        blueprint.config, blueprint.weights, blueprint.limits, scheduler, ring, runner, blueprint.drafters
    )
