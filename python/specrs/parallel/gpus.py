"""Sets up the exchanges of GPUs: NCCL's, and symmetric memory if all ranks can use it. Performs none."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from specrs.errors import InvalidConfigError, invalid
from specrs.parallel.exchanges import GroupExchanges, SymmetricExchanges
from specrs.parallel.ranks import Ranks

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger("specrs")


def connect_gpus(ranks: Ranks, store: Store, device: torch.device, timeout: float, num_local: int) -> GroupExchanges:
    """Return the exchanges among GPUs. `device` is this rank's GPU. Waits for the other ranks, which call it at the
    same time.

    NCCL does the exchanges, except that sums of few rows use symmetric memory if all ranks can. `num_local`: number of
    ranks on this machine.

    Raises:
        InvalidConfigError: this process already has a default process group.
        RuntimeError: NCCL could not connect.
    """
    if dist.is_initialized():
        reason = "this process has a default process group of torch.distributed; allowed: 1, or a process without"
        raise invalid(InvalidConfigError, "tensor_parallel_size", ranks.size, reason)
    dist.init_process_group(
        "nccl",
        store=dist.PrefixStore("nccl", store),  # type: ignore[attr-defined]
        rank=ranks.rank,
        world_size=ranks.size,
        timeout=timedelta(seconds=timeout),
        device_id=device,
    )
    group = dist.group.WORLD
    assert group is not None
    if not _all(ranks, num_local == ranks.size and _reads_peers(device, num_local)):
        return GroupExchanges()
    symmetric = SymmetricExchanges(device, group)
    try:
        symmetric.reserve(1, 64, torch.float32)
        serves = True
    except RuntimeError as fault:
        logger.info("rank %d has no symmetric memory, sums go by NCCL: %s", ranks.rank, fault)
        serves = False
    return symmetric if _all(ranks, serves) else GroupExchanges()


def _reads_peers(device: torch.device, num_local: int) -> bool:
    others = [index for index in range(num_local) if index != device.index]
    return all(torch.cuda.can_device_access_peer(device, other) for other in others)


def _all(ranks: Ranks, holds: bool) -> bool:
    """Return True if `holds` is True on every rank."""
    return bool(ranks.gather(torch.tensor([holds])).all())
