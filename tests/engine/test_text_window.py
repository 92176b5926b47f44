"""A window of a text gives the same text as the whole, and reading a stream costs only what is new."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrs.core import Output
from specrs.engine import text_window
from specrs.engine.output_builder import OutputBuilder
from specrs.engine.request import FinishReason, Request
from specrs.engine.text_window import TextWindow
from specrs.errors import InvalidRequestError
from specrs.sampling import RequestOutputKind, SamplingParams
from specrs.tokenizer import Tokenizer

PIECES = ["a ", " ", "\n", "  b", "é", "日本", "🎉", "x🎉y", "def f(", "STOP", "ST", "<|endoftext|>"]
STOPS = [(), ("STOP",), ("日本", "TSTO", " b"), ("abababababX",)]


@given(
    st.lists(st.sampled_from(PIECES), max_size=40),
    st.lists(st.integers(0, 400), max_size=12),
    st.sampled_from(STOPS),
    st.integers(0, 12),
    st.booleans(),
)
def test_a_window_gives_the_stable_text(
    tokenizer: Tokenizer, texts: list[str], noise: list[int], stop: tuple[str, ...], min_tokens: int, skip: bool
) -> None:
    """Check the stable text of a window, also if tokens are bytes that are no valid text."""
    whole = tokenizer.encode("".join(texts), add_special_tokens=False)
    ids = [token for pair in zip(whole, [*noise, *whole], strict=False) for token in pair]
    prompt = tokenizer.encode("a 🎉")
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


class Counted:
    """An `Output` that counts the tokens which it decodes and the characters and tokens which it copies out.

    It has no method that copies the whole output.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.output = Output(*args, **kwargs)
        self.decoded = self.copied = 0

    def append(self, token_ids: list[int]) -> None:
        self.decoded += len(token_ids)
        self.output.append(token_ids)

    def stable_text_from(self, start: int) -> tuple[str, int]:
        text, end = self.output.stable_text_from(start)
        self.copied += len(text)
        return text, end

    def token_ids(self, start: int) -> list[int]:
        found = self.output.token_ids(start)
        self.copied += len(found)
        return found

    def __getattr__(self, name: str) -> Any:
        assert name in ("finish_reason", "stop", "num_tokens", "acceptance", "first_token_time", "finish_time", "error")
        return getattr(self.output, name)


@given(st.lists(st.sampled_from(["ab", "abab", "a", "X", "🎉"]), max_size=60), st.sampled_from(STOPS))
def test_each_token_of_a_window_is_decoded_once_and_each_character_copied_once(
    tokenizer: Tokenizer, texts: list[str], stop: tuple[str, ...]
) -> None:
    """Check that each token is decoded once and each character copied once, also if any token may begin a stop string,
    so that some text is always held back."""
    ids = tokenizer.encode("".join(texts), add_special_tokens=False)
    made: list[Counted] = []

    def make(*args: Any, **kwargs: Any) -> Counted:
        made.append(Counted(*args, **kwargs))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_window, "Output", make)
        window = TextWindow(tokenizer.decoder, (), skip_special_tokens=True, stop=stop)
        text = "".join(map(window.add, ids))
    (counted,) = made
    assert (counted.decoded, counted.copied) == (len(ids), len(text))


@given(
    st.lists(st.sampled_from(["ab", "abab", "a", "X", "🎉"]), max_size=60),
    st.sampled_from(STOPS),
    st.sampled_from([RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA]),
)
def test_each_character_of_a_stream_is_read_once(
    tokenizer: Tokenizer, texts: list[str], stop: tuple[str, ...], kind: RequestOutputKind
) -> None:
    ids = tokenizer.encode("".join(texts), add_special_tokens=False)
    request = Request(0, [1, 2], SamplingParams(stop=stop, output_kind=kind), decoder=tokenizer.decoder)
    counted = Counted(0, [1, 2], decoder=tokenizer.decoder, stop=list(stop))
    request.output = counted  # type: ignore[assignment]
    builder, told, text = OutputBuilder([request], None), [], ""
    for token in ids:
        counted.append([token])
        completion = builder.build().outputs[0]
        told += completion.token_ids if kind is RequestOutputKind.DELTA else completion.token_ids[len(told) :]
        text += completion.delta
    counted.output.finish(2)
    ending = builder.build().outputs[0]
    assert ending.finish_reason == FinishReason.LENGTH
    whole = counted.output
    assert (told, text + ending.delta) == (ids[: whole.num_tokens], whole.text)
    assert counted.copied == whole.num_tokens + len(whole.text)


def test_a_text_is_read_from_an_end_that_was_returned(tokenizer: Tokenizer) -> None:
    output = Output(0, (), decoder=tokenizer.decoder)
    output.append(tokenizer.encode("é", add_special_tokens=False))
    assert output.stable_text_from() == ("é", 2)
    assert output.stable_text_from(2) == ("", 2)
    for start in (1, 3):
        with pytest.raises(InvalidRequestError, match=f"start={start}: must be"):
            output.stable_text_from(start)
