"""Quantized checkpoints for tests. Holds no tests.

compressed-tensors writes its formats itself. FP8 by block, GPTQ and AWQ are written here from the formats' definitions,
a number at a time in numpy: no library that writes them is a dependency.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoints import edit_json
from safetensors.torch import load_file, save_file
from torch import Tensor

Written = tuple[dict[str, Tensor], Tensor]
"""Tensors of a layer by suffix, and its dequantized weight, float64."""
Writer = Callable[[str, Tensor], Written]
"""Function from a layer's name and its weight to its quantized form."""


def rewrite(source: Path, path: Path, config: dict[str, Any], write: Writer, skip: Callable[[str], bool]) -> Path:
    """Copy the checkpoint at `source` to `path` with quantized projections. Next to it, `path`.numbers gets the
    dequantized model in float64, without `quantization_config`."""
    numbers = path.with_name(path.name + ".numbers")
    for folder in (path, numbers):
        shutil.copytree(source, folder)
    tensors, plain = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        plain[name] = tensor.double()
        if not layer.endswith(("_proj", ".w1", ".w2", ".w3")) or skip(layer):
            tensors[name] = tensor
            continue
        made, plain[name] = write(layer, tensor.float())
        tensors |= {f"{layer}.{suffix}": value.contiguous() for suffix, value in made.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    save_file(plain, numbers / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((path / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(json.dumps(content | {"quantization_config": config}), encoding="utf-8")
    return path


def no_layer(_: str) -> bool:
    """Return False: no layer is skipped."""
    return False


def fp8_block(source: Path, path: Path, *, block: tuple[int, int] = (128, 128), **fields: Any) -> Path:
    """Write a checkpoint in the format of Qwen3-FP8: e4m3 codes with a scale for each block. The first layer's down
    projection is not quantized."""

    def write(_: str, weight: Tensor) -> Written:
        out, size = weight.shape
        codes, exact = (
            torch.empty_like(weight, dtype=torch.float8_e4m3fn),
            torch.empty_like(weight, dtype=torch.float64),
        )
        scales = torch.empty(-(-out // block[0]), -(-size // block[1]))
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                at = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
                scales[i, j] = weight[at].abs().max() / 448
                codes[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
                exact[at] = codes[at].double() * scales[i, j].double()
        return {"weight": codes, "weight_scale_inv": scales}, exact

    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.down_proj"],
    }
    return rewrite(source, path, config | fields, write, lambda name: name == "model.layers.0.mlp.down_proj")


def fp8_matrix(source: Path, path: Path, names: tuple[str, str] = ("weight_scale", "input_scale")) -> Path:
    """Write a checkpoint in FP8 with a scale for each matrix and one for its inputs. `names` are their tensors':
    vLLM's, or those of transformers and Ministral 3."""

    def write(_: str, weight: Tensor) -> Written:
        scale = weight.abs().max() / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        tensors = {"weight": codes, names[0]: scale, names[1]: torch.tensor(0.25)}
        return tensors, codes.double() * scale.double()

    config = {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "weight_block_size": None,
        "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    }
    return rewrite(source, path, config, write, no_layer)


def _codes(weight: np.ndarray, group_of: np.ndarray, bits: int, sym: bool) -> tuple[np.ndarray, ...]:
    """Return codes `[out, in]`, zero points and fp16 scales `[out, groups]`."""
    out, groups, top = weight.shape[0], group_of.max() + 1, 2**bits - 1
    codes = np.zeros(weight.shape, np.int64)
    zeros, scales = np.zeros((out, groups), np.int64), np.zeros((out, groups), np.float16)
    for row in range(out):
        for group in range(groups):
            of = weight[row, group_of == group]
            low, high = min(of.min(), 0.0), max(of.max(), 0.0)
            if sym:
                high = max(-low, high)
                low = -high
            scale = np.float16((high - low) / top)
            scales[row, group] = scale
            zeros[row, group] = (top + 1) // 2 if sym else np.clip(np.rint(-low / float(scale)), 1, top)
            codes[row, group_of == group] = np.clip(np.rint(of / float(scale)) + zeros[row, group], 0, top)
    return codes, zeros, scales


def _packed(values: np.ndarray, bits: int, order: list[int]) -> Tensor:
    """Return `[rows, columns]` packed into int32 words along the columns; the code at `order[i]` of a word becomes its
    i-th lowest."""
    rows, columns = values.shape
    words = np.zeros((rows, columns * bits // 32), np.uint32)
    for column in range(words.shape[1]):
        for i, at in enumerate(order):
            words[:, column] |= values[:, column * len(order) + at].astype(np.uint32) << np.uint32(bits * i)
    return torch.from_numpy(words.view(np.int32))


def _shuffled(layer: str, size: int, group: int) -> np.ndarray:
    """Return the group of each input of `layer`, in any order. Projections that share an input have the same order, as
    quantizers write it."""
    for one, other in (("k_proj", "q_proj"), ("v_proj", "q_proj"), ("up_proj", "gate_proj")):
        layer = layer.replace(one, other)
    found: np.ndarray = np.random.default_rng(zlib.crc32(layer.encode())).permutation(np.arange(size) // group)
    return found


def gptq(
    source: Path, path: Path, *, bits: int = 4, group: int = 32, sym: bool = True, desc_act: bool = False,
    version: str = "gptq", **fields: Any,
) -> Path:  # fmt: skip
    """Write a checkpoint in GPTQ's format."""

    def write(layer: str, weight: Tensor) -> Written:
        size = weight.shape[1]
        whole = group if group > 0 else size
        group_of = _shuffled(layer, size, whole) if desc_act else np.arange(size) // whole
        codes, zeros, scales = _codes(weight.numpy(), group_of, bits, sym)
        straight = list(range(32 // bits))
        stored = zeros - (version == "gptq")
        tensors = {
            "qweight": _packed(codes, bits, straight).t(),
            "qzeros": _packed(stored.T, bits, straight),
            "scales": torch.from_numpy(scales).t(),
            "g_idx": torch.from_numpy(group_of.astype(np.int32)),
        }
        exact = (codes - zeros[:, group_of]) * scales.astype(np.float64)[:, group_of]
        return tensors, torch.from_numpy(exact)

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": desc_act, "sym": sym}
    config |= {} if version == "gptq" else {"checkpoint_format": version}
    return rewrite(source, path, config | fields, write, no_layer)


def awq(source: Path, path: Path, *, group: int = 32, **fields: Any) -> Path:
    """Write a checkpoint in AutoAWQ's format, in its gemm order."""

    def write(_: str, weight: Tensor) -> Written:
        group_of = np.arange(weight.shape[1]) // group
        codes, zeros, scales = _codes(weight.numpy(), group_of, 4, False)
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        tensors = {
            "qweight": _packed(codes.T, 4, order),
            "qzeros": _packed(zeros.T, 4, order),
            "scales": torch.from_numpy(scales).t(),
        }
        exact = (codes - zeros[:, group_of]) * scales.astype(np.float64)[:, group_of]
        return tensors, torch.from_numpy(exact)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return rewrite(source, path, config | fields, write, no_layer)


def nvfp4_numbers(tensors: dict[str, Tensor]) -> Tensor:
    """Dequantize an NVFP4 layer's tensors by the definition of e2m1, float64."""
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    packed, scales = tensors["weight_packed"].numpy(), tensors["weight_scale"].double().numpy()
    made = np.empty((packed.shape[0], 2 * packed.shape[1]))
    for (row, column), byte in np.ndenumerate(packed):
        for i, code in enumerate((int(byte) % 16, int(byte) // 16)):
            number = magnitudes[code % 8] * (-1 if code >= 8 else 1)
            made[row, 2 * column + i] = number * scales[row, (2 * column + i) // 16]
    return torch.from_numpy(made) / tensors["weight_global_scale"].double()


def compressed(source: Path, path: Path, form: str, *, ordered: bool = False, **args: Any) -> Path:
    """Write a checkpoint with compressed-tensors' own compressor, and the numbers with its decompressor. `args`
    describe the weights' format.

    `ordered`: inputs belong to groups in any order (act-order). The library compresses inputs in the groups' order. Its
    codes are then unpacked, put back into the inputs' own order, and packed again, as in published checkpoints.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    weights = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = BaseCompressor.get_value_from_registry(form)

    def write(layer: str, weight: Tensor) -> Written:
        out, size = weight.shape
        groups = torch.from_numpy(_shuffled(layer, size, weights.group_size or size))
        order = groups.argsort(stable=True) if ordered else torch.arange(size)
        weight = weight[:, order]
        match weights.strategy:
            case "group" | "tensor_group":
                grouped = weight.view(out, -1, weights.group_size)
                low, high = grouped.amin(-1), grouped.amax(-1)
            case "channel":
                low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
            case "block":
                rows, columns = weights.block_structure
                padded = torch.nn.functional.pad(weight, (0, -size % columns, 0, -out % rows))
                blocks = padded.view(-(-out // rows), rows, -(-size // columns), columns)
                low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
            case _:
                low, high = weight.min().view(1), weight.max().view(1)
        state = {"weight": weight}
        if form == "nvfp4-pack-quantized":
            state["weight_global_scale"] = (448 * 6 / weight.abs().max()).view(1)
            scale, zero = calculate_qparams(low, high, weights, global_scale=state["weight_global_scale"])
        else:
            scale, zero = calculate_qparams(low, high, weights)
        state["weight_scale"] = scale
        if not weights.symmetric:
            state["weight_zero_point"] = zero
        made = compressor.compress(state, scheme)
        exact = compressor.decompress(made, scheme)["weight"].double()
        if form == "nvfp4-pack-quantized":  # its decompressor rounds to bf16
            exact, rounded = nvfp4_numbers(made), exact
            torch.testing.assert_close(rounded, exact, rtol=2**-7, atol=0.0)
        if ordered:
            codes = unpack_from_int32(made["weight_packed"], weights.num_bits, torch.Size((out, size)))
            made["weight_packed"] = pack_to_int32(codes[:, order.argsort()].contiguous(), weights.num_bits)
            made["weight_g_idx"] = groups.to(torch.int32)
            exact = exact[:, order.argsort()].contiguous()
        return {name: value for name, value in made.items() if isinstance(value, Tensor)}, exact

    group = {"targets": ["Linear"], "weights": json.loads(weights.model_dump_json()), "input_activations": None}
    if ordered:
        group["weights"]["actorder"] = "group"  # as checkpoints say it; the library has dropped the value
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", r"re:.*\.gate$"],
    }
    return rewrite(source, path, config, write, no_layer)


def mxfp4(numbers: Path, path: Path, config: dict[str, Any]) -> Path:
    """Write to `path` a copy of the gpt-oss checkpoint `numbers` whose experts are random MXFP4 codes. The experts in
    `numbers` are replaced by the codes as transformers dequantizes them. `config` is the `quantization_config`."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(1)
    plain, quantized = load_file(numbers / "model.safetensors"), {}
    for name, tensor in list(plain.items()):
        if not name.endswith(("gate_up_proj", "down_proj")):
            quantized[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 125, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
        quantized |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
        assert plain[name].shape == tensor.shape
    save_file(plain, numbers / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(numbers, path)
    save_file(quantized, path / "model.safetensors", metadata={"format": "pt"})
    edit_json(path / "config.json", quantization_config=config)
    return path
