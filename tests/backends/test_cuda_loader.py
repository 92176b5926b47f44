"""The CUDA backend loads checkpoints, with the CPU's memory in place of a GPU's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from quantized_files import fp8_block, gptq
from specrs.backends.model_source import ModelSource
from specrs.backends.table import BACKENDS
from specrs.config import EngineConfig
from specrs.errors import UnsupportedConfigError
from specrs.kernels.linear import DenseWeight
from specrs.kernels.quantized_weight import QuantizedWeight
from specrs.models.torch_decoder import TorchDecoder
from specrs.speculative_config import SpeculativeConfig


def load(folder: Path, **fields: Any) -> TorchDecoder:
    config = EngineConfig(model=str(folder), device="cuda", **fields)
    made = BACKENDS["cuda"].load_model(ModelSource.of_target(config), "cpu", None)
    assert isinstance(made, TorchDecoder)
    return made


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loader") / "plain"
    return make_checkpoint(folder, layers=1, hidden=128, intermediate=128, dtype=torch.bfloat16, with_tokenizer=False)


def test_the_dtype_is_the_checkpoints(plain: Path) -> None:
    weights = load(plain).weights
    assert weights.dtype == torch.bfloat16
    assert isinstance(weights.layers[0].qkv, DenseWeight)
    assert load(plain, kv_cache_dtype="fp8").weights.cache_dtype == torch.float8_e4m3fn


def test_quantized_weights_stay_quantized(plain: Path, tmp_path: Path) -> None:
    (layer,) = load(gptq(plain, tmp_path / "gptq")).weights.layers
    (at_load,) = load(plain, quantization="int8").weights.layers
    for w in (layer, at_load):
        assert all(isinstance(part, QuantizedWeight) for part in (w.qkv, w.o, w.gate_up, w.down))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_draft_in_fp8_rounds_rows_of_wide_passes(plain: Path, dtype: str) -> None:
    """Not with float16, whose products have no tensor cores for FP8. The target and other formats round nothing."""
    for quantization in ("fp8", "int8", None):
        speculative = SpeculativeConfig(model=str(plain), quantization=quantization, num_speculative_tokens=2)
        config = EngineConfig(model=str(plain), device="cuda", quantization="fp8", speculative_config=speculative)
        sources = [ModelSource.of_draft(config, dtype), ModelSource.of_target(config)]
        (draft,), (target,) = (BACKENDS["cuda"].load_model(source, "cpu", None).weights.layers for source in sources)
        for name in ("qkv", "o", "gate_up", "down"):
            held, w = getattr(draft, name), getattr(target, name)
            rounds = isinstance(held, QuantizedWeight) and held.fp8_wide_rows
            assert rounds == (quantization == "fp8" and dtype == "bfloat16")
            assert isinstance(held, QuantizedWeight) == (quantization is not None)
            assert not getattr(held, "fp8_rows", False)
            assert not w.fp8_rows
            assert not w.fp8_wide_rows


def test_rows_in_fp8_need_weights_in_fp8(plain: Path, tmp_path: Path) -> None:
    (layer,) = load(fp8_block(plain, tmp_path / "fp8"), cuda_fp8_rows=True).weights.layers
    assert isinstance(layer.qkv, QuantizedWeight)
    assert layer.qkv.fp8_rows
    with pytest.raises(UnsupportedConfigError, match=r"^cuda_fp8_rows=True: .*plain has no FP8 weights here"):
        load(plain, cuda_fp8_rows=True)
