"""GGUF files of every family, as llama.cpp's converter writes them, against the original checkpoints."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import LLAMA3_ROPE, LONG_ROPE, YARN_ROPE, make_checkpoint
from gguf_families import rounded
from gguf_files import write_gguf
from safetensors.torch import load_file, save_file
from specrs import LLM, SamplingParams
from specrs.backends.cpu.weights import Rounding, load_native
from specrs.errors import CheckpointError
from specrs.models.gguf.architectures import READ
from specrs.models.gguf.file import open_gguf
from specrs.models.loader import load_config
from specrs.models.registry import FAMILIES
from specrs.models.torch_loader import load_model

from models.harness import Feeder

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
ONE_HEAD = {"kv_heads": 1, "hidden": 96}
"""Sizes of families whose heads together are as wide as their hidden states."""
GPT_OSS_ROPE = YARN_ROPE | {"truncate": False}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
OLMO_ROPE = {
    "full_attention": YARN_ROPE | {"attention_factor": 1.25},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
SCOUT_ROPE = LLAMA3_ROPE | {
    "rope_theta": 500000.0,
    "factor": 16.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
PHI_ROPE = LONG_ROPE | {
    "partial_rotary_factor": 0.75,
    "short_factor": [1 + i / 4 for i in range(18)],
    "long_factor": [1 + i / 2 for i in range(18)],
}
MISTRAL_ROPE = YARN_ROPE | {"beta_fast": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0}
CASES: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "llama": ("llama", None, {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", None, {}),
    "mistral3": ("mistral", "mistral3", {"rope_parameters": MISTRAL_ROPE}),
    "ministral3": ("ministral3", None, {"tie": False}),
    "qwen2": ("qwen2", None, {"rope_parameters": YARN_ROPE}),
    "qwen3": ("qwen3", None, {}),
    "olmo2": ("olmo2", None, {"tie": False}),
    "olmo3": ("olmo3", None, {"tie": False, "layers": 5, "rope_parameters": OLMO_ROPE}),
    "phi3": ("phi3", None, {**ONE_HEAD, "sliding_window": 9, "rope_parameters": PHI_ROPE, "tie": False}),
    "seed_oss": ("seed_oss", None, {"mlp_bias": False}),
    "granite": ("granite", None, ONE_HEAD),
    "smollm3": ("smollm3", None, {"layers": 4, "no_rope_layer_interval": 4}),
    "gemma3": (
        "gemma3_text",
        None,
        {"layers": 6, "sliding_window_pattern": 6, "query_pre_attn_scalar": 48, "rope_parameters": GEMMA_ROPE},
    ),
    "qwen3moe": ("qwen3_moe", None, {"moe_intermediate_size": 64}),
    "mixtral": ("mixtral", None, {}),
    "lfm2": ("lfm2", None, {"layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"]}),
    "lfm2moe": ("lfm2_moe", None, {"layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"]}),
    "llama4": (
        "llama4_text",
        None,
        {
            "layers": 4,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "floor_scale": 8192,
            "attn_scale": 0.1,
            "max_position_embeddings": 20000,
            "intermediate_size_mlp": 96,
            "rope_parameters": SCOUT_ROPE,
            "seed": 1,
            "tie": False,
        },
    ),
    "gpt-oss": ("gpt_oss", None, {"swiglu_limit": 7.0, "rope_parameters": GPT_OSS_ROPE, "tie": False}),
}
"""transformers' `model_type`, the file's name for it, and how the checkpoint differs from the usual small one."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that returns the checkpoint of a case, written once."""
    made: dict[str, Path] = {}

    def of(case: str) -> Path:
        if case not in made:
            family, _, fields = CASES[case]
            folder = tmp_path_factory.mktemp(case) / "source"
            made[case] = make_checkpoint(folder, family, vocab=400, **fields)
        return made[case]

    return of


def logits(path: Path, load: Callable[..., Any] = load_native) -> torch.Tensor:
    return Feeder(load(path, dtype="float32")).feed_chunks(TOKENS, [len(TOKENS)])


def test_every_family_is_read() -> None:
    assert set(FAMILIES) == READ


@pytest.mark.parametrize("case", CASES)
def test_numbers_of_a_file_are_the_checkpoint_s(case: str, source: Callable[[str], Path], tmp_path: Path) -> None:
    """Check an F32 file: the checkpoint's logits to the bit, native and torch, and the same configuration."""
    folder = source(case)
    path = write_gguf(folder, tmp_path / "model.gguf", architecture=CASES[case][1])
    assert torch.equal(logits(path), logits(folder))
    assert torch.equal(logits(path, load_model), logits(folder, load_model))
    ours, theirs = load_config(path), load_config(folder)
    for name in (
        "windows",
        "ropes",
        "rope_scaling",
        "experts",
        "attention_scale",
        "query_scaling",
        "rotary_dim",
        "embedding_multiplier",
        "conv",
        "intermediate_size",
        "rms_norm_eps",
    ):
        assert getattr(ours, name) == getattr(theirs, name), name


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "MXFP4"])
@pytest.mark.parametrize("case", CASES)
def test_blocks_of_a_file_are_their_numbers(
    case: str, kind: str, source: Callable[[str], Path], tmp_path: Path
) -> None:
    """Check that logits are, to the bit, those of a checkpoint with the dequantized weights.

    Those of native passes are near them: with activations in fp32, and rounded to 16 bits by blocks of 32.
    """
    folder = source(case)
    path = write_gguf(folder, tmp_path / "model.gguf", kind, architecture=CASES[case][1])
    numbers = shutil.copytree(folder, tmp_path / "numbers")
    tensors = rounded(load_file(folder / "model.safetensors"), kind)
    save_file(tensors, numbers / "model.safetensors", metadata={"format": "pt"})
    expected = logits(numbers, load_model)
    assert torch.equal(logits(path, load_model), expected)
    for activations, bound in (("fp32", 2e-5), ("int16", 1e-3)):
        found = logits(path, partial(load_native, rounding=Rounding(activations=activations)))
        assert (found - expected).abs().max() < bound * expected.abs().max(), activations


@pytest.mark.parametrize("case", ["gemma3", "gpt-oss", "mixtral", "ministral3"])
def test_text_of_a_file_is_the_checkpoint_s(case: str, source: Callable[[str], Path], tmp_path: Path) -> None:
    """Check the text, with the file's own tokenizer and chat template, with and without drafts."""
    template = "{{ messages[0]['content'] }}!"
    folder = source(case)
    path = write_gguf(folder, tmp_path / "model.gguf", tokenizer__chat_template=template)
    expected = [
        output.outputs[0].text for output in LLM(str(folder), max_model_len=64).generate(["hi!", "no!"], GREEDY)
    ]
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    chats = [[{"role": "user", "content": text}] for text in ("hi", "no")]
    for config in (None, drafts):
        llm = LLM(str(path), max_model_len=64, speculative_config=config)
        assert [output.outputs[0].text for output in llm.chat(chats, GREEDY)] == expected


def test_layers_with_a_window(source: Callable[[str], Path], tmp_path: Path) -> None:
    """Check layers with a window: a number or a list says which ones; without a window all layers have full
    attention."""
    folder = source("gemma3")

    def windows(**fields: Any) -> tuple[int | None, ...]:
        return load_config(write_gguf(folder, tmp_path / "model.gguf", **fields)).windows

    pattern = "gemma3__attention__sliding_window_pattern"
    assert windows() == (9, 9, 9, 9, 9, None)
    assert windows(**{pattern: 3}) == (9, 9, None, 9, 9, None)
    assert windows(**{pattern: 0}) == (9,) * 6
    assert windows(**{pattern: [True, False, False, True, False, False]}) == (9, None, None, 9, None, None)
    assert windows(gemma3__attention__sliding_window=0) == ()


def test_layers_with_a_window_have_a_rope_of_their_own(source: Callable[[str], Path], tmp_path: Path) -> None:
    path = write_gguf(source("gemma3"), tmp_path / "model.gguf", gemma3__rope__freq_base_swa=77.0)
    assert [rope and rope[0] for rope in load_config(path).ropes] == [77.0] * 5 + [500.0]


def test_gemma_27b_has_a_scale_of_its_own(tmp_path: Path) -> None:
    """Check Gemma 3 27B, whose queries are divided by the root of hidden_size / heads. Files do not say so; its 62
    layers tell."""
    folder = make_checkpoint(tmp_path / "source", "gemma3_text", layers=1, with_tokenizer=False)
    path = write_gguf(folder, tmp_path / "model.gguf", gemma3__block_count=62)
    assert load_config(path).attention_scale == (96 // 6) ** -0.5
    assert load_config(write_gguf(folder, tmp_path / "other.gguf")).attention_scale == 48**-0.5


def test_windows_of_olmo_3_by_default(source: Callable[[str], Path], tmp_path: Path) -> None:
    """Check the windows of OLMo 3 in a file without window fields: all layers except every fourth have one, and all use
    the same theta, as in llama.cpp."""
    missing = {"olmo2__attention__sliding_window_pattern": None, "olmo2__rope__freq_base_swa": None}
    folder = source("olmo3")
    path = write_gguf(folder, tmp_path / "model.gguf", "F32", missing)
    ours, theirs = load_config(path), load_config(folder)
    assert [window is None for window in ours.windows] == [False, False, False, True, False]
    assert (ours.windows, ours.ropes) == (theirs.windows, theirs.ropes)
    assert torch.equal(logits(path), logits(folder))


@pytest.mark.parametrize("length", [0, 7])
def test_the_length_of_growing_queries(length: int, source: Callable[[str], Path], tmp_path: Path) -> None:
    """Check that a file may also say the length that Ministral 3's queries grow by. llama.cpp does not read it."""
    folder = source("ministral3")
    path = write_gguf(folder, tmp_path / "model.gguf", mistral3__attention__temperature_length=length)
    assert load_config(path).query_scaling == load_config(folder).query_scaling


def test_queries_of_devstral_2_do_not_grow(source: Callable[[str], Path], tmp_path: Path) -> None:
    """Check a file of Devstral 2, whose `temperature_scale` is 0: its model is Mistral's."""
    path = write_gguf(source("ministral3"), tmp_path / "model.gguf", mistral3__attention__temperature_scale=0.0)
    config = load_config(path)
    assert (config.architecture, config.query_scaling) == ("MistralForCausalLM", None)


def test_a_file_with_an_attention_factor_of_its_own(source: Callable[[str], Path], tmp_path: Path) -> None:
    path = write_gguf(source("phi3"), tmp_path / "model.gguf", phi3__rope__scaling__attn_factor=1.25)
    assert load_config(path).rope_magnitude == 1.25


@pytest.mark.parametrize(
    ("case", "fields", "message"),
    [
        ("ministral3", {"attention__temperature_length": 9}, r"temperature_length=9: not implemented; allowed: 7, as"),
        (
            "ministral3",
            {"attention__temperature_scale": -0.1},
            r"temperature_scale=-0\.1.*: must be a finite number gr",
        ),
        ("ministral3", {"rope__scaling__type": "none"}, r"rope_parameters\.rope_type='default': .*; allowed: 'yarn'"),
        ("mistral", {"attention__temperature_scale": 0.1}, r"attention\.temperature_scale=0\.1.*: not implem.* 0$"),
        ("mistral3", {"rope__scaling__type": "ntk"}, r"rope\.scaling\.type='ntk': not implemented; allowed: 'none', '"),
        ("mistral3", {"rope__scaling__yarn_attn_factor": 1.0}, r"yarn_attn_factor=1\.0: not implemented; allowed: a f"),
        ("mistral3", {"rope__scaling__original_context_length": None}, r"original_context_length is missing"),
        ("mistral", {"vocab_size": 401}, r"llama\.vocab_size=401: not implemented; allowed: 400"),
        ("mistral", {"attention__sliding_window": 9}, r"sliding_window=9: not implemented; allowed: 0"),
        ("llama4", {"attention__sliding_window": 9}, r"sliding_window=9: not implemented; allowed: 8192"),
        ("llama4", {"expert_gating_func": 1}, r"expert_gating_func=1: not implemented; allowed: 2, which is the sigm"),
        ("llama4", {"interleave_moe_layer_step": None}, r"llama4\.interleave_moe_layer_step is missing"),
        ("olmo2", {"attention__sliding_window": 9.5}, r"olmo2\.attention\.sliding_window=9\.5"),
        ("olmo2", {"rope__freq_base_swa": 7.0}, r"rope\.freq_base_swa=7\.0: not implemented; allowed: 10000\.0"),
        (
            "olmo3",
            {"attention__sliding_window_pattern": [True]},
            r"olmo2\.attention\.sliding_window_pattern=\[True\]: not implemented.* 5 layers",
        ),
        ("olmo3", {"rope__scaling__type": "none"}, r"olmo2\.rope\.scaling\.\w+=.*: not implemented"),
        ("phi3", {"rope__scaling__type": "yarn"}, r"type='yarn': contradicts rope_factors_long\.weight, rope_factors_"),
        ("phi3", {"rope__scaling__attn_factor": None}, r"phi3\.rope\.scaling\.attn_factor is missing"),
        ("granite", {"logit_scale": None}, r"granite\.logit_scale is missing"),
        ("granite", {"rope__scaling__finetuned": False}, r"finetuned=False: not implemented; allowed: true, because"),
        ("granite", {"deepstack_mapping": [1, 2]}, r"deepstack_mapping=\[1, 2\]: not implemented; allowed: a file wi"),
        ("smollm3", {"expert_count": 4}, r"smollm3\.expert_count=4: not implemented; allowed: 0"),
        ("gemma3", {"final_logit_softcapping": 30.0}, r"final_logit_softcapping=30\.0: not implemented; allowed: 0"),
        (
            "gemma3",
            {"attention__sliding_window_pattern": [True]},
            r"window_pattern=\[True\]: not implemented.* 6 layers",
        ),
        ("qwen3moe", {"expert_count": 4}, r"experts\.4\.\w+.* not part of this architecture"),
        ("qwen3moe", {"expert_used_count": None}, r"qwen3moe\.expert_used_count is missing"),
        ("qwen3moe", {"expert_gating_func": 2}, r"expert_gating_func=2: not implemented; allowed: 0 or 1"),
        ("qwen3moe", {"expert_shared_count": 1}, r"expert_shared_count=1: not implemented; allowed: 0"),
        (
            "lfm2",
            {"attention__head_count_kv": [0, 3, 2, 0]},
            r"count_kv=\[0, 3, 2, 0\]: not implemented; allowed: 0 or",
        ),
        ("lfm2", {"attention__head_count_kv": [0, 3]}, r"head_count_kv=\[0, 3\]: not implemented.* 4 layers"),
        ("lfm2", {"shortconv__l_cache": None}, r"lfm2\.shortconv\.l_cache is missing"),
        (
            "lfm2moe",
            {"expert_gating_func": None},
            r"gating_func=None: not implemented; allowed: 2, which is the sigmoid",
        ),
        ("lfm2moe", {"expert_weights_norm": False}, r"expert_weights_norm=False: not implemented; allowed: True"),
        ("gpt-oss", {"feed_forward_length": 161}, r"gpt-oss\.feed_forward_length=161: not implemented; allowed: 160"),
        ("gpt-oss", {"rope__freq_base_swa": 7.0}, r"rope\.freq_base_swa=7\.0: not implemented; allowed: 500\.0"),
    ],
)
def test_metadata_that_is_rejected(
    case: str, fields: dict[str, Any], message: str, source: Callable[[str], Path], tmp_path: Path
) -> None:
    """Check that the error for wrong metadata of a GGUF file names the file, the field and its value."""
    named = CASES[case][1] or {"mistral": "llama", "ministral3": "mistral3", "olmo3": "olmo2"}.get(case, case)
    replaced = {f"{named}__{field}": value for field, value in fields.items()}
    path = write_gguf(source(case), tmp_path / "model.gguf", "F32", replaced, architecture=CASES[case][1])
    with pytest.raises(CheckpointError, match=rf"(?s)^{path}: .*{message}"):
        load_native(path)


@pytest.mark.parametrize("exponent", [253, 255])
def test_an_exponent_that_is_no_number_is_named(exponent: int, source: Callable[[str], Path], tmp_path: Path) -> None:
    """Check the error for an exponent of MXFP4 that is no number. It names the row, counted through all experts, and
    the first column of the block."""
    path = write_gguf(source("gpt-oss"), tmp_path / "model.gguf", "MXFP4")
    file, name = open_gguf(path), "blk.1.ffn_down_exps.weight"
    experts, out, size = file.tensors[name].shape
    assert experts == 5
    content = bytearray(path.read_bytes())
    content[file.tensors[name].start + ((2 * out + 3) * size // 32 + 1) * 17] = exponent
    path.write_bytes(content)
    message = rf"^{path}: blk\.1\.ffn_down_exps\.weight\[{2 * out + 3}, 32\]=nan: weights must be finite$"
    with pytest.raises(CheckpointError, match=message):
        load_native(path)


def test_factors_of_two_scalings_contradict_each_other(tmp_path: Path) -> None:
    rope = LLAMA3_ROPE | {"original_max_position_embeddings": 8192, "rope_theta": 500000.0, "factor": 8.0}
    folder = make_checkpoint(tmp_path / "source", "llama", rope_parameters=rope, max_position_embeddings=16384)
    path = write_gguf(folder, tmp_path / "model.gguf", llama__rope__scaling__type="yarn")
    with pytest.raises(
        CheckpointError, match=r"gguf: llama\.rope\.scaling\.type='yarn': contradicts rope_freqs\.weight"
    ):
        load_config(path)


def test_a_tensor_without_numbers_is_damaged(source: Callable[[str], Path], tmp_path: Path) -> None:
    """Check that a tensor without numbers is rejected: a header may declare 2^60 experts without a byte, and naming
    them would never end."""
    path = write_gguf(source("qwen3moe"), tmp_path / "model.gguf")
    content = bytearray(path.read_bytes())
    name = b"blk.0.ffn_down_exps.weight"
    at = content.index(name) + len(name) + 4
    content[at : at + 24] = struct.pack("<3Q", 0, 96, 1 << 60)
    path.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"blk\.0\.ffn_down_exps\.weight of F32 has shape \(\d+, 96, 0\), no whole"
    ):
        load_native(path)
