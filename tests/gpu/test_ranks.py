"""Two ranks on two GPUs: exchanges in graphs, texts, memory, a killed rank. Skipped on one GPU."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, perturb_checkpoint
from mtp_reference import add_head
from parallel.test_exchanges import exchange
from specrs.backends.cuda.runner import CudaRunner
from specrs.backends.ranks import LeadingRunner
from specrs.config import EngineConfig
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.errors import RankLostError
from specrs.sampling import SamplingParams
from specrs.speculative_config import SpeculativeConfig

from .texts import GREEDY, VOCAB, K, exhaust, generate, share_of_equal, submit

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two ranks take two GPUs, and there are fewer")
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, top_k=50)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("ranks")
    shape: dict[str, Any] = {"layers": 3, "hidden": 256, "intermediate": 512, "kv_heads": 2, "group": 4, "head_dim": 64}
    target = make_checkpoint(folder / "target", seed=1, vocab=VOCAB, initializer_range=0.08, **shape)
    return target, perturb_checkpoint(target, folder / "draft", noise=0.15, seed=2)


def make(folders: tuple[Path, Path], size: int, degree: int = 1, **fields: Any) -> Engine:
    target, draft = map(str, folders)
    speculative = SpeculativeConfig(model=draft, num_speculative_tokens=K, draft_tensor_parallel_size=degree)
    defaults: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 128}
    return build_engine(
        EngineConfig(
            model=target,
            device="cuda",
            dtype="float32",
            tensor_parallel_size=size,
            speculative_config=speculative,
            distributed_timeout=20.0,
            **(defaults | {"num_gpu_blocks_override": 300} | fields),
        )
    )


def test_exchanges_in_graphs(tmp_path: Path) -> None:
    """Check exchanges in graphs: two ranks choose the same class of exchanges."""
    one, other = exchange(tmp_path, "cuda")
    assert one == other
    assert one in ("SymmetricExchanges", "GroupExchanges")


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_texts_are_those_of_one_gpu(folders: tuple[Path, Path], params: SamplingParams, degree: int) -> None:
    batch = [params, params.replace(num_speculative_tokens=2), GREEDY, params, params.replace(num_speculative_tokens=0)]
    expected = generate(make(folders, 1), batch)
    engine = make(folders, 2, degree)
    try:
        runner = engine.runner
        assert isinstance(runner, LeadingRunner)
        assert isinstance(runner.runner, CudaRunner)
        assert runner.runner.graphs
        made = generate(engine, batch)
        assert generate(engine, batch) == made, "the same steps give the same bits"
    finally:
        engine.close()
    # Sums have other orders: texts part at near-ties only.
    assert share_of_equal(made, expected) > 0.95


def test_eager_steps_write_the_same(folders: tuple[Path, Path]) -> None:
    texts = []
    for eager in (False, True):
        engine = make(folders, 2, 2, enforce_eager=eager)
        texts.append(generate(engine, [GREEDY] * 4))
        engine.close()
    assert share_of_equal(*texts) > 0.95


@pytest.mark.parametrize("degree", [1, 2])
def test_a_hybrid_with_its_head(degree: int, tmp_path: Path) -> None:
    """Check texts of a model with delta nets and its MTP head, with misses and then with hits of snapshots."""
    net = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 128}
    net |= {"linear_value_head_dim": 128}
    sizes: dict[str, Any] = {"layers": 2, "hidden": 256, "intermediate": 512, "kv_heads": 2, "head_dim": 64}
    target = add_head(make_checkpoint(tmp_path, "qwen3_5_text", seed=1, vocab=VOCAB, **sizes, **net))
    made = []
    for size in (1, 2):
        own = SpeculativeConfig(method="mtp", num_speculative_tokens=K, draft_tensor_parallel_size=min(degree, size))
        config = EngineConfig(
            model=str(target),
            device="cuda",
            dtype="float32",
            tensor_parallel_size=size,
            speculative_config=own,
            distributed_timeout=20.0,
            max_model_len=512,
            max_num_seqs=8,
            num_gpu_blocks_override=300,
        )
        engine = build_engine(config)
        made += [generate(engine, [GREEDY] * 5) for _ in range(2)]
        stats = engine.stats().state_cache
        assert stats is not None
        assert stats.hits > 0
        engine.close()
    # Sums have other orders: texts part at near-ties only.
    assert all(share_of_equal(texts, made[0]) > 0.95 for texts in made)


def test_memory_is_sized_by_the_least_of_both(folders: tuple[Path, Path]) -> None:
    held = torch.empty(2 * 2**30, dtype=torch.uint8, device="cuda:1")
    sizes = []
    for fields in ({}, {"gpu_memory_utilization": 0.05}):
        engine = make(folders, 2, num_gpu_blocks_override=None, max_num_seqs=64, **fields)
        sizes.append(engine.scheduler.num_blocks)
        engine.close()
    del held
    assert 0 < sizes[1] <= sizes[0]


def test_a_killed_rank_ends_the_engine(folders: tuple[Path, Path]) -> None:
    engine = make(folders, 2)
    assert engine.team is not None
    (member,) = engine.team._members.values()
    assert member.process is not None
    submit(engine, [GREEDY] * 4, 300)
    for _ in range(10):
        engine.step()
    os.kill(member.process.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RankLostError, match="rank 1 of 2 was killed by SIGKILL"):
        exhaust(engine)
    assert time.monotonic() - began < 10.0
    engine.close()
