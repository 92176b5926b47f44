"""GGUF files of models with gated delta nets, as llama.cpp's converter writes them, against their checkpoints."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf_families
import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from gguf_families import by_turns, rounded
from gguf_files import dequantized, write_gguf
from mtp_reference import add_head
from safetensors.torch import load_file, save_file
from specrs import LLM, SamplingParams
from specrs.backends.cpu.weights import Rounding, load_native
from specrs.errors import CheckpointError, UnsupportedModelError
from specrs.models.gguf.checkpoint import GGUFCheckpoint
from specrs.models.loader import load_config
from specrs.models.torch_loader import load_model

from models.harness import Feeder

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
KINDS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
# A seed with which no two logits of a router are so near that rounded activations change the experts.
EXPERTS = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "seed": 3}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen35": ("qwen3_5_text", {"layers": 4, "layer_types": KINDS, "linear_value_head_dim": 32}),
    "qwen35, three value heads": ("qwen3_5_text", {"linear_num_value_heads": 6, "linear_value_head_dim": 32}),
    "qwen35, one value head": ("qwen3_5_text", {"linear_num_value_heads": 2, "tie": False}),
    "qwen35moe": ("qwen3_5_moe_text", {"linear_value_head_dim": 32, **EXPERTS}),
    "qwen3next": ("qwen3_next", {"layers": 4, "layer_types": KINDS, **EXPERTS}),
}
"""transformers' `model_type`, and how the checkpoint differs from the usual small one."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that returns the checkpoint of a case, written once."""
    made: dict[str, Path] = {}

    def of(case: str) -> Path:
        if case not in made:
            family, fields = CASES[case]
            made[case] = make_checkpoint(tmp_path_factory.mktemp("source") / "model", family, vocab=400, **fields)
        return made[case]

    return of


def logits(path: Path, load: Callable[..., Any] = load_native, dtype: str = "float32") -> torch.Tensor:
    return Feeder(load(path, dtype=dtype)).feed_chunks(TOKENS, [5, 1, 6]).float()


def close(found: torch.Tensor, expected: torch.Tensor, bound: float) -> bool:
    return bool((found - expected).abs().max() < bound * expected.abs().max())


@pytest.mark.parametrize("case", CASES)
def test_numbers_of_a_file_are_the_checkpoint_s(case: str, source: Callable[[str], Path], tmp_path: Path) -> None:
    """Check that logits of a GGUF file equal those of its checkpoint, natively and with torch, up to the rounding of
    decay rates: files store the rates instead of their logarithms."""
    folder = source(case)
    path = write_gguf(folder, tmp_path / "model.gguf")
    assert close(logits(path), logits(folder), 1e-5)
    assert close(logits(path, load_model), logits(folder, load_model), 1e-5)
    ours, theirs = load_config(path), load_config(folder)
    assert ours.delta is not None
    assert theirs.delta is not None
    for name in ("layers", "key_heads", "value_heads", "key_dim", "value_dim", "kernel"):
        assert getattr(ours.delta, name) == getattr(theirs.delta, name), name
    for name in ("rotary_dim", "rope_theta", "experts", "num_layers", "tie_word_embeddings"):
        assert getattr(ours, name) == getattr(theirs, name), name


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "MXFP4"])
@pytest.mark.parametrize("case", CASES)
def test_blocks_of_a_file_are_their_numbers(
    case: str, kind: str, source: Callable[[str], Path], tmp_path: Path
) -> None:
    """Check that logits are those of a checkpoint with the dequantized weights."""
    folder = source(case)
    path = write_gguf(folder, tmp_path / "model.gguf", kind)
    numbers = shutil.copytree(folder, tmp_path / "numbers")
    tensors = rounded(load_file(folder / "model.safetensors"), kind)
    save_file(tensors, numbers / "model.safetensors", metadata={"format": "pt"})
    assert close(logits(path, load_model), logits(numbers, load_model), 1e-5)
    expected = logits(numbers, load_model, "float64")
    for activations, bound in (("fp32", 2e-5), ("int16", 3e-3)):
        found = logits(path, partial(load_native, rounding=Rounding(activations=activations)))
        assert close(found, expected, bound), activations


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_blocks_that_span_value_heads(kind: str, tmp_path: Path) -> None:
    """Check an output projection with blocks of 256 inputs, each of which spans four value heads. Native logits and
    those of the dequantized weights, with heads in the checkpoint's order, are near torch's."""
    sizes = {"hidden": 256, "intermediate": 256, "head_dim": 64, "kv_heads": 2, "linear_value_head_dim": 64}
    folder = make_checkpoint(tmp_path / "source", "qwen3_5_text", vocab=400, **sizes)
    path = write_gguf(folder, tmp_path / "model.gguf", kind)
    expected = logits(path, load_model)
    assert expected.isfinite().all()
    assert close(logits(path, partial(load_native, rounding=Rounding(activations="int16"))), expected, 3e-3)
    # The numbers of the projection, with value heads in the checkpoint's order.
    numbers = shutil.copytree(folder, tmp_path / "numbers")
    tensors = load_file(folder / "model.safetensors")
    checkpoint = GGUFCheckpoint(path)
    for name in tensors:
        if "A_log" not in name:
            tensors[name] = torch.from_numpy(np.array(checkpoint.read(name, np.dtype(np.float32))))
        if name.endswith("norm.weight") and "linear_attn" not in name:
            tensors[name] -= 1
    turned = dequantized(path, "blk.0.ssm_out.weight").float()
    # Four value heads of two key heads: back is as forth.
    tensors["model.layers.0.linear_attn.out_proj.weight"] = by_turns(turned.T, 2, 4, 64).T.contiguous()
    save_file(tensors, numbers / "model.safetensors", metadata={"format": "pt"})
    assert close(logits(numbers, load_model), expected, 1e-4)


@pytest.mark.parametrize(
    "leaf",
    [
        "in_proj_qkv.weight",
        "in_proj_z.weight",
        "in_proj_a.weight",
        "in_proj_b.weight",
        "conv1d.weight",
        "dt_bias",
        "A_log",
        "out_proj.weight",
        "norm.weight",
    ],
)
def test_planted_mistakes_are_found(
    leaf: str, source: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that planted mistakes are found: with one kind of tensor in another order, or with a norm plus 1, logits
    differ by far."""
    folder, right = source("qwen35"), gguf_families._of_delta_net

    def wrong(config: Any, architecture: str, name: str, numbers: torch.Tensor) -> Any:
        if not name.endswith(leaf):
            return right(config, architecture, name, numbers)
        if leaf == "norm.weight":
            return name, numbers + 1
        return right(config, "qwen3next", name, numbers)

    monkeypatch.setattr(gguf_families, "_of_delta_net", wrong)
    path = write_gguf(folder, tmp_path / "model.gguf")
    for load in (load_native, load_model):
        assert not close(logits(path, load), logits(folder, load), 1e-3)


@pytest.mark.parametrize("case", CASES)
def test_text_of_a_file_is_the_checkpoint_s(case: str, source: Callable[[str], Path], tmp_path: Path) -> None:
    """Check the text, with the file's own tokenizer and chat template, with and without drafts."""
    folder = source(case)
    path = write_gguf(folder, tmp_path / "model.gguf", tokenizer__chat_template="{{ messages[0]['content'] }}!")
    expected = [
        output.outputs[0].text for output in LLM(str(folder), max_model_len=64).generate(["hi!", "no!"], GREEDY)
    ]
    chats = [[{"role": "user", "content": text}] for text in ("hi", "no")]
    for config in (None, {"method": "ngram", "num_speculative_tokens": 3}):
        llm = LLM(str(path), max_model_len=64, speculative_config=config)
        assert [output.outputs[0].text for output in llm.chat(chats, GREEDY)] == expected


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0"])
def test_gate_and_up_of_experts_in_one_tensor(
    kind: str, source: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that gate and up of experts in one tensor give the bits of a file with a tensor for each."""
    made = gguf_families.file_tensors
    apart = write_gguf(source("qwen35moe"), tmp_path / "apart.gguf", kind)

    def fused(*arguments: Any) -> Any:
        found = dict(made(*arguments))
        for name in [name for name in found if "ffn_gate_exps" in name]:
            pair = found.pop(name), found.pop(name.replace("gate", "up"))
            found[name.replace("gate", "gate_up")] = np.concatenate(pair, axis=1)
        return found.items()

    monkeypatch.setattr("gguf_files.file_tensors", fused)
    path = write_gguf(source("qwen35moe"), tmp_path / "model.gguf", kind)
    for load in (load_native, load_model):
        assert torch.equal(logits(path, load), logits(apart, load))


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_older_files_of_qwen3next(
    kind: str, source: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check older files of Qwen3-Next: they give the bits of a file whose q, k, v and z are in two tensors, sorted by
    kind."""
    apart = write_gguf(source("qwen3next"), tmp_path / "apart.gguf", kind)
    right = gguf_families._parts

    def older(config: Any, architecture: str, name: str, numbers: torch.Tensor) -> Any:
        return iter([(name, numbers)]) if "in_proj_qkvz" in name else right(config, architecture, name, numbers)

    monkeypatch.setattr(gguf_families, "_parts", older)
    path = write_gguf(source("qwen3next"), tmp_path / "model.gguf", kind)
    assert b"blk.0.ssm_in.weight" in path.read_bytes()
    for load in (load_native, load_model):
        assert torch.equal(logits(path, load), logits(apart, load))


@pytest.mark.parametrize(
    ("leaf", "shape", "message"),
    [
        ("ssm_ba.weight", (9, 96), r"linear_attn\.in_proj_[ab]\.weight has shape \(9, 96\)"),
        ("attn_gate.weight", (63, 96), r"linear_attn\.in_proj_z\.weight has shape \(63, 96\)"),
        ("ffn_up_shexp.weight", (63, 96), r"mlp\.shared_expert\.up_proj\.weight has shape \(63, 96\)"),
        ("ffn_gate_inp_shexp.weight", (95,), r"mlp\.shared_expert_gate\.weight has shape \(1, 95\)"),
        ("ffn_gate_exps.weight", (5, 31, 96), r"mlp\.experts\.\d\.gate_proj\.weight has shape \(31, 96\)"),
        ("ffn_gate_exps.weight", (4, 32, 96), r"mlp\.experts\.4\.gate_proj\.weight .*missing"),
    ],
)
def test_wrong_shapes_of_experts_are_rejected_by_name(
    leaf: str,
    shape: tuple[int, ...],
    message: str,
    source: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = gguf_families.file_tensors

    def wrong(*arguments: Any) -> Any:
        for name, array in made(*arguments):
            yield name, np.ones(shape, np.float32) if name == f"blk.0.{leaf}" else array

    monkeypatch.setattr("gguf_files.file_tensors", wrong)
    path = write_gguf(source("qwen3next"), tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=rf"layers\.0\.{message}"):
        load_native(path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("expert_shared_count", 2, r"expert_shared_count=2: not implemented; allowed: 1"),
        ("expert_gating_func", 2, r"expert_gating_func=2: not implemented; allowed: 0 or 1"),
        ("expert_weights_norm", False, r"expert_weights_norm=False: not implemented; allowed: True"),
        ("expert_shared_feed_forward_length", 63, r"shared_expert\.\w+\.weight has shape"),
        ("expert_feed_forward_length", None, r"expert_feed_forward_length is missing"),
    ],
)
def test_metadata_of_experts_that_is_rejected(
    field: str, value: Any, message: str, source: Callable[[str], Path], tmp_path: Path
) -> None:
    path = write_gguf(source("qwen35moe"), tmp_path / "model.gguf", "F32", {f"qwen35moe.{field}": value})
    with pytest.raises(CheckpointError, match=rf"(?s)^{path}: .*{message}"):
        load_native(path)


def head(width: int) -> dict[str, np.ndarray]:
    """Return the tensors of an MTP head after two layers."""
    names = ("eh_proj", "enorm", "hnorm", "shared_head_norm")
    made = {f"blk.2.nextn.{name}.weight": np.full(width, i, np.float32) for i, name in enumerate(names)}
    made["blk.2.nextn.eh_proj.weight"] = np.ones((width, 2 * width), np.float32)
    return made | {
        "blk.2.attn_q.weight": np.ones((2 * width, width), np.float32),
        "blk.2.attn_norm.weight": np.full(width, 7, np.float32),
        "blk.2.post_attention_norm.weight": np.full(width, 8, np.float32),
    }


def test_tensors_of_an_mtp_head_have_its_names(
    source: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Check that tensors of an MTP head get its names. `block_count` includes the head's layer, and logits are those
    without a head."""
    folder = source("qwen35, one value head")
    fields = {"qwen35.block_count": 3, "qwen35.nextn_predict_layers": 1}
    path = write_gguf(folder, tmp_path / "model.gguf", replaced=fields, extra=head(96))
    with caplog.at_level(logging.INFO, "specrs"):
        assert close(logits(path), logits(folder), 1e-5)
    assert f"{path}: 7 tensors of an MTP head, which speculative_config.method='mtp' reads" in caplog.text
    checkpoint = GGUFCheckpoint(path, mtp_head=True)
    names = ["fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "layers.0.self_attn.q_proj"]
    names += ["layers.0.input_layernorm", "layers.0.post_attention_layernorm"]
    firsts = [checkpoint.mapped(f"mtp.{name}.weight").reshape(-1)[0] for name in names]
    assert firsts == [1, 1, 2, 3, 1, 7, 8]


HEAD_TENSORS = {
    "mtp.fc": "nextn.eh_proj",
    "mtp.pre_fc_norm_embedding": "nextn.enorm",
    "mtp.pre_fc_norm_hidden": "nextn.hnorm",
    "mtp.norm": "nextn.shared_head_norm",
    "mtp.layers.0.input_layernorm": "attn_norm",
    "mtp.layers.0.post_attention_layernorm": "post_attention_norm",
    **{f"mtp.layers.0.self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    "mtp.layers.0.self_attn.o_proj": "attn_output",
    **{f"mtp.layers.0.self_attn.{name}_norm": f"attn_{name}_norm" for name in "qk"},
    **{f"mtp.layers.0.mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
    "mtp.layers.0.mlp.gate": "ffn_gate_inp",
    "mtp.layers.0.mlp.experts.gate_up_proj": "ffn_gate_up_exps",
    "mtp.layers.0.mlp.experts.down_proj": "ffn_down_exps",
    "mtp.layers.0.mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mtp.layers.0.mlp.shared_expert.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")},
}
"""Names of a head's tensors in a checkpoint and in a file, with an MLP and with experts."""


@pytest.mark.parametrize("case", ["qwen35", "qwen35moe", "qwen3next"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_head_in_a_file_drafts(kind: str, case: str, source: Callable[[str], Path], tmp_path: Path) -> None:
    """Check that an MTP head in a file drafts by default, with the acceptance of the folder's head, and that the text
    is that without drafts."""
    plain = source(case)
    layers = json.loads((plain / "config.json").read_text())["num_hidden_layers"]
    folder = add_head(Path(shutil.copytree(plain, tmp_path / "model")), seed=4)
    head = {
        # Norms have the offset of 1 added.
        f"blk.{layers}.{HEAD_TENSORS[name.removesuffix('.weight')]}.weight": (t.float() + (t.ndim == 1)).numpy()
        for name, t in load_file(folder / "model.safetensors").items()
        if name.startswith("mtp.")
    }
    fields = {f"{case}.block_count": layers + 1, f"{case}.nextn_predict_layers": 1}
    path = write_gguf(plain, tmp_path / "model.gguf", kind, fields, extra=head)
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "threads": 1, "max_model_len": 64}
    texts, accepted = [], []
    for model, drafts in ((path, None), (path, {"num_speculative_tokens": 3}), (folder, {"num_speculative_tokens": 3})):
        llm = LLM(str(model), speculative_config=drafts, **settings)
        [output] = llm.generate([TOKENS], GREEDY.replace(max_tokens=40), use_tqdm=False)
        texts.append(output.outputs[0].token_ids)
        accepted.append((llm.stats().drafts, llm.stats().accepted_tokens))
        assert drafts is None or "mtp" in llm.stats().drafters
    assert texts[0] == texts[1]
    if kind == "F32":
        assert (texts[1], accepted[1]) == (texts[2], accepted[2])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ssm__inner_size": 65}, r"qwen35\.ssm\.inner_size=65: not implemented; allowed: a multiple of ssm.time_st"),
        ({"ssm__group_count": None}, r"qwen35\.ssm\.group_count is missing"),
        ({"ssm__group_count": 3}, r"linear_num_value_heads=4: must be a multiple of linear_num_key_heads=3"),
        ({"ssm__state_size": 24}, r"linear_attn\.\w+\.weight has shape \(192, 96\)|has shape \(192, 1, 4\)"),
        ({"ssm__conv_kernel": 3}, r"layers\.0\.linear_attn\.conv1d\.weight has shape \(192, 1, 4\)"),
        ({"nextn_predict_layers": 4}, r"nextn_predict_layers=4: not implemented; allowed: a number of layers below"),
        ({"attention__recurrent_layers": [True]}, r"recurrent_layers=\[True\]: not implemented; .* each of 4 layers"),
        ({"rope__dimension_count": 7}, r"partial_rotary_factor"),
        ({"expert_count": 4}, r"qwen35\.expert_count=4: not implemented; allowed: 0"),
        ({"ssm__dt_b_c_rms": True}, r"qwen35\.ssm\.dt_b_c_rms=True: not implemented; allowed: a file without it"),
    ],
)
def test_metadata_that_is_rejected(
    fields: dict[str, Any], message: str, source: Callable[[str], Path], tmp_path: Path
) -> None:
    replaced = {f"qwen35__{field}": value for field, value in fields.items()}
    path = write_gguf(source("qwen35"), tmp_path / "model.gguf", "F32", replaced)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=rf"(?s)^{path}: .*({message})"):
        load_native(path)


@pytest.mark.parametrize(
    ("leaf", "shape"),
    [
        ("ssm_a", (5,)),
        ("ssm_conv1d.weight", (128, 3)),
        ("attn_qkv.weight", (127, 96)),
        ("ssm_dt.bias", (3,)),
        ("ssm_out.weight", (96, 96)),
        ("ssm_norm.weight", (17,)),
        ("attn_gate.weight", (32, 96)),
    ],
)
def test_wrong_shapes_are_rejected_by_name(
    leaf: str, shape: tuple[int, ...], source: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"ssm_a": "A_log", "ssm_conv1d.weight": "conv1d.weight", "attn_qkv.weight": "in_proj_qkv.weight"}
    names |= {"ssm_dt.bias": "dt_bias", "ssm_out.weight": "out_proj.weight", "ssm_norm.weight": "norm.weight"}
    names |= {"attn_gate.weight": "in_proj_z.weight"}
    made = gguf_families.file_tensors

    def wrong(*arguments: Any) -> Any:
        for name, array in made(*arguments):
            yield name, np.ones(shape, np.float32) if name == f"blk.1.{leaf}" else array

    monkeypatch.setattr("gguf_files.file_tensors", wrong)
    path = write_gguf(source("qwen35"), tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=rf"layers\.1\.linear_attn\.{names[leaf]} has shape \({shape[0]}"):
        load_native(path)


@pytest.mark.parametrize("rate", [0.0, 0.5, float("nan")])
def test_a_rate_that_is_not_below_0_is_named(
    rate: float, source: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = gguf_families.file_tensors

    def wrong(*arguments: Any) -> Any:
        for name, array in made(*arguments):
            yield name, np.full_like(array, rate) if name == "blk.0.ssm_a" else array

    monkeypatch.setattr("gguf_files.file_tensors", wrong)
    path = write_gguf(source("qwen35"), tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=r"blk\.0\.ssm_a: \S+ must be finite and below 0"):
        load_native(path)
