"""Small random checkpoints and tokenizers for tests. Holds no tests; trains nothing; downloads nothing.

Import as `from checkpoints import make_checkpoint`: the folders under tests/ are packages and tests/ is none, so pytest
puts tests/ itself on the path. (Were tests/ a package, the repository root would be on it, where transformers' probe
for the distribution `kernels` finds our folder of that name.)
"""

import itertools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""A scaling whose three regimes (kept, interpolated, divided) all occur for a head of 48 dimensions."""


def make_checkpoint(
    path: Path,
    family: str = "qwen3",
    *,
    seed: int = 0,
    tie: bool = True,
    kv_heads: int = 3,
    group: int = 2,
    head_dim: int = 48,
    vocab: int = 211,
    hidden: int = 96,
    intermediate: int = 160,
    layers: int = 2,
    max_position_embeddings: int = 512,
    initializer_range: float = 0.2,
    dtype: torch.dtype = torch.float32,
    eos_token_id: int | list[int] = 0,
    rope_parameters: dict[str, Any] | None = None,
    max_shard_size: str = "50GB",
    with_tokenizer: bool = True,
    **config_fields: Any,
) -> Path:
    """Write a random checkpoint of `family` under `path` (created) and return `path`.

    `kv_heads * group` query heads; weights are normal(0, `initializer_range`) from `seed`. Norm weights and biases
    are random too: at their usual 1 and 0 a loader that drops or swaps them would pass. `config_fields` go to the
    transformers config as they are. `eos_token_id` is written to config.json and generation_config.json.
    """
    config_class, model_class = FAMILIES[family]
    config = config_class(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=kv_heads * group,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        initializer_range=initializer_range,
        tie_word_embeddings=tie,
        rope_parameters=rope_parameters or {"rope_type": "default", "rope_theta": 1e4},
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=0,
        **({"sliding_window": None} | config_fields if family == "mistral" else config_fields),
    )
    generator = torch.Generator().manual_seed(seed)
    model = model_class(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * initializer_range
            parameter.copy_(1 + noise if name.endswith("norm.weight") else noise)
    path.mkdir(parents=True, exist_ok=True)
    model.to(dtype).save_pretrained(path, max_shard_size=max_shard_size)
    if with_tokenizer:
        write_tokenizer(path, vocab)
    return path


def perturb_checkpoint(source: Path, path: Path, *, noise: float, seed: int = 0) -> Path:
    """Copy the checkpoint at `source` to `path` with normal(0, `noise` * std of the tensor) added to each matrix.

    A draft that agrees with its target often but not always: with 2 layers and the defaults of `make_checkpoint`,
    noise 0.1 keeps about half of the greedy choices.
    """
    generator = torch.Generator().manual_seed(seed)
    path.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (path / file.name).write_bytes(file.read_bytes())
            continue
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if tensor.ndim == 2:
                scale = noise * tensor.float().std()
                tensors[name] = tensor + (torch.randn(tensor.shape, generator=generator) * scale).to(tensor.dtype)
        save_file(tensors, path / file.name, metadata={"format": "pt"})
    return path


def edit_json(path: Path, remove: tuple[str, ...] = (), **fields: Any) -> None:
    """Set `fields` in the JSON object stored at `path` and drop the keys in `remove`."""
    content = json.loads(path.read_text(encoding="utf-8"))
    for key in remove:
        content.pop(key, None)
    path.write_text(json.dumps(content | fields), encoding="utf-8")


def write_tokenizer(path: Path, vocab: int, *, padding: int = 3, chat_template: str | None = None) -> None:
    """Write a byte-level BPE tokenizer of `vocab - padding` tokens (at least 1) that AutoTokenizer loads from `path`.

    Id 0 is `<|endoftext|>`. The byte alphabet holds what fits, most useful first: letters, blank, line break, other
    printable ASCII, then what UTF-8 needs for é, €, 漢 and emoji (so a token may be a part of a character), all 256
    bytes from 320 tokens on; then merges of two letters. The last `padding` ids of the model have no token, like the
    padded rows of real vocabularies.
    """
    size = max(1, vocab - padding)
    ascii_order = "etaoinshrdlucmfwypvbgkjqxz \n" + "".join(map(chr, range(33, 127))) + "\t\r"
    bytes_in_order = list(dict.fromkeys([*ascii_order.encode(), 0xC3, 0xE2, 0xE6, 0xF0, *range(0x80, 0xC0)]))
    if size >= 320:
        bytes_in_order += [b for b in range(256) if b not in bytes_in_order]
    symbols = _byte_symbols()
    tokens = ["<|endoftext|>", *(symbols[b] for b in bytes_in_order)][:size]
    merges: list[tuple[str, str]] = []
    for left, right in itertools.product(symbols[32] + "etaoinshrdlu", "etaoinshrdlucmfwypvbgkjqxz"):
        if len(tokens) == size:
            break
        if left in tokens:
            merges.append((left, right))
            tokens.append(left + right)
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    if chat_template is not None:
        fast.chat_template = chat_template
    fast.save_pretrained(path)


def _byte_symbols() -> dict[int, str]:
    """The character that byte-level BPE writes for each byte: itself if printable, else the next one from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (b for b in range(256) if b not in printable)
    return {b: chr(b) for b in printable} | {b: chr(0x100 + i) for i, b in enumerate(hidden)}
