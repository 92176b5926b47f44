"""The bundled pair as files: one tokenizer, a chat template, prompts of the promised length. No model is run here."""

import json

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from specrs.pair import DRAFT, TARGET
from specrs.pair.prompts import PROMPTS
from tokenizers import Tokenizer


def test_target_and_draft_share_one_tokenizer() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (TARGET / name).read_bytes() == (DRAFT / name).read_bytes()


def test_chat_template_joins_the_contents_with_newlines() -> None:
    template = json.loads((TARGET / "tokenizer_config.json").read_text())["chat_template"]
    messages = [{"role": "system", "content": "import os"}, {"role": "user", "content": "import sys\n"}]
    text = ImmutableSandboxedEnvironment().from_string(template).render(messages=messages, add_generation_prompt=True)
    assert text == "import os\nimport sys\n"


@pytest.mark.parametrize("prompt", PROMPTS, ids=range(len(PROMPTS)))
def test_prompts_are_60_to_150_tokens(prompt: str) -> None:
    ids = Tokenizer.from_file(str(TARGET / "tokenizer.json")).encode(prompt).ids
    assert 60 <= len(ids) <= 150
