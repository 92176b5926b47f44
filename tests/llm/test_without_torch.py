"""A CPU needs no torch: with torch, Triton and transformers blocked, native passes generate the same texts as without
the block.

The cases are in `native_cases`. The block is a `sitecustomize` module, so child processes of the blocked process are
blocked as well.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_json, make_checkpoint, perturb_checkpoint, write_tokenizer
from engine.other_vocabulary import rename
from gguf_files import write_gguf
from lora.adapters import Spec, write_adapter
from quantized_files import awq, compressed, fp8_block, gptq
from safetensors.torch import load_file, save_file
from server.harness import MAIN, Server
from specrs.cli import main

from . import native_cases

BLOCKED = ("torch", "triton", "transformers")
SIZES: dict[str, Any] = {"hidden": 64, "intermediate": 96, "head_dim": 32, "kv_heads": 1, "vocab": 224}
CHAT = "{% for m in messages %}{{ m['role'] ~ ': ' ~ m['content'] ~ '\\n' }}{% endfor %}"
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT4 = {"num_bits": 4, "strategy": "group", "group_size": 32}


def write_checkpoints(folder: Path) -> None:
    """Write what the cases read: a small random model of each family, and of each quantized format."""
    for family in native_cases.FAMILIES:
        make_checkpoint(folder / family, family, dtype=torch.bfloat16, **SIZES)
    source = folder / "qwen3"
    untied = make_checkpoint(folder / "untied", tie=False, dtype=torch.bfloat16, **SIZES)
    formats: dict[str, Callable[[Path, Path], Path]] = {
        "gptq": gptq,
        "gptq, act-order": lambda s, p: gptq(s, p, desc_act=True),
        "awq": awq,
        "fp8": fp8_block,
        "ct-fp8": lambda s, p: compressed(s, p, "float-quantized", strategy="channel", **FP8),
        "ct-int8": lambda s, p: compressed(s, p, "int-quantized", num_bits=8, strategy="channel"),
        "ct-int4": lambda s, p: compressed(s, p, "pack-quantized", **INT4),
        "ct-int4-asymmetric": lambda s, p: compressed(s, p, "pack-quantized", symmetric=False, **INT4),
        "ct-nvfp4": lambda s, p: compressed(
            s, p, "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
        ),
    }
    for name, write in formats.items():
        write(untied, folder / name)
    write_mxfp4(folder / "gpt_oss", folder / "mxfp4")
    llama = make_checkpoint(folder / "for_gguf", "llama", max_position_embeddings=1024, **SIZES)
    for kind in ("F16", "Q8_0", "Q4_0", "Q4_1"):
        write_gguf(llama, folder / f"{kind.lower()}.gguf", kind)
    make_checkpoint(folder / "float16", dtype=torch.float16, **SIZES)
    rename(perturb_checkpoint(source, folder / "near", noise=0.05), folder / "other_ids")
    write_adapter(folder / "adapter", source, Spec(("q_proj", "down_proj")))
    shutil.copytree(source, folder / "chat")
    write_tokenizer(folder / "chat", SIZES["vocab"], chat_template=CHAT)


def write_mxfp4(source: Path, path: Path) -> None:
    """Copy the gpt-oss checkpoint at `source` to `path`, with random codes in place of the experts' matrices."""
    shutil.copytree(source, path)
    generator, tensors = torch.Generator().manual_seed(1), {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        shape = (experts, outputs, inputs // 32, 16)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(121, 125, shape[:-1], generator=generator, dtype=torch.uint8)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    edit_json(path / "config.json", quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": skipped})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("native")
    write_checkpoints(made)
    return made


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables for processes that cannot import the blocked packages."""
    block = tmp_path_factory.mktemp("block")
    lines = ["import sys", *(f"sys.modules[{name!r}] = None" for name in BLOCKED)]
    (block / "sitecustomize.py").write_text("\n".join(lines) + "\n")
    paths = [str(block), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}


def python(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.fixture(scope="module")
def blocked(folder: Path, environment: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return the result or error of every case of `native_cases` by name, from one process that cannot import torch."""
    done = python(environment, native_cases.__file__, str(folder))
    assert done.returncode == 0, done.stderr
    return {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", BLOCKED)
def test_the_block_blocks(name: str, environment: dict[str, str]) -> None:
    assert "ModuleNotFoundError" in python(environment, "-c", f"import {name}").stderr


@pytest.mark.parametrize("name", native_cases.names(Path()))
def test_a_case_needs_no_torch(name: str, folder: Path, blocked: dict[str, dict[str, Any]]) -> None:
    """Check that tokens, texts and log probabilities equal to the bit those of a process that has torch."""
    assert "error" not in blocked[name], blocked[name]["error"]
    assert blocked[name]["result"] == json.loads(json.dumps(native_cases.run(name, folder)))


COMMANDS = {
    "bench throughput --num-prompts 2 --output-len 4 --disable-tqdm": "Total num output tokens:  8",
    "bench latency --input-len 4 --output-len 2 --num-iters 1": "latency",
    "demo --k 1 --max-tokens 3": "All 20 texts with drafts equal vanilla's, token for token.",
    "demo --k 1 --max-tokens 3 --model q8_0.gguf": "texts with drafts equal vanilla's, token for token.",
}
"""Command lines, each with a part of the output that it must print."""


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_needs_no_torch(
    line: str, folder: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    done = python(environment, "-c", MAIN, *line.split())
    assert done.returncode == 0, done.stderr
    assert COMMANDS[line] in done.stdout


@pytest.mark.parametrize("model", [[], ["--model", "q8_0.gguf"]], ids=["bundled", "GGUF"])
def test_generate_needs_no_torch(
    model: list[str],
    folder: Path,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    argv = ["generate", "--prompt", native_cases.TEXTS[0], "--max-tokens", "12", *model]
    done = python(environment, "-c", MAIN, *argv)
    assert done.returncode == 0, done.stderr
    assert main(argv) == 0
    assert done.stdout == capsys.readouterr().out


def test_a_server_needs_no_torch(
    folder: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, blocked: dict[str, dict[str, Any]]
) -> None:
    """Check a server without torch: a completion, a chat, a grammar, log probabilities and a stream; then it ends."""
    monkeypatch.setattr(os, "environ", environment)
    server = Server("--model", str(folder / "chat"), "--dtype", "float32", "--max-model-len", "256")
    try:
        body = {"prompt": native_cases.IDS[0], "temperature": 0, "max_tokens": 6, "ignore_eos": True}
        text = server.complete(**body)["choices"][0]["text"]
        assert "".join(chunk["choices"][0]["text"] for chunk in server.stream(**body)) == text
        assert server.complete(**body, logprobs=2)["choices"][0]["logprobs"]["token_logprobs"]
        assert server.complete(**body | {"structured_outputs": {"regex": "ab+"}})["choices"][0]["text"].startswith("ab")
        messages = [{"role": "user", "content": "the cat"}]
        chat = server.chat(messages=messages, temperature=0, max_tokens=12, ignore_eos=True)
        _, [_, expected, *_] = blocked["chat"]["result"]
        assert chat["choices"][0]["message"]["content"] == expected
    finally:
        server.process.terminate()
        code = server.process.wait(60)
    assert code == 0
