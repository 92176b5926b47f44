"""Ids and special tokens equal those of transformers' AutoTokenizer, whatever the files of a folder say about them."""

from __future__ import annotations

import inspect
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import example, given
from hypothesis import strategies as st
from specrs.errors import CheckpointError, InvalidRequestError
from specrs.tokenizer import Tokenizer
from specrs.tokenizer.special_tokens import CLASSES, DEFAULTS, ROLES, class_name
from sweep import sweep
from tokenizer_files import copy_of_pair
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from transformers import AutoTokenizer
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("a", "b"), ("c", "d"), ("ab", "cd"), ("Ġ", "a"), ("Ġ", "Ġ"), ("1", "2"), ("<", "s")]
BYTE_VOCAB = {token: i for i, token in enumerate([*BYTES, *(left + right for left, right in MERGES)])}
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcd", "▁a", "ab", "cd", "abcd", "▁▁"]
PIECE_VOCAB = {token: i for i, token in enumerate(PIECES)}
PIECE_MERGES = [("▁", "a"), ("a", "b"), ("c", "d"), ("ab", "cd"), ("▁", "▁")]
GEMMA = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *PIECES[3:]]
END = "<|endoftext|>"
FAMILIES: dict[str, tuple[str, dict[str, int], list[tuple[str, str]], dict[str, Any]]] = {
    "llama": ("LlamaTokenizer", PIECE_VOCAB, PIECE_MERGES, {}),
    "llama without a space": ("LlamaTokenizer", PIECE_VOCAB, PIECE_MERGES, {"add_prefix_space": False}),
    "gemma3_text": ("GemmaTokenizer", {token: i for i, token in enumerate(GEMMA)}, PIECE_MERGES, {}),
    "qwen2": ("Qwen2Tokenizer", BYTE_VOCAB | {END: len(BYTE_VOCAB)}, MERGES, {}),
    "qwen3": ("Qwen2Tokenizer", BYTE_VOCAB | {END: len(BYTE_VOCAB)}, MERGES, {"bos_token": "<bos>"}),
    "granite": ("GPT2Tokenizer", BYTE_VOCAB | {END: len(BYTE_VOCAB)}, MERGES, {}),
    "phi3": ("GPT2Tokenizer", BYTE_VOCAB | {END: len(BYTE_VOCAB)}, MERGES, {"add_prefix_space": True}),
    "olmo2": ("GPTNeoXTokenizer", BYTE_VOCAB | {END: len(BYTE_VOCAB), "<|padding|>": len(BYTE_VOCAB) + 1}, MERGES, {}),
    "cohere": ("CohereTokenizer", BYTE_VOCAB, MERGES, {}),
}
"""Tokenizer classes by `model_type`: vocabulary, merges and settings."""
SPECIAL = ["<s>", "</s>", "<unk>", "<bos>", "<eos>", "<pad>", "<mask>", END, "<new>", "<a b>", "<|user|>"]
TEXTS = st.lists(
    st.sampled_from([*SPECIAL, "abcd", " a", "  ", "\n", "12", "é", "日本", "e\u0301", "'s", "\r\n\t"])
    | st.text(max_size=4).filter(lambda text: text.isprintable()),
    max_size=8,
).map("".join)


def same(folder: Path, texts: list[str]) -> None:
    """Check ids and special tokens against transformers."""
    ours, theirs = Tokenizer(str(folder)), AutoTokenizer.from_pretrained(str(folder))
    theirs.backend_tokenizer.no_truncation()
    for text in texts:
        for around in (True, False):
            assert ours.encode(text, add_special_tokens=around) == theirs.encode(text, add_special_tokens=around)
        ids = ours.encode(text)
        for skip in (True, False):
            expected = theirs.backend_tokenizer.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == expected
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert set(ours.all_special_ids) == set(theirs.all_special_ids)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.special_id("unk_token") == theirs.unk_token_id
    assert ours.vocab_size == len(theirs)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each family, as its tokenizer class saves it."""
    made = {}
    for family, (name, vocab, merges, settings) in FAMILIES.items():
        made[family] = tmp_path_factory.mktemp("family") / family.replace(" ", "-")
        fast = getattr(transformers, name)(vocab=vocab, merges=merges, **settings)
        fast.add_tokens(["<|user|>"], special_tokens=True)
        fast.save_pretrained(made[family])
        model = {"model_type": family.split(" ")[0], "transformers_version": "5.0.0"}
        (made[family] / "config.json").write_text(json.dumps(model))
    return made


@pytest.mark.parametrize("family", FAMILIES)
@sweep(60)
@given(texts=st.lists(TEXTS, min_size=1, max_size=8))
def test_ids_of_the_families(family: str, folders: dict[str, Path], texts: list[str]) -> None:
    same(folders[family], texts)


def _token(content: str, flags: dict[str, bool]) -> dict[str, Any]:
    return {"content": content, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False, **flags}


FLAGS = st.dictionaries(st.sampled_from(["lstrip", "rstrip", "single_word", "normalized"]), st.booleans())
NAMED = st.sampled_from([*SPECIAL, "ab", "nowhere"])
TOKENS = st.builds(_token, NAMED, FLAGS)
TYPED = TOKENS.map(lambda token: {"__type": "AddedToken", **token})
ROLE_SETTINGS = st.dictionaries(
    st.sampled_from([*ROLES, "image_token", "eot_token"]), NAMED | TYPED, max_size=4
) | st.fixed_dictionaries({"eos_token": NAMED})
EXTRA = st.lists(NAMED, max_size=3, unique=True)


@st.composite
def special_files(draw: st.DrawFn) -> dict[str, dict[str, Any]]:
    """Draw contents of the JSON files next to tokenizer.json."""
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **draw(ROLE_SETTINGS)}
    if draw(st.booleans()):
        settings[draw(st.sampled_from(["additional_special_tokens", "extra_special_tokens"]))] = draw(EXTRA)
    elif draw(st.booleans()):
        settings["extra_special_tokens"] = {"video_token": draw(NAMED)}
    if draw(st.booleans()):
        settings["split_special_tokens"] = draw(st.booleans())
    settings |= draw(st.sampled_from([{}, {"add_bos_token": True, "add_eos_token": True}, {"add_prefix_space": True}]))
    files = {"tokenizer_config.json": settings}
    if draw(st.booleans()):
        listed = draw(st.lists(st.tuples(TOKENS, st.booleans()), max_size=4, unique_by=lambda item: item[0]["content"]))
        settings["added_tokens_decoder"] = {
            str(i + 300): {**token, "special": special} for i, (token, special) in enumerate(listed)
        }
    else:
        files["special_tokens_map.json"] = draw(st.dictionaries(st.sampled_from(ROLES), NAMED | TOKENS, max_size=3))
        if draw(st.booleans()):
            files["added_tokens.json"] = {token: i + 300 for i, token in enumerate(draw(EXTRA))}
    return files


@sweep(300)
@given(files=special_files(), texts=st.lists(TEXTS, min_size=1, max_size=4))
@example(
    files={
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
        "special_tokens_map.json": {"bos_token": "<|user|>"},
    },
    texts=["a<|user|>b"],
)
def test_what_the_other_files_say(files: dict[str, dict[str, Any]], texts: list[str]) -> None:
    backend = Backend(models.BPE(vocab=BYTE_VOCAB, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(["<|user|>"])
    with tempfile.TemporaryDirectory() as path:
        backend.save(f"{path}/tokenizer.json")
        for name, content in files.items():
            Path(path, name).write_text(json.dumps(content))
        Path(path, "config.json").write_text('{"model_type": "llama"}')
        same(Path(path), texts)


def test_defaults_are_those_of_the_classes() -> None:
    for name, defaults in DEFAULTS.items():
        made: Any = tokenizer_class_from_name(name)
        parameters = inspect.signature(made.__init__).parameters
        assert defaults == {
            role: parameters[role].default for role in ROLES if role in parameters and parameters[role].default
        }
    for name in CLASSES:
        assert tokenizer_class_from_name(name) is not None


@pytest.mark.parametrize(
    "model_type", ["qwen2", "qwen3", "qwen3_moe", "gemma3_text", "gemma2", "gpt2", "opt", "phi", "gpt_neox", "cohere2"]
)
def test_a_model_without_a_named_class_has_its_own(model_type: str) -> None:
    assert class_name({}, {"model_type": model_type}) == TOKENIZER_MAPPING_NAMES[model_type]
    assert class_name({"tokenizer_class": "LlamaTokenizerFast"}, {"model_type": model_type}) == "LlamaTokenizer"
    assert class_name({}, {"model_type": model_type, "tokenizer_class": "GPT2Tokenizer"}) == "GPT2Tokenizer"


def test_a_default_that_the_vocabulary_does_not_have_is_left_out(tmp_path: Path) -> None:
    folder = copy_of_pair(tmp_path / "model")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    tokenizer = Tokenizer(str(folder))
    assert tokenizer.special_tokens_map == {}
    assert tokenizer.vocab_size == 2048


def write_other_files(folder: Path) -> None:
    """Write vocab.json and merges.txt, the tokenizer files that GPT-2 had before there was tokenizer.json."""
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(BYTE_VOCAB | {END: len(BYTE_VOCAB)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(map(" ".join, MERGES)))
    settings = {"tokenizer_class": "GPT2Tokenizer", "chat_template": "{{ messages[0].content }}!"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def test_transformers_converts_a_folder_without_tokenizer_json(tmp_path: Path) -> None:
    write_other_files(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "gpt2"}')
    same(tmp_path / "model", ["abcd 12", f"a{END} b", ""])
    assert Tokenizer(str(tmp_path / "model")).render_chat([{"role": "user", "content": "hi"}]) == "hi!"


def test_a_folder_without_tokenizer_json_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_other_files(tmp_path / "model")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CheckpointError, match=r"^tokenizer=.*tokenizer\.json is missing.*specrs\[transformers\]"):
        Tokenizer(str(tmp_path / "model"))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config.json": {"eos_token": 5}}, r"tokenizer_config\.json: eos_token=5: must be a string"),
        ({"tokenizer_config.json": {"eos_token": {}}}, r"eos_token=\{\}: must be a string, or an object with a con"),
        ({"tokenizer_config.json": {"added_tokens_decoder": []}}, r"added_tokens_decoder=\[\]: must be an object"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"1": "a"}}}, r"added_tokens_decoder='a': must be an obj"),
        ({"tokenizer_config.json": {"extra_special_tokens": "a"}}, r"extra_special_tokens='a': must be a list"),
        ({"tokenizer_config.json": {"eos_token": {"content": "a", "lstrip": 1}}}, r"eos_token=.*flags are true or"),
        ({"tokenizer_config.json": {"chat_template": 5}}, r"tokenizer_config\.json: chat_template=5: must be a string"),
        ({"tokenizer_config.json": []}, r"tokenizer_config\.json: must hold a JSON object"),
        ({"added_tokens.json": {"a": "b"}}, r"added_tokens\.json: a='b': must be an id"),
        ({"chat_template.json": {"chat_template": [5]}}, r"chat_template\.json: chat_template=\[5\]: must be a string"),
    ],
)
def test_files_with_other_types(files: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = copy_of_pair(tmp_path / "model")
    for file in ("chat_template.jinja", "tokenizer_config.json"):
        (folder / file).unlink(missing_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message):
        Tokenizer(str(folder))


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
NAMES = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]


@pytest.mark.parametrize(
    ("files", "texts"),
    [
        ({"tokenizer_config.json": json.dumps({"chat_template": "C"})}, ("C", "C")),
        ({"tokenizer_config.json": json.dumps({"chat_template": NAMES})}, ("D", "T")),
        ({"tokenizer_config.json": json.dumps({"chat_template": "C"}), "chat_template.jinja": "J"}, ("J", "J")),
        ({"chat_template.jinja": "J", "additional_chat_templates/tool_use.jinja": "T"}, ("J", "T")),
        ({"chat_template.jinja": "J", "additional_chat_templates/rag.jinja": "R"}, ("J", "J")),
    ],
)
def test_which_template_a_conversation_gets(files: dict[str, str], texts: tuple[str, str], tmp_path: Path) -> None:
    folder = copy_of_pair(tmp_path / "model")
    for file in ("chat_template.jinja", "tokenizer_config.json"):
        (folder / file).unlink(missing_ok=True)
    (folder / "additional_chat_templates").mkdir()
    for name, content in files.items():
        (folder / name).write_text(content)
    ours, theirs = Tokenizer(str(folder)), AutoTokenizer.from_pretrained(str(folder))
    chat = [{"role": "user", "content": "hi"}]
    for tools, text in zip((None, TOOLS), texts, strict=True):
        assert ours.render_chat(chat, tools=tools) == text
        assert theirs.apply_chat_template(chat, tools=tools, tokenize=False) == text
    assert ours.apply_chat_template(chat) == ours.encode(texts[0])
    assert ours.render_chat(chat, chat_template="rag") == ("R" if "rag" in str(files) else "rag")


def test_a_template_in_a_processor_s_file_counts_last(tmp_path: Path) -> None:
    folder = copy_of_pair(tmp_path / "model")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "chat_template.json").write_text('{"chat_template": "P"}')
    assert Tokenizer(str(folder)).render_chat([{"role": "user", "content": "hi"}]) == "hi"
    (folder / "tokenizer_config.json").unlink()
    assert Tokenizer(str(folder)).render_chat([{"role": "user", "content": "hi"}]) == "P"


def test_several_templates_without_a_default(tmp_path: Path) -> None:
    folder = copy_of_pair(tmp_path / "model")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("R")
    tokenizer = Tokenizer(str(folder))
    with pytest.raises(InvalidRequestError, match=r"^chat_template=None: .*several and no default; name one of 'rag'"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}], chat_template="rag") == "R"
