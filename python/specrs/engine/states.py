"""Options of an engine whose target has layers with states: what they exclude, and how many requests and snapshots
fit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from specrs.config import EngineConfig
from specrs.errors import InvalidConfigError, invalid

logger = logging.getLogger("specrs")
_SHARE = 4
"""Fraction 1 / 4 of the memory, which states get if the user does not set `max_num_seqs`."""
_SNAPSHOTS_PER_REQUEST = 4
"""Default number of snapshots for each request that may run."""
_SNAPSHOT_PERCENT = 15
"""Maximum percentage of the memory that snapshots take by default."""


def resolve_states(config: EngineConfig, state_bytes: tuple[int, int], free_memory: Callable[[], int]) -> EngineConfig:
    """Return `config` with `enable_prefix_caching` on or off, and a number in `max_num_seqs`.

    For a model with states, the default of `max_num_seqs` is lowered to the number of requests whose states fit, and
    `state_cache_memory_bytes` becomes the bytes of the snapshots; None without prefix caching. `state_bytes` are those
    of the target, or of a rank's part of it: see `Model.state_bytes`.

    Raises InvalidConfigError for options of snapshots that the model excludes, and if states and snapshots do not fit
    in the memory that `free_memory` returns.
    """
    row, draft = state_bytes
    given = config.state_cache_memory_bytes
    if row == 0:
        if given is not None:
            reason = "no layer of this model has a state; leave it out"
            raise invalid(InvalidConfigError, "state_cache_memory_bytes", given, reason)
        caching = config.enable_prefix_caching is not False
        return replace(config, enable_prefix_caching=caching, max_num_seqs=config.most_seqs)
    if given is not None and config.enable_prefix_caching is False:
        reason = "snapshots serve prefix hits; leave it out, or set enable_prefix_caching=True"
        raise invalid(InvalidConfigError, "state_cache_memory_bytes", given, reason)
    if given is not None and given < row:
        reason = f"a snapshot has {row} bytes; allowed: at least {row}, or enable_prefix_caching=False"
        raise invalid(InvalidConfigError, "state_cache_memory_bytes", given, reason)
    requests, snapshots = fit_states(config, row, draft, free_memory())
    if config.enable_prefix_caching is False:
        return replace(config, max_num_seqs=requests)
    return replace(
        config,
        enable_prefix_caching=snapshots > 0,
        max_num_seqs=requests,
        state_cache_memory_bytes=snapshots * row or None,
    )


def fit_states(config: EngineConfig, row: int, draft: int, memory: int) -> tuple[int, int]:
    """Return the number of requests and of snapshots whose states fit in `memory` bytes.

    `row` and `draft` are the bytes of a request's states, and of each of its drafts. Raises InvalidConfigError if what
    the user asked for does not fit.
    """
    speculative = config.speculative_config
    drafts = 0 if speculative is None else speculative.most_speculative_tokens
    needed = row + drafts * draft
    requests = _num_requests(config, needed, memory - (config.state_cache_memory_bytes or 0))
    if config.enable_prefix_caching is False:
        return requests, 0
    return requests, _num_snapshots(config, row, memory, memory - requests * needed, requests)


def _num_requests(config: EngineConfig, needed: int, memory: int) -> int:
    """Return the number of requests, each with `needed` bytes of states. If the user has set `max_num_seqs`, this is
    the number. Raises InvalidConfigError if the states of so many requests exceed `memory`, the bytes that are left
    after the snapshots."""
    most, requests = memory // needed, config.most_seqs
    fit = most // _SHARE
    if config.max_num_seqs is None and requests > fit > 0:
        logger.info("max_num_seqs is lowered from %d to %d: a request has %d bytes of states", requests, fit, needed)
        return fit
    if requests > most:
        reason = f"each request has {needed} bytes of states, and there are {max(0, memory)} of memory"
        if config.state_cache_memory_bytes is not None:
            reason += f" next to state_cache_memory_bytes={config.state_cache_memory_bytes}"
        raise invalid(InvalidConfigError, "max_num_seqs", requests, f"{reason}; allowed: at most {max(0, most)}")
    return requests


def _num_snapshots(config: EngineConfig, row: int, memory: int, left: int, requests: int) -> int:
    """Return the number of snapshots of `row` bytes each.

    By default they take at most half of the `left` bytes, so that KV gets the rest, and a share of `memory`. The number
    is 0 if not even one fits, and the configuration does not ask for prefix caching. Raises `InvalidConfigError` if it
    does ask.
    """
    if config.state_cache_memory_bytes is not None:
        return config.state_cache_memory_bytes // row
    fit = min(left // 2, memory * _SNAPSHOT_PERCENT // 100) // row
    if fit > 0:
        return min(fit, _SNAPSHOTS_PER_REQUEST * requests)
    reason = f"a snapshot of {row} bytes does not fit next to the states of {requests} requests"
    if config.enable_prefix_caching:
        raise invalid(InvalidConfigError, "enable_prefix_caching", True, f"{reason}; lower max_num_seqs={requests}")
    logger.warning("prefix caching is off: %s", reason)
    return 0
