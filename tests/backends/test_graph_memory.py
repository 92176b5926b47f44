"""The memory that graphs will take, by which the KV pool is sized, on a driver that is simulated."""

from collections.abc import Callable, Hashable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from checkpoints import make_checkpoint
from kernel_launches import Recorder, fake_context
from module_files import load_file
from specrs.backends.cuda import graphs
from specrs.backends.cuda.context import Context, StepSequences, sequences_of
from specrs.backends.cuda.graphs import kind, measure_bytes, tasks
from specrs.backends.cuda.shapes import MERGED_CHUNKS, Buckets, LogitsMode, Shape, batch_buckets

ROOT = Path(__file__).parents[2]
NODE, CHUNK, SHARED = 10_000, 2 * 2**20, 32 * 2**20


class Driver:
    """Driver whose graphs take `NODE` bytes a kernel, from chunks of `CHUNK` bytes. The first graph of a kind also
    takes `SHARED` bytes."""

    def __init__(self, spare: int) -> None:
        """`spare`: bytes of the current chunk that are not used yet."""
        self.wanted, self.kinds = CHUNK - spare, set[Hashable]()
        self.running = 0

    def launch(self, kernels: int) -> None:
        self.running = kernels

    def capture(self, key: tuple[Hashable, int], function: Callable[[], None]) -> None:
        function()
        self.wanted += self.running * NODE + SHARED * (kind(key[0]) not in self.kinds)
        self.kinds.add(kind(key[0]))

    def replay(self, _: object) -> None: ...

    def mem_get_info(self, _: object) -> tuple[int, int]:
        return 100 * 2**30 - -(-self.wanted // CHUNK) * CHUNK, 100 * 2**30


@pytest.mark.parametrize("spare", range(0, CHUNK, 250_000))
def test_small_graphs_are_not_free(spare: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that graphs that are smaller than what the driver allocates at a time are counted, wherever the first of
    them begins, and that what they share is not."""
    driver = Driver(spare)
    numbers: dict[Hashable, int] = {Shape(8, 0, 8, LogitsMode.SAMPLED): 600}
    numbers |= {("draft", batch, 1, LogitsMode.GREEDY): 150 for batch in range(100)}
    work = [(key, lambda n=n: driver.launch(n)) for key, n in numbers.items()]  # type: ignore[misc]
    monkeypatch.setattr(graphs, "tasks", lambda *_: work)
    monkeypatch.setattr(graphs, "Graphs", lambda _: driver)
    monkeypatch.setattr(torch.cuda, "mem_get_info", driver.mem_get_info)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    ctx = cast("Context", None)
    found = measure_bytes(ctx, cast("Buckets", None), cast("StepSequences", None), torch.device("cuda"))
    assert found == pytest.approx(NODE * sum(numbers.values()), abs=101 * CHUNK / 3)
    assert found > 0.5 * NODE * sum(numbers.values())


def test_the_first_graph_of_a_kind_has_the_most_kernels(tmp_path: Path) -> None:
    """Check that the KV pool leaves room for every graph: none has more kernels than the one that is measured for it,
    except for two of an argmax over more rows, which do not grow with layers."""
    target = make_checkpoint(tmp_path, "qwen3", layers=3, hidden=64, kv_heads=2, head_dim=64, vocab=97)
    buckets = Buckets(batch_buckets(40, (1, 32, 40)), 2, max_chunk_rows=256, max_chunks=40, merges=MERGED_CHUNKS)
    first: dict[Any, int] = {}
    with fake_context(target, target, 2, max_num_seqs=40, max_model_len=256) as ctx:
        for key, run in tasks(ctx, buckets, sequences_of(ctx.record.views, "num_decode")):
            with Recorder() as recorder:
                run()
            count = len(recorder.kernels)
            assert count <= first.setdefault(kind(key), count) + 2, key
    assert len(first) > 8


def test_the_table_of_graphs_says_what_a_kernel_takes() -> None:
    script: ModuleType = load_file("count_kernels", ROOT / "scripts/count_kernels.py")
    text = script.graphs_table({"5": script.GraphTotals(491, 245_000, 260_000)})
    assert text.splitlines()[-1] == "| 5 | 491 | 245,000 | 2.5 GB | 2.6 GB |"
