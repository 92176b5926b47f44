"""tokenizer_config.json as in published models: which keys have an effect, and that none runs code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from checkpoints import edit_json
from specrs.errors import CheckpointError
from specrs.tokenizer import Tokenizer
from tokenizer_files import copy_of_pair

END = "<|endoftext|>"
TEXTS = ("def f(x):\n    return 1", f"a{END} b", "  two  spaces ", "")
TEMPLATE = "{% for message in messages %}{{ message['content'] }}" + END + "{% endfor %}"
_ADDED = {"content": END, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
_TYPED = {"__type": "AddedToken", **_ADDED}
_HUGE = 1000000000000000019884624838656
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama 2": {
        "add_bos_token": False, "add_eos_token": False, "bos_token": _TYPED, "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False, "eos_token": _TYPED, "legacy": False, "model_max_length": _HUGE,
        "pad_token": None, "padding_side": "right", "sp_model_kwargs": {}, "tokenizer_class": "LlamaTokenizer",
        "unk_token": _TYPED,
    },
    "Llama 3.1": {
        "added_tokens_decoder": {"0": _ADDED}, "bos_token": END, "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": True, "eos_token": END, "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 131072, "tokenizer_class": "PreTrainedTokenizerFast",
    },
    "Hermes 2 Pro": {
        "added_tokens_decoder": {"0": _ADDED}, "bos_token": END,
        "chat_template": [
            {"name": "default", "template": TEMPLATE},
            {"name": "tool_use", "template": "tools: " + TEMPLATE},
        ],
        "clean_up_tokenization_spaces": True, "eos_token": END, "model_max_length": _HUGE, "pad_token": END,
        "tokenizer_class": "PreTrainedTokenizerFast",
    },
    "Mistral v0.3": {
        "add_bos_token": False, "add_eos_token": False, "added_tokens_decoder": {"0": _ADDED},
        "additional_special_tokens": [], "bos_token": END, "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False, "eos_token": END, "legacy": False, "model_max_length": _HUGE,
        "pad_token": None, "sp_model_kwargs": {}, "spaces_between_special_tokens": False,
        "tokenizer_class": "LlamaTokenizer", "unk_token": END, "use_default_system_prompt": False,
    },
    "Qwen2.5": {
        "add_bos_token": False, "add_prefix_space": False, "added_tokens_decoder": {"0": _ADDED},
        "additional_special_tokens": [END], "bos_token": None, "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False, "eos_token": END, "errors": "replace", "model_max_length": 131072,
        "pad_token": END, "split_special_tokens": False, "tokenizer_class": "Qwen2Tokenizer", "unk_token": None,
    },
    "Phi-3-mini": {
        "add_bos_token": False, "add_eos_token": False, "added_tokens_decoder": {"0": _ADDED}, "bos_token": END,
        "chat_template": TEMPLATE, "clean_up_tokenization_spaces": False, "eos_token": END, "legacy": False,
        "model_max_length": 4096, "pad_token": END, "padding_side": "left", "sp_model_kwargs": {},
        "tokenizer_class": "LlamaTokenizer", "unk_token": END, "use_default_system_prompt": False,
    },
    "Phi-4-mini": {
        "add_bos_token": False, "add_eos_token": False, "add_prefix_space": False,
        "added_tokens_decoder": {"0": _ADDED}, "bos_token": END, "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False, "eos_token": END, "model_max_length": 131072,
        "pad_token": END, "tokenizer_class": "GPT2Tokenizer", "unk_token": END,
    },
    "Gemma 3": {
        "add_bos_token": False, "add_eos_token": False, "added_tokens_decoder": {"0": _ADDED}, "boi_token": END,
        "bos_token": END, "chat_template": TEMPLATE, "clean_up_tokenization_spaces": False, "eoi_token": END,
        "eos_token": END, "extra_special_tokens": {"boi_token": END, "eoi_token": END, "image_token": END},
        "image_token": END, "model_max_length": _HUGE, "pad_token": END, "processor_class": "Gemma3Processor",
        "sp_model_kwargs": None, "spaces_between_special_tokens": False, "tokenizer_class": "GemmaTokenizer",
        "unk_token": END, "use_default_system_prompt": False,
    },
    "with code that is not needed": {
        "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.EvilFast"]}, "bos_token": END, "chat_template": TEMPLATE,
        "eos_token": END, "model_max_length": _HUGE, "tokenizer_class": "PreTrainedTokenizerFast",
    },
}  # fmt: skip

SPLITS = "split_special_tokens"
"""The only key that changes ids: special tokens in a text are then treated as ordinary text."""


def folder_with(path: Path, settings: dict[str, Any]) -> Path:
    """Write the pair's tokenizer with these settings, and modules of code that end the process when they are
    imported."""
    folder = copy_of_pair(path)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    return folder


def ids(folder: Path) -> list[list[int]]:
    """Return ids by the library that made tokenizer.json."""
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [backend.encode(text).ids for text in TEXTS]


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_settings(model: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "model", PUBLISHED[model])
    tokenizer = Tokenizer(str(folder))
    assert [tokenizer.encode(text) for text in TEXTS] == ids(folder)
    assert tokenizer.eos_token_id == 0
    chat = [{"role": "user", "content": "two"}]
    assert tokenizer.render_chat(chat) == f"two{END}"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    named = isinstance(PUBLISHED[model]["chat_template"], list)
    assert tokenizer.render_chat(chat, tools=tools) == ("tools: " if named else "") + f"two{END}"


@pytest.mark.parametrize("model", PUBLISHED)
def test_no_key_changes_ids_or_fails_without_a_name(model: str, tmp_path: Path) -> None:
    """Check that no key changes ids or fails without a name: each key is removed, and set to other values of its type;
    ids are those of tokenizer.json."""
    settings = PUBLISHED[model]
    folder = folder_with(tmp_path / "model", settings)
    expected = ids(folder)
    for key, value in settings.items():
        others = {bool: [not value], int: [64], dict: [{}], list: [[]]}.get(type(value), [None])
        for changed in (
            {name: other for name, other in settings.items() if name != key},
            *({**settings, key: other} for other in others),
        ):
            (folder / "tokenizer_config.json").write_text(json.dumps(changed))
            told = f"{key}={changed.get(key, 'removed')!r}"
            try:
                tokenizer = Tokenizer(str(folder))
            except CheckpointError as fault:
                assert any(name in str(fault).lower() for name in ("auto_map", key, key.replace("_", " "))), told  # noqa: PT017
                continue
            if changed.get(SPLITS):
                continue
            assert [tokenizer.encode(text) for text in TEXTS] == expected, told


@pytest.mark.parametrize("name", [None, "EvilTokenizer", 5, ["PreTrainedTokenizerFast"]])
@pytest.mark.parametrize(
    "where", [{"AutoTokenizer": ["evil.Evil", None]}, ["evil.Evil", None], {"AutoConfig": "evil.X"}]
)
def test_code_that_is_needed_is_rejected(where: Any, name: Any, tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "model", {"auto_map": where, "tokenizer_class": name, "eos_token": END})
    with pytest.raises(
        CheckpointError, match=r"auto_map=.*code is never run.*or with a tokenizer_class of transformers"
    ):
        Tokenizer(str(folder))


def test_code_that_config_json_names_is_not_run(tmp_path: Path) -> None:
    """Check that code named by config.json is not run. Phi-4-mini's `auto_map`, for example, also names a tokenizer of
    another repository."""
    folder = folder_with(tmp_path / "model", PUBLISHED["Llama 3.1"])
    names = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": "Xenova/gpt-4o"}
    edit_json(folder / "config.json", auto_map=names)
    assert [Tokenizer(str(folder)).encode(text) for text in TEXTS] == ids(folder)
