"""Native models of every kind of file in a process without torch, triton and transformers: they give the bits that they
give otherwise.

That the numbers are right is for the tests of each format, which compare them with torch's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint, make_eagle3
from gguf_files import write_gguf
from lora.adapters import Spec, write_adapter
from mtp_reference import add_head
from quantized_files import awq, compressed, fp8_block, gptq, mxfp4

from models import torchless

SIZES = {"head_dim": 32, "kv_heads": 2, "hidden": 64, "intermediate": 160, "layers": 2, "vocab": 83, "tie": False}
WIDE = {"hidden": 256, "intermediate": 512, "head_dim": 64, "kv_heads": 2, "layers": 1, "vocab": 83}
PLAIN_GGUF, OTHER_GGUF = ("F32", "F16", "BF16"), ("TQ1_0", "TQ2_0")
CODES_GGUF = ("Q4_0", "Q8_0", "Q6_K", "Q4_1", "Q4_K")


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Model that each case loads, by the case's name. GGUF types that need the package gguf come last."""
    folder = tmp_path_factory.mktemp("files")

    def make(name: str, family: str = "qwen3", **fields: Any) -> Path:
        return make_checkpoint(folder / name, family, with_tokenizer=False, **(SIZES | fields))

    plain = {
        str(dtype)[6:]: make(str(dtype)[6:], dtype=dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)
    }
    source = plain["bfloat16"]
    wide = make_checkpoint(folder / "wide", "llama", initializer_range=0.05, **WIDE)
    target = make("target", layers=6)
    experts = make("gpt_oss", "gpt_oss", dtype=torch.bfloat16, intermediate=96, kv_heads=1)
    ignored = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    sources: dict[str, Path] = {
        **plain,
        "sharded": make("sharded", max_shard_size="60KB"),
        "mixtral": make("mixtral", "mixtral"),
        "gemma3": make("gemma3", "gemma3_text"),
        "gptq": gptq(source, folder / "gptq"),
        "gptq act order": gptq(source, folder / "act_order", desc_act=True),
        "awq": awq(source, folder / "awq"),
        "fp8": fp8_block(source, folder / "fp8", block=(64, 64)),
        "ct int8": compressed(source, folder / "int8", "int-quantized", num_bits=8, strategy="channel"),
        "ct int4": compressed(source, folder / "int4", "pack-quantized", num_bits=4, strategy="group", group_size=32),
        "ct fp8": compressed(
            source, folder / "ct_fp8", "float-quantized", num_bits=8, type="float", strategy="channel"
        ),
        "mxfp4": mxfp4(experts, folder / "mxfp4", {"quant_method": "mxfp4", "modules_to_not_convert": ignored}),
    }
    made: dict[str, dict[str, Any]] = {name: {"source": str(path)} for name, path in sources.items()}
    for kind in ("int8", "int4", "fp8"):
        made[f"quantization={kind}"] = {"source": str(source), "load": {"quantization": kind}}
    made |= {
        "dtype=bfloat16": {"source": str(plain["float32"]), "load": {"dtype": "bfloat16"}},
        "not exact": {"source": str(sources["fp8"]), "exact": False},
        "dummy": {"source": str(source), "load": {"load_format": "dummy"}},
        "fp8 KV": {"source": str(source), "kv": "fp8_e4m3"},
        "mtp": {"source": str(add_head(make("hybrid", "qwen3_5_text"))), "mtp": True},
        "head": {"source": str(target), "head": str(make_eagle3(folder / "head", target))},
        "lora": {
            "source": str(source),
            "lora": str(write_adapter(folder / "lora", source, Spec(("q_proj", "down_proj"), rank=4), seed=1)),
        },
    }
    for kind in (*PLAIN_GGUF, *CODES_GGUF, *OTHER_GGUF):
        made[f"gguf {kind}"] = {"source": str(write_gguf(wide, folder / f"{kind}.gguf", kind))}
    return made


@pytest.fixture(scope="module")
def without(cases: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any]]:
    """Logits of all cases from a process without torch, and the modules that the process had imported after each
    case."""
    folder = tmp_path_factory.mktemp("without")
    (folder / "cases.json").write_text(json.dumps(cases))
    arguments = [sys.executable, "-W", "error", torchless.__file__, str(folder / "cases.json"), str(folder / "out.npz")]
    ended = subprocess.run(arguments, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stderr
    with np.load(folder / "out.npz") as found:
        logits = dict(found)
    return logits, json.loads((folder / "out.json").read_text())


def test_logits_are_those_with_torch(cases: dict[str, dict[str, Any]], without: tuple[Any, dict[str, Any]]) -> None:
    found = without[0]
    assert set(found) == cases.keys()
    for name, case in cases.items():
        expected = torchless.logits_of(case)
        assert np.isfinite(expected).all(), name
        assert expected.std() > 1e-4, name
        assert np.array_equal(found[name].view(np.int32), expected.view(np.int32)), name
    # An adapter, codes of K and V, and quantizing change what they should, or equality would say little.
    for name in ("lora", "fp8 KV", "quantization=int8", "quantization=int4", "quantization=fp8", "gptq"):
        assert not np.array_equal(found[name], found["bfloat16"]), name


def test_nothing_heavy_is_imported(without: tuple[Any, dict[str, Any]]) -> None:
    """Check that native models import neither torch, triton nor transformers. The package gguf is imported only for
    types that specrs does not read itself."""
    imported = dict(without[1])
    for kind in OTHER_GGUF:
        assert imported.pop(f"gguf {kind}") == ["gguf"]
    assert {name for name, packages in imported.items() if packages} == set()
