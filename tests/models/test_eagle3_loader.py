"""EAGLE-3 heads that are missing, damaged, of another target or not implemented: their errors and log messages."""

import json
import logging
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_json, make_checkpoint, make_eagle3
from safetensors.torch import load_file, save_file
from specrs.backends.cpu.eagle3 import load_eagle3
from specrs.backends.cpu.weights import load_native
from specrs.cli import main
from specrs.config import EngineConfig
from specrs.drafters.eagle3.head import Eagle3Head
from specrs.engine.weights import load_weights
from specrs.errors import CheckpointError, InvalidConfigError, SpecrsError, UnsupportedModelError
from specrs.models.torch_decoder import TorchDecoder
from specrs.models.torch_loader import load_model
from torch import Tensor

from models.native_passes import over_tensors

LAYOUTS = ("llama", "speculators")
VOCAB = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("heads")
    make_checkpoint(path / "target", layers=7, hidden=32, head_dim=8, vocab=90)
    for layout in LAYOUTS:
        make_eagle3(path / layout, path / "target", layout, vocab=VOCAB)
    return path


@pytest.fixture(scope="module")
def target(folder: Path) -> TorchDecoder:
    return load_model(folder / "target")


@pytest.fixture(params=LAYOUTS)
def copy(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(folder / request.param, tmp_path / "copy")


@pytest.fixture
def plain(folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(folder / "llama", tmp_path / "plain")


def load(path: Path, target: TorchDecoder, **options: Any) -> Eagle3Head:
    return load_eagle3(path, target, **options)


def change(path: Path, remove: tuple[str, ...] = (), **tensors: Tensor) -> None:
    file = path / "model.safetensors"
    content = {name: value for name, value in load_file(file).items() if name not in remove}
    save_file(content | {name.replace("__", "."): value for name, value in tensors.items()}, file)


def layer_field(path: Path, **fields: Any) -> str:
    """Set fields of the head's layer. Return the prefix that error messages put before their names."""
    raw = json.loads((path / "config.json").read_text())
    if "transformer_layer_config" not in raw:
        edit_json(path / "config.json", **fields)
        return ""
    edit_json(path / "config.json", transformer_layer_config=raw["transformer_layer_config"] | fields)
    return "transformer_layer_config."


def test_what_a_head_says(folder: Path, target: TorchDecoder) -> None:
    head = load(folder / "llama", target)
    assert head.aux_layer_ids == (2, 3, 4)
    assert (head.hidden_size, head.vocab_size) == (32, VOCAB)
    assert head.target_ids.tolist() == load_file(folder / "llama" / "model.safetensors")["t2d"].nonzero()[:, 0].tolist()
    assert head.max_position_embeddings == target.max_position_embeddings
    matrices = [x for name, x in load_file(folder / "llama" / "model.safetensors").items() if x.ndim == 2]
    assert head.num_parameters == sum(matrix.numel() for matrix in matrices) + 4 * 32
    assert head.bytes_per_block(16) == 2 * 2 * 20 * 16 * 4
    assert head.allocate_cache(3, 16).layers[0].shape == (4, 2, 2, 16, 20)


def test_ids_ascend_where_all_are_drafted(folder: Path, target: TorchDecoder, tmp_path: Path) -> None:
    head = load(make_eagle3(tmp_path / "head", folder / "target"), target)
    assert head.target_ids.tolist() == list(range(90))


def test_weights_are_the_targets_where_they_are_left_out_or_the_same(
    folder: Path, target: TorchDecoder, tmp_path: Path
) -> None:
    shared = load(make_eagle3(tmp_path / "shared", folder / "target"), target)
    assert shared.weights.embedding is target.weights.embedding
    assert shared.weights.lm_head is target.weights.lm_head
    own = make_eagle3(tmp_path / "own", folder / "target", own_embedding=True)
    assert load(own, target).weights.embedding is not target.weights.embedding
    change(own, embed_tokens__weight=target.weights.embedding.clone())
    assert load(own, target).weights.embedding is target.weights.embedding


def test_a_native_target(folder: Path, tmp_path: Path) -> None:
    path = make_eagle3(tmp_path / "head", folder / "target")
    native, dense = load_native(folder / "target", dtype="float32"), load_model(folder / "target", dtype="float32")
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    found = over_tensors(load_eagle3(path, native)).compute_logits(x)
    torch.testing.assert_close(found, load(path, dense).compute_logits(x), rtol=0, atol=1e-5)


def test_known_tensors_that_are_not_read(copy: Path, target: TorchDecoder) -> None:
    change(copy, verifier_norm__weight=torch.zeros(1), verifier_lm_head__weight=torch.zeros(1))
    change(copy, remove=("t2d",))
    load(copy, target)


@pytest.mark.parametrize("name", ["fc.weight", "norm.weight", "lm_head.weight", "{}mlp.up_proj.weight"])
def test_a_missing_tensor(copy: Path, target: TorchDecoder, name: str) -> None:
    prefix = "midlayer." if "midlayer.hidden_norm.weight" in load_file(copy / "model.safetensors") else "layers.0."
    name = name.format(prefix)
    change(copy, remove=(name,))
    with pytest.raises(CheckpointError, match=re.escape(f"{name} is missing")):
        load(copy, target)


@pytest.mark.parametrize("name", ["fc_norm__0__weight", "layers__1__hidden_norm__weight", "input_norm__weight", "x"])
def test_a_tensor_that_is_left_over(copy: Path, target: TorchDecoder, name: str) -> None:
    change(copy, **{name: torch.zeros(32)})
    with pytest.raises(CheckpointError, match=f"{name.replace('__', '.')} is not part of this architecture"):
        load(copy, target)


def test_the_other_layouts_names(folder: Path, target: TorchDecoder, plain: Path) -> None:
    shutil.copyfile(folder / "speculators" / "model.safetensors", plain / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"midlayer\..* and 7 more are missing"):
        load(plain, target)


def test_a_misshapen_tensor(copy: Path, target: TorchDecoder) -> None:
    change(copy, fc__weight=torch.zeros(32, 64))
    with pytest.raises(CheckpointError, match=r"fc\.weight has shape \(32, 64\), config\.json makes it \(32, 96\)"):
        load(copy, target)


def test_older_names_of_norms(folder: Path, target: TorchDecoder, tmp_path: Path) -> None:
    path = make_eagle3(tmp_path / "head", folder / "target", fc_norm=True)
    expected = load(path, target).weights.fc_norm
    tensors = load_file(path / "model.safetensors")
    old = {f"aux_norm_{name}__weight": tensors[f"fc_norm.{i}.weight"] for i, name in enumerate(("low", "mid", "high"))}
    change(path, remove=tuple(f"fc_norm.{i}.weight" for i in range(3)), **old)
    found = load(path, target).weights.fc_norm
    assert expected is not None
    assert found is not None
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 91}, "vocab_size=91: must be 90, the target's"),
        ({"num_hidden_layers": 4}, "num_hidden_layers=4: not implemented; allowed: 1"),
        ({"head_dim": 7}, "head_dim=7: must be even, because RoPE rotates pairs"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu': not implemented; allowed: 'silu'"),
        ({"layer_types": ["sliding_attention"]}, "layer_types=['sliding_attention']: not implemented; allowed: 'full_"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.rope_type='yarn': not implemented; allowed: 'default'"),
    ],
)
def test_fields_of_the_layer(copy: Path, target: TorchDecoder, fields: dict[str, Any], message: str) -> None:
    where = layer_field(copy, **fields)
    with pytest.raises(SpecrsError, match="^" + re.escape(f"{copy}/config.json: {where}{message}")):
        load(copy, target)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_hidden_size": 48}, "target_hidden_size=48: must be 32, the target's hidden_size"),
        ({"draft_vocab_size": 91}, "draft_vocab_size=91: must be an integer from 1 to 90, the target's ids"),
        ({"draft_vocab_size": 0}, "draft_vocab_size=0: must be an integer from 1 to 90"),
        ({"norm_output": 1}, "norm_output=1: must be true or false"),
        ({"norm_before_fc": True, "fc_norm": True}, "fc_norm=True: must be false where norm_before_fc is true"),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 7]},
            "eagle_aux_hidden_state_layer_ids=[1, 7]: must be a list of layers of the target, from 0 to 6",
        ),
        ({"eagle_aux_hidden_state_layer_ids": []}, "eagle_aux_hidden_state_layer_ids=[]: must be a list of layers"),
        ({"eagle_config": 1}, "eagle_config=1: must be an object"),
        (
            {"eagle_config": {"use_aux_hidden_state": False}},
            "eagle_config.use_aux_hidden_state=False: not implemented; allowed: true",
        ),
    ],
)
def test_fields_of_the_head(copy: Path, target: TorchDecoder, fields: dict[str, Any], message: str) -> None:
    edit_json(copy / "config.json", **fields)
    with pytest.raises(SpecrsError, match="^" + re.escape(f"{copy}/config.json: {message}")):
        load(copy, target)


def test_a_head_of_a_narrower_target(plain: Path, target: TorchDecoder) -> None:
    edit_json(plain / "config.json", remove=("target_hidden_size",), hidden_size=16)
    with pytest.raises(CheckpointError, match="hidden_size=16: must be 32, the target's hidden_size"):
        load(plain, target)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["PEagleDraftModel"]}, r"architectures=\['PEagleDraftModel'\]: .*LlamaForCausalLMEagle3"),
        (
            {"architectures": None},
            "architectures=None: not implemented; allowed: a list of one of LlamaForCausalLMEagle",
        ),
        ({"speculators_model_type": "peagle"}, "speculators_model_type='peagle': not implemented; allowed: 'eagle3'"),
        ({"speculators_model_type": "eagle3"}, "transformer_layer_config=None: must be an object"),
    ],
)
def test_another_architecture(plain: Path, target: TorchDecoder, fields: dict[str, Any], message: str) -> None:
    edit_json(plain / "config.json", **fields)
    with pytest.raises(SpecrsError, match=message):
        load(plain, target)


def test_another_kind_of_layer(folder: Path, target: TorchDecoder, tmp_path: Path) -> None:
    path = shutil.copytree(folder / "speculators", tmp_path / "head")
    layer_field(path, model_type="mistral")
    with pytest.raises(UnsupportedModelError, match=r"layer_config\.model_type='mistral': .*'llama' or 'qwen3'"):
        load(path, target)


def test_a_target_as_head(folder: Path, target: TorchDecoder, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "llama", layers=1, hidden=48, head_dim=8, vocab=90)
    edit_json(path / "config.json", hidden_size=32)
    with pytest.raises(CheckpointError, match=r"fc\.weight.* missing"):
        load(path, target)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, -1, r"d2t\[0\]=-1: must be an offset to an id of the target, from 0 to 89"),
        (VOCAB - 1, 90, r"d2t\[39\]=90: must be an offset to an id of the target, from 0 to 89"),
        (5, -4, r"d2t\[5\]=-4: must be at least \d+, so that ids of the target increase"),
    ],
)
def test_a_table_of_other_ids(copy: Path, target: TorchDecoder, at: int, value: int, message: str) -> None:
    table = load_file(copy / "model.safetensors")["d2t"]
    table[at] = value
    change(copy, d2t=table)
    with pytest.raises(CheckpointError, match=message):
        load(copy, target)


@pytest.mark.parametrize("table", [torch.zeros(39, dtype=torch.int64), torch.zeros(40), torch.zeros(40, 1).long()])
def test_a_misshapen_table(copy: Path, target: TorchDecoder, table: Tensor) -> None:
    change(copy, d2t=table)
    with pytest.raises(CheckpointError, match=r"d2t='\(.*\) of \w+': must be \(40,\) of int64"):
        load(copy, target)


def test_no_table(copy: Path, target: TorchDecoder) -> None:
    change(copy, remove=("d2t",))
    with pytest.raises(
        CheckpointError, match=r"draft_vocab_size=40: must be 90, the target's ids, where the file has no"
    ):
        load(copy, target)


def test_too_few_layers(folder: Path, tmp_path: Path) -> None:
    small = load_model(make_checkpoint(tmp_path / "target", layers=2, hidden=32, head_dim=8, vocab=90))
    with pytest.raises(CheckpointError, match=r"eagle_aux_hidden_state_layer_ids=None: must be given for .* 2 layers"):
        load(folder / "llama", small)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aux_hidden_state_layer_ids": [1, 7]}, r"aux_hidden_state_layer_ids\[1\]=7: .*0 to 6, a layer of the target"),
        ({"aux_hidden_state_layer_ids": []}, r"aux_hidden_state_layer_ids=\[\]: must be a list of at least one"),
        ({"aux_hidden_state_layer_ids": [2, 1, 3]}, r"aux_hidden_state_layer_ids=\[2, 1, 3\]: must ascend"),
        ({"rope_theta": 0}, r"speculative_config\.rope_theta=0: must be a finite number greater than 0"),
    ],
)
def test_overrides_that_cannot_be(folder: Path, target: TorchDecoder, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        load(folder / "llama", target, **options)


def test_overrides(copy: Path, target: TorchDecoder) -> None:
    head = load(copy, target, aux_hidden_state_layer_ids=[0, 1, 6], rope_theta=7)
    assert head.aux_layer_ids == (0, 1, 6)
    assert head.weights.config.layer.rope_theta == 7.0


def logged(caplog: pytest.LogCaptureFixture, path: Path, target: TorchDecoder, **options: Any) -> str:
    with caplog.at_level(logging.INFO, "specrs"):
        load(path, target, **options)
    return caplog.text


def test_the_reading_of_explicit_ids_is_logged(
    copy: Path, target: TorchDecoder, caplog: pytest.LogCaptureFixture
) -> None:
    assert "eagle_aux" not in logged(caplog, copy, target)
    edit_json(copy / "config.json", eagle_aux_hidden_state_layer_ids=[5, 1, 1, 2])
    text = logged(caplog, copy, target)
    assert "[5, 1, 1, 2] is read as 'hidden states at the entry of layer id', as vLLM does" in text
    assert load(copy, target).aux_layer_ids == (1, 2, 5)
    caplog.clear()
    assert "eagle_aux" not in logged(caplog, copy, target, aux_hidden_state_layer_ids=[0, 1, 2])


def test_nested_ids(copy: Path, target: TorchDecoder) -> None:
    edit_json(copy / "config.json", eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]})
    assert load(copy, target).aux_layer_ids == (0, 1, 2)


def test_a_missing_theta_is_logged(plain: Path, target: TorchDecoder, caplog: pytest.LogCaptureFixture) -> None:
    assert "rope_theta" not in logged(caplog, plain, target)
    edit_json(plain / "config.json", remove=("rope_theta",))
    assert "rope_theta is missing; taken as 10000" in logged(caplog, plain, target)
    assert load(plain, target).weights.config.layer.rope_theta == 10000.0


def test_a_missing_residual_is_logged(
    folder: Path, target: TorchDecoder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = shutil.copytree(folder / "speculators", tmp_path / "head")
    assert "norm_before_residual" not in logged(caplog, path, target)
    edit_json(path / "config.json", remove=("norm_before_residual",))
    assert "norm_before_residual is missing; taken as false" in logged(caplog, path, target)


def as_pickle(path: Path, name: str = "pytorch_model.bin", **others: Any) -> None:
    torch.save(load_file(path / "model.safetensors") | others, path / name)
    (path / "model.safetensors").unlink()


def test_a_pickled_head_is_converted(
    copy: Path, target: TorchDecoder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = load(copy, target)
    as_pickle(copy)
    with pytest.raises(CheckpointError, match=r"holds only pickled weights.*`specrs convert-head (\S+) FOLDER`"):
        load(copy, target)
    out = tmp_path / "converted"
    assert main(["convert-head", str(copy), str(out)]) == 0
    assert f"tensors in {out}" in capsys.readouterr().out
    x = torch.ones(1, 3, 32)
    assert torch.equal(load(out, target).fuse(x), expected.fuse(x))
    assert main(["convert-head", str(copy), str(out)]) == 2
    assert "must be a folder without safetensors files" in capsys.readouterr().err


class Harm:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("harmed"),))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (Harm(), "no file of tensors alone, or damaged"),
        ([1], "must hold tensors by name"),
        ({"a": 1}, "must hold tensors"),
    ],
    ids=["code", "a list", "a number"],
)
def test_a_pickle_of_something_else(
    plain: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: Any,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    as_pickle(plain)
    torch.save(content, plain / "pytorch_model.bin", pickle_module=pickle)
    assert main(["convert-head", str(plain), "out"]) == 2
    assert message in capsys.readouterr().err
    assert not Path("harmed").exists()
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"vocab_size": 91}, "vocab_size=91: must be 90, the target's; use a head that was trained for this target"),
        (
            {"target_hidden_size": 48},
            "target_hidden_size=48: must be 32, the target's hidden_size; use a head that was",
        ),
        (
            {"draft_vocab_size": 91},
            "draft_vocab_size=91: must be an integer from 1 to 90, the target's ids; use a head",
        ),
        ({}, None),
    ],
    ids=str,
)
def test_a_head_of_another_target_is_rejected_before_weights_are_read(
    copy: Path, folder: Path, tmp_path: Path, fields: dict[str, int], says: str | None
) -> None:
    """Neither folder has weights. A head that fits gets as far as to miss the target's."""
    if "vocab_size" in fields:
        layer_field(copy, **fields)
    else:
        edit_json(copy / "config.json", **fields)
    (copy / "model.safetensors").unlink()
    target = tmp_path / "target"
    target.mkdir()
    shutil.copy(folder / "target" / "config.json", target)
    speculative = {"method": "eagle3", "model": str(copy), "num_speculative_tokens": 2}
    with pytest.raises(CheckpointError) as raised:
        load_weights(EngineConfig.from_kwargs(model=str(target), speculative_config=speculative))
    where = f"{target}: " if says is None else f"{copy}/config.json: "
    assert str(raised.value).startswith(where)
    assert (says or "safetensors") in str(raised.value)
