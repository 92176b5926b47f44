"""Gemma 4's text model: transformers' logits, however tokens are fed, and its fields in both spellings."""

from __future__ import annotations

import functools
import json
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import GEMMA4, make_gemma4
from gemma4_reference import float64, logits
from safetensors.torch import load_file, save_file
from specrs.arrays import FLOAT8_E4M3
from specrs.backends.cpu.weights import Rounding, load_native
from specrs.core import CpuPool
from specrs.errors import SpecrsError
from specrs.kernels.frequencies import signed_frequencies
from specrs.models.config import parse_config
from specrs.models.native_decoder import NativeDecoder
from specrs.models.rope import frequencies
from specrs.models.tensors import tensor_shapes
from specrs.models.torch_loader import load_model
from torch import Tensor
from transformers import Gemma4TextConfig

from models.harness import Feeder

VOCAB = 61
_random = random.Random(5)
TOKENS = [_random.randrange(VOCAB) for _ in range(40)]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gemma4")


@functools.cache
def make(folder: Path, variant: str) -> Path:
    return make_gemma4(folder / variant.replace(" ", "_"), variant)


@functools.cache
def reference(path: Path) -> Tensor:
    return logits(path, TOKENS)


@pytest.mark.parametrize("variant", GEMMA4)
@pytest.mark.parametrize("chunks", [[40], [1] * 40, [3, 17, 20], [16, 8, 1, 15]], ids=str)
def test_the_logits_of_transformers(folder: Path, variant: str, chunks: list[int]) -> None:
    path = make(folder, variant)
    with float64():
        found = Feeder(load_model(path, dtype="float64"), block_size=4, max_len=44).feed_chunks(TOKENS, chunks)
    # The softmax of a router is in float32 in both.
    torch.testing.assert_close(found, reference(path), rtol=0, atol=1e-6 if "experts" in variant else 1e-10)


@functools.cache
def native(path: Path, dtype: str = "float32") -> NativeDecoder:
    return load_native(path, dtype=dtype)


@pytest.mark.parametrize("variant", GEMMA4)
def test_native_logits_are_near(folder: Path, variant: str) -> None:
    path = make(folder, variant)
    found = Feeder(native(path), block_size=4, max_len=44).feed_chunks(TOKENS, [40])
    torch.testing.assert_close(found.double(), reference(path), rtol=0, atol=1e-4)


@pytest.mark.parametrize("variant", GEMMA4)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_native_bits_depend_on_no_chunk_and_no_thread(folder: Path, variant: str, threads: int) -> None:
    model = native(make(folder, variant))
    whole = Feeder(model, block_size=4, max_len=44).feed_chunks(TOKENS, [40])
    on_pool = model.on_pool(CpuPool(threads))
    found = Feeder(on_pool, block_size=4, max_len=44, seed=1).feed_chunks(TOKENS, [1, 2, 17, 5, 15])
    assert torch.equal(found, whole)


@pytest.mark.parametrize("variant", GEMMA4)
@pytest.mark.parametrize("quantization", ["int8", "int4", "q8_0"])
def test_native_quantized_logits_are_near(folder: Path, variant: str, quantization: str) -> None:
    """Check native logits of quantized weights against torch's with the dequantized ones. Activations rounded to int16
    may send a row to other experts, where two of them score nearly the same: one row of 40 at most."""
    path = make(folder, variant)
    with float64():
        theirs = load_model(path, dtype="float64", quantization=quantization)
        expected = Feeder(theirs, block_size=4, max_len=44).feed_chunks(TOKENS, [40])
    for activations, bound, most in (("fp32", 1e-4, 0), ("int16", 1e-2, int("experts" in variant))):
        ours = load_native(path, quantization=quantization, rounding=Rounding(activations=activations))
        found = Feeder(ours, block_size=4, max_len=44).feed_chunks(TOKENS, [40])
        far = ((found.double() - expected).abs() > bound).any(dim=1)
        assert int(far.sum()) <= most, activations
    assert (expected - reference(path)).abs().max() > 1e-2


@pytest.mark.parametrize("variant", GEMMA4)
def test_native_argmax_is_taken_after_the_cap(folder: Path, variant: str) -> None:
    """Check that native argmax is taken after the cap on logits: ties that the cap makes go to the lowest id."""
    model = load_native(make_gemma4(folder / f"capped_{len(variant)}", variant, final_logit_softcapping=1e-3))
    hidden = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)).mul(3).numpy()
    logits = model.compute_logits(hidden)
    ids, top = model.compute_argmax(hidden)
    assert (logits.argmax(1) == ids).all()
    assert (logits.max(1) == top).all()
    assert ((logits == top[:, None]).sum(1) > 1).any()


def _other_source(w: Any) -> Any:
    """Plant a mistake: a sharing layer with a window attends to layer 0's keys and values instead of layer 1's."""
    varied = tuple(replace(sizes, source=0) if sizes.source == 1 else sizes for sizes in w.config.varied)
    return replace(w, config=replace(w.config, varied=varied))


def _no_softcap(w: Any) -> Any:
    return replace(w, config=replace(w.config, final_logit_softcapping=None))


def _neighbours_embedding(w: Any) -> Any:
    """Plant a mistake: each layer adds the embedding of its neighbour."""
    own = w.layer_embedding
    rolled = own.table.roll(8, dims=1) if isinstance(own.table, Tensor) else np.roll(own.table, 8, axis=1)
    return replace(w, layer_embedding=replace(own, table=rolled))


def _other_rope(w: Any) -> Any:
    """Plant a mistake: a full layer has frequencies without zeros, as a layer with a window has."""
    ropes = tuple((theta, None) for theta, _ in w.config.ropes)
    made = [signed_frequencies(frequencies(rope, w.config.rotary_dim_of(i))) for i, rope in enumerate(ropes)]
    rotaries = tuple(torch.from_numpy(rotary) if isinstance(w.rotary, Tensor) else rotary for rotary in made)
    return replace(w, config=replace(w.config, ropes=ropes), rotaries=rotaries)


@pytest.mark.parametrize("mistake", [_other_source, _no_softcap, _neighbours_embedding, _other_rope])
def test_a_planted_mistake_shows(folder: Path, mistake: Callable[[Any], Any]) -> None:
    path = make(folder, "gemma4")
    with float64():
        model = load_model(path, dtype="float64")
        found = Feeder(replace(model, weights=mistake(model.weights)), block_size=4, max_len=44)
        assert (found.feed_chunks(TOKENS, [40]) - reference(path)).abs().max() > 0.1
    native_found = Feeder(NativeDecoder(mistake(native(path).weights)), block_size=4, max_len=44)
    assert (native_found.feed_chunks(TOKENS, [40]) - reference(path)).abs().max() > 0.1


def test_both_spellings_of_layers_that_differ(folder: Path) -> None:
    """Check the two ways in which config.json describes layers that differ: transformers writes `per_layer_config`,
    published files have `global_head_dim`."""
    raw = json.loads((make(folder, "gemma4, all of it") / "config.json").read_text(encoding="utf-8"))
    assert "per_layer_config" in raw
    published = {key: value for key, value in raw.items() if key != "per_layer_config"}
    published |= {"global_head_dim": 32, "num_global_key_value_heads": 1}
    assert parse_config(published) == parse_config(raw)
    plain = parse_config(published | {"attention_k_eq_v": False}).varied
    assert [sizes.num_kv_heads for sizes in plain] == [2] * 6
    sizes = parse_config(raw).varied
    assert [s.head_dim for s in sizes] == [16, 16, 32, 16, 16, 32]
    assert [s.num_kv_heads for s in sizes] == [2, 2, 1, 2, 2, 1]
    assert [s.source for s in sizes] == [None, None, None, None, 3, 2]
    assert [s.keys_are_values for s in sizes] == [False, False, True, False, False, False]


def test_defaults_are_transformers() -> None:
    raw = Gemma4TextConfig().to_dict() | {"architectures": ["Gemma4ForCausalLM"]}
    bare = {
        field: raw[field]
        for field in (
            "architectures",
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
            "eos_token_id",
        )
    }
    assert parse_config(bare) == parse_config(raw)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all': not implemented"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers=5: not implemented.*none before layer 1 is full_attention"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers=6: must be an integer from 0 to 5"),
        ({"vocab_size_per_layer_input": 60}, "vocab_size_per_layer_input=60: not implemented; allowed: at least"),
        ({"per_layer_config": {"2": {"head_dim": 31}}}, "head_dim of layer 2=31: must be even"),
        ({"per_layer_config": {"2": {"sliding_window": 3}}}, "per_layer_config.2.sliding_window=3: not implemented"),
        (
            {"per_layer_config": {"7": {"head_dim": 32}}},
            "per_layer_config='7': not implemented; allowed: layers from 0",
        ),
        ({"per_layer_config": {"2": {"head_dim": 64}}}, "the heads of layer 2, whose keys and values layer 5 shares"),
        (
            {"layer_types": ["sliding_attention"] * 6},
            "layer_types='sliding_attention': not implemented; allowed: 'full",
        ),
    ],
)
def test_what_is_not_implemented_is_named(folder: Path, fields: dict[str, Any], message: str) -> None:
    raw = json.loads((make(folder, "gemma4") / "config.json").read_text(encoding="utf-8"))
    with pytest.raises(SpecrsError, match=message):
        parse_config(raw | fields)


def test_keys_of_sharing_layers_are_left_out(folder: Path, tmp_path: Path) -> None:
    """Check that k and v tensors of layers that share another layer's are ignored; published files may hold them."""
    path = shutil.copytree(make(folder, "gemma4"), tmp_path / "copy")
    tensors = load_file(path / "model.safetensors")
    attention = "model.layers.4.self_attn."
    tensors |= {f"{attention}{x}_proj.weight": torch.full((32, 64), torch.nan) for x in "kv"}
    tensors[f"{attention}k_norm.weight"] = torch.full((16,), torch.nan)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with float64():
        found = Feeder(load_model(path, dtype="float64"), block_size=4, max_len=44).feed_chunks(TOKENS, [40])
    torch.testing.assert_close(found, reference(make(folder, "gemma4")), rtol=0, atol=1e-10)


def test_sharing_layers_have_the_scales_of_their_sources(folder: Path, tmp_path: Path) -> None:
    """Check that layers read codes of an FP8 cache with the scales with which their sources write them."""
    path = shutil.copytree(make(folder, "gemma4"), tmp_path / "scaled")
    tensors = load_file(path / "model.safetensors")
    for i in range(3):
        tensors |= {f"model.layers.{i}.self_attn.{x}_scale": torch.tensor(i + 0.5) for x in "kv"}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    raw = json.loads((path / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "compressed-tensors", "config_groups": {}}
    (path / "config.json").write_text(json.dumps(raw))
    weights = load_model(path, dtype="float32", cache_dtype=FLOAT8_E4M3).weights
    sources = [i if sizes.source is None else sizes.source for i, sizes in enumerate(weights.config.varied)]
    assert sources[3:] == [1, 1, 2]
    assert [layer.kv_scales for layer in weights.layers] == [(i + 0.5, i + 0.5) for i in sources]


@pytest.mark.parametrize("variant", GEMMA4)
def test_parameters_are_counted(folder: Path, variant: str) -> None:
    """Check the number of parameters that a row reads: all but the input embeddings of layers, of which it reads one
    row."""
    model = load_model(make(folder, variant))
    total = sum(math.prod(shape) for shape in tensor_shapes(model.config).values())
    size = 0 if model.config.layer_embedding is None else 6 * 8 * VOCAB
    assert model.config.num_parameters_read(10**9) == total - size


@pytest.mark.parametrize("variant", GEMMA4)
def test_only_layers_with_keys_take_memory(folder: Path, variant: str) -> None:
    model = load_model(make(folder, variant))
    cache = model.allocate_cache(5, 4)
    own = {layer.data_ptr(): layer for layer in cache.layers}.values()
    assert len(own) == sum(sizes.source is None for sizes in model.config.varied)
    assert sum(layer[0].nbytes for layer in own) == model.bytes_per_block(4)
    assert [layer.shape[-1] for layer in cache.layers] == [16, 16, 32] * 2
