"""Options of an engine whose target has layers with states: what they exclude, and how many requests fit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from specrs.backends.weights import Weights
from specrs.config import EngineConfig
from specrs.errors import InvalidConfigError, UnsupportedConfigError, invalid

logger = logging.getLogger("specrs")
_SHARE = 4
"""Without a number of requests from the user, states get this fraction (1 / 4) of the memory."""
_REASON = "not implemented for a model whose layers have states, such as this one"


def resolve_states(config: EngineConfig, weights: Weights, free_memory: Callable[[], int]) -> EngineConfig:
    """Return `config` with `enable_prefix_caching` on or off. For a model with states it is off, and the default of
    `max_num_seqs` is lowered to the number of requests whose states fit.

    Raises UnsupportedConfigError for options that such a model excludes, and InvalidConfigError if the states of
    `max_num_seqs` requests do not fit in the memory that `free_memory` returns.
    """
    row, draft = weights.target.state_bytes
    if row == 0:
        return config if config.enable_prefix_caching is not None else replace(config, enable_prefix_caching=True)
    if config.enable_prefix_caching:
        raise invalid(UnsupportedConfigError, "enable_prefix_caching", True, f"{_REASON}; leave it out")
    for field, value, allowed in (
        ("enable_lora", config.enable_lora, False),
        ("kv_events_config.enable_kv_cache_events", config.enable_kv_cache_events, False),
        ("kv_cache_path", config.kv_cache_path, None),
    ):
        if value != allowed:
            raise invalid(UnsupportedConfigError, field, value, f"{_REASON}; allowed: {allowed}")
    speculative = config.speculative_config
    drafts = 0 if speculative is None else speculative.most_speculative_tokens
    needed, memory = row + drafts * draft, free_memory()
    most, given = memory // needed, config.max_num_seqs
    fit = most // _SHARE
    if given == EngineConfig.max_num_seqs and given > fit > 0:
        logger.info("max_num_seqs is lowered from %d to %d: a request has %d bytes of states", given, fit, needed)
        given = fit
    if given > most:
        reason = f"each request has {needed} bytes of states, and there are {memory} of memory"
        raise invalid(InvalidConfigError, "max_num_seqs", given, f"{reason}; allowed: at most {most}")
    return replace(config, enable_prefix_caching=False, max_num_seqs=given)
