"""Reading tokenizers, rendering chats, and comparing two tokenizers."""

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import edit_json, write_tokenizer
from specrs import pair
from specrs.config import EngineConfig
from specrs.engine.tokenizer import load_tokenizer
from specrs.engine.weights import load_weights
from specrs.errors import CheckpointError, InvalidRequestError, TokenizerMismatchError, UnsupportedRequestError, short
from specrs.speculative_config import SpeculativeConfig
from specrs.tokenizer import Tokenizer, check_same_tokenizer
from specrs.tokenizer.text import _LONG_TEXT
from tokenizer_files import copy_of_pair, edit_tokenizer, with_bos
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

TEXT = "def f(x):\n    return '日本 é 🎉' # <|endoftext|> done\n"
MESSAGES = [{"role": "system", "content": "one"}, {"role": "user", "content": "two"}]


def test_encodes_and_decodes_as_transformers(tokenizer: Tokenizer) -> None:
    reference = AutoTokenizer.from_pretrained(str(pair.TARGET))
    ids = tokenizer.encode(TEXT)
    assert ids == reference.encode(TEXT)
    assert 0 in ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == TEXT
    assert tokenizer.decode(ids) == TEXT.replace("<|endoftext|>", "")
    assert tokenizer.vocab_size == 2048


def test_special_tokens_around_a_sequence(tmp_path: Path) -> None:
    tokenizer = Tokenizer(str(with_bos(tmp_path / "bos")))
    assert tokenizer.encode("x")[0] == 0
    assert tokenizer.encode("x", add_special_tokens=False) == tokenizer.encode("x")[1:]


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path: Path, tokenizer: Tokenizer) -> None:
    def cut(content: dict[str, Any]) -> None:
        content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
        content["padding"] = {
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<|endoftext|>",
        }

    folder = copy_of_pair(tmp_path / "cut")
    edit_tokenizer(folder, cut)
    assert Tokenizer(str(folder)).encode(TEXT) == tokenizer.encode(TEXT)


def test_text_that_is_no_text(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match=r"^prompt\[2\]='\\ud800': a lone surrogate"):
        tokenizer.encode("ab\ud800")
    with pytest.raises(InvalidRequestError, match=r"^prompt=b'ab': must be a string"):
        tokenizer.encode(b"ab")  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["a" * 140_000, "a cat, " * 20_000, "def f(x):\n    return x\n" * 6_000])
def test_texts_that_are_far_too_long(tokenizer: Tokenizer, text: str) -> None:
    """Check the limit on characters: a far too long text is rejected before it is tokenized. A text that may have few
    tokens too many is tokenized, and left to the caller."""
    assert len(text) > _LONG_TEXT, "shorter ones are not checked"
    count = len(tokenizer.encode(text))
    assert tokenizer.max_chars_per_token is not None
    assert count * tokenizer.max_chars_per_token >= len(text)
    for most in (count - 1, count, count + 1):
        assert len(tokenizer.encode(text, max_tokens=most)) == count
    with pytest.raises(
        InvalidRequestError, match=rf"^prompt: its {len(text)} characters are more than the 1000 tokens"
    ):
        tokenizer.encode(text, max_tokens=1000)


def test_words_of_any_length_may_be_one_token(tmp_path: Path) -> None:
    """Check a tokenizer that has only whole words as tokens, so that a long text may have few tokens."""

    def whole_words(content: dict[str, Any]) -> None:
        content["model"] = {"type": "WordLevel", "vocab": {"<unk>": 0, "a": 1}, "unk_token": "<unk>"}
        content["added_tokens"] = []

    folder = copy_of_pair(tmp_path / "words")
    edit_tokenizer(folder, whole_words)
    tokenizer = Tokenizer(str(folder))
    assert tokenizer.max_chars_per_token is None
    assert len(tokenizer.encode("b" * 300_000, max_tokens=8)) == 1


def test_chat_template_of_the_checkpoint(tokenizer: Tokenizer) -> None:
    assert tokenizer.render_chat(MESSAGES) == "one\ntwo"


def test_parts_of_a_content_are_joined(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "a"}, "b"]
    assert tokenizer.render_chat([{"role": "user", "content": parts}]) == "a\nb"


def test_template_arguments(tokenizer: Tokenizer) -> None:
    template = "{{ messages[0].content }}{{ mark }}{{ tools | length if tools else 0 }}{{ add_generation_prompt }}"
    text = tokenizer.render_chat(
        MESSAGES, chat_template=template, chat_template_kwargs={"mark": "!"}, tools=[{"type": "function"}]
    )
    assert text == "one!1True"
    assert tokenizer.render_chat(MESSAGES, chat_template=template, add_generation_prompt=False) == "one0False"


@pytest.mark.parametrize(
    ("messages", "arguments", "message"),
    [
        ([], {}, r"^messages=\[\]: must have at least one"),
        (["hello"], {}, r"^messages\[0\]='hello': must be a dictionary with a role"),
        ([{"content": "x"}], {}, r"^messages\[0\]=.*: must be a dictionary with a role"),
        ([{"role": "user", "content": 3}], {}, r"^messages\[0\]\['content'\]=3: must be a string or a list"),
        ([{"role": "user", "content": [{"type": "text"}]}], {}, r"^messages\[0\]\['content'\]\[0\]\['text'\]=None: "),
        ([{"role": "user", "content": [3]}], {}, r"^messages\[0\]\['content'\]\[0\]=3: must be a text part"),
        (MESSAGES, {"chat_template": "{{ raise_exception('no system role') }}"}, "refused them: no system role"),
        (MESSAGES, {"chat_template": "{% if %}"}, "the chat template refused them: "),
        (MESSAGES, {"chat_template": "{{ messages.clear() }}"}, "the chat template refused them: "),
        (
            MESSAGES,
            {"chat_template": "{{ ''.__class__.__mro__[1].__subclasses__() }}"},
            "the chat template refused them: ",
        ),
        (MESSAGES, {"chat_template_kwargs": {"tokenize": True}}, r"^chat_template_kwargs\['tokenize'\]=True: "),
        (MESSAGES, {"continue_final_message": True}, "^continue_final_message=True: must be False where"),
        (MESSAGES, {"tools": [print]}, "^tools=.*: must be a list of dictionaries"),
    ],
)
def test_bad_chats(tokenizer: Tokenizer, messages: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        tokenizer.render_chat(messages, **arguments)


def test_images_are_rejected(tokenizer: Tokenizer) -> None:
    with pytest.raises(UnsupportedRequestError, match=r"\['type'\]='image_url': not implemented; allowed: 'text'"):
        tokenizer.render_chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}])


def test_chat_without_a_template(tmp_path: Path) -> None:
    tmp_path.joinpath("t").mkdir()
    write_tokenizer(tmp_path / "t", 400)
    with pytest.raises(InvalidRequestError, match=r"^chat_template=None: .* has none; pass chat_template="):
        Tokenizer(str(tmp_path / "t")).render_chat(MESSAGES)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"^tokenizer='.*': tokenizer.json is missing; use a fast tokenizer, or set skip"
    ):
        Tokenizer(str(tmp_path))


def test_neither_folder_nor_hub_id(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    with pytest.raises(CheckpointError, match=r"^model='.*/missing': must be a folder or a hub id"):
        load_tokenizer(EngineConfig(model=missing))
    with pytest.raises(CheckpointError, match=r"^tokenizer='.*/missing': must be a folder or a hub id"):
        load_tokenizer(EngineConfig(tokenizer=missing))


@pytest.mark.parametrize("name", ["no/such", "no/such:Q8_0", "/no/such", "no/such.gguf"])
def test_a_model_that_is_missing_is_reported_with_the_field_that_names_it(name: str) -> None:
    draft = SpeculativeConfig(model=name, num_speculative_tokens=2)
    other = SpeculativeConfig(model=name, num_speculative_tokens=2, use_heterogeneous_vocab=True)
    head = SpeculativeConfig(method="eagle3", model=name, num_speculative_tokens=2)
    for field, fault in (
        ("model", lambda: load_tokenizer(EngineConfig(model=name))),
        ("tokenizer", lambda: load_tokenizer(EngineConfig(tokenizer=name))),
        ("speculative_config.model", lambda: load_tokenizer(EngineConfig(speculative_config=draft))),
        *(
            ("speculative_config.model", lambda config=config: load_weights(EngineConfig(speculative_config=config)))
            for config in (draft, other, head)
        ),
    ):
        with pytest.raises(CheckpointError, match=rf"^{field}='{name}': "):
            fault()


def test_a_revision_of_a_folder_is_reported_with_the_field_that_names_it() -> None:
    draft = SpeculativeConfig(model=str(pair.DRAFT), revision="x", num_speculative_tokens=2)
    copied = {"tokenizer": str(pair.TARGET), "tokenizer_revision": "x"}
    for field, config in (
        ("tokenizer_revision", EngineConfig(**copied)),
        ("tokenizer_revision", EngineConfig(tokenizer_revision="x")),
        ("speculative_config.revision", EngineConfig(speculative_config=draft)),
    ):
        with pytest.raises(CheckpointError, match=rf"^{field}='x': must be None"):
            load_tokenizer(config)


def test_a_draft_without_a_tokenizer_is_reported_as_the_draft(tmp_path: Path) -> None:
    folder = copy_of_pair(tmp_path / "draft")
    (folder / "tokenizer.json").unlink()
    draft = SpeculativeConfig(model=str(folder), num_speculative_tokens=2)
    with pytest.raises(CheckpointError, match=rf"^speculative_config.model='{folder}': tokenizer.json is missing"):
        load_tokenizer(EngineConfig(speculative_config=draft))


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, r"holds no model, because config\.json is missing; pass a folder with config\.json, .*, or a \.gguf file"),
        ({"tokenizer.json": "{"}, "holds no model, because config"),
        ({"model.gguf": "", "model.safetensors": ""}, r"config\.json is missing; pass the file .*/model\.gguf$"),
        ({"config.json": "{"}, r"config\.json: could not be read as JSON"),
        ({"config.json": "[]"}, r"config\.json: must hold a JSON object"),
        ({"config.json": "{", "quantize_config.json": "{}"}, r"config\.json: could not be read as JSON"),
    ],
)
def test_a_folder_that_is_no_model_is_reported_before_its_tokenizer(
    files: dict[str, str], says: str, skip: bool, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=says) as target:
        load_tokenizer(EngineConfig(model=str(tmp_path), skip_tokenizer_init=skip))
    draft_config = SpeculativeConfig(model=str(tmp_path), num_speculative_tokens=2)
    with pytest.raises(CheckpointError, match=says) as draft:
        load_tokenizer(EngineConfig(speculative_config=draft_config))
    for field, fault in (("model", target), ("speculative_config.model", draft)):
        said = str(fault.value)
        assert "tokenizer=" not in said
        assert said.startswith((f"{field}='{tmp_path}'", f"{tmp_path}/config.json"))


def test_a_gguf_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"must be a folder, a GGUF file or a hub id, there is no such file"):
        load_tokenizer(EngineConfig(model=str(tmp_path / "model.gguf")))


def test_broken_files(tmp_path: Path) -> None:
    folder = copy_of_pair(tmp_path / "broken")
    whole = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"^tokenizer='.*broken': could not be read: "):
        Tokenizer(str(folder))
    (folder / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json: could not be read as JSON"):
        Tokenizer(str(folder))


def test_remote_code_is_rejected(tmp_path: Path) -> None:
    folder = copy_of_pair(tmp_path / "remote")
    (folder / "evil.py").write_text("raise SystemExit('ran')", encoding="utf-8")
    names = {"AutoTokenizer": ["evil.Evil", None]}
    edit_json(folder / "tokenizer_config.json", auto_map=names, tokenizer_class="Evil")
    with pytest.raises(CheckpointError, match=r"auto_map=.*code is never run"):
        Tokenizer(str(folder))


def test_the_same_tokenizer_twice(tokenizer: Tokenizer) -> None:
    check_same_tokenizer(tokenizer, Tokenizer(str(pair.DRAFT)))


def test_swapped_tokens_are_reported(tokenizer: Tokenizer, tmp_path: Path) -> None:
    def swap(content: dict[str, Any]) -> None:
        vocab = content["model"]["vocab"]
        vocab["!"], vocab['"'] = vocab['"'], vocab["!"]

    folder = copy_of_pair(tmp_path / "swapped")
    edit_tokenizer(folder, swap)
    with pytest.raises(TokenizerMismatchError) as caught:
        check_same_tokenizer(tokenizer, Tokenizer(str(folder)))
    told = f"speculative_config.model={short(str(folder))}: its tokenizer differs"
    assert str(caught.value).startswith(told)
    assert "id 1 is '!' for the target and '\"' for the draft (2048 tokens" in str(caught.value)


def test_other_merges_are_reported(tokenizer: Tokenizer, tmp_path: Path) -> None:
    def drop(content: dict[str, Any]) -> None:
        content["model"]["merges"] = content["model"]["merges"][:50]

    folder = copy_of_pair(tmp_path / "merges")
    edit_tokenizer(folder, drop)
    with pytest.raises(TokenizerMismatchError, match=r"the vocabularies agree, but .* is split differently"):
        check_same_tokenizer(tokenizer, Tokenizer(str(folder)))


def test_one_token_more_is_no_difference(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Check that one token more makes no difference: a draft neither proposes nor is fed ids that its model has no row
    for."""

    def add(content: dict[str, Any]) -> None:
        extra = content["added_tokens"][0] | {"id": 2048, "content": "<|extra|>"}
        content["added_tokens"].append(extra)

    folder = copy_of_pair(tmp_path / "more")
    edit_tokenizer(folder, add)
    more = Tokenizer(str(folder))
    assert more.vocab_size == 2049
    check_same_tokenizer(tokenizer, more)
    check_same_tokenizer(more, tokenizer)


def test_one_token_at_two_ids_is_reported(tmp_path: Path) -> None:
    def add(names: list[str]) -> Tokenizer:
        folder = copy_of_pair(tmp_path / "-".join(names))
        edit_tokenizer(folder, lambda content: content["added_tokens"].extend(more(content, names)))
        return Tokenizer(str(folder))

    def more(content: dict[str, Any], names: list[str]) -> list[dict[str, Any]]:
        return [content["added_tokens"][0] | {"id": 2048 + i, "content": name} for i, name in enumerate(names)]

    one, two = add(["a1"]), add(["b2", "a1"])
    with pytest.raises(TokenizerMismatchError, match=r"id 2048 is 'a1' for the target and 'b2' for the draft"):
        check_same_tokenizer(one, two)
    two.unused_ids = frozenset({2048})
    with pytest.raises(TokenizerMismatchError, match=r"id 2048 is 'a1' for the target and id 2049 for the draft"):
        check_same_tokenizer(one, two)


SPACED = ["a cat", " a cat", "  a  cat ", "<s>a", "a</s> b", "<|user|>\n a\n", "日 é", ""]


@pytest.mark.parametrize(
    "cls",
    ["LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "GemmaTokenizer", "Qwen2Tokenizer", "GPT2Tokenizer"],
)
@pytest.mark.parametrize("prefix", ["normalizer", "first", "never"])
def test_a_folder_follows_its_own_tokenizer_json(cls: str, prefix: str, tmp_path: Path) -> None:
    """Check that a folder follows its own tokenizer.json, whatever class tokenizer_config.json names; transformers'
    classes have pipelines of their own."""
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))])}
    vocab |= {token: 259 + i for i, token in enumerate(["▁", "a", "c", "t", "▁a", "ca", "cat", "▁▁"])}
    merges = [("\u2581", "a"), ("c", "a"), ("ca", "t"), ("\u2581", "\u2581")]
    own = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if prefix == "normalizer":
        steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        own.normalizer = normalizers.Sequence(steps)
    else:
        own.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    own.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    own.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in ("<unk>", "<s>", "</s>")])
    own.add_tokens([AddedToken("<|user|>", rstrip=True, normalized=False, special=True)])
    around = {"pair": "<s> $A </s> $B", "special_tokens": [("<s>", 1), ("</s>", 2)]}
    own.post_processor = processors.TemplateProcessing(single="<s> $A </s>", **around)
    own.save(str(tmp_path / "tokenizer.json"))
    settings = {
        "tokenizer_class": cls,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": False,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    ours = Tokenizer(str(tmp_path))
    for text in SPACED:
        ids = own.encode(text).ids
        assert ours.encode(text) == ids
        for decode in (ours.decode, ours.decoder.decode):
            assert decode(ids, skip_special_tokens=False) == own.decode(ids, skip_special_tokens=False)


def test_runs_that_a_normalizer_removes_do_not_count(tmp_path: Path) -> None:
    """Check that runs which a normalizer removes do not count: a long text of few tokens is encoded, because the
    characters per token are not known."""

    def collapse(content: dict[str, Any]) -> None:
        content["normalizer"] = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}

    folder = copy_of_pair(tmp_path / "collapsed")
    edit_tokenizer(folder, collapse)
    tokenizer = Tokenizer(str(folder))
    text = "a" + " " * 600_000 + "b"
    assert tokenizer.encode(text, max_tokens=4) == tokenizer.encode("a b")


def test_the_engine_tokenizer_is_compared_with_the_draft(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 400)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    draft = SpeculativeConfig(model=str(tmp_path), num_speculative_tokens=2)
    with pytest.raises(TokenizerMismatchError, match="2048 tokens in the target's vocabulary, 397 in the draft's"):
        load_tokenizer(EngineConfig(speculative_config=draft))
    config = EngineConfig(tokenizer=str(tmp_path), speculative_config=draft)
    loaded = load_tokenizer(config)
    assert loaded is not None
    assert loaded.vocab_size == 397
    assert load_tokenizer(EngineConfig(skip_tokenizer_init=True, speculative_config=draft)) is None
    unused = SpeculativeConfig(model=str(tmp_path / "missing"), num_speculative_tokens=0)
    assert load_tokenizer(EngineConfig(speculative_config=unused)) is not None
