"""One of two processes that exchange numbers as ranks: `exchange_process.py RANK FOLDER DEVICE`, with DEVICE cpu or
cuda. Prints the method of exchange. Holds no tests.

On a CPU the default group is gloo's. On GPUs it is NCCL's, or symmetric memory, and a graph holds the exchanges.
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from specrs.parallel.exchanges import Exchanges, GroupExchanges
from specrs.parallel.gpus import connect_gpus
from specrs.parallel.ranks import Ranks

SIZE, WIDTH, TIMEOUT = 2, 256, 60.0
MANY = 65


def numbers(rank: int, rows: int, turn: int) -> torch.Tensor:
    """Return the numbers of a rank. Their sums need rounding."""
    made = torch.Generator().manual_seed(1000 * turn + 10 * rank + rows)
    return torch.randn((rows, WIDTH), generator=made)


def main() -> None:
    rank, folder, kind = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    store = dist.FileStore(f"{folder}/store", SIZE)
    device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", rank)
    ranks = Ranks(store, rank, SIZE, address="127.0.0.1", timeout=TIMEOUT)
    ranks.device = device
    if kind == "cpu":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=SIZE,
            timeout=timedelta(seconds=TIMEOUT),
        )
        exchanges: Exchanges = GroupExchanges()
    else:
        torch.cuda.set_device(device)
        exchanges = connect_gpus(ranks, store, device, TIMEOUT, SIZE)
    ranks.exchanges = exchanges
    for dtype in (torch.float32, torch.bfloat16):
        exchanges.reserve(MANY - 1, WIDTH, dtype)
        for rows in (1, 6, MANY - 1, MANY):
            check(ranks, rows, dtype)
    gathered = ranks.gather(torch.full((3,), rank, device=device))
    assert gathered.tolist() == [[0] * 3, [1] * 3]
    print(type(exchanges).__name__, flush=True)
    ranks.close()


def check(ranks: Ranks, rows: int, dtype: torch.dtype) -> None:
    """Check a sum and a gathering; on GPUs also replayed with other numbers."""
    exchanges, device = ranks.exchanges, ranks.device
    given, out = (torch.zeros((rows, WIDTH), dtype=dtype, device=device) for _ in range(2))
    found = torch.zeros((SIZE, rows, WIDTH), dtype=dtype, device=device)

    def run() -> None:
        exchanges.part(out).copy_(given)
        exchanges.sum(out)
        exchanges.gather(given, found)

    replay = run
    if device.type == "cuda":
        run()
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run()
        replay = graph.replay
    for turn in range(3):
        given.copy_(numbers(ranks.rank, rows, turn).to(dtype))
        replay()
        parts = [numbers(rank, rows, turn).to(dtype) for rank in range(SIZE)]
        assert torch.equal(found.cpu(), torch.stack(parts))
        assert torch.equal(out.cpu(), parts[0] + parts[1]), "two numbers have one sum, in any order"


if __name__ == "__main__":
    main()
