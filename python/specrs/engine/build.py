"""From an EngineConfig to an engine: weights, a scheduler, a runner, and what launches cost. Serves nothing."""

from __future__ import annotations

import contextlib
import json
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from specrs.config import EngineConfig
from specrs.core import CostModel, Scheduler, SpeculationPlanner
from specrs.engine.blueprint import Blueprint
from specrs.engine.device import current, resolve_device
from specrs.engine.engine import Engine
from specrs.engine.head_check import HeadCheck
from specrs.engine.kv_events import KVEventPublisher
from specrs.engine.kv_memory import check_memory
from specrs.engine.loras import LoRAStore
from specrs.engine.parts import EngineParts, Runner
from specrs.engine.runners import make_runner, num_blocks, slot_type
from specrs.engine.warm_up import measure_costs
from specrs.engine.weights import Weights, load_weights
from specrs.errors import UnsupportedConfigError, invalid
from specrs.models.dense_weights import DenseFacts
from specrs.parallel.connection import Kind
from specrs.parallel.start import Meeting, lead
from specrs.parallel.team import Team
from specrs.runner.cpu import CpuRunner
from specrs.runner.lora_rows import LoRARows
from specrs.runner.ranks import LeadingRunner
from specrs.runner.ring import Ring

Lead = Callable[[int, float, str, dict[str, Any]], tuple[Team, Meeting]]
"""`lead`, or what stands in for it where ranks are threads."""


def build_engine(config: EngineConfig, weights: Weights | None = None, lead: Lead = lead) -> Engine:
    """Load the models of `config` (or share `weights`), allocate caches and row state, and measure what launches cost
    where K is to be planned by it.

    With `tensor_parallel_size` of more than 1 the engine has ranks, which `lead` starts. In a process of torchrun that
    is not rank 0 this does not return: it serves rank 0's launches, and ends the process when rank 0 does.

    Raises:
        InvalidConfigError and its subclasses: what is wrong with the configuration or a checkpoint.
        RankLostError: a rank did not start.
    """
    if config.tensor_parallel_size > 1:
        if weights is not None:
            reason = "not implemented for weights that are loaded; allowed: 1"
            raise invalid(UnsupportedConfigError, "tensor_parallel_size", config.tensor_parallel_size, reason)
        from specrs.engine.build_ranks import build_on_ranks  # and torch

        return build_on_ranks(config, lead, _build)
    with current(resolve_device(config.device) if weights is None else weights.device):
        if weights is None:
            check_memory(config)
            weights = load_weights(config)
        return _build(config, weights)


def _build(
    config: EngineConfig, weights: Weights, team: Team | None = None, end: Callable[[], None] | None = None
) -> Engine:
    """Build an engine of loaded `weights`. `team`: the other ranks, which `end` ends."""
    if config.synthetic:
        warnings.warn(
            "rejection_sample_method='synthetic': drafts are accepted at given rates, for timing only; the text is "
            "not the target's",
            stacklevel=2,
        )
    blueprint = Blueprint(config, weights).with_kv_groups()
    with contextlib.ExitStack() as undo:
        engine = _assemble(blueprint, team, end, undo)
        undo.pop_all()
    return engine


def _assemble(
    blueprint: Blueprint, team: Team | None, end: Callable[[], None] | None, undo: contextlib.ExitStack
) -> Engine:
    """Make the parts of an engine and the engine. `undo` ends what has been started."""
    config = blueprint.config
    blocks = num_blocks(blueprint)
    if team is not None:
        blocks = min(blocks, *(ready["num_blocks"] for ready in team.collect(Kind.READY)))
        team.send(Kind.START, json.dumps({"num_blocks": blocks}).encode())
    scheduler = blueprint.scheduler(blocks)
    own = make_runner(blueprint, scheduler, blocks, None if team is None else team.ranks)
    undo.callback(own.close)
    runner: Runner = own
    if team is not None:
        assert end is not None
        runner = LeadingRunner(own, team, scheduler.record_layout(), end)
    planner = None
    if config.plans_speculation and blueprint.num_speculative_tokens:
        costs, catch_up_ms = _measure(blueprint, scheduler, runner, blocks)
        planner = SpeculationPlanner(
            max_num_seqs=config.max_num_seqs,
            num_speculative_tokens=blueprint.num_speculative_tokens,
            costs=costs,
            catch_up_ms=catch_up_ms,
        )
    loras = None
    if config.enable_lora:
        target = blueprint.weights.target
        assert isinstance(target, DenseFacts)
        assert isinstance(own, CpuRunner)
        loras = LoRAStore(target, max_lora_rank=config.max_lora_rank, max_cpu_loras=config.most_cpu_loras)
        own.loras = LoRARows(config.max_num_seqs, loras.get)
    publisher = None
    if config.kv_events_config is not None and config.kv_events_config.publishes:
        publisher = KVEventPublisher(config.kv_events_config)
        undo.callback(publisher.close)
    head = blueprint.weights.head
    engine = Engine(
        replace(
            make_parts(blueprint, scheduler, runner),
            planner=planner,
            team=team,
            loras=loras,
            publish=None if publisher is None else publisher.publish,
            head_check=None if head is None else HeadCheck(str(config.draft), head.aux_layer_ids),
        )
    )
    if publisher is not None:
        weakref.finalize(engine, publisher.close)
    return engine


def _measure(blueprint: Blueprint, scheduler: Scheduler, runner: Runner, blocks: int) -> tuple[CostModel, float]:
    """Measure the cost of steps, and of a position of catch-up, with schedulers that end here.

    Where drafters on the host are among others, `scheduler` learns what each kind of draft costs.
    """

    def measured(drafter: str | None = None) -> tuple[CostModel, float]:
        own = blueprint.scheduler(blocks, measuring=drafter)
        return measure_costs(make_parts(blueprint, own, runner))

    speculative = blueprint.config.speculative_config
    if speculative is None or not speculative.drafts_on_host:
        return measured()
    # Made-up prompts propose nothing, so a scheduler that drafts for them measures what a draft's row costs.
    on_host, _ = measured("host")
    k, base = blueprint.num_speculative_tokens, on_host.ms(1, 0)
    rows = [max(0.0, on_host.ms(1, drafts) / base - 1.0) for drafts in range(1, k + 1)]
    if speculative.on_host:
        scheduler.set_draft_costs(0.0, rows, 0.0)
        return on_host, 0.0
    costs, catch_up_ms = measured("device")
    drafting = (costs.ms(1, k) / costs.ms(1, 0) - 1.0 - rows[-1]) / k
    scheduler.set_draft_costs(max(0.0, drafting), rows, catch_up_ms / base)
    return costs, catch_up_ms


def make_parts(blueprint: Blueprint, scheduler: Scheduler, runner: Runner) -> EngineParts:
    """All that an engine runs on, with a ring of its own."""
    ring = Ring(scheduler, blueprint.num_speculative_tokens, blueprint.depth, slot_type(blueprint))
    return EngineParts(blueprint.config, blueprint.weights, blueprint.limits, scheduler, ring, runner)
