"""Engines of every family, weight format and drafter on a GPU, in graphs: the texts of the CPU runner and of K = 0."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, edit_json, make_checkpoint, make_eagle3, perturb_checkpoint
from engine.other_vocabulary import rename
from gguf_files import write_gguf
from quantized_files import mxfp4
from specrs.backends.cuda.decoder import CudaDecoder
from specrs.backends.cuda.runner import CudaRunner
from specrs.config import EngineConfig
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.engine.request import Request
from specrs.kernels.coding import Coding
from specrs.kernels.cuda import fp8_rows, scaled_linear
from specrs.kernels.cuda.device import limits_of
from specrs.kernels.quantized_weight import QuantizedWeight
from specrs.pair import DRAFT, TARGET
from specrs.pair.prompts import PROMPTS
from specrs.speculative_config import SpeculativeConfig
from specrs.tokenizer import Tokenizer

from .texts import GREEDY, VOCAB, K, exhaust, generate, share_of_equal

SHAPE: dict[str, Any] = {
    "vocab": VOCAB,
    "layers": 2,
    "hidden": 256,
    "intermediate": 512,
    "kv_heads": 2,
    "group": 4,
    "head_dim": 64,
    "initializer_range": 0.08,
}


def build(target: Path, speculative: dict[str, Any], device: str = "cuda", **fields: Any) -> Engine:
    defaults: dict[str, Any] = {
        "max_model_len": 512,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 128,
        "num_gpu_blocks_override": 200,
        "dtype": "float32",
        "cudagraph_capture_sizes": (4,),
    }
    drafts = SpeculativeConfig(**({"num_speculative_tokens": K} | speculative))
    if device == "cpu":
        fields["enforce_eager"] = "quantization" not in fields  # torch where it can
    config = EngineConfig(model=str(target), device=device, speculative_config=drafts, **(defaults | fields))
    engine = build_engine(config)
    assert isinstance(engine.runner, CudaRunner) == (device == "cuda")
    return engine


def assert_texts(target: Path, speculative: dict[str, Any], *, near: float = 0.95, **fields: Any) -> None:
    """Check that texts from graphs with drafts equal those without drafts and torch's on the CPU. Only near-ties may
    differ."""
    engine = build(target, speculative, **fields)
    texts = generate(engine, [GREEDY] * 4)
    assert engine.stats().accepted_tokens > 0
    plain = generate(engine, [GREEDY.replace(num_speculative_tokens=0)] * 4)
    assert share_of_equal(texts, plain) > near
    assert share_of_equal(generate(build(target, speculative, "cpu", **fields), [GREEDY] * 4), texts) > near


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_families(family: str, tmp_path: Path) -> None:
    experts = {"num_experts": 16, "num_local_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    fields = {k: v for k, v in experts.items() if k in FAMILIES[family]}
    if family == "gemma3_text":
        fields = {"sliding_window": 40}
    target = make_checkpoint(tmp_path / "target", family, seed=1, **(SHAPE | fields))
    draft = perturb_checkpoint(target, tmp_path / "draft", noise=0.1, seed=2)
    assert_texts(target, {"model": str(draft)})


def test_windows(tmp_path: Path) -> None:
    """Check models whose every layer has a window: blocks outside it go to other requests while their request goes
    on."""
    target = make_checkpoint(tmp_path / "target", "mistral", seed=1, **(SHAPE | {"sliding_window": 40}))
    draft = perturb_checkpoint(target, tmp_path / "draft", noise=0.1, seed=2)
    assert_texts(target, {"model": str(draft)}, num_gpu_blocks_override=60)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4", "q4_k"])
def test_quantized_weights(quantization: str, dtype: str, tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", seed=1, **SHAPE)
    draft = perturb_checkpoint(target, tmp_path / "draft", noise=0.1, seed=2)
    speculative = {"model": str(draft), "quantization": quantization}
    if dtype == "float32":
        assert_texts(target, speculative, quantization=quantization)
        return
    engine = build(target, speculative, dtype=dtype, quantization=quantization)
    texts = generate(engine, [GREEDY] * 4)
    plain = generate(engine, [GREEDY.replace(num_speculative_tokens=0)] * 4)
    # Rows of other counts have sums of other orders, and bf16 has many near-ties.
    assert share_of_equal(texts, plain) > 0.6
    assert engine.stats().accepted_tokens > 0
    torch.cuda.synchronize()


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2"])
def test_a_kv_cache_in_fp8(kv_cache_dtype: str, tmp_path: Path) -> None:
    """Check engines whose target and draft keep K and V in FP8, one of them with KV groups. A K or V that is nearly
    between two codes may be rounded otherwise on a CPU."""
    for family, fields in (("qwen3", {}), ("gemma3_text", {"sliding_window": 40})):
        target = make_checkpoint(tmp_path / family, family, seed=1, **(SHAPE | fields))
        draft = perturb_checkpoint(target, tmp_path / f"{family}-draft", noise=0.1, seed=2)
        assert_texts(target, {"model": str(draft)}, near=0.8, kv_cache_dtype=kv_cache_dtype)


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4", "q4_k"])
def test_quantized_experts(quantization: str, tmp_path: Path) -> None:
    """Check experts that are quantized at load and stay codes in the grouped products."""
    experts = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    target = make_checkpoint(tmp_path / "target", "qwen3_moe", seed=1, **(SHAPE | experts))
    draft = perturb_checkpoint(target, tmp_path / "draft", noise=0.1, seed=2)
    engine = build(target, {"model": str(draft)}, quantization=quantization)
    assert isinstance(engine.runner, CudaRunner)
    assert isinstance(engine.runner.ctx.target, CudaDecoder)
    experts_of = [layer.experts for layer in engine.runner.ctx.target.weights.layers]
    assert all(of is not None and isinstance(of.gate_up[0], QuantizedWeight) for of in experts_of)
    texts = generate(engine, [GREEDY] * 4)
    plain = generate(engine, [GREEDY.replace(num_speculative_tokens=0)] * 4)
    assert share_of_equal(texts, plain) > 0.95


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """Check gpt-oss with sinks and MXFP4 experts against the same numbers in 32 bits."""
    numbers = make_checkpoint(tmp_path / "numbers", "gpt_oss", seed=1, **(SHAPE | {"num_local_experts": 4}))
    config = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    codes = mxfp4(numbers, tmp_path / "codes", config)
    texts, dense = (
        generate(build(path, {"model": str(numbers)}), [GREEDY.replace(num_speculative_tokens=k)] * 4)
        for path, k in ((codes, K), (numbers, 0))
    )
    assert share_of_equal(texts, dense) > 0.95


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K", "Q6_K", "Q5_K", "Q3_K"])
def test_gguf_files(kind: str, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "llama", seed=1, **SHAPE)
    path = write_gguf(source, tmp_path / "model.gguf", kind)
    assert_texts(path, {"model": str(path)})


def test_auto(tmp_path: Path) -> None:
    """Check that an engine that chooses K itself, from costs of replayed graphs, writes the text of K = 0."""
    target = make_checkpoint(tmp_path / "target", seed=1, **SHAPE)
    draft = perturb_checkpoint(target, tmp_path / "draft", noise=0.1, seed=2)
    engine = build(target, {"model": str(draft), "num_speculative_tokens": "auto"})
    texts = generate(engine, [GREEDY] * 4)
    assert share_of_equal(texts, generate(engine, [GREEDY.replace(num_speculative_tokens=0)] * 4)) > 0.95


def test_the_bundled_pair() -> None:
    """Check trained weights: texts of prompts in words, from graphs with drafts, against the CPU's."""
    tokenizer = Tokenizer(str(TARGET))
    texts = []
    for device in ("cuda", "cpu"):
        engine = build(TARGET, {"model": str(DRAFT)}, device)
        requests = [
            Request(
                i,
                tokenizer.encode(prompt),
                GREEDY.replace(max_tokens=60, ignore_eos=True),
                num_speculative_tokens=K,
                seed=i,
            )
            for i, prompt in enumerate(PROMPTS[:4])
        ]
        for request in requests:
            engine.add_request(request)
        exhaust(engine)
        assert all(request.error is None for request in requests)
        assert engine.stats().accepted_tokens > 0
        texts.append([request.output_token_ids for request in requests])
    assert share_of_equal(*texts) > 0.95


def test_rows_in_fp8(tmp_path: Path) -> None:
    """Check FP8 weights with a scale per output and FP8 activations with one per row; many rows use cuBLAS or CUTLASS.
    Texts are compared loosely, because bf16 rounding may change codes."""
    target = make_checkpoint(tmp_path / "target", seed=1, **SHAPE)
    fields = {"dtype": "bfloat16", "quantization": "fp8"}
    drafts = {"model": str(target), "quantization": "fp8"}
    texts = generate(build(target, drafts, cuda_fp8_rows=True, **fields), [GREEDY] * 4)
    plain = generate(build(target, drafts, **fields), [GREEDY] * 4)
    assert share_of_equal(texts, plain) > 0.2
    torch.cuda.synchronize()


@pytest.mark.parametrize("coding", [Coding("fp8", 1024), Coding("fp8", 128, 128)])
@pytest.mark.parametrize("rows", [65, 66, 300])
def test_products_of_rows_in_fp8(coding: Coding, rows: int) -> None:
    """Check products of rows rounded to e4m3 against the reference in float64, on devices that have them."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 120, (512, 1024), generator=generator, dtype=torch.uint8)
    scales = torch.rand(-(-512 // coding.outputs), 1024 // coding.group, generator=generator) + 0.5
    held = QuantizedWeight.of(values, scales, coding)
    weight = replace(held, fp8_rows=True)
    on_device = weight.to(torch.device("cuda"))
    if not scaled_linear.serves(on_device, limits_of(torch.device("cuda"))):
        pytest.skip("not on this device")
    x = torch.randn(rows, 1024, generator=generator).bfloat16()
    padded, unit = scaled_linear.padded_rows(rows, weight), coding.unit(1024)
    assert unit is not None
    codes = torch.zeros(padded, 1024, dtype=torch.uint8, device="cuda")
    of_rows = torch.zeros(1024 // coding.group, padded, device="cuda")
    fp8_rows.quantize_rows(x.cuda(), coding.group, unit, codes[:rows], of_rows, True)
    out = torch.zeros(padded, 512, dtype=torch.bfloat16, device="cuda")
    scaled_linear.scaled_linear(codes, of_rows, on_device, out[:rows])
    exact = scaled_linear.scaled_linear_reference(x, weight)
    # Sums of tensor cores for FP8 keep 13 bits of the largest of some products.
    size = weight.multiplied(x.double()).abs() @ weight.dequantized().abs().t()
    assert ((out[:rows].cpu().double() - exact).abs() <= exact.abs() * 2**-8 + size * 2**-10).all()


@pytest.mark.parametrize("kind", ["ngram", "suffix", "ngram,draft_model", "parallel", "other vocabulary", "eagle3"])
def test_drafters(kind: str, tmp_path: Path) -> None:
    shape = SHAPE | {"layers": 6}
    target = make_checkpoint(tmp_path / "target", seed=1, **shape)
    draft = perturb_checkpoint(target, tmp_path / "draft", noise=0.1, seed=2)
    speculative: dict[str, Any] = {"method": kind}
    if kind == "parallel":
        edit_json(draft / "config.json", mask_token_id=59)
        speculative = {"model": str(draft), "parallel_drafting": True}
    elif kind == "other vocabulary":
        speculative = {"model": str(rename(draft, tmp_path / "renamed", dropped=12).path)}
        speculative["use_heterogeneous_vocab"] = True
    elif kind == "eagle3":
        speculative["model"] = str(make_eagle3(tmp_path / "head", target, seed=3, intermediate=512, head_dim=64))
    if "draft_model" in kind:
        speculative["model"] = str(draft)
    if "ngram" in kind:
        speculative |= {"prompt_lookup_min": 1, "prompt_lookup_max": 2}
    depth = 2 if kind in ("parallel", "other vocabulary", "eagle3") else 1
    engine = build(target, speculative, max_steps_in_flight=depth)
    texts = generate(engine, [GREEDY] * 4)
    plain = generate(engine, [GREEDY.replace(num_speculative_tokens=0)] * 4)
    assert share_of_equal(texts, plain) > 0.95
    assert engine.stats().drafts > 0
    eager = generate(build(target, speculative, max_steps_in_flight=depth, enforce_eager=True), [GREEDY] * 4)
    assert share_of_equal(eager, texts) > 0.95
