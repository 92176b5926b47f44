"""Chooses the backend of an engine or of one of its ranks, and the sizes that the engine is built from."""

from __future__ import annotations

import logging
from dataclasses import replace

from specrs.backends.base import Backend
from specrs.backends.blueprint import Blueprint
from specrs.backends.table import backend_of
from specrs.backends.weights import Weights
from specrs.config import EngineConfig

logger = logging.getLogger("specrs")


def plan_engine(config: EngineConfig, weights: Weights) -> tuple[Backend, Blueprint]:
    """Return the backend of the device that holds `weights`, and the blueprint of an engine over them.

    The blueprint's configuration has the device's `max_num_batched_tokens`, and its maximum number of drafts, if none
    were given. Without `max_model_len`, requests are at most as long as the default KV cache is, which is logged.

    Raises `UnsupportedConfigError` if the options exclude the KV groups of the target.
    """
    backend = backend_of(weights.device)
    if config.max_num_batched_tokens is None:
        config = replace(config, max_num_batched_tokens=backend.batched_tokens(weights.device))
    if config.speculative_config is not None:
        config = replace(config, speculative_config=config.speculative_config.on_device(backend.max_speculative_tokens))
    blueprint = Blueprint(config, weights, backend.max_steps_in_flight).with_kv_groups()
    if config.max_model_len is None and (fit := backend.longest_request(blueprint)) < blueprint.max_model_len:
        most = blueprint.max_model_len
        logger.info(
            "max_model_len is lowered from %d to %d: more does not fit in the default KV cache; set max_model_len, and "
            "kv_cache_memory_bytes for longer requests",
            most,
            fit,
        )
        config = replace(config, max_model_len=fit)
        blueprint = Blueprint(config, weights, backend.max_steps_in_flight).with_kv_groups()
    return backend, replace(blueprint, merged=backend.merged_prefill(blueprint))
