"""Gemma 3 270M from its GGUF file (Q4_K_M), which `make test-real` downloads: its text is transformers', and it is
served.

The reference is transformers' model in float64, with the numbers that the package `gguf` reads from the file. Drafts do
not change the text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from server.harness import serving
from specrs.llm import LLM
from specrs.sampling import SamplingParams

PROMPTS = ("The capital of France is", "Once upon a time, there", "def fibonacci(n):\n   ")
NEW = 24
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@pytest.fixture(scope="module")
def path() -> Path:
    given = os.environ.get("SPECRS_REAL_GEMMA3")
    assert given, "SPECRS_REAL_GEMMA3 is not set: run make test-real"
    return Path(given)


def reference(path: Path) -> Any:
    """Load transformers' model in float64, with the numbers that the package `gguf` reads from the file."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    rope = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}
    rope["sliding_attention"] = {"rope_type": "default", "rope_theta": 1e4}
    config = Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        max_position_embeddings=32768,
        sliding_window=512,
        query_pre_attn_scalar=256,
        tie_word_embeddings=True,
        rope_parameters=rope,
        dtype="float64",
    )
    tensors: dict[str, torch.Tensor] = {}
    for tensor in gguf.GGUFReader(path).tensors:
        name = tensor.name.removesuffix(".weight")
        found = re.fullmatch(r"blk\.(\d+)\.(.*)", name)
        name = {"token_embd": "embed_tokens", "output_norm": "norm"}.get(name, name)
        name = f"layers.{found[1]}.{LAYER_NAMES[found[2]]}" if found else name
        numbers = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float64)
        numbers = numbers.reshape([int(size) for size in tensor.shape[::-1]])
        # transformers adds 1 to the weights of norms; files hold the sum.
        tensors[f"model.{name}.weight"] = torch.from_numpy(numbers - 1 if name.endswith("norm") else numbers)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model: Any = Gemma3ForCausalLM(config).to(torch.float64).eval()
    model.load_state_dict(tensors)
    return model


@pytest.mark.timeout(900)
def test_text_is_that_of_float64(path: Path) -> None:
    """Check three texts. Drafts change none of them, and where a token is not the most probable one in float64, the two
    were nearly tied."""
    made = {}
    for method in (None, "ngram,suffix"):
        speculative = method and {"method": method, "num_speculative_tokens": 4}
        llm = LLM(str(path), speculative_config=speculative, max_model_len=256, max_num_seqs=1)
        params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
        outputs = llm.generate(list(PROMPTS), params, use_tqdm=False)
        made[method] = [(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]
        del llm
    assert made[None] == made["ngram,suffix"]
    model = reference(path)
    for prompt, text in made[None]:
        rows = torch.tensor([[*prompt, *text]])
        with torch.inference_mode():
            logits = model(rows).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(text)[:, None])[:, 0]
        assert (logits.amax(dim=1) - chosen).max() < 0.02


@pytest.mark.timeout(900)
def test_a_text_is_served(path: Path) -> None:
    """Check that a completion is served, and that a chat is rejected because the file has no chat template."""
    flags = ("--served-model-name", "gemma3", "--max-model-len", "256", "--spec-method", "suffix")
    body = {"model": "gemma3", "prompt": PROMPTS[0], "max_tokens": 16, "temperature": 0}
    with serving(str(path), *flags) as server:
        answer = server.post("/v1/completions", body).json
        assert "Paris" in answer["choices"][0]["text"] or "France" in answer["choices"][0]["text"]
        chat = {"model": "gemma3", "messages": [{"role": "user", "content": PROMPTS[0]}], "max_tokens": 16}
        assert "chat_template" in server.post("/v1/chat/completions", chat).json["error"]["message"]
