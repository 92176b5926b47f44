"""Builds an engine on several tensor parallel ranks: starts the other ranks, and builds rank 0's part. Serves
nothing."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from specrs.backends.cpu.threads import threads_of_rank
from specrs.backends.table import backend_of, resolve_device
from specrs.config import EngineConfig
from specrs.engine.engine import Engine
from specrs.engine.follow import connect, serve_under_torchrun
from specrs.engine.states import resolve_states
from specrs.engine.weights import check_ranks, load_weights
from specrs.parallel.connection import ExchangeError, Kind
from specrs.parallel.start import ranks_here, torchrun_rank

if TYPE_CHECKING:
    from specrs.backends.weights import Weights
    from specrs.parallel.start import Meeting
    from specrs.parallel.team import Team

RANK_MODULE = "specrs.engine.rank_process"
Lead: TypeAlias = "Callable[[int, float, str, dict[str, Any]], tuple[Team, Meeting]]"
Build: TypeAlias = "Callable[[EngineConfig, Weights, Team, Callable[[], None]], Engine]"


def build_on_ranks(config: EngineConfig, lead: Lead, build: Build) -> Engine:
    """Build the engine of `config` on the ranks that `lead` starts; see `build_engine`.

    `build(config, weights, team, end)` makes rank 0's engine; `end` ends the other ranks.
    """
    if torchrun_rank() not in (None, 0):
        sys.exit(serve_under_torchrun(config))
    part, size = check_ranks(config), config.tensor_parallel_size
    free = backend_of(config.device).free_memory
    # Steps have room for as many requests and snapshots on every rank.
    config = resolve_states(config, part.state_bytes, lambda: free(resolve_device(config.device), ranks_here(size)))
    config = replace(config, threads=threads_of_rank(config))
    setup, timeout = {"config": dataclasses.asdict(config)}, config.distributed_timeout
    team, meeting = lead(size, timeout, RANK_MODULE, setup)
    torch_threads = torch.get_num_threads()

    def end() -> None:
        team.close()
        if team.ranks is not None:
            team.ranks.close()
        torch.set_num_threads(torch_threads)

    try:
        assert config.threads is not None
        torch.set_num_threads(config.threads)
        team.collect(Kind.HERE)
        team.ranks = connect(meeting, config)
        device = str(team.ranks.device)
        with backend_of(device).current(device):
            return build(config, load_weights(config, team.ranks), team, end)
    except ExchangeError as fault:
        error = team.failed(fault)
        end()
        raise error from fault
    except BaseException:
        end()
        raise
