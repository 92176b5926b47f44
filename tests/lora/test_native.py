"""Adapters in native passes: the rows of each adapter, and that its text depends on nothing else."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from models.harness import Feeder
from specrs import LLM, LoRARequest, SamplingParams
from specrs.backends.cpu.weights import load_native
from specrs.core import InvalidBufferError
from specrs.models.lora_loader import load_lora
from specrs.models.native_decoder import NativeDecoder
from specrs.models.torch_loader import load_model
from specrs.pair import TARGET

from .adapters import Spec, leaves_of, merge, write_adapter

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "phi3": {},
    "olmo2": {},
    "qwen3_moe": {"mlp_only_layers": [1]},
    "qwen3_5_text": {},
    "qwen3_next": {"mlp_only_layers": [0]},
    "lfm2": {},
    "llama4_text": {"moe_layers": [0]},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("dtype", "quantization", "tolerance"), [("float32", None, 2e-5), ("bfloat16", None, 0.1), ("float32", "int8", 0.1)]
)
def test_rows_are_their_adapters(
    family: str, dtype: str, quantization: str | None, tolerance: float, tmp_path: Path
) -> None:
    """Check rows of adapters on bf16 and quantized weights: within their rounding error, which is far below the
    adapters' effect."""
    sizes: dict[str, Any] = {"hidden": 64, "head_dim": 16, "intermediate": 96, "kv_heads": 2, "with_tokenizer": False}
    checkpoint = make_checkpoint(tmp_path / "base", family, seed=1, **sizes, **FAMILIES[family])
    leaves = tuple(leaves_of(checkpoint))
    base = load_native(checkpoint, dtype=dtype, quantization=quantization)
    folders = [
        write_adapter(tmp_path / f"{i}", checkpoint, Spec(some, rank=rank), seed=i)
        for i, (some, rank) in enumerate([(leaves, 9), (leaves[::2], 2)])
    ]
    adapters = [load_lora(path, base, name=str(i), lora_int_id=i, max_lora_rank=9) for i, path in enumerate(folders, 1)]
    merged = [checkpoint, *(merge(checkpoint, path, tmp_path / f"merged {path.name}") for path in folders)]
    models = [load_model(path, dtype="float64") for path in merged]
    feeder = Feeder(base, num_requests=4)
    which, lengths = [1, 0, 2, 1], [5, 3, 1, 70]
    feeder.adapters = {b: adapters[i - 1] for b, i in enumerate(which) if i}
    texts = [
        [(token, p) for p, token in enumerate((7 * b + 13 * p) % 211 for p in range(n))] for b, n in enumerate(lengths)
    ]
    logits = feeder.feed(dict(enumerate(texts))).double()
    for text, i, found in zip(texts, which, logits.split(lengths), strict=True):
        expected = [Feeder(model).feed({0: text}) for model in models]
        off = [float((found - logits).norm() / logits.norm()) for logits in expected]
        assert off[i] < tolerance
        assert min(off[:i] + off[i + 1 :]) > 4 * tolerance, off


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    leaves = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
    return [write_adapter(folder / str(i), TARGET, Spec(leaves, rank=4 * i), seed=i) for i in (1, 2)]


def texts(folders: list[Path], jobs: list[tuple[int, int]], k: int, batch: int) -> list[list[int]]:
    """Return the tokens of jobs (adapter, kind of sampling), `batch` at once."""
    llm = LLM(
        dtype="float32",
        max_model_len=256,
        enable_lora=True,
        max_loras=2,
        max_num_seqs=batch,
        speculative_config={"num_speculative_tokens": 5, "rejection_sample_method": "coupled"},
    )
    assert llm.engine.runner.is_native
    assert isinstance(llm.engine.weights.target, NativeDecoder)
    loras = [None, *(LoRARequest(f"a{i}", i, str(path)) for i, path in enumerate(folders, 1))]
    same: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "num_speculative_tokens": k}
    kinds = [
        SamplingParams(temperature=0, **same),
        SamplingParams(temperature=0.8, seed=5, **same),
        SamplingParams(temperature=0.8, seed=6, repetition_penalty=1.2, **same),
    ]
    prompts = [f"def f{i}(x):" for i in range(len(jobs))]
    params, asked = [kinds[kind] for _, kind in jobs], [loras[adapter] for adapter, _ in jobs]
    outputs = llm.generate(prompts, params, lora_request=asked, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_text_depends_on_nothing_else(folders: list[Path]) -> None:
    jobs = [(i % 3, i // 3 % 3) for i in range(9)]
    alone = texts(folders, jobs, k=0, batch=1)
    assert texts(folders, jobs, k=5, batch=9) == alone
    assert texts(folders, jobs, k=3, batch=4) == alone


def test_text_is_the_merged_models(folders: list[Path], tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=30, temperature=0)
    prompts = ["def add(a, b):", "import os\n\n", "class Stack:"]
    llm = LLM(dtype="float32", max_model_len=256, enable_lora=True, speculative_config={"num_speculative_tokens": 4})
    for i, path in enumerate(folders, 1):
        merged = LLM(str(merge(TARGET, path, tmp_path / str(i))), dtype="float32", max_model_len=256)
        expected = merged.generate(prompts, params, use_tqdm=False)
        found = llm.generate(prompts, params, lora_request=LoRARequest(f"a{i}", i, str(path)), use_tqdm=False)
        assert [o.outputs[0].text for o in found] == [o.outputs[0].text for o in expected]


def test_an_adapter_of_another_model_is_rejected(tmp_path: Path) -> None:
    checkpoints = [make_checkpoint(tmp_path / str(n), seed=1, hidden=n, with_tokenizer=False) for n in (32, 64)]
    own, other = (load_native(path, dtype="float32") for path in checkpoints)
    path = write_adapter(tmp_path / "adapter", checkpoints[1], Spec(("q_proj",)), seed=1)
    adapter = load_lora(path, other, name="a", lora_int_id=1, max_lora_rank=8)
    assert other.native_lora(adapter) is other.native_lora(adapter)
    with pytest.raises(InvalidBufferError, match=r"layers\[0\]\.qkv\[0\]'s inputs=64: must be 32"):
        own.native_lora(adapter)


@pytest.fixture(scope="module")
def llama4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama 4 whose first layer has experts and a shared expert, and whose second has an MLP."""
    folder = tmp_path_factory.mktemp("llama4") / "base"
    sizes: dict[str, Any] = {"hidden": 64, "head_dim": 16, "intermediate": 96, "kv_heads": 2, "tie": False, "vocab": 61}
    return make_checkpoint(folder, "llama4_text", seed=1, moe_layers=[0], **sizes)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_text_of_llama_4(llama4: Path, dtype: str, tmp_path: Path) -> None:
    """Check text under adapters of attention and MLP against that of merged weights, natively and by torch, alone and
    with drafts that n-grams guess."""
    folders = [
        write_adapter(tmp_path / str(i), llama4, Spec(leaves, rank=4 * i), seed=i)
        for i, leaves in enumerate([("q_proj", "k_proj", "up_proj"), tuple(leaves_of(llama4))], 1)
    ]
    prompts = [{"prompt_token_ids": [(7 * i * j + 3 * j) % 61 for j in range(1, 4)] * 4} for i in range(4)]
    greedy = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, detokenize=False)
    merged = [merge(llama4, path, tmp_path / f"merged {path.name}") for path in folders]
    expected = []
    for path in (llama4, *merged):
        outputs = LLM(str(path), dtype=dtype).generate(prompts, greedy, use_tqdm=False)
        expected.append([output.outputs[0].token_ids for output in outputs])
    assert len({str(texts) for texts in expected}) == 3
    loras = [None, *(LoRARequest(f"a{i}", i, str(path)) for i, path in enumerate(folders, 1))]
    asked = [lora for lora in loras for _ in prompts]
    for drafter in (None, {"method": "ngram", "num_speculative_tokens": 3}):
        llm = LLM(str(llama4), dtype=dtype, enable_lora=True, max_loras=2, speculative_config=drafter)
        assert isinstance(llm.engine.weights.target, NativeDecoder) == (dtype == "float32")
        outputs = llm.generate(prompts * 3, greedy, lora_request=asked, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == list(itertools.chain(*expected))
