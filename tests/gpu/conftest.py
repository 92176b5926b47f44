"""A pair that a GPU runs in milliseconds, and engines over it. Needs CUDA: `make gpu-test`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, perturb_checkpoint
from specrs.config import EngineConfig
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.engine.weights import load_weights
from specrs.speculative_config import SpeculativeConfig

from .texts import VOCAB, K

MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="session", autouse=True)
def device() -> torch.device:
    assert torch.cuda.is_available(), "these tests need a CUDA device; `make test` leaves them out"
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="session")
def make_engine(tmp_path_factory: pytest.TempPathFactory) -> MakeEngine:
    """`make_engine(device="cuda", k=4, rule="rejection", **fields)`; weights are loaded once for each device."""
    folder = tmp_path_factory.mktemp("pair")
    shape: dict[str, Any] = {"layers": 3, "hidden": 256, "intermediate": 512, "kv_heads": 2, "group": 4, "head_dim": 64}
    target = make_checkpoint(folder / "target", seed=1, vocab=VOCAB, initializer_range=0.08, **shape)
    draft = perturb_checkpoint(target, folder / "draft", noise=0.15, seed=2)
    weights: dict[str, Any] = {}

    def make(device: str = "cuda", *, k: int = K, rule: str = "rejection", **fields: Any) -> Engine:
        speculative = SpeculativeConfig(model=str(draft), num_speculative_tokens=k, rejection_sample_method=rule)
        defaults: dict[str, Any] = {
            "max_model_len": 512,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 128,
            "num_gpu_blocks_override": 300,
            "dtype": "float32",
        }
        config = EngineConfig(model=str(target), device=device, speculative_config=speculative, **(defaults | fields))
        if device not in weights:
            weights[device] = load_weights(config)
        return build_engine(config, weights[device])

    return make
