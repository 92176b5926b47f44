"""Backend of CPUs: native passes in the Rust core, and torch for models that native passes do not support. Imports
torch only for those."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

from specrs.backends.blueprint import Blueprint, MergedPrefill
from specrs.backends.cpu.assistant import load_assistant
from specrs.backends.cpu.eagle3 import load_head
from specrs.backends.cpu.kv_memory import longest_request, resolve_num_blocks
from specrs.backends.cpu.loader import load
from specrs.backends.cpu.lora_rows import LoRARows
from specrs.backends.cpu.mtp import load_mtp
from specrs.backends.cpu.row_state import RowState
from specrs.backends.cpu.runner import CpuRunner
from specrs.backends.cpu.threads import choose_threads
from specrs.backends.kv_memory import host_memory
from specrs.backends.model_source import ModelSource
from specrs.backends.ring import RingSlot
from specrs.backends.weights import Weights
from specrs.config import EngineConfig
from specrs.core import CpuPool, InvalidBufferError, Scheduler
from specrs.drafters.assistant.reader import AssistantFiles
from specrs.drafters.cpu import CpuDrafter
from specrs.drafters.eagle3.reader import HeadFiles
from specrs.drafters.hidden_state import HeadFacts
from specrs.drafters.host import OnHost
from specrs.drafters.mtp.reader import MtpFiles
from specrs.engine_options import BATCHED_TOKENS
from specrs.errors import InvalidConfigError, UnsupportedConfigError, invalid
from specrs.instruction_sets import start_pool
from specrs.models.base import Model
from specrs.models.config import ModelConfig
from specrs.models.decoder_weights import DecoderFacts
from specrs.models.loader import CPU_DTYPES
from specrs.models.native_decoder import NativeDecoder
from specrs.speculative_config import DEFAULT_MAX_SPECULATIVE_TOKENS

if TYPE_CHECKING:
    from specrs.backends.base import FindAdapter, SlotType
    from specrs.parallel.ranks import Ranks  # and torch
    from specrs.parallel.start import Meeting


class CpuBackend:
    """A machine's CPU, which all its ranks share. `Backend` documents the members."""

    name = CPU_DTYPES.kind
    dtypes = CPU_DTYPES
    max_steps_in_flight = 1
    max_speculative_tokens = DEFAULT_MAX_SPECULATIVE_TOKENS
    gpus_per_rank = 0
    drafts_text = True
    adapts_experts = True

    def is_available(self) -> bool:
        return True

    def resolve_device(self, device: str) -> str:
        return self.name

    def device_of_rank(self, device: str, size: int, place: tuple[int, int]) -> str:
        return self.name

    def current(self, device: str) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def free_memory(self, device: str, ranks: int = 1) -> int:
        return host_memory() // ranks

    def check_config(self, config: EngineConfig, device: str, ranks: Ranks | None) -> None:
        pass  # loading a model rejects what cannot be computed

    def check_rank_parts(self, model: ModelConfig, field: str, size: int) -> None:
        pass  # CPUs compute the parts of every model

    def load_model(self, source: ModelSource, device: str, ranks: Ranks | None) -> Model:
        return load(source, ranks)

    def load_head(
        self, files: HeadFiles | MtpFiles | AssistantFiles, target: DecoderFacts, ranks: Ranks | None
    ) -> HeadFacts:
        if isinstance(files, AssistantFiles):
            return load_assistant(files, target)
        if isinstance(files, MtpFiles):
            return load_mtp(files, target, target.cache_dtype, ranks)
        return load_head(files, target, target.cache_dtype, ranks)

    def batched_tokens(self, device: str) -> int:
        return BATCHED_TOKENS

    def merged_prefill(self, blueprint: Blueprint) -> MergedPrefill:
        """Return no room: a CPU computes prompt chunks at the same cost in any pass."""
        return MergedPrefill()

    def longest_request(self, blueprint: Blueprint) -> int:
        return longest_request(
            blueprint.config,
            blueprint.bytes_per_block,
            blueprint.max_model_len,
            blueprint.scheduler(1).least_blocks,
            blueprint.state_bytes,
        )

    def num_blocks(self, blueprint: Blueprint) -> int:
        return resolve_num_blocks(
            blueprint.config,
            blueprint.bytes_per_block,
            blueprint.max_model_len,
            blueprint.least_blocks,
            1 + len(blueprint.window_groups),
            blueprint.state_bytes,
        )

    def slot_type(self, device: str) -> SlotType:
        return RingSlot

    def make_runner(
        self,
        blueprint: Blueprint,
        scheduler: Scheduler,
        num_blocks: int,
        ranks: Ranks | None = None,
        find_adapter: FindAdapter | None = None,
    ) -> CpuRunner:
        config, weights = blueprint.config, blueprint.weights
        every = weights.models
        models = [model for model in every if isinstance(model, NativeDecoder)]
        by_torch = [model.decoder is None for model in every]
        if (config.rounds_to_bf16 and any(by_torch)) or (config.rounds_to_integers and by_torch[0]):
            reason = "not implemented for a model that torch computes; allowed: 'auto' or 'fp32'"
            raise invalid(UnsupportedConfigError, "cpu_activations", config.cpu_activations, reason)
        pool = None
        if any(model.decoder is not None for model in every):
            pool, weights = _on_own_pool(weights, models, config)
            blueprint = replace(blueprint, weights=weights)
        speculative = config.speculative_config
        return CpuRunner(
            scheduler,
            weights.target,
            weights.target.allocate_cache(num_blocks, config.block_size),
            _make_drafter(blueprint, num_blocks),
            RowState.allocate(
                config.most_seqs,
                blueprint.max_model_len,
                config.block_size,
                1 + len(blueprint.window_groups),
                blueprint.hidden_row_size,
            ),
            pool=pool,
            rule=config.rule,
            rates=None if speculative is None else speculative.synthetic_acceptance_rates,
            logprobs_mode=config.logprobs_mode,
            ranks=ranks,
            loras=None if find_adapter is None else LoRARows(config.most_seqs, find_adapter),
        )

    def connect_ranks(self, ranks: Ranks, device: str, meeting: Meeting, config: EngineConfig) -> None:
        speculative = config.speculative_config
        if speculative is not None and not speculative.on_host:
            ranks.connect_drafting()


def _on_own_pool(weights: Weights, models: Sequence[NativeDecoder], config: EngineConfig) -> tuple[CpuPool, Weights]:
    """Start an engine's threads, and return them with its models set to run on them with the settings of `config`.

    `models` are the native ones among target and draft. Engines may share weights, but not threads and scratch memory.
    Raises UnsupportedConfigError for settings that the machine or the weights do not allow.
    """
    try:
        pool = start_pool(choose_threads(config, models))
        return pool, _on_pool(weights, pool, config)
    except InvalidBufferError as fault:
        # Everything else was checked when the weights were loaded.
        reason = f"not implemented for these weights: {fault}; allowed: 'auto' or 'fp32'"
        raise invalid(UnsupportedConfigError, "cpu_activations", config.cpu_activations, reason) from fault


def _on_pool(weights: Weights, pool: CpuPool, config: EngineConfig) -> Weights:
    target, drafter = weights.target, weights.drafter
    activations, tiles = config.cpu_activations, config.cpu_prefill == "amx"
    try:
        target = target.on_pool(pool, activations=activations, prompt_tiles=tiles)
        if drafter is not None:
            drafter = drafter.with_model(drafter.model.on_pool(pool, activations=activations, prompt_tiles=tiles))
    except InvalidConfigError as fault:
        reason = "not implemented on this machine, which has no AMX tiles of bf16 numbers; allowed: 'exact'"
        raise invalid(UnsupportedConfigError, "cpu_prefill", config.cpu_prefill, reason) from fault
    return Weights(target, drafter)


def _make_drafter(blueprint: Blueprint, num_blocks: int) -> CpuDrafter | OnHost | None:
    """Return the drafter over `num_blocks` blocks; None if the engine does not speculate."""
    speculative, drafter = blueprint.config.speculative_config, blueprint.drafter
    if speculative is not None and speculative.on_host:
        return OnHost()
    return None if drafter is None else drafter.on_cpu(blueprint.draft_limits, num_blocks)
