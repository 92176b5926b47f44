"""Random PEFT adapters of small checkpoints, and checkpoints with an adapter merged into their weights. Holds no
tests."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

PREFIX = "base_model.model."


@dataclass(frozen=True)
class Spec:
    """Modules that an adapter changes, by the last part of their names."""

    leaves: tuple[str, ...]
    rank: int = 4
    alpha: float = 8.0
    use_rslora: bool = False
    layers: tuple[int, ...] | None = None
    named_by: str = "list"
    """How adapter_config.json names the modules: `list`, `expression`, or `all-linear` if it is all of them."""
    ranks: dict[str, int] = field(default_factory=dict)
    alphas: dict[str, float] = field(default_factory=dict)
    experts: bool = False
    """Whether the adapter changes single experts, too."""


def projections(checkpoint: Path, experts: bool = False) -> dict[str, torch.Tensor]:
    """Return the weights that adapters may change, by the names of their modules, with those of single experts or
    without."""
    tensors = load_file(checkpoint / "model.safetensors")
    nets = (".in_proj_qkv", ".in_proj_z", ".in_proj_b", ".in_proj_a", ".in_proj_qkvz", ".in_proj_ba")
    ends = tuple(f"{leaf}.weight" for leaf in ("_proj", *nets, ".w1", ".w2", ".w3"))
    names = [name for name in tensors if name.endswith(ends) and "shared_expert" not in name]
    names = [name for name in names if experts or ".experts." not in name]
    return {name.removesuffix(".weight"): tensors[name] for name in names}


def leaves_of(checkpoint: Path, experts: bool = False) -> list[str]:
    return sorted({module.rpartition(".")[2] for module in projections(checkpoint, experts)})


def specs(leaves: list[str]) -> st.SearchStrategy[Spec]:
    """Draw an adapter for a model of two layers with these modules."""
    some = st.lists(st.sampled_from(leaves), min_size=1, unique=True).map(tuple)
    ranks = st.dictionaries(st.sampled_from(leaves), st.integers(1, 6), max_size=2)
    alphas = st.dictionaries(st.sampled_from(leaves), st.sampled_from([0.5, 3.0, 20.0]), max_size=2)

    def spec(chosen: tuple[str, ...], named_by: str, **rest: Any) -> Spec:
        if named_by == "all-linear":
            return Spec(tuple(leaves), named_by=named_by, **rest)
        return Spec(chosen, named_by=named_by, **rest)

    return st.builds(
        spec,
        some,
        st.sampled_from(["list", "expression", "all-linear"]),
        rank=st.integers(1, 9),
        alpha=st.sampled_from([1, 2.5, 16]),
        use_rslora=st.booleans(),
        layers=st.sampled_from([None, None, (1,), (0, 1)]),
        ranks=ranks,
        alphas=alphas,
    )


def write_adapter(path: Path, checkpoint: Path, spec: Spec, *, seed: int = 0, **fields: Any) -> Path:
    """Write an adapter under `path` (created, or written anew) as PEFT does; `fields` go to its adapter_config.json."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, weight in projections(checkpoint, spec.experts).items():
        leaf, layer = module.rpartition(".")[2], int(module.split(".")[2])
        if leaf not in spec.leaves or (spec.layers is not None and layer not in spec.layers):
            continue
        rank = spec.ranks.get(leaf, spec.rank)
        a = torch.randn((rank, weight.shape[1]), generator=generator) / math.sqrt(weight.shape[1])
        tensors[f"{PREFIX}{module}.lora_A.weight"] = a
        tensors[f"{PREFIX}{module}.lora_B.weight"] = torch.randn((len(weight), rank), generator=generator) * 0.2
    expression = rf".*\.({'|'.join(spec.leaves)})"
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "anything",
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": 0.1,
        "use_rslora": spec.use_rslora,
        "target_modules": {"list": list(spec.leaves), "expression": expression}.get(spec.named_by, spec.named_by),
        "layers_to_transform": None if spec.layers is None else list(spec.layers),
        "rank_pattern": spec.ranks,
        "alpha_pattern": spec.alphas,
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "use_dora": False,
        "loftq_config": {},
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(config | fields), encoding="utf-8")
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    return path


def merge(checkpoint: Path, adapter: Path, path: Path) -> Path:
    """Write `checkpoint` with `W + scale B A` in place of W under `path`, in float64."""
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    factors = {name: tensor.double() for name, tensor in load_file(adapter / "adapter_model.safetensors").items()}
    tensors = {name: tensor.double() for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    for name, a in factors.items():
        if name.endswith(".lora_B.weight"):
            continue
        module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        alpha = config["alpha_pattern"].get(module.rpartition(".")[2], config["lora_alpha"])
        scale = alpha / math.sqrt(len(a)) if config["use_rslora"] else alpha / len(a)
        tensors[f"{module}.weight"] += scale * factors[name.replace("lora_A", "lora_B")] @ a
    shutil.copytree(checkpoint, path, dirs_exist_ok=True)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path
