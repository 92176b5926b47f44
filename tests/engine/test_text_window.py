"""A window of a text gives what the whole text gives, and stays short."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.test_logprob_texts import sentencepiece
from specrs.core import Output
from specrs.engine import text_window
from specrs.engine.text_window import TextWindow
from specrs.tokenizer import Tokenizer

PIECES = ["a ", " ", "\n", "  b", "é", "日本", "🎉", "x🎉y", "def f(", "STOP", "ST", "<|endoftext|>"]


@given(
    st.lists(st.sampled_from(PIECES), max_size=40),
    st.lists(st.integers(0, 400), max_size=12),
    st.sampled_from([(), ("STOP",), ("日本", "TSTO", " b")]),
    st.integers(0, 12),
    st.booleans(),
)
def test_a_window_gives_the_stable_text(
    tokenizer: Tokenizer, texts: list[str], noise: list[int], stop: tuple[str, ...], min_tokens: int, skip: bool
) -> None:
    """Also where the tokens are bytes that are no text, and where the text is dropped as often as it can be."""
    whole = tokenizer.encode("".join(texts), add_special_tokens=False)
    ids = [token for pair in zip(whole, [*noise, *whole], strict=False) for token in pair]
    prompt = tokenizer.encode("a 🎉")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_window, "_LONG", 0)
        for tokens in (whole, ids):
            output = Output(
                0, prompt, decoder=tokenizer.decoder, skip_special_tokens=skip, stop=list(stop), min_tokens=min_tokens
            )
            window = TextWindow(tokenizer.decoder, prompt, skip_special_tokens=skip, stop=stop)
            text = ""
            for token in tokens:
                output.append([token])
                if output.stop is not None:
                    break
                text += window.add(token)
                assert text == output.stable_text


def test_blanks_are_no_start_of_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sentencepiece decoder drops the blank before the first word that it sees."""
    monkeypatch.setattr(text_window, "_LONG", 0)
    tokenizer = sentencepiece(tmp_path / "t")
    ids = [token for count in range(9) for token in tokenizer.encode("a" + " " * count + "b", add_special_tokens=False)]
    window = TextWindow(tokenizer.decoder, (), skip_special_tokens=True)
    assert "".join(map(window.add, ids)) == tokenizer.decode(ids)


def test_invalid_bytes_are_no_start_of_a_text(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder gives up the first of many bytes that are no text while the last ones still begin a character."""
    monkeypatch.setattr(text_window, "_LONG", 0)
    emoji = tokenizer.encode("🎉", add_special_tokens=False)
    assert len(emoji) == 4
    for count in range(25, 40):
        window = TextWindow(tokenizer.decoder, (), skip_special_tokens=True)
        output = Output(0, (), decoder=tokenizer.decoder)
        ids = [*tokenizer.encode("abc"), *emoji[:1] * count, *emoji, *tokenizer.encode("abc")]
        output.append(ids)
        assert "".join(map(window.add, ids)) == output.text
        assert "🎉abc" in output.text


@pytest.mark.parametrize("stop", [(), ("a stop string", "zz")])
def test_a_window_stays_short(tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
    """Random tokens, many of them a part of a character."""
    chance, window = random.Random(0), TextWindow(tokenizer.decoder, (), skip_special_tokens=True, stop=stop)
    lengths = []
    for _ in range(20_000):
        window.add(chance.randrange(1, 2000))
        lengths.append(len(window._output.text))
    assert max(lengths) < 2000
