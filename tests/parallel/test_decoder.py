"""Logits of a model divided among ranks: those of the whole model, and the same bits on every rank."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, make_checkpoint
from models.harness import Feeder
from specrs.errors import UnsupportedConfigError
from specrs.models.base import Model
from specrs.models.torch_loader import load_model
from specrs.parallel.ranks import Ranks
from torch import Tensor

from parallel.threads import norms_in_float64, on_ranks  # noqa: F401 (a fixture)

SHAPE: dict[str, Any] = {"hidden": 48, "intermediate": 48, "kv_heads": 2, "head_dim": 12, "group": 3}
"""Sizes of a small model. Its 211 ids are divisible by neither two nor three ranks."""
WITH_BIASES = {"attention_bias": True, "mlp_bias": True, "tie": False}
VARIANTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    **{family: (family, 2, {}) for family in FAMILIES},
    "untied, with biases": ("llama", 2, WITH_BIASES),
    "KV heads on two ranks each": ("qwen2", 4, {"group": 4}),
    "KV heads on two ranks each, one norm": ("olmo2", 4, {"group": 4}),
    "three ranks, one KV head": ("qwen3", 3, {"kv_heads": 1}),
    "experts on four ranks": ("mixtral", 4, {"group": 2}),
}


def feed(model: Model) -> Tensor:
    """Feed a prompt in two chunks, then three of its rows again as a verification."""
    ids = [random.Random(i).randrange(211) for i in range(40)]
    feeder = Feeder(model)
    logits = feeder.feed_chunks(ids, [23, 17])
    return torch.cat((logits, feeder.feed({0: [(ids[p], p) for p in (37, 38, 39)]})))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.usefixtures("norms_in_float64")
def test_logits_are_those_of_the_whole_model(variant: str, tmp_path: Path) -> None:
    """Check that logits are those of the whole model up to the order of sums in float64: 2e-14 was measured."""
    family, size, fields = VARIANTS[variant]
    if family == "qwen3_moe":
        fields = {"moe_intermediate_size": 40, **fields}
    folder = make_checkpoint(tmp_path, family, seed=5, **(SHAPE | fields))
    whole = feed(load_model(folder, dtype="float64"))
    first, *others = on_ranks(size, lambda ranks: feed(load_model(folder, dtype="float64", device=ranks)))
    # Norms of one process have their eps in fp32, the norm over the heads of all ranks in float64: 4e-11 of a logit.
    atol = 2e-10 if family in ("olmo2", "olmo3") else 1e-12
    torch.testing.assert_close(first, whole, rtol=0, atol=atol)
    assert all(torch.equal(first, other) for other in others)


def test_a_rank_holds_its_part(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3", layers=3, **(SHAPE | {"kv_heads": 4}))

    def sizes(ranks: Ranks | str) -> tuple[int, ...]:
        model = load_model(folder, device=ranks)
        w = model.weights
        layer = w.layers[0]
        matrices = [m.shape[0] * m.shape[1] for m in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        return (*matrices, w.embedding.numel(), w.lm_head.shape[0], model.bytes_per_block(16))

    whole = sizes("cpu")
    rows = 106  # of 211
    expected = (*(size // 2 for size in whole[:4]), rows * 48, rows, whole[-1] // 2)
    assert on_ranks(2, sizes) == [expected, expected]


@pytest.mark.parametrize(
    ("fields", "size", "field"),
    [
        ({"group": 1, "kv_heads": 4}, 3, "num_attention_heads=4"),
        ({"intermediate": 50}, 4, "intermediate_size=50"),
        ({"kv_heads": 3, "group": 2}, 2, "num_key_value_heads=3"),
    ],
)
def test_sizes_that_do_not_divide_are_rejected(fields: dict[str, Any], size: int, field: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", **(SHAPE | {"kv_heads": 4, "group": 1} | fields))

    def refused(ranks: Ranks) -> str:
        with pytest.raises(UnsupportedConfigError) as caught:
            load_model(folder, device=ranks)
        return str(caught.value)

    assert all(field in message and f"tensor_parallel_size={size}" in message for message in on_ranks(size, refused))
