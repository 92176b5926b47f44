"""The CUDA runner with a GGUF file of several types, as Q4_K_M has them. Triton's interpreter runs the kernels."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from gguf_files import write_gguf
from specrs.backends.cuda.loader import QuantizedLoader
from specrs.backends.cuda.runner import CudaRunner
from specrs.backends.cuda.shapes import TILED_MERGED_ROWS
from specrs.backends.weights import Weights
from specrs.config import EngineConfig
from specrs.drafters.draft_model import LoadedDraftModel
from specrs.engine.build import build_engine
from specrs.engine.request import Request
from specrs.engine.weights import load_weights
from specrs.kernels.coding import Coding
from specrs.kernels.linear import DenseWeight
from specrs.kernels.quantized_weight import QuantizedWeight
from specrs.models.loader import open_checkpoint
from specrs.models.quantization.base import QuantizedTensors
from specrs.models.torch_decoder import TorchDecoder
from specrs.sampling import SamplingParams
from specrs.speculative_config import SpeculativeConfig

from backends.cuda_engines import SMALL, K, generate, serve_by_cuda

GREEDY = SamplingParams(temperature=0.0)
PROMPTS = [[5, 9, 2, 33], [60]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with v and down in Q6_K and everything else in Q4_K, as in half of the layers of Q4_K_M."""
    folder = tmp_path_factory.mktemp("mixed")
    sizes: dict[str, Any] = {"layers": 1, "hidden": 256, "intermediate": 256, "head_dim": 64, "kv_heads": 2}
    source = make_checkpoint(folder / "source", "llama", vocab=61, with_tokenizer=False, **sizes)
    return write_gguf(source, folder / "model.gguf", "Q4_K", kinds={"attn_v": "Q6_K", "ffn_down": "Q6_K"})


def test_the_same_text_with_and_without_drafts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that all matrices stay quantized, and that texts with drafts, of which some are accepted and some rejected,
    are those without drafts and those of torch with the file's numbers."""
    config, checkpoint = open_checkpoint(path, None, "auto")
    assert isinstance(checkpoint, QuantizedTensors)
    target = QuantizedLoader(config, checkpoint, torch.float32, torch.device("cpu")).load()
    (layer,) = target.layers
    codings = [getattr(layer, name).coding for name in ("qkv", "o", "gate_up", "down")]
    q4_k = Coding("int4", 32, minima="blocks")
    assert codings == [Coding("int8", 16, minima="blocks"), q4_k, q4_k, Coding("int8", 16)]
    assert isinstance(layer.gate_up, QuantizedWeight)
    dense = {name: getattr(layer, name).dequantized().float() for name in ("qkv", "o", "gate_up", "down")}
    dense["o"] += dense["o"].std() * torch.randn(dense["o"].shape, generator=torch.Generator().manual_seed(0))
    draft = replace(target, layers=(replace(layer, **{name: DenseWeight(w) for name, w in dense.items()}),))
    speculative = SpeculativeConfig(model=str(path), num_speculative_tokens=K)
    settings = EngineConfig(model=str(path), dtype="float32", speculative_config=speculative, **SMALL)
    with monkeypatch.context() as patch:
        serve_by_cuda(patch)
        engine = build_engine(settings, Weights(TorchDecoder(target), LoadedDraftModel(TorchDecoder(draft))))
    assert isinstance(engine.runner, CudaRunner)
    assert engine.runner.buckets.merged_rows == TILED_MERGED_ROWS
    exact = EngineConfig(model=str(path), dtype="float32", speculative_config=speculative, enforce_eager=True, **SMALL)

    def texts(requests: list[Request]) -> list[list[int]]:
        assert all(request.error is None for request in requests)
        return [request.output_token_ids for request in requests]

    drafted = generate(engine, [GREEDY] * 2, 4, PROMPTS)
    made = [sum(request.acceptance.histogram[1:]) for request in drafted]
    assert 0 < sum(made) < sum(sum(request.acceptance.histogram) for request in drafted), "some steps accept none"
    assert texts(drafted) == texts(generate(engine, [GREEDY.replace(num_speculative_tokens=0)] * 2, 4, PROMPTS))
    assert texts(drafted) == texts(generate(build_engine(exact, load_weights(exact)), [GREEDY] * 2, 4, PROMPTS))
