"""Makes the checkpoints that the bundled pair is not enough for. Runs in the environment of transformers.

    python -m peers.prepare_models smollm2 GGUF_FOLDER OUT
    python -m peers.prepare_models qwen3 TOKENIZER_FOLDER OUT
    python -m peers.prepare_models fp32 MODEL OUT

`smollm2`: SmolLM2-135M-Instruct as bf16 from a GGUF file; its weights were quantized, which changes texts, not times.
`qwen3`: random weights in the shape of Qwen3-0.6B, with another model's tokenizer. `fp32`: a model whose matrices bf16
holds exactly, as fp32 with one number of every matrix moved to its neighbour, so that an engine that keeps weights in
half the bytes where that is exact has to keep these in fp32.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

QWEN3_0_6B = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": True,
}
NOT_OF_THE_FILE = ("quantization_config", "_model_name_or_path", "transformers_version", "architectures")


def smollm2(source: Path, out: Path) -> None:
    """Dequantize the only GGUF file in `source`, and write it to `out` as a bf16 checkpoint."""
    (file,) = source.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file.name)
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=file.name, dtype=torch.float32)
    fields = {key: value for key, value in loaded.config.to_dict().items() if key not in NOT_OF_THE_FILE}
    # GGUF has no more than six digits of it.
    model = LlamaForCausalLM(LlamaConfig(**(fields | {"rms_norm_eps": 1e-5, "dtype": "bfloat16"})))
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    for name, token in (("bos", 1), ("eos", 2), ("pad", 2)):
        setattr(model.generation_config, f"{name}_token_id", token)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def qwen3(tokenizer: Path, out: Path) -> None:
    """Write a checkpoint in the shape of Qwen3-0.6B with random weights, which are the same on every machine with this
    version of torch."""
    torch.manual_seed(0)
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    Qwen3ForCausalLM(Qwen3Config(**QWEN3_0_6B, **tokens, dtype="bfloat16")).to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(out)


def fp32(source: Path, out: Path) -> None:
    """Copy the model in `source`, its matrices' first numbers one unit in the last place of fp32 larger."""
    shutil.copytree(source, out, dirs_exist_ok=True)
    tensors = {name: tensor.float() for name, tensor in load_file(source / "model.safetensors").items()}
    for tensor in tensors.values():
        if tensor.dim() == 2:
            tensor[0, 0] = torch.nextafter(tensor[0, 0], torch.tensor(torch.inf))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (out / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    {"smollm2": smollm2, "qwen3": qwen3, "fp32": fp32}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
