"""GGUF files of Gemma 4, as llama.cpp's converter writes them: the checkpoint's numbers, blocks, text and tokenizer."""

from __future__ import annotations

import functools
import json
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf_families
import numpy as np
import pytest
import torch
from checkpoints import GEMMA4, make_gemma4
from gguf_families import rounded
from gguf_files import write_gguf, write_metadata
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from sentencepiece_files import corpus
from specrs import LLM, SamplingParams
from specrs.backends.cpu.weights import Rounding, load_native
from specrs.errors import CheckpointError
from specrs.models.decoder_weights import DecoderWeights
from specrs.models.loader import load_config
from specrs.models.torch_loader import load_model
from specrs.tokenizer import Tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, trainers
from transformers import GemmaTokenizer

from models.harness import Feeder

TOKENS = random.Random(11).choices(range(61), k=24)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
BY_32 = {"hidden_size_per_layer_input": 32}
"""Sizes of embeddings of which blocks of 32 inputs can be made."""
FIELDS = ("varied", "windows", "ropes", "experts", "layer_embedding", "final_logit_softcapping", "attention_scale")
FIELDS += ("embedding_multiplier", "num_layers", "tie_word_embeddings", "layer_scalars", "value_norm", "hidden_size")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf_gemma4")


@functools.cache
def make(folder: Path, variant: str) -> Path:
    sizes = BY_32 if GEMMA4[variant]["hidden_size_per_layer_input"] else {}
    return make_gemma4(folder / variant.replace(" ", "_"), variant, **sizes)


def logits(path: Path, load: Callable[..., Any] = load_native) -> torch.Tensor:
    return Feeder(load(path, dtype="float32")).feed_chunks(TOKENS, [5, 1, 18])


def close(found: torch.Tensor, expected: torch.Tensor, bound: float) -> bool:
    return bool((found - expected).abs().max() < bound * expected.abs().max())


@pytest.mark.parametrize("variant", GEMMA4)
def test_numbers_of_a_file_are_the_checkpoint_s(folder: Path, variant: str, tmp_path: Path) -> None:
    """Check that an F32 file has the logits and configuration of the checkpoint it was made from. Native logits are
    equal to the bit. torch's may add in another order where a matrix of the file does not start at a multiple of 64
    bytes."""
    source = make(folder, variant)
    path = write_gguf(source, tmp_path / "model.gguf")
    assert torch.equal(logits(path), logits(source))
    assert close(logits(path, load_model), logits(source, load_model), 1e-5)
    ours, theirs = load_config(path), load_config(source)
    for name in FIELDS:
        assert getattr(ours, name) == getattr(theirs, name), name


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "MXFP4"])
@pytest.mark.parametrize("variant", GEMMA4)
def test_blocks_of_a_file_are_their_numbers(folder: Path, variant: str, kind: str, tmp_path: Path) -> None:
    """Check that logits are those of a checkpoint with the dequantized weights of the file's blocks, embeddings of
    layers included."""
    source = make(folder, variant)
    path = write_gguf(source, tmp_path / "model.gguf", kind)
    numbers = shutil.copytree(source, tmp_path / "numbers")
    tensors = rounded(load_file(source / "model.safetensors"), kind)
    save_file(tensors, numbers / "model.safetensors", metadata={"format": "pt"})
    expected = logits(numbers, load_model)
    assert close(logits(path, load_model), expected, 1e-5)
    for activations, bound in (("fp32", 2e-5), ("int16", 1e-2)):
        found = logits(path, partial(load_native, rounding=Rounding(activations=activations)))
        assert close(found, expected, bound), activations


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0"])
@pytest.mark.parametrize("variant", ["gemma4", "gemma4, experts"])
def test_large_blocks_stay_packed(variant: str, kind: str, tmp_path: Path) -> None:
    """Check that native weights keep the file's blocks packed, also those of experts and of layers' embeddings, and
    that logits are near torch's."""
    sizes: dict[str, Any] = {"hidden": 256, "intermediate": 256, "head_dim": 64, "global_head_dim": 64, "layers": 4}
    sizes["final_logit_softcapping"] = 500.0  # less would cut off logits of random weights
    sizes |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 1, "kv_heads": 2}
    if "experts" in variant:
        sizes |= {"moe_intermediate_size": 256, "num_kv_shared_layers": 0}
    else:
        sizes |= {"hidden_size_per_layer_input": 256}
    path = write_gguf(make_gemma4(tmp_path / "source", variant, **sizes), tmp_path / "model.gguf", kind)
    expected = logits(path, load_model)
    assert expected.isfinite().all()
    assert expected.std() > 0.01
    model = load_native(path, rounding=Rounding(activations="int16"))
    assert close(Feeder(model).feed_chunks(TOKENS, [24]), expected, 1e-2)
    weights: DecoderWeights[Any, Any, Any] = model.weights
    kept = [weights.embedding, weights.layers[0].qkv.parts[0], weights.layers[0].gate_up.parts[0]]
    if weights.layer_embedding is not None:
        kept.append(weights.layer_embedding.table)
    if weights.layers[0].experts is not None:
        kept += [weights.layers[0].experts.gate_up[3].parts[1], weights.layers[0].experts.down[0].parts[0]]
    assert {matrix.kind for matrix in kept} == {kind}


def test_keys_of_sharing_layers_are_left_out(folder: Path, tmp_path: Path) -> None:
    """Check that k and v tensors of layers that attend to another layer's are ignored. Converters write them if the
    checkpoint has them."""
    source = make(folder, "gemma4")
    extra = {f"blk.4.attn_{x}.weight": np.full((32, 64), np.nan, np.float32) for x in "kv"}
    extra["blk.4.attn_k_norm.weight"] = np.full(16, np.nan, np.float32)
    path = write_gguf(source, tmp_path / "model.gguf", extra=extra)
    assert torch.equal(logits(path), logits(source))


def test_embeddings_of_more_ids_than_the_vocabulary(tmp_path: Path) -> None:
    source = make_gemma4(tmp_path / "source", "gemma4", vocab_size_per_layer_input=70)
    path = write_gguf(source, tmp_path / "model.gguf")
    assert load_config(path).layer_embedding == load_config(source).layer_embedding
    assert torch.equal(logits(path), logits(source))


@pytest.mark.parametrize(
    "leaf",
    [
        "router.scale",
        "router.per_expert_scale",
        "post_feedforward_layernorm_1.weight",
        "post_feedforward_layernorm_2.weight",
        "pre_feedforward_layernorm_2.weight",
        "post_per_layer_input_norm.weight",
        "layer_scalar",
        "k_norm.weight",
    ],
)
def test_a_converter_that_shifts_a_tensor_is_found(
    leaf: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a tensor of the file is read: with 1 added to its numbers, logits differ from the checkpoint's."""
    source, parts = make(folder, "gemma4, experts and embeddings"), gguf_families._parts

    def shifted(config: Any, architecture: str, name: str, numbers: torch.Tensor) -> Any:
        return parts(config, architecture, name, numbers + 1 if name.endswith(leaf) else numbers)

    monkeypatch.setattr(gguf_families, "_parts", shifted)
    assert not close(logits(write_gguf(source, tmp_path / "model.gguf")), logits(source), 1e-3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention__key_length_swa": 12}, r"value_length_swa=16: not implemented; allowed: 12"),
        ({"attention__value_length": 16}, r"attention\.value_length=16: not implemented; allowed: 32"),
        ({"rope__dimension_count": 16}, r"rope\.dimension_count=16: not implemented; allowed: 32"),
        ({"rope__dimension_count_swa": 8}, r"rope\.dimension_count_swa=8: not implemented; allowed: 16"),
        ({"attention__shared_kv_layers": 6}, r"shared_kv_layers=6: not implemented; allowed: a number of layers below"),
        (
            {"attention__shared_kv_layers": 5, "feed_forward_length": 96},
            r"num_kv_shared_layers=5: not implemented.*none before layer 1 is full",
        ),
        ({"attention__shared_kv_layers": 2}, r"feed_forward_length=\[96.*: not implemented; allowed: one size, and it"),
        ({"feed_forward_length": [96] * 5}, r"feed_forward_length=.*: not implemented; allowed: .* each of 6 layers"),
        ({"feed_forward_length": [96, 97] * 3}, r"feed_forward_length=.*: not implemented; allowed: one size"),
        ({"attention__head_count_kv": [2, 2, 0] * 2}, r"head_count_kv=\[2, 2, 0.*: not implemented; allowed: a number"),
        ({"attention__head_count_kv": 4}, r"layers\.0\.self_attn\.k_proj\.weight has shape \(32, 64\)"),
        ({"attention__sliding_window_pattern": [True] * 6}, r"layer_types='sliding_attention': not implemented"),
        ({"embedding_length_per_layer_input": 16}, r"model\.embed_tokens_per_layer\.weight has shape \(61, 192\)"),
        ({"expert_count": 5}, r"expert_used_count is missing"),
        ({"attention__key_length": None}, r"key_length|value_length"),
        ({"rope__scaling__type": "linear"}, r"rope\.scaling\.type='linear': contradicts rope_freqs\.weight"),
        ({"nextn_predict_layers": 1}, r"nextn_predict_layers=1: not implemented; allowed: 0"),
    ],
)
def test_metadata_that_is_rejected(fields: dict[str, Any], message: str, folder: Path, tmp_path: Path) -> None:
    """Check that the error for wrong metadata names the file, the field and its value."""
    replaced = {f"gemma4__{field}": value for field, value in fields.items()}
    path = write_gguf(make(folder, "gemma4"), tmp_path / "model.gguf", "F32", replaced)
    with pytest.raises(CheckpointError, match=rf"(?s)^{path}: .*{message}"):
        load_native(path)


@pytest.mark.parametrize("factors", [[1.0] * 4 + [8.0] * 12, [1.0] * 4 + [1e30] * 11, [2.0] + [1e30] * 15])
def test_factors_that_are_no_part_of_a_head_are_rejected(
    factors: list[float], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = gguf_families.file_tensors

    def changed(*args: Any) -> Any:
        made = {**dict(tensors(*args)), "rope_freqs.weight": np.array(factors, np.float32)}
        return iter(made.items())

    monkeypatch.setattr("gguf_files.file_tensors", changed)
    path = write_gguf(make(folder, "gemma4"), tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight: not implemented; allowed: 16 factors, of which"):
        load_native(path)


@pytest.mark.parametrize(
    "name", ["rope_freqs.weight", "per_layer_token_embd.weight", "blk.1.layer_output_scale.weight"]
)
def test_a_missing_tensor_is_named(name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = gguf_families.file_tensors
    monkeypatch.setattr("gguf_files.file_tensors", lambda *args: (each for each in tensors(*args) if each[0] != name))
    path = write_gguf(make(folder, "gemma4"), tmp_path / "model.gguf")
    named = {"blk.1.layer_output_scale.weight": "model.layers.1.layer_scalar"}.get(name, name)
    with pytest.raises(CheckpointError, match=rf"{named} is missing"):
        load_native(path)


SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>", "<|tool_call>"]


def write_gemma_tokenizer(path: Path, vocab_size: int = 400) -> GemmaTokenizer:
    """Write a tokenizer of the kind of Gemma 4's to the folder `path`: BPE of characters, with a token for each byte.
    Merges may join words and lines."""
    backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    fixed = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    lines = [f"{line}\n\n\n" for line in corpus() if line.isascii()]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=fixed, show_progress=False, max_token_length=8)
    backend.train_from_iterator(lines, trainer)
    model = json.loads(backend.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    made = GemmaTokenizer(vocab=model["vocab"], merges=merges, extra_special_tokens=SPECIAL[5:], add_bos_token=True)
    made.save_pretrained(path)
    return made


def gemma_fields(path: Path, **fields: Any) -> dict[str, Any]:
    """Metadata of the folder's tokenizer, as llama.cpp's converter writes it."""
    content = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = [6 if token.startswith("<0x") else 3 if token in SPECIAL else 1 for token in tokens]
    kinds[SPECIAL.index("<|tool_call>")] = 4
    made = {
        "model": "gemma4",
        "tokens": tokens,
        "scores": [-1000.0] * len(tokens),
        "token_type": kinds,
        "merges": [" ".join(merge) for merge in content["model"]["merges"]],
        "padding_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "unknown_token_id": 3,
        "mask_token_id": 4,
        "add_space_prefix": False,
        "add_bos_token": True,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in (made | fields).items()}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[GemmaTokenizer, Tokenizer]:
    """A tokenizer of transformers, and the one of a file made of it."""
    path = tmp_path_factory.mktemp("tokenizer")
    theirs = write_gemma_tokenizer(path)
    return theirs, Tokenizer(str(write_metadata(path / "model.gguf", gemma_fields(path))))


TEXTS = st.one_of(
    st.text("ab \n", max_size=40),
    st.text("abcdefx() \t\n\u00e9\u65e5\u0301\u2581\U0001f389\x00", max_size=20),
    st.lists(st.sampled_from([*corpus()[:40], *SPECIAL[2:3], *SPECIAL[5:], "\n\n\n\n"]), max_size=4).map("".join),
    st.text(max_size=10),
)


@given(text=TEXTS)
@example("")
@example("   a  b   ")
@example("a\n\n\n\n  b \U0001f389\u00e9")
@example("<bos><|turn>user\nhi<turn|>\n")
def test_ids_and_text_are_those_of_transformers(pair: tuple[GemmaTokenizer, Tokenizer], text: str) -> None:
    theirs, ours = pair
    ids = theirs.encode(text)
    assert ours.encode(text) == ids
    assert ids[:1] == [2]
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


def test_a_text_begins_with_bos_whatever_the_file_says(tmp_path: Path) -> None:
    write_gemma_tokenizer(tmp_path)
    path = write_metadata(tmp_path / "model.gguf", gemma_fields(tmp_path, add_bos_token=False, pre="gemma4"))
    assert Tokenizer(str(path)).encode("a")[0] == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"merges": None}, r"tokenizer\.ggml\.merges=None: not implemented; allowed: a list of strings"),
        ({"merges": ["a \u20ac"]}, r"tokenizer\.ggml\.merges\[0\]='a \u20ac': no tokens of the vocabulary"),
        ({"add_space_prefix": True}, r"tokenizer\.ggml\.add_space_prefix=True: not implemented; allowed: false"),
        ({"bos_token_id": None}, r"tokenizer\.ggml\.bos_token_id=None: not implemented; allowed: an id"),
        (
            {"tokens": ["a", "b", "a"]},
            r"tokenizer\.ggml\.tokens='a': not implemented; allowed: each token once; or pass",
        ),
        ({"model": "gemma5"}, r"tokenizer\.ggml\.model='gemma5': not implemented; allowed: .* or 'gemma4'"),
    ],
)
def test_a_wrong_tokenizer_is_named(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_gemma_tokenizer(tmp_path)
    path = write_metadata(tmp_path / "model.gguf", gemma_fields(tmp_path, **fields))
    with pytest.raises(CheckpointError, match=message):
        Tokenizer(str(path))


@pytest.mark.parametrize("variant", ["gemma4", "gemma4, experts and embeddings"])
def test_text_of_a_file_is_the_checkpoint_s(variant: str, tmp_path: Path) -> None:
    """Check that the text of a GGUF file equals that of its checkpoint, with the file's own tokenizer, with and without
    drafts."""
    source = make_gemma4(tmp_path / "source", variant, vocab=400, eos_token_id=1, with_tokenizer=False)
    write_gemma_tokenizer(source)
    replaced: dict[str, Any] = {"tokenizer.ggml.pre": None} | gemma_fields(source)
    path = write_gguf(source, tmp_path / "model.gguf", replaced=replaced)
    prompts = ["the cat sat\n\n", "def range(x):"]
    expected = LLM(str(source), max_model_len=64).generate(prompts, GREEDY, use_tqdm=False)
    for config in (None, {"method": "ngram", "num_speculative_tokens": 3}):
        found = LLM(str(path), max_model_len=64, speculative_config=config).generate(prompts, GREEDY, use_tqdm=False)
        for own, theirs in zip(found, expected, strict=True):
            assert own.prompt_token_ids == theirs.prompt_token_ids
            assert own.outputs[0].text == theirs.outputs[0].text
    assert load_config(path).eos_token_ids == (1, 6)
