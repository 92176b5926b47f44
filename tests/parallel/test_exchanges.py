"""Exchanges of a rank's passes: a process group gives what the connections of `Ranks` give."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from specrs.errors import InvalidConfigError
from specrs.parallel.gpus import connect_gpus
from specrs.parallel.ranks import Ranks
from torch.testing._internal.distributed.fake_pg import FakeStore

from parallel.threads import on_ranks

SCRIPT = Path(__file__).parent / "exchange_process.py"


def exchange(folder: Path, device: str) -> list[str]:
    """Return the method of exchange that two processes report."""
    command = [sys.executable, str(SCRIPT)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    started = [
        subprocess.Popen([*command, str(rank), str(folder), device], stdout=subprocess.PIPE, text=True, env=environment)
        for rank in range(2)
    ]
    said = [process.communicate(timeout=300)[0].strip() for process in started]
    assert [process.returncode for process in started] == [0, 0]
    return said


def test_a_process_group_sums_and_gathers(tmp_path: Path) -> None:
    assert exchange(tmp_path, "cpu") == ["GroupExchanges"] * 2


def test_those_of_the_host() -> None:
    """Check exchanges by the host: sums in rank order, in place."""

    def work(ranks: Ranks) -> tuple[list[float], list[list[float]]]:
        out = torch.zeros(3)
        ranks.exchanges.reserve(1, 3, torch.float32)
        ranks.exchanges.part(out).copy_(torch.tensor([1.0, 2.0, 4.0]) * (ranks.rank + 1))
        ranks.exchanges.sum(out)
        found = torch.zeros(3, 1)
        ranks.exchanges.gather(torch.tensor([float(ranks.rank)]), found)
        ranks.close()
        return out.tolist(), found.tolist()

    assert on_ranks(3, work) == [([6.0, 12.0, 24.0], [[0.0], [1.0], [2.0]])] * 3


def test_a_process_with_a_group_of_its_own_is_rejected() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        ranks = Ranks.__new__(Ranks)
        ranks.rank, ranks.size = 0, 2
        with pytest.raises(InvalidConfigError, match=r"^tensor_parallel_size=2: this process has a default process"):
            connect_gpus(ranks, dist.HashStore(), torch.device("cuda", 0), 1.0, 2)
    finally:
        dist.destroy_process_group()
