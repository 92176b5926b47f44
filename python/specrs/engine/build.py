"""From an EngineConfig to an engine: weights, a scheduler, a runner, and what launches cost. Serves nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from specrs.config import EngineConfig, resolve_num_blocks
from specrs.core import CostModel, CpuPool, InvalidBufferError, Scheduler, SpeculationPlanner
from specrs.engine.blueprint import Blueprint
from specrs.engine.engine import Engine, EngineParts, Runner
from specrs.engine.head_check import HeadCheck
from specrs.engine.threads import choose_threads
from specrs.engine.warm_up import measure_costs
from specrs.engine.weights import Weights, load_weights
from specrs.errors import UnsupportedConfigError, invalid
from specrs.models.dense_native import TORCH_TOKENS, NativeDense
from specrs.models.eagle3_native import NativeEagle3Head
from specrs.runner.eager import EagerRunner
from specrs.runner.native import NativeRunner
from specrs.runner.ring import Ring
from specrs.runner.row_state import RowState
from specrs.runner.sampling_state import SamplingState


def build_engine(config: EngineConfig, weights: Weights | None = None) -> Engine:
    """Load the models of `config` (or share `weights`), allocate caches and row state, and measure what launches cost
    where K is to be planned by it.

    Raises:
        InvalidConfigError and its subclasses: what is wrong with the configuration or a checkpoint.
    """
    if config.synthetic:
        warnings.warn(
            "rejection_sample_method='synthetic': drafts are accepted at given rates, for timing only; the text is "
            "not the target's",
            stacklevel=2,
        )
    blueprint = Blueprint(config, load_weights(config) if weights is None else weights).with_kv_groups()
    blocks = num_blocks(blueprint)
    scheduler = blueprint.scheduler(blocks)
    engine = Engine(make_parts(blueprint, scheduler, make_runner(blueprint, scheduler, blocks)))
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
    head = blueprint.weights.head
    if head is not None:
        engine.head_check = HeadCheck(str(config.draft), head.aux_layer_ids)
    return engine


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


def make_runner(blueprint: Blueprint, scheduler: Scheduler, blocks: int) -> Runner:
    """The runner over `blocks` blocks, with row state and caches of its own."""
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
        SamplingState(config.max_num_seqs, model.vocab_size, blueprint.logits_dtype, blueprint.device),
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
