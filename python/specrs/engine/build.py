"""From an EngineConfig to an engine: weights, a scheduler, a runner, and what launches cost. Serves nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import sys
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from specrs.config import EngineConfig, resolve_num_blocks
from specrs.core import CostModel, CpuPool, InvalidBufferError, Scheduler, SpeculationPlanner
from specrs.engine.blueprint import Blueprint
from specrs.engine.engine import Engine, EngineParts, Runner
from specrs.engine.head_check import HeadCheck
from specrs.engine.kv_events import KVEventPublisher
from specrs.engine.threads import VARIABLE, choose_threads, physical_cores
from specrs.engine.warm_up import measure_costs
from specrs.engine.weights import Weights, check_ranks, load_weights
from specrs.errors import SpecrsError, UnsupportedConfigError, invalid
from specrs.models.dense_native import TORCH_TOKENS, NativeDense
from specrs.models.eagle3_native import NativeEagle3Head
from specrs.parallel.connection import Beat, Connection, DisconnectedError, Kind
from specrs.parallel.ranks import ExchangeError, Ranks
from specrs.parallel.start import Meeting, lead, torchrun_rank
from specrs.parallel.team import BEGUN, Team
from specrs.runner.eager import EagerRunner
from specrs.runner.native import NativeRunner
from specrs.runner.ranks import LeadingRunner
from specrs.runner.ring import Ring, RingSlot
from specrs.runner.row_state import RowState
from specrs.runner.sampling_state import SamplingState

logger = logging.getLogger("specrs")
Lead = Callable[[int, float, str, dict[str, Any]], tuple[Team, Meeting]]
"""`lead`, or what stands in for it where ranks are threads."""
RANK_MODULE = "specrs.engine.rank_process"


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
        return _build_on_ranks(config, lead)
    return _build(config, load_weights(config) if weights is None else weights, None)


def _build(config: EngineConfig, weights: Weights, team: Team | None) -> Engine:
    if config.synthetic:
        warnings.warn(
            "rejection_sample_method='synthetic': drafts are accepted at given rates, for timing only; the text is "
            "not the target's",
            stacklevel=2,
        )
    blueprint = Blueprint(config, weights).with_kv_groups()
    blocks = num_blocks(blueprint)
    if team is not None:
        blocks = min(blocks, *(ready["num_blocks"] for ready in team.collect(Kind.READY)))
        team.send(Kind.START, json.dumps({"num_blocks": blocks}).encode())
    scheduler = blueprint.scheduler(blocks)
    runner = make_runner(blueprint, scheduler, blocks, None if team is None else team.ranks)
    if team is not None:
        assert isinstance(runner, EagerRunner)
        runner = LeadingRunner(runner, team, scheduler.record_layout())
        weakref.finalize(runner, team.close)
    engine = Engine(make_parts(blueprint, scheduler, runner))
    engine.team = team
    if config.plans_speculation and blueprint.num_speculative_tokens:
        costs, catch_up_ms = _measure(blueprint, engine, blocks)
        # What it measured with is forgotten: its prompts are in the prefix cache, its tokens in the books.
        scheduler.reset_prefix_cache()
        engine.reset_stats()
        engine.planner = SpeculationPlanner(
            max_num_seqs=config.max_num_seqs,
            num_speculative_tokens=blueprint.num_speculative_tokens,
            costs=costs,
            catch_up_ms=catch_up_ms,
        )
    if config.kv_events_config is not None and config.kv_events_config.publishes:
        publisher = KVEventPublisher(config.kv_events_config)
        weakref.finalize(engine, publisher.close)
        engine.publish = publisher.publish
    head = blueprint.weights.head
    if head is not None:
        engine.head_check = HeadCheck(str(config.draft), head.aux_layer_ids)
    return engine


def _build_on_ranks(config: EngineConfig, lead: Lead) -> Engine:
    if torchrun_rank() not in (None, 0):
        sys.exit(serve_under_torchrun(config))
    check_ranks(config)
    config = replace(config, threads=_threads_of_rank(config))
    setup = {"config": dataclasses.asdict(config)}
    timeout = config.distributed_timeout
    team, meeting = lead(config.tensor_parallel_size, timeout, RANK_MODULE, setup)
    try:
        assert config.threads is not None
        torch.set_num_threads(config.threads)
        team.collect(Kind.HERE)
        team.ranks = _connect(meeting, timeout)
        return _build(config, load_weights(config, team.ranks), team)
    except ExchangeError as fault:
        raise team.failed(fault) from fault
    finally:
        if sys.exception() is not None:
            team.close()


def serve_under_torchrun(config: EngineConfig) -> int:
    """On a rank other than 0: serve rank 0's launches; the exit code."""
    from specrs.parallel.start import follow_under_torchrun

    connection, meeting = follow_under_torchrun(config.tensor_parallel_size, config.distributed_timeout)
    return serve_rank(connection, lambda setup: meeting, lost=lambda: os._exit(1))


def serve_rank(connection: Connection, meet: Callable[[dict[str, Any]], Meeting], *, lost: Callable[[], None]) -> int:
    """Serve the launches that rank 0 tells of, until it ends; the exit code, 1 unless it has said so.

    `meet`: where the ranks meet, from what rank 0 says first. `lost` is called in another thread when rank 0 is gone.
    """
    rank = "a rank"
    try:
        message = connection.receive_news()
        setup = message.json()
        rank = f"rank {setup['rank']} of {setup['size']}"
        _follow(connection, meet(setup), EngineConfig(**setup["config"]), lost)
        return 0
    except DisconnectedError as fault:
        logger.error("%s ends, because rank 0 is gone: %s", rank, fault)
    except ExchangeError as fault:
        _tell(connection, Kind.LOST, str(fault))
    except BaseException as fault:
        _tell(connection, Kind.FAILED, repr(fault))
        if not isinstance(fault, SpecrsError):
            logger.exception("%s failed", rank)
    finally:
        connection.close()
    return 1


def _tell(connection: Connection, kind: Kind, what: str) -> None:
    with contextlib.suppress(DisconnectedError):
        connection.send(kind, what.encode())


def _follow(connection: Connection, meeting: Meeting, config: EngineConfig, lost: Callable[[], None]) -> None:
    """A rank other than 0, from its setup to the end of the engine."""
    assert config.threads is not None
    torch.set_num_threads(config.threads)
    connection.send_json(Kind.HERE, {})
    begun: list[Ranks] = []
    with contextlib.closing(Beat(connection, lambda: BEGUN.pack(begun[0].num_begun if begun else 0), lost)):
        ranks = _connect(meeting, config.distributed_timeout)
        begun.append(ranks)
        blueprint = Blueprint(config, load_weights(config, ranks)).with_kv_groups()
        connection.send_json(Kind.READY, {"num_blocks": num_blocks(blueprint)})
        started = connection.receive_news()
        if started.kind == Kind.END:
            return
        blocks = started.json()["num_blocks"]
        scheduler = blueprint.scheduler(blocks)  # plans nothing here, and knows the layout of records
        runner = make_runner(blueprint, scheduler, blocks, ranks)
        slot = RingSlot(scheduler, blueprint.num_speculative_tokens, pinned=False)
        slot.draft_faults_end = True
        with contextlib.closing(runner):
            while (message := connection.receive_news()).kind == Kind.LAUNCH:
                record = np.frombuffer(message.body, dtype=np.int64)
                slot.record[: len(record)] = record
                runner.launch(slot, slot.header())


def _connect(meeting: Meeting, timeout: float) -> Ranks:
    return Ranks(
        meeting.store, meeting.rank, meeting.size, address=meeting.address, timeout=meeting.exchange_timeout(timeout)
    )


def _threads_of_rank(config: EngineConfig) -> int:
    """Of torch's passes and of the native ones: as many as are asked for, else its share of the cores."""
    for given in (config.threads, os.environ.get(VARIABLE), os.environ.get("OMP_NUM_THREADS")):
        if isinstance(given, int) or (given is not None and given.strip().isdecimal()):
            return max(1, int(given))
    here = os.environ.get("LOCAL_WORLD_SIZE") if torchrun_rank() is not None else None
    return max(1, physical_cores() // (config.tensor_parallel_size if here is None else int(here)))


def _measure(blueprint: Blueprint, engine: Engine, blocks: int) -> tuple[CostModel, float]:
    """What launches cost, and a position of catch-up: those with a draft model's passes where there is one."""
    speculative = blueprint.config.speculative_config
    if speculative is None or not speculative.drafts_on_host:
        return measure_costs(engine)

    def measured(drafter: str) -> tuple[CostModel, float]:
        # Made-up prompts propose nothing, so another scheduler drafts for them; what is left of them, it keeps.
        scheduler = blueprint.scheduler(blocks, measuring=drafter)
        return measure_costs(Engine(make_parts(blueprint, scheduler, engine.runner)))

    on_host, _ = measured("host")
    k, base = blueprint.num_speculative_tokens, on_host.ms(1, 0)
    rows = [max(0.0, on_host.ms(1, drafts) / base - 1.0) for drafts in range(1, k + 1)]
    if speculative.on_host:
        engine.scheduler.set_draft_costs(0.0, rows, 0.0)
        return on_host, 0.0
    costs, catch_up_ms = measured("device")
    drafting = (costs.ms(1, k) / costs.ms(1, 0) - 1.0 - rows[-1]) / k
    engine.scheduler.set_draft_costs(max(0.0, drafting), rows, catch_up_ms / base)
    return costs, catch_up_ms


def num_blocks(blueprint: Blueprint) -> int:
    """Size of the block pool, which serves both models' caches."""
    if blueprint.on_gpu:
        from specrs.engine.build_cuda import measure_num_blocks

        return measure_num_blocks(blueprint)
    return resolve_num_blocks(
        blueprint.config,
        blueprint.bytes_per_block,
        blueprint.max_model_len,
        blueprint.least_blocks,
        1 + len(blueprint.window_groups),
    )


def make_parts(blueprint: Blueprint, scheduler: Scheduler, runner: Runner) -> EngineParts:
    """All that an engine runs on, with a ring of its own."""
    ring = Ring(scheduler, blueprint.num_speculative_tokens, blueprint.depth, pinned=blueprint.device.type == "cuda")
    return EngineParts(blueprint.config, blueprint.weights, blueprint.limits, scheduler, ring, runner)


def make_runner(blueprint: Blueprint, scheduler: Scheduler, blocks: int, ranks: Ranks | None = None) -> Runner:
    """The runner over `blocks` blocks, with row state and caches of its own; of several `ranks`, this one's."""
    if blueprint.on_gpu:
        from specrs.engine.build_cuda import make_cuda_runner

        return make_cuda_runner(blueprint, scheduler, blocks)
    config = blueprint.config
    make: Callable[..., EagerRunner] = EagerRunner
    models = [model for model in blueprint.models if isinstance(model, NativeDense)]
    native = len(models) == len(blueprint.models)
    if config.cpu_bf16_rows and not native:
        reason = "not implemented for a model that is served op by op; allowed: False"
        raise invalid(UnsupportedConfigError, "cpu_bf16_rows", True, reason)
    if models and not config.enforce_eager:
        # the weights are shared, threads and work space are this engine's own
        pool = CpuPool(choose_threads(config, models))
        blueprint = replace(blueprint, weights=_on_pool(blueprint.weights, pool, config))
        if native:
            make = partial(NativeRunner, scheduler, pool)
    model, speculative = blueprint.weights.target, config.speculative_config
    sampling = SamplingState(config.max_num_seqs, model.vocab_size, blueprint.logits_dtype, blueprint.device)
    sampling.ranks = ranks
    return make(
        model,
        model.allocate_cache(blocks, config.block_size),
        blueprint.drafter(blocks),
        RowState.allocate(
            config.max_num_seqs,
            blueprint.max_model_len,
            config.block_size,
            blueprint.device,
            1 + len(blueprint.window_groups),
        ),
        sampling,
        block_size=config.block_size,
        rule=config.rule,
        rates=None if speculative is None else speculative.synthetic_acceptance_rates,
        logprobs_mode=config.logprobs_mode,
    )


def _on_pool(weights: Weights, pool: CpuPool, config: EngineConfig) -> Weights:
    """The models on the threads of `pool`, with passes as `config` wants them."""
    target, draft, head = weights.target, weights.draft, weights.head
    torch_rows, bf16_rows = TORCH_TOKENS if config.cpu_prefill == "torch" else None, config.cpu_bf16_rows
    try:
        if isinstance(target, NativeDense):
            target = target.on_pool(pool, torch_rows=torch_rows, bf16_rows=bf16_rows)
        if isinstance(draft, NativeDense):
            draft = draft.on_pool(pool, bf16_rows=bf16_rows)
        if isinstance(head, NativeEagle3Head):
            head = head.on_pool(pool, bf16_rows=bf16_rows)
    except InvalidBufferError as fault:
        # All else was checked when the weights were loaded.
        reason = f"not implemented for these weights: {fault}; allowed: False"
        raise invalid(UnsupportedConfigError, "cpu_bf16_rows", bf16_rows, reason) from fault
    return replace(weights, target=target, draft=draft, head=head)
