"""Checkpoints of tests as GGUF files, written by the package `gguf`. Holds no tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf_families import FILE_NAMES, architecture_fields, file_tensors
from safetensors.torch import load_file

WRITTEN = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "TQ1_0", "TQ2_0", "MXFP4")
"""GGUF types that the package `gguf` can quantize to."""


def gguf_name(name: str) -> str:
    """Return the GGUF name of a tensor of a Llama or Qwen checkpoint."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 64)
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def draw_blocks(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Return blocks of random bytes with small fp16 scales, for types that the package cannot quantize to."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (int(np.prod(shape[:-1])), shape[-1] // block, size), dtype=np.uint8)
    at = {"Q4_1": (0, 2), "Q5_1": (0, 2)}
    at |= {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,)}
    for start in at.get(kind, (0,)):
        scales = (rng.random(blocks.shape[:2]) * 0.003 + 0.001).astype(np.float16)
        blocks[..., start : start + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


PLAIN = (".bias", "inp.weight", "inp_shexp.weight", "ssm_conv1d.weight", "shortconv.conv.weight")
"""Endings of the names of two-dimensional tensors that files never have in blocks."""


def write_gguf(
    source: Path,
    path: Path,
    kind: str = "F32",
    replaced: dict[str, Any] | None = None,
    *,
    plain: str = "F32",
    seed: int = 0,
    architecture: str | None = None,
    tensors_in_a_part: int = 0,
    extra: dict[str, np.ndarray] | None = None,
    kinds: dict[str, str] | None = None,
    **fields: Any,
) -> Path:
    """Write the checkpoint at `source` as a GGUF file. Matrices have the type `kind`; norms, routers and biases have
    `plain`. If `kind` is not in `WRITTEN`, matrices are random blocks from `seed`, not the checkpoint's.

    `architecture` is the file's name for the family, if there are several. With `tensors_in_a_part` the model is in
    several files of as many tensors, and the first one is returned.

    `extra` are more tensors, by their names in the file. `kinds` are the types of matrices whose names in the file
    contain a key.

    `replaced` and `fields` replace metadata: in `fields` a key's dots are double underscores. None leaves a key out.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    family = architecture or FILE_NAMES.get(config["model_type"], config["model_type"])
    metadata = {f"{family}.{field}": value for field, value in architecture_fields(config, family).items()}
    if (source / "tokenizer.json").exists():
        metadata |= tokenizer_fields(source)
    metadata["tokenizer.ggml.eos_token_id"] = config["eos_token_id"]
    metadata |= {key.replace("__", "."): value for key, value in ((replaced or {}) | fields).items()}
    writer = gguf.GGUFWriter(path, family, split_max_tensors=tensors_in_a_part)
    _add_metadata(writer, metadata)
    rng = np.random.default_rng(seed)
    added = [] if extra is None else list(extra.items())
    for name, array in [*file_tensors(config, family, load_file(source / "model.safetensors")), *added]:
        packed = array.ndim > 1 and not name.endswith(PLAIN)
        own = next((other for part, other in (kinds or {}).items() if part in name), kind)
        given = gguf.GGMLQuantizationType[own if packed else plain]
        drawn = given.name not in WRITTEN
        data = draw_blocks(given.name, array.shape, rng) if drawn else gguf.quants.quantize(array, given)
        writer.add_tensor(name, data, raw_dtype=given)
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        from specrs.kernels.rotary import inverse_frequencies

        scaling = {key: rope[key] for key in rope if key not in ("rope_type", "rope_theta")}
        theta = rope["rope_theta"]
        head_dim = config["head_dim"]
        factors = inverse_frequencies(head_dim, theta) / inverse_frequencies(head_dim, theta, **scaling)
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if not tensors_in_a_part:
        return path
    (first,) = path.parent.glob(f"{path.stem}-00001-of-*.gguf")
    return first


def write_metadata(path: Path, metadata: dict[str, Any]) -> Path:
    """Write a GGUF file with metadata alone, which is enough for a tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    _add_metadata(writer, metadata)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_metadata(writer: gguf.GGUFWriter, metadata: dict[str, Any]) -> None:
    for key, value in metadata.items():
        match value:
            case None:
                continue
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)


def tokenizer_fields(source: Path) -> dict[str, Any]:
    """Return the byte-level tokenizer of a folder as GGUF metadata."""
    content = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    added = {token["id"]: token for token in content["added_tokens"]}
    tokens = {i: token for token, i in vocab.items()} | {i: token["content"] for i, token in added.items()}
    kinds = [3 if i in added and added[i]["special"] else 4 if i in added else 1 for i in range(len(tokens))]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [tokens[i] for i in range(len(tokens))],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
    }


def with_tokens(source: Path, named: dict[int, tuple[str, int]]) -> dict[str, Any]:
    """Return `tokenizer_fields` with other names and types for some ids. New ids follow the folder's last one."""
    fields = tokenizer_fields(source)
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    for i, (name, kind) in sorted(named.items()):
        tokens[i : i + 1], kinds[i : i + 1] = [name], [kind]
    known = set(tokens)
    pairs = [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]]
    fields["tokenizer.ggml.merges"] = [" ".join(pair) for pair in pairs if {*pair, "".join(pair)} <= known]
    return fields


def dequantized(path: Path, name: str) -> torch.Tensor:
    """Return the numbers of a file's tensor in float64, by the package `gguf`; rows in the file's order."""
    (tensor,) = [tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == name]
    numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return torch.from_numpy(np.array(numbers, dtype=np.float64).reshape(tensor.shape[::-1].tolist()))
