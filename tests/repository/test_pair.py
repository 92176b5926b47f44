"""The bundled models as files: one tokenizer, a chat template, prompts of the promised length. No model is run here."""

import json

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors import safe_open
from specrs.pair import DRAFT, HYBRID, TARGET
from specrs.pair.prompts import PROMPTS
from tokenizers import Tokenizer


def test_all_models_share_one_tokenizer() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (TARGET / name).read_bytes() == (DRAFT / name).read_bytes() == (HYBRID / name).read_bytes()


def test_the_hybrid_is_small_and_finds_mistakes_of_order() -> None:
    """Check that the hybrid is small and would reveal mistakes of order: value heads share key heads, and tensors that
    Qwen3.5 has in fp32 are in fp32."""
    config = json.loads((HYBRID / "config.json").read_text())
    assert config["linear_num_key_heads"] < config["linear_num_value_heads"]
    assert set(config["layer_types"]) == {"linear_attention", "full_attention"}
    assert (HYBRID / "model.safetensors").stat().st_size < 8e6
    with safe_open(HYBRID / "model.safetensors", framework="np") as file:
        dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert any(name.startswith("mtp.") for name in dtypes)
    wide = {name for name in dtypes if name.endswith(("A_log", "linear_attn.norm.weight"))}
    assert dtypes == {name: "F32" if name in wide else "BF16" for name in dtypes}


def test_chat_template_joins_the_contents_with_newlines() -> None:
    template = json.loads((TARGET / "tokenizer_config.json").read_text())["chat_template"]
    messages = [{"role": "system", "content": "import os"}, {"role": "user", "content": "import sys\n"}]
    text = ImmutableSandboxedEnvironment().from_string(template).render(messages=messages, add_generation_prompt=True)
    assert text == "import os\nimport sys\n"


@pytest.mark.parametrize("prompt", PROMPTS, ids=range(len(PROMPTS)))
def test_prompts_are_60_to_150_tokens(prompt: str) -> None:
    ids = Tokenizer.from_file(str(TARGET / "tokenizer.json")).encode(prompt).ids
    assert 60 <= len(ids) <= 150
