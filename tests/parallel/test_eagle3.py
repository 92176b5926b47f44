"""An EAGLE-3 head of a target that is divided among ranks: whole on each of them, or divided too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, make_eagle3
from specrs.backends.cpu.eagle3 import load_eagle3
from specrs.models.inputs import PassInputs
from specrs.models.torch_loader import load_model
from specrs.parallel.ranks import Ranks
from torch import Tensor

from parallel.threads import norms_in_float64, on_ranks  # noqa: F401 (a fixture)

HEADS: dict[str, dict[str, Any]] = {
    "ids of its own": {"vocab": 61, "intermediate": 72},
    "the target's embedding and LM head": {"layer_ids": [1, 3], "fc_norm": True},
    "all its own": {"vocab": 60, "own_embedding": True, "layout": "speculators", "layer": "qwen3"},
    "another width": {"vocab": 60, "hidden": 32, "norm_output": True},
}


@torch.inference_mode()
def states(target: Path, head: Path, ranks: Ranks | None, own: Ranks | None) -> Tensor:
    """Return logits of a pass, and of a second pass after it."""
    model = load_model(target, dtype="float64", device=ranks or "cpu")
    made = load_eagle3(head, model, ranks=own)
    cache = made.allocate_cache(2, 16)
    entries = torch.randn(
        (9, len(made.aux_layer_ids), 48), dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    place = torch.arange(9)
    inputs = PassInputs(place * 23, place, place, torch.tensor([0, 9]), torch.tensor([[0]]), 9, 16)
    recurrent, final = made.forward(inputs, made.fuse(entries), cache)
    _, after = made.forward(inputs, recurrent, cache)
    return torch.cat((made.compute_logits(final), made.compute_logits(after)))


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.usefixtures("norms_in_float64")
def test_logits_are_those_of_the_whole_head(kind: str, in_parts: bool, tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", layers=5, hidden=48, intermediate=48, kv_heads=2, head_dim=12)
    head = make_eagle3(tmp_path / "head", target, **HEADS[kind])
    whole = states(target, head, None, None)
    first, second = on_ranks(2, lambda ranks: states(target, head, ranks, ranks if in_parts else None))
    torch.testing.assert_close(first, whole, rtol=0, atol=1e-12 if in_parts else 0)
    assert torch.equal(first, second)
