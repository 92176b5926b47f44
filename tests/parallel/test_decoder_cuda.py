"""The CUDA pass divided among ranks, with interpreted kernels: the whole model's logits and argmaxes, the same bits on
all."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from kernels.cuda.tolerance import assert_near
from models.cuda_models import LENGTH, as_on_a_gpu
from models.harness import Feeder
from quantized_files import awq, fp8_block
from specrs.backends.cuda.decoder import CudaDecoder
from specrs.backends.cuda.loader import QuantizedLoader
from specrs.backends.cuda.products import stored
from specrs.errors import UnsupportedModelError
from specrs.kernels.quantized_weight import QuantizedWeight
from specrs.models.loader import open_checkpoint
from specrs.models.quantization.base import QuantizedTensors
from specrs.models.shards import Shard
from specrs.models.torch_decoder import TorchDecoder
from specrs.models.torch_loader import load_model
from specrs.parallel.ranks import Ranks
from torch import Tensor

from parallel.threads import on_ranks, one_kernel_at_a_time  # noqa: F401 (a fixture)

SHAPE: dict[str, Any] = {"hidden": 40, "intermediate": 48, "vocab": 83, "kv_heads": 2, "group": 2, "head_dim": 16}
"""Sizes of a small model. Its 83 ids are divisible by neither two nor three ranks."""
VARIANTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "untied, with biases": ("llama", 65, {"attention_bias": True, "mlp_bias": True, "tie": False}),
    "one KV head, norms after blocks": ("gemma3_text", 5, {"sliding_window": 7, "kv_heads": 1, "group": 4}),
    "experts, a layer without": ("qwen3_moe", 5, {"mlp_only_layers": [0], "moe_intermediate_size": 24}),
    "a shared expert without a gate": ("llama4_text", 11, {}),
}
"""Family, prompt length and fields of each variant. Only prompts of more than 64 rows use the library's products."""


pytestmark = pytest.mark.usefixtures("one_kernel_at_a_time")


def on_device(model: TorchDecoder) -> CudaDecoder:
    return CudaDecoder.allocate(as_on_a_gpu(model), max_rows=LENGTH, max_seqs=5, ranks=model.ranks)


def feed(model: Any, length: int) -> Tensor:
    """Feed a prompt, then a verification of two requests with one masked row."""
    feeder = Feeder(model, num_requests=2, block_size=16, max_len=80)
    ids = [11 * p % 83 for p in range(length + 3)]
    prompt = feeder.feed_chunks(ids[:length], [length])
    rows = feeder.feed({0: [(ids[p], p) for p in range(length, length + 3)], 1: [(5, 0), (82, 1), (0, -1)]})
    return torch.cat((prompt, rows[:5]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_whole_model(variant: str, tmp_path: Path) -> None:
    family, length, fields = VARIANTS[variant]
    folder = make_checkpoint(tmp_path, family, seed=5, **(SHAPE | fields))
    decoder = load_model(folder, dtype=torch.float32)
    one, other = on_ranks(
        2, lambda ranks: feed(on_device(load_model(folder, dtype=torch.float32, device=ranks)), length)
    )
    assert_near(one, feed(load_model(folder, dtype=torch.float64), length), feed(decoder, length), ulps=16)
    assert torch.equal(one, other)


@pytest.mark.parametrize("rows", [3, 70])
def test_argmaxes_are_those_of_the_gathered_logits(rows: int, tmp_path: Path) -> None:
    """Check that argmaxes are those of the gathered logits: the lowest id of equal ones on any rank; NaN if any rank's
    logit is NaN."""
    folder = make_checkpoint(tmp_path, "llama", seed=5, tie=False, **(SHAPE | {"kv_heads": 3, "hidden": 48}))

    def work(ranks: Ranks) -> list[Tensor]:
        model = on_device(load_model(folder, dtype=torch.float32, device=ranks))
        weight = stored(model.weights.lm_head)
        weight.copy_(-weight.abs())
        # On each rank, and whole numbers: their products add up to the same in any order, so these logits are equal.
        weight[3] = weight[7] = (ranks.gather(weight[3])[0] * 1000).round()
        shared = torch.randn((rows, 48), generator=torch.Generator().manual_seed(2))
        shared[0] = 1  # all logits are less than those of what is after the last id
        shared[1] = ranks.gather(weight[3])[0] * 9
        shared[2, 4] = torch.nan
        ids, top, logits = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows), torch.zeros(rows, 83)
        found = []
        for num_ids in (None, 50):
            model.compute_argmax(shared, ids, top, num_ids, logits)
            made = model.compute_logits(shared)[:, :num_ids]
            best = made.max(dim=1).values
            torch.testing.assert_close(top, best, rtol=1e-5, atol=1e-6, equal_nan=True)
            finite = best.isfinite()
            assert torch.equal(ids[finite], (made == best[:, None]).int().argmax(dim=1)[finite])
            assert best.isnan().tolist() == [row == 2 for row in range(rows)]
            assert (best[0] < 0) & (ids[1] == 3)
            assert torch.equal(logits.nan_to_num(), model.compute_logits(shared).nan_to_num())
            found += [ids.clone(), top.clone()]
        return found

    first, *others = on_ranks(3, work)
    for other in others:
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, other, strict=True))


def test_two_sums_a_layer(tmp_path: Path) -> None:
    """Check the exchanges: two sums per layer, one for the embedding, one gathering of logits."""
    folder = make_checkpoint(tmp_path, "qwen3", seed=5, layers=3, **SHAPE)

    def work(ranks: Ranks) -> int:
        feeder, begun = Feeder(on_device(load_model(folder, dtype=torch.float32, device=ranks))), ranks.num_begun
        feeder.feed({0: [(1, 0), (2, 1)]})
        return ranks.num_begun - begun

    assert on_ranks(2, work) == [8, 8]


def test_a_norm_over_all_heads_is_rejected(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "olmo2", seed=5, **SHAPE)

    def refused(ranks: Ranks) -> str:
        with pytest.raises(UnsupportedModelError) as caught:
            on_device(load_model(folder, dtype=torch.float32, device=ranks))
        return str(caught.value)

    assert all("norms over the query and key heads of all ranks" in message for message in on_ranks(2, refused))


QUANTIZED: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "fp8": (fp8_block, {"block": (32, 32)}, {"layers": 2}),  # the first has one that is not quantized
    "int4, one KV head": (awq, {}, {"kv_heads": 1, "group": 4}),
    "int4, groups that are not cut": (awq, {"group": 64}, {"intermediate": 192}),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_weights_stay_quantized(name: str, tmp_path: Path) -> None:
    """Check that each rank keeps its part of quantized weights quantized. What cannot be cut between groups is
    dequantized."""
    quantize, fields, sizes = QUANTIZED[name]
    shape = {"hidden": 64, "intermediate": 128, "kv_heads": 2, "group": 2, "head_dim": 32, "layers": 1} | sizes
    make_checkpoint(tmp_path / "source", "qwen2", tie=False, vocab=83, dtype=torch.bfloat16, **shape)
    quantize(tmp_path / "source", tmp_path / "codes", **fields)
    config, checkpoint = open_checkpoint(tmp_path / "codes", None, "auto")
    assert isinstance(checkpoint, QuantizedTensors)

    def work(ranks: Ranks) -> tuple[Tensor, list[bool]]:
        shard = Shard(ranks.rank, ranks.size)
        weights = QuantizedLoader(config, checkpoint, torch.float32, torch.device("cpu"), shard).load()
        last = weights.layers[-1]
        quantized = [isinstance(w, QuantizedWeight) for w in (last.qkv, last.o, last.gate_up, last.down)]
        made = CudaDecoder.allocate(weights, max_rows=LENGTH, max_seqs=5, ranks=ranks)
        assert sum(map(math.prod, shard.tensor_shapes(config).values())) < config.num_parameters
        return feed(made, 5), quantized

    (one, quantized), (other, _) = on_ranks(2, work)
    assert quantized == [True, True, True, "not cut" not in name]
    folder = tmp_path / "codes.numbers"
    assert_near(one, feed(load_model(folder, dtype=torch.float64), 5), feed(load_model(folder), 5), ulps=16)
    assert torch.equal(one, other)
