"""Log probabilities and their text: a token's own bytes, and the offset at which it begins."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specrs.engine.text_window import TextWindow
from specrs.server.text_offsets import prompt_offsets
from specrs.tokenizer import Tokenizer
from tokenizers import AddedToken, Regex, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Backend

from .scripted import Script, ask

LETTERS = "ab é\n日🎉"
texts = st.text(LETTERS, min_size=1, max_size=12)
prompts = st.text(LETTERS, min_size=1, max_size=2)  # the decoder's context is 8 tokens, here whole characters
stops = st.sampled_from([None, "b", "é", "日🎉"])


def sentencepiece(folder: Path) -> Tokenizer:
    """Return a tokenizer like Llama 2's: words of a, b and a space, all else as single bytes, and a BOS token."""
    folder.mkdir()
    pieces = ["<eos>", "<s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581a", "ab"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = Backend(
        models.BPE(vocabulary, [("\u2581", "a"), ("a", "b")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens([AddedToken("<eos>"), AddedToken("<s>")])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer(str(folder))


@pytest.fixture(scope="module")
def tokenizers(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {"byte level": tokenizer, "sentencepiece": sentencepiece(tmp_path_factory.mktemp("sentencepiece") / "t")}


KINDS = ("byte level", "sentencepiece")


def own_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Return a token's bytes by the formats' definitions."""
    piece = tokenizer.backend.id_to_token(token_id)
    if tokenizer.source.endswith("/t"):
        return bytes([int(piece[3:5], 16)]) if piece.startswith("<0x") else piece.replace("\u2581", " ").encode()
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
    return bytes(byte_of[symbol] for symbol in piece)


def merged(events: list[dict[str, Any]]) -> tuple[str, dict[str, list[Any]]]:
    """Return text and log probabilities of a streamed completion."""
    choices = [choice for event in events for choice in event["choices"]]
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    return "".join(choice["text"] for choice in choices), {
        key: [value for part in parts for value in part[key]] for key in parts[0]
    }


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(text=texts)
def test_bytes_are_the_tokens_own(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = tokenizers[kind]
    body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2}
    said = ask(Script(tokenizer, text), tokenizer, "chat", body)
    content = said.answer["choices"][0]["logprobs"]["content"][:-1]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [bytes(item["bytes"]) for item in content] == [own_bytes(tokenizer, token) for token in ids]
    wanted = text if kind == "byte level" else " " + text
    assert b"".join(bytes(item["bytes"]) for item in content).decode() == wanted
    for item in content:
        assert item["top_logprobs"][0]["bytes"] == item["bytes"]
    streamed = ask(Script(tokenizer, text), tokenizer, "chat", {**body, "stream": True}).events
    told = [item for event in streamed for choice in event["choices"] for item in choice["logprobs"]["content"]]
    assert told[:-1] == content


def test_bytes_are_the_tokens_own_where_tokens_are_reported_as_ids(tokenizer: Tokenizer) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "return_tokens_as_token_ids": True}
    said = ask(Script(tokenizer, "é日"), tokenizer, "chat", body)
    content = said.answer["choices"][0]["logprobs"]["content"][:-1]
    assert content[0]["token"].startswith("token_id:")
    assert b"".join(bytes(item["bytes"]) for item in content) == "é日".encode()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30)
@given(prompt=prompts, text=texts, echo=st.booleans(), as_ids=st.booleans(), stop=stops)
def test_tokens_begin_where_the_text_says(
    tokenizers: dict[str, Tokenizer], kind: str, prompt: str, text: str, echo: bool, as_ids: bool, stop: str | None
) -> None:
    """Check text offsets: a token begins after the whole characters of the tokens before it."""
    tokenizer = tokenizers[kind]
    body: dict[str, Any] = {"prompt": prompt, "logprobs": 1, "max_tokens": 100, "echo": echo, "stop": stop}
    body |= {"return_tokens_as_token_ids": as_ids}
    (choice,) = ask(Script(tokenizer, text), tokenizer, "completions", body).answer["choices"]
    whole = tokenizer.encode(text, add_special_tokens=False)
    wanted = []
    if echo:
        ids = tokenizer.encode(prompt)
        for i in range(len(ids)):
            before = b"".join(own_bytes(tokenizer, token) for token in ids[:i] if token != 1 or kind == "byte level")
            size = len(before.decode(errors="ignore"))
            # sentencepiece's space before the text is not in it
            wanted.append(size - (kind == "sentencepiece" and size > 0))
    start = len(prompt) if echo else 0
    for i in range(len(whole) + 1):
        before = b"".join(own_bytes(tokenizer, token) for token in whole[:i])
        wanted.append(start + len(before.decode(errors="ignore")))
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == wanted[: len(offsets)]
    if stop is None or stop not in text:
        assert len(offsets) == len(wanted)
        assert start + len(text) <= len(choice["text"]) <= start + 1 + len(text)
    streamed = merged(ask(Script(tokenizer, text), tokenizer, "completions", {**body, "stream": True}).events)
    assert streamed == (choice["text"], choice["logprobs"])


def test_special_tokens_that_the_text_leaves_out_have_no_width(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("a"), 0, *tokenizer.encode("b")]
    for skip in (True, False):
        body = {"prompt": "x", "logprobs": 0, "max_tokens": len(ids), "ignore_eos": True, "skip_special_tokens": skip}
        (choice,) = ask(Script(tokenizer, ids), tokenizer, "completions", body).answer["choices"]
        assert choice["text"] == ("ab" if skip else "a<|endoftext|>b")
        assert choice["logprobs"]["text_offset"] == ([0, 1, 1] if skip else [0, 1, 14])


def test_prompts_whose_text_a_normalizer_changes(tmp_path: Path) -> None:
    """Check a prompt whose text a normalizer changes: the decoder gives back the composed letter, while the sent text
    has two characters for it."""
    backend = Backend(models.WordLevel({"<unk>": 0, "é": 1, "x": 2, " ": 3}, unk_token="<unk>"))
    backend.normalizer = normalizers.NFC()
    from tokenizers import pre_tokenizers

    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    tokenizer = Tokenizer(str(tmp_path))
    text = "e\u0301x x"
    assert prompt_offsets(tokenizer, tokenizer.encode(text), text) == [0, 2, 3, 4]


@pytest.mark.parametrize("kind", KINDS)
def test_long_texts_do_not_drift(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    """Check that offsets of long texts do not drift, beyond the characters kept for decoding, with whole characters and
    parts of them."""
    tokenizer = tokenizers[kind]
    text = "a ab 日本 b é🎉 \n" * 120 + " ab" * 600 + "é日🎉 " * 1100
    window = TextWindow(tokenizer.decoder, (), skip_special_tokens=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    found = [window.add(token) for token in ids]
    assert "".join(found) == text
    offsets = prompt_offsets(tokenizer, ids, text)
    assert [len("".join(found[:i])) for i in range(len(ids))] == offsets
    assert len(text[offsets[-1] :]) == len(found[-1])


def test_prompts_of_ids_that_end_within_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a日本", add_special_tokens=False)[:-1]
    body = {"prompt": ids, "logprobs": 0, "max_tokens": 20, "echo": True}
    (choice,) = ask(Script(tokenizer, "b a"), tokenizer, "completions", body).answer["choices"]
    prompt = tokenizer.decode(ids)
    assert choice["text"] == prompt + "b a"
    offsets = choice["logprobs"]["text_offset"]
    assert offsets[:1] == [0]
    assert offsets == sorted(offsets)
    assert offsets[len(ids) :] == [len(prompt) + place for place in (0, 1, 3)]
