"""GGUF files: numbers, names, configuration, tokenizer, logits, packed weights; damaged and unknown files."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from checkpoints import LLAMA3_ROPE, make_checkpoint, write_tokenizer
from gguf_files import WRITTEN, dequantized, gguf_name, with_tokens, write_gguf, write_metadata
from safetensors.torch import load_file, save_file
from specrs import LLM, SamplingParams
from specrs.arrays import BFLOAT16, FLOAT32
from specrs.backends.cpu.weights import Rounding, load_native
from specrs.errors import CheckpointError, TokenizerMismatchError, UnsupportedModelError
from specrs.models.gguf.checkpoint import GGUFCheckpoint, gguf_config, gguf_path
from specrs.models.gguf.file import open_gguf
from specrs.models.gguf.tokenizer import gguf_tokenizer
from specrs.models.gguf.types import TYPES
from specrs.models.loader import load_config
from specrs.models.quantization.grouped import E2M1, Grouped, Scaled8, WithMinima
from specrs.models.stored import StackedWeight
from specrs.models.torch_loader import load_model
from specrs.tokenizer import Tokenizer, check_same_tokenizer, shared_ids
from transformers import CohereTokenizer, GPT2Tokenizer, GPTNeoXTokenizer, Qwen2Tokenizer
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from models.harness import Feeder

K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
GROUPED = ("Q8_0", "Q5_0", "Q3_K", "Q6_K", "Q4_0", "IQ4_NL", "IQ4_XS", "MXFP4")
WITH_MINIMA = ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")
PROMPTS = [[1, 2, 3], [40, 50, 60, 70]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SIZES = {"hidden": 256, "intermediate": 512, "head_dim": 64, "kv_heads": 2, "layers": 1}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose rows are whole blocks of 256."""
    return make_checkpoint(tmp_path_factory.mktemp("wide"), "llama", initializer_range=0.05, **SIZES)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one layer with a byte-level vocabulary of 397 tokens."""
    return make_checkpoint(tmp_path_factory.mktemp("small"), "qwen3", vocab=400, layers=1)


def numbers_of(path: Path, source: Path) -> Path:
    """Write a float64 checkpoint next to `path` with the numbers that the package `gguf` reads. Return its folder."""
    folder = path.with_suffix(".numbers")
    shutil.copytree(source, folder)
    checkpoint, tensors = GGUFCheckpoint(path), {}
    for name in load_file(source / "model.safetensors"):
        tensors[name] = dequantized(path, gguf_name(name))
        order = checkpoint._places[name].rows
        if order is not None:
            tensors[name] = tensors[name][order]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def logits(source: Path) -> torch.Tensor:
    return Feeder(load_model(source, dtype="float64")).feed_chunks([3, 1, 4, 1, 5, 9, 2, 6], [8])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_plain_numbers_are_the_checkpoint(family: str, tmp_path: Path) -> None:
    """Check that an F32 GGUF file gives the checkpoint's logits, bit for bit. This covers the config, tensor names and
    the order of the rows of q and k."""
    fields = {"attention_bias": True} if family == "llama" else {}
    source = make_checkpoint(tmp_path / "source", family, tie=family == "llama", **fields)
    path = write_gguf(source, tmp_path / "model.gguf")
    theirs, ours = load_config(source), load_config(path)
    for name in ("architecture", "vocab_size", "rms_norm_eps", "rope_theta", "eos_token_ids", "o_bias", "head_dim"):
        assert getattr(theirs, name) == getattr(ours, name), name
    assert torch.equal(logits(path), logits(source))


def test_llama3_scaling_is_found_in_its_factors(tmp_path: Path) -> None:
    rope = LLAMA3_ROPE | {"original_max_position_embeddings": 8192, "rope_theta": 500000.0, "factor": 8.0}
    source = make_checkpoint(tmp_path / "source", "llama", rope_parameters=rope, max_position_embeddings=16384)
    path = write_gguf(source, tmp_path / "model.gguf")
    assert load_config(path).rope_scaling == load_config(source).rope_scaling
    other = make_checkpoint(tmp_path / "other", "llama", rope_parameters=LLAMA3_ROPE)
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight: not implemented; allowed: the factors of"):
        load_config(write_gguf(other, tmp_path / "other.gguf"))


@pytest.mark.parametrize("kind", [*WRITTEN, *K_QUANTS, "IQ4_NL", "IQ4_XS"])
def test_logits_are_those_of_the_package_s_numbers(kind: str, wide: Path, tmp_path: Path) -> None:
    """Check logits of each type against the numbers of the package `gguf`: to the bit in float64; native passes within
    rounding."""
    path = write_gguf(wide, tmp_path / "model.gguf", kind)
    expected = logits(numbers_of(path, wide))
    assert torch.equal(logits(path), expected)
    size = expected.abs().max()
    for exact, bound in ((True, 2e-5), (False, 2e-2)):
        model = load_native(path, dtype="float32", rounding=Rounding(exact, "fp32"))
        found = Feeder(model).feed_chunks([3, 1, 4, 1, 5, 9, 2, 6], [8])
        assert (found - expected).abs().max() < bound * size
        weight = model.weights.layers[0].qkv
        assert isinstance(weight, StackedWeight)
        halved = kind == "BF16" or not (exact or kind in ("F32", "F16"))
        assert {part.dtype for part in weight.parts} == {BFLOAT16 if halved else FLOAT32}


@pytest.mark.parametrize("kind", [*GROUPED, *WITH_MINIMA])
def test_integers_are_the_package_s_numbers(kind: str, wide: Path, tmp_path: Path) -> None:
    """Check that integers times scales, less minima, which GPU kernels read, equal the weights that the package gguf
    dequantizes."""
    path = write_gguf(wide, tmp_path / "model.gguf", kind)
    checkpoint = GGUFCheckpoint(path)
    for name in load_file(wide / "model.safetensors"):
        if name.endswith("norm.weight"):
            continue
        grouped, order = checkpoint.raw(name), checkpoint._places[name].rows
        assert not isinstance(grouped, Scaled8)
        assert grouped is not None
        grouped = grouped.grouped() if isinstance(grouped, E2M1) else grouped
        expected = dequantized(path, gguf_name(name)).numpy()
        expected = expected if order is None else expected[order]
        assert isinstance(grouped, WithMinima if kind in WITH_MINIMA else Grouped)
        assert np.array_equal(grouped.numbers(), expected)
        assert np.array_equal(checkpoint.mapped(name), expected)


def test_types_are_those_of_the_package() -> None:
    theirs = {int(kind): (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    assert theirs == TYPES


def test_a_header_of_a_large_vocabulary(tmp_path: Path) -> None:
    """Check a header with a vocabulary of 262,144 tokens with scores and types, as Gemma's: every kind of array, to the
    last element."""
    count = 1 << 18
    rng = np.random.default_rng(0)
    tokens = [f"{i:x}\u2581{'é' * (i % 7)}" for i in range(count)]
    scores, kinds = rng.standard_normal(count, dtype=np.float32), rng.integers(1, 7, count, dtype=np.int32)
    metadata = {"tokens": tokens, "scores": scores.tolist(), "token_type": kinds.tolist(), "add": [True, False]}
    path = write_metadata(tmp_path / "large.gguf", {f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
    found = open_gguf(path).metadata
    assert found["tokenizer.ggml.tokens"] == tokens
    assert np.array_equal(np.array(found["tokenizer.ggml.scores"], np.float32), scores)
    assert found["tokenizer.ggml.token_type"] == kinds.tolist()
    assert found["tokenizer.ggml.add"] == [True, False]


def test_types_that_need_the_package(wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check files without the package `gguf`. With default activations all of them load. With fp32 activations, a type
    that only the package dequantizes is rejected with what to install."""
    paths = {kind: write_gguf(wide, tmp_path / f"{kind}.gguf", kind) for kind in ("BF16", "Q4_0", "Q6_K", "Q4_K")}
    monkeypatch.setitem(sys.modules, "gguf", None)
    for kind in ("BF16", "Q4_0", "Q6_K"):
        load_native(paths[kind], rounding=Rounding(activations="fp32"))
    with pytest.raises(UnsupportedModelError, match=r"^model=.*Q4_K need the package gguf.*pip install gguf"):
        load_native(paths["Q4_K"], rounding=Rounding(activations="fp32"))
    for path in paths.values():
        load_native(path)


def test_tokenizer_is_the_checkpoint_s(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", vocab=400, layers=1)
    path = write_gguf(source, tmp_path / "model.gguf", tokenizer__chat_template="{{ messages[0]['content'] }}!")
    ours, theirs = Tokenizer(str(path)), Tokenizer(str(source))
    check_same_tokenizer(ours, theirs)
    text = "Don't 123 naïve<|endoftext|>  \n日本"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decoder.decode(ours.encode(text)) == theirs.decoder.decode(theirs.encode(text))
    assert ours.special_tokens_map["eos_token"] == "<|endoftext|>"
    assert ours.render_chat([{"role": "user", "content": "hi"}]) == "hi!"
    bos = write_gguf(
        source, tmp_path / "bos.gguf", tokenizer__ggml__add_bos_token=True, tokenizer__ggml__bos_token_id=0
    )
    assert Tokenizer(str(bos)).encode("a") == [0, *theirs.encode("a")]
    eos = write_gguf(source, tmp_path / "eos.gguf", tokenizer__ggml__add_eos_token=True)
    assert Tokenizer(str(eos)).encode("a") == [*theirs.encode("a"), 0]
    both = write_gguf(
        source,
        tmp_path / "both.gguf",
        tokenizer__ggml__add_bos_token=True,
        tokenizer__ggml__bos_token_id=5,
        tokenizer__ggml__add_eos_token=True,
    )
    assert Tokenizer(str(both)).encode("a") == [5, *theirs.encode("a"), 0]
    assert Tokenizer(str(both)).encode("a", add_special_tokens=False) == theirs.encode("a")


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "lfm2", "qwen2", "tekken", "gpt-4o"])
def test_text_is_split_as_the_file_says(pre: str, tmp_path: Path) -> None:
    """Check how text is split: each `pre` treats digits, contractions and line breaks differently; expressions are
    those of the models' tokenizer.json."""
    from specrs.models.gguf.byte_level import SPLITS
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    source = make_checkpoint(tmp_path / "source", vocab=400, layers=1)
    path = write_gguf(source, tmp_path / "model.gguf", tokenizer__ggml__pre=pre)
    made = Tokenizer(str(path)).backend.pre_tokenizer
    pieces = [piece for piece, _ in made.pre_tokenize_str("it's 1234\n\n  Go")]
    if pre == "smollm":
        assert {"1", "2", "3", "4"} <= set(pieces)
    else:
        assert SPLITS[pre] == GGUF_PRE_TOKENIZER_SPLITS[pre]


def test_marks_belong_to_words_of_qwen35() -> None:
    from specrs.models.gguf.byte_level import SPLITS
    from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

    assert SPLITS["qwen35"] == PRETOKENIZE_REGEX != SPLITS["qwen2"]


@pytest.mark.parametrize(
    ("pre", "theirs"),
    [
        ("qwen2", Qwen2Tokenizer),
        ("qwen35", Qwen3_5Tokenizer),
        ("deepseek-r1-qwen", Qwen2Tokenizer),
        ("olmo", GPTNeoXTokenizer),
        ("mpt", GPTNeoXTokenizer),
        ("command-r", CohereTokenizer),
        ("gpt-2", GPT2Tokenizer),
        ("starcoder", GPT2Tokenizer),
    ],
)
def test_text_is_normalized_as_by_the_class_of_transformers(pre: str, theirs: Any, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", vocab=400, layers=1)
    ours = Tokenizer(str(write_gguf(source, tmp_path / "model.gguf", tokenizer__ggml__pre=pre)))
    normalizer, text = theirs().backend_tokenizer.normalizer, "e\u0301 ﬁ \u212b"
    expected = text if normalizer is None else normalizer.normalize_str(text)
    assert ours.decode(ours.encode(text)) == expected


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tokenizer__ggml__pre", "marsian", r"tokenizer\.ggml\.pre='marsian': not implemented; allowed: llama3"),
        ("tokenizer__ggml__pre", None, r"tokenizer\.ggml\.pre=None: not implemented"),
        ("tokenizer__ggml__model", "rwkv", r"tokenizer\.ggml\.model='rwkv': not implemented; allowed: 'gpt2'"),
        ("tokenizer__ggml__bos_token_id", 9999, r"tokenizer\.ggml\.bos_token_id=9999: not implemented; .* id below"),
        ("tokenizer__ggml__add_bos_token", True, r"tokenizer\.ggml\.bos_token_id=None: not impl.* add_bos_token=true"),
        ("tokenizer__ggml__merges", ["q zz"], r"tokenizer\.ggml\.merges\[0\]='q zz': no tokens of the vocabulary"),
    ],
)
def test_tokenizers_that_are_rejected(field: str, value: object, message: str, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", layers=1)
    path = write_gguf(source, tmp_path / "model.gguf", **{field: value})
    with pytest.raises(CheckpointError, match=message):
        Tokenizer(str(path))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "general__architecture",
            "rwkv7",
            r"general\.architecture='rwkv7': not implemented; allowed: llama, mi",
        ),
        ("qwen3__rope__scaling__type", "ntk", r"qwen3\.rope\.scaling\.type='ntk': not implemented; allowed: 'none'"),
        ("qwen3__attention__scale", 0.5, r"model\.gguf: qwen3\.attention\.scale=0\.5: not implemented; allowed: 0"),
        ("qwen3__future__field", 1, r"model\.gguf: qwen3\.future\.field=1: not implemented; allowed: a file without"),
        ("qwen3__expert_count", 8, r"qwen3\.expert_count=8: not implemented; allowed: 0"),
        ("qwen3__attention__sliding_window", 64, r"sliding_window=64: not implemented"),
        ("qwen3__attention__value_length", 16, r"value_length=16: not implemented; allowed: 48"),
        ("qwen3__attention__head_count_kv", [3, 1], r"head_count_kv=\[3, 1\]: not implemented; allowed: the same"),
        ("qwen3__block_count", None, r"qwen3\.block_count is missing"),
        ("qwen3__block_count", 3, r"model\.layers\.2\..* are missing"),
        ("qwen3__block_count", 1, r"model\.layers\.1\..* are not part of this architecture"),
        ("qwen3__feed_forward_length", 96, r"mlp\.\w+\.weight has shape"),
        (
            "split__count",
            2,
            r"model\.gguf: split\.count=2: must be 1 or missing; parts of a model are called NAME-0",
        ),
        ("split__count", "two", r"model\.gguf: split\.count='two': must be 1 or missing"),
        ("general__alignment", "x", r"general\.alignment='x': must be a power of two"),
        ("qwen3__embedding_length", "wide", r"model\.gguf: qwen3\.embedding_length='wide': must be an integer of at"),
        ("qwen3__attention__head_count", 0, r"qwen3\.attention\.head_count=0: must be an integer of at least 1"),
        ("qwen3__rope__freq_base", "base", r"qwen3\.rope\.freq_base='base': must be a finite number greater than 0"),
        ("tokenizer__ggml__eos_token_id", "end", r"tokenizer\.ggml\.eos_token_id='end': must be an id"),
    ],
)
def test_models_that_are_rejected(field: str, value: object, message: str, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", with_tokenizer=False)
    path = write_gguf(source, tmp_path / "model.gguf", **{field: value})
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        load_model(path)


@pytest.mark.parametrize(
    ("tokens", "fields", "ends"),
    [
        *(
            ({50: (name, 3)}, {}, (0, 50))
            for name in (
                *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"),
                *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<end_of_turn>", "<end_of_utterance>"),
                *(
                    "<EOT>",
                    "_<EOT>",
                    "[EOT]",
                    "<\uff5cend\u2581of\u2581sentence\uff5c>",
                    "<|fim_pad|>",
                    "<|repo_name|>",
                    "<|file_sep|>",
                ),
            )
        ),
        ({50: ("<|im_end|>", 4), 51: ("<|eot_id|>", 3)}, {}, (0, 50, 51)),
        ({50: ("<EOT>", 1)}, {}, (0,)),  # ordinary text
        ({50: ("</s>", 4), 51: ("<|im_start|>", 3)}, {}, (0,)),
        ({}, {"tokenizer__ggml__eot_token_id": 7, "tokenizer__ggml__eom_token_id": 8}, (0, 7, 8)),
        ({}, {"tokenizer__ggml__fim_sep_token_id": 9}, (0, 9)),
        # `<|end|>` ends a message of several
        ({50: ("<|end|>", 3), 51: ("<|return|>", 3), 52: ("<|call|>", 3)}, {}, (0, 51, 52)),
        ({50: ("<|end|>", 3), 51: ("<|flush|>", 3), 52: ("<|calls|>", 3)}, {}, (0, 51, 52)),
        ({50: ("<|end|>", 3), 51: ("<|return|>", 3)}, {}, (0, 50, 51)),
    ],
)
def test_ends_of_a_text(
    tokens: dict[int, tuple[str, int]], fields: dict[str, Any], ends: tuple[int, ...], small: Path, tmp_path: Path
) -> None:
    """Check end ids: those that the file names and, as in llama.cpp, tokens whose names mean an end."""
    replaced = with_tokens(small, {0: ("<|start|>", 3)} | tokens)
    assert load_config(write_gguf(small, tmp_path / "model.gguf", "F32", replaced, **fields)).eos_token_ids == ends


def test_a_folder_that_holds_only_gguf_files(small: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    assert gguf_path(folder) is None
    path = write_gguf(small, folder / "b-Q8_0.gguf", "Q8_0")
    assert gguf_path(folder) == path
    assert load_config(folder) == load_config(path)
    shutil.copy(small / "config.json", folder)  # which many repositories of GGUF files have, some without content
    assert LLM(str(folder), max_model_len=32).generate([[1, 2, 3]], GREEDY) != []
    write_gguf(small, folder / "a-Q4_0.gguf", "Q4_0")
    message = (
        r"^model='.*folder': holds several GGUF files; name one of them, for example .*: a-Q4_0\.gguf, b-Q8_0\.gguf$"
    )
    for read in (load_config, lambda source: Tokenizer(str(source)), lambda source: LLM(str(source))):
        with pytest.raises(CheckpointError, match=message):
            read(folder)
    shutil.copy(small / "model.safetensors", folder)
    assert gguf_path(folder) is None


@pytest.mark.parametrize("padding", [(0, 16), (16, 0), (16, 32)])
def test_padding_is_no_difference_between_vocabularies(padding: tuple[int, int], tmp_path: Path) -> None:
    """Check that padding makes no difference between vocabularies. A draft may have more or fewer rows than the target;
    rows without a token are padding."""
    sources, files = [], []
    for name, more in zip(("target", "draft"), padding, strict=True):
        source = make_checkpoint(tmp_path / name, vocab=400 + more, layers=1, with_tokenizer=False)
        write_tokenizer(source, 400)
        size = Tokenizer(str(source)).vocab_size
        replaced = with_tokens(source, {i: (f"[PAD{i}]", 5) for i in range(size, 400 + more)})
        files.append(str(write_gguf(source, tmp_path / f"{name}.gguf", "F32", replaced)))
        sources.append(str(source))
    expected = [output.outputs[0].token_ids for output in LLM(files[0], max_model_len=64).generate(PROMPTS, GREEDY)]
    for target, draft in ((files[0], files[1]), (files[0], sources[1]), (sources[0], files[1])):
        llm = LLM(target, max_model_len=64, speculative_config={"model": draft, "num_speculative_tokens": 3})
        assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)] == expected
    ours, theirs = Tokenizer(files[0]), Tokenizer(sources[0])
    assert ours.backend.get_vocab() == theirs.backend.get_vocab()
    assert {pair[0] for pair in shared_ids(ours, theirs)} <= set(theirs.backend.get_vocab().values())


def test_an_unused_id_is_no_difference(small: Path, tmp_path: Path) -> None:
    def made(*named: tuple[str, int]) -> Tokenizer:
        metadata = with_tokens(small, dict(enumerate(named, 200))) | {"tokenizer.ggml.eos_token_id": 0}
        return Tokenizer(str(write_metadata(tmp_path / "model.gguf", metadata)))

    used, unused = made(("<|image|>", 3), ("<|sound|>", 3)), made(("[PAD200]", 5), ("<|sound|>", 3))
    check_same_tokenizer(unused, used)
    check_same_tokenizer(used, unused)
    with pytest.raises(TokenizerMismatchError, match=r"id 201 is '<\|sound\|>' for the target and '<\|video\|>' for"):
        check_same_tokenizer(used, made(("[PAD200]", 5), ("<|video|>", 3)))


def test_damage(wide: Path, tmp_path: Path) -> None:
    path = write_gguf(wide, tmp_path / "model.gguf", "Q4_0")
    whole = path.read_bytes()
    info = open_gguf(path).tensors["blk.0.ffn_down.weight"]
    for keep, message in (
        (0, "starts with b''"),
        (3, "starts with b'GGU'"),
        (10, "truncated"),
        (100, "truncated"),
        (5000, "truncated"),
        (len(whole) - 40, r"truncated: .* ends \d+ bytes after the end"),
    ):
        path.write_bytes(whole[:keep])
        with pytest.raises(CheckpointError, match=message):
            load_config(path)
    for scale in (np.nan, np.inf):
        bad = bytearray(whole)
        at = info.start + 2 * 18  # the third block of row 0
        bad[at : at + 2] = np.float16(scale).tobytes()
        path.write_bytes(bad)
        with pytest.raises(
            CheckpointError, match=r"blk\.0\.ffn_down\.weight\[0, 64\]=-?(nan|inf): weights must be finite"
        ):
            load_native(path)
    bad = bytearray(whole)
    bad[4] = 9
    path.write_bytes(bad)
    with pytest.raises(CheckpointError, match=r"version=9: must be one of"):
        load_config(path)


@pytest.mark.parametrize("seed", range(40))
def test_any_damaged_header_is_rejected_or_read(seed: int, tmp_path: Path) -> None:
    """Check that damaged bytes in a header raise an error of specrs or none, and never hang."""
    source = make_checkpoint(tmp_path / "source", layers=1)
    path = write_gguf(source, tmp_path / "model.gguf")
    whole, rng = bytearray(path.read_bytes()), np.random.default_rng(seed)
    for at in rng.integers(4, 9000, 3):
        whole[at] = rng.integers(256)
    path.write_bytes(whole)
    for read in (load_model, lambda file: Tokenizer(str(file))):
        with contextlib.suppress(CheckpointError):
            read(path)


def refusal(read: Callable[[Path], object], path: Path) -> str | None:
    """Return the error message for a file; None if it is read."""
    try:
        read(path)
    except CheckpointError as fault:
        return str(fault)
    return None


@pytest.mark.parametrize("family", ["llama", "qwen3", "granite"])
def test_any_value_of_any_field_is_rejected_or_read(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that any value of any metadata field is read, or raises an error of specrs that names the field."""
    source = make_checkpoint(tmp_path / "source", family, layers=1)
    path = write_gguf(source, tmp_path / "model.gguf", tokenizer__ggml__add_bos_token=False)
    whole, refused, others = open_gguf(path), 0, []
    names = [*whole.metadata, f"{family}.rope.scaling.factor", f"{family}.rope.dimension_count"]
    names += ["tokenizer.chat_template", "tokenizer.ggml.bos_token_id"]
    wrong = ["x", -1, 0, 2**63, 1.5, float("nan"), float("inf"), True, [], [1, 2], ["x"]]
    for name, value in itertools.product(names, wrong):
        damaged = dataclasses.replace(whole, metadata={**whole.metadata, name: value})
        for module in ("checkpoint", "tokenizer"):
            monkeypatch.setattr(f"specrs.models.gguf.{module}.open_gguf", lambda _, file=damaged: file)
        reads = [gguf_tokenizer] if name.startswith("tokenizer.") and name.count("eo") == 0 else [gguf_config]
        for read in [*reads, *([gguf_tokenizer] if "eo" in name else [])]:
            said = refusal(read, path)
            refused += said is not None
            if said is not None and name.rpartition(".")[2] not in said:
                others.append((name, value, said))
    assert not others
    assert refused > len(names) * 3


def test_a_file_of_no_hub() -> None:
    with pytest.raises(CheckpointError, match=r"^model='a/b:Q4_K_M': .*HF_HUB_OFFLINE forbids to ask the hub"):
        load_config("a/b:Q4_K_M")


def test_a_file_of_the_hub_is_counted_before_it_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ["README.md", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "more/m-Q8_0.gguf", "m-F16.gguf.part"]
    downloaded: list[tuple[str, str, str | None]] = []

    def download(repository: str, name: str, *, revision: str | None) -> str:
        downloaded.append((repository, name, revision))
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda repository, *, revision: files)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    for kind, names in (("Q8_0", "m-Q8_0.gguf, more/m-Q8_0.gguf"), ("F16", "none"), ("Q4", "none")):
        with pytest.raises(CheckpointError, match=rf"model='a/b:{kind}': must name one file .*, found: {names}$"):
            gguf_path(f"a/b:{kind}")
    assert not downloaded
    assert gguf_path("a/b:Q4_K_M", "v1") == tmp_path / "m-Q4_K_M.gguf"
    assert downloaded == [("a/b", "m-Q4_K_M.gguf", "v1")]

    # Without the hub, what it has left here; where that is nothing, why the hub could not be asked.
    def offline(repository: str, *, revision: str | None) -> list[str]:
        raise ConnectionError("no route")

    def cached(repository: str, *, revision: str | None, local_files_only: bool) -> str:
        assert local_files_only
        if repository == "a/b":
            return str(tmp_path)
        raise FileNotFoundError("no cache")

    monkeypatch.setattr(huggingface_hub, "list_repo_files", offline)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", cached)
    (tmp_path / "x-Q5_0.gguf").touch()
    assert gguf_path("a/b:Q5_0") == tmp_path / "x-Q5_0.gguf"
    with pytest.raises(CheckpointError, match=r"could not be asked \(ConnectionError\), found: none"):
        gguf_path("a/b:Q8_0")
    with pytest.raises(
        CheckpointError, match=r"HF_HUB_OFFLINE forbids|cannot be reached \(ConnectionError: no route\)"
    ):
        gguf_path("c/d:Q5_0")
    assert len(downloaded) == 1
