"""Engines with a quantized KV cache: text at any K is that of K = 0, for any drafts, preemption and prefix hits;
settings that they reject; their memory."""

import dataclasses
import re
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import edit_json, make_checkpoint, make_eagle3, perturb_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from models.harness import Feeder
from models.native_passes import tensors_of
from safetensors.torch import load_file, save_file
from specrs.arrays import BFLOAT16, FLOAT8_E4M3
from specrs.backends.blueprint import Blueprint
from specrs.backends.weights import Weights
from specrs.config import EngineConfig
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.engine.request import Request
from specrs.engine.weights import load_weights
from specrs.errors import SpecrsError, UnsupportedConfigError
from specrs.kernels.kv_codes import FRACTIONS
from specrs.kernels.kv_scales import UNSCALED, KVScales
from specrs.models.kv_dtypes import SCALE_NAMES, read_kv_scales
from specrs.models.loader import load_config, open_checkpoint
from specrs.models.native_decoder import NativeDecoder
from specrs.models.shards import Shard, ShardedTensors
from specrs.sampling import SamplingParams
from sweep import sweep

from .harness import VOCAB, config, make_prompts, poison, run

CODES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
KV_SCALES = {"k": 0.037, "v": 0.019}
PROMPTS = make_prompts()
LENGTH = 14
CASES = (
    # kv_cache_dtype of target and draft, drafter
    ("fp8", None, "close"),
    ("fp8_e5m2", None, "close"),
    ("fp8", "auto", "small"),
    ("auto", "fp8", "close"),
    ("fp8", None, "ngram"),
    ("fp8", None, "suffix"),
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    """A target and its drafts."""
    folder = tmp_path_factory.mktemp("codes")
    target = make_checkpoint(folder / "target", "qwen3", seed=1, vocab=VOCAB)
    small = make_checkpoint(folder / "small", "qwen3", seed=3, vocab=VOCAB, kv_heads=1, hidden=32, layers=1)
    return target, {"close": perturb_checkpoint(target, folder / "close", noise=0.1, seed=2), "small": small}


@pytest.fixture(scope="module")
def loaded() -> dict[EngineConfig, Weights]:
    """Loaded weights by configuration. They are shared, because weights are never written to."""
    return {}


@pytest.fixture(scope="module")
def texts() -> dict[tuple[object, ...], list[int]]:
    """Texts without drafts (K = 0)."""
    return {}


def settings_of(
    target: Path, drafts: dict[str, Path], case: tuple[str, str | None, str], k: int, rule: str, **fields: object
) -> EngineConfig:
    of_target, of_draft, drafter = case
    speculative: dict[str, object] = {"num_speculative_tokens": k, "rejection_sample_method": rule}
    if drafter in drafts:
        speculative |= {"model": str(drafts[drafter]), "kv_cache_dtype": of_draft}
    else:
        speculative["method"] = drafter
    made = config(target, None, k=0, kv_cache_dtype=of_target, **fields)
    return dataclasses.replace(made, speculative_config=speculative)


def engine_of(loaded: dict[EngineConfig, Weights], made: EngineConfig) -> Engine:
    speculative = made.speculative_config
    key = EngineConfig(
        model=made.model,
        dtype=made.dtype,
        enforce_eager=made.enforce_eager,
        kv_cache_dtype=made.kv_cache_dtype,
        speculative_config=None
        if speculative is None or speculative.on_host
        else dataclasses.replace(speculative, num_speculative_tokens=1, rejection_sample_method="rejection"),
    )
    if key not in loaded:
        loaded[key] = load_weights(key)
    engine = build_engine(made, loaded[key])
    assert engine.runner.is_native == (made.dtype != "float64" and not made.enforce_eager)
    return engine


def params(which: int, rule: str, k: int | None) -> SamplingParams:
    temperature = 0.9 if rule == "coupled" else 0.0
    return SamplingParams(
        temperature=temperature,
        seed=which,
        max_tokens=LENGTH,
        num_speculative_tokens=k,
        detokenize=False,
        ignore_eos=True,
    )


Job = tuple[int, int | None, int]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
@sweep(8)
@given(
    jobs=st.lists(
        st.tuples(st.integers(0, len(PROMPTS) - 1), st.none() | st.integers(0, 3), st.integers(0, 4)),
        min_size=1,
        max_size=6,
    ),
    k=st.integers(1, 3),
    rule=st.sampled_from(["rejection", "coupled"]),
    dtype=st.sampled_from(["float64", "float32", "bfloat16"]),
    block_size=st.sampled_from([4, 16]),
    budget=st.integers(16, 64),
    spare=st.integers(0, 8),
)
def test_the_text_is_that_of_no_drafts(
    pair: tuple[Path, dict[str, Path]],
    loaded: dict[EngineConfig, Weights],
    texts: dict[tuple[object, ...], list[int]],
    case: tuple[str, str | None, str],
    jobs: list[Job],
    k: int,
    rule: str,
    dtype: str,
    block_size: int,
    budget: int,
    spare: int,
) -> None:
    """Check texts, greedy and coupled, by torch in float64 and by native passes: with few blocks so that requests are
    preempted, prompts in chunks, and prefix hits. Unwritten positions hold NaN."""
    blocks = -(-128 // block_size) + spare
    made = settings_of(
        *pair,
        case,
        k,
        rule,
        dtype=dtype,
        block_size=block_size,
        num_gpu_blocks_override=blocks,
        max_num_batched_tokens=budget,
    )
    engine = engine_of(loaded, made)
    poison(engine)
    requests = []
    for i, (which, own_k, steps) in enumerate(jobs):
        own = params(which, rule, None if own_k is None else min(own_k, k))
        requests.append(Request(i, PROMPTS[which], own, num_speculative_tokens=k))
        engine.add_request(requests[-1])
        for _ in range(steps):
            engine.step()
    run(engine)
    for request, (which, _, _) in zip(requests, jobs, strict=True):
        key = case[0], which, rule, dtype
        if key not in texts:
            alone = dataclasses.replace(made, speculative_config=None, num_gpu_blocks_override=64)
            engine = engine_of(loaded, dataclasses.replace(alone, max_num_batched_tokens=128))
            engine.runner.rule = rule
            whole = Request(0, PROMPTS[which], params(which, rule, None), num_speculative_tokens=0)
            engine.add_request(whole)
            run(engine)
            texts[key] = whole.output_token_ids
        assert request.output_token_ids == texts[key]


def test_the_text_differs_from_that_of_an_unquantized_cache(
    pair: tuple[Path, dict[str, Path]], loaded: dict[EngineConfig, Weights]
) -> None:
    """Check that the text differs from that of a cache that is not quantized. Otherwise the tests of texts would show
    nothing."""
    found = set()
    for dtype in ("auto", "fp8_e4m3", "fp8_e5m2"):
        engine = engine_of(loaded, config(pair[0], None, k=0, kv_cache_dtype=dtype))
        requests = [
            Request(i, p, params(i, "rejection", None), num_speculative_tokens=0) for i, p in enumerate(PROMPTS)
        ]
        for request in requests:
            engine.add_request(request)
        run(engine)
        found.add(tuple(tuple(request.output_token_ids) for request in requests))
    assert len(found) == 3


def test_memory(pair: tuple[Path, dict[str, Path]], loaded: dict[EngineConfig, Weights]) -> None:
    """Check memory: an FP8 cache takes one byte per number, so more blocks fit, and tensors have the reported size."""
    target, drafts = pair
    per_block = {}
    for of_target, of_draft in (("auto", None), ("fp8", None), ("fp8", "auto"), ("auto", "fp8_e5m2")):
        made = settings_of(
            target, drafts, (of_target, of_draft, "close"), 2, "rejection", kv_cache_memory_bytes=1 << 20
        )
        engine = engine_of(loaded, dataclasses.replace(made, dtype="float32", enforce_eager=True))
        blueprint = Blueprint(engine.config, engine.weights)
        caches = [engine.runner.kv_cache, engine.drafter.kv_cache]  # type: ignore[union-attr]
        held = sum(layer.nbytes for cache in caches for layer in cache.layers)
        blocks = engine.scheduler.num_blocks
        assert held == (blocks + 1) * blueprint.bytes_per_block
        assert blocks == (1 << 20) // blueprint.bytes_per_block
        per_block[of_target, of_draft] = blueprint.bytes_per_block
    plain = per_block["auto", None]
    assert per_block["fp8", None] == plain // 4
    assert per_block["fp8", "auto"] == per_block["auto", "fp8_e5m2"] == plain // 4 + 3 * plain // 8


@pytest.mark.parametrize("name", CODES)
def test_native_codes_are_those_of_torch(pair: tuple[Path, dict[str, Path]], tmp_path: Path, name: str) -> None:
    """Check that native passes and eager ones store the same codes, in float32, with scales that are no powers of two;
    except a few whose numbers are about halfway between two codes."""
    scales = {f"model.layers.{i}.self_attn.{x}_scale": torch.tensor(s) for i in range(2) for x, s in KV_SCALES.items()}
    folder = quantized(pair[0], tmp_path / "scaled", scales)
    caches, logits = [], []
    for eager in (False, True):
        made = EngineConfig(model=str(folder), dtype="float32", kv_cache_dtype=name, enforce_eager=eager)
        model = load_weights(made).target
        assert isinstance(model, NativeDecoder) != eager
        feeder = Feeder(model)
        logits.append(feeder.feed_chunks(PROMPTS[5][:50], [30, 20]))
        layers = feeder.cache.layers if eager else tensors_of(feeder.cache).layers
        caches.append([layer.view(torch.uint8) for layer in layers])
    for ours, theirs in zip(*caches, strict=True):
        written = theirs != 0x7F  # torch's NaN, of what was never written
        assert written.any()
        differ = (ours != theirs) & written
        assert differ.float().mean() < 1e-3
        # A key or value with another code has the next one.
        assert ((ours[differ].int() - theirs[differ].int()).abs() <= 1).all()
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=0.1)


@pytest.mark.parametrize("layout", ["llama", "speculators"])
def test_a_head_with_a_quantized_cache(tmp_path: Path, layout: str) -> None:
    """Check that an EAGLE-3 head quantizes its KV cache as its target does, also in native passes; the text is that of
    K = 0."""
    target = make_checkpoint(tmp_path / "target", "qwen3", seed=1, vocab=VOCAB, layers=6)
    head = make_eagle3(tmp_path / "head", target, layout, seed=3)
    made = config(target, head, k=3, method="eagle3", dtype="float32", kv_cache_dtype="fp8")
    weights, texts = load_weights(made), []
    assert weights.drafter is not None
    assert weights.drafter.model.allocate_cache(1, 4).layers[0].dtype == FLOAT8_E4M3
    for k in (3, 0):
        engine = build_engine(made, weights)
        assert engine.runner.is_native
        requests = [Request(i, PROMPTS[i], params(i, "rejection", k), num_speculative_tokens=3) for i in range(4)]
        for request in requests:
            engine.add_request(request)
        run(engine)
        texts.append([request.output_token_ids for request in requests])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("value", ["bfloat16", "float16"])
def test_numbers_of_another_type_are_rejected(pair: tuple[Path, dict[str, Path]], value: str) -> None:
    target, drafts = pair
    names = "allowed: 'auto', 'fp8', 'fp8_e4m3' or 'fp8_e5m2'"
    reason = re.escape(f"kv_cache_dtype='{value}': not implemented for a model computed in float32; {names}")
    with pytest.raises(UnsupportedConfigError, match="^" + reason):
        load_weights(EngineConfig(model=str(target), dtype="float32", kv_cache_dtype=value))
    speculative = {"model": str(drafts["close"]), "num_speculative_tokens": 1, "kv_cache_dtype": value}
    with pytest.raises(UnsupportedConfigError, match="^speculative_config." + reason):
        load_weights(EngineConfig(model=str(target), dtype="float32", speculative_config=speculative))
    made = EngineConfig(model=str(target), dtype="bfloat16", kv_cache_dtype="bfloat16")
    assert load_weights(made).target.allocate_cache(1, 4).layers[0].dtype == BFLOAT16


def quantized(source: Path, folder: Path, scales: dict[str, torch.Tensor]) -> Path:
    """Copy the checkpoint `source` to `folder` in the format of compressed-tensors, with no weight quantized, and with
    the tensors `scales` added. Return `folder`."""
    shutil.copytree(source, folder)
    file = folder / "model.safetensors"
    save_file({**load_file(file), **scales}, file)
    layout = {"quant_method": "compressed-tensors", "config_groups": {}}
    edit_json(folder / "config.json", quantization_config=layout)
    return folder


@pytest.mark.parametrize("pattern", SCALE_NAMES)
def test_scales_of_a_checkpoint(pair: tuple[Path, dict[str, Path]], tmp_path: Path, pattern: str) -> None:
    """Check that the KV scales of a checkpoint are read under every tensor name that checkpoints use. A layer with one
    scale uses it for both K and V; a layer without scales uses 1. Without a quantized KV cache, the scales are not
    read."""
    names = {x: f"model.layers.{{}}.self_attn.{pattern.format(x=x)}" for x in "kv"}
    scales = {names["k"].format(0): torch.tensor(0.5), names["v"].format(0): torch.tensor([0.25])}
    folder = quantized(pair[0], tmp_path / "scaled", scales)

    def found(kv_cache_dtype: str) -> list[KVScales]:
        weights = load_weights(EngineConfig(model=str(folder), dtype="float32", kv_cache_dtype=kv_cache_dtype))
        return [layer.kv_scales for layer in weights.target.weights.layers]  # type: ignore[attr-defined]

    assert found("fp8")[0] == KVScales(0.5, 0.25)
    assert set(found("fp8")[1:]) == {UNSCALED}
    assert set(found("auto")) == {UNSCALED}
    shard = ShardedTensors(open_checkpoint(folder, None, "auto")[1], load_config(folder), Shard(1, 2))
    assert read_kv_scales(shard, "model.layers.0.self_attn.") == KVScales(0.5, 0.25), "each rank has the layer's"
    folder = quantized(pair[0], tmp_path / "one", {names["k"].format(1): torch.tensor(0.5)})
    assert found("fp8")[1] == KVScales(0.5, 0.5)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.tensor(0.0), "=0: must be finite and greater than 0"),
        (torch.tensor(-1.0), "=-1: must be finite and greater than 0"),
        (torch.tensor(torch.nan), "=nan: must be finite and greater than 0"),
        (torch.ones(2), " has shape (2,); must be one scale for the layer"),
    ],
)
def test_what_is_no_scale(pair: tuple[Path, dict[str, Path]], tmp_path: Path, value: torch.Tensor, reason: str) -> None:
    name = "model.layers.0.self_attn.v_scale"
    folder = quantized(pair[0], tmp_path / "wrong", {name: value})
    with pytest.raises(SpecrsError, match=re.escape(name + reason)):
        load_weights(EngineConfig(model=str(folder), dtype="float32", kv_cache_dtype="fp8"))
    load_weights(EngineConfig(model=str(folder), dtype="float32"))


@pytest.mark.parametrize("codes", FRACTIONS)
def test_scales_are_used(pair: tuple[Path, dict[str, Path]], tmp_path: Path, codes: torch.dtype) -> None:
    """Check that scales are used: scales that are far off change logits more than five times as much as scales of one
    half do."""
    name = next(name for name, dtype in CODES.items() if dtype == codes)

    def logits(k: float, v: float) -> torch.Tensor:
        scales = {
            f"model.layers.{i}.self_attn.{x}_scale": torch.tensor(scale)
            for i in range(3)
            for x, scale in (("k", k), ("v", v))
        }
        folder = quantized(pair[0], tmp_path / f"{k}-{v}", scales)
        weights = load_weights(EngineConfig(model=str(folder), dtype="float64", kv_cache_dtype=name))
        feeder = Feeder(weights.target)
        return feeder.feed_chunks(PROMPTS[2][:20], [9, 11])

    plain = logits(1.0, 1.0)
    near = logits(0.5, 0.5)
    far_k, far_v = logits(1e-3, 1.0), logits(1.0, 1e-3)
    assert (near - plain).abs().max() < 0.2 * (far_k - plain).abs().max()
    assert (near - plain).abs().max() < 0.2 * (far_v - plain).abs().max()
