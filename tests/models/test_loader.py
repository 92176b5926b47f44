"""Checkpoints that are missing, damaged or not what config.json says; the hub, without a network."""

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from checkpoints import edit_json, make_checkpoint
from safetensors.torch import load_file, save_file
from specrs.errors import CheckpointError, UnsupportedModelError
from specrs.models.loader import load_config
from specrs.models.torch_loader import load_model

from models.harness import Feeder


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tied"), layers=1)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_checkpoint(tmp_path_factory.mktemp("sharded"), layers=1, max_shard_size="100KB")
    assert len(list(path.glob("model-*.safetensors"))) > 1
    return path


@pytest.fixture
def copy(tied: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tied, tmp_path / "copy")


@pytest.fixture
def sharded_copy(sharded: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sharded, tmp_path / "copy")


def change_tensors(path: Path, remove: tuple[str, ...] = (), **tensors: torch.Tensor) -> None:
    file = path / "model.safetensors"
    content = {name: value for name, value in load_file(file).items() if name not in remove}
    save_file(content | {name.replace("__", "."): value for name, value in tensors.items()}, file)


def logits(path: Path) -> torch.Tensor:
    return Feeder(load_model(path, dtype="float64")).feed_chunks([1, 2, 3], [3])


def assert_same(one: torch.Tensor, other: torch.Tensor) -> None:
    """Check logits of the same weights, whose place in memory may change the order of sums."""
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_path_and_string_are_the_same(tied: Path) -> None:
    assert load_config(tied) == load_config(str(tied)) == load_model(str(tied)).config


def test_tied_head_in_the_file(copy: Path) -> None:
    expected = logits(copy)
    embedding = load_file(copy / "model.safetensors")["model.embed_tokens.weight"]
    change_tensors(copy, lm_head__weight=embedding.clone())
    assert_same(logits(copy), expected)


def test_rope_buffers_are_ignored(copy: Path) -> None:
    expected = logits(copy)
    change_tensors(copy, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(24))
    assert_same(logits(copy), expected)


def test_generation_config_may_be_missing(copy: Path) -> None:
    (copy / "generation_config.json").unlink()
    edit_json(copy / "config.json", eos_token_id=[3, 4])
    assert load_config(copy).eos_token_ids == (3, 4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/folder", "there is no such folder"),
        ("./nothing", "there is no such folder"),
        ("a/b/c", "there is no such folder"),
        (Path("nothing"), "there is no such folder"),
        (Path(__file__), "this is a file"),
    ],
)
def test_no_folder(name: str | Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^model='.*': must be a folder or a hub id, {message}"):
        load_model(name)


def test_revision_of_a_folder(tied: Path) -> None:
    with pytest.raises(CheckpointError, match="revision='main': must be None"):
        load_model(tied, revision="main")


def test_no_config(copy: Path) -> None:
    (copy / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load_model(copy)


@pytest.mark.parametrize("content", ["{", "[1]", "\xff\xfe", "[" * 100_000])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_config_is_no_json_object(copy: Path, file: str, content: str) -> None:
    (copy / file).write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match=file):
        load_model(copy)


def test_unknown_architecture(copy: Path) -> None:
    edit_json(copy / "config.json", architectures=["GPT2LMHeadModel"])
    with pytest.raises(UnsupportedModelError, match=r"GPT2LMHeadModel.*allowed: .*Qwen3ForCausalLM"):
        load_model(copy)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_only_pickled_weights(copy: Path, name: str) -> None:
    (copy / "model.safetensors").rename(copy / name)
    with pytest.raises(CheckpointError, match=f"only pickled weights \\({name} is there\\)"):
        load_model(copy)


def test_no_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor .*index\.json is there"):
        load_model(copy)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_weights(copy: Path, keep: int) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged or truncated"):
        load_model(copy)


def test_missing_tensor(copy: Path) -> None:
    change_tensors(copy, remove=("model.layers.0.self_attn.k_norm.weight",))
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.self_attn\.k_norm\.weight is missing"):
        load_model(copy)


def test_missing_head(copy: Path) -> None:
    edit_json(copy / "config.json", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        load_model(copy)


def test_missing_layers(copy: Path) -> None:
    edit_json(copy / "config.json", num_hidden_layers=2, layer_types=None)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\..* and 8 more are missing"):
        load_model(copy)


def test_extra_tensors(copy: Path) -> None:
    change_tensors(copy, model__layers__0__self_attn__q_proj__bias=torch.zeros(288))
    with pytest.raises(CheckpointError, match=r"q_proj\.bias is not part of this architecture"):
        load_model(copy)


def test_misshapen_tensor(copy: Path) -> None:
    change_tensors(copy, model__layers__0__mlp__up_proj__weight=torch.zeros(96, 160))
    expected = r"mlp\.up_proj\.weight has shape \(96, 160\), config\.json makes it \(160, 96\)"
    with pytest.raises(CheckpointError, match=expected):
        load_model(copy)


def test_misshapen_tied_head(copy: Path) -> None:
    change_tensors(copy, lm_head__weight=torch.zeros(211, 95))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight has shape \(211, 95\)"):
        load_model(copy)


def test_quantized_tensor(copy: Path) -> None:
    change_tensors(copy, model__norm__weight=torch.zeros(96, dtype=torch.int8))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is I8; must be one of F64, F32, BF16, F16"):
        load_model(copy)


def test_missing_shard(sharded_copy: Path) -> None:
    shard = min(sharded_copy.glob("model-*.safetensors"))
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"{shard.name} is missing, model\.safetensors\.index\.json names it"):
        load_model(sharded_copy)


@pytest.mark.parametrize("weight_map", [None, [1], {"a": 1}])
def test_index_without_map(sharded_copy: Path, weight_map: object) -> None:
    (sharded_copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="must map tensor names to file names"):
        load_model(sharded_copy)


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/tmp/model.safetensors", "weights.bin"])
def test_index_out_of_the_folder(sharded_copy: Path, name: str) -> None:
    (sharded_copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="must be a safetensors file in the same folder"):
        load_model(sharded_copy)


def test_sharded_is_the_same_model(sharded: Path, tied: Path) -> None:
    assert_same(logits(sharded), logits(tied))


def test_hub_id(tied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def download(repo: str, **kwargs: Any) -> str:
        calls.append({"repo": repo, **kwargs})
        return str(tied)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    expected = load_config(tied)
    assert load_model("someone/model", revision="v1").config == expected
    assert load_config("gpt2") == expected
    model, config = calls
    assert (model["repo"], model["revision"]) == ("someone/model", "v1")
    assert (config["repo"], config["revision"]) == ("gpt2", None)
    files = [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "tokenizer.model",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors",
        "pytorch_model.bin",
        "modeling_x.py",
        "consolidated.safetensors",
        "original/params.json",
        "onnx/model.onnx",
        "model.gguf",
    ]

    def fetched(call: dict[str, Any]) -> list[str]:
        from huggingface_hub.utils import filter_repo_objects

        allow, ignore = call["allow_patterns"], call["ignore_patterns"]
        return list(filter_repo_objects(files, allow_patterns=allow, ignore_patterns=ignore))

    assert fetched(model) == files[:8]
    assert fetched(config) == files[:6]
