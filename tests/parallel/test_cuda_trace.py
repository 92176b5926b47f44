"""The content of the graph of a rank's iteration, on fake CUDA tensors: which exchanges, in which order, and no
allocation.

The group that replaces NCCL's exchanges nothing. Sums by symmetric memory are a torch op, which does not run.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from backends.test_trace import CUDA, Watch, fake_decoder
from checkpoints import make_checkpoint
from specrs.backends.blueprint import Blueprint
from specrs.backends.cuda import iteration
from specrs.backends.cuda.build import make_buckets, make_context
from specrs.backends.cuda.chunks import prompt_pass
from specrs.backends.cuda.context import Context, sequences_of
from specrs.backends.cuda.graphs import tasks
from specrs.backends.cuda.sampling.sampling_state import SamplingState
from specrs.backends.cuda.shapes import ChunkShape, LogitsMode, Shape
from specrs.backends.weights import Weights
from specrs.config import EngineConfig
from specrs.drafters.draft_model import LoadedDraftModel
from specrs.kernels.linear import DenseWeight
from specrs.parallel.exchanges import Exchanges, GroupExchanges, SymmetricExchanges
from specrs.parallel.ranks import Ranks
from specrs.speculative_config import SpeculativeConfig
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

K, LAYERS, IDS, SIZE = 3, 2, 97, 2
ONE_SHOT, ALL_REDUCE, ALL_GATHER = (
    "symm_mem::one_shot_all_reduce_out",
    "c10d::allreduce_",
    "c10d::_allgather_base_",
)
PARTS = frozenset(
    {
        ONE_SHOT,
        ALL_REDUCE,
        ALL_GATHER,
        "aten::sub.out",
        "aten::ne.Tensor_out",
        "aten::masked_fill_.Scalar",
        "aten::fill_.Scalar",
        "aten::add_.Tensor",
        "aten::maximum.out",
        "aten::minimum.out",
        "aten::mm.dtype_out",
    }
)
"""Allowed ops: exchanges, torch ops around them that write to a given output, and those of passes with many rows."""


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=SIZE)
    library = torch.library.Library("symm_mem", "FRAGMENT")
    torch.library.register_fake(ONE_SHOT, lambda part, op, name, out: out, lib=library)
    made = dist.group.WORLD
    assert made is not None
    yield made
    library._destroy()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trace")
    return make_checkpoint(folder, vocab=IDS, layers=LAYERS, hidden=64, kv_heads=2, head_dim=64)


class Rank:
    """A rank without connections."""

    def __init__(self, rank: int, exchanges: Exchanges) -> None:
        self.rank, self.size, self.exchanges = rank, SIZE, exchanges

    gather = Ranks.gather


class FakeMemory(SymmetricExchanges):
    """Symmetric memory that no other rank reads."""

    def _allocate(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, width, dtype=dtype, device=self._device)


def make(target: Path, rank: int, exchanges: Exchanges, degree: int, max_num_seqs: int = 4) -> tuple[Context, object]:
    """Return the context of a rank, and the keys of everything that it captures, in order."""
    ranks = cast("Ranks", Rank(rank, exchanges))
    config = EngineConfig(
        model=str(target),
        speculative_config=SpeculativeConfig(model=str(target), num_speculative_tokens=K),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=32,
        max_model_len=64,
    )
    model = fake_decoder(target, torch.bfloat16, ranks=ranks)
    draft = fake_decoder(target, torch.bfloat16, ranks=ranks if degree > 1 else None)
    blueprint = Blueprint(config, Weights(model, LoadedDraftModel(draft)))
    sampling = SamplingState(max_num_seqs, IDS, torch.float32, CUDA)
    ctx = make_context(blueprint, blueprint.scheduler(20), sampling, 20)
    sequences = sequences_of(ctx.record.views, "num_decode")
    return ctx, [key for key, _ in tasks(ctx, make_buckets(blueprint), sequences)]


def exchanged(watch: Watch) -> list[str]:
    return [op for op in watch.ops if op in (ONE_SHOT, ALL_REDUCE, ALL_GATHER)]


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric memory", "NCCL"])
@pytest.mark.parametrize("logits_mode", [LogitsMode.GREEDY, LogitsMode.SAMPLED])
@pytest.mark.parametrize("degree", [1, SIZE])
def test_a_pass_has_two_sums_a_layer(
    symmetric: bool, logits_mode: LogitsMode, degree: int, group: dist.ProcessGroup, target: Path
) -> None:
    """Check the exchanges of a pass: two sums per layer, one for the embedding, one gathering for the vocabulary, in
    the same order on both ranks. A draft of degree 1 exchanges nothing."""
    found = []
    for rank in range(SIZE):
        with FakeTensorMode(), torch.inference_mode():
            exchanges = FakeMemory(CUDA, group) if symmetric else GroupExchanges()
            ctx, _ = make(target, rank, exchanges, degree)
            with Watch(PARTS) as watch:
                iteration.run(ctx, Shape(4, K, 4 * (K + 1), logits_mode), sequences_of(ctx.record.views, "num_decode"))
        found.append(exchanged(watch))
    one, other = found
    a_pass = [ONE_SHOT if symmetric else ALL_REDUCE] * (1 + 2 * LAYERS) + [ALL_GATHER]
    assert one == other == a_pass * (1 + K if degree > 1 else 1)


def test_many_rows_go_by_nccl(group: dist.ProcessGroup, target: Path) -> None:
    """Check that sums of up to 64 rows have a fixed order, so that a row does not depend on others, and that longer
    passes use NCCL."""
    with FakeTensorMode(), torch.inference_mode():
        ctx, _ = make(target, 0, FakeMemory(CUDA, group), 1, max_num_seqs=32)
        for batch, expected in ((16, ONE_SHOT), (17, ALL_REDUCE)):
            with Watch(PARTS) as watch:
                iteration.verify_pass(ctx, batch, batch * (K + 1), K + 1, greedy=True)
            assert exchanged(watch) == [expected] * (1 + 2 * LAYERS) + [ALL_GATHER]


def test_chunks_have_two_sums_a_layer(group: dist.ProcessGroup, target: Path) -> None:
    with FakeTensorMode(), torch.inference_mode():
        ctx, _ = make(target, 1, FakeMemory(CUDA, group), 1)
        with Watch(PARTS) as watch:
            prompt_pass(ctx, ChunkShape(16, 2))
    assert exchanged(watch) == [ONE_SHOT] * (1 + 2 * LAYERS)


def test_a_hybrid_has_two_sums_a_layer(group: dist.ProcessGroup, tmp_path: Path) -> None:
    """Check the exchanges of a pass over a delta net and attention, for few rows and for many."""
    path = make_checkpoint(tmp_path, "qwen3_5_text", vocab=IDS, layers=LAYERS, hidden=64, kv_heads=2, head_dim=64)
    with FakeTensorMode(), torch.inference_mode():
        model = fake_decoder(path, torch.bfloat16, ranks=cast("Ranks", Rank(1, FakeMemory(CUDA, group))))
        config = EngineConfig(model=str(path), max_num_seqs=80, max_num_batched_tokens=80, max_model_len=64)
        blueprint = Blueprint(config, Weights(model))
        sampling = SamplingState(80, IDS, torch.float32, CUDA)
        ctx = make_context(blueprint, blueprint.scheduler(80), sampling, 80)
        for batch, expected in ((64, ONE_SHOT), (80, ALL_REDUCE)):
            with Watch(PARTS) as watch:
                iteration.verify_pass(ctx, batch, batch, 1, greedy=True)
            assert exchanged(watch) == [expected] * (1 + 2 * LAYERS) + [ALL_GATHER]


def test_ranks_capture_the_same_graphs_in_one_order(target: Path) -> None:
    with FakeTensorMode(), torch.inference_mode():
        one, other = (make(target, rank, GroupExchanges(), SIZE)[1] for rank in range(SIZE))
    assert one == other


@pytest.mark.parametrize(("dtype", "staged"), [(torch.bfloat16, True), (torch.float32, True), (torch.float16, False)])
def test_what_symmetric_memory_takes(dtype: torch.dtype, staged: bool, group: dist.ProcessGroup) -> None:
    with FakeTensorMode():
        exchanges = FakeMemory(CUDA, group)
        exchanges.reserve(8, 32, dtype)
        out = torch.empty(8, 32, dtype=dtype, device=CUDA)
        assert (exchanges.part(out) is not out) == staged
        held = exchanges.part(out)
        exchanges.reserve(4, 32, dtype)  # of another model's passes: the same memory serves
        if staged:
            assert exchanges.part(out).untyped_storage()._cdata == held.untyped_storage()._cdata
        longer = torch.empty(9, 32, dtype=dtype, device=CUDA)
        assert exchanges.part(longer) is longer


@pytest.mark.usefixtures("group")
def test_a_whole_head_has_the_targets_types(target: Path) -> None:
    """Check that a target in parts gives a whole draft the whole LM head and embedding, in 16 bits and on its GPU."""
    with FakeTensorMode():
        model = fake_decoder(target, torch.bfloat16, ranks=cast("Ranks", Rank(0, GroupExchanges())))
        head, embedding = model.whole_lm_head(), model.whole_embedding()
        assert isinstance(head, DenseWeight)
        assert (head.weight.dtype, head.shape, head.weight.device) == (torch.bfloat16, (IDS, 64), CUDA)
        assert (embedding.dtype, embedding.shape) == (torch.bfloat16, (IDS, 64))
