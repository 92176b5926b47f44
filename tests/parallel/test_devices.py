"""A GPU for each rank, and the KV blocks that fit on all of them. Needs no GPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from backends.cuda_engines import CUDA
from checkpoints import make_checkpoint
from engine.harness import Bank, make_bank
from engine.harness import config as engine_config
from mtp_reference import add_head
from specrs.backends.base import Backend
from specrs.backends.blueprint import Blueprint
from specrs.backends.cpu.backend import CpuBackend
from specrs.backends.cuda import device as devices
from specrs.backends.cuda import kv_memory
from specrs.backends.table import device_of_rank
from specrs.config import EngineConfig
from specrs.drafters.mtp.files import open_mtp
from specrs.drafters.mtp.reader import mtp_shapes
from specrs.engine.build import build_engine
from specrs.engine.plan import plan_engine
from specrs.engine.weights import load_weights
from specrs.errors import InvalidConfigError, SpecrsError, UnsupportedModelError
from specrs.models.loader import load_config, open_checkpoint
from specrs.models.shards import Shard, ShardedTensors
from specrs.models.torch_loader import Loader, load_model
from specrs.parallel.ranks import Ranks
from specrs.parallel.start import own_place
from weight_memory import assert_needed, memory_of

from parallel.harness import engine_on_threads
from parallel.test_engine import degree_of, on_other_rank
from parallel.threads import on_ranks


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch find two GPUs."""
    for name, value in {
        "is_available": True,
        "device_count": 2,
        "current_device": 0,
        "get_device_capability": (9, 0),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(devices, "has_c_compiler", lambda: True)
    monkeypatch.setattr(devices, "has_driver", lambda: True)


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Bank:
    return make_bank(tmp_path_factory.mktemp("devices"), kv_heads=2)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("device", "place", "expected"),
    [
        ("cuda", (0, 2), "cuda:0"),
        ("auto", (1, 2), "cuda:1"),
        ("cuda", (1, 2), "cuda:1"),
        ("cuda", (0, 1), "cuda:0"),  # of several machines
        ("cpu", (3, 4), "cpu"),
    ],
)
def test_each_rank_has_a_device(device: str, place: tuple[int, int], expected: str) -> None:
    assert device_of_rank(device, 4, place) == expected


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("device", "place", "message"),
    [
        ("cuda", (0, 4), "tensor_parallel_size=4: 4 ranks on this machine take a GPU each and there are 2; allowed: 2"),
        ("auto", (3, 4), "tensor_parallel_size=4: 4 ranks on this machine .* there are 2; .*device='cpu'"),
        ("cuda:1", (0, 2), "device='cuda:1': tensor_parallel_size=4 takes a GPU for each rank; allowed: 'cuda'"),
    ],
)
def test_what_no_rank_can_have(device: str, place: tuple[int, int], message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        device_of_rank(device, 4, place)


@pytest.mark.usefixtures("two_gpus")
def test_more_ranks_than_gpus_are_rejected_before_any_is_started(bank: Bank) -> None:
    config = engine_config(bank.target, None, k=0, tensor_parallel_size=4)

    def lead(*_: Any) -> Any:
        raise AssertionError("started")

    with pytest.raises(InvalidConfigError, match="4 ranks on this machine take a GPU each and there are 2"):
        build_engine(replace(config, device="cuda"), lead=lead)


@pytest.mark.usefixtures("two_gpus")
def test_parts_that_no_gpu_computes_are_rejected_before_any_is_started(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path, "olmo2", kv_heads=2)
    config = EngineConfig(model=str(target), tensor_parallel_size=2, device="cuda")
    message = r"^tensor_parallel_size=2: .* all ranks on a GPU; allowed: 1, or device='cpu'$"
    with pytest.raises(UnsupportedModelError, match=message):
        build_engine(config, lead=lambda *_: pytest.fail("started"))


def test_the_place_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_place(4) == (0, 4)
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert own_place(8) == (1, 4)


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"kv_heads": 1, "group": 4},
    "gpt_oss": {"kv_heads": 2, "tie": False},
    "phi3": {"kv_heads": 2, "hidden": 64},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bytes_of_a_part(family: str, tmp_path: Path) -> None:
    """Check the size of a rank's part, computed from the configuration, against what is loaded. 83 ids are odd, and one
    KV head is on both ranks."""
    folder = make_checkpoint(tmp_path, family, vocab=83, **FAMILIES[family])

    def held(ranks: Ranks) -> tuple[int, int]:
        model = load_model(folder, dtype=torch.float64, device=ranks)
        shapes = Shard(ranks.rank, ranks.size).tensor_shapes(load_config(folder))
        w = model.weights
        norms = [w.final_norm] + [norm for layer in w.layers for norm in (layer.input_norm, layer.post_attention_norm)]
        tensors = [w.embedding, *norms]
        linears = [] if w.config.tie_word_embeddings else [w.lm_head]
        for layer in w.layers:
            linears += [layer.qkv, layer.o]
            if layer.sinks is not None:
                tensors.append(layer.sinks)
            if layer.experts is None:
                linears += [layer.gate_up, layer.down]
            else:
                linears += [layer.experts.router, *layer.experts.gate_up, *layer.experts.down]
        # Held for each head, stored once.
        heads = sum(w.config.head_dim * 2 for layer in w.layers if layer.qk_norm is not None)
        numbers = sum(t.numel() for t in tensors) + heads
        for linear in linears:
            numbers += linear.shape[0] * linear.shape[1] + (0 if linear.bias is None else linear.bias.numel())
        return numbers, sum(torch.Size(shape).numel() for shape in shapes.values())

    for numbers, expected in on_ranks(2, held):
        assert numbers == expected


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("degree", [1, 2])
def test_weights_of_a_rank_fit_where_all_do_not(degree: int, bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    config = degree_of(engine_config(bank.target, bank.target, k=3, tensor_parallel_size=2), degree)
    own = Ranks.__new__(Ranks)
    own.rank, own.size = 1, 2
    model, checkpoint = open_checkpoint(bank.target, None, "auto")
    whole, part = (
        memory_of(Loader(model, checkpoint, torch.float32, torch.device("cpu"), shard).load())
        for shard in (None, Shard(1, 2))
    )
    needed = part + (whole if degree == 1 else part)
    assert needed < 2 * whole
    assert_needed(replace(config, device="cuda", dtype="float32"), needed, monkeypatch, ranks=own, match="weights need")


@pytest.mark.parametrize("degree", [1, 2])
def test_memory_counts_a_ranks_part_of_an_mtp_head(
    degree: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the memory that a rank needs for a model with delta nets and its MTP head, all of it or a part."""
    sizes = {"hidden": 32, "kv_heads": 2, "vocab": 96, "tie": False}
    folder = add_head(make_checkpoint(tmp_path, "qwen3_5_text", **sizes))
    speculative = {"method": "mtp", "num_speculative_tokens": 2, "draft_tensor_parallel_size": degree}
    config = EngineConfig.from_kwargs(
        model=str(folder), tensor_parallel_size=2, speculative_config=speculative, device="cuda", dtype="float32"
    )

    def held(ranks: Ranks) -> int:
        config, tensors = open_checkpoint(folder, None, "auto")
        shard = Shard(ranks.rank, 2)
        own = memory_of(Loader(config, tensors, torch.float32, torch.device("cpu"), shard).load())
        target = load_model(folder, dtype=torch.float32, device=ranks)
        files = open_mtp(str(folder), target, revision=None, size=None, counts=None)
        head = ShardedTensors(files.tensors, files.config, shard) if degree == 2 else files.tensors
        return own + 4 * sum(head.mapped(name).size for name in mtp_shapes(files.config))

    needed = on_ranks(2, held)[1]
    own = Ranks.__new__(Ranks)
    own.rank, own.size = 1, 2
    assert_needed(config, needed, monkeypatch, ranks=own, match="weights need")


@pytest.mark.parametrize(("degree", "draft_heads"), [(1, 2), (2, 1)])
def test_blocks_by_both_degrees(degree: int, draft_heads: int, bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the number of blocks that fit after weights, buffers and graphs: a part of the target's heads, and all or a
    part of the draft's."""
    config = degree_of(engine_config(bank.target, bank.drafts["close"], k=3, tensor_parallel_size=2), degree)
    config = replace(config, num_gpu_blocks_override=None, gpu_memory_utilization=0.75, max_num_seqs=64)
    total, used, graphs = 32 * 2**20, 5 * 2**20, 3 * 2**20
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (total - used, total))
    monkeypatch.setattr(kv_memory, "_measure", lambda _blueprint: (used, graphs))
    found = on_ranks(2, lambda ranks: CUDA.num_blocks(Blueprint(config, load_weights(config, ranks))))
    of_a_head = 2 * config.block_size * 48 * 2 * 8  # layers, positions, numbers, K and V, bytes
    assert found == [(24 * 2**20 - used - graphs) // (of_a_head * (1 + draft_heads))] * 2


def test_the_least_of_all_ranks_decides(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    class Smaller(CpuBackend):
        def num_blocks(self, blueprint: Blueprint) -> int:
            return 33

    def plan(*given: Any) -> tuple[Backend, Blueprint]:
        return Smaller(), plan_engine(*given)[1]

    monkeypatch.setattr("specrs.engine.follow.plan_engine", plan)
    assert not on_other_rank()
    config = engine_config(bank.target, bank.drafts["close"], k=3, tensor_parallel_size=2)
    with engine_on_threads(replace(config, num_gpu_blocks_override=40)) as engine:
        assert engine.scheduler.num_blocks == 33
        assert engine.runner.kv_cache.layers[0].shape[0] >= 33


@pytest.mark.usefixtures("two_gpus")
def test_a_draft_of_another_vocabulary_in_parts_is_rejected_on_gpus() -> None:
    speculative = {"use_heterogeneous_vocab": True, "draft_tensor_parallel_size": 2, "num_speculative_tokens": 3}
    settings: dict[str, Any] = {"speculative_config": speculative, "tensor_parallel_size": 2}
    EngineConfig.from_kwargs(device="cpu", **settings)
    with pytest.raises(SpecrsError, match=r"^tensor_parallel_size=2: .*use_heterogeneous_vocab=True.*parallel_size=1$"):
        EngineConfig.from_kwargs(device="cuda", **settings)
