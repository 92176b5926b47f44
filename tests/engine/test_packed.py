"""Engines with packed GGUF blocks: text and logits at any K are those of K = 0, to the bit."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
from checkpoints import make_checkpoint, perturb_checkpoint
from gguf_files import write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quantized_files import gptq
from specrs.backends.weights import Weights
from specrs.engine.build import build_engine
from specrs.engine.weights import load_weights
from specrs.errors import UnsupportedConfigError

from engine.harness import config, make_prompts, request, run
from engine.logits import LOGITS, logits_of, with_logits

ACT_ORDER = "GPTQ, act-order"
KINDS = ("Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "IQ4_NL", ACT_ORDER)
PROMPTS = [tuple(prompt) for prompt in make_prompts(count=4)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """A target and a close draft for each type of GGUF blocks, and for GPTQ with groups out of order."""
    folder = tmp_path_factory.mktemp("packed")
    sizes = {"head_dim": 64, "kv_heads": 2, "hidden": 256, "intermediate": 256, "layers": 1, "with_tokenizer": False}
    target = make_checkpoint(folder / "target", "qwen3", initializer_range=0.05, **sizes)
    draft = perturb_checkpoint(target, folder / "draft", noise=0.05, seed=2)
    act_order = (gptq(target, folder / "target-gptq", desc_act=True), gptq(draft, folder / "draft-gptq", desc_act=True))
    return {ACT_ORDER: act_order} | {
        kind: (
            write_gguf(target, folder / f"target-{kind}.gguf", kind),
            write_gguf(draft, folder / f"draft-{kind}.gguf", kind),
        )
        for kind in KINDS
        if kind != ACT_ORDER
    }


@functools.cache
def loaded(target: Path, draft: Path | None, dtype: str) -> Weights:
    return load_weights(config(target, draft, k=0 if draft is None else 1, dtype=dtype))


@functools.cache
def alone(target: Path, prompt: tuple[int, ...], dtype: str, activations: str) -> tuple[np.ndarray, list[int]]:
    """Return logits and text of a prompt without drafts, in one chunk on one thread."""
    fields = LOGITS | {"max_num_batched_tokens": 512, "threads": 1, "cpu_activations": activations}
    made = config(target, None, k=0, dtype=dtype, **fields)
    engine = build_engine(made, loaded(target, None, dtype))
    job = with_logits(0, list(prompt), 0, 0, 20)
    engine.add_request(job)
    run(engine)
    return logits_of(job), job.output_token_ids


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    kind=st.sampled_from(KINDS),
    draft_kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    activations=st.sampled_from(["auto", "int8"]),
    k=st.integers(1, 5),
    budget=st.sampled_from([17, 64, 512]),
    threads=st.sampled_from([1, 2]),
    num_blocks=st.sampled_from([10, 64]),
    prompts=st.lists(st.sampled_from(PROMPTS), min_size=1, max_size=4),
)
def test_drafts_change_no_bit(
    files: dict[str, tuple[Path, Path]],
    kind: str,
    draft_kind: str,
    dtype: str,
    activations: str,
    k: int,
    budget: int,
    threads: int,
    num_blocks: int,
    prompts: list[tuple[int, ...]],
) -> None:
    target, draft = files[kind][0], files[draft_kind][1]
    fields = LOGITS | {"max_num_batched_tokens": budget, "threads": threads, "cpu_activations": activations}
    made = config(target, draft, k=k, dtype=dtype, num_gpu_blocks_override=num_blocks, **fields)
    engine = build_engine(made, loaded(target, draft, dtype))
    assert engine.runner.is_native
    jobs = [with_logits(i, list(prompt), k, k, 20) for i, prompt in enumerate(prompts)]
    plain = [request(9 + i, list(p), k=k, max_tokens=20, engine_k=k, ignore_eos=True) for i, p in enumerate(prompts)]
    for requests in (plain, jobs):
        for job in requests:
            engine.add_request(job)
        run(engine)
    for prompt, reporting, other in zip(prompts, jobs, plain, strict=True):
        logits, text = alone(target, prompt, dtype, activations)
        assert other.output_token_ids == reporting.output_token_ids == text
        assert np.array_equal(logits_of(reporting).view(np.int32), logits.view(np.int32))


def test_integers_of_8_bits_are_in_use(files: dict[str, tuple[Path, Path]]) -> None:
    """Check that activations are rounded to 8-bit integers: every logit moves, by no more than a few hundredths of the
    largest."""
    for kind in KINDS:
        wide, _ = alone(files[kind][0], PROMPTS[0], "float32", "int16")
        narrow, _ = alone(files[kind][0], PROMPTS[0], "float32", "int8")
        off = np.abs(wide[0] - narrow[0])
        assert off.min() > 0, kind
        assert off.max() < 0.05 * np.abs(wide[0]).max(), kind


@pytest.mark.parametrize("activations", ["int16", "int8"])
def test_activations_of_files_without_blocks(
    files: dict[str, tuple[Path, Path]], tmp_path: Path, activations: str
) -> None:
    """Check that activations of 8-bit and 16-bit integers are rejected, with the field's name, if the target has no
    quantized matrix. A draft need not have any."""
    plain = make_checkpoint(tmp_path / "plain", "qwen3", layers=1, with_tokenizer=False)
    load_weights(config(files["Q4_K"][0], plain, k=1, dtype="float32", cpu_activations=activations))
    with pytest.raises(
        UnsupportedConfigError, match=rf"^cpu_activations='{activations}': .*plain has no quantized matrix"
    ):
        load_weights(config(plain, None, k=0, dtype="auto", cpu_activations=activations))


def test_activations_of_models_that_torch_computes(tmp_path: Path) -> None:
    """Check that `int16` activations are rejected for models that torch computes, because only native passes round
    activations."""
    plain = make_checkpoint(tmp_path / "generic", "qwen3", layers=1, with_tokenizer=False)
    made = config(plain, None, k=0, dtype="float32", cpu_activations="int16", model_impl="transformers")
    with pytest.raises(UnsupportedConfigError, match=r"^cpu_activations='int16': not implemented for a model"):
        build_engine(made, load_weights(made))
