"""LoRA adapters on a GPU: the texts of the CPU's engine, base rows with the bits of an engine without slots."""

from pathlib import Path

import pytest
import torch
from lora.adapters import Spec, write_adapter
from specrs import LoRARequest
from specrs.backends.cuda.runner import CudaRunner
from specrs.engine.engine import Engine
from specrs.models.lora import LoRAAdapter

from .conftest import MakeEngine
from .test_runners import refuse_synchronisation
from .texts import GREEDY, K, exhaust, generate, share_of_equal, submit

LEAVES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def requests(make_engine: MakeEngine, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    folder, target = tmp_path_factory.mktemp("adapters"), Path(str(make_engine().config.target))
    return [
        LoRARequest(str(i), i, str(write_adapter(folder / str(i), target, Spec(LEAVES, rank=4 * i), seed=i)))
        for i in (1, 2, 3)
    ]


def adapted(make_engine: MakeEngine, device: str = "cuda") -> Engine:
    return make_engine(device, enable_lora=True, max_loras=2)


def read(engine: Engine, requests: list[LoRARequest]) -> list[LoRAAdapter | None]:
    """Load the adapters of `requests`. Return an adapter for each of six texts: those of all requests, and None for
    texts of the base model."""
    assert engine.loras is not None
    first, second, third = (engine.loras.load(request) for request in requests)
    return [first, None, second, third, None, first]


@pytest.mark.parametrize("k", [0, K])
def test_the_cpu_loop_writes_the_same(make_engine: MakeEngine, requests: list[LoRARequest], k: int) -> None:
    """Check that a GPU and the CPU write nearly the same texts, with three adapters for two slots."""
    batch = [GREEDY.replace(num_speculative_tokens=k)] * 6
    texts = []
    for device in ("cuda", "cpu"):
        engine = adapted(make_engine, device)
        texts.append(generate(engine, batch, loras=read(engine, requests)))
    assert share_of_equal(*texts) > 0.97
    plain = generate(make_engine(), batch)
    assert share_of_equal([texts[0][i] for i in (0, 2, 3)], [plain[i] for i in (0, 2, 3)]) < 0.5


def test_base_rows_have_the_bits_of_an_engine_without_slots(make_engine: MakeEngine) -> None:
    assert generate(adapted(make_engine), [GREEDY] * 6) == generate(make_engine(), [GREEDY] * 6)


def test_a_steady_step_neither_waits_nor_allocates(make_engine: MakeEngine, requests: list[LoRARequest]) -> None:
    engine = adapted(make_engine)
    first, second, *_ = read(engine, requests)
    submit(engine, [GREEDY] * 4, 350, loras=[first, second, first, None])
    for _ in range(20):
        engine.step()
    assert isinstance(engine.runner, CudaRunner)
    assert engine.runner.graphs is engine.runner.adapted.graphs
    refuse_synchronisation()
    try:
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        for _ in range(50):
            engine.step()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    finally:
        torch.cuda.set_sync_debug_mode("default")
    exhaust(engine)
