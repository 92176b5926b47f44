"""Targets and drafts with different precisions, from their own checkpoints: the text is that of K = 0. Which values of
`quantization=` fit them."""

from __future__ import annotations

import functools
import itertools
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint, perturb_checkpoint
from gguf_files import write_gguf
from models.native_passes import numbers_of
from quantized_files import compressed, fp8_block, gptq
from specrs.arrays import BFLOAT16, FLOAT32
from specrs.backends.cpu.weights import load_native
from specrs.backends.weights import Weights
from specrs.config import EngineConfig
from specrs.engine.build import build_engine
from specrs.engine.weights import load_weights
from specrs.errors import UnsupportedConfigError, UnsupportedModelError

from engine.harness import config, make_prompts, request, run

PRECISIONS = ("bf16", "fp8", "int8", "int4", "gguf")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    """A target and a close draft in each precision."""
    folder = tmp_path_factory.mktemp("precisions")
    sizes = {"head_dim": 32, "kv_heads": 2, "hidden": 64, "intermediate": 160, "with_tokenizer": False}
    target = make_checkpoint(folder / "target", "llama", dtype=torch.bfloat16, **sizes)
    draft = perturb_checkpoint(target, folder / "draft", noise=0.1, seed=2)
    return {
        role: {
            "bf16": source,
            "fp8": fp8_block(source, folder / f"{role}-fp8", block=(64, 64)),
            "int8": compressed(source, folder / f"{role}-int8", "int-quantized", num_bits=8, strategy="channel"),
            "int4": gptq(source, folder / f"{role}-int4"),
            "gguf": write_gguf(source, folder / f"{role}.gguf", "Q4_0"),
        }
        for role, source in (("target", target), ("draft", draft))
    }


@functools.cache
def loaded(target: Path, draft: Path | None, dtype: str) -> Weights:
    return load_weights(config(target, draft, k=0 if draft is None else 1, dtype=dtype))


def text(target: Path, draft: Path | None, k: int, dtype: str) -> list[list[int]]:
    """Generate the token ids of eight prompts at once."""
    engine = build_engine(config(target, draft, k=k, dtype=dtype), loaded(target, draft, dtype))
    assert engine.runner.is_native
    jobs = [
        request(i, prompt, k=k, max_tokens=24, engine_k=k, ignore_eos=True)
        for i, prompt in enumerate(make_prompts(count=8))
    ]
    for job in jobs:
        engine.add_request(job)
    run(engine)
    return [job.output_token_ids for job in jobs]


@pytest.mark.parametrize(("of_target", "of_draft"), list(itertools.product(PRECISIONS, PRECISIONS)))
def test_text_is_that_of_no_drafts(of_target: str, of_draft: str, checkpoints: dict[str, dict[str, Path]]) -> None:
    target, draft = checkpoints["target"][of_target], checkpoints["draft"][of_draft]
    for dtype in ("auto", "bfloat16"):
        assert text(target, draft, 3, dtype) == text(target, None, 0, dtype)


def test_each_has_its_own_precision(checkpoints: dict[str, dict[str, Path]], caplog: pytest.LogCaptureFixture) -> None:
    """Check each model's precision: integer weights stay packed; dequantized ones are bf16, or float32 if the dtype
    says so."""
    caplog.set_level(logging.INFO, "specrs")
    made = load_weights(config(checkpoints["target"]["int4"], checkpoints["draft"]["fp8"], k=1, dtype="auto"))
    target, draft = made.models
    packed = {part.kind for part in target.weights.layers[0].qkv.parts}
    parts = {part.dtype for part in draft.weights.layers[0].qkv.parts}
    assert (packed, parts) == ({"INT4"}, {BFLOAT16})
    said = [record.getMessage() for record in caplog.records]
    assert any("14 matrices are packed, 0.00 GiB; 0 become bfloat16" in line for line in said)
    assert any("0 matrices are packed, 0.00 GiB; 13 become bfloat16 when they are loaded" in line for line in said)
    made = load_weights(config(checkpoints["draft"]["fp8"], None, k=0, dtype="float32"))
    assert {part.dtype for part in made.target.weights.layers[0].qkv.parts} == {FLOAT32}  # type: ignore[attr-defined]


def test_a_value_that_contradicts_the_checkpoint(checkpoints: dict[str, dict[str, Path]]) -> None:
    target, draft = checkpoints["target"], checkpoints["draft"]

    def load(of: str, quantization: str | None, of_draft: str = "bf16", its: str | None = None) -> Weights:
        made = config(target[of], draft[of_draft], k=1, dtype="auto")
        assert made.speculative_config is not None
        speculative = replace(made.speculative_config, quantization=its)
        return load_weights(replace(made, quantization=quantization, speculative_config=speculative))

    for of, given in (("fp8", "fp8"), ("int8", "compressed-tensors"), ("int4", "gptq"), ("gguf", "gguf")):
        load(of, given)
    for of, given, own in (
        ("fp8", "int8", "fp8"),
        ("int4", "awq", "gptq"),
        ("int4", "int4", "gptq"),
        ("gguf", "int8", "gguf"),
        ("int8", "fp8", "compressed-tensors"),
    ):
        contradicts = rf"contradicts .*, whose weights are quantized by '{own}'; allowed: None or '{own}'"
        with pytest.raises(UnsupportedConfigError, match=rf"^quantization='{given}': {contradicts}"):
            load(of, given)
        with pytest.raises(
            UnsupportedConfigError, match=rf"^speculative_config\.quantization='{given}': {contradicts}"
        ):
            load("bf16", None, of, given)
    with pytest.raises(
        UnsupportedConfigError, match=r"^quantization='gptq': contradicts .* not quantized; allowed: None"
    ):
        load("bf16", "gptq")
    load("bf16", "int8", "bf16", "fp8")


def test_random_weights_of_a_quantized_checkpoint(checkpoints: dict[str, dict[str, Path]]) -> None:
    """Check random weights for a quantized checkpoint: they are not quantized. Its own method as `quantization` is
    accepted, another one is rejected."""
    target = checkpoints["target"]
    own = {"int8": "compressed-tensors", "int4": "gptq", "gguf": "gguf", "fp8": "fp8"}
    for of, given in (*own.items(), ("int4", None)):
        plain = config(target[of], None, k=0, dtype="auto", load_format="dummy")
        made = load_weights(replace(plain, quantization=given))
        parts = {part.dtype for part in made.target.weights.layers[0].qkv.parts}  # type: ignore[attr-defined]
        assert parts <= {BFLOAT16, FLOAT32}, of
    with pytest.raises(UnsupportedConfigError, match=r"^quantization='awq': contradicts .* quantized by 'gptq'"):
        load_weights(replace(config(target["int4"], None, k=0), quantization="awq", load_format="dummy"))


def test_fp8_at_load(checkpoints: dict[str, dict[str, Path]]) -> None:
    """Check FP8 at load against the definition in float64: one scale per output, and the nearest e4m3 number."""
    source = checkpoints["target"]["bf16"]
    plain, rounded = (load_native(source, dtype="float32", quantization=kind) for kind in (None, "fp8"))
    for before, after in zip(plain.weights.layers, rounded.weights.layers, strict=True):
        for name in ("qkv", "o", "gate_up", "down"):
            weight, found = (torch.from_numpy(numbers_of(getattr(layer, name))) for layer in (before, after))
            scale = weight.abs().amax(1, keepdim=True) / 448
            expected = (weight / scale).to(torch.float8_e4m3fn).double() * scale
            off = (found - expected).abs() > 1e-6 * weight.abs().max()
            assert off.double().mean() < 1e-3, "ties may go the other way"
            assert ((found - weight).abs() <= weight.abs() / 16 + scale * 2**-9).all()
    assert np.array_equal(plain.weights.embedding, rounded.weights.embedding)


def test_an_unknown_method(tmp_path: Path) -> None:
    folder = make_checkpoint(
        tmp_path / "model", with_tokenizer=False, quantization_config={"quant_method": "hqq", "bits": 4}
    )
    allowed = "allowed: fp8, compressed-tensors, gptq, awq"
    with pytest.raises(
        UnsupportedModelError, match=rf"quantization_config\.quant_method='hqq': not implemented; {allowed}"
    ):
        load_weights(EngineConfig(model=str(folder), device="cpu"))
